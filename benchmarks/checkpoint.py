"""What a checkpoint costs: the stall of a step that saves, at once and in the background, and what the checksum adds to reading.

    python benchmarks/checkpoint.py [--megabytes N] [--saves N] [--folder DIR]

All in one process, in turn, so that the ratios hold whatever else the machine does. The model is a stack of linear layers with SGD and
momentum, so the file has twice the size of the weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from callbacks import Callback, ModelCheckpoint
from trainer import Trainer, TrainModule
from trainer.checkpoint import checksum, io

EVERY = 20  # steps from one save to the next


class Stack(TrainModule):
    """Layers of 1024 x 1024 numbers, 4 MB each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


class Clock(Callback):
    """The time from the start of one batch to that of the next: a step with the boundary behind it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())


def steps(layers: int, saves: int, saver: ModelCheckpoint | None) -> tuple[float, float, float]:
    """Return (median of a step that saves, median of the steps after one, median of the others) in milliseconds."""
    clock = Clock()
    trainer = Trainer(
        max_steps=EVERY * saves + 2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=None if saver else False, callbacks=[clock, *([saver] if saver else [])], log_every_n_steps=0,
    )  # fmt: skip
    trainer.fit(Stack(layers), DataLoader(torch.randn(EVERY * saves + 2, 1024), batch_size=1))
    gaps = [1000 * (b - a) for a, b in zip(clock.times, clock.times[1:])]
    saving = [gap for i, gap in enumerate(gaps, 1) if i % EVERY == 0]
    after = [gap for i, gap in enumerate(gaps, 1) if i > EVERY and 0 < i % EVERY <= EVERY // 2]
    rest = [gap for i, gap in enumerate(gaps, 1) if i % EVERY > EVERY // 2]
    return statistics.median(saving), statistics.median(after), statistics.median(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=96, help="of weights and momentum together")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--folder", default=None, help="where to write; default a temporary folder")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other measure what else the machine does
    layers = max(1, given.megabytes // 8)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = {}
        for name, later in (("none", None), ("at once", False), ("in the background", True)):
            saver = None if later is None else ModelCheckpoint(Path(folder) / name, every_n_train_steps=EVERY, save_top_k=1, async_save=later)
            found[name] = steps(layers, given.saves, saver)
            saving, after, rest = found[name]
            print(f"{name:<18} step that saves {saving:8.1f} ms   steps after it {after:6.1f} ms   other steps {rest:6.1f} ms")
        at_once, later = (found[name][0] - found[name][2] for name in ("at once", "in the background"))
        print(f"stall of a step: {at_once:.1f} ms at once, {later:.1f} ms in the background, {later / at_once:.0%}")
        path = next((Path(folder) / "at once").glob("*.ckpt"))
        times: dict[str, list[float]] = {"torch.load": [], "load": [], "checksum alone": []}
        for _ in range(5):
            for name, read in (("torch.load", torch.load), ("load", io.load), ("checksum alone", checksum.damage)):
                start = time.perf_counter()
                read(path)
                times[name].append(1000 * (time.perf_counter() - start))
        print(f"{path.stat().st_size / 1e6:.0f} MB: " + ", ".join(f"{name} {min(values):.1f} ms" for name, values in times.items()))


if __name__ == "__main__":
    main()
