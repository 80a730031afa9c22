"""Modules with a stack of layers, fits of them under the model-parallel strategies, and comparing weights."""

from __future__ import annotations

import torch

from tests.helpers.modules import Net, loader, quiet
from trainer import ModelParallelDDPStrategy, TrainModule

__all__ = ["ThreeFour", "Wide", "assert_same", "fit", "rows", "stacked", "weights"]


class Wide(Net):
    """`Net` in 64-bit that keeps its losses, validates and predicts."""

    def __init__(self):
        super().__init__()
        self.double()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[:, :4])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


class Factor(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(float(value), dtype=torch.float64))

    def forward(self, x):
        return x * self.w


class ThreeFour(TrainModule):
    """Two stages x * 4 * 3: the gradient of the first weight is 3, that of the second 4."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(Factor(4), Factor(3))

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_before_optimizer_step(self, optimizer):
        self.before = [p.grad.item() for p in self.parameters()]
        self.total = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item()


def stacked(each=2, micro=3, **more):
    return ModelParallelDDPStrategy(devices_per_replica=each, stack="layers", micro_batches=micro, **more)


def rows(count):
    return Net.rows(count, torch.float64)


def weights(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same(found, expected, atol=1e-12):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


def fit(shape, batch_size, kind=Wide, **settings):
    module = kind()
    trainer = quiet(max_steps=20, accumulate_grad_batches=shape[1], gradient_clip_val=0.5, **settings)
    trainer.fit(module, loader(rows(shape[0]), batch_size))
    assert trainer.global_step == 20
    return module
