"""ModelCheckpoint: when to save, under which name, and which files to keep. The bytes are the trainer's business."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from callbacks.checkpoint_claims import claim, release, release_of_the_dead
from callbacks.checkpoint_files import PREEMPTED, absolute, check_name, fill_name, point, remove, why_unwritable
from callbacks.checkpoint_ranking import Ranking
from callbacks.errors import MisconfigurationException, nearest
from callbacks.loggers.plain import to_yaml

__all__ = ["ModelCheckpoint"]

class ModelCheckpoint(Ranking):
    """Save checkpoints during fit and keep the best, the newest, or all of them.

    The hooks only ask for a save; it happens at the boundary between two optimizer steps, after that step's numbers (also
    those of a validation at that step) were published. So a file's score, weights and counters belong to the same step.

    Args:
        dirpath: Folder of the files. Default: "<log_dir>/checkpoints", without a logger "<default_root_dir>/checkpoints".
        filename: Name with metric fields, as in "{epoch}-{val_loss:.2f}"; default "{epoch}-{step}", written "epoch=0-step=2".
            A "/" in a metric's name becomes "_"; one in `filename` itself makes a sub-folder.
        monitor: Metric that ranks the files. None keeps the newest. NaN ranks behind every number and is never best. A state is
            ranked by a number of its own step alone; saved between two validations it is no candidate for "best".
        verbose: Print a line for each save.
        save_last: True keeps a full copy of the newest state as "last.ckpt". "link" makes "last.ckpt" a relative symbolic link to
            the newest file; a state that is not among the best is then saved too, and removed when a newer one is there.
        save_top_k: How many files to keep; -1 all, 0 none. Without `monitor` only -1, 0 and 1 make sense.
        save_on_exception: Save when fit ends by an exception. One process only: with several, the other ranks may be
            anywhere, and a save needs all of them; a warning says so and nothing is saved.
        save_weights_only: Leave out optimizer, scheduler, callback and loop state. Such a file cannot be resumed from.
        mode: "min" or "max", whichever is better for `monitor`.
        auto_insert_metric_name: Write fields as "name=value" instead of "value".
        every_n_train_steps: Save each n optimizer steps. Excludes the next two; 0 turns it off.
        train_time_interval: Save when this much time has passed since the last such save, at the end of a step.
        every_n_epochs: Save each n epochs (default 1 when no other trigger is given).
        save_on_train_epoch_end: True: epoch saves are asked for at the end of training epochs; False: at the end of
            validation; None: at the end of validation when there is one.
        enable_version_counter: Append "-v1", "-v2", ... rather than overwrite a file that this run does not own. `last` is
            always overwritten: it is the newest save of the newest run.
        async_save: Take a copy of the state (on the host, kept for the next save) and write it while training goes on. The next save
            and the end of fit wait for it; links move and old files go when the new one is whole. An error comes up at the next
            boundary. Sharded checkpoints are written at once.

    Raises:
        MisconfigurationException: arguments that cannot work together, and in `setup` a folder that cannot be written.
    """

    FILE_EXTENSION = ".ckpt"
    CHECKPOINT_NAME_LAST = "last"
    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        async_save: bool = False,
    ) -> None:
        super().__init__(every_n_train_steps, train_time_interval, every_n_epochs, save_on_train_epoch_end)
        self.dirpath = None if dirpath is None else absolute(dirpath)
        self.filename = filename
        check_name(filename or "")
        self.verbose = verbose
        self.save_last = save_last
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.enable_version_counter = enable_version_counter
        self.async_save = async_save
        self._open_books(monitor, mode, save_top_k)
        if save_last not in (None, True, False, "link"):
            raise MisconfigurationException(f"ModelCheckpoint(save_last={save_last!r}): expected True, False, None or 'link'.")
        self._rest: dict[str, Any] | None = None  # what is still to be done of a save whose file stands
        self._last_global_step_saved = -1

    # -- state -----------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self.train_time_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
            "link_only_path": self._link_only_path,
            "due": self._due,
            "rest": self._rest,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the ranking of the run that is resumed; its files in another folder are ranked on, and never deleted."""
        for name in self.BOOKS:
            if name in state_dict:
                setattr(self, name, state_dict[name])
        self.best_k_models = dict(self.best_k_models)
        self._due = state_dict.get("due", False)
        then = state_dict.get("dirpath")
        if self.dirpath is None or then is None or absolute(then) == self.dirpath:
            self._link_only_path = state_dict.get("link_only_path", "")
            self._rest = state_dict.get("rest")
        else:
            self.last_model_path = ""  # `last` of this folder is still to come

    # -- hooks, besides those of the triggers ------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Settle the folder and try it. Collective.

        Raises:
            MisconfigurationException: the folder cannot be made or written; the message names it.
        """
        if stage != "fit":
            return
        if self.dirpath is None:
            self.dirpath = os.path.join(absolute(trainer.log_dir or trainer.default_root_dir), "checkpoints")
        self._last_global_step_saved = -1
        self._due, self._rest = False, None  # what an earlier fit left undone is not this one's
        if trainer.fast_dev_run:
            return
        trouble = trainer.broadcast(why_unwritable(self.dirpath) if trainer.is_global_zero else None)
        if trouble:
            raise MisconfigurationException(f"ModelCheckpoint(dirpath={self.dirpath!r}): cannot write there: {trouble}")
        fresh = trainer.is_global_zero and self.save_top_k and not trainer.ckpt_path and not (self.best_model_path or self.last_model_path)
        if fresh and os.path.isdir(self.dirpath) and os.listdir(self.dirpath):
            trainer.warn(f"ModelCheckpoint: {self.dirpath} is not empty; its files are kept.")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Do what the run that is resumed was killed over: the rest of a save, or one that was due behind another callback's."""
        self._asked_epoch = trainer.current_epoch
        if self._rest is not None and not self._skip(trainer):
            if trainer.is_global_zero and self._rest["path"]:
                release_of_the_dead(self._rest["path"])
            if not trainer.broadcast(trainer.is_global_zero and self._complete(trainer)):
                trainer.write_checkpoint(self._rest_of_save(trainer), weights_only=self.save_weights_only)
            self._rest = None
        if self._due and not self._skip(trainer) and not trainer.validation_owed:
            self._save(trainer)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        step = trainer.global_step
        if not self.save_on_exception or self._skip(trainer) or step in (0, self._last_global_step_saved):
            return
        if trainer.world_size > 1:
            warnings.warn("ModelCheckpoint(save_on_exception=True): not saved, a save needs all ranks.", stacklevel=2)
            return
        self._asked_epoch = trainer.current_epoch
        try:
            trainer.finish_saves()
            path = self._free_path(trainer, self._candidates(trainer), own=set())
            trainer.write_checkpoint([path], weights_only=self.save_weights_only, ended=lambda done: release(path))
            self._last_global_step_saved = step
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
        except Exception as error:  # the exception that ended the run must stay the one that is seen
            warnings.warn(f"ModelCheckpoint(save_on_exception=True): not saved: {error}", stacklevel=2)

    # -- the save itself, at the boundary, on all ranks -------------------------------------------------------------------

    def _save(self, trainer: Any) -> None:
        """Save what is due now, then move the pointer and prune. Collective.

        Raises:
            MisconfigurationException: `monitor` is not among the logged metrics though an epoch (and a validation) is over.
        """
        values = self._candidates(trainer)
        again = trainer.global_step == self._last_global_step_saved
        score = None if again else self._score(trainer, values)
        keep = not again and self._wanted(score)
        if again or not (keep or self.save_last):
            self._due = False
            return
        if trainer.is_global_zero:  # numbers ahead of a checkpoint are on the disk before it
            for logger in trainer.loggers:
                logger.save()
        self._write(trainer, values, score, keep)
        self._last_global_step_saved = trainer.global_step

    def _write(self, trainer: Any, values: dict[str, Any], score: torch.Tensor | None, keep: bool) -> None:
        """New file first, then the rest. The file itself says what the rest is, so that a resume from it does what a crash prevented."""
        link = self.save_last == "link"
        trainer.finish_saves()  # which names are free, and who is displaced, depends on how they ended
        stale = self._displaced(keep) if keep or link else set()
        if trainer.continues and os.path.basename(trainer.ckpt_path) == PREEMPTED:
            stale.add(absolute(trainer.ckpt_path))
        path = self._free_path(trainer, values, own=stale) if keep or link else ""
        books = self._books()
        stale |= self._name_last(values)
        self._due, self._rest = False, {"path": path, "stale": sorted(stale)}
        if path:
            self._enter(path, score, keep, stale)
        steps = [*([path] if path else []), *self._rest_of_save(trainer)]
        saved = f"Epoch {self._asked_epoch}, step {trainer.global_step}: {self._story(score, keep)} {path or self.last_model_path}"

        def ended(done: int) -> None:
            if path and trainer.is_global_zero:
                release(path)
            if path and not done:  # the books must not name a file that was not written
                self.__dict__.update(books)
                self._due, self._rest = True, None
            if done < len(steps):
                return
            self._rest = None
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.after_save_checkpoint(self)
            if self.verbose:
                trainer.print(saved)

        trainer.write_checkpoint(steps, weights_only=self.save_weights_only, background=self.async_save, ended=ended)

    def _rest_of_save(self, trainer: Any) -> list[Any]:
        """What comes after the file: move the link, then remove old files, then the full copy. A crash at any point leaves a whole newest one."""
        path, stale = self._rest["path"], set(self._rest["stale"])
        link = self.save_last == "link"
        steps: list[Any] = [partial(point, self.last_model_path, path)] if link else []
        steps += [partial(remove, old) for old in sorted(stale - {path, self.last_model_path}) if self._may_delete(trainer, old)]
        return [*steps, self.last_model_path] if self.save_last and not link else steps

    def _complete(self, trainer: Any) -> bool:
        """True when the save of the file that is resumed was not cut short: the folder looks as after its last step."""
        path, stale = self._rest["path"], set(self._rest["stale"]) - {self._rest["path"], self.last_model_path}
        try:
            if self.save_last == "link" and not os.path.samefile(self.last_model_path, path):
                return False
            if self.save_last is True:  # the full copy comes last
                return os.stat(self.last_model_path).st_mtime_ns >= os.stat(trainer.ckpt_path).st_mtime_ns
        except OSError:
            return False
        return not any(os.path.lexists(old) and self._may_delete(trainer, old) for old in stale)

    def _story(self, score: torch.Tensor | None, keep: bool) -> str:
        if score is None:
            return "saved"
        place = f"among the best {self.save_top_k}" if self.save_top_k > 0 else "kept"
        return f"{self.monitor} = {float(score):.5f} ({place if keep else 'not ' + place}; best {self.best_model_score}), saved"

    def _name_last(self, values: dict[str, Any]) -> set[str]:
        """Settle the path of `last`; return its former path if that changes."""
        if not self.save_last:
            return set()
        former = self.last_model_path
        name = self._fill(self.CHECKPOINT_NAME_LAST, values)
        self.last_model_path = os.path.join(str(self.dirpath), name + self.FILE_EXTENSION)
        return {former} - {"", self.last_model_path}

    def _free_path(self, trainer: Any, values: dict[str, Any], own: set[str]) -> str:
        """Return a path that overwrites nothing but files in `own`, and claim it. Collective: rank 0 looks, all get its answer."""
        path = self.format_checkpoint_name(values)
        if not self.enable_version_counter:
            return path
        if trainer.is_global_zero:
            version = self.STARTING_VERSION
            while path not in own and not claim(path):
                path = self.format_checkpoint_name(values, ver=version)
                version += 1
        return trainer.broadcast(path)

    def _may_delete(self, trainer: Any, path: str) -> bool:
        """Only files in our folder, and never one that the user named for this run to start from."""
        inside = os.path.commonpath([absolute(os.path.dirname(path)), str(self.dirpath)]) == self.dirpath
        return inside and (trainer.continues or not trainer.ckpt_path or absolute(trainer.ckpt_path) != absolute(path))

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Any) -> bool:
        """Return whether rank 0 finds a file or folder at `filepath`. Collective."""
        return trainer.broadcast(trainer.is_global_zero and os.path.exists(filepath))

    # -- names -----------------------------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """Return the path for `metrics` (with "epoch" and "step"); `ver` appends "-v<ver>"."""
        template = filename or self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        parts = [prefix, self._fill(template, metrics), None if ver is None else f"v{ver}"]
        name = self.CHECKPOINT_JOIN_CHAR.join(part for part in parts if part) + self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _fill(self, template: str, values: dict[str, Any]) -> str:
        def absent(name: str) -> int:
            if self._first(f"field {name}"):
                message = f"ModelCheckpoint: no metric {name!r} for the file name {template!r}, 0 is written.{nearest(name, values)}"
                warnings.warn(message, stacklevel=2)
            return 0

        return fill_name(template, values, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR, absent)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write `best_k_models` (path: score) as YAML, by default to "<dirpath>/best_k_models.yaml"."""
        target = os.fspath(filepath) if filepath is not None else os.path.join(str(self.dirpath), "best_k_models.yaml")
        with open(target, "w", encoding="utf-8") as file:
            file.write(to_yaml({path: float(score) for path, score in self.best_k_models.items()}))
