"""Run: everything that changes during one fit, validation, test or prediction. Made in the process that trains, never pickled.

The loops read and advance it; hooks only leave wishes here (`should_stop`, `requests`), which `boundary` fulfils.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


from trainer.checkpoint import io, state
from trainer.config import Settings, apply_global_switches
from trainer.datamodule import DataModule
from trainer.dist import Dist
from trainer.errors import CheckpointError, MisconfigurationException
from trainer.hooks import HookTable, overrides
from trainer.loaders import Loaders
from trainer.metrics import Collector, Published, is_metric, merge_states
from trainer.module import TrainModule
from trainer.optim import LRSchedulerConfig, StepOptimizer, clip, parse_optimizers
from trainer.progress import Progress
from trainer.record import Recorder
from trainer.seed import derive, rng_state, seed_everything, seed_rngs, set_rng_state
from trainer.world import World

__all__ = ["Run"]


class Run:
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
        self.device = self.settings.devices.device(world.local_rank)
        self.dist = Dist(world, self.device.type, self.settings.timeout)
        self.progress: Progress = trainer.results.progress
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_optimizers: list[StepOptimizer] = []
        self.schedulers: list[LRSchedulerConfig] = []
        self.accumulate = self.settings.accumulate_grad_batches
        self.should_stop = False
        self.requests: list[Callable[[Any], None]] = []
        self.done = False
        self.whole = True  # weights, counters, data position, sums and RNG agree, and no hook of the step is still to come
        self.failing = False
        self.epoch_pass: Any = None
        self.position: Any = trainer.results.position if job.fn == "fit" else None
        self.saved_rng: dict[str, Any] | None = None
        self.saved_sums: dict[str, Any] | None = None
        self.step_id = 0  # the step that is being taken, counted from 1
        self.manual_weight: float | None = None  # of this rank's batch, in manual optimization; None for 1
        self.published_step = 0
        self.first_step = True
        self.skip_epoch = False
        self.last_group = False
        self.sanity_checked = False
        self.known_names: set[str] = set()
        self.started = time.monotonic()
        self.recorder: Recorder | None = None
        self._undo: list[Callable[[], None]] = []

    # -- opening and closing -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Join the other ranks and bring module, loaders, optimizers and callbacks to where the loop can begin. Collective."""
        self.dist.open()
        self._undo.append(self.dist.close)
        self._undo.append(apply_global_switches(self.settings))
        self._settle_seed()
        self._attach()
        with self.dist.first_on_node() if self._prepares() else _nothing() as first:
            if first:
                for owner in (self.datamodule, self.module):
                    if owner is not None:
                        owner.prepare_data()
        for logger in self.trainer.loggers:
            logger.resolve(self.trainer)
        if self.datamodule is not None:
            self.datamodule.setup(stage=self.fn)
        self.hooks.call("setup", stage=self.fn)
        self.module.configure_model()
        self.precision.convert_module(self.module)  # before weights are loaded: 64-bit ones must not pass through 32 bits
        table = self._load_table()
        self.strategy.setup(self.module, self.device, self.dist)
        self._undo.append(self.strategy.teardown)
        if self.fn == "fit":
            self._make_optimizers(table)
            self.hooks.call("on_fit_start")
            self._log_hyperparameters()
            if self.progress.epoch_ended:
                self.progress.next_epoch()

    def _settle_seed(self) -> None:
        """One seed for all ranks; each rank then draws from a stream of its own."""
        given = self.settings.seed
        self.seed = self.dist.broadcast(torch.initial_seed() % 2**32 if given is None else given)
        if given is not None:
            self.reseed(given)
        elif self.world.rank > 0:
            seed_rngs(derive(self.seed, "rank", self.world.rank))

    def reseed(self, seed: int) -> None:
        """Seed the run: rank 0 as `seed_everything(seed)` does, every other rank from a stream derived from it."""
        self.seed = seed
        rank = self.world.rank
        seed_everything(seed if rank == 0 else derive(seed, "rank", rank), verbose=False)
        if hasattr(self, "loaders"):
            self.loaders.reseed(seed)

    def _attach(self) -> None:
        module = self.module
        module.trainer = self.trainer
        self._undo.append(lambda: module.__dict__.pop("_trainer", None))
        if self.datamodule is not None:
            self.datamodule.trainer = self.trainer
            self._undo.append(lambda: self.datamodule.__dict__.pop("trainer", None))
        extra = module.configure_callbacks() or []
        extra = list(extra) if isinstance(extra, (list, tuple)) else [extra]
        kept = [c for c in self.callbacks if not any(type(c) is type(e) for e in extra)]
        kept += [*self.trainer.loggers, *extra]
        self.callbacks = sorted(kept, key=lambda c: hasattr(c, "best_model_path"))  # checkpoints last: they see what others did
        self.hooks = HookTable(self.trainer, self.callbacks, module, self.datamodule)
        self.collector = Collector(self.dist, module.get_submodule)
        self.recorder = Recorder(self)
        self.loaders = Loaders(
            module, self.datamodule, self.job.loaders, self.settings.limits, self.dist, self.seed,
            self.settings.use_distributed_sampler, bool(self.settings.overfit_batches),
        )  # fmt: skip
        self._undo.append(self.loaders.close)
        self.transfers = self._transfer_hooks()

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

    def close(self, status: str) -> None:
        """Run the teardown hooks and undo what `open` did, in reverse order, whatever happened in between."""
        undo = list(self._undo)
        if status == "finished":
            undo.insert(1, self.dist.farewell)
        if self.world.is_global_zero:
            undo += [partial(logger.finalize, "success" if status == "finished" else status) for logger in self.trainer.loggers]
        if hasattr(self, "hooks"):
            undo.append(lambda: self.hooks.call("teardown", stage=self.fn))
            if self.datamodule is not None:
                undo.append(lambda: self.datamodule.teardown(stage=self.fn))
        failure: BaseException | None = None
        for action in reversed(undo):
            try:
                action()
            except BaseException as error:  # the rest must still be undone
                failure = failure or error
        self._undo.clear()
        if failure is not None:
            if status == "finished":
                raise failure
            warnings.warn(f"Cleaning up failed as well: {failure!r}", stacklevel=2)  # the error of the run comes first

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _load_table(self) -> dict[str, Any] | None:
        path = self.job.ckpt_path
        if path is None:
            return None
        table = io.load(path, weights_only=self.job.weights_only)
        state.check_format(table, path)
        self.module.on_load_checkpoint(table)
        if self.fn == "fit":
            for part in self.module.modules():
                if is_metric(part):  # of a run that was interrupted: an epoch begins, or goes on, with what the file holds
                    part.reset()
        state.restore_module(self.module, table, strict=self.module.strict_loading)
        if self.datamodule is not None and table.get(type(self.datamodule).__qualname__):
            self.datamodule.load_state_dict(table[type(self.datamodule).__qualname__])
        if self.fn == "fit":
            for callback in self.callbacks:
                callback.on_load_checkpoint(self.trainer, self.module, table)
            state.restore_callbacks(self.callbacks, table)
        return table

    def _make_optimizers(self, table: dict[str, Any] | None) -> None:
        """Make optimizers, wrap the module, and put back what a checkpoint holds besides weights."""
        self.optimizers, self.schedulers = parse_optimizers(self.module.configure_optimizers())
        if len(self.optimizers) > 1 and self.module.automatic_optimization:
            raise MisconfigurationException(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, but automatic optimization steps one. Set "
                "self.automatic_optimization = False and step them in training_step, or return one with parameter groups."
            )
        if not self.optimizers:
            warnings.warn("configure_optimizers returned None: the weights will not change.", stacklevel=2)
        self.step_optimizers = [StepOptimizer(o, self.take_step) for o in self.optimizers]
        self.strategy.wrap(training=True)
        self._choose_path()
        if table is None:
            self._place_sums(self.trainer.results.sums)
            return
        state.restore_training(table, self.optimizers, [c.scheduler for c in self.schedulers], self.precision, warnings.warn)
        self.progress.load_state_dict(state.progress_of(table).state_dict())
        self.trainer.results.restore_metrics(table.get("metrics") or {})
        self.position = table.get("data")
        if table.get("seed") is not None:
            if self.settings.seed not in (None, table["seed"]):
                self.trainer.warn(
                    f"The checkpoint was made with seed={table['seed']}, and the rest of the run follows from it; seed={self.settings.seed} is "
                    "not used."
                )
            self.seed = table["seed"]
            self.loaders.reseed(self.seed)
        self._place_rank_states(table.get("ranks") or [])

    def _place_rank_states(self, ranks: list[dict[str, Any]]) -> None:
        """Take this rank's random state and epoch sums; with another number of ranks, sums go to rank 0, streams are derived."""
        rank, size = self.world.rank, self.world.world_size
        if len(ranks) == size:
            mine = ranks[rank]
            self.saved_rng, self.position = mine["rng"], mine["data"]
        elif ranks:
            if rank == 0:
                self.saved_rng = ranks[0]["rng"]
            else:
                seed_rngs(derive(self.seed, "rank", rank, "step", self.progress.step))
        self._place_sums([r["metrics"] for r in ranks])

    def _place_sums(self, by_rank: list[dict[str, Any]]) -> None:
        """Take this rank's epoch sums; with another number of ranks rank 0 takes all."""
        if len(by_rank) == self.world.world_size:
            self.saved_sums = by_rank[self.world.rank]
        elif by_rank and self.world.rank == 0:
            self.saved_sums = merge_states(by_rank)

    def leave(self) -> None:
        """Leave in the trainer's results what a further fit needs to go on in the middle of an epoch. Collective."""
        inside = self.progress.batch and not self.progress.epoch_ended
        self.trainer.results.sums = self.dist.gather(self.collector.state_dict()) if inside else []

    def restore_streams(self) -> None:
        """Continue the random streams of the checkpoint; called just before the first batch."""
        if self.saved_rng is not None:
            set_rng_state(self.saved_rng)
            self.saved_rng = None

    def checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the table of a checkpoint of this moment. Collective."""
        self.strategy.sync_buffers()
        ranks = [] if weights_only else self.dist.gather(self._rank_state())
        table = state.assemble(
            module_state=self.strategy.state_dict(),
            progress=self.progress,
            hparams=self.module.hparams,
            data_hparams=self.datamodule.hparams if self.datamodule is not None else {},
            optimizers=self.optimizers,
            schedulers=[config.scheduler for config in self.schedulers],
            callbacks=state.callback_keys(self.callbacks),
            precision=self.precision,
            data=self.position,
            ranks=ranks,
            seed=self.seed,
            weights_only=weights_only,
        )
        if not weights_only:
            table["metrics"] = {name: float(v) for name, v in self.trainer.results.callback_metrics.items()}
            if self.datamodule is not None and (data_state := self.datamodule.state_dict()):
                table[type(self.datamodule).__qualname__] = data_state
        for callback in self.callbacks:
            callback.on_save_checkpoint(self.trainer, self.module, table)
        self.module.on_save_checkpoint(table)
        return table

    def _rank_state(self) -> dict[str, Any]:
        """What differs from rank to rank: random streams, epoch sums, and the place in data that shard themselves.

        Until they are put in place, just before the first batch, those of the file that is resumed are still the true ones.
        """
        rng = rng_state() if self.saved_rng is None else self.saved_rng
        sums = self.collector.state_dict() if self.saved_sums is None else self.saved_sums
        return {"rng": rng, "metrics": sums, "data": self.position}

    def save_checkpoint(self, path: Any, weights_only: bool = False) -> None:
        """Write a checkpoint now where the state is whole, else at the coming boundary. Collective.

        Between the first batch of a step and the boundary after it, hooks, validation and epoch numbers are still to come, of
        which a resume could not know. A run that is failing reaches no boundary: it saves what there is.

        Raises:
            CheckpointError: on every rank, when rank 0 could not write.
        """
        if not self.whole and not self.failing:
            self.requests.append(lambda trainer: self.save_checkpoint(path, weights_only))
            return
        table = self.checkpoint(weights_only)
        problem = None
        if self.world.is_global_zero:
            try:
                self.trainer.checkpoint_io.save_checkpoint(state.finish(table), path)
            except CheckpointError as error:
                problem = error
        problem = self.dist.broadcast(problem)
        if problem is not None:
            raise problem

    # -- the boundary between two steps --------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Fulfil the wishes that hooks left, and agree with the other ranks on whether to stop. Collective."""
        if self.settings.max_time is not None:
            self.should_stop |= time.monotonic() - self.started >= self.settings.max_time.total_seconds()
        stop = self.dist.agree(self.should_stop)
        self.whole = True
        if self.requests:
            self.publish_step()
            asked, self.requests = self.requests, []
            for fulfil in asked:
                fulfil(self.trainer)
        self.done = self.limit_reached() is not None or (stop and self.may_stop())
        if self.done and self.settings.log_every_n_steps:
            self.publish_step()  # the last step of a fit is never lost

    def limit_reached(self) -> str | None:
        """Return which limit forbids another step ("max_steps" or "max_epochs"), or None."""
        s, p = self.settings, self.progress
        if s.max_steps != -1 and p.step >= s.max_steps:
            return "max_steps"
        if s.max_epochs not in (None, -1) and p.epoch + p.epoch_ended >= s.max_epochs:
            return "max_epochs"
        return None

    def may_stop(self) -> bool:
        """True when min_steps and min_epochs are reached."""
        s, p = self.settings, self.progress
        return p.step >= (s.min_steps or 0) and p.epoch + p.epoch_ended >= (s.min_epochs or 0)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def can_validate(self) -> bool:
        """True when this fit has validation: a step, a loader, and a limit that lets batches through."""
        has_step = overrides(self.module, TrainModule, "validation_step")
        return has_step and self.settings.limits["validate"] != 0 and (self.loaders.has("validate") or self.loaders.overfit)

    def _choose_path(self) -> None:
        """Decide once what a step of this run needs, so that the loop asks plain attributes."""
        module, hooks = self.module, self.hooks
        self.manual = not module.automatic_optimization
        self.lbfgs = any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers)
        self.by_closure = not self.manual and (self.lbfgs or overrides(module, TrainModule, "optimizer_step"))
        if self.lbfgs and self.precision.scaler is not None:
            raise MisconfigurationException("LBFGS evaluates the loss several times a step, which 16-mixed cannot scale; use bf16-mixed.")
        if self.manual and self.accumulate != 1:
            raise MisconfigurationException(
                "accumulate_grad_batches works in automatic optimization only; in manual optimization step every n-th batch yourself."
            )
        self.custom_backward = overrides(module, TrainModule, "backward")
        self.custom_zero_grad = overrides(module, TrainModule, "optimizer_zero_grad")
        self.custom_clip = overrides(module, TrainModule, "configure_gradient_clipping")
        self.hears_backward = hooks.used("on_before_backward", "on_after_backward")
        self.hears_zero_grad = hooks.used("on_before_zero_grad")
        self.hears_step = hooks.used("on_before_optimizer_step")
        self.hears_start = hooks.used("on_train_batch_start")
        self.may_refuse = hooks.foreign("on_train_batch_start")  # ours never return -1, so the ranks need not ask each other
        self.hears_end = hooks.used("on_train_batch_end")
        self.step_schedulers = [c for c in self.schedulers if c.interval == "step"]
        self.stepped = True
        if self.precision.scaler is not None or self.by_closure:  # a skipped step is one in which the optimizer was not called
            for optimizer in self.optimizers:
                handle = optimizer.register_step_post_hook(self._note_step)
                self._undo.append(handle.remove)

    def _note_step(self, *_: Any) -> None:
        self.stepped = True

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """From summed gradients to those the optimizer shall see: unscale, hooks, clip."""
        self.precision.unscale(optimizer)
        if self.hears_step:
            self.hooks.call("on_before_optimizer_step", optimizer)
        s = self.settings
        if self.custom_clip:
            method = self.module.configure_gradient_clipping
            self.hooks.within("configure_gradient_clipping", method, optimizer, s.gradient_clip_val, s.gradient_clip_algorithm)
        elif s.gradient_clip_val:
            clip(optimizer, s.gradient_clip_val, s.gradient_clip_algorithm)

    def take_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """What `optimizer.step()` of a StepOptimizer does, in manual optimization and in an overridden `optimizer_step`."""
        if not self.manual:
            if closure is not None and self.precision.scaler is not None:
                loss = closure()
                self.precision.step(optimizer)
                return loss
            return self.precision.step(optimizer, closure)
        loss = closure() if closure is not None else None
        self.precision.unscale(optimizer)
        if self.hears_step:
            self.hooks.call("on_before_optimizer_step", optimizer)
        self.precision.step(optimizer)
        return loss

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward in manual optimization: weighted by this rank's share of the samples, scaled, averaged over ranks. Collective."""
        if not self.manual:
            raise MisconfigurationException(
                "manual_backward belongs to manual optimization: set self.automatic_optimization = False, or return the loss."
            )
        if self.manual_weight is not None:
            loss = loss * self.manual_weight
        if self.hears_backward:
            self.hooks.call("on_before_backward", loss)
        if self.precision.stepped:  # a second cycle of backward and step in one training_step has a scale of its own
            self.precision.update()
        scaled = self.precision.scale(loss)
        self.hooks.within("backward", partial(self.module.backward, **kwargs), scaled, *args)
        self.strategy.sync_gradients()
        if self.hears_backward:
            self.hooks.call("on_after_backward")

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str | None) -> None:
        """Clip as asked; without arguments as the trainer's settings say."""
        s = self.settings
        optimizer = optimizer.optimizer if isinstance(optimizer, StepOptimizer) else optimizer
        if self.manual:
            self.precision.unscale(optimizer)
        clip(optimizer, s.gradient_clip_val if value is None else value, algorithm or s.gradient_clip_algorithm)

    def move_schedulers(self, configs: list[LRSchedulerConfig], count: int) -> None:
        """Advance the schedulers that are due after `count` steps or epochs."""
        for config in configs:
            if count % config.frequency:
                continue
            metric = self._monitored(config) if config.reduce_on_plateau else None
            if config.reduce_on_plateau and metric is None:
                continue
            if overrides(self.module, TrainModule, "lr_scheduler_step"):
                self.hooks.within("lr_scheduler_step", self.module.lr_scheduler_step, config.scheduler, metric)
            elif metric is None:
                config.scheduler.step()
            else:
                config.scheduler.step(metric)

    def _monitored(self, config: LRSchedulerConfig) -> torch.Tensor | None:
        if config.interval == "step":
            self.publish_step()
        metrics = self.trainer.results.callback_metrics
        if config.monitor in metrics:
            return metrics[config.monitor]
        message = f"A scheduler watches {config.monitor!r}, which was not logged. There are: {', '.join(metrics) or 'none'}."
        if config.strict:
            raise MisconfigurationException(message)
        warnings.warn(message, stacklevel=2)
        return None

    # -- publishing ----------------------------------------------------------------------------------------------------

    def publish_step(self) -> None:
        """Publish the numbers of the step just taken, once. Collective."""
        if self.published_step != self.step_id:
            self.published_step = self.step_id
            self.spread(self.collector.publish_step(self.step_id), "train")

    def spread(self, published: Published, stage: str) -> None:
        """Hand published numbers to monitors, the progress bar and the loggers."""
        self.trainer.results.add(published)
        self.known_names.update(published.callback)
        if published.logger:
            self.to_loggers(published.logger, stage)

    def to_loggers(self, numbers: dict[str, float], stage: str, step: int | None = None) -> None:
        """Send numbers to every logger, on rank 0; the x axis is the count of optimizer steps."""
        if self.world.is_global_zero:
            step = self.progress.step if step is None else step
            for logger in self.trainer.loggers:
                logger.publish({**numbers, "epoch": float(self.progress.epoch)}, step, stage)

    def _log_hyperparameters(self) -> None:
        params: dict[str, Any] = {}
        for owner in (self.datamodule, self.module):
            if owner is not None and owner._log_hyperparams:
                params.update(owner.hparams)
        if self.world.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_hyperparams(params)

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


class _nothing:
    """A context in which this process is the first: for runs that prepare no data."""

    def __enter__(self) -> bool:
        return False

    def __exit__(self, *_: Any) -> None:
        pass
