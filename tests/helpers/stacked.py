"""A module with a stack of layers, fits of it under the model-parallel strategies, and comparing weights."""

from __future__ import annotations

import torch

from tests.helpers.modules import Net, loader, quiet
from trainer import ModelParallelDDPStrategy

__all__ = ["Wide", "assert_same", "fit", "rows", "stacked", "weights"]


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
