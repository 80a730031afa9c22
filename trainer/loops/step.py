"""What one optimizer step consists of: forward and backward of its batches, the step itself, and the slower paths.

Manual optimization hands the batch over; LBFGS and an overridden `optimizer_step` get a closure. Nobody else pays for either.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from trainer.loops.checks import check_monitors
from trainer.loops.transfer import receive
from trainer.loops.window import Window, read_output
from trainer.metric_objects import unmoved

__all__ = ["closure_step", "count_step", "forward_backward", "manual_step", "optimizer_step", "outputs_of", "refused"]

_NULL = nullcontext()


def refused(run: Any, batch: Any, index: int) -> bool:
    """Run the hooks ahead of a batch; True when one returned -1, which ends the epoch on all ranks."""
    wish = run.hooks.call("on_train_batch_start", batch, index) == -1
    run.skip_epoch = run.dist.agree(wish) if run.may_refuse else wish
    if run.skip_epoch:
        run.strategy.drop_step()
    return run.skip_epoch


def forward_backward(run: Any, window: Window, i: int, batch: Any, index: int) -> Any:
    """Compute the loss of batch `i` of the window and add its weighted gradient; return what the step returned."""
    last = i == window.size - 1
    with run.strategy.sync_when(last):
        before, run.hooks.current = run.hooks.current, "training_step"
        filler = window.samples(i) == 0  # a sample again, with weight 0: this rank has none left, and the others wait for it
        with run.precision.forward_context(), unmoved(run.module, run.device) if filler else _NULL:
            output = run.training_step(batch, index)
        run.hooks.current = before
        loss, count = read_output(run, output)
        if i == 0:
            zero_grad(run, index)
        if run.guard is not None and run.guard.leaves_out(loss):
            return output
        if loss is None:
            run.tell_once("training_step returned None, so the batch is skipped. Return the loss to train on it.")
            return None
        weight = window.use(i, count)
        if weight is not None:
            loss = loss * weight
        if run.hears_backward:
            run.hooks.call("on_before_backward", loss)
        if last and run.asks_ahead:  # beside backward it costs no wait
            run.asked = run.strategy.ask_ahead(run.wishes)
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
        run.hooks.call("on_train_batch_end", outputs_of(output), batch, index)


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
        outputs.append(run.compute(run, window, i, batches[i], start + i))

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
                run.hooks.call("on_train_batch_end", outputs_of(outputs[i]), batches[i], start + i)
    run.stepped, step = False, run.module.optimizer_step
    run.hooks.within("optimizer_step", step, run.progress.epoch, start + last, run.step_optimizers[0], closure)
    run.precision.update()
    run.stepped = run.stepped and not window.empty
    count_step(run, group)
    if run.hears_end:
        output = outputs[last] if len(outputs) > last else None  # None: `optimizer_step` did without the closure
        run.hooks.call("on_train_batch_end", outputs_of(output), batches[last], start + last)


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
    names = {entry.label(kind) for entry in run.collector.entries.values() for kind in ("step", "epoch")}
    if run.world.is_global_zero:
        for logger in run.trainer.loggers:
            logger.settle(names)  # which names training has: validation numbers of the same name go elsewhere


def outputs_of(output: Any) -> Any:
    """What `on_train_batch_end` sees: a dict with the detached loss."""
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": output["loss"].detach()}
    return output
