"""Activation checkpointing and torch.compile: what a training step keeps for backward, and how long it takes.

    python benchmarks/memory.py [--layers 6] [--width 128] [--batch 8] [--length 64] [--steps 10] [--compile] [--accelerator cpu]

A stack of Transformer layers. "Kept" is what autograd holds between forward and backward besides the weights, each piece of memory once,
as torch's saved_tensors_hooks see it (compiled code saves what its own planner chose). "Step" is the median over the steps after the
third. With --compile (slow: it builds code first) each row is also run compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from callbacks import Callback
from trainer import Trainer, TrainModule


class Stack(TrainModule):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Meter(Callback):
    """Counts the bytes that are kept from forward to backward, and takes the time of each step."""

    def __init__(self) -> None:
        self.most, self.times = 0, []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self.counting and storage.data_ptr() not in self.weights:
            self.seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen, self.counting, self.start = {}, True, time.perf_counter()

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.counting, self.most = False, max(self.most, sum(self.seen.values()))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.device.type != "cpu":
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter() - self.start)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.hooks.__exit__()


def measure(args: argparse.Namespace, choice: Any, compile: bool) -> tuple[float, float]:
    """Return (MB kept, milliseconds a step)."""
    meter = Meter()
    trainer = Trainer(
        accelerator=args.accelerator, devices=1, max_steps=args.steps + 3, activation_checkpointing=choice, compile=compile, callbacks=meter,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=0,
    )  # fmt: skip
    trainer.fit(Stack(args.layers, args.width), [torch.randn(args.batch, args.length, args.width)] * (args.steps + 3))
    return meter.most / 2**20, 1000 * statistics.median(meter.times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 128), ("batch", 8), ("length", 64), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--accelerator", default="auto")
    args = parser.parse_args()
    rows = [("nothing", None), ("every second layer", "layers.*[02468]"), ("every layer", "layers.*")]
    print(f"{'checkpointed':<20} {'compiled':<9} {'kept, MB':>9} {'step, ms':>9}")
    for compile in (False, True) if args.compile else (False,):
        for name, choice in rows:
            kept, milliseconds = measure(args, choice, compile)
            print(f"{name:<20} {'yes' if compile else 'no':<9} {kept:>9.1f} {milliseconds:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
