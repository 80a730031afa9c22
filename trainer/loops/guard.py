"""Steps of a run with `bad_loss` or `recover_oom`: what the ranks find out about a step before it is taken.

For losses they meet once a step, ahead of its last backward: no gradient of a step that is left out is reduced. A rank that runs out
of memory computes its part of the step again by itself; gradients are reduced after backward then, so nobody waits inside one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from trainer.data.epoch import Group
from trainer.errors import BadLossError
from trainer.loops.parts import cut, is_out_of_memory, samples_in
from trainer.loops.step import count_step, forward_backward, optimizer_step, outputs_of, refused
from trainer.loops.transfer import receive
from trainer.loops.window import Window
from trainer.metric_objects import copies, metrics_of, put_back
from trainer.strategies.replicas import join

__all__ = ["Guard", "guarded_step"]

_SHOWN = 20  # sample indices in a message


def guarded_step(run: Any, group: Any) -> None:
    """Take one optimizer step, in smaller parts if memory runs out, or leave it out on all ranks alike. Collective."""
    guard, first_index, last = run.guard, run.progress.batch, group.size - 1
    guard.begin(group)
    for i, batch in enumerate(group.batches):
        batch = receive(run, batch, guard.samples(i))
        if run.hears_start and refused(run, batch, first_index + i):
            return
        output = guard.compute(i, batch)
        if i == last:
            guard.finish()
            count_step(run, group)
        if run.hears_end:
            run.recorder.start_batch(batch, guard.samples(i))
            run.hooks.call("on_train_batch_end", output, batch, first_index + i)


class Guard:
    """What is known of the step being computed, and what it takes to compute it again or to leave it out.

    `run.split` says into how many parts each batch is cut; it only grows, and goes into checkpoints.
    """

    def __init__(self, run: Any) -> None:
        self.run, self.policy, self.recovers = run, run.settings.bad_loss, run.settings.recover_oom
        self.metrics = metrics_of(run.module)
        self.split = run.split  # what the ranks agreed on

    def samples(self, i: int) -> int | None:
        """Return how many samples batch `i` holds on this rank, where that is known."""
        return None if self.group.counts is None else self.group.counts[i]

    def begin(self, group: Any) -> None:
        """Begin a step: what it logs can be taken back from here on. Collective."""
        self.group, self.bad, self.judged = group, [], False
        self.kept: list[Any] = []  # its batches, where they may be needed again
        if self.recovers:  # what DDP does ahead of a forward, where it wraps the module
            self.run.strategy.sync_buffers()
        self._restart()

    def _restart(self) -> None:
        self.marks = self.run.collector.mark(), copies(self.metrics)
        self.losses: list[tuple[int, torch.Tensor | None]] = []  # (batch, loss) of every part
        self.weighed = Group(0, [], self.group.last, (), []) if self.recovers else self.group
        self.window = Window(self.weighed)

    # -- computing ---------------------------------------------------------------------------------------------------------

    def compute(self, i: int, batch: Any) -> Any:
        """Add the gradient of batch `i`, in parts that memory suffices for; return what `on_train_batch_end` sees.

        Raises:
            torch.OutOfMemoryError: when memory ran out and the batch cannot be cut any more.
        """
        if self.recovers:
            self.kept.append(batch)
        todo, hook, output = [(i, batch)], self.run.hooks.current, None
        while True:
            try:
                for k, one in todo:
                    output = self._compute(k, one)
                return output
            except RuntimeError as error:
                if not self.recovers or not is_out_of_memory(error):
                    raise
                if not self.divisible:
                    raise torch.OutOfMemoryError(
                        f"{error}\nrecover_oom=True cannot help: the batch is of one sample by now, or of tensors without a common dimension 0."
                    ) from error
            # The error is gone here, and with it the stack that held on to the activations.
            self.run.hooks.current, output = hook, None
            self._halve()
            todo = list(enumerate(self.kept))

    def _compute(self, i: int, batch: Any) -> Any:
        run, outputs, sizes = self.run, [], []
        self.batch = i
        for part, size, number in self._parts(i, batch):
            run.recorder.start_batch(part, self.window.samples(number))
            outputs.append(outputs_of(forward_backward(run, self.window, number, part, run.progress.batch + i)))
            sizes.append(size)
        return outputs[0] if len(outputs) == 1 else join(outputs, sizes, run.device)

    def _parts(self, i: int, batch: Any) -> Iterator[tuple[Any, int, int]]:
        """Yield (part, samples, number in the window) of batch `i`, each with its share of the batch's weight in the window."""
        last = self.final = i == self.group.size - 1
        if not self.recovers:
            yield batch, 1, i
            return
        weight, known, count = Window(self.group).weight(i), self.samples(i), samples_in(batch)
        if not count or (known and count != known):  # dimension 0 is not the samples
            count = None
        number = 1 if count is None else min(self.run.split, count)
        sizes = [1] if count is None else [count // number + (k < count % number) for k in range(number)]
        self.divisible = count is not None and count > number
        for k, part in enumerate([batch] if number == 1 else cut(batch, sizes)):
            self.weighed.weights.append(weight if number == 1 else weight * sizes[k] / count)
            self.weighed.counts.append(sizes[k] if known and number > 1 else known)
            self.window.size += 1
            self.final = last and k == number - 1
            yield part, sizes[k], self.window.size - 1

    def _halve(self) -> None:
        """Forget what was computed of the step, and cut batches into twice as many parts."""
        self._take_back()
        gc.collect()
        if self.run.device.type != "cpu":
            torch.accelerator.empty_cache()
        self.run.split *= 2
        self._restart()

    # -- losses ------------------------------------------------------------------------------------------------------------

    def leaves_out(self, loss: torch.Tensor | None) -> bool:
        """True when the loss at hand is to have no backward. Collective in the last batch of a step, where it reads the device once."""
        if self.policy is None or self.judged:
            return False
        self.losses.append((self.batch, None if loss is None else loss.detach()))
        if not self.final:
            return loss is None
        numbers = [one for _, one in self.losses if one is not None]
        good = iter(torch.stack([one.reshape(()).isfinite() for one in numbers]).tolist() if numbers else ())
        mine = [(i, one) for i, one in self.losses if one is None or not next(good)]
        if self.run.dist.agree(bool(mine)):
            self.bad = [line for lines in self.run.dist.gather(self._lines(mine)) for line in lines]
        self.judged = True
        return bool(self.bad)

    def _lines(self, bad: list[tuple[int, torch.Tensor | None]]) -> list[str]:
        """What this rank has to say of its bad batches, one line each."""
        lines, run = [], self.run
        for i in dict.fromkeys(i for i, _ in bad):
            values = dict.fromkeys("None" if loss is None else f"{loss.item():.4g}" for k, loss in bad if k == i)
            places = run.epoch_pass.entries(self.group.size - i)
            samples = "unknown" if places is None else ", ".join(map(str, places[:_SHOWN])) + (", ..." if len(places) > _SHOWN else "")
            lines.append(f"{' and '.join(values)} on rank {run.world.rank}, batch {run.progress.batch + i}, samples [{samples}]")
        return lines

    # -- the end of a step -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take the step, or do with it as the policy says of a bad one. Collective.

        Raises:
            BadLossError: on all ranks, when the policy is "raise".
        """
        run = self.run
        if self.bad:
            self._leave_out()
            return
        if self.recovers:
            self._settle_split()
            run.strategy.sync_gradients()
        optimizer_step(run, self.window)

    def _leave_out(self) -> None:
        run = self.run
        run.strategy.drop_step()
        self._take_back()
        message = f"Bad loss in step {run.step_id} (epoch {run.progress.epoch}): {'; '.join(self.bad)}."
        if self.policy == "raise":
            raise BadLossError(f"{message} The weights are those before the step.")
        run.trainer.warn(f"{message} The step is left out on all ranks.")
        run.stepped = False
        run.should_stop |= self.policy == "stop"

    def _take_back(self) -> None:
        """Forget the gradients and numbers of the step."""
        for optimizer in self.run.optimizers:
            optimizer.zero_grad()
        self.run.collector.back_to(self.marks[0])
        put_back(self.marks[1])

    def _settle_split(self) -> None:
        """From the next step on all ranks cut alike."""
        run, before = self.run, self.split
        self.split = run.split = int(run.dist.maximum(torch.tensor([run.split], dtype=torch.int64)))
        if run.split > before:
            run.tell_once(
                f"Out of memory in step {run.step_id}: from here on each batch is computed in {run.split} parts. The update is that of the whole "
                "batch."
            )
