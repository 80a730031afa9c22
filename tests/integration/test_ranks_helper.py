"""The helpers themselves: `run_ranks` gives real ranks, and the guard sees what a test leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.leaks import Snapshot
from tests.helpers.ranks import RankError, RemoteTraceback, run_ranks


class OwnError(Exception):
    def __init__(self, number):
        super().__init__(f"number {number}")
        self.number = number

    def __reduce__(self):
        return OwnError, (self.number,)


def reduced(offset):
    dist.init_process_group("gloo", init_method="env://")
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return os.getcwd(), os.environ["LOCAL_RANK"], value.item()


def test_ranks_meet_and_answer_in_order(tmp_path):
    assert run_ranks(reduced, 3, offset=10) == [(str(tmp_path), str(rank), 33.0) for rank in range(3)]


def test_local_functions_and_the_callers_environment(monkeypatch):
    monkeypatch.setenv("SOME_NAME", "seen")

    def task():
        return os.environ["SOME_NAME"], int(os.environ["RANK"])

    assert run_ranks(task) == [("seen", 0), ("seen", 1)]


def test_a_lost_connection_does_not_hide_the_reason_that_is_told_later(tmp_path):
    told = tmp_path / "told"

    def task():
        dist.init_process_group("gloo", init_method="env://")
        rank = dist.get_rank()
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group()
            while not told.exists():
                time.sleep(0.01)
            time.sleep(0.3)  # rank 0's answer is most likely there by now
            raise OwnError(7)
        try:
            dist.barrier()
        finally:
            told.touch()

    with pytest.raises(OwnError, match="number 7"):
        run_ranks(task)


def test_the_first_exception_comes_back_with_its_type_and_traceback():
    def task():
        dist.init_process_group("gloo", init_method="env://")
        if dist.get_rank() == 1:
            raise OwnError(7)
        dist.barrier()

    with pytest.raises(OwnError, match="number 7") as caught:
        run_ranks(task)
    assert caught.value.number == 7
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "rank 1" in str(caught.value.__cause__) and "raise OwnError(7)" in str(caught.value.__cause__)


def test_exit_codes_and_silent_deaths():
    with pytest.raises(SystemExit) as caught:
        run_ranks(lambda: sys.exit(143))
    assert caught.value.code == 143
    with pytest.raises(RankError, match="exit code 9"):
        run_ranks(lambda: os._exit(9), 1)


def test_a_hang_ends_with_the_stacks():
    def sleeps_forever():
        time.sleep(300)

    for timeout in (1.5, 10, 60):  # on a busy machine the ranks may take longer to get there
        with pytest.raises(TimeoutError, match=f"ranks \\[0, 1\\] still ran after {timeout} s") as caught:
            run_ranks(sleeps_forever, timeout=timeout)
        if "sleeps_forever" in str(caught.value):
            break
    assert str(caught.value).count("in sleeps_forever") == 2


def test_the_guard_sees_what_is_left():
    before = Snapshot.take()
    assert before.leaks() == []
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.environ["LEFT_BY_TEST"] = "1"
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left")
    thread.start()
    try:
        found = before.leaks(grace_s=0.2)
    finally:
        stop.set()
        thread.join()
        child.wait()
    assert len(found) == 3
    assert found[0].startswith(f"process {child.pid}") and "thread left" in found[1] and "LEFT_BY_TEST" in found[2]
    assert "LEFT_BY_TEST" not in os.environ
