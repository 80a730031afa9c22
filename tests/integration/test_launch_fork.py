"""The fork launcher keeps every promise of the local launcher (the same tests, with its name in their place), and those of its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from callbacks import Callback
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.reference import train_by_hand
from tests.integration import test_launchers as local_tests
from tests.integration.test_launchers import (  # noqa: F401  (pytest finds them here)
    joined,
    listening,
    temp_folder,
    test_a_killed_caller_leaves_no_orphan_and_no_file,
    test_a_rank_killed_with_its_data_workers_ends_all,
    test_a_rank_stopped_from_outside_is_told_and_not_its_neighbour,
    test_a_rank_that_leaves_by_sys_exit_is_no_success,
    test_a_rank_that_leaves_without_a_word,
    test_a_result_that_cannot_be_sent,
    test_a_second_ctrl_c_ends_ranks_that_do_not_listen,
    test_ctrl_c_reaches_the_caller_and_it_can_launch_again,
    test_exit_codes_come_back,
    test_from_a_thread_and_two_at_once,
    test_sigterm_to_the_caller_ends_all_with_143,
    test_the_first_exception_keeps_type_data_rank_and_traceback,
    test_the_one_who_lost_its_peer_is_not_the_one_to_blame,
    test_the_ranks_show_the_warnings_that_the_caller_shows_and_signal_handlers_are_put_back,
)
from trainer import MisconfigurationException
from trainer.launchers import ForkLauncher


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Let the borrowed tests, and the scripts they write, say ForkLauncher for LocalLauncher."""
    start = local_tests.start
    monkeypatch.setattr(local_tests, "LocalLauncher", ForkLauncher)
    monkeypatch.setattr(local_tests, "start", lambda script, **kwargs: start(script.replace("LocalLauncher", "ForkLauncher"), **kwargs))


def test_nothing_is_pickled_and_memory_is_shared():
    lock, data = threading.Lock(), torch.zeros(1000)

    def task(world):
        data[world.rank] = 1  # its own copy of the page
        return world.world_size, not lock.locked(), data.sum().item(), torch.get_num_threads()

    assert ForkLauncher(2).launch(task) == (2, True, 1.0, 1)
    assert data.sum() == 0


def test_sockets_listen_on_loopback_only():
    assert ForkLauncher(2).launch(lambda world: joined(world, lambda _: listening())) == {"0100007F"}


class Marks(Callback):
    """Notes who trains."""

    def __init__(self):
        self.pids = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.pids.append((os.getppid(), batch_idx))


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook"])
def test_a_fit_in_forked_ranks(strategy):
    module, marks = Net().double(), Marks()
    module.handle = threading.Lock()
    rows = Net.rows(24, torch.float64)
    right = train_by_hand(train_by_hand(Net().double(), rows.split(8), 6), rows.split(8), 3)  # the optimizer ended with the ranks
    trainer = quiet(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, callbacks=[marks])
    for _ in range(2):
        trainer.fit(module, loader(rows, 4, num_workers=1))
        trainer.max_epochs = 3
    assert_same(weights(module), weights(right))
    assert marks.pids == [(os.getpid(), index) for index in (0, 1, 2)] * 3
    assert (trainer.global_step, trainer.current_epoch) == (9, 3)


def test_where_a_copy_could_not_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(MisconfigurationException, match="This process has used CUDA, and a copy of it could not. .* Use strategy='ddp'"):
        quiet(strategy="ddp_fork", accelerator="cpu", devices=2, max_epochs=1).fit(Net(), loader(Net.rows(8), 2))
    marks = Marks()
    quiet(strategy="ddp_notebook", accelerator="cpu", devices=2, max_epochs=1, callbacks=[marks]).fit(Net(), loader(Net.rows(8), 2))
    assert len(marks.pids) == 2  # in new processes
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
        with pytest.raises(MisconfigurationException, match="This system cannot fork"):
            ForkLauncher(2).launch(lambda world: None)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    Path(f"/proc/self/task/{thread.native_id}/comm").write_text("pt_autograd_0")
    try:
        with pytest.raises(MisconfigurationException, match="a process that has run a backward pass cannot be copied"):
            ForkLauncher(2).launch(lambda world: None)
    finally:
        ended.set()
        thread.join()


def test_classes_of_the_script_stay_the_same():
    process = local_tests.start("""
        from trainer.launchers import ForkLauncher

        class OwnError(Exception):
            def __init__(self, code):
                super().__init__(code)
                self.code = code

        def fail(world):
            raise OwnError(7)

        assert ForkLauncher(2).launch(lambda world: OwnError) is OwnError
        try:
            ForkLauncher(2).launch(fail)
        except OwnError as error:
            print("caught", error.code)
        """)
    assert process.communicate(timeout=120)[0] == "caught 7\n" and process.returncode == 0
