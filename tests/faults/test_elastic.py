"""torchrun with restarts: a fit whose rank is killed goes on from its last file, on as many ranks as are left, and not forever."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ports import free_port
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand
from tests.helpers.resume import Stop, noisy_loader, train
from trainer import RestartError, dist, restarts
from trainer.launchers.rendezvous import loopback_store

ROOT = Path(__file__).resolve().parents[2]

FIT = """
    import os, signal
    from pathlib import Path
    import torch
    from callbacks import Callback, ModelCheckpoint
    from tests.faults.test_elastic import {train}

    class Killed(Callback):
        def on_before_backward(self, trainer, module, loss):
            if trainer.global_rank == 1 and trainer.global_step == 5 and not Path("killed").exists():
                Path("killed").touch()
                {end}

    first, count, weights = {train}([Killed(), ModelCheckpoint("saved", every_n_train_steps=2)])
    torch.save([first, count, weights], "rank." + os.environ["RANK"])
"""
DDP = {"strategy": "ddp", "accelerator": "cpu"}


def noisy(callbacks=()):
    """8 steps on 2 ranks, with everything random in them; return the first step, how many batches, and the weights."""
    module = train(noisy_loader(23, batch_size=3), callbacks=list(callbacks), **DDP)
    return module.steps[0]["step"], len(module.steps), module.state_dict()


class Counting(Net):
    """Notes the step of each batch."""

    def training_step(self, batch, batch_idx):
        self.steps = [*getattr(self, "steps", []), self.global_step]
        return super().training_step(batch, batch_idx)


def exact(callbacks=()):
    """8 steps on 2 ranks, whose gradient is the mean over samples; returns what `noisy` does."""
    module = Counting()
    quiet(max_epochs=2, seed=1, callbacks=list(callbacks), **DDP).fit(module, loader(Net.rows(23), 3, shuffle=True))
    return module.steps[0], len(module.steps), module.state_dict()


def start(*options, train, end):
    """Run the script under torchrun."""
    Path("script.py").write_text(textwrap.dedent(FIT).replace("{end}", end).replace("{train}", train))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, "script.py"]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, code=0):
    try:
        out, err = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == code, err[-3000:]
    return out, err


def test_a_killed_rank_and_a_restart_that_goes_on_to_the_bit():
    out, _ = finish(start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", train="noisy", end="os.kill(os.getpid(), signal.SIGKILL)"))
    assert "torchrun has started this fit again. It goes on from" in out
    right = run_ranks(noisy)[0][2]
    for rank in (0, 1):
        first, count, weights = torch.load(f"rank.{rank}")
        assert (first, count) == (4, 4)  # of 8 steps, the last file before the sixth holding 4
        assert all(torch.equal(weights[key], right[key]) for key in right)


@pytest.fixture
def job(monkeypatch):
    """A job of one rank whose agent is this test: `job(count)` is the start of its program after `count` restarts."""
    store, port = loopback_store()
    dist._meeting_point.cache_clear()
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**rank, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)

    def begin(count):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        monkeypatch.setattr(restarts, "_fits", itertools.count(1))

    yield begin
    dist._meeting_point.cache_clear()
    del store


class Failing(Scalar):
    """Fails in the step number `at`."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def training_step(self, batch, batch_idx):
        if self.global_step == self.at:
            raise Stop
        return super().training_step(batch, batch_idx)


def fit(at=-1, folder="saved", every=2, ckpt_path=None, module=None, **settings):
    module = Failing(at) if module is None else module
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = quiet(max_epochs=1, callbacks=[saves], **settings)
    try:
        trainer.fit(module, loader(range(10)), ckpt_path=ckpt_path)
    except Stop:
        return trainer.ckpt_path
    return trainer.ckpt_path, trainer.global_step, module.w.item()


def test_a_restart_goes_on_without_being_asked_and_files_of_other_runs_do_not_count(job, monkeypatch):
    job(0)
    fit(folder="saved")  # another run, earlier
    other = sorted(Path("saved").iterdir())
    with loopback_job(monkeypatch):
        job(0)
        assert fit(at=1) is None  # nothing saved yet
        job(1)
        assert fit(at=5) is None
        job(2)
        path, step, w = fit()
        assert Path(path).name == "step=4-v1.ckpt" and (step, w) == (10, -45.0)
        assert set(other) <= set(Path("saved").iterdir())


@contextlib.contextmanager
def loopback_job(monkeypatch):
    """Another agent."""
    store, port = loopback_store()
    monkeypatch.setenv("MASTER_PORT", str(port))
    dist._meeting_point.cache_clear()
    yield store


def test_a_file_that_was_asked_for_counts_until_there_is_a_newer_one(job):
    job(0)
    fit(folder="first")
    assert fit(at=7, ckpt_path="first/step=6.ckpt") == "first/step=6.ckpt"
    job(1)
    assert fit(at=-1, folder="first", every=100)[1] == 10  # the first fit of the program, done already
    assert fit(at=9, ckpt_path="first/step=6.ckpt") == "first/step=6.ckpt"
    job(2)
    fit(folder="first", every=100)
    path, step, w = fit(ckpt_path="first/step=6.ckpt")
    assert Path(path) == Path("saved/step=8.ckpt").resolve() and (step, w) == (10, -45.0)


def test_no_loop_of_restarts_without_progress(job):
    for count, resumed in enumerate([None, "step=2.ckpt", "step=2.ckpt"]):
        job(count)
        path = fit(at=3)
        assert path is None or Path(path).name == resumed
    job(3)
    with pytest.raises(RestartError, match=r"restarted this fit 3 times, and the last two starts began at step 2, as this one would"):
        fit(at=3)
    assert sorted(path.name for path in Path("saved").iterdir()) == ["step=2.ckpt"]


def test_without_a_store_the_newest_file_of_the_folders_counts(job, monkeypatch):
    job(0)
    fit(at=5)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    job(1)
    path, step, w = fit()
    assert Path(path).name == "step=4.ckpt" and (step, w) == (10, -45.0)


def test_other_numbers_of_ranks_keep_the_samples_of_a_step_where_they_can():
    def task():
        rank = int(os.environ["RANK"])
        store = torch.distributed.PrefixStore("trainer/job", dist._meeting_point("env://", rank, 2))
        for number, before in ((1, 4), (2, 3)) if rank == 0 else ():
            record = {"key": f"fit/{number}", "folders": [], "files": {}, "shares": before, "steps": {}, "count": 0}
            store.set(f"fit/{number}", json.dumps(record))
        found, said = [], io.StringIO()
        for _ in range(2):
            module = Net()
            trainer = quiet(max_epochs=1, strategy="ddp", devices=2, accelerator="cpu")
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                trainer.fit(module, loader(Net.rows(24), 2))
            found.append((trainer.global_step, module.state_dict()))
        return [*found, said.getvalue()]

    results = run_ranks(task)
    for (steps, weights), (more_steps, _), _ in results:
        assert (steps, more_steps) == (3, 6)  # 4 ranks x 2 samples are 2 ranks x 2 batches x 2; 3 ranks x 2 are not
        for key, value in train_by_hand(Net(), Net.rows(24).split(8), 3).state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)
    assert "2 ranks in place of 4: accumulate_grad_batches=2 keeps the samples of a step." in results[0][2]
    assert "2 ranks in place of 3: a step takes 2 batches in place of 3 from here on." in results[0][2]


def test_a_node_is_lost_and_the_other_goes_on_alone_with_the_same_steps():
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", "--rdzv-id", uuid.uuid4().hex]
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", *meeting, "--rdzv-conf"]
    quick = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=6,is_host="  # 8 s: for both to come, and for none to come
    end = "os.kill(os.getppid(), signal.SIGKILL), os.kill(os.getpid(), signal.SIGKILL)"
    first, second = (start(*options, quick + host, train="exact", end=end) for host in "10")
    try:
        out, _ = finish(first)
    finally:
        second.kill()
        second.communicate()
    assert second.returncode == -signal.SIGKILL and not Path("rank.1").exists()
    assert "1 rank in place of 2: accumulate_grad_batches=2 keeps the samples of a step." in out
    began, count, weights = torch.load("rank.0")
    assert (began, count) == (4, 8)  # the second epoch: 4 steps of 2 batches
    for key, value in run_ranks(exact)[0][2].items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)
