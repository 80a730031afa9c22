"""SIGTERM and SIGUSR1 during a fit: saved at the coming boundary, on all ranks at one step, and a resume to the bit (case C46)."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from callbacks import Callback, CSVLogger, ModelCheckpoint
from callbacks.checkpoint_files import PREEMPTED
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import Noisy, assert_continues, assert_equal, noisy_loader, train
from trainer import CheckpointError, MisconfigurationException, SIGTERMException
from trainer.launchers import LocalLauncher

ROOT = Path(__file__).resolve().parents[2]


class Signal(Callback):
    """Sends this process a signal while batch number `batch` (counted over the fit) is computed."""

    def __init__(self, batch, number=signal.SIGTERM, hook="on_before_backward", rank=None):
        self.left, self.number, self.hook, self.rank = batch, number, hook, rank

    def _count(self, trainer, hook):
        if hook == self.hook:
            if self.left == 0 and self.rank in (None, trainer.global_rank):
                os.kill(os.getpid(), self.number)
            self.left -= 1

    def on_before_backward(self, trainer, module, loss):
        self._count(trainer, "on_before_backward")

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self._count(trainer, "on_validation_batch_start")

    def on_sanity_check_start(self, trainer, module):
        self._count(trainer, "on_sanity_check_start")

    def on_train_epoch_end(self, trainer, module):
        self._count(trainer, "on_train_epoch_end")

    def on_train_end(self, trainer, module):
        self._count(trainer, "on_train_end")


def saves(folder="saved"):
    return ModelCheckpoint(folder, every_n_epochs=100)


def stopped(batch, *more, **settings):
    """Fit until the signal ends it; return the step of the file that was saved."""
    hook = settings.pop("hook", "on_before_backward")
    number = settings.pop("number", signal.SIGTERM)
    with pytest.raises(SIGTERMException) as caught:
        train(*more, callbacks=[Signal(batch, number, hook), saves()], **settings)
    assert caught.value.code == 143
    return torch.load(f"saved/{PREEMPTED}", weights_only=True)["global_step"]


@pytest.mark.parametrize(("batch", "number", "workers", "accumulate"), [
    (0, signal.SIGTERM, 0, 1), (2, signal.SIGUSR1, 2, 1), (3, signal.SIGTERM, 0, 1), (4, signal.SIGTERM, 2, 3), (6, signal.SIGTERM, 0, 3),
])  # fmt: skip
def test_c46_saved_at_the_boundary_and_resumed_to_the_bit(batch, number, workers, accumulate):
    whole = train(noisy_loader(), accumulate_grad_batches=accumulate)
    step = stopped(batch, noisy_loader(num_workers=workers), number=number, accumulate_grad_batches=accumulate)
    assert step == {(0, 1): 1, (2, 1): 3, (3, 1): 4, (4, 3): 3, (6, 3): 3}[batch, accumulate]  # 4 batches an epoch
    resumed = train(noisy_loader(), resume_from="auto", callbacks=[saves()], accumulate_grad_batches=accumulate)
    assert_continues(resumed, whole, step)


class Validating(Noisy):
    """Draws in validation as well, so that a validation that is done twice, or in part, would show."""

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layers(batch[:, 1:].float()).mean() + torch.rand(()))


@pytest.mark.parametrize(("batch", "at"), [(1, 2), (4, 4), (5, 4), (9, 8)])  # of 3 a validation: after steps 2, 4, 6 and 8, the last
def test_a_signal_during_validation_cuts_it_short_and_the_resume_does_it_anew(batch, at):
    def go(folder, *more, **settings):
        csv = CSVLogger(folder, name="", version="")
        saver = ModelCheckpoint(f"{folder}/best", "{step}", monitor="val", every_n_train_steps=2, save_top_k=-1)
        callbacks = [*settings.pop("callbacks", []), saver]
        data = noisy_loader(), noisy_loader(7, 3)
        module = train(data[0], *more, val=data[1], module=Validating(), val_check_interval=2, callbacks=callbacks, logger=csv, **settings)
        return module, {os.path.basename(path): score.item() for path, score in saver.best_k_models.items()}

    whole, ranked = go("whole")
    with pytest.raises(SIGTERMException):
        go("parts", callbacks=[Signal(batch, hook="on_validation_batch_start")])
    assert torch.load(f"parts/best/{PREEMPTED}", weights_only=True)["global_step"] == at
    resumed, ranked_again = go("parts", resume_from="last")
    assert_continues(resumed, whole, at)
    assert ranked_again == ranked and len(ranked) == 4
    rows = [Path(folder, "metrics.csv").read_text() for folder in ("whole", "parts")]
    assert rows[0] == rows[1]


def test_a_validation_that_a_hook_has_to_close_comes_to_its_end():
    class Swapping(Scalar):
        """Validates with other weights, as an average of one's own would."""

        def on_validation_start(self):
            self.w.data += 100

        def on_validation_end(self):
            self.w.data -= 100

        def validation_step(self, batch, batch_idx):
            self.log("last", batch.mean())

    with pytest.raises(SIGTERMException):
        quiet(max_epochs=1, val_check_interval=2, callbacks=[Signal(1, hook="on_validation_batch_start"), saves()]).fit(
            Swapping(), loader(range(4)), loader(range(3))
        )
    table = torch.load(f"saved/{PREEMPTED}", weights_only=True)
    assert table["state_dict"]["w"].item() == -1.0 and table["progress"]["validation_owed"] == 0 and table["metrics"]["last"] == 1.0


def test_the_signal_of_the_last_step_lets_the_fit_end_first():
    whole = train(noisy_loader())
    ended = Noisy()
    with pytest.raises(SIGTERMException):
        train(noisy_loader(), module=ended, callbacks=[Signal(7), saves()])
    assert ended.optimizer_state is not None  # on_train_end
    assert_equal(ended.optimizer_state, whole.optimizer_state)
    with pytest.warns(UserWarning, match="max_epochs=2 is already reached"):
        resumed = train(noisy_loader(), resume_from="auto", callbacks=[saves()])
    assert all(torch.equal(resumed.state_dict()[key], value) for key, value in whole.state_dict().items())


def test_before_the_first_step_it_ends_at_once_with_nothing_saved(tmp_path):
    class Slow(Scalar):
        def validation_step(self, batch, batch_idx):
            self.seen = True

    module, ends = Slow(), []
    ends_at = type("Ends", (Callback,), {"on_exception": lambda self, trainer, module, error: ends.append(type(error))})()
    trainer = quiet(max_epochs=1, num_sanity_val_steps=1, callbacks=[Signal(0, hook="on_sanity_check_start"), saves(), ends_at])
    with pytest.raises(SIGTERMException):
        trainer.fit(module, loader(range(4)), loader(range(4)))
    assert ends == [SIGTERMException] and not hasattr(module, "seen") and not Path("saved").exists()
    assert trainer.interrupted and trainer.received_sigterm and trainer.global_step == 0


def test_without_checkpoints_nothing_is_written(capsys):
    trainer = quiet(max_epochs=1, callbacks=[Signal(1)])
    with pytest.raises(SIGTERMException):
        trainer.fit(Scalar(), loader(range(4)))
    assert "SIGTERM ends the fit after step 2. Nothing is saved, as checkpoints are turned off." in capsys.readouterr().out
    assert list(Path().iterdir()) == [] and trainer.global_step == 2


def test_a_file_that_cannot_be_written_is_told():
    def spoil(self, trainer, module):
        os.rmdir("saved") if os.path.isdir("saved") else None
        Path("saved").write_text("a file")

    with pytest.raises(CheckpointError, match=rf"saved/{PREEMPTED}"):
        quiet(max_epochs=1, callbacks=[Signal(1), saves(), type("Spoil", (Callback,), {"on_train_start": spoil})()]).fit(Scalar(), loader(range(4)))


def test_the_users_handlers_are_called_and_put_back():
    heard = []

    def mine(number, frame):
        heard.append(number)

    before = {number: signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        for number in before:
            with pytest.raises(SIGTERMException):
                quiet(max_epochs=1, callbacks=[Signal(1, number)]).fit(Scalar(), loader(range(4)))
            assert signal.getsignal(number) is mine
        assert heard == [signal.SIGTERM, signal.SIGUSR1]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as under nohup
        quiet(max_epochs=1, callbacks=[Signal(1)]).fit(Scalar(), loader(range(4)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("handler", "code"), [(signal.SIG_DFL, -signal.SIGTERM), (lambda number, frame: os._exit(7), 7)])
def test_a_process_that_a_hook_forks_ends_by_a_signal_as_without_us(handler, code):
    ended = []

    class Forks(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            context = multiprocessing.get_context("fork")
            begun = context.Event()
            process = context.Process(target=lambda: begun.set() or time.sleep(60), daemon=True)
            process.start()
            assert begun.wait(60)
            process.terminate()
            process.join(20)
            ended.append(process.exitcode)
            process.kill()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        trainer = quiet(max_steps=1, callbacks=[Forks()])
        trainer.fit(Scalar(), loader(range(4)))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [code] and not trainer.received_sigterm


def test_what_cannot_be_put_back_is_left_alone(tmp_path):
    with open(tmp_path / "stacks", "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            trainer = quiet(max_epochs=1, callbacks=[Signal(1, signal.SIGUSR1)])
            trainer.fit(Scalar(), loader(range(4)))
            assert trainer.global_step == 4 and not trainer.received_sigterm
        finally:
            assert faulthandler.unregister(signal.SIGUSR1)
    assert "on_before_backward" in (tmp_path / "stacks").read_text()


def test_arguments():
    with pytest.raises(MisconfigurationException, match=r"grace_s=-1"):
        LocalLauncher(2, grace_s=-1)
    with pytest.raises(MisconfigurationException, match="auto_requeue='yes' must be one of True, False"):
        quiet(auto_requeue="yes")


def test_in_another_thread_signals_are_not_heard():
    def fit():
        quiet(max_epochs=1).fit(Scalar(), loader(range(4)))
        kept.append(signal.getsignal(signal.SIGTERM))

    kept = []
    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert kept == [signal.SIG_DFL]


@pytest.mark.parametrize("array", [False, True])
def test_slurms_notice_puts_the_job_back_into_its_queue_and_it_goes_on_by_itself(monkeypatch, array, capsys):
    Path("scontrol").write_text("#!/bin/sh\necho $@ >> asked\nexit $ANSWER\n")
    os.chmod("scontrol", 0o755)
    monkeypatch.setenv("PATH", f"{os.getcwd()}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ANSWER", str(int(array)))
    if array:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    whole = train(noisy_loader())
    step = stopped(2, noisy_loader(), number=signal.SIGUSR1, auto_requeue=True)
    assert Path("asked").read_text() == ("requeue 5_2\n" if array else "requeue 7\n")
    said = capsys.readouterr().out
    assert ("could not be put back" in said) == array and ("is back in Slurm's queue" in said) == (not array)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert_continues(train(noisy_loader(), auto_requeue=True, callbacks=[saves()]), whole, step)
    os.remove("asked")
    stopped(2, noisy_loader(), auto_requeue=False)  # by SIGTERM, which also comes with scancel
    stopped(2, noisy_loader(), auto_requeue=True)
    assert not Path("asked").exists()


# Programs: what comes from outside.

LONG = """
    import os, signal, sys, time
    from pathlib import Path
    from callbacks import ModelCheckpoint
    from tests.helpers.resume import Noisy, noisy_loader, train
    from trainer import SIGTERMException

    class Slow(Noisy):
        def training_step(self, batch, batch_idx):
            Path(f"pid.{self.global_rank}").write_text(str(os.getpid()))
            time.sleep(0.1)  # 10 s an epoch: the signal comes long before its end
            return super().training_step(batch, batch_idx)

        def on_exception(self, error):
            Path(f"end.{self.global_rank}").write_text(f"{type(error).__name__} {self.global_step}")

    saver = ModelCheckpoint("saved", every_n_epochs=100)
    signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
    try:
        train(noisy_loader(400, num_workers=1), module=Slow(), callbacks=[saver], max_epochs=1, **eval(os.environ["MORE"]))
    finally:
        signal.raise_signal(signal.SIGTERM)
"""


def run_script(*command, more):
    Path("script.py").write_text(textwrap.dedent(LONG))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MORE": repr(more)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command, "script.py"], env=environment, text=True, stdout=pipe, stderr=pipe, start_new_session=True
    )


def pids(*ranks):
    files = [Path(f"pid.{rank}") for rank in ranks]
    deadline = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def test_c46_a_long_epoch_and_a_signal_to_all_processes_of_the_group():
    process = run_script(more={})
    pids(0)
    os.killpg(process.pid, signal.SIGTERM)  # the worker too
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "Traceback" not in err, err
    assert out.count("mine\n") == 2  # the user's handler, called in the fit and put back after it
    step = torch.load(f"saved/{PREEMPTED}", weights_only=True)["global_step"]
    assert 1 <= step < 100 and Path("end.0").read_text() == f"SIGTERMException {step}"
    resumed = train(noisy_loader(400), resume_from="auto", callbacks=[ModelCheckpoint("saved")], max_epochs=1)
    assert_continues(resumed, train(noisy_loader(400), max_epochs=1), step)
    assert not Path(f"saved/{PREEMPTED}").exists()  # the saves of the resumed run are newer


@pytest.mark.parametrize("way", ["local", "torchrun"])
def test_c46_two_ranks_save_the_same_step_when_who_started_them_is_told(way):
    command = [] if way == "local" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = run_script(*command, more={"strategy": "ddp", "devices": 2, "accelerator": "cpu"})
    pids(0, 1)
    if way == "local":
        os.kill(process.pid, signal.SIGUSR1)  # Slurm's notice, and the end before they can have saved
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    step = torch.load(f"saved/{PREEMPTED}", weights_only=True)["global_step"]
    assert [Path(f"end.{rank}").read_text() for rank in (0, 1)] == [f"SIGTERMException {step}"] * 2
    assert f"ends the fit after step {step}. Saved" in out
    if way == "local":
        assert process.returncode == 143 and "Traceback" not in err, err
        assert out.count("mine") == 2  # the caller's handler: at the signal, and afterwards


@pytest.mark.parametrize(("hook", "batch", "step"), [("on_before_backward", 2, 3), ("on_validation_batch_start", 1, 4)])
def test_c46_a_signal_to_one_rank_ends_both_at_one_step_and_the_resume_is_exact(hook, batch, step):
    def task():
        def go(**settings):
            module = Validating()
            train(noisy_loader(23, 3), val=noisy_loader(7, 2), module=module, strategy="ddp", devices=2, accelerator="cpu", **settings)
            return module

        whole = go()
        with pytest.raises(SIGTERMException):
            go(callbacks=[Signal(batch, hook=hook, rank=1), saves()])
        saved = torch.load(f"saved/{PREEMPTED}", weights_only=True)["global_step"]
        assert_continues(go(resume_from=f"saved/{PREEMPTED}"), whole, saved)
        return saved

    assert run_ranks(task) == [step, step]  # 4 steps an epoch


def test_after_ctrl_c_one_line_says_where_the_last_checkpoint_is(capsys):
    saver = ModelCheckpoint("saved", "{step}", every_n_train_steps=2)
    for batch, story in ((0, "0. There is no checkpoint to go on from."), (3, f"3. The newest checkpoint is {os.path.realpath('saved')}/step=2.ckpt;")):
        with pytest.raises(KeyboardInterrupt):
            quiet(max_epochs=1, callbacks=[Signal(batch, signal.SIGINT), saver]).fit(Scalar(), loader(range(4)))
        assert f"Interrupted after step {story}" in capsys.readouterr().out
