"""A fit that torchelastic has started again: where it goes on, with which accumulation, and when it gives up.

What is known of earlier starts lies in the agents' store, which outlives the ranks: the checkpoints that were there before the first of
them, its number of ranks, and the step at which each began.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

from trainer.checkpoint import find
from trainer.earlier import checkpoint_folders, checkpoint_for
from trainer.errors import RestartError
from trainer.launchers import restarted

__all__ = ["Restarts"]

_fits = itertools.count(1)  # of this process: every start of a program has its fits in the same order


class Restarts:
    """The part of `Run` that knows torchelastic."""

    _starts: dict[str, Any] | None = None  # the record of this fit; None where nobody would start it again

    def look_back(self) -> None:
        """Find out whether this fit was started before, and then go on from the newest file it has left since. Collective."""
        count, has_store = restarted.elastic_restarts()
        if self.fn != "fit" or self.job.work is not None or self.trainer._launcher is None or self.world.init_method != "env://" or not (has_store or count):
            return
        found = None
        if self.world.is_global_zero:
            found = self._record(next(_fits), count) if has_store else self._without_record()
        self._starts, path, told = self.dist.broadcast(found)
        if told:
            self.trainer.print(told)
        if path is not None:
            self.job.ckpt_path = self.trainer.results.ckpt_path = path
            self.job.continues = self.trainer.results.continues = True
        if self._starts is not None and self._starts["shares"] != self.place[1]:
            self._keep_global_batch(self._starts["shares"])

    def _record(self, number: int, count: int) -> tuple[dict[str, Any], str | None, str]:
        """Read or begin the record of fit `number`. Return it, the file to go on from, and what to say. On rank 0."""
        store, key = self.dist.job_store(), f"fit/{number}"
        folders = checkpoint_folders(self.trainer)
        files = {file: os.stat(file).st_mtime_ns for file in find.files(folders)}
        if not store.check([key]):
            record = {"key": key, "folders": folders, "files": files, "shares": self.place[1], "steps": {}, "count": count}
            store.set(key, json.dumps(record))
            return record, None, ""
        record = {**json.loads(store.get(key)), "count": count}
        later = f"fit/{number + 1}"
        after = json.loads(store.get(later)) if store.check([later]) else {"folders": [], "files": {}}
        theirs = {file for file, when in files.items() if os.path.dirname(file) in after["folders"] and after["files"].get(file) != when}
        mine = [file for file, when in files.items() if record["files"].get(file) != when and file not in theirs]
        path = find.newest(mine, getattr(self.trainer.checkpoint_io, "damage", None))
        return record, path, _story(path)

    def _without_record(self) -> tuple[None, str | None, str]:
        """What is left to do where the agents keep no store for the ranks: the newest file is taken for this fit's. On rank 0."""
        path = checkpoint_for(self.trainer, "auto")
        return None, path, _story(path)

    def _keep_global_batch(self, before: int) -> None:
        """Change the accumulation so that as many batches as on `before` ranks make a step, or say that the step is another one."""
        now, batches = self.place[1], self.accumulate * before
        scheduled = any(hasattr(callback, "accumulation") for callback in self.callbacks)
        change = f"{now} rank{'s' * (now > 1)} in place of {before}"
        if batches % now == 0 and self.module.automatic_optimization and not scheduled:
            self.accumulate = batches // now
            self.trainer.print(f"{change}: accumulate_grad_batches={self.accumulate} keeps the samples of a step.")
        else:
            self.trainer.warn(
                f"{change}: a step takes {self.accumulate * now} batches in place of {batches} from here on. Samples are still seen once an "
                "epoch, but the run is not what it would have been."
            )

    def note_start(self) -> None:
        """Note at which step this start begins. Collective.

        Raises:
            RestartError: on all ranks, when the two starts before this one began here too: nothing was gained, so nothing will be.
        """
        if self._starts is None or self.limit_reached() is not None:
            return
        step, steps, count = self.progress.step, self._starts["steps"], self._starts["count"]
        before = [began for number, began in sorted((int(n), began) for n, began in steps.items()) if number < count][-2:]
        if before == [step, step]:
            raise RestartError(
                f"torchrun has restarted this fit {count} times, and the last two starts began at step {step}, as this one would: none of them "
                "got as far as its next checkpoint. What ended them is told above. Put that right, or save more often "
                "(ModelCheckpoint(every_n_train_steps=...))."
            )
        steps[str(count)] = step
        if self.world.is_global_zero:
            self.dist.job_store().set(self._starts["key"], json.dumps(self._starts))


def _story(path: str | None) -> str:
    end = "It has left no checkpoint, so it begins where it began." if path is None else f"It goes on from {path}."
    return f"torchrun has started this fit again. {end}"
