"""Forward and backward of a batch that travels through pipeline stages: the strategy decides what is computed when, in parts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from trainer.loops.parts import cut, samples_in
from trainer.loops.step import outputs_of, zero_grad
from trainer.loops.window import Window, read_output
from trainer.metric_objects import unmoved
from trainer.strategies.replicas import join

__all__ = ["staged"]

_NULL = nullcontext()


def staged(run: Any, window: Window, i: int, batch: Any, index: int) -> Any:
    """Do what `forward_backward` does, through the stages of a pipeline; return the whole batch's output, on every rank. Collective."""
    pipeline, recorder = run.strategy.pipeline, run.recorder
    last, ending = i == window.size - 1, pipeline.index == pipeline.last
    if i == 0:
        zero_grad(run, index)
    parts, samples = _parts(run, batch), window.samples(i)
    each = None if samples is None else samples / len(parts)
    weight = window.weight(i) / len(parts)

    def step(number: int) -> Any:
        recorder.start_batch(parts[number], each)
        return run.training_step(parts[number], index)

    def loss_of(output: Any) -> torch.Tensor:
        loss, count = read_output(run, output)
        factor = weight if count is None else 0 * count if samples == 0 else count
        return run.precision.scale(loss * factor)

    muted, recorder.muted = recorder.muted, recorder.muted or not ending  # what the first stage logs, the last one does as well
    before, run.hooks.current = run.hooks.current, "training_step"
    with unmoved(run.module, run.device) if samples == 0 else _NULL:
        outputs = run.strategy.drive.train(len(parts), step, loss_of, run.precision.forward_context)
    run.hooks.current, recorder.muted = before, muted
    recorder.start_batch(batch, samples)
    output = _told(run, _joined(outputs, run.device) if ending else None)
    window.use(i, output.get("count") if isinstance(output, dict) else None)
    if last:
        run.strategy.sync_gradients()
        if run.precision.scaler is not None:
            run.precision.scale(output["loss"])  # a scaler begins with its first loss, which only the last stage has scaled
            for optimizer in run.optimizers:
                pipeline.spread_overflow(optimizer)
    if run.hears_backward:
        run.hooks.call("on_after_backward")
    if run.by_closure:
        output["loss"].requires_grad_()  # as what a closure asks for has it
    return output


def _parts(run: Any, batch: Any) -> list[Any]:
    """Cut a batch into as many equal parts as there may be; their losses then weigh alike, and stages see one shape."""
    size, wanted = samples_in(batch), run.strategy.pipeline.micro_batches
    if size is None:
        run.tell_once(
            "A batch holds tensors that differ in their first dimension, or none, so it goes through the pipeline in one piece, and stages "
            "wait for each other. Give every tensor one entry a sample."
        )
    count = next((n for n in range(min(wanted, size or 1), 0, -1) if (size or 1) % n == 0), 1)
    return [batch] if count == 1 else cut(batch, [size // count] * count)  # type: ignore[operator]


def _joined(outputs: list[Any], device: torch.device) -> Any:
    """Return what `training_step` would have returned for the whole batch, as far as one can tell from its parts."""
    found = [outputs_of(output) for output in outputs]
    return found[0] if len(found) == 1 else join(found, [1] * len(found), device)


def _told(run: Any, output: Any) -> Any:
    """Give every rank the last stage's loss and count; ahead of the first update also the names it logged, for checks of monitors."""
    pipeline = run.strategy.pipeline
    if pipeline.index != pipeline.last:
        loss, count, names = pipeline.line.told_by_last()
        run.collector.expect(names or [])
        return {"loss": loss} if count is None else {"loss": loss, "count": count}
    pipeline.line.told_by_last(output["loss"], output.get("count"), run.collector.flags() if run.first_step else None)
    return output
