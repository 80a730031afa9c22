"""Validation and test: every sample exactly once over all ranks, in eval mode, without gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.errors import MisconfigurationException
from trainer.loops.transfer import copy_ahead, receive, takes_index
from trainer.metrics import Published
from trainer.seed import isolate_rng, rng_state, set_rng_state

__all__ = ["evaluate", "modes_kept", "outputs", "sanity_check", "validate", "validate_late", "validation_due", "validation_interval"]

_WORD = {"validate": "validation", "sanity_check": "validation", "test": "test"}


def evaluate(run: Any) -> list[dict[str, float]]:
    """Run `Trainer.validate` or `Trainer.test`; return, for each loader, a dict of the numbers of its epoch. Collective."""
    run.strategy.wrap(training=False)
    published = _pass(run, run.fn)
    homes = run.recorder.homes
    return [
        {
            name: published.callback[name]
            for name in published.callback
            if name in published.epochs and published.loader[name] in (None, i) and i in homes.get(name, (i,))
        }
        for i in range(len(run.loaders.sources(run.fn)))
    ]


def validation_due(run: Any, group: Any) -> bool:
    """True when the step just taken is followed by validation. Intervals count optimizer steps."""
    s, p = run.settings, run.progress
    if not run.validates:
        return False
    if s.check_val_every_n_epoch is None:
        return p.step % s.val_check_interval == 0
    if (p.epoch + 1) % s.check_val_every_n_epoch:
        return False
    return p.step_in_epoch % run.val_every == 0 if run.val_every else group.last


def validation_interval(run: Any, source: Any) -> int:
    """Return after how many optimizer steps of the coming epoch validation is due; 0 where it is due at the epoch's end.

    Raises:
        MisconfigurationException: ahead of the first step, when the interval is longer than the epoch; when it is a fraction of an
            unknown length.
    """
    every = run.settings.val_check_interval
    if not run.validates or (isinstance(every, float) and every == 1.0):
        return 0
    batches = source.num_batches
    steps = None if batches is None else -(-batches // run.accumulate)
    if isinstance(every, float):
        if steps is None:
            raise MisconfigurationException(
                f"val_check_interval={every} is a fraction of an epoch, whose length the training loader does not know. Give a "
                "whole number of optimizer steps."
            )
        return max(1, int(steps * every))
    if run.settings.check_val_every_n_epoch is not None and steps is not None and every > steps:
        if not run.first_step:  # the accumulation has grown since: no reason to lose what was trained
            return 0
        raise MisconfigurationException(
            f"val_check_interval={every} is more than the {steps} optimizer steps of an epoch, so validation would never run. Lower it, "
            "or set check_val_every_n_epoch=None to count steps across epochs."
        )
    return every


def validate(run: Any) -> None:
    """Validate inside a fit: the state of training is the same before and after. Collective.

    Raises:
        SIGTERMException: a signal cut it short; what it had done is thrown away, and the resumed run does it anew.
    """
    stage, run.stage, run.wished_late = run.stage, "validate", True
    collector, streams = run.collector, rng_state()
    try:
        whole = _pass(run, "validate") is not None
    finally:
        run.stage, run.collector = stage, collector
        torch.set_grad_enabled(True)
    if not whole:
        set_rng_state(streams)
        run.progress.validation_owed = 2 if run.last_group else 1
        run.whole = True
        run.heed(run.notice.bits)


def validate_late(run: Any) -> bool:
    """Do the validation that a signal cut short in the run before; return False when the fit is over with that. Collective."""
    p = run.progress
    run.step_id = run.published_step = p.step
    run.whole, run.last_group, p.validation_owed = False, p.validation_owed == 2, 0
    validate(run)
    if not run.last_group:
        run.boundary()
    return not run.done


def sanity_check(run: Any) -> None:
    """Try a few validation batches ahead of step 1. Nothing they log is kept, and no random stream moves. Collective."""
    n = run.settings.num_sanity_val_steps
    run.sanity_checked = False
    if not n or not run.validates or run.progress.step:
        return
    stage, run.stage = run.stage, "sanity_check"
    collector = run.collector
    with isolate_rng():
        run.hooks.call("on_sanity_check_start")
        try:
            published = _pass(run, "sanity_check", limit=None if n == -1 else n) or Published()
        finally:
            run.stage, run.collector = stage, collector
        run.known_names.update(published.callback)
        run.hooks.call("on_sanity_check_end")
    run.trainer.results.clear_metrics()
    run.sanity_checked = True


def _pass(run: Any, stage: str, limit: int | None = None) -> Published | None:
    """One pass over all loaders of a stage; None when a signal cut it short."""
    word, hooks = _WORD[stage], run.hooks
    if run.fn == "fit" and stage == "validate":
        hooks.call("on_validation_model_zero_grad")
    kind = "validate" if stage == "sanity_check" else stage
    run.loaders.sources(kind)  # one that cannot work is refused ahead of the hooks
    run.collector = run.new_collector()
    run.strategy.sync_buffers()
    with run.strategy.evaluating(), modes_kept(run.module), torch.inference_mode(run.settings.inference_mode), torch.no_grad():
        hooks.call(f"on_{word}_model_eval")
        hooks.call(f"on_{word}_start")
        sources = run.loaders.sources(kind)  # a hook may have changed the batch size
        hooks.call(f"on_{word}_epoch_start")
        for index, source in enumerate(sources):
            if index and leaves(run):
                break
            run.recorder.loader = index if len(sources) > 1 else None
            for _ in outputs(run, word, source, index, len(sources) > 1, limit):
                pass
        run.recorder.loader = None
        if run.fn == "fit" and stage == "validate" and run.dist.union(run.notice.bits if leaves(run) else 0):
            return None
        show_epoch(run, f"on_{word}_epoch_end")
        hooks.call(f"on_{word}_epoch_end")
        published = run.collector.publish_step().join(run.collector.publish_epoch())
        if stage != "sanity_check":
            run.spread(published, stage)
        hooks.call(f"on_{word}_end")
    hooks.call(f"on_{word}_model_train")
    return published


def leaves(run: Any) -> bool:
    """True when this rank has got a signal, and may leave the batches of a validation early.

    No other rank waits for it there, as ranks have different numbers of batches anyway; all meet behind the last one, where they agree.
    """
    return run.notice.bits != 0 and not run.whole_validation


def show_epoch(run: Any, hook: str) -> None:
    """Put the epoch's numbers into `callback_metrics` ahead of an epoch-end hook that the user overrides. Collective."""
    if run.hooks.foreign(hook):
        run.trainer.results.add(run.collector.peek_epoch())


def outputs(run: Any, word: str, source: Any, index: int, several: bool, limit: int | None = None) -> Iterator[Any]:
    """Run `validation_step`, `test_step` or `predict_step` (as `word` says) on a loader's batches; yield what it returns."""
    hooks, name = run.hooks, f"{word}_step"
    step = step_caller(run.profiled(name, run.strategy.step(name)), several, index)
    hears_start, hears_end = hooks.used(f"on_{word}_batch_start"), hooks.used(f"on_{word}_batch_end")
    passing = run.evaluated = source.epoch(run.progress.epoch if run.fn == "fit" else 0)
    copy_ahead(run, passing)
    for i, batch in enumerate(run.profiled_batches(word, passing) if run.profiles else passing.batches()):
        if (limit is not None and i >= limit) or (i and leaves(run)):
            break
        batch, run.recorder.place = receive(run, batch, None, index), (index, i)
        if hears_start:
            hooks.call(f"on_{word}_batch_start", batch, i, index)
        hooks.current = name
        with run.precision.forward_context():
            output = step(batch, i)
        hooks.current = ""
        if hears_end:
            hooks.call(f"on_{word}_batch_end", output, batch, i, index)
        yield output
    run.recorder.start_batch(None)


def step_caller(step: Any, several: bool, index: int) -> Any:
    """Return `step` as the loop calls it, f(batch, batch_idx), whichever of its arguments it takes."""
    parameters = inspect.signature(step).parameters
    if several and ("dataloader_idx" in parameters or len(parameters) > 2):
        return lambda batch, i: step(batch, i, index)
    return step if takes_index(step) else lambda batch, i: step(batch)


@contextmanager
def modes_kept(module: torch.nn.Module) -> Iterator[None]:
    """Put every sub-module back into the mode (train or eval) it had on entering."""
    before = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for m, training in before:
            m.training = training
