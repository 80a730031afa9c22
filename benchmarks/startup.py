"""What it costs to start: `import trainer` over `import torch`, and from `fit()` to the first step of two processes.

    python benchmarks/startup.py [--repetitions N]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import Trainer, TrainModule

# Both imports in one fresh process: torch's own time varies more from process to process than ours takes in all.
IMPORT = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import trainer
end = time.perf_counter()
from trainer import DataModule, Trainer, TrainModule
print(middle - start, end - middle, time.perf_counter() - middle)
"""


class Clock(TrainModule):
    """Writes down when its first step began; time.time() is the clock that processes share."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.file = file

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == 0 and self.global_rank == 0:
            with open(self.file, "w") as file:
                file.write(repr(time.time()))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def imports() -> list[float]:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def launch(devices: int) -> tuple[float, float]:
    """Seconds from calling fit() to the first step, and from there until fit() returned."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "first_step")
        trainer = Trainer(
            accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        data = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
        start = time.time()
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(Clock(file), data)
        end = time.time()
        with open(file) as content:
            first = float(content.read())
    return first - start, end - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    imports()  # fills the disk cache
    rows = []
    names = ("import torch", "import trainer, over that", "... and Trainer, TrainModule, DataModule of it")
    rows += zip(names, zip(*(imports() for _ in range(repetitions))))
    for devices in (1, 2):
        first_s, rest_s = zip(*(launch(devices) for _ in range(repetitions)))
        rows.append((f"{devices} process(es): fit() to first step", first_s))
        rows.append((f"{devices} process(es): first step to return", rest_s))
    print(f"{'':48}{'median s':>10}{'lowest':>10}{'highest':>10}")
    for name, values in rows:
        print(f"{name:48}{statistics.median(values):10.3f}{min(values):10.3f}{max(values):10.3f}")


if __name__ == "__main__":
    main()
