"""TensorBoardLogger: one event file a run, with the hyper-parameters and their real results in it."""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import time
import warnings
from typing import Any

import torch

from callbacks.errors import MisconfigurationException
from callbacks.loggers.base import DummyExperiment, FileLogger
from callbacks.loggers.plain import as_dict, flatten, to_yaml
from callbacks.monitor import rank_of

__all__ = ["TensorBoardLogger"]

_EVENTS = "events.out.tfevents"


class TensorBoardLogger(FileLogger):
    """Write published numbers for TensorBoard to "<save_dir>/<name>/version_<n>".

    A validation (test) metric of the same name as a training metric keeps its tag and goes to the sub-run "<log_dir>/val" ("test"), so that
    TensorBoard draws both lines into one chart. Everything else of a run, hyper-parameters included, is in one event file.

    The HParams tab shows the hyper-parameters with the metrics' last values. For a metric that a ModelCheckpoint or an EarlyStopping
    monitors, "best/<metric>" is written at the end. No placeholder values are ever written.

    Args:
        save_dir, name, version, prefix: see FileLogger; name defaults to "runs".
        log_graph: Record the module's graph where it has an `example_input_array`.
        default_hp_metric: Accepted for compatibility; a metric "hp_metric" appears if the module logs one.
        sub_dir: A further folder below the version's.
        max_queue, flush_secs: Events kept in memory, and the longest time they are kept, in seconds.
        kwargs: Further arguments of torch.utils.tensorboard.SummaryWriter.

    Raises:
        MisconfigurationException: the package tensorboard is not installed.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "runs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise MisconfigurationException("TensorBoardLogger needs the package tensorboard: pip install tensorboard")
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.path.expanduser(os.fspath(sub_dir))
        self._writer_args = {"max_queue": max_queue, "flush_secs": flush_secs, **kwargs}
        self._writers: dict[str, Any] = {}  # folder -> SummaryWriter, open
        self._files: dict[str, list[str]] = {}  # folder -> the event files this logger made there
        self._trained = False  # a fit published since the writers were opened
        self.hparams: dict[str, Any] = {}
        self._modes: dict[str, str] = {}
        self._best: dict[str, float] = {}
        self._last_step = 0
        self._epoch_step = -1  # the newest step with an "epoch" point

    def __getstate__(self) -> dict[str, Any]:
        for writer in self._writers.values():
            writer.flush()
        return {**self.__dict__, "_writers": {}, "_trained": False}

    @property
    def log_dir(self) -> str | None:
        folder = super().log_dir
        return folder if folder is None or self._sub_dir is None else os.path.join(folder, self._sub_dir)

    @property
    def experiment(self) -> Any:
        """The torch.utils.tensorboard.SummaryWriter of this run, for images, histograms and the like."""
        return self._writer_at(str(self.log_dir or os.getcwd())) if self._writes else DummyExperiment()

    def _writer_at(self, folder: str) -> Any:
        if folder not in self._writers:
            from torch.utils.tensorboard import SummaryWriter  # optional, and too slow to load with the package

            before = _event_files(folder)
            self._writers[folder] = SummaryWriter(log_dir=folder, **self._writer_args)
            self._files.setdefault(folder, []).extend(_event_files(folder) - before)
        return self._writers[folder]

    # -- what the run calls ----------------------------------------------------------------------------------------------

    def resolve(self, trainer: Any) -> None:
        super().resolve(trainer)
        monitors = [c for c in trainer.callbacks if getattr(c, "monitor", None) and getattr(c, "mode", None)]
        self._modes = {c.monitor: c.mode for c in monitors}

    def publish(self, metrics: dict[str, float], step: int, stage: str) -> None:
        self._last_step = max(self._last_step, int(step))
        for name in self._modes.keys() & metrics.keys() if stage != "test" else ():
            value = float(metrics[name])
            key = rank_of(value, self._modes[name])
            if not key[0] and (name not in self._best or key < rank_of(self._best[name], self._modes[name])):
                self._best[name] = value
        self._trained |= stage == "train"
        super().publish(metrics, step, stage)

    def _continue_after(self, step: int) -> None:
        folder = str(self.log_dir)
        for place in (folder, os.path.join(folder, "val"), os.path.join(folder, "test")):
            if _event_files(place):
                from tensorboard.compat.proto.event_pb2 import Event, SessionLog

                start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))  # readers drop what is not before it
                self._writer_at(place).file_writer.add_event(start, step + 1)

    def _publish_evaluation(self, metrics: dict[str, float], step: int, stage: str) -> None:
        shared = self._train_names - {"epoch"}
        self.log_metrics({n: v for n, v in metrics.items() if n not in shared}, step)
        both = {n: v for n, v in metrics.items() if n in shared}
        if both and self._writes:
            self._write(self._writer_at(os.path.join(str(self.log_dir), "val" if stage == "validate" else stage)), both, step)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if metrics and self._writes:
            self._last_step = self._last_step if step is None else max(self._last_step, int(step))
            self._write(self.experiment, metrics, self._last_step if step is None else step)

    def _write(self, writer: Any, metrics: dict[str, float], step: int) -> None:
        if self._epoch_step == step:  # several publications at one step: one point is enough
            metrics = {name: value for name, value in metrics.items() if name != "epoch"}
        elif "epoch" in metrics:
            self._epoch_step = step
        from tensorboard.compat.proto.summary_pb2 import Summary

        # one event for all numbers: a third of the time of add_scalar() for each
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in self._named(metrics).items()]
        writer.file_writer.add_summary(Summary(value=values), int(step))

    def log_hyperparams(self, params: Any, metrics: dict[str, float] | None = None) -> None:
        """Record hyper-parameters in the event file and in hparams.yaml; `metrics`, if given, as scalars at step 0. Empty: nothing."""
        if not self._writes or not params:
            return
        self.hparams.update(as_dict(params))
        self.experiment.file_writer.add_summary(_session_start(flatten(self.hparams)), 0)
        self.log_metrics(metrics or {}, 0)
        with open(os.path.join(str(self.log_dir), self.NAME_HPARAMS_FILE), "w", encoding="utf-8") as file:
            file.write(to_yaml(self.hparams))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        super().on_fit_start(trainer, module)
        self.log_graph(module)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph, when `log_graph` was asked for and an input is known (`model.example_input_array` or `input_array`)."""
        if not self._log_graph or not self._writes:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if example is None:
            warnings.warn("TensorBoardLogger(log_graph=True): the module has no example_input_array.", stacklevel=2)
            return
        traced = copy.deepcopy(model).eval()  # tracing runs the model, which must not move its statistics
        traced.__dict__["_trainer"] = model.__dict__.get("_trainer")  # it also looks at every attribute
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.experiment.add_graph(traced, example)

    def save(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def finalize(self, status: str) -> None:
        """Write the best values and how the run ended, and close the files."""
        self.settle()
        success = status in ("success", "finished")
        if self._writers and self._trained:
            best = {f"best/{name}": value for name, value in self._best.items()}
            self.log_metrics(best, self._last_step if success else self._last_step + 1)  # where a run that is resumed takes it back
        if self._writers and self._trained and self.hparams:
            self.experiment.file_writer.add_summary(_session_end(success), self._last_step)
        self._close()

    def _close(self) -> None:
        """Close, and join what a later use of this logger wrote (a test after a fit) to the run's first event file."""
        for folder, writer in self._writers.items():
            writer.close()
            first, *later = [path for path in self._files[folder] if os.path.exists(path)] or [""]
            for path in later:  # event files are sequences of records, so appending one to another is a valid file
                with open(first, "ab") as whole, open(path, "rb") as part:
                    shutil.copyfileobj(part, whole)
                os.remove(path)
            self._files[folder] = [first] if first else []
        self._writers, self._trained = {}, False

    # -- state -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = dict(state_dict.get("best", {}))


def _event_files(folder: str) -> set[str]:
    return {os.path.join(folder, n) for n in os.listdir(folder) if n.startswith(_EVENTS)} if os.path.isdir(folder) else set()


# The records of TensorBoard's HParams tab (tensorboard/plugins/hparams/plugin_data.proto). An "experiment" record is left out on purpose:
# TensorBoard takes the first that it finds as the table's columns for all runs, and without any it shows what the runs really have.


def _session_start(flat: dict[str, bool | int | float | str]) -> Any:
    """The hyper-parameters of a run, and when it began."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in flat.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(info.hparams[name], kind, value)
    return _summary(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info))


def _session_end(success: bool) -> Any:
    """How and when a run ended."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.Status.Value("STATUS_SUCCESS" if success else "STATUS_FAILURE")
    info = plugin_data_pb2.SessionEndInfo(end_time_secs=time.time(), status=status)
    return _summary(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _summary(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
