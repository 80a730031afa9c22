"""What only a GPU can show: `make test-gpu`. Each result is compared with a loop by hand on the same device."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback, TensorBoardLogger
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs cuda")]


def by_hand(dtype=torch.float64, **more):
    module = Net().to("cuda", dtype)
    batches = [batch.to("cuda", dtype) for batch in loader(Net.rows(22), 4)]
    return train_by_hand(module, batches, 12, **more)


def fit(module, **settings):
    trainer = quiet(**{"accelerator": "gpu", "devices": 1, "max_steps": 12, "precision": "64-true", **settings})
    trainer.fit(module, loader(Net.rows(22), 4))
    return trainer


def on_cpu(module):
    return {name: tensor.cpu() for name, tensor in weights(module).items()}


@pytest.mark.parametrize("strategy", ["single_device", "dp", "ddp", "fsdp", "model_parallel"])
def test_one_device_is_the_loop_by_hand(strategy):
    module = Net()
    if strategy == "model_parallel":
        module.cuda()  # where layers lie is the user's business there
    fit(module, strategy=strategy, accumulate_grad_batches=4, gradient_clip_val=0.3)
    assert_same(on_cpu(module), on_cpu(by_hand(accumulate=4, clip=0.3)))
    assert next(module.parameters()).device.type == ("cuda" if strategy == "model_parallel" else "cpu")


def nccl_rank(strategy):
    """A world of one whose collectives are really made, by nccl: a second rank would need a second GPU."""
    from trainer.dist import Dist

    Dist.alone = False
    module = Net()
    trainer = fit(module, strategy=strategy, accumulate_grad_batches=4, gradient_clip_val=0.3)
    return on_cpu(module), trainer.global_step


def test_ddp_over_nccl():
    ((found, steps),) = run_ranks(nccl_rank, 1, strategy="ddp")
    assert steps == 12
    assert_same(found, on_cpu(by_hand(accumulate=4, clip=0.3)))


def test_16_mixed_is_the_loop_with_a_scaler():
    expected = Net().cuda()
    optimizer, scaler = expected.configure_optimizers(), torch.amp.GradScaler("cuda")
    batches = [batch.cuda() for batch in loader(Net.rows(22), 4)]
    for step in range(12):
        with torch.autocast("cuda", torch.float16):
            loss = expected.loss(batches[step % 6])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    module = Net()
    trainer = fit(module, precision="16-mixed")
    assert_same(on_cpu(module), on_cpu(expected))
    assert trainer.precision_plugin.scaler.get_scale() == scaler.get_scale()


class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("loss", loss, prog_bar=True)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss


class NoRead(Callback):
    """Makes every read of the device an error between the steps 3 and 9."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if 3 <= trainer.global_step < 9 else "default")

    def on_fit_end(self, trainer, module):
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer, module, exception):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}])
def test_nothing_reads_the_device_between_publish_points(settings, tmp_path):
    data = DataLoader(TensorDataset(Net.rows(96)), batch_size=4, shuffle=True, pin_memory=True)
    trainer = quiet(
        accelerator="gpu", devices=1, max_steps=12, log_every_n_steps=12, callbacks=[NoRead()], enable_progress_bar=True,
        logger=TensorBoardLogger(tmp_path), **settings,
    )  # fmt: skip
    trainer.fit(Logs(), data)
    assert trainer.global_step == 12 and torch.isfinite(trainer.callback_metrics["loss"])


class Heavy(Net):
    """Works long enough for a copy to run beside it."""

    def training_step(self, batch, batch_idx):
        a = torch.ones(2048, 2048, device=self.device)
        for _ in range(4):
            a = a @ a * 1e-4
        return self.loss(batch[0][:, :5]) + 0.0 * a.sum()


def test_the_next_batch_is_copied_from_pinned_memory_on_a_stream_of_its_own(tmp_path):
    wide = torch.randn(12 * 64, 20_000)
    data = DataLoader(TensorDataset(wide), batch_size=64, pin_memory=True)
    trainer = quiet(accelerator="gpu", devices=1, max_steps=12)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.fit(Heavy(), data)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "stream" in e.get("args", {})]
    copies = [e for e in events if "HtoD" in e["name"] and e["args"].get("bytes", 0) > 1_000_000]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len(copies) == 12 and all("Pinned" in e["name"] for e in copies)
    assert not {e["args"]["stream"] for e in copies} & {e["args"]["stream"] for e in kernels}
    beside = [c for c in copies if any(k["ts"] < c["ts"] + c["dur"] and c["ts"] < k["ts"] + k["dur"] for k in kernels)]
    assert len(beside) >= 6, f"{len(beside)} of 12 copies ran beside a kernel"
