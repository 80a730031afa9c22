"""What a step costs under each strategy: a hand-written loop, ours, and the other strategies, in one run.

    python benchmarks/strategies.py [--steps N] [--repetitions N] [--only NAME ...] [--model mlp|digits] [--no-accuracy]

Two gloo ranks on the CPU (one thread each) for everything distributed, one process for the rest; all see the same samples a step. "mlp" is
Linear(32, 64)-ReLU-Linear(64, 10) with 16 samples a rank; "digits" is the network of examples/digits.py with 32 samples a rank. In every
repetition all contestants take their turn, each for one warm-up epoch and one of N steps, so a slow spell of the machine hits them
alike. Time is taken between the first and the last step of the second epoch. The table gives medians
over the repetitions and the median, lowest and highest of the ratios within each to the loop by hand of the same number of processes.

Then the time to 97 % accuracy on the digits (wall time of the training, validation after each epoch included).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from callbacks import Callback  # noqa: E402
from tests.helpers.ranks import run_ranks  # noqa: E402
from trainer import ModelParallelDDPStrategy, ModelParallelStrategy, Trainer, TrainModule  # noqa: E402

TARGET, RANKS = 0.97, 2
SAMPLES = {"mlp": 16, "digits": 32}  # of a step and rank


def digits() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("digits_example", ROOT / "examples" / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network(model: str) -> nn.Module:
    torch.manual_seed(0)
    if model == "mlp":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return digits().DigitNet().net


def data(model: str, steps: int) -> TensorDataset:
    shape = (32,) if model == "mlp" else (1, 8, 8)
    generator = torch.Generator().manual_seed(0)
    count = steps * SAMPLES[model] * RANKS
    return TensorDataset(torch.randn(count, *shape, generator=generator), torch.randint(10, (count,), generator=generator))


def optimizer_of(model: str, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01) if model == "mlp" else torch.optim.AdamW(parameters, lr=0.01)


class Watch:
    """The time from the first to the last step of the second epoch."""

    def __init__(self, steps: int) -> None:
        self.steps, self.count, self.seconds = steps, 0, 0.0

    def step(self) -> None:
        self.count += 1
        if self.count == self.steps + 1:
            self.start = time.perf_counter()
        elif self.count == 2 * self.steps:
            self.seconds = time.perf_counter() - self.start

    @property
    def microseconds(self) -> float:
        assert self.count == 2 * self.steps, f"{self.count} steps in the place of {2 * self.steps}"
        return 1e6 * self.seconds / (self.steps - 1)


def by_hand(model: str, steps: int, ranks: int) -> float:
    dataset, watch, net = data(model, steps), Watch(steps), network(model)
    if ranks > 1:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(dataset)
        loader, call = DataLoader(dataset, SAMPLES[model], sampler=sampler), DistributedDataParallel(net)
    else:
        loader, call = DataLoader(dataset, SAMPLES[model] * RANKS, shuffle=True), net
    optimizer = optimizer_of(model, net.parameters())
    for epoch in range(2):
        if ranks > 1:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(call(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step()
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return watch.microseconds


class Module(TrainModule):
    """The module of every strategy."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model, self.net = model, network(model)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_model(self) -> None:
        mesh = self.trainer.strategy.device_mesh
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # slow to load

            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.model, self.parameters())


def ours(model: str, steps: int, ranks: int, strategy: Any, devices: int = RANKS, shares: int | None = None) -> float:
    """Train with a strategy (name, or function that makes it); `shares` of the data are as many as ranks if not said otherwise."""
    watch = Watch(steps)

    class Timer(Callback):
        def on_before_zero_grad(self, *args: Any) -> None:  # once a step, as by hand, and no hook that makes the ranks ask each other
            watch.step()

    dataset, module = data(model, steps), Module(model)
    batch = SAMPLES[model] * RANKS // (shares or ranks)
    Trainer(
        accelerator="cpu", devices=devices, strategy=strategy() if callable(strategy) else strategy, max_epochs=2, callbacks=[Timer()], logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    ).fit(module, DataLoader(dataset, batch, shuffle=True))  # fmt: skip
    return watch.microseconds


OURS: dict[str, tuple[int, dict[str, Any]]] = {  # name -> processes, arguments of `ours`
    "single_device": (1, {"strategy": "single_device", "devices": 1}),
    "dp": (1, {"strategy": "dp"}),
    "model_parallel": (1, {"strategy": lambda: ModelParallelDDPStrategy(stack="net")}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "model_parallel_ddp": (2, {"strategy": lambda: ModelParallelDDPStrategy(2, "net"), "devices": 2 * RANKS}),
    "mesh, tensor": (2, {"strategy": lambda: ModelParallelStrategy(1, RANKS), "shares": 1}),
    "mesh, pipeline": (2, {"strategy": lambda: ModelParallelStrategy(1, 1, RANKS, "net"), "shares": 1}),
}


def contestants(model: str, only: list[str]) -> dict[str, tuple[int, Callable[..., float]]]:
    """Name -> (processes, function); the layers of the digits are not of the kind that ranks compute together."""
    found: dict[str, tuple[int, Callable[..., float]]] = {"1 process, by hand": (1, by_hand)}
    for name, (ranks, arguments) in OURS.items():
        if ranks == 2:
            found.setdefault("2 ranks, DDP by hand", (2, by_hand))
        if model == "mlp" or name != "mesh, tensor":
            found[f"{ranks} {'ranks' if ranks > 1 else 'process'}, {name}"] = (ranks, functools.partial(ours, **arguments))
    return {k: v for k, v in found.items() if "by hand" in k or not only or any(name in k for name in only)}


def turn(model: str, steps: int, name: str) -> float:
    """One turn of one contestant, in a rank (or, of one process, here)."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks, run = contestants(model, [])[name]
    return run(model, steps, ranks)


def report(model: str, steps: int, repetitions: int, only: list[str]) -> None:
    turns = contestants(model, only)
    times: dict[str, list[float]] = {name: [] for name in turns}
    for repetition in range(repetitions):
        first = repetition % len(turns)
        for name in [*turns][first:] + [*turns][:first]:
            if turns[name][0] == 1:
                times[name].append(turn(model, steps, name))
            else:
                times[name].append(run_ranks(turn, RANKS, timeout=300, model=model, steps=steps, name=name)[0])
    print(f"\n{model}, {SAMPLES[model] * RANKS} samples a step\n{'':28}{'us a step':>10}{'samples/s':>11}{'ratio':>8}  (lowest to highest)")
    for name, values in times.items():
        base = times["2 ranks, DDP by hand" if name.startswith("2") else "1 process, by hand"]
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        middle = statistics.median(values)
        print(
            f"{name:28}{middle:10.1f}{1e6 * SAMPLES[model] * RANKS / middle:11.0f}{statistics.median(ratios):8.3f}  "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


def accuracy_run(strategy: str, ranks: int) -> tuple[float, int, float]:
    """Return (seconds, epochs, accuracy) of a training of the digits that stops at the target."""
    warnings.filterwarnings("ignore")
    example = digits()
    clock = {}

    class Until(Callback):
        def on_train_start(self, *_: Any) -> None:
            clock["start"] = time.perf_counter()

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            clock["end"], clock["acc"] = time.perf_counter(), float(trainer.callback_metrics["val_acc"])
            trainer.should_stop = clock["acc"] >= TARGET

    trainer = Trainer(
        accelerator="cpu", devices=1 if strategy == "single_device" else RANKS, strategy=strategy, max_epochs=40, seed=0, logger=False,
        callbacks=[Until()], enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(example.DigitNet(), datamodule=example.Digits(64 // (RANKS if ranks > 1 else 1)))
    return clock["end"] - clock["start"], trainer.current_epoch + 1, clock["acc"]


def accuracy_by_hand() -> tuple[float, int, float]:
    """The DDP loop by hand for the digits, with the same data, seed and validation."""
    warnings.filterwarnings("ignore")
    example = digits()
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, module, parts = dist.get_rank(), example.DigitNet(), example.Digits(32)
    parts.setup("fit")
    sampler = DistributedSampler(parts.train, seed=0)
    loader, validation = DataLoader(parts.train, 32, sampler=sampler), DataLoader(parts.val, 180)
    ddp = DistributedDataParallel(module.net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    start = time.perf_counter()
    for epoch in range(40):
        sampler.set_epoch(epoch)
        module.train()
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        module.eval()
        with torch.no_grad():
            right = sum((module.net(x).argmax(1) == y).sum() for x, y in validation) if rank == 0 else torch.zeros((), dtype=torch.int64)
        dist.broadcast(right, 0)
        scheduler.step()
        if right.item() / len(parts.val) >= TARGET:
            break
    seconds = time.perf_counter() - start
    dist.barrier()
    dist.destroy_process_group()
    return seconds, epoch + 1, right.item() / len(parts.val)


def accuracies() -> None:
    print(f"\ntime to {TARGET:.0%} accuracy on the digits (validation pictures)\n{'':28}{'seconds':>10}{'epochs':>8}{'accuracy':>10}")
    rows: list[tuple[str, Any]] = [("2 ranks, DDP by hand", lambda: run_ranks(accuracy_by_hand, RANKS)[0])]
    for name, ranks in (("single_device", 1), ("dp", 1), ("ddp", 2), ("fsdp", 2)):
        label = f"{ranks} {'ranks' if ranks > 1 else 'process'}, {name}"
        rows.append((label, lambda n=name, r=ranks: run_ranks(accuracy_run, r, strategy=n, ranks=r)[0] if r > 1 else accuracy_run(n, 1)))
    for label, run in rows:
        found = sorted((run() for _ in range(3)), key=lambda r: r[0])[1]
        print(f"{label:28}{found[0]:10.2f}{found[1]:8d}{100 * found[2]:9.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="strategies beside the loops by hand")
    parser.add_argument("--model", choices=list(SAMPLES))
    parser.add_argument("--no-accuracy", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for model in [args.model] if args.model else SAMPLES:
        report(model, args.steps, args.repetitions, args.only)
    if not args.no_accuracy:
        accuracies()
    print(f"\ntorch {torch.__version__}, {args.repetitions} repetitions of {args.steps} steps, one thread a process")


if __name__ == "__main__":
    main()
