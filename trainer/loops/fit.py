"""The training loop: `fit`, `train_epoch`, `train_step`, on one screen; `step.py` has what a step consists of.

The unit is the optimizer step. A group holds the batches of one step; its weights make the gradient that of one large
batch, a short last group included. Wishes of hooks are fulfilled at `run.boundary()`, on all ranks at the same step.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from trainer.errors import DataError
from trainer.hooks import overrides
from trainer.loops.evaluate import sanity_check, show_epoch, validate, validate_late, validation_due, validation_interval
from trainer.loops.guard import Guard, guarded_step
from trainer.loops.staged import staged
from trainer.loops.step import (
    closure_step,
    count_step,
    forward_backward,
    manual_step,
    optimizer_step,
    outputs_of,
    refused,
)
from trainer.loops.transfer import copy_ahead, receive, takes_index
from trainer.loops.window import Window
from trainer.module import TrainModule


def fit(run: Any) -> None:
    """Train until a limit is reached or a stop is agreed on. Collective."""
    if begin(run):
        while not run.done:
            with run.profiler.profile("run_training_epoch"):
                train_epoch(run)
        run.leave()
        run.strategy.sync_module()  # the module is the same on every rank, as in a checkpoint
        run.hooks.call("on_train_end")
    run.finish_saves()
    run.hooks.call("on_fit_end")


def train_epoch(run: Any) -> None:
    """Train one epoch, or what is left of one that is resumed in its middle. Collective."""
    epoch = begin_epoch(run)
    groups = run.profiled_groups(epoch) if run.profiles else epoch.groups(run.accumulate)
    if run.progress.validation_owed and not validate_late(run):
        return
    for group in groups:
        train_step(run, group)
        if run.skip_epoch:
            break
        if run.publishes():
            run.publish_step()
        if validation_due(run, group):
            validate(run)
        if group.last:
            break
        run.boundary()
        if run.done:
            return
    end_epoch(run)
    run.boundary()
    if not run.done:
        run.progress.next_epoch()


def train_step(run: Any, group: Any) -> None:
    """Take one optimizer step from the batches of `group`. Collective."""
    run.step_id, run.whole, run.last_group = run.progress.step + 1, False, group.last
    if run.other_step is not None:
        return run.other_step(run, group)
    window, last, first_index = Window(group), group.size - 1, run.progress.batch
    for i, batch in enumerate(group.batches):
        batch = receive(run, batch, window.samples(i))
        index = first_index + i
        if run.hears_start and refused(run, batch, index):
            return
        output = run.compute(run, window, i, batch, index)
        if i == last:
            optimizer_step(run, window)
            count_step(run, group)
        if run.hears_end:
            run.hooks.call("on_train_batch_end", outputs_of(output), batch, index)


# -- beginning and ending ------------------------------------------------------------------------------------------------


def begin(run: Any) -> bool:
    """Everything between `on_fit_start` and the first epoch; False when there is nothing to do."""
    limit = run.limit_reached()
    if limit is not None and not run.progress.validation_owed:
        value = getattr(run.settings, limit)
        run.trainer.warn(f"Nothing to do: {limit}={value} is already reached. Raise it (trainer.{limit} = ...) to train on.")
        return False
    if run.settings.limits["train"] == 0:
        run.trainer.warn("Nothing to do: limit_train_batches=0 leaves no batch to train on.")
        return False
    choose_step(run)
    usual = run.compute is forward_backward and run.other_step is None
    run.asks_ahead = usual and not run.dist.alone and not run.may_stop_late()
    if run.profiles:
        run.profile_steps()
    run.validates = run.can_validate()
    if not run.validates and overrides(run.module, TrainModule, "validation_step") and run.settings.limits["validate"] != 0:
        run.trainer.warn("There is a validation_step but no validation loader (val_dataloader, val_dataloaders=): nothing is validated.")
    # What a user's hook does at the start of a validation, another may have to undo at its end (averaged weights, say).
    run.whole_validation |= run.hooks.foreign("on_validation_start") or run.hooks.foreign("on_validation_epoch_start")
    sanity_check(run)
    run.loaders.sources("train")  # a loader that cannot work is refused ahead of on_train_start
    if not any(m.training for m in run.module.modules()):
        run.trainer.warn("Every layer of the module is in eval mode, and stays so in training. Call model.train() if not meant.")
    torch.set_grad_enabled(True)
    run.notice.waits = True
    run.started = time.monotonic()  # max_time is for training, not for setting up
    run.hooks.call("on_train_start")
    run.done = run.dist.agree(run.should_stop) and run.may_stop()  # a hook of the beginning does not want to begin
    return True


def choose_step(run: Any) -> None:
    """Set which functions take the steps of a run whose optimizers are made."""
    run.training_step = step_caller(run)
    run.compute = forward_backward if run.strategy.pipeline is None else staged
    run.other_step = manual_step if run.manual else closure_step if run.by_closure else None
    if run.guarded:
        run.guard, run.other_step = Guard(run), guarded_step


def step_caller(run: Any) -> Any:
    """Return `training_step` as the loop calls it: with (batch, batch_idx), or batch alone if it takes no more."""
    from_strategy = run.profiled("training_step", run.strategy.training_step)
    if takes_index(run.module.training_step):
        return from_strategy
    return lambda batch, index: from_strategy(batch)


def begin_epoch(run: Any) -> Any:
    """Open the epoch's pass over the data and run its first hooks; random streams of a checkpoint continue here."""
    p, every = run.progress, run.settings.reload_dataloaders_every_n_epochs
    if every and p.epoch and p.epoch % every == 0 and p.batch == 0:
        run.loaders.reload("train")
        run.loaders.reload("validate")
    run.loaders.sources("train")  # it may be new, and one that cannot work is refused ahead of the hooks
    fresh, run.skip_epoch = p.batch == 0, False
    if fresh:
        run.restore_streams()
    run.hooks.call("on_train_epoch_start")
    if run.rewrap:
        run.rewrap, run.training_step = False, None
        run.strategy.wrap(training=True)
        run.training_step = step_caller(run)
    (source,) = run.loaders.sources("train")  # a hook may have changed the batch size
    run.val_every = validation_interval(run, source)
    run.epoch_pass = source.epoch(p.epoch, run.position)
    copy_ahead(run, run.epoch_pass)
    if run.saved_sums is not None:
        if not fresh:
            run.collector.load_state_dict(run.saved_sums, run.device)
        run.saved_sums = None
    run.restore_streams()
    return run.epoch_pass


def end_epoch(run: Any) -> None:
    """Epoch hooks, epoch numbers, epoch schedulers, in this order: monitors and plateau schedulers read fresh numbers."""
    p = run.progress
    if p.batch == 0 and not run.skip_epoch:
        raise DataError(f"The training loader gave no batch in epoch {p.epoch}. Can it be iterated only once?")
    run.whole, run.step_id, run.wished_late = False, p.step, True
    if run.settings.log_every_n_steps:  # the last step of an epoch is never lost, also where the rest was skipped
        run.publish_step()
    show_epoch(run, "on_train_epoch_end")
    run.hooks.call("on_train_epoch_end")
    run.spread(run.collector.publish_epoch(), "train")
    run.hooks.call("on_train_epoch_end/monitors")
    if not run.manual:
        run.move_schedulers([c for c in run.schedulers if c.interval == "epoch"], p.epoch + 1)
    p.epoch_ended, run.position = True, None
