"""The training loop: `fit`, `train_epoch`, `train_step`, on one screen; below them what one step consists of.

The unit is the optimizer step. A group holds the batches of one step; its weights make the gradient that of one large
batch, a short last group included. Wishes of hooks are fulfilled at `run.boundary()`, on all ranks at the same step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from trainer.errors import DataError
from trainer.loops.checks import check_monitors
from trainer.loops.evaluate import sanity_check, validate, validation_due, validation_interval
from trainer.loops.transfer import copy_ahead, receive
from trainer.loops.window import Window, read_output


def fit(run: Any) -> None:
    """Train until a limit is reached or a stop is agreed on. Collective."""
    if begin(run):
        while not run.done:
            train_epoch(run)
        run.strategy.sync_buffers()  # the module is the same on every rank, as in a checkpoint
        run.leave()
        run.hooks.call("on_train_end")
    run.hooks.call("on_fit_end")


def train_epoch(run: Any) -> None:
    """Train one epoch, or what is left of one that is resumed in its middle. Collective."""
    for group in begin_epoch(run).groups(run.accumulate):
        train_step(run, group)
        if run.skip_epoch:
            break
        if publish_due(run, group):
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
    if run.manual or run.by_closure:
        return (manual_step if run.manual else closure_step)(run, group)
    window, last, first_index = Window(group), group.size - 1, run.progress.batch
    for i, batch in enumerate(group.batches):
        batch = receive(run, batch, window.samples(i))
        index = first_index + i
        if run.hears_start and refused(run, batch, index):
            return
        output = forward_backward(run, window, i, batch, index)
        if i == last:
            optimizer_step(run, window)
            count_step(run, group)
        if run.hears_end:
            run.hooks.call("on_train_batch_end", _outputs(output), batch, index)


# -- the parts of a step -------------------------------------------------------------------------------------------------


def refused(run: Any, batch: Any, index: int) -> bool:
    """Run the hooks ahead of a batch; True when one returned -1, which ends the epoch on all ranks."""
    wish = run.hooks.call("on_train_batch_start", batch, index) == -1
    run.skip_epoch = run.dist.agree(wish) if run.may_refuse else wish
    return run.skip_epoch


def forward_backward(run: Any, window: Window, i: int, batch: Any, index: int) -> Any:
    """Compute the loss of batch `i` of the window and add its weighted gradient; return what the step returned."""
    last = i == window.size - 1
    with run.strategy.sync_when(last):
        before, run.hooks.current = run.hooks.current, "training_step"
        with run.precision.forward_context():
            output = run.training_step(batch, index)
        run.hooks.current = before
        loss, count = read_output(run, output)
        if i == 0:
            zero_grad(run, index)
        if loss is None:
            return None
        weight = window.use(i, count)
        if weight is not None:
            loss = loss * weight
        if run.hears_backward:
            run.hooks.call("on_before_backward", loss)
        if run.optimizers or loss.requires_grad:
            scaled = run.precision.scale(loss)
            run.hooks.within("backward", run.module.backward, scaled) if run.custom_backward else scaled.backward()
        if run.hears_backward:
            run.hooks.call("on_after_backward")
    return output


def zero_grad(run: Any, index: int) -> None:
    """Drop the gradients of the step before."""
    for optimizer in run.optimizers:
        if run.hears_zero_grad:
            run.hooks.call("on_before_zero_grad", optimizer)
        if run.custom_zero_grad:
            run.hooks.within("optimizer_zero_grad", run.module.optimizer_zero_grad, run.progress.epoch, index, optimizer)
        else:
            optimizer.zero_grad()


def optimizer_step(run: Any, window: Window) -> None:
    """Unscale, clip and step, unless every batch of the window was skipped; then move the step schedulers."""
    run.stepped = run.precision.scaler is None and not window.empty
    if window.empty:
        return
    if run.first_step:
        first_step_checks(run)
    window.correct(run)
    for optimizer in run.optimizers:
        run.finish_gradients(optimizer)
        run.precision.step(optimizer)
    run.precision.update()


def manual_step(run: Any, group: Any) -> None:
    """Hand the batch over to a module with manual optimization: it runs backward and steps its optimizers itself."""
    (batch,), window = group.batches, Window(group)
    batch, run.manual_weight = receive(run, batch, window.samples(0)), window.use(0, None)
    index = run.progress.batch
    if run.hears_start and refused(run, batch, index):
        return
    run.hooks.current = "training_step"
    with run.precision.forward_context():
        output = run.training_step(batch, index)
    run.hooks.current = ""
    run.precision.update()
    if run.first_step:
        first_step_checks(run)
    count_step(run, group)
    if run.hears_end:
        run.hooks.call("on_train_batch_end", _outputs(output), batch, index)


def closure_step(run: Any, group: Any) -> None:
    """A step of LBFGS or of an overridden `optimizer_step`: loss and gradients are asked for once, several times, or not at all.

    The batches ahead of the last are computed as on the fast path; the closure adds the last one, and when it is called again
    computes them all anew. What is logged, and the hooks of a batch, belong to the first time: the weights before the step.
    """
    window, start, last = Window(group), run.progress.batch, group.size - 1
    batches: list[Any] = []
    outputs: list[Any] = []

    def compute(i: int) -> None:
        run.recorder.start_batch(batches[i], window.samples(i))
        outputs.append(forward_backward(run, window, i, batches[i], start + i))

    def closure() -> torch.Tensor | None:
        run.recorder.muted = len(outputs) > last
        if run.recorder.muted:
            window.restart()
            outputs.clear()
        for i in range(len(outputs), group.size):
            compute(i)
        run.recorder.muted = False
        return closure_loss(run, window, outputs)

    for i, batch in enumerate(group.batches):
        batches.append(receive(run, batch, window.samples(i)))
        if run.hears_start and refused(run, batches[i], start + i):
            return
        if i < last:
            compute(i)
            if run.hears_end:
                run.hooks.call("on_train_batch_end", _outputs(outputs[i]), batches[i], start + i)
    run.stepped, step = False, run.module.optimizer_step
    run.hooks.within("optimizer_step", step, run.progress.epoch, start + last, run.step_optimizers[0], closure)
    run.precision.update()
    run.stepped = run.stepped and not window.empty
    count_step(run, group)
    if run.hears_end:
        output = outputs[last] if len(outputs) > last else None  # None: `optimizer_step` did without the closure
        run.hooks.call("on_train_batch_end", _outputs(output), batches[last], start + last)


def closure_loss(run: Any, window: Window, outputs: list[Any]) -> torch.Tensor | None:
    """Make the gradients ready for the optimizer; return the loss they belong to: the mean over the window and over ranks."""
    total = None
    for i, output in enumerate(outputs):
        loss, count = read_output(run, output)
        if loss is not None:
            part = loss.detach() * window.weight(i, count)
            total = part if total is None else total + part
    if run.first_step and not window.empty:
        first_step_checks(run)
    factor = window.correct(run)
    for optimizer in run.optimizers:
        run.finish_gradients(optimizer)
    if total is None:  # LBFGS reads the loss as a number
        return torch.zeros((), device=run.device) if run.lbfgs else None
    total = total if factor is None else total * factor
    return total if run.dist.alone else run.dist.sum(total) / run.world.world_size


def count_step(run: Any, group: Any) -> None:
    """The weights are those of the next step: count it, and move the schedulers that go by steps."""
    p = run.progress
    p.step += 1
    p.step_in_epoch += 1
    p.batch += group.size
    run.position = run.epoch_pass.position
    if run.step_schedulers and run.stepped and not run.manual:
        run.move_schedulers(run.step_schedulers, p.step)


def first_step_checks(run: Any) -> None:
    """What can only be known once a training step ran, and must be known before the first update."""
    run.first_step = False
    check_monitors(run)


def publish_due(run: Any, group: Any) -> bool:
    """Numbers are published every `log_every_n_steps`, and at the last step of an epoch or of the fit."""
    n, step = run.settings.log_every_n_steps, run.progress.step
    return bool(n) and (step % n == 0 or group.last or step == run.settings.max_steps)


def _outputs(output: Any) -> Any:
    """What `on_train_batch_end` sees: a dict with the detached loss."""
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": output["loss"].detach()}
    return output


# -- beginning and ending ------------------------------------------------------------------------------------------------


def begin(run: Any) -> bool:
    """Everything between `on_fit_start` and the first epoch; False when there is nothing to do."""
    limit = run.limit_reached()
    if limit is not None:
        value = getattr(run.settings, limit)
        run.trainer.warn(f"Nothing to do: {limit}={value} is already reached. Raise it (trainer.{limit} = ...) to train on.")
        return False
    if run.settings.limits["train"] == 0:
        run.trainer.warn("Nothing to do: limit_train_batches=0 leaves no batch to train on.")
        return False
    run.training_step = step_caller(run)
    run.validates = run.can_validate()
    sanity_check(run)
    run.loaders.sources("train")  # a loader that cannot work is refused ahead of on_train_start
    if not any(m.training for m in run.module.modules()):
        run.trainer.warn("Every layer of the module is in eval mode, and stays so in training. Call model.train() if not meant.")
    torch.set_grad_enabled(True)
    run.hooks.call("on_train_start")
    return True


def step_caller(run: Any) -> Any:
    """Return `training_step` as the loop calls it: with (batch, batch_idx), or batch alone if it takes no more."""
    from_strategy = run.strategy.training_step
    if takes_index(run.module.training_step):
        return from_strategy
    return lambda batch, index: from_strategy(batch)


def begin_epoch(run: Any) -> Any:
    """Open the epoch's pass over the data and run its first hooks; random streams of a checkpoint continue here."""
    p, every = run.progress, run.settings.reload_dataloaders_every_n_epochs
    if every and p.epoch and p.epoch % every == 0 and p.batch == 0:
        run.loaders.reload("train")
        run.loaders.reload("validate")
    (source,) = run.loaders.sources("train")
    fresh, run.skip_epoch = p.batch == 0, False
    if fresh:
        run.restore_streams()
    run.hooks.call("on_train_epoch_start")
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
    run.whole, run.step_id = False, p.step
    if run.settings.log_every_n_steps:  # the last step of an epoch is never lost, also where the rest was skipped
        run.publish_step()
    run.hooks.call("on_train_epoch_end")
    run.spread(run.collector.publish_epoch(), "train")
    run.hooks.call("on_train_epoch_end/monitors")
    if not run.manual:
        run.move_schedulers([c for c in run.schedulers if c.interval == "epoch"], p.epoch + 1)
    p.epoch_ended, run.position = True, None


def takes_index(step: Any) -> bool:
    """True when a step function takes `batch_idx` (by position) besides the batch."""
    kinds = [p.kind for p in inspect.signature(step).parameters.values()]
    positional = [k for k in kinds if k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds
