"""The search for a batch size: a few steps with each, until memory runs out on any rank."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from torch.utils.data import DataLoader

from callbacks.tuning import SizeSearch
from trainer.data.combined import CombinedLoader, flatten
from trainer.errors import MisconfigurationException
from trainer.loops.evaluate import modes_kept, outputs
from trainer.loops.fit import train_step
from trainer.loops.parts import is_out_of_memory, samples_in
from trainer.loops.step import count_step, outputs_of, refused
from trainer.loops.transfer import receive
from trainer.loops.window import Window
from trainer.tuner.attribute import check_attribute, set_attribute
from trainer.tuner.probe import Probe, all_of, probing

__all__ = ["check_size", "find_size"]

_WORD = {"validate": "validation", "test": "test", "predict": "predict"}
_HOOK = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


def check_size(search: SizeSearch, job: Any) -> None:
    """Refuse a search that cannot work, before anything starts.

    Raises:
        MisconfigurationException: no such attribute, or a loader that was passed and cannot follow it.
    """
    name, stage = search.batch_arg_name, "train" if job.fn == "fit" else job.fn
    hook, owner = _HOOK[stage], type(job.module).__name__
    advice = f"Set it in __init__ and use it in {hook}, or name it with batch_arg_name=."
    check_attribute((name,), job.module, job.datamodule, advice)
    if job.loaders.get(stage) is not None:
        raise MisconfigurationException(
            f"The batch size of a loader that is passed to the call cannot be changed: make it in {owner}.{hook} or in a DataModule, with "
            f"batch_size=self.{name}, and pass none."
        )


def find_size(run: Any, search: SizeSearch) -> int:
    """Try batch sizes and put everything back; return the largest that fits, the same on all ranks. Collective.

    Raises:
        MisconfigurationException: see `check_size`; a limit of 0 batches; a loader does not follow the attribute; ranks that wait for each other inside a step.
        torch.OutOfMemoryError: no size that was tried fits.
    """
    check_size(search, run.job)
    stage = "train" if run.fn == "fit" else run.fn
    if run.settings.limits[stage] == 0:
        raise MisconfigurationException(f"A search for a batch size takes steps, and the trainer's limit of batches for {stage} is 0.")
    if not run.dist.alone:
        _check_ranks(run)
    trials = _Trials(run, search)
    try:
        return trials.search_largest()
    finally:
        trials.clean()


def _check_ranks(run: Any) -> None:
    """Refuse runs whose ranks wait for each other inside forward or backward, also for one that ran out of memory there."""
    steps = run.fn == "fit"
    found = {
        f"strategy={run.strategy.name!r}": run.strategy.waits_inside or run.strategy.pipeline is not None,
        "sync_batchnorm=True": steps and run.settings.sync_batchnorm,
        "manual optimization": steps and run.manual,
        "LBFGS or an optimizer_step of your own": steps and run.by_closure,
    }
    if any(found.values()):
        raise MisconfigurationException(
            f"A search for the batch size on several ranks does not go with {', '.join(name for name, used in found.items() if used)}: ranks wait for "
            "each other inside a step, also for one that has run out of memory. Search with devices=1."
        )


class _OutOfMemoryError(Exception):
    """Memory ran out on some rank; raised on all, once they know."""


class _Trials:
    """The sizes tried so far, and how to try another."""

    def __init__(self, run: Any, search: SizeSearch) -> None:
        self.run, self.settings = run, search
        self.stage = "train" if run.fn == "fit" else run.fn
        self.kept = all_of(run)
        limits = {stage: 0 if limit == 0 else None for stage, limit in run.settings.limits.items()}  # a fraction could be less than a batch
        self.changes: dict[str, Any] = {"limits": limits, "recover_oom": False}

    def search_largest(self) -> int:
        """Double the size until it does not fit, then, with "binsearch", go between; from a first size that does not fit, go down."""
        search, say = self.settings, self.run.trainer.print
        cap = self._cap()
        size, best, failed = min(search.init_val, cap), 0, cap + 1
        for _ in range(search.max_trials):
            fits = self.fits(size)
            say(f"Batch size {size} {'fits' if fits else 'does not fit'}.")
            if fits:
                best = size
            else:
                failed = size
            if failed - best <= 1 or (search.mode == "power" and best and failed <= cap):
                break
            size = min(2 * size, cap) if failed > cap else (best + failed) // 2
        if not best:
            raise torch.OutOfMemoryError(f"No batch size that was tried fits into memory; the smallest was {failed}. Lower init_val, or raise max_trials.")
        if search.mode == "binsearch" and failed <= cap:
            best = max(1, int(best * (1 - search.margin)))
        return best

    def _cap(self) -> int:
        """The largest size that makes sense: the samples of an epoch on a rank, or max_val."""
        set_attribute(self.settings.batch_arg_name, self.run.module, self.run.datamodule, 1)
        with probing(self.run, **self.changes) as probe:
            self._check_followed(probe, 1)
            lengths = [math.inf if s.num_batches is None else s.num_batches for s in probe.loaders.sources(self.stage)]
        self.kept.restore()
        return self.run.dist.broadcast(int(min(max(lengths), self.settings.max_val)))

    def fits(self, size: int) -> bool:
        """Take the steps of one trial. Collective."""
        set_attribute(self.settings.batch_arg_name, self.run.module, self.run.datamodule, size)
        full = False
        try:
            with probing(self.run, **self.changes) as probe:
                self._check_followed(probe, size)
                self._try(probe)
        except _OutOfMemoryError:
            full = True
        except RuntimeError as error:
            if not self.run.dist.alone or not is_out_of_memory(error):
                raise
            full = True
        self.clean()  # the error is gone by now, and with it the stack that held on to the activations
        return not full

    def clean(self) -> None:
        """Put everything back, and give up the memory."""
        self.kept.restore()
        gc.collect()
        if self.run.device.type != "cpu":
            torch.accelerator.empty_cache()

    def _try(self, probe: Probe) -> None:
        if self.stage != "train":
            _evaluate(probe, self.stage, self.settings.steps_per_trial)
            return
        taken, usual = 0, probe.other_step if probe.dist.alone else _local_step

        def step(run: Any, group: Any) -> None:
            nonlocal taken
            run.other_step = usual
            train_step(run, group)
            run.other_step, taken = step, taken + 1
            run.done = taken == self.settings.steps_per_trial or run.dist.agree(run.wants_to_stop())

        probe.other_step = step
        probe.train()
        if probe.can_validate():
            probe.stage = "validate"
            _evaluate(probe, "validate", self.settings.steps_per_trial)

    def _check_followed(self, probe: Probe, size: int) -> None:
        """Make sure that the loaders have the size that the attribute says."""
        (*sources,) = probe.loaders.sources(self.stage)
        raw = probe.loaders.raw[self.stage]
        leaves = [leaf for part in flatten(raw) for leaf in (part.flattened if isinstance(part, CombinedLoader) else [part])]
        sizes = [_size_of(leaf) for leaf in leaves]
        if not any(sizes):  # no DataLoader: its first batch tells
            passing = sources[0].epoch(0)
            sizes = [samples_in(next(iter(passing.batches()), None))]
            passing.close()
        if any(sizes) and size not in sizes:
            hook, name = _HOOK[self.stage], self.settings.batch_arg_name
            raise MisconfigurationException(
                f"{hook} made a loader with batches of {', '.join(map(str, sizes))} while {name} was {size}: it has to follow the attribute "
                f"(batch_size=self.{name})."
            )


def _size_of(loader: Any) -> int | None:
    if not isinstance(loader, DataLoader):
        return None
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


def _local_step(run: Any, group: Any) -> None:
    """Take an optimizer step on this rank's own gradients; then all ranks tell each other whether memory sufficed. Collective."""
    full, window, first = False, Window(group), run.progress.batch
    window.size += 1  # no batch is the last, after which ranks wait for each other's gradients; what DDP holds for those is there
    run.may_refuse = False
    try:
        for i, batch in enumerate(group.batches):
            batch = receive(run, batch, window.samples(i))
            if run.hears_start and refused(run, batch, first + i):
                break
            output = run.compute(run, window, i, batch, first + i)
            if run.hears_end:
                run.hooks.call("on_train_batch_end", outputs_of(output), batch, first + i)
        for optimizer in run.optimizers:
            run.finish_gradients(optimizer)
            run.precision.step(optimizer)
        run.precision.update()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        full = True
    if run.dist.agree(full):
        raise _OutOfMemoryError
    count_step(run, group)


def _evaluate(run: Any, stage: str, batches: int) -> None:
    """Run the step of an evaluation on a few batches of each loader; then all ranks tell each other whether memory sufficed. Collective."""
    word, full, sources = _WORD[stage], False, run.loaders.sources(stage)
    run.collector = run.new_collector()
    with run.strategy.evaluating(), modes_kept(run.module), torch.inference_mode(run.settings.inference_mode), torch.no_grad():
        for name in ("model_eval", "start", "epoch_start"):
            run.hooks.call(f"on_{word}_{name}")
        try:
            for index, source in enumerate(sources):
                run.recorder.loader = index if len(sources) > 1 else None
                for _ in outputs(run, word, source, index, len(sources) > 1, batches):
                    pass
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            full = True
        if run.dist.agree(full):
            raise _OutOfMemoryError
        for name in ("epoch_end", "end"):
            run.hooks.call(f"on_{word}_{name}")
    run.hooks.call(f"on_{word}_model_train")
