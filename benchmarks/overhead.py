"""What a training step costs beyond the torch work in it: this trainer and others against a hand-written loop.

    python benchmarks/overhead.py [--steps N] [--repetitions N] [--cpu-time] [--only NAME ...]

Linear(32, 64)-ReLU-Linear(64, 10), batch 16, SGD, one CPU thread, a DataLoader over a TensorDataset. The model is small
so that nothing hides the overhead. Every repetition runs all contestants in turn, each for one epoch of N steps after a
warm-up epoch, so a slow spell of the machine hits them alike; the table gives medians over the repetitions, and the
median of the ratios within each. Time is taken between the first and the last step of the epoch, inside the run:
starting and ending a run do not count. "by hand" takes its batches from the DataLoader as everybody does; "by hand, no
loader" indexes the tensors, a batch at a time, and so is about the least that a step can take.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, TensorBoardLogger
from trainer import Trainer, TrainModule

BATCH, LOG_EVERY = 16, 50


def loader(steps: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(steps * BATCH, 32, generator=generator)
    labels = torch.randint(10, (steps * BATCH,), generator=generator)
    return DataLoader(TensorDataset(pictures, labels), batch_size=BATCH, shuffle=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


class Stopwatch:
    """Seconds between the ends of the first and of the last step of the last epoch seen."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps, self.clock, self.count, self.start, self.seconds = steps, clock, 0, 0.0, 0.0

    def step(self) -> None:
        self.count += 1
        if self.count % self.steps == 1:
            self.start = self.clock()
        elif self.count % self.steps == 0:
            self.seconds = self.clock() - self.start

    @property
    def microseconds_a_step(self) -> float:
        return 1e6 * self.seconds / (self.steps - 1)


def by_hand(data: DataLoader, watch: Stopwatch, folder: str) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step()


def no_loader(data: DataLoader, watch: Stopwatch, folder: str) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    pictures, labels = data.dataset.tensors
    for _ in range(2):
        for indices in torch.randperm(len(labels)).split(BATCH):
            loss = F.cross_entropy(net(pictures[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step()


def ours(data: DataLoader, watch: Stopwatch, folder: str, logs: bool = False) -> None:
    module, timer = module_of(TrainModule, logs), timer_of(Callback, watch)
    Trainer(
        accelerator="cpu", devices=1, max_epochs=2, callbacks=[timer], enable_progress_bar=logs, enable_checkpointing=False,
        enable_model_summary=False, log_every_n_steps=LOG_EVERY, logger=TensorBoardLogger(folder) if logs else False,
        default_root_dir=folder,
    ).fit(module, data)  # fmt: skip


def lightning(data: DataLoader, watch: Stopwatch, folder: str, logs: bool = False) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import TensorBoardLogger as Theirs

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    module, timer = module_of(pl.LightningModule, logs), timer_of(pl.Callback, watch)
    pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, callbacks=[timer], enable_progress_bar=logs, enable_checkpointing=False,
        enable_model_summary=False, log_every_n_steps=LOG_EVERY, logger=Theirs(folder) if logs else False,
        default_root_dir=folder,
    ).fit(module, data)  # fmt: skip


def accelerate(data: DataLoader, watch: Stopwatch, folder: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = network()
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), data)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            watch.step()


def ignite(data: DataLoader, watch: Stopwatch, folder: str) -> None:
    from ignite.engine import Events, create_supervised_trainer

    net = network()
    engine = create_supervised_trainer(net, torch.optim.SGD(net.parameters(), lr=0.01), F.cross_entropy)
    engine.add_event_handler(Events.ITERATION_COMPLETED, watch.step)
    engine.run(data, max_epochs=2)


def transformers(data: DataLoader, watch: Stopwatch, folder: str) -> None:
    from transformers import Trainer as Theirs
    from transformers import TrainerCallback, TrainingArguments

    class Classifier(nn.Module):
        """A model as their Trainer wants it: named inputs, and a dict with the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class Timer(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            watch.step()

    def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        x, y = zip(*rows, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    model = Classifier()
    args = TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=LOG_EVERY, max_grad_norm=0, remove_unused_columns=False, lr_scheduler_type="constant", dataloader_pin_memory=False,
    )  # fmt: skip
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.01), None)
    Theirs(model, args, collate, data.dataset, callbacks=[Timer()], optimizers=optimizers).train()


def module_of(base: type, logs: bool) -> nn.Module:
    """The same module for every trainer of this style."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if logs:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def timer_of(base: type, watch: Stopwatch) -> object:
    class Timer(base):
        def on_train_batch_end(self, *args: object) -> None:
            watch.step()

    return Timer()


CONTESTANTS: dict[str, Callable[..., None]] = {
    "by hand": by_hand,
    "by hand, no loader": no_loader,
    "ours": ours,
    "ours, logging": lambda *args: ours(*args, logs=True),
    "pytorch-lightning": lightning,
    "pytorch-lightning, logging": lambda *args: lightning(*args, logs=True),
    "accelerate": accelerate,
    "ignite": ignite,
    "transformers": transformers,
}


class Screen(io.StringIO):
    """A terminal in memory: bars draw as for a person, but the speed of a real terminal is not measured."""

    def isatty(self) -> bool:
        return True


def measure(run: Callable[..., None], steps: int, clock: Callable[[], float]) -> float:
    watch = Stopwatch(steps, clock)
    screen = Screen()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        run(loader(steps), watch, folder)
    assert watch.count == 2 * steps, f"{watch.count} steps counted instead of {2 * steps}"
    return watch.microseconds_a_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: steadier where other programs run")
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS), metavar="NAME")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorboard's import is chatty where TensorFlow is installed

    chosen = {name: run for name, run in CONTESTANTS.items() if name in {"by hand", *args.only}}
    for name, run in list(chosen.items()):  # one unmeasured turn: imports, caches, and who is there at all
        try:
            measure(run, 50, clock)
        except ImportError as error:
            print(f"{name}: skipped, {error}. Install it by: pip install '.[bench]'")
            del chosen[name]
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for repetition in range(args.repetitions):
        order = list(chosen)[repetition % len(chosen) :] + list(chosen)[: repetition % len(chosen)]
        for name in order:
            times[name].append(measure(chosen[name], args.steps, clock))
        print(f"repetition {repetition + 1} of {args.repetitions}", file=sys.stderr)

    print(f"\n{'':28}{'us a step':>10}{'ratio':>8}  (lowest to highest ratio)")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times["by hand"])]
        spread = f"  ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:28}{statistics.median(values):10.1f}{statistics.median(ratios):8.2f}{spread}")
    kind = "processor" if args.cpu_time else "wall"
    print(f"\ntorch {torch.__version__}, {args.repetitions} repetitions of {args.steps} steps, one thread, {kind} time")


if __name__ == "__main__":
    main()
