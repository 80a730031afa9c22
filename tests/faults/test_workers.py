"""Loader workers when a process of the run is killed, also at the worst instant: while it asks the event that torch's workers and their rank share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.modules import Scalar, quiet
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.waiting import gone, wait_for
from trainer.data.workers import Reader, end_workers


class Fatal(Dataset):
    """The worker that gets sample 5 calls `act` with the event that tells workers to end."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 5:
            frame = sys._getframe()
            while frame.f_code.co_name != "_worker_loop":
                frame = frame.f_back
            self.act(frame.f_locals["done_event"])
        return torch.ones(1)


class Generated(DataLoader):
    """Read as it is, not rebuilt."""

    def __iter__(self):
        yield from super().__iter__()


def fit(act, kind=DataLoader, **options):
    quiet(max_epochs=2).fit(Scalar(), kind(Fatal(act), num_workers=2, **options))


def die(event):
    if hasattr(event, "_cond"):  # Python's own has a lock, and then nobody else can ask or set it any more
        event._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"kind": Generated}])
def test_a_worker_that_is_killed_while_it_asks_ends_the_fit(options):
    error = Exception if options.get("kind") is Generated else RuntimeError  # of workers behind a generator nobody knows, but it ends
    with pytest.raises(error, match="killed by signal|exited unexpectedly|Connection|died with exit code 1"):
        run_ranks(fit, 1, timeout=60, act=die, **options)


class Worker(subprocess.Popen):
    exitcode = property(subprocess.Popen.poll)


class Cut:
    """An iterator whose worker ends as its connection does."""

    def __init__(self, code):
        end = f"sys.exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
        self._workers = [Worker([sys.executable, "-c", f"import os, sys; {end}"])]

    def __next__(self):
        raise ConnectionResetError("reset by peer")

    def _shutdown_workers(self):
        self._workers[0].wait()


@pytest.mark.parametrize(("code", "kind", "message"), [
    (-9, RuntimeError, "was killed by signal 9"), (3, RuntimeError, "ended with the exit code 3"), (0, ConnectionResetError, "reset by peer"),
])  # fmt: skip
def test_a_reset_connection_is_told_as_the_worker_that_was_killed(code, kind, message):
    reader = Reader(Cut(code))
    with pytest.raises(kind, match=message):
        next(reader)
    end_workers(reader)


@pytest.mark.parametrize("kind", [DataLoader, Generated])
def test_workers_leave_with_a_rank_that_is_killed(tmp_path, kind):
    """One of them is in the data set, and stays there."""

    def kill_the_rank(event):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)

    def note(worker):
        (tmp_path / f"worker{worker}").write_text(str(os.getpid()))

    with pytest.raises(RankError, match="-9"):
        run_ranks(fit, 1, act=kill_the_rank, kind=kind, worker_init_fn=note)
    workers = [int(path.read_text()) for path in tmp_path.glob("worker?")]
    assert len(workers) == 2
    wait_for(lambda: all(map(gone, workers)), 60)


@pytest.mark.parametrize("kind", [DataLoader, Generated])
def test_workers_do_not_hear_what_is_for_the_rank(kind):
    """Slurm signals all processes of a job; the rank reads on up to the boundary at which it saves."""

    def signalled(event):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)

    run_ranks(fit, 1, act=signalled, kind=kind)


@pytest.mark.parametrize("kind", [DataLoader, Generated])
def test_the_users_loader_is_as_before(kind):
    def nothing(worker):
        pass

    data = kind(Fatal(lambda event: None), num_workers=1, worker_init_fn=nothing)
    quiet(max_epochs=1).fit(Scalar(), data)
    assert data.worker_init_fn is nothing and data.multiprocessing_context is None
