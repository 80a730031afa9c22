"""What the loop may cost: frames, Python calls, and reads of device values. Numbers from docs/architecture.md."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientMonitor,
    LearningRateMonitor,
    StragglerMonitor,
    ThroughputMonitor,
    Timer,
)
from tests.helpers.modules import quiet
from tests.helpers.ranks import run_ranks
from trainer import Trainer, TrainModule

ROOT = Path(__file__).parents[2]
OURS = (str(ROOT / "trainer") + os.sep, str(ROOT / "callbacks") + os.sep)


class Logged(TrainModule):
    """A linear layer that logs its loss in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(batches: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(2 * batches, 4)), batch_size=2, shuffle=True)


# -- frames ----------------------------------------------------------------------------------------------------------------


def frames_between_fit_and_step(**settings: Any) -> list[str]:
    """Return the functions of ours on the stack, below `Trainer.fit` and above the module's training step."""
    found: list[str] = []

    class Deep(Logged):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            frame: FrameType | None = sys._getframe(1)
            names = []
            while frame is not None and frame.f_code is not Trainer.fit.__code__:
                if frame.f_code.co_filename.startswith(OURS):
                    names.append(frame.f_code.co_name)
                frame = frame.f_back
            assert frame is not None, "fit is not on the stack"
            found[:] = names[::-1]
            return super().training_step(batch, batch_idx)

    quiet(accelerator="cpu", max_steps=2, **settings).fit(Deep(), data(4))
    return found


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}])
def test_few_frames_between_fit_and_training_step(settings: dict[str, Any]) -> None:
    frames = frames_between_fit_and_step(**settings)
    assert len(frames) <= 6, frames
    assert frames[-4:] == ["fit", "train_epoch", "train_step", "forward_backward"]  # the count sees the loop


def test_few_frames_on_two_ranks() -> None:
    for frames in run_ranks(frames_between_fit_and_step, strategy="ddp", devices=2):
        assert len(frames) <= 6, frames
        assert "forward" in frames  # of what DDP wraps


# -- calls -----------------------------------------------------------------------------------------------------------------


def calls_of_ours(batches: int, folder: Path, **settings: Any) -> int:
    """Count the calls of Python functions of ours (generators count each time they go on) during a fit of one epoch."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            count += 1

    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **settings)
    module, loader = Logged(), data(batches)
    sys.setprofile(profile)
    try:
        trainer.fit(module, loader)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("accumulate", [1, 4])
def test_few_python_calls_a_batch_with_the_default_callbacks(accumulate: int, tmp_path: Path) -> None:
    few, many = (calls_of_ours(n, tmp_path, accumulate_grad_batches=accumulate) for n in (100, 500))
    each = (many - few) / 400
    assert 10 < each <= 60, each


# -- reads of device values --------------------------------------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Notes whoever waits for a tensor's value: on an accelerator each of these stops the host until the device is done."""

    NAMES = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__",
             "nonzero", "equal", "allclose", "is_nonzero")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.found: list[tuple[str, list[str]]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if self.on and name in self.NAMES:
            stack = [f"{entry.name} ({Path(entry.filename).name}:{entry.lineno})" for entry in traceback.extract_stack()[:-1]]
            if not any(entry.startswith("show_epoch ") for entry in stack):  # the epoch's numbers for its hooks: a publish point
                self.found.append((name, stack))
        return function(*args, **(kwargs or {}))


class Watch(Callback):
    """Switches a `Reads` on for the training steps of a fit, and off where the epoch ends."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.reads.on = True

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.reads.on = False


def reads_of(module: TrainModule, folder: Path, batches: int = 20, **settings: Any) -> list[tuple[str, list[str]]]:
    reads = Reads()
    monitors = [GradientMonitor(), ThroughputMonitor(lambda batch: len(batch[0])), StragglerMonitor(), DeviceStatsMonitor(), Timer("01:00:00:00")]
    extra = [LearningRateMonitor(), EarlyStopping("loss_epoch"), *monitors, Watch(reads)]
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, callbacks=extra, **settings)
    with reads:
        trainer.fit(module, data(batches))
    assert trainer.global_step > 0
    return reads.found


def at_publish_points(reads: list[tuple[str, list[str]]]) -> int:
    """Return how many reads were made while publishing; fail on any other."""
    for name, stack in reads:
        assert any(entry.startswith("publish_step ") for entry in stack), (name, stack[-6:])
    return len(reads)


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
     {"precision": "bf16-mixed"}],
    ids=str,
)  # fmt: skip
def test_nothing_waits_for_the_device_between_publish_points(settings: dict[str, Any], tmp_path: Path) -> None:
    assert at_publish_points(reads_of(Logged(), tmp_path, log_every_n_steps=0, **settings)) == 0
    steps = 20 // settings.get("accumulate_grad_batches", 1)
    points = steps // 5
    assert at_publish_points(reads_of(Logged(), tmp_path, log_every_n_steps=5, **settings)) == points  # one transfer each


class Counted(Logged):
    """Gives its number of samples, and skips a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else {"loss": loss, "count": (batch[0] > 0).sum()}


class Manual(Logged):
    """Steps its optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Overridden(Logged):
    """Takes the slow path."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [Counted, Manual, Overridden])
def test_no_path_waits_for_the_device(kind: type[Logged], tmp_path: Path) -> None:
    assert at_publish_points(reads_of(kind(), tmp_path, log_every_n_steps=0)) == 0


def test_the_probe_sees_a_read(tmp_path: Path) -> None:
    class Reading(Logged):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            seen = loss.detach()
            assert seen >= 0 and float(seen) == seen.item() == seen.tolist()
            return loss

    names = [name for name, _ in reads_of(Reading(), tmp_path, batches=1, log_every_n_steps=0)]
    assert names == ["__bool__", "__float__", "item", "tolist"]


# -- a user's own callbacks.py ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["callbacks.py", "callbacks/__init__.py"])
def test_a_hidden_callbacks_package_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("MY_OWN = 1\n")
    (tmp_path / "program.py").write_text("import trainer\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: The package 'callbacks' that comes with 'trainer' is hidden by")
    assert str(file) in message and "Rename that file or folder" in message
