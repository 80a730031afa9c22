"""Ranks that the product starts itself, or torchrun: what comes back to the caller, and what a plain script sees (C21, C22, C26)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from callbacks import Callback, CSVLogger, EarlyStopping, ModelCheckpoint
from tests.helpers.modules import Net, loader, quiet
from tests.helpers.reference import train_by_hand
from tests.helpers.waiting import gone, wait_for
from trainer import DataModule

ROOT = Path(__file__).resolve().parents[2]


class Remembering(Net):
    """Keeps plain values that the caller wants to see afterwards."""

    def __init__(self):
        super().__init__()
        self.history, self.counts, self._last = [], {"steps": 0}, None
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.seen += len(batch)
        self.counts["steps"] += 1
        self.history.append(len(batch))
        self.log("loss", loss := self.loss(batch), on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))
        self._last = "validated" if self.trainer.state.fn == "fit" else "validated alone"

    def predict_step(self, batch, batch_idx):
        self._last = "predicted"
        return batch[:, 0]


class Noting(Callback):
    def __init__(self):
        self.steps, self.stages = [], []

    def setup(self, trainer, module, stage):
        self.stages.append(stage)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)


class Rows(DataModule):
    def __init__(self):
        super().__init__()
        self.stages = []

    def setup(self, stage):
        self.stages.append(stage)

    def train_dataloader(self):
        return loader(Net.rows(27), 2)

    def val_dataloader(self):
        return loader(Net.rows(7), 2)


def test_what_a_launch_brings_back():
    noting, stopping, saving = Noting(), EarlyStopping("val", patience=9), ModelCheckpoint(dirpath="ckpt", monitor="val")
    module, data, logger = Remembering(), Rows(), CSVLogger()
    parameter, history = module.layers[0].weight, module.history
    callbacks = [noting, stopping, saving]
    trainer = quiet(strategy="ddp", devices=2, max_epochs=2, gradient_clip_val=0.5, callbacks=callbacks, logger=logger)
    trainer.fit(module, datamodule=data)

    right = train_by_hand(Net(), Net.rows(27).split(4), 14, clip=0.5).state_dict()
    found = module.state_dict()
    for name in right:
        torch.testing.assert_close(found[name], right[name], rtol=0, atol=1e-6)
    assert module.layers[0].weight is parameter and parameter.requires_grad
    assert found["seen"] == 2 * 14 and module.counts == {"steps": 14} and module._last == "validated"
    assert module.history is history and history == [2, 2, 2, 2, 2, 2, 2] * 2
    assert noting.steps == list(range(1, 15)) and noting.stages == data.stages == ["fit"]
    assert trainer.global_step == 14 and trainer.current_epoch == 2 and trainer.state.finished
    val = trainer.callback_metrics["val"].item()
    assert stopping.best_score.item() == min(v.item() for v in saving.best_k_models.values()) and Path(saving.best_model_path).exists()
    assert set(trainer.logged_metrics) == {"loss_step", "loss_epoch", "val"} and Path(logger.log_dir, "metrics.csv").exists()
    assert data.trainer is None and module._trainer is None

    rows = Net.rows(7)
    assert trainer.validate(dataloaders=loader(rows, 2), verbose=False) == [{"val": pytest.approx(val, rel=1e-6)}]
    assert trainer.callback_metrics.keys() == {"val"} and module._last == "validated alone"
    predictions = trainer.predict(module, loader(rows, 2))
    assert torch.equal(torch.cat(predictions), rows[:, 0]) and [len(p) for p in predictions] == [2, 2, 2, 1]
    assert module._last == "predicted" and noting.stages == ["fit", "validate", "predict"]
    assert torch.equal(module.state_dict()["layers.0.weight"], found["layers.0.weight"])


class OwnError(Exception):
    def __init__(self, code, where):
        super().__init__(code, where)
        self.code = code


class Failing(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise OwnError(7, "training step")
        return super().training_step(batch, batch_idx)


def test_c21_an_exception_on_rank_1_reaches_the_caller_as_it_is():
    module = Failing()
    trainer = quiet(strategy="ddp", devices=2, max_epochs=1)
    with pytest.raises(OwnError) as caught:
        trainer.fit(module, loader(Net.rows(16), 2, num_workers=2))
    assert caught.value.code == 7
    shown = caught.value.__notes__[-1] if sys.version_info >= (3, 11) else str(caught.value.__cause__)
    assert "Rank 1 raised it at:" in shown and 'raise OwnError(7, "training step")' in shown
    quiet(max_epochs=1).fit(module, loader(Net.rows(4), 4))  # the module is as good as new


# -- programs --------------------------------------------------------------------------------------------------------------


HEAD = """
    import os, sys, time
    import torch
    from trainer import Trainer, TrainModule

    def make():
        class Local(TrainModule):                      # a class of a function, with a lambda
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.zeros(()))
                self.loss = lambda x: (self.w * x).mean()
            def training_step(self, batch, batch_idx):
                return self.loss(batch)
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1.0)
        return Local()

    data = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=1)
"""


def start(script, *command):
    """Run a script, in the test's directory, as a user does."""
    Path("script.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *command, "script.py"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_c22_a_plain_script_runs_once_and_fits_twice():
    process = start("""
        lines = os.path.abspath("lines")
        def note(text):
            with open(lines, "a") as file:
                file.write(text + "\\n")

        note("before")
        model = make()
        trainer = Trainer(strategy="ddp", devices=2, max_epochs=1, accelerator="cpu")
        trainer.fit(model, data)
        note(f"after {model.w.item()} {trainer.global_step}")
        os.makedirs("elsewhere")
        os.chdir("elsewhere")
        trainer.max_epochs = 2
        trainer.fit(model, data)
        note(f"again {model.w.item()} {trainer.global_step} {os.listdir()}")
        """)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    # Each step of 2 ranks x 1 sample lowers w by the mean of two neighbours: 28 / 2 an epoch.
    assert Path("lines").read_text() == "before\nafter -14.0 4\nagain -28.0 8 []\n"
    assert sorted(os.listdir()) == ["elsewhere", "lines", "runs", "script.py"]
    assert os.listdir("runs") == ["version_0"] and len(list(Path("runs").rglob("*.ckpt"))) >= 1


def test_torchrun_starts_us_and_strategy_auto_follows():
    script = """
        model = make()
        type(model).predict_step = lambda self, batch, batch_idx: batch
        trainer = Trainer(strategy="auto", max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.fit(model, data)
        found = [model.w.item(), type(trainer.strategy).__name__, trainer.world_size, len(trainer.predict(model, data))]
        with open(f"rank.{trainer.global_rank}", "w") as file:
            file.write(repr(found))
        """
    process = start(script, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [Path(f"rank.{rank}").read_text() for rank in (0, 1)] == ["[-14.0, 'DDPStrategy', 2, 8]"] * 2


def test_c21_ctrl_c_and_a_killed_rank():
    process = start("""
        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.ones(())

        from callbacks import Callback
        class Telling(Callback):
            def __init__(self, name):
                self.name = name
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                if batch_idx == 3:
                    with open(f"{self.name}.{trainer.global_rank}", "w") as file:
                        file.write(str(os.getpid()))

        for name in ("first", "second"):
            trainer = Trainer(strategy="ddp", devices=2, accelerator="cpu", barebones=True, callbacks=[Telling(name)])
            try:
                trainer.fit(make(), torch.utils.data.DataLoader(Endless(), num_workers=2))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """)

    def pids(name):
        files = [Path(f"{name}.{rank}") for rank in (0, 1)]
        wait_for(lambda: process.poll() is not None or all(f.exists() and f.read_text() for f in files))
        assert process.poll() is None, process.communicate()
        return [int(file.read_text()) for file in files]

    first = pids("first")
    process.send_signal(signal.SIGINT)
    second = pids("second")
    assert all(gone(pid) for pid in first)
    workers = [int(pid) for rank in second for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]
    os.kill(second[0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and out == "interrupted\n"
    assert "ProcessError: rank 0 was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]
    assert len(workers) >= 4
    wait_for(lambda: all(gone(pid) for pid in (*second, *workers)))
