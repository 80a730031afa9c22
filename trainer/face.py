"""The properties of `Trainer` that modules and callbacks read: those of the live run, or what the last one left."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainer.arguments import at_least
from trainer.errors import MisconfigurationException, nearest
from trainer.removed import REMOVED_ATTRIBUTES
from trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

__all__ = ["Face"]


class Face:
    """Read-only properties, but for `should_stop`, `max_epochs`, `max_steps`, `accumulate_grad_batches`, `ckpt_path` and `logger`."""

    _run: Any
    _ended: Any
    _chosen_ckpt: Any = None
    settings: Any
    results: Any

    # -- where the run is ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """What the trainer is doing."""
        fn, stage = self.results.fn, self._run.stage if self._run is not None else None
        return TrainerState(fn and TrainerFn(fn), stage and RunningStage(stage), TrainerStatus(self.results.status))

    def _stage_is(self, *stages: str) -> bool:
        return self._run is not None and self._run.stage in stages

    training = property(lambda self: self._stage_is("train"))
    validating = property(lambda self: self._stage_is("validate"))
    testing = property(lambda self: self._stage_is("test"))
    predicting = property(lambda self: self._stage_is("predict"))
    sanity_checking = property(lambda self: self._stage_is("sanity_check"))
    evaluating = property(lambda self: self._stage_is("validate", "test", "sanity_check"))
    interrupted = property(lambda self: self.results.status == "interrupted")
    received_sigterm = property(
        lambda self: self.results.received_sigterm or (self._run is not None and self._run.notice.bits != 0),
        doc="True when SIGTERM (or SIGUSR1) came during the fit; on all ranks from the boundary on at which it is heeded.",
    )
    global_step = property(lambda self: self.results.progress.step, doc="Optimizer steps done.")
    validation_owed = property(
        lambda self: self.results.progress.validation_owed != 0, doc="True when a signal cut the validation after the last step short."
    )
    is_last_batch = property(lambda self: self._run is not None and self._run.last_group)
    publishes_step = property(
        lambda self: self._run is not None and self._run.publishes(),
        doc="True in a training step, from its first batch on, whose numbers are published when it is over; the same on all ranks.",
    )
    logging_step = property(
        lambda self: self.global_step if self._run is None else max(self._run.step_id, self.global_step),
        doc="Where what is logged now belongs on the x axis: the optimizer step (counted from 1) that is being taken, else the last one.",
    )
    continues = property(lambda self: self.results.continues, doc="True when `ckpt_path` was found by 'last' or 'auto': the run goes on.")

    @property
    def ckpt_path(self) -> Any:
        """The checkpoint that the last run began with. Set it for calls without `ckpt_path=`."""
        return self.results.ckpt_path if self._chosen_ckpt is None or self._run is not None else self._chosen_ckpt

    @ckpt_path.setter
    def ckpt_path(self, value: Any) -> None:
        self._chosen_ckpt = value

    @property
    def current_epoch(self) -> int:
        """The index of the running epoch; after a fit, how many epochs are complete."""
        p = self.results.progress
        return p.epoch + p.epoch_ended if self._run is None or self._run.done else p.epoch

    @property
    def should_stop(self) -> bool:
        """Set it to stop at the coming boundary, on all ranks at the same step."""
        return self._run is not None and self._run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if self._run is not None:
            self._run.should_stop = bool(value)

    # -- limits and intervals ----------------------------------------------------------------------------------------------

    @property
    def max_epochs(self) -> int | None:
        """The epoch limit; -1 for none. May be raised between fits."""
        return self.settings.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._change(max_epochs=at_least("max_epochs", value, 0, none=True, also=(-1,)))

    @property
    def max_steps(self) -> int:
        """The limit of optimizer steps; -1 for none. May be raised between fits."""
        return self.settings.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        changed = {"max_steps": at_least("max_steps", value, 0, also=(-1,))}
        if value != -1 and self.settings.max_epochs_is_default:
            changed["max_epochs"] = -1
        self._change(**changed)

    def _change(self, **values: Any) -> None:
        self.settings = replace(self.settings, **values)
        if self._run is not None:
            self._run.settings = self.settings

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of one optimizer step. A callback may set it in `on_train_epoch_start`."""
        return self.settings.accumulate_grad_batches if self._run is None else self._run.accumulate

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        at_least("accumulate_grad_batches", value, 1)
        if self._run is None:
            self._change(accumulate_grad_batches=value)
        else:
            self._run.accumulate = value

    min_epochs = property(lambda self: self.settings.min_epochs)
    min_steps = property(lambda self: self.settings.min_steps)
    limit_train_batches = property(lambda self: _or_all(self.settings.limits["train"]))
    limit_val_batches = property(lambda self: _or_all(self.settings.limits["validate"]))
    limit_test_batches = property(lambda self: _or_all(self.settings.limits["test"]))
    limit_predict_batches = property(lambda self: _or_all(self.settings.limits["predict"]))
    fast_dev_run = property(lambda self: self.settings.fast_dev_run or False)
    overfit_batches = property(lambda self: self.settings.overfit_batches)
    log_every_n_steps = property(lambda self: self.settings.log_every_n_steps)
    max_time = property(lambda self: self.settings.max_time, doc="A timedelta, or None.")
    val_check_interval = property(lambda self: self.settings.val_check_interval)
    check_val_every_n_epoch = property(lambda self: self.settings.check_val_every_n_epoch)
    num_sanity_val_steps = property(lambda self: math.inf if self.settings.num_sanity_val_steps == -1 else self.settings.num_sanity_val_steps)
    barebones = property(lambda self: self.settings.barebones)
    gradient_clip_val = property(lambda self: self.settings.gradient_clip_val)
    gradient_clip_algorithm = property(lambda self: self.settings.gradient_clip_algorithm)
    default_root_dir = property(lambda self: self.settings.default_root_dir)
    enable_validation = property(lambda self: self._run is not None and self._run.fn == "fit" and self._run.can_validate())

    # -- numbers -------------------------------------------------------------------------------------------------------------

    callback_metrics = property(lambda self: self.results.callback_metrics, doc="All published numbers; equal on all ranks.")
    logged_metrics = property(lambda self: self.results.logged_metrics, doc="Those that went to loggers.")

    metric_steps = property(lambda self: self.results.metric_steps, doc="Name -> the optimizer step at which it was last published.")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Those logged with prog_bar=True."""
        return self.results.bar_metrics

    # -- who and where -------------------------------------------------------------------------------------------------------

    world_size = property(lambda self: self._world.world_size)
    global_rank = property(lambda self: self._world.rank)
    local_rank = property(lambda self: self._world.local_rank)
    node_rank = property(lambda self: self._world.node_rank)
    is_global_zero = property(lambda self: self._world.rank == 0)
    num_nodes = property(lambda self: self.settings.num_nodes)
    data_shares = property(
        lambda self: 1 if self._run is None else self._run.place[1], doc="How many parts the data are cut into: processes of one model share one."
    )
    records = property(
        lambda self: self._run is None or self._run.records is not False, doc="True on one process of each share of the data: what it predicts counts."
    )
    num_devices = property(lambda self: self.settings.devices.count)
    device_ids = property(lambda self: list(self.settings.devices.indices))
    accelerator = property(lambda self: self.settings.devices.accelerator, doc="The Accelerator object.")
    precision = property(lambda self: self.precision_plugin.precision)
    scaler = property(lambda self: self.precision_plugin.scaler, doc="The GradScaler of 16-mixed, else None.")
    distributed_sampler_kwargs = property(
        lambda self: None if self.world_size == 1 or self._run is None else {"num_replicas": self._run.place[1], "rank": self._run.place[0]},
        doc="What a DistributedSampler of your own takes; None for a process that is alone.",
    )

    # -- parts ---------------------------------------------------------------------------------------------------------------

    optimizers = property(lambda self: getattr(self._run or self._ended, "optimizers", []), doc="Those of the run, or of the fit that has ended.")
    lr_scheduler_configs = property(lambda self: getattr(self._run or self._ended, "schedulers", []))
    model = property(lambda self: self._module)
    lightning_module = property(lambda self: self._module, doc="The caller's module, never a wrapper.")
    datamodule = property(lambda self: self._datamodule)

    @property
    def logger(self) -> Any:
        """The first logger, or None. Set it for the runs to come."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str | None:
        """Where the first logger writes, or the root folder without a logger."""
        return self.loggers[0].log_dir if self.loggers else self.default_root_dir

    def _having(self, attribute: str) -> list[Any]:
        live = self._run.callbacks if self._run is not None else self.callbacks
        return [c for c in live if hasattr(c, attribute)]

    checkpoint_callbacks = property(lambda self: self._having("best_model_path"))
    checkpoint_callback = property(lambda self: next(iter(self.checkpoint_callbacks), None))
    early_stopping_callbacks = property(lambda self: self._having("stopping_reason"))
    early_stopping_callback = property(lambda self: next(iter(self.early_stopping_callbacks), None))
    progress_bar_callback = property(lambda self: next(iter(self._having("get_metrics")), None))

    # -- loaders ---------------------------------------------------------------------------------------------------------------

    train_dataloader = property(lambda self: self._raw("train"))
    val_dataloaders = property(lambda self: self._raw("validate"))
    test_dataloaders = property(lambda self: self._raw("test"))
    predict_dataloaders = property(lambda self: self._raw("predict"))

    def _raw(self, stage: str) -> Any:
        if self._run is None or not self._run.loaders.has(stage):
            return None
        self._run.loaders.sources(stage)
        return self._run.loaders.raw[stage]

    def _batches(self, stage: str) -> list[float]:
        if self._run is None or not self._run.loaders.has(stage) or self.settings.limits[stage] == 0:
            return []
        return [math.inf if s.num_batches is None else s.num_batches for s in self._run.loaders.sources(stage)]

    @property
    def batch_indices(self) -> list[Any] | None:
        """The entries of the data set in the batch that is evaluated or predicted; None where they are not known (iterables)."""
        evaluated = self._run.evaluated if self._run is not None else None
        return None if evaluated is None else evaluated.entries(1)

    @property
    def num_training_batches(self) -> float:
        """This rank's training batches in an epoch; infinite where only the data can tell."""
        return next(iter(self._batches("train")), 0)

    num_val_batches = property(lambda self: self._batches("validate"))
    num_test_batches = property(lambda self: self._batches("test"))
    num_predict_batches = property(lambda self: self._batches("predict"))

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """The validation batches tried ahead of step 1, for each loader."""
        return [min(self.num_sanity_val_steps, batches) for batches in self.num_val_batches]

    @property
    def estimated_stepping_batches(self) -> float:
        """The optimizer steps of the whole fit, exactly, from step 0 to the limit; infinite where there is none.

        Inside `configure_optimizers` it loads the training loader. Collective.

        Raises:
            MisconfigurationException: outside a fit.
        """
        if self._run is None or self._run.fn != "fit":
            raise MisconfigurationException("estimated_stepping_batches is known inside a fit only (in configure_optimizers, say).")
        s = self.settings
        limit = math.inf if s.max_steps == -1 else s.max_steps
        batches = self.num_training_batches
        if s.max_epochs in (None, -1) or math.isinf(batches):
            return limit
        schedule = next((c.accumulation for c in self._run.callbacks if hasattr(c, "accumulation")), None)
        groups = [schedule(epoch) if schedule else self.accumulate_grad_batches for epoch in range(s.max_epochs)]
        return min(limit, sum(math.ceil(batches / n) for n in groups))

    def __getattr__(self, name: str) -> Any:
        if name in REMOVED_ATTRIBUTES:
            raise AttributeError(f"Trainer has no {name!r}: use {REMOVED_ATTRIBUTES[name]}.")
        known = dir(type(self))
        if name in known:  # a property that raised an AttributeError of its own
            return object.__getattribute__(self, name)
        raise AttributeError(f"Trainer has no {name!r}.{nearest(name, known)}")


def _or_all(limit: Any) -> Any:
    return 1.0 if limit is None else limit


