"""Logger: a callback that receives what is published. FileLogger: one that owns a folder, "<save_dir>/<name>/version_<n>"."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException
from callbacks.loggers.versions import next_version, note_checkpoints, version_of

__all__ = ["DummyExperiment", "FileLogger", "Logger", "rank_zero_experiment"]


class Logger(Callback):
    """Base class of loggers. Override `name`, `version`, `log_metrics` and, where it has a meaning, `log_hyperparams`.

    The run calls `publish` on rank 0 only; it hands on to `log_metrics`. One x axis everywhere: optimizer steps. A validation
    or test metric of the same name as one that training publishes is renamed: "loss" becomes "val_loss" or "test_loss".

    Which names training publishes may be known only after its first epoch (numbers of a whole epoch), so validation
    numbers of a possibly shared name wait until then; names beginning with "val" do not. A subclass needs no `super().__init__()`.
    """

    monitors = True  # on_train_epoch_end runs when the first epoch's training names are all known
    _train_names: frozenset[str] = frozenset()
    _waiting: bool = False
    _held: tuple[tuple[dict[str, float], int, str], ...] = ()

    # -- to override -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The experiment's name."""
        return None

    @property
    def version(self) -> int | str | None:
        """Number or name of this run among those of the experiment."""
        return None

    @property
    def save_dir(self) -> str | None:
        """Folder under which all experiments of this logger lie."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Folder of the experiment: save_dir/name."""
        return self.save_dir

    @property
    def log_dir(self) -> str | None:
        """Folder of this run."""
        return self.save_dir

    @property
    def group_separator(self) -> str:
        """What stands between the parts of a name that the logger shows as groups."""
        return "/"

    @property
    def experiment(self) -> Any:
        """The object underneath, for what this interface does not cover; on ranks other than 0 it swallows every call."""
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record numbers at an optimizer step."""
        raise NotImplementedError(f"{type(self).__name__} has to define log_metrics(metrics, step)")

    def log_hyperparams(self, params: Any, metrics: dict[str, float] | None = None) -> None:
        """Record hyper-parameters (a dict or a namespace, possibly nested), once, at the start of fit."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the model's graph."""

    # What follows may be called on any logger, from a step or a hook, and on all ranks: a logger that cannot show such things leaves them
    # out, ranks other than 0 do nothing, and nothing is kept of the sanity check. Without `step` it is the optimizer step that is being
    # taken, else the last one: that of the numbers which are logged at the same place.

    def log_image(self, key: str, images: Any, step: int | None = None) -> None:
        """Record an image (C x H x W), or several (N x C x H x W, or a list) as one grid: bytes, or numbers in [0, 1]."""

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Record a text; markdown where the logger can show it."""

    def log_histogram(self, key: str, values: Any, step: int | None = None) -> None:
        """Record how values (a tensor, an array, numbers) are distributed."""

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Record a figure of matplotlib, and close it."""

    def save(self) -> None:
        """Write out what is held in memory."""

    def finalize(self, status: str) -> None:
        """The run is over; `status` is "success", "failed" or "interrupted". Release handles; the logger may be used again."""
        self.settle()
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint was saved."""

    # -- what the run calls ----------------------------------------------------------------------------------------------

    def resolve(self, trainer: Any) -> None:
        """Settle where this logger writes, before anything is written. Collective."""

    def publish(self, metrics: dict[str, float], step: int, stage: str) -> None:
        """Receive the numbers of `stage` ("train", "validate", "test") at optimizer step `step`. Rank 0 only."""
        if stage == "train":
            self._train_names |= metrics.keys()
            self.log_metrics(metrics, step)
        elif self._waiting and any(n[:3] != "val" for n in metrics.keys() - self._train_names - {"epoch"}):
            self._held += ((metrics, step, stage),)
        else:
            self._publish_evaluation(metrics, step, stage)

    def settle(self, names: Any = ()) -> None:
        """Say that training publishes `names` besides those seen so far, and no others; numbers that waited for this are written."""
        self._train_names |= frozenset(names)
        self._waiting = False
        held, self._held = self._held, ()
        for metrics, step, stage in held:
            self._publish_evaluation(metrics, step, stage)

    def _publish_evaluation(self, metrics: dict[str, float], step: int, stage: str) -> None:
        shared = self._train_names - {"epoch"}
        prefix = "val" if stage == "validate" else stage
        self.log_metrics({f"{prefix}_{n}" if n in shared else n: v for n, v in metrics.items()}, step)

    # -- hooks -----------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)  # without the folder, which may be moved between two runs

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._waiting = True

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._waiting:
            self.settle()


class FileLogger(Logger):
    """A logger with a folder of its own, chosen once by rank 0.

    Args:
        save_dir: Folder of all experiments. Default: the trainer's `default_root_dir`.
        name: Name of the experiment, a sub-folder; "" or None for none.
        version: Number (folder "version_<n>") or folder name of the run; default: the next free number, or that of the run that a fit goes on
            with by `ckpt_path="auto"` or "last".
        prefix: Put in front of every metric's name, with a "-" (LOGGER_JOIN_CHAR).
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        self._save_dir = None if save_dir is None else os.path.abspath(os.path.expanduser(os.fspath(save_dir)))
        self._name = name or ""
        self._version = version
        self._prefix = prefix
        self._writes = True  # False on ranks other than 0
        self._trainer: Any = None  # a weak reference to the trainer of this run

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}

    @property
    def name(self) -> str:
        return self._name

    @property
    def save_dir(self) -> str | None:
        return self._save_dir

    @property
    def root_dir(self) -> str | None:
        return None if self._save_dir is None else os.path.join(self._save_dir, self._name).rstrip(os.sep)

    @property
    def version(self) -> int | str | None:
        """Settled at its first use; None before a run where `save_dir` is left to the trainer."""
        if self._version is None and self.root_dir is not None:
            self._version = next_version(self.root_dir)
        return self._version

    @property
    def log_dir(self) -> str | None:
        """Folder of this run; None before a run where `save_dir` is left to the trainer."""
        if self.root_dir is None:
            return None
        version = self.version
        return os.path.join(self.root_dir, version if isinstance(version, str) else f"version_{version}").rstrip(os.sep)

    def resolve(self, trainer: Any) -> None:
        """Choose the next free version and make its folder, so that a run started at the same moment takes another. Collective.

        A fit that goes on by "auto" or "last" goes on in the version of the run whose checkpoint that is.

        Raises:
            MisconfigurationException: the folder cannot be made or written; the message names it.
        """
        self._writes = trainer.is_global_zero
        self._trainer = weakref.ref(trainer)
        save_dir, version, trouble = trainer.broadcast(self._claim(trainer) if self._writes else None)
        if trouble:
            raise MisconfigurationException(f"{type(self).__name__}: {trouble}")
        self._save_dir, self._version = save_dir, version

    def _claim(self, trainer: Any) -> tuple[str, int | str | None, str]:
        if self._save_dir is None:
            self._save_dir = os.path.abspath(trainer.default_root_dir)
        folder = str(self.root_dir)
        if self._version is None and trainer.continues and trainer.state.fn == "fit":  # a test knows no names of training, nor its steps
            others = [one for one in trainer.loggers if one is not self and isinstance(one, FileLogger) and one._version is not None]
            self._version = version_of(folder, str(trainer.ckpt_path), type(self).__name__, {one.version for one in others if one.root_dir == folder})
        try:
            os.makedirs(folder, exist_ok=True)
            while self._version is None:
                number = next_version(folder)
                try:
                    os.mkdir(os.path.join(folder, f"version_{number}"))
                    self._version = number
                except FileExistsError:  # another run was faster
                    continue
            folder = str(self.log_dir)
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            return self._save_dir, self._version, f"cannot write to {folder!r}: {error.strerror or error}"
        return self._save_dir, self._version, ""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        super().on_fit_start(trainer, module)
        if self._writes and self.log_dir is not None and os.path.isdir(self.log_dir):
            self._continue_after(trainer.global_step)

    def _continue_after(self, step: int) -> None:
        """Forget what an earlier run left in this folder for later steps than `step`: this run does them again."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Write out, so that a run resumed from that checkpoint finds every number before it, and this folder, too."""
        self.save()
        place = getattr(checkpoint_callback, "dirpath", None)
        if self._writes and place and isinstance(self._version, int) and os.path.isdir(str(self.log_dir)):
            note_checkpoints(os.path.join(str(self.root_dir), f"version_{self._version}"), place, type(self).__name__)

    def _here(self, step: int | None, last: int = 0) -> int | None:
        """Return the step at which something logged now, by hand, is to be recorded; None where it is not to be. Outside a run it is `last`."""
        trainer = self._trainer() if self._trainer is not None else None
        if not self._writes or (trainer is not None and trainer.sanity_checking):
            return None
        return int(step) if step is not None else last if trainer is None else trainer.logging_step

    def _label(self, name: str) -> str:
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name

    def _named(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Flatten dicts of numbers ("outer/inner") and put the prefix in front."""
        flat: dict[str, Any] = {}
        for name, value in metrics.items():
            label = self._label(name)
            if isinstance(value, dict):
                flat.update({f"{label}{self.group_separator}{inner}": number for inner, number in value.items()})
            else:
                flat[label] = value
        return flat


class DummyExperiment:
    """Stands for a logger's experiment on ranks other than 0: has every method, and none does anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> DummyExperiment:
        return self

    def __getitem__(self, key: Any) -> DummyExperiment:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate the `experiment` of a logger of your own, below `@property`: ranks other than 0 get a DummyExperiment."""

    @wraps(function)
    def experiment(self: Any) -> Any:
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return function(self) if alone or torch.distributed.get_rank() == 0 else DummyExperiment()

    return experiment
