"""kill -9 at any instant: the last checkpoint loads, the run goes on exactly there, and in the end nothing tells it from one never stopped."""

from __future__ import annotations

import os
import random
import shutil
import signal

import pytest

from tests.helpers.killed import Begun, count_calls, differences, outcome, survive, train
from tests.helpers.ranks import RankError, run_ranks


def counted(folder, die_at=None):
    """Train for one epoch; return the calls to the file system that were made."""
    calls = count_calls(die_at)
    train(folder, epochs=1)
    return calls


def test_at_every_call_of_a_boundary_that_saves_twice(tmp_path):
    """Step 3 validates, and both callbacks save: files are written, the old ones go, `last` is written, numbers are flushed."""
    (tmp_path / "whole").mkdir()
    (calls,) = run_ranks(counted, 1, folder=tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    a_step = len(calls) // 11
    assert {"replace", "fsync"} < set(calls)
    for die_at in range(2 * a_step, 3 * a_step + 8):
        folder = tmp_path / str(die_at)
        folder.mkdir()
        with pytest.raises(RankError, match="-9"):
            run_ranks(counted, 1, folder=folder, die_at=die_at)
        run_ranks(counted, 1, folder=folder)
        assert differences(outcome(folder), expected) == [], f"killed ahead of call {die_at} ({calls[die_at]})"
        shutil.rmtree(folder)


def test_any_process_of_two_ranks_at_random_instants(tmp_path):
    """`benchmarks/kill.py` is the long form."""
    options = ("--ranks", "2", "--workers", "1", "--epochs", "4")
    assert survive(tmp_path / "whole", 0, random.Random(), *options) == []
    assert survive(tmp_path / "killed", 2, random.Random(5), *options) == []
    assert differences(outcome(tmp_path / "killed"), outcome(tmp_path / "whole")) == []


def test_behind_the_last_save(tmp_path):
    """What callbacks and loggers do at the end is still owed, once: also when the finished run is started again."""

    def killed(folder):
        Begun.on_train_end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        train(folder, epochs=1)

    for name in ("whole", "save", "end"):
        (tmp_path / name).mkdir()
    (calls,) = run_ranks(counted, 1, folder=tmp_path / "whole")
    assert calls[-2:] == ["remove", "replace"]  # the claim on the file's name; the weights, behind the fit
    expected = outcome(tmp_path / "whole")
    assert expected["points tb/run best/val"][0][0] == 11
    with pytest.raises(RankError, match="-9"):
        run_ranks(counted, 1, folder=tmp_path / "save", die_at=len(calls) - 2)
    with pytest.raises(RankError, match="-9"):
        run_ranks(killed, 1, folder=tmp_path / "end")
    for name in ("save", "end", "end"):
        run_ranks(train, 1, folder=tmp_path / name, epochs=1)
        assert differences(outcome(tmp_path / name), expected) == []
