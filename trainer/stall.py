"""Watch: what every rank of a run was doing when one of them waited for the others longer than `Trainer(timeout=)`.

Waiting is noticed by the collective that runs out of time; nothing is counted or written while a run goes well. The rank that
notices asks through the store in which the ranks met. A thread in each rank, with a connection of its own, answers with the phase
of the run and the Python stack, also where the rank itself is asleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

import torch.distributed as torch_dist

from trainer.errors import StallError

__all__ = ["Watch", "phase"]

_LOOK_S = 0.5  # how often a rank looks whether it is asked
_ANSWER_S = 2.5  # how long the one who asks waits for answers
_TOLD_S = 1.0  # how much longer the others, who wait as well, wait for what it tells
_LEAVE_S = 3.5  # how long a rank that was asked may go on: it looks, answers and leaves within the 5 s that a stall may take to end
_PLACES = {
    ("trainer.writing", "write_checkpoint"): "saving",
    ("trainer.saving", "checkpoint"): "saving",
    ("trainer.saving", "load_table"): "loading a checkpoint",
    ("trainer.dist", "farewell"): "leaving the run",
    ("trainer.dist", "first_on_node"): "preparing data",
}


class Watch:
    """One rank's part. `explain` turns the error of a collective into the account of all ranks; `close` ends the thread."""

    def __init__(self, run: Any, store: torch_dist.Store, echo: bool) -> None:
        self._run, self._store, self._echo = run, store, echo
        self._thread_id = threading.get_ident()
        self._said = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainer-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def explain(self, error: BaseException) -> StallError | None:
        """Return what to raise instead of `error`, on the rank that ran out of time first; None for everybody else.

        The others come back once the first has told, so that no launcher stops it in between.
        """
        late = _says(error, "timed out", "timeout")
        if not late and not _says(error, "gloo", "nccl", "connection"):
            return None
        self._stop.set()  # this thread answers from here on
        self._thread.join()
        try:
            first = late and self._store.add("asked", 1) == 1
            if not late and not self._comes("asked", 1.0):
                return None
            self._answer(traceback.walk_tb(error.__traceback__), waiting=True)
            if not first:
                self._comes("told", _ANSWER_S + _TOLD_S)
                return None
            story = self._story()
            self._store.set("told", "")
            return StallError(story)
        except RuntimeError:  # the store is gone with the rank or the launcher that held it
            return None

    # -- what a rank says ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # as above
            while not self._stop.wait(_LOOK_S):
                if self._store.check(["asked"]):
                    frame = sys._current_frames().get(self._thread_id)
                    self._answer(traceback.walk_stack(frame), waiting=None)
                    if not self._stop.wait(_LEAVE_S):
                        os._exit(1)  # asleep, or in native code: it would not hear of anything else
                    return

    def _answer(self, frames: Any, waiting: bool | None) -> None:
        """Say once where this rank is. `waiting` None: the innermost frame tells whether it waits for others."""
        if not self._said.acquire(blocking=False):
            return
        frames = list(frames)
        if waiting is None:
            frames.reverse()  # outermost first, as in a traceback
            waiting = _waits(frames[-1][0])
        stack = "".join(traceback.StackSummary.extract(iter(frames)).format())
        rank, where = self._run.world.rank, phase(self._run, [frame for frame, _ in frames])
        self._store.set(f"answer/{rank}", json.dumps({"phase": where, "waiting": waiting, "stack": stack}))
        if self._echo:
            print(f"Rank {rank} when the run stalled: {where}\n{stack}", file=sys.stderr, flush=True)

    # -- what the first one tells ----------------------------------------------------------------------------------------

    def _story(self) -> str:
        size, timeout = self._run.world.world_size, self._run.settings.timeout
        keys = [f"answer/{rank}" for rank in range(size)]
        deadline = time.monotonic() + _ANSWER_S
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        said = {rank: json.loads(self._store.get(key)) for rank, key in enumerate(keys) if self._store.check([key])}
        mine = said[self._run.world.rank]["phase"]
        lines = [f"The run stalled: rank {self._run.world.rank} waited longer than timeout={timeout.total_seconds():g} s in {mine}."]
        for rank in range(size):
            if rank not in said:
                lines.append(f"Rank {rank} did not answer: its process is gone, stopped, or in native code that holds Python's lock.")
            elif not said[rank]["waiting"]:
                lines.append(f"Rank {rank} was last seen in {said[rank]['phase']}.")
        if len(lines) == 1:
            lines.append("All ranks wait for each other, in different places: they do not call the same collectives.")
        for rank, one in said.items():
            lines.append(f"\nRank {rank}: {one['phase']}{' (waiting for the others)' if one['waiting'] else ''}\n{one['stack'].rstrip()}")
        return "\n".join(lines)

    def _comes(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (found := self._store.check([key])) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


def phase(run: Any, frames: list[FrameType]) -> str:
    """Say in a few words what `run` is doing. Steps and batches count from 0, as `global_step` and `batch_idx` do."""
    modules = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames]
    for place in reversed(modules):
        if place in _PLACES:
            return _PLACES[place]
    hook = run.hooks.current if hasattr(run, "hooks") else ""
    if run.stage == "train":
        busy = run.step_id > 0 and not run.whole
        where = f"training step {run.step_id - 1 if busy else run.progress.step} (epoch {run.progress.epoch})"
        if hook == "training_step":
            return where
        if hook:
            return f"{hook}, {'after' if busy else 'before'} {where}" if run.step_id else hook
        if not hasattr(run, "training_step"):
            return "setting up"
        if any(name.startswith(("trainer.data.", "torch.utils.data.")) for name, _ in modules):
            return f"loading data, at {where}"
        return f"backward or optimizer of {where}" if busy else f"the boundary before {where}"
    word = {"validate": "validation", "sanity_check": "sanity check"}.get(run.stage, run.stage)
    if hook and not hook.endswith("_step"):
        return f"{hook}, {word}"
    if run.recorder is None or run.recorder.place is None:
        return f"setting up {word}"
    index, batch = run.recorder.place
    loader = f" of loader {index}" if run.recorder.loader is not None else ""
    return f"{word} batch {batch}{loader}"


def _waits(frame: FrameType) -> bool:
    """True in a collective, and in a backward pass, in whose middle DDP's are."""
    return "torch/distributed/" in frame.f_code.co_filename.replace(os.sep, "/") or frame.f_code.co_name == "_engine_run_backward"


def _says(error: BaseException, *words: str) -> bool:
    """True when an error of torch.distributed has one of `words`."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        text = str(link).lower()
        ours = isinstance(link, torch_dist.DistError) or any(name in text for name in ("gloo", "nccl", "pair closure"))  # the last: gloo's, without its name
        if ours and any(word in text for word in words):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
