"""The training loop: `fit`, `train_epoch`, `train_step`, on one screen; below them what one step consists of.

The unit is the optimizer step. A group holds the batches of one step; its weights make the gradient that of one large
batch, a short last group included. Wishes of hooks are fulfilled at `run.boundary()`, on all ranks at the same step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from trainer.errors import DataError
from trainer.loops.checks import check_gradients, check_monitors
from trainer.loops.evaluate import sanity_check, validate, validation_due, validation_interval
from trainer.loops.transfer import copy_ahead, receive
from trainer.loops.window import Window, read_output


def fit(run: Any) -> None:
    """Train until a limit is reached or a stop is agreed on. Collective."""
    if not begin(run):
        return
    while not run.done:
        train_epoch(run)
    run.hooks.call("on_train_end")
    run.hooks.call("on_fit_end")


def train_epoch(run: Any) -> None:
    """Train one epoch, or what is left of one that is resumed in its middle. Collective."""
    for group in begin_epoch(run).groups(run.accumulate):
        train_step(run, group)
        if publish_due(run, group):
            run.publish_step()
        if validation_due(run, group):
            validate(run)
        if group.last or run.skip_epoch:
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
        return other_step(run, group)
    window, last, first_index = Window(group), group.size - 1, run.progress.batch
    for i, batch in enumerate(group.batches):
        batch = receive(run, batch, window.samples(i))
        index = first_index + i
        if run.hears_start and run.hooks.call("on_train_batch_start", batch, index) == -1:
            run.skip_epoch = True
            return
        output = forward_backward(run, window, i, batch, index)
        if i == last:
            optimizer_step(run, window)
            count_step(run, group)
        if run.hears_end:
            run.hooks.call("on_train_batch_end", _outputs(output), batch, index)


# -- the parts of a step -------------------------------------------------------------------------------------------------


def forward_backward(run: Any, window: Window, i: int, batch: Any, index: int) -> Any:
    """Compute the loss of batch `i` of the window and add its weighted gradient; return what the step returned."""
    last = i == window.size - 1
    with run.strategy.sync_when(last):
        run.hooks.current = "training_step"
        with run.precision.forward_context():
            output = run.training_step(batch, index)
        run.hooks.current = ""
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
            run.module.backward(scaled) if run.custom_backward else scaled.backward()
        if run.hears_backward:
            run.hooks.call("on_after_backward")
    return output


def zero_grad(run: Any, index: int) -> None:
    """Drop the gradients of the step before."""
    for optimizer in run.optimizers:
        if run.hears_zero_grad:
            run.hooks.call("on_before_zero_grad", optimizer)
        if run.custom_zero_grad:
            run.module.optimizer_zero_grad(run.progress.epoch, index, optimizer)
        else:
            optimizer.zero_grad()


def optimizer_step(run: Any, window: Window) -> None:
    """Unscale, clip and step, unless every batch of the window was skipped; then move the step schedulers."""
    if run.first_step:
        first_step_checks(run)
    if window.empty:
        return
    window.correct(run)
    run.stepped = run.precision.scaler is None
    for optimizer in run.optimizers:
        run.finish_gradients(optimizer)
        run.precision.step(optimizer)
    run.precision.update()


def other_step(run: Any, group: Any) -> None:
    """A step that the module takes itself: manual optimization, an overridden `optimizer_step`, or LBFGS."""
    window, start = Window(group), run.progress.batch
    batches = list(group.batches)
    received: dict[int, Any] = {}
    outputs: dict[int, Any] = {}

    def receive_once(i: int) -> Any:
        if i not in received:
            received[i] = receive(run, batches[i], window.samples(i))
            if run.hears_start and run.hooks.call("on_train_batch_start", received[i], start + i) == -1:
                run.skip_epoch = True
        return received[i]

    def closure() -> torch.Tensor | None:
        window.restart()
        total = None
        for i in range(group.size):
            fresh = i not in received
            batch = receive_once(i)
            outputs[i] = forward_backward(run, window, i, batch, start + i)
            loss, _ = read_output(run, outputs[i])
            if loss is not None:
                total = loss.detach() if total is None else total + loss.detach()
            if fresh and i < group.size - 1 and run.hears_end:
                run.hooks.call("on_train_batch_end", _outputs(outputs[i]), batch, start + i)
        if run.first_step:
            first_step_checks(run)
        window.correct(run)
        for optimizer in run.optimizers:
            run.finish_gradients(optimizer)
        return total

    last = group.size - 1
    if run.manual:
        batch = receive_once(0)
        if run.skip_epoch:
            return
        run.hooks.current = "training_step"
        with run.precision.forward_context():
            outputs[0] = run.training_step(batch, start)
        run.hooks.current = ""
        if run.first_step:
            first_step_checks(run)
    else:
        run.stepped = run.precision.scaler is None
        run.module.optimizer_step(run.progress.epoch, start + last, run.step_optimizers[0], closure)
        run.precision.update()
    count_step(run, group)
    if run.hears_end:
        run.hooks.call("on_train_batch_end", _outputs(outputs.get(last)), received.get(last, batches[last]), start + last)


def count_step(run: Any, group: Any) -> None:
    """The weights are those of the next step: count it, and move the schedulers that go by steps."""
    p = run.progress
    p.step += 1
    p.step_in_epoch += 1
    p.batch += group.size
    run.position = run.epoch_pass.position
    run.whole = True
    if run.step_schedulers and run.stepped and not run.manual:
        run.move_schedulers(run.step_schedulers, p.step)


def first_step_checks(run: Any) -> None:
    """What can only be known once a training step ran, and must be known before the first update."""
    run.first_step = False
    check_gradients(run)
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
    (source,) = run.loaders.sources("train")
    run.training_step = step_caller(run)
    run.validates = run.can_validate()
    run.val_every = validation_interval(run, source)
    sanity_check(run)
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
    (source,) = run.loaders.sources("train")
    fresh, run.skip_epoch = p.batch == 0, False
    if fresh:
        run.restore_streams()
        run.collector.reset()
    run.hooks.call("on_train_epoch_start")
    run.epoch_pass = source.epoch(p.epoch, run.position)
    copy_ahead(run, run.epoch_pass)
    if run.saved_sums is not None:
        run.collector.load_state_dict(run.saved_sums, run.device)
        run.saved_sums = None
    run.restore_streams()
    return run.epoch_pass


def end_epoch(run: Any) -> None:
    """Epoch hooks, epoch numbers, epoch schedulers, in this order: monitors and plateau schedulers read fresh numbers."""
    p = run.progress
    if p.batch == 0 and not run.skip_epoch:
        raise DataError(f"The training loader gave no batch in epoch {p.epoch}. Can it be iterated only once?")
    run.whole = True
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
