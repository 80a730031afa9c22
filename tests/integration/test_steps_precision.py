"""Each precision against a loop written by hand, and the loss scale: overflow, clipping, schedules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.helpers.modules import Net, Scalar, loader, quiet
from trainer import MixedPrecision, TrainModule


def by_hand(precision: str, rows: torch.Tensor, clip: float, epochs: int = 3) -> TrainModule:
    """Two batches a step with clipping, in the way torch's own documentation shows for each precision."""
    module = Net()
    true = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision)
    if true is not None:
        module.to(true)
        rows = rows.to(true)
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    optimizer = module.configure_optimizers()
    batches = rows.split(4)
    for _ in range(epochs):
        for first in range(0, len(batches), 2):
            optimizer.zero_grad()
            window = batches[first : first + 2]
            for batch in window:
                with torch.autocast("cpu", dtype=mixed, enabled=mixed is not None):
                    loss = module.loss(batch)
                scaler.scale(loss / len(window)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return module


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
def test_every_precision_equals_the_hand_written_loop(precision: str) -> None:
    rows, clip = Net.rows(24), 0.2
    hand, ours = by_hand(precision, rows, clip), Net()
    trainer = quiet(max_epochs=3, precision=precision, accumulate_grad_batches=2, gradient_clip_val=clip)
    trainer.fit(ours, loader(rows, 4))
    assert trainer.precision == precision
    for a, b in zip(hand.parameters(), ours.parameters(), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7 if a.dtype.itemsize >= 4 else 1e-3)


@pytest.mark.parametrize(
    ("precision", "dtype", "made", "output"),
    [
        ("64-true", torch.float64, torch.float64, torch.float64),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.float32, torch.float32, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float32, torch.float16),
    ],
)
def test_number_formats_in_every_step(precision: str, dtype: Any, made: Any, output: Any) -> None:
    class Formats(Net):
        def look(self, batch: Any) -> torch.Tensor:
            rows, index = batch
            self.seen.append((rows.dtype, index.dtype, torch.ones(1).dtype, self.layers(rows[:, :4]).dtype))
            return self.layers(rows[:, :4]).float().mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.look(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.look(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.look(batch)

    module, data = Formats(), [(Net.rows(2), torch.tensor([0, 1]))]
    module.seen = []
    trainer = quiet(max_epochs=1, precision=precision)
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.predict(module, data)
    assert module.seen == [(dtype, torch.int64, made, output)] * 4
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "16-mixed", "64-true"])
def test_counts_correct_gradients_of_every_format(precision: str) -> None:
    class Counting(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return {"loss": (self.w * batch).mean(), "count": len(batch)}

    module = Counting()
    quiet(max_epochs=1, precision=precision, accumulate_grad_batches=2).fit(module, [torch.tensor([1.0]), torch.tensor([5.0] * 3)])
    assert module.w.item() == -4.0


class Scheduled(Scalar):
    """Halves the learning rate after each step that was taken; the loss of chosen batches is infinite."""

    bad: tuple[int, ...] = ()

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.lr, self.rates = lr, []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.w * batch).mean() * (float("inf") if batch_idx in self.bad else 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def overflow(base: type[Scheduled], bad: tuple[int, ...], samples: int) -> tuple[Any, float, int]:
    module = base()
    module.bad = bad
    trainer = quiet(max_epochs=1, precision="16-mixed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(module, loader([1] * samples))
    return module, trainer.precision_plugin.scaler.get_scale(), trainer.global_step


class ByClosure(Scheduled):
    def optimizer_step(self, *args: Any) -> None:
        super().optimizer_step(*args)


@pytest.mark.parametrize("base", [Scheduled, ByClosure])
def test_c31_a_skipped_step_moves_nothing_but_the_scale(base: type[Scheduled]) -> None:
    module, scale, _ = overflow(base, (0,), 1)
    assert (module.rates, scale, module.w.item()) == ([1.0], 2.0**15, 0.0)
    module, scale, steps = overflow(base, (0, 2), 4)
    assert (module.rates, scale, module.w.item(), steps) == ([1.0, 0.5, 0.5, 0.25], 2.0**14, -1.5, 4)


def test_c32_clipping_and_logging_see_unscaled_gradients() -> None:
    class Four(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return (self.w * 3.0).sum() * batch.mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))

    module = Four()
    plugin = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = quiet(max_epochs=1, plugins=plugin, gradient_clip_val=1.0)
    trainer.fit(module, loader([1]))
    assert module.w.norm().item() == pytest.approx(1.0, abs=1e-6)
    assert trainer.callback_metrics["norm"].item() == 6.0


def test_init_module_makes_layers_in_the_final_format() -> None:
    trainer = quiet(max_epochs=1, precision="64-true")
    with trainer.init_module():
        assert torch.nn.Linear(1, 1).weight.dtype == torch.float64
    assert torch.nn.Linear(1, 1).weight.dtype == torch.float32
