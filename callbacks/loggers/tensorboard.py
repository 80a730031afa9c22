"""TensorBoardLogger: one event file a run, with the hyper-parameters and their real results in it."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any

from callbacks.binning import Histogram, histogram
from callbacks.errors import MisconfigurationException
from callbacks.loggers import tb_files
from callbacks.loggers.base import DummyExperiment, FileLogger
from callbacks.loggers.config_text import describe
from callbacks.loggers.pictures import picture
from callbacks.loggers.plain import as_dict, flatten, to_yaml
from callbacks.loggers.tb_graph import draw_graph
from callbacks.loggers.tb_layout import Charts, check_layout, tag_of
from callbacks.monitor import rank_of

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(FileLogger):
    """Write published numbers for TensorBoard to "<save_dir>/<name>/version_<n>".

    A validation (test) metric of the same name as a training metric keeps its tag and goes to the sub-run "<log_dir>/val" ("test"), so that
    TensorBoard draws both lines into one chart. Everything else of a run, hyper-parameters included, is in one event file, also when it was
    resumed (with the same `version`). The figures of DeviceStatsMonitor are called "system/...", as TensorBoard sorts by name.

    The HParams tab shows the hyper-parameters with the metrics' last values, and as "best/<metric>", written at the end, the best ones of what a
    ModelCheckpoint or an EarlyStopping monitors, of validation losses and of what `best` names. No placeholder values are ever written.

    Args:
        save_dir, name, version, prefix: see FileLogger; name defaults to "runs".
        log_graph: Record the module's graph where it has an `example_input_array`.
        default_hp_metric: Accepted for compatibility; a metric "hp_metric" appears if the module logs one.
        sub_dir: A further folder below the version's.
        layout: The charts of the Custom Scalars tab. True: losses, metrics, learning rates, gradient norms, throughput, memory and ranks, as far
            as the run publishes them. False for none, or a dict as SummaryWriter.add_custom_scalars takes it.
        log_config: Show the trainer's settings, the hyper-parameters and the model in the Text tab.
        best: Further metrics whose best value is kept: name -> "min" or "max".
        max_queue, flush_secs: Events kept in memory, and the longest time they are kept, in seconds.
        kwargs: Further arguments of torch.utils.tensorboard.SummaryWriter.

    Raises:
        MisconfigurationException: the package tensorboard is not installed; `layout` or `best` is something else.
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
        layout: bool | Mapping[str, Any] = True,
        log_config: bool = True,
        best: Mapping[str, str] | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise MisconfigurationException("TensorBoardLogger needs the package tensorboard: pip install tensorboard")
        check_layout(layout)
        if not set((best or {}).values()) <= {"min", "max"}:
            raise MisconfigurationException(f'best={best!r} must say "min" or "max" for each name.')
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.path.expanduser(os.fspath(sub_dir))
        self._writer_args = {"max_queue": max_queue, "flush_secs": flush_secs, **kwargs}
        self._writers: dict[str, Any] = {}  # folder -> SummaryWriter, open
        self._files: dict[str, list[str]] = {}  # folder -> the event files of this run, which become one
        self._earlier: dict[str, int] = {}  # event files of the run that is resumed -> bytes
        self._fits = self._trained = False  # since the writers were opened there was a fit; and it published
        self.hparams: dict[str, Any] = {}
        self._layout = layout
        self._log_config = log_config
        self._charts = Charts(self._label(""))
        self._laid_out = False  # the charts so far are in the file
        self._wanted = dict(best or {})
        self._modes: dict[str, str] = {}
        self._best: dict[str, dict[str, float]] = {"train": {}, "validate": {}}
        self._last_step = 0
        self._epoch_step = -1  # the newest step with an "epoch" point

    def __getstate__(self) -> dict[str, Any]:
        for writer in self._writers.values():
            writer.flush()
        return {**super().__getstate__(), "_writers": {}, "_fits": False, "_trained": False}

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

            before = set(tb_files.event_files(folder))
            self._writers[folder] = SummaryWriter(log_dir=folder, **self._writer_args)
            self._files.setdefault(folder, []).extend(set(tb_files.event_files(folder)) - before)
        return self._writers[folder]

    # -- what the run calls ----------------------------------------------------------------------------------------------

    def resolve(self, trainer: Any) -> None:
        super().resolve(trainer)
        monitors = [c for c in trainer.callbacks if getattr(c, "monitor", None) and getattr(c, "mode", None)]
        self._modes = {**self._wanted, **{c.monitor: c.mode for c in monitors}}

    def publish(self, metrics: dict[str, float], step: int, stage: str) -> None:
        self._last_step = max(self._last_step, int(step))
        for name, value in metrics.items() if stage in self._best else ():
            mode = self._modes.get(name) or ("min" if stage == "validate" and "loss" in name.lower() else None)
            if mode is not None:
                key, best = rank_of(float(value), mode), self._best[stage]
                if not key[0] and (name not in best or key < rank_of(best[name], mode)):
                    best[name] = float(value)
        self._trained |= stage == "train"
        super().publish(metrics, step, stage)

    def _continue_after(self, step: int) -> None:
        folder, newest = str(self.log_dir), []
        ends = [tb_files.SESSION_END, *(self._label(f"best/{name}") for numbers in self._best.values() for name in numbers)]  # its end gives them anew
        for place in (folder, os.path.join(folder, "val"), os.path.join(folder, "test")):
            known = self._files.get(place, [])
            in_use = known[-1:] if place in self._writers else []  # something was logged by hand ahead of the fit
            earlier = [path for path in tb_files.event_files(place) if path not in in_use]
            for path in earlier:
                newest.append(tb_files.forget(path, step, ends))
            if earlier:
                self._earlier.update({path: os.path.getsize(path) for path in earlier if path not in known})
                self._files[place] = earlier + in_use
                self._writer_at(place).file_writer.add_event(tb_files.start_after(step), step + 1)  # for a reader that has read them
        self._fits, self._last_step, self._epoch_step, self._laid_out = True, max(newest, default=step), -1, False

    def _publish_evaluation(self, metrics: dict[str, float], step: int, stage: str) -> None:
        both = {n: v for n, v in metrics.items() if self._shared(n)}
        self.log_metrics({n: v for n, v in metrics.items() if n not in both}, step)
        if both and self._writes:
            self._write(self._writer_of(stage), both, step)

    def _shared(self, name: str) -> bool:
        """True for a name under which training publishes, too."""
        return name in self._train_names and name != "epoch"

    def _writer_of(self, stage: str) -> Any:
        """The writer of the sub-run of validation or test."""
        return self._writer_at(os.path.join(str(self.log_dir), "val" if stage == "validate" else stage))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if metrics and self._writes:
            self._last_step = self._last_step if step is None else max(self._last_step, int(step))
            self._write(self.experiment, metrics, self._last_step if step is None else step)

    def _write(self, writer: Any, metrics: dict[str, float], step: int) -> None:
        if self._epoch_step == step:  # several publications at one step: one point is enough
            metrics = {name: value for name, value in metrics.items() if name != "epoch"}
        elif "epoch" in metrics:
            self._epoch_step = step
        named = self._named(metrics)
        writer.file_writer.add_summary(tb_files.scalars(named), int(step))
        if self._layout is True and (self._charts.add(named) or not self._laid_out):
            self._laid_out = True
            self._write_layout(self._charts.layout(), step)

    def _write_layout(self, layout: Any, step: int) -> None:
        from torch.utils.tensorboard.summary import custom_scalars

        self.experiment.file_writer.add_summary(custom_scalars(layout), int(step))  # TensorBoard reads the newest

    def log_hyperparams(self, params: Any, metrics: dict[str, float] | None = None) -> None:
        """Record hyper-parameters in the event file and in hparams.yaml; `metrics`, if given, as scalars at step 0. Empty: nothing."""
        if not self._writes or not params:
            return
        self.hparams.update(as_dict(params))
        self._forget_hparams()
        self.experiment.file_writer.add_summary(tb_files.session_start(flatten(self.hparams)), 0)
        self.log_metrics(metrics or {}, 0)
        with open(os.path.join(str(self.log_dir), self.NAME_HPARAMS_FILE), "w", encoding="utf-8") as file:
            file.write(to_yaml(self.hparams))

    def _forget_hparams(self) -> None:
        """Take out of the files of an earlier run, or fit, what the new record replaces."""
        folder = str(self.log_dir)
        known = self._files.get(folder, [])
        for path in known[: len(known) - (folder in self._writers)]:
            tb_files.forget_hparams(path)
            if path in self._earlier:
                self._earlier[path] = os.path.getsize(path)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        super().on_fit_start(trainer, module)
        self.log_graph(module)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Write what describes the run, now that nothing is in its way any more: at its first step, so that a resume there replaces it."""
        if not self._writes:
            return
        step = trainer.global_step + 1
        if not isinstance(self._layout, bool):
            self._write_layout(self._layout, step)
        if self._log_config:
            for name, text in describe(trainer, module, self.hparams).items():
                self.log_text(f"config/{name}", text, step)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph, when `log_graph` was asked for and an input is known (`model.example_input_array` or `input_array`).

        Where forward fails on it, or cannot run in one process, a warning says so.
        """
        if not self._log_graph or not self._writes:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if example is None:
            warnings.warn("TensorBoardLogger(log_graph=True): the module has no example_input_array.", stacklevel=2)
            return
        trainer = self._trainer() if self._trainer is not None else None
        precision = None if trainer is None else trainer.precision_plugin
        reason = draw_graph(self.experiment, model, example if precision is None else precision.convert_input(example))
        if reason is not None:
            warnings.warn(f"TensorBoardLogger(log_graph=True) shows no graph: {reason}", stacklevel=2)

    # -- images, texts and the like, by hand -----------------------------------------------------------------------------

    def log_image(self, key: str, images: Any, step: int | None = None) -> None:
        """Show an image, or several as one grid, in the Images tab.

        Args:
            key: its name there.
            images: a tensor or array of C x H x W or N x C x H x W with 1 or 3 channels, or a list of the former of one size: bytes, or numbers
                in [0, 1]; where others occur, all are brought there by one shift and scale. Images under 64 pixels are enlarged.
            step: see Logger.

        Raises:
            MisconfigurationException: for other shapes.
        """
        self._show("add_image", key, step, lambda: (picture(key, images),))

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Show markdown in the Text tab."""
        here = self._here(step, self._last_step)
        if here is not None:
            self.experiment.file_writer.add_summary(tb_files.text(self._label(key), text), here)

    def log_histogram(self, key: str, values: Any, step: int | None = None) -> None:
        """Show in the Histograms tab how values (a tensor of any size, counted where it is; an array; numbers) are distributed.

        Only finite ones count; where there are none, nothing is written.
        """
        if self._here(step) is None:
            return
        h = values if isinstance(values, Histogram) else histogram(values)
        if h is not None:
            self._show("add_histogram_raw", key, step, lambda: (h.low, h.high, h.number, h.total, h.squares, h.limits, h.counts))

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Show a figure of matplotlib (or a list of them) in the Images tab, and close it."""
        self._show("add_figure", key, step, lambda: (figure,))

    def _label(self, name: str) -> str:
        return super()._label(tag_of(name))

    def _show(self, method: str, key: str, step: int | None, values: Any) -> None:
        here = self._here(step, self._last_step)
        if here is not None:
            getattr(self.experiment, method)(self._label(key), *values(), global_step=here)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def finalize(self, status: str) -> None:
        """Write the best values and how the run ended, and close the files."""
        self.settle()
        success = status in ("success", "finished")
        if self._writers and (self._trained or (self._fits and success)):  # one that resumes at its end owes what a killed one did not write
            self._write_best(self._last_step if success else self._last_step + 1)  # where a run that is resumed takes it back
            if self.hparams:
                self.experiment.file_writer.add_summary(tb_files.session_end(success), self._last_step)
        self._close()

    def _write_best(self, step: int) -> None:
        """Write the best of training and validation, each where its numbers are."""
        apart = {name: value for name, value in self._best["validate"].items() if self._shared(name)}
        here = {**self._best["train"], **{name: value for name, value in self._best["validate"].items() if name not in apart}}
        if here:
            self._write(self.experiment, {f"best/{name}": value for name, value in here.items()}, step)
        if apart:
            self._write(self._writer_of("validate"), {f"best/{name}": value for name, value in apart.items()}, step)

    def _close(self) -> None:
        """Close, and join what a later use of this logger wrote (a resumed run, a test after a fit) to the run's first event file."""
        for folder, writer in self._writers.items():
            writer.close()
            mine = [path for path in tb_files.in_order(self._files[folder]) if os.path.exists(path) and not self._grown(path)]
            if len(mine) > 1:
                tb_files.join(mine[0], mine[1:])
            self._files[folder] = mine[:1]
        self._writers, self._fits, self._trained, self._earlier = {}, False, False, {}

    def _grown(self, path: str) -> bool:
        """True for an earlier event file that another process writes at the same time: it is left alone."""
        return os.path.getsize(path) != self._earlier.get(path, os.path.getsize(path))

    # -- state -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"best": {stage: dict(numbers) for stage, numbers in self._best.items()}, "train_names": sorted(self._train_names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._train_names |= frozenset(state_dict.get("train_names", ()))
        for stage, numbers in state_dict.get("best", {}).items():
            if stage in self._best and isinstance(numbers, dict):  # files of earlier versions did not tell the stages apart
                self._best[stage] = dict(numbers)
