"""Every test runs in a directory of its own and must leave nothing behind (see `tests.helpers.leaks`)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.leaks import MARK, Snapshot


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits, for milliseconds where cores are busy


def pytest_unconfigure(config: pytest.Config) -> None:
    os.environ.pop(MARK, None)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a variable, a process group, a signal handler or a file in the repository."""
    snapshot = Snapshot.take()
    yield
    leaks = snapshot.leaks()
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def own_directory(nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in its temporary directory, which is removed from the process's state before leaks are looked for."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
