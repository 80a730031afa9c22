"""dp on GPUs: torch's replicas, also two of them on one GPU, train as one device does."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.modules import Net, loader, quiet
from trainer import DataParallelStrategy


class Twice(DataParallelStrategy):
    """Two replicas on each device, so that one GPU shows how replicas are made, run and joined."""

    def device(self, devices, local_rank):
        first = super().device(devices, local_rank)
        self._devices = [device for device in self._devices for _ in range(2)]
        return first


class Placed(Net):
    def training_step(self, batch, batch_idx):
        on = next(self.parameters()).device
        assert self.device == on == batch.device and torch.is_grad_enabled()
        self.log("loss", loss := self.loss(batch))
        return {"loss": loss, "where": (on, self.layers(batch[:, :4]).dtype)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.where = outputs["where"]


def fit(module, **settings):
    trainer = quiet(accelerator="gpu", max_epochs=1, **settings)
    trainer.fit(module, loader(Net.rows(48), 16))
    return trainer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs cuda")
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "16-mixed"])
def test_gpus(precision):
    one, many, count = Placed(), Placed(), 2 * torch.cuda.device_count()
    first = fit(one, strategy="single_device", devices=1, precision=precision)
    second = fit(many, strategy=Twice(), devices=-1, precision=precision)
    dtype = {"64-true": torch.float64, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]
    parts = len(torch.empty(16).chunk(count))
    assert many.where == [(torch.device("cuda", i // 2), dtype) for i in range(parts)]
    near = 1e-6 if precision == "64-true" else 0.1
    assert abs(first.callback_metrics["loss"] - second.callback_metrics["loss"]) < near
    for a, b in zip(many.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=near)
