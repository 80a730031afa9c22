"""An outside package of plug-ins, as small as can be: each kind once, and all of them do something that can be seen."""

import gzip
import os
from contextlib import contextmanager

import torch

from callbacks import Callback, Logger
from trainer import Accelerator, Strategy


class AverageStrategy(Strategy):
    """A process a device; when the last backward of a step is over, every gradient is averaged on its own."""

    name = "toy_average"
    distributed = True

    def setup(self, module, device, dist):
        super().setup(module, device, dist)
        dist.broadcast_tensors([*module.parameters(), *module.buffers()])

    @contextmanager
    def sync_when(self, last):
        yield
        if last:
            self.sync_gradients()

    def sync_gradients(self):
        for parameter in self.module.parameters():
            self.dist.sum(parameter.grad).div_(self.dist.world.world_size)


class ToyAccelerator(Accelerator):
    """Three "devices", all of which are the CPU; notes what a run does with its own."""

    name, device_type = "toy_cpu", "cpu"
    own = None

    def is_available(self):
        return True

    def auto_device_count(self):
        return 3

    def setup_device(self, device):
        self.own = device

    def teardown(self):
        self.own = None

    def get_device_stats(self, device):
        return {"toys": float(self.own is device)}


class Lines(Logger):
    """A line of text a publication."""

    def log_metrics(self, metrics, step=None):
        with open("lines.txt", "a") as file:
            file.write(f"{step} {sorted(metrics)}\n")


class GzipIO:
    """Compressed checkpoints."""

    def save_checkpoint(self, table, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with gzip.open(path, "wb") as file:
            torch.save(table, file)

    def load_checkpoint(self, path, weights_only):
        with gzip.open(path, "rb") as file:
            return torch.load(file, weights_only=weights_only)


class Counter(Callback):
    """Counts batches, and asks the accelerator how it does."""

    batches = 0
    toys = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches += 1
        self.toys = trainer.accelerator.get_device_stats(trainer.strategy.root_device)["toys"]


def counters():
    return [Counter(), Counter()]
