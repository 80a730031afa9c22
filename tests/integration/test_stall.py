"""Stuck ranks (C48): after `timeout` seconds of waiting all end, and the error says where each rank was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from callbacks import Callback
from tests.helpers.modules import Net, loader, quiet
from tests.helpers.ranks import run_ranks
from trainer import FSDPStrategy, StallError, stall
from trainer.dist import Dist
from trainer.launchers import ForkLauncher
from trainer.world import World

ROOT = Path(__file__).resolve().parents[2]
ASLEEP_S = 120  # far longer than a run with a stuck rank lasts, also on a busy machine


def doze(name):
    """Sleep; the time at which it began is left in a file."""
    Path(f"asleep.{name}").write_text(repr(time.time()))
    time.sleep(ASLEEP_S)


class Sleeper(Net):
    def __init__(self, where, step=3, rank=1):
        super().__init__()
        self.where, self.step, self.rank = where, step, rank

    def training_step(self, batch, batch_idx):
        if self.where == "train" and self.global_rank == self.rank and self.global_step == self.step:
            doze("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.where == "validate" and self.global_rank == 0 and batch_idx == 2:
            doze("validate")
        self.log("val", self.loss(batch), sync_dist=False)

    def on_save_checkpoint(self, checkpoint):
        if self.where == "save" and self.global_rank == 0:
            doze("save")


class Saving(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint("at.ckpt")


def ended(error, name, timeout):
    """Check that the error came after the time-out, and that nobody waited for the sleeper; return its text."""
    assert timeout <= slept(name) < ASLEEP_S / 2
    return str(error.value)


def slept(name):
    return time.time() - float(Path(f"asleep.{name}").read_text())


def test_c48_a_rank_asleep_in_a_training_step():
    module = Sleeper("train")
    with pytest.raises(StallError) as caught:
        quiet(strategy="ddp", devices=2, max_epochs=1, timeout=5).fit(module, loader(Net.rows(40), 2, num_workers=1))
    text = ended(caught, "train", 5)
    assert text.startswith("The run stalled: rank 0 waited longer than timeout=5 s in backward or optimizer of training step 3 (epoch 0).\n")
    assert "\nRank 1 was last seen in training step 3 (epoch 0).\n" in text
    zero, one = re.findall(r"^Rank \d: .*(?:\n .*)+", text, re.M)
    assert zero.startswith("Rank 0: backward or optimizer of training step 3 (epoch 0) (waiting for the others)") and "backward()" in zero
    assert one.startswith("Rank 1: training step 3 (epoch 0)\n") and one.endswith("in doze\n    time.sleep(ASLEEP_S)")
    quiet(max_epochs=1).fit(module, loader(Net.rows(4), 4))  # nothing of it is left in the caller


def test_a_rank_asleep_in_validation():
    with pytest.raises(StallError, match=r"Rank 0 was last seen in validation batch 2\.\n") as caught:
        trainer = quiet(strategy="ddp", devices=2, max_epochs=1, timeout=2)
        trainer.fit(Sleeper("validate"), loader(Net.rows(8), 2), loader(Net.rows(16), 2))
    ended(caught, "validate", 2)


def test_a_rank_asleep_while_saving():
    with pytest.raises(StallError, match=r"Rank 0 was last seen in saving\.\n") as caught:
        quiet(strategy="ddp", devices=2, max_epochs=1, timeout=2, callbacks=[Saving()]).fit(Sleeper("save"), loader(Net.rows(16), 2))
    ended(caught, "save", 2)


class Mismatched(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            dist.barrier()  # a collective of its own
            dist.barrier()
            doze("never")


def test_ranks_in_different_collectives_all_wait():
    with pytest.raises(StallError, match=r"All ranks wait for each other|Rank 1 was last seen in on_train_batch_start"):
        quiet(strategy="ddp", devices=2, max_epochs=1, timeout=2).fit(Mismatched(), loader(Net.rows(16), 2))


class Frozen(Net):
    """Stops as a whole, as one in native code that holds Python's lock does: no thread of it can answer."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            os.kill(os.getpid(), 19)
        return super().training_step(batch, batch_idx)


def test_a_rank_that_cannot_answer_is_named():
    with pytest.raises(StallError, match="Rank 1 did not answer"):
        quiet(strategy="ddp", devices=2, max_epochs=1, timeout=2).fit(Frozen(), loader(Net.rows(16), 2))


def test_a_rank_asleep_under_hybrid_fsdp():
    """Each rank waits in a group of the mesh, and the account comes before anybody waits for weights to come together."""
    with pytest.raises(StallError, match=r"Rank 3 was last seen in training step 1 \(epoch 0\)\.\n"):
        strategy, launcher = FSDPStrategy(shard_size=2), ForkLauncher(4)
        trainer = quiet(strategy=strategy, launcher=launcher, accelerator="cpu", devices=4, max_epochs=1, timeout=2)
        trainer.fit(Sleeper("train", step=1, rank=3), loader(Net.rows(16), 1))


class Failing(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise ValueError("no stall")
        return super().training_step(batch, batch_idx)


def test_the_error_of_a_rank_is_not_taken_for_a_stall():
    with pytest.raises(ValueError, match="no stall"):
        quiet(strategy="ddp", devices=2, max_epochs=1, timeout=20).fit(Failing(), loader(Net.rows(16), 2))


class Patient(Net):
    def prepare_data(self):
        time.sleep(3.5)

    def training_step(self, batch, batch_idx):
        if batch_idx:
            time.sleep(1.2)  # each time less than half the limit, in sum more
        return super().training_step(batch, batch_idx)


def test_what_takes_its_time_is_no_stall():
    trainer = quiet(strategy="ddp", devices=2, max_epochs=1, timeout=3)
    trainer.fit(Patient(), loader(Net.rows(16), 2))
    assert trainer.global_step == 4


def test_ranks_that_start_late_are_waited_for():
    def task():
        rank = int(os.environ["RANK"])
        found = Dist(World(rank, 3, init_method="env://"), timeout=timedelta(seconds=1))
        if rank == 2:  # rank 0 waits for it before it joins; rank 1 joins
            time.sleep(2.5)
        found.open()
        try:
            return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        finally:
            found.close()

    assert run_ranks(task, 3) == [timedelta(seconds=1)] * 3


def test_what_the_account_of_a_stall_takes():
    """All processes end within 5 s of the time-out: whoever is asked leaves in time, and so does whoever waits for what is told."""
    assert stall._LOOK_S + stall._LEAVE_S < 5 and stall._ANSWER_S + stall._TOLD_S < 5


def test_under_torchrun_all_ranks_end_and_each_shows_where_it_was():
    Path("script.py").write_text(textwrap.dedent("""
        from pathlib import Path
        from tests.helpers.modules import Net, loader, quiet
        from tests.integration.test_stall import Sleeper
        quiet(strategy="ddp", max_epochs=1, timeout=3, accelerator="cpu").fit(Sleeper("train"), loader(Net.rows(40), 2))
        """))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=180)
    assert done.returncode == 1
    assert slept("train") < ASLEEP_S / 2
    assert "Rank 1 when the run stalled: training step 3 (epoch 0)\n" in done.stderr and "time.sleep(ASLEEP_S)" in done.stderr
    assert "Rank 0 when the run stalled: backward or optimizer of training step 3 (epoch 0)\n" in done.stderr
    assert "StallError: The run stalled: rank 0 waited longer than timeout=3 s" in done.stderr


def test_no_thread_without_a_time_out_or_other_ranks():
    def threads(world, timeout):
        seen = []

        class Looking(Net):
            def on_train_batch_start(self, batch, batch_idx):
                import threading

                seen.append([t.name for t in threading.enumerate() if t.name == "trainer-watch"])

        module = Looking()
        trainer = quiet(strategy="ddp" if world > 1 else "auto", devices=world, max_steps=1, timeout=timeout)
        Looking.on_train_batch_end = lambda self, *a: setattr(self, "seen", list(seen))
        trainer.fit(module, loader(Net.rows(4), 2))
        return module.seen

    assert threads(1, 5) == [[]] and threads(2, None) == [[]] and threads(2, 5) == [["trainer-watch"]]


def test_a_group_without_a_server_has_no_line():
    assert Dist(World()).line("stall") is None

    def task():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return Dist(World(0, 2)).line("stall") is None
        finally:
            dist.destroy_process_group()

    assert run_ranks(task, 1) == [True]


def test_the_places_that_are_named_exist():
    import importlib

    for module, name in stall._PLACES:
        found = importlib.import_module(module)
        owners = [found, *(value for value in vars(found).values() if isinstance(value, type))]
        assert any(hasattr(owner, name) for owner in owners), (module, name)


def test_other_errors_are_left_alone():
    assert not stall._says(TimeoutError("timed out"), "timed out")
    cause = RuntimeError("[/gloo/transport/tcp/buffer.cc] Timed out waiting 5000ms")
    outer = ValueError("mine")
    outer.__cause__ = cause
    assert stall._says(outer, "timed out")
    assert torch.distributed.is_available()
