"""Make dashboard.png: train the digits example twice with all monitors, and let chromium look at what TensorBoard shows.

    python docs/pictures/make.py [FOLDER]      # FOLDER: look at the runs that are there already, instead of training
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from callbacks import (  # noqa: E402
    DeviceStatsMonitor,
    GradientMonitor,
    HistogramMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    SampleImages,
    StragglerMonitor,
    TensorBoardLogger,
    ThroughputMonitor,
)
from examples.digits import DigitNet, Digits  # noqa: E402
from trainer import Trainer, seed_everything  # noqa: E402

CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=20000"]  # fmt: skip


class Net(DigitNet):
    """The example's module; it also says what its graph is."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.example_input_array = torch.zeros(2, 1, 8, 8)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.net(pictures)


def train(folder: str) -> None:
    """Train on two processes, with two learning rates."""
    for lr in (0.01, 0.001):
        seed_everything(0)
        watching = [LearningRateMonitor("step"), GradientMonitor(), StragglerMonitor(), ThroughputMonitor(lambda batch: len(batch[0])),
                    DeviceStatsMonitor(), HistogramMonitor(), SampleImages()]  # fmt: skip
        trainer = Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_epochs=15, seed=0, log_every_n_steps=5, enable_progress_bar=False,
            logger=TensorBoardLogger(folder, name="", version=f"lr={lr}", log_graph=True),
            callbacks=[ModelCheckpoint(monitor="val_acc", mode="max"), *watching],
        )  # fmt: skip
        trainer.fit(Net(lr), datamodule=Digits(batch_size=32))


def look(folder: str, page: str, size: str, file: Path) -> None:
    """Start a server for `folder`, and keep what a browser shows of `page`."""
    place = Path(folder).resolve()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", place.name, "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, cwd=place.parent, stderr=subprocess.PIPE, text=True)
    try:
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        with tempfile.TemporaryDirectory() as profile:
            browser = [*CHROMIUM, f"--user-data-dir={profile}", f"--window-size={size}", f"--screenshot={file}", f"{address}/#{page}"]
            subprocess.run(browser, check=True, stderr=subprocess.DEVNULL, timeout=120)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = sys.argv[1] if len(sys.argv) > 1 else f"{made}/runs"
        if len(sys.argv) == 1:
            train(folder)
        look(folder, "custom_scalars", "1500,1320", HERE / "dashboard.png")
