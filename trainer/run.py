"""Run: everything that changes during one fit, validation, test or prediction. Made in the process that trains, never pickled.

The loops read and advance it; hooks only leave wishes here (`should_stop`, `requests`), which `boundary` fulfils.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trainer.activation import checkpointed
from trainer.boundary import Boundary
from trainer.compiling import compiled
from trainer.datamodule import DataModule
from trainer.dist import Dist
from trainer.errors import SIGTERMException
from trainer.hooks import Callback, HookTable, overrides
from trainer.leaving import Leaving
from trainer.loaders import Loaders
from trainer.metrics import Collector
from trainer.module import TrainModule
from trainer.optim import LRSchedulerConfig, StepOptimizer
from trainer.profiling import Profiling
from trainer.progress import Progress
from trainer.publishing import Publishing
from trainer.record import Recorder, Silent
from trainer.restarts import Restarts
from trainer.saving import Saving
from trainer.seed import derive, rng_state, seed_everything, seed_rngs, set_rng_state
from trainer.settings import Settings, apply_global_switches
from trainer.signals import Notice
from trainer.stall import Watch
from trainer.stepping import Stepping
from trainer.strategies.batchnorm import synced_batchnorm
from trainer.world import World

__all__ = ["Run"]


class Run(Boundary, Leaving, Profiling, Publishing, Restarts, Saving, Stepping):
    """The live state of one run. `open` makes it ready, `close` gives everything back."""

    def __init__(self, trainer: Any, world: World, job: Any) -> None:
        self.trainer, self.world, self.job = trainer, world, job
        self.settings: Settings = trainer.settings
        self.fn: str = job.fn
        self.stage: str = "train" if job.fn == "fit" else job.fn
        self.module: TrainModule = job.module
        self.datamodule = job.datamodule
        self.callbacks = list(trainer.callbacks)
        self.strategy, self.precision = trainer.strategy, trainer.precision_plugin
        self.device = self.strategy.device(self.settings.devices, world.local_rank)
        self.place, self.stream = self.strategy.data_place(world), self.strategy.stream(world)
        self.records = self.strategy.records(world) if self.place[1] < world.world_size else None  # None: every rank's numbers count
        self.dist = Dist(world, self.device.type, self.settings.timeout)
        self.progress: Progress = trainer.results.progress
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_optimizers: list[StepOptimizer] = []
        self.schedulers: list[LRSchedulerConfig] = []
        self.accumulate = self.settings.accumulate_grad_batches
        self.split = 1  # into how many parts a batch is cut, since memory ran out
        self.recorder: Recorder | None = None
        self.watch: Watch | None = None
        self.notice = Notice(SIGTERMException)
        self.whole_validation = self.place[1] < world.world_size  # ranks need each other in it, so it is not cut short
        self._told: set[str] = set()
        self._begin()
        if job.fn == "fit":
            self.position = trainer.results.position

    def _begin(self) -> None:
        """Set what belongs to the course of this run alone: a probe inside it has that anew, and all else in common with it."""
        self.should_stop = False
        self.requests: list[Callable[[Any], None]] = []
        self.asked: Callable[[], int] | None = None  # what comes of the wishes that the ranks told each other ahead of the boundary
        self.wished_late = True  # a hook that may wish to stop ran since then
        self.done = False
        self.whole = True  # weights, counters, data position, sums and RNG agree, and no hook of the step is still to come
        self.failing = False
        self.epoch_pass: Any = None
        self.position: Any = None
        self.saved_rng: dict[str, Any] | None = None
        self.saved_sums: dict[str, Any] | None = None
        self.step_id = 0  # the step that is being taken, counted from 1
        self.manual_weight: float | None = None  # of this rank's batch, in manual optimization; None for 1
        self.published_step = 0
        self.first_step = True
        self.skip_epoch = False
        self.last_group = False
        self.rewrap = False  # a hook has changed which parameters are trained
        self.evaluated: Any = None  # the pass over the data of the last validation, test or prediction
        self.guard: Any = None  # judges each step, where `bad_loss` or `recover_oom` ask for it
        self.sanity_checked = False
        self.known_names: set[str] = set()
        self.started = time.monotonic()
        self._undo: list[Callable[[], None]] = []
        self._finished = False

    # -- opening and closing -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Join the other ranks and bring module, loaders, optimizers and callbacks to where the loop can begin. Collective."""
        accelerator = self.settings.devices.accelerator
        accelerator.setup_device(self.device)
        self._undo.append(accelerator.teardown)
        self.dist.open()
        self._undo.append(self._leave_group)
        self.strategy.dist = self.dist
        if self.fn == "fit":
            self.notice.install()  # whoever waits for ranks that do not come is still ended by SIGTERM
        if self.settings.timeout is not None and (line := self.dist.line("stall")) is not None:
            self.watch = Watch(self, line, echo=self.trainer._launcher is not None)
            self._undo.append(self.watch.close)
        self._undo.append(apply_global_switches(self.settings))
        self._settle_seed()
        self._attach()
        self._undo.append(self.strategy.connect(self.module, self.dist))
        self.look_back()
        self._undo.append(partial(self._tell_status, None))
        if self._prepares():
            self._prepare()
        self._tell_status("Setting up")
        for logger in self.trainer.loggers:
            logger.resolve(self.trainer)
        self.open_profiler()
        if self.datamodule is not None:
            self.profiled(f"[DataModule]{type(self.datamodule).__name__}.setup", self.datamodule.setup)(stage=self.fn)
        self.hooks.call("setup", stage=self.fn)
        self.module.configure_model()
        if self.settings.sync_batchnorm:
            self._undo.append(synced_batchnorm(self.module))
        self.precision.convert_module(self.module)  # before weights are loaded: 64-bit ones must not pass through 32 bits
        table = self.load_table()
        self.strategy.setup(self.module, self.device, self.dist)
        self._undo.append(self.strategy.teardown)
        if self.settings.activation_checkpointing is not None:  # inside of FSDP's hooks, and of what is compiled
            self._undo.append(checkpointed(self.module, self.settings.activation_checkpointing))
        if self.settings.compile is not None:
            self._undo.append(compiled(self))
        if self.fn == "fit":
            self.make_optimizers()
            self.restore(table)
            self.note_start()
            self.hooks.call("on_fit_start")
            self._log_hyperparameters()
            if self.progress.epoch_ended:
                self.progress.next_epoch()
        self._tell_status(None)

    def _settle_seed(self) -> None:
        """One seed for all ranks; each rank then draws from a stream of its own."""
        given = self.settings.seed
        self.seed = self.dist.broadcast(torch.initial_seed() % 2**32 if given is None else given)
        if given is not None:
            self.reseed(given)
        elif self.stream > 0:
            seed_rngs(derive(self.seed, "rank", self.stream))
        if given is None and self.records is not None:  # others may share rank 0's stream, which the user's program began
            first = self.dist.broadcast(rng_state(devices=False))
            if self.stream == 0:
                set_rng_state(first)

    def reseed(self, seed: int) -> None:
        """Seed the run: rank 0 as `seed_everything(seed)` does, every other stream from a seed derived from it."""
        self.seed = seed
        seed_everything(seed if self.stream == 0 else derive(seed, "rank", self.stream), verbose=False)
        if hasattr(self, "loaders"):
            self.loaders.reseed(seed)

    def _attach(self) -> None:
        module = self.module
        module.trainer = self.trainer
        self._undo.append(lambda: module.__dict__.pop("_trainer", None))
        if self.datamodule is not None:
            self.datamodule.trainer = self.trainer
            self._undo.append(lambda: self.datamodule.__dict__.pop("trainer", None))
        extra = (module.configure_callbacks() if self.job.work is None else None) or []
        extra = list(extra) if isinstance(extra, (list, tuple)) else [extra]
        kept = [c for c in self.callbacks if type(c) is Callback or not any(issubclass(type(e), type(c)) for e in extra)]
        last = partial(sorted, key=lambda c: hasattr(c, "best_model_path"))  # checkpoints: they see what others did
        self.callbacks = last([*kept, *self.trainer.loggers, *extra])
        self.trainer.callbacks[:] = last([*kept, *extra])
        self.hooks = HookTable(self.trainer, self.callbacks, module, self.datamodule)
        self.collector = self.new_collector()
        self.recorder = Silent(self) if self.settings.barebones else Recorder(self)
        self.loaders = self.new_loaders()
        self.bar = next((c for c in self.callbacks if hasattr(c, "show_status")), None) if self.world.is_global_zero else None
        if self.world.is_global_zero:
            self.loaders.draining = self._tell_draining if self.bar is None else self.bar.show_draining
        self._undo.append(self.loaders.close)
        self.transfers = self._transfer_hooks()

    def new_collector(self) -> Collector:
        """Return an empty collector for one stage."""
        return Collector(self.dist, self.module.get_submodule, self.records)

    def new_loaders(self) -> Loaders:
        """Return what makes the loaders, as this run's settings say."""
        s = self.settings
        return Loaders(
            self.module, self.datamodule, self.job.loaders, s.limits, self.dist, self.place, self.seed,
            s.use_distributed_sampler, bool(s.overfit_batches), s.uneven == "join",
        )  # fmt: skip

    def tell_once(self, message: str) -> None:
        """Warn on rank 0, once a run."""
        if message not in self._told:
            self._told.add(message)
            self.trainer.warn(message)

    def _tell_draining(self, done: int, total: int) -> None:
        """Data without a position are passed over up to where the resumed run stood, which can take a while."""
        if done <= 1:
            self.trainer.print(f"Passing over {total} items of data, which cannot be positioned ...")

    def _tell_status(self, text: str | None) -> None:
        """Show on the progress bar what goes on while there are no batches."""
        if self.bar is not None:
            self.bar.show_status(text)

    def _transfer_hooks(self) -> list[Callable[..., Any]] | None:
        """The three functions that bring a batch to the device: the data module's where it has its own, else the module's."""
        data = [name for name in _TRANSFER if self.datamodule is not None and overrides(self.datamodule, DataModule, name)]
        if not data and not any(overrides(self.module, TrainModule, name) for name in _TRANSFER):
            return None
        return [getattr(self.datamodule if name in data else self.module, name) for name in _TRANSFER]

    def _prepares(self) -> bool:
        owners = [(self.module, TrainModule)]
        if self.datamodule is not None:
            owners.append((self.datamodule, DataModule))
        return any(overrides(owner, base, "prepare_data") for owner, base in owners)

    def _prepare(self) -> None:
        self._tell_status("Preparing data" + ("" if self.dist.alone else " (once a node; the other processes wait)"))
        with self.dist.first_on_node() as first:
            if first:
                for owner in (self.datamodule, self.module):
                    if owner is not None:
                        owner.prepare_data()

    def close(self, status: str) -> None:
        """Run the teardown hooks and undo what `open` did, in reverse order, whatever happened in between."""
        self._finished, self._together = status == "finished", False
        failure: BaseException | None = None
        for action in (*self._farewells(status), *reversed(self._undo)):
            try:
                action()
            except BaseException as error:  # the rest must still be undone
                failure = failure or error
        self._undo.clear()
        if failure is not None:
            if self._finished:
                raise failure
            warnings.warn(f"Cleaning up failed as well: {failure!r}", stacklevel=2)  # the error of the run comes first

    def _farewells(self, status: str) -> Iterator[Callable[[], None]]:
        """What is done ahead of undoing `open`: the hooks of the end, the loggers' files, and weights that come together."""
        if hasattr(self, "hooks"):
            if self.datamodule is not None:
                yield partial(self.datamodule.teardown, stage=self.fn)
            yield partial(self.hooks.call, "teardown", stage=self.fn)
        if self.world.is_global_zero:
            for logger in reversed(self.trainer.loggers):
                yield partial(logger.finalize, "success" if self._finished else status)
        if self._finished:
            yield self._bring_together

    def _bring_together(self) -> None:
        self.strategy.finish()
        self._together = True

    def _leave_group(self) -> None:
        """Leave the other ranks; a run that went well waits for them first.

        Not where `finish` failed: others may still wait in it, and learn by the broken connection that this rank is gone.
        """
        try:
            if self._together:
                self.dist.farewell()
        finally:
            self.dist.close()

    def fail(self, error: BaseException) -> None:
        """Tell the hooks that the run ends with `error`; an error of a hook never hides it."""
        if not hasattr(self, "hooks"):
            return
        self.failing = True
        try:
            self.hooks.call("on_exception", error)
        except BaseException as second:
            warnings.warn(f"on_exception failed as well: {second!r}", stacklevel=2)


_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
