"""The optimizer step as the unit: windows of batches, their weights, their counts and what skips them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from callbacks import GradientAccumulationScheduler, GradientSync
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.reference import train_by_hand
from trainer import MisconfigurationException, TrainModule


class Trace(Scalar):
    """Remembers w after every optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step > len(self.seen):
            self.seen.append(self.w.item())


def test_c27_a_short_last_window_is_divided_by_its_own_length() -> None:
    module = Trace()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader([1, 1, 1]))
    assert module.seen == [-1.0, -2.0]


@pytest.mark.parametrize(("batches", "accumulate", "epochs", "steps"), [(5, 2, 3, 9), (2, 4, 1, 1), (6, 2, 2, 6), (7, 1, 1, 7)])
def test_c28_steps_of_an_epoch_and_the_estimate_of_them(batches: int, accumulate: int, epochs: int, steps: int) -> None:
    class Estimating(Scalar):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module, trainer = Estimating(), quiet(max_epochs=epochs, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(range(batches)))
    assert (trainer.global_step, module.estimate) == (steps, steps)


def test_c28_max_steps_bounds_the_estimate_and_unknown_lengths_make_it_infinite() -> None:
    class Estimating(Scalar):
        def on_train_start(self) -> None:
            self.estimate = self.trainer.estimated_stepping_batches

    def estimate(data: Any, **settings: Any) -> float:
        module = Estimating()
        quiet(**settings).fit(module, data)
        return module.estimate

    assert estimate(loader(range(8)), max_steps=3) == 3
    assert estimate(loader(range(8)), max_steps=3, max_epochs=9) == 3
    assert estimate((torch.ones(1) for _ in range(4)), max_epochs=1) == float("inf")
    assert estimate((torch.ones(1) for _ in range(4)), max_epochs=1, max_steps=2) == 2


@pytest.mark.parametrize("as_tensor", [False, True])
def test_c29_counts_make_the_mean_over_samples(as_tensor: bool) -> None:
    class Counting(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            count = torch.tensor(len(batch)) if as_tensor else len(batch)
            return {"loss": (self.w * batch).mean(), "count": count}

    module = Counting()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, [torch.tensor([1.0]), torch.tensor([5.0, 5.0, 5.0])])
    assert module.w.item() == -4.0
    naive = Scalar()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(naive, [torch.tensor([1.0]), torch.tensor([5.0, 5.0, 5.0])])
    assert naive.w.item() == -3.0


def test_c29_a_short_last_batch_of_a_loader_weighs_its_samples_without_a_count() -> None:
    module = Scalar()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader([1, 1, 1, 5], batch_size=3))
    assert module.w.item() == -2.0


def test_counts_of_zero_give_no_gradient_and_never_nan() -> None:
    class Padding(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            kept = batch[batch >= 0]
            return {"loss": (self.w * kept).sum() / max(len(kept), 1), "count": len(kept)}

    module = Padding()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, [torch.tensor(v) for v in ([-1.0], [-1.0], [2.0, 4.0], [-1.0])])
    assert module.w.item() == -3.0


def test_a_count_that_is_given_only_sometimes_is_refused() -> None:
    class Mixed(Scalar):
        first = 0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = (self.w * batch).mean()
            return {"loss": loss, "count": 1} if batch_idx == self.first else loss

    for first in (0, 1):
        module = Mixed()
        module.first = first
        with pytest.raises(MisconfigurationException, match=r"'count' for some batches of a step and not for others"):
            quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader([1, 1]))
        assert module.w.item() == 0.0


class Skipping(Trace):
    """Returns None for negative samples."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None if batch.max() < 0 else (self.w * batch).mean()


@pytest.mark.parametrize(
    ("samples", "batch_size", "seen"),
    [
        ([2, -1, -1, 4], 1, [-2.0, -6.0]),
        ([-1, -1, 4, 6], 1, [0.0, -5.0]),
        ([-1, -1, -1, 6], 3, [-6.0]),  # the skipped batch holds three samples of the window's four
        ([3, 3, 3, -1], 3, [-3.0]),
    ],
)
def test_a_skipped_batch_leaves_the_mean_over_the_others(samples: list[float], batch_size: int, seen: list[float]) -> None:
    module = Skipping()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader(samples, batch_size))
    assert module.seen == pytest.approx(seen)


def test_a_step_of_skipped_batches_changes_nothing() -> None:
    class Momentum(Skipping):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5, weight_decay=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.lr = self.optimizers().param_groups[0]["lr"]

    module, trainer = Momentum(), quiet(max_epochs=1)
    trainer.fit(module, loader([1, -1, -1]))
    assert (module.seen, module.lr, trainer.global_step) == ([-1.0, -1.0, -1.0], 0.5, 3)


def test_accumulation_with_clipping_and_momentum_equals_the_hand_written_loop() -> None:
    rows = Net.rows(22)
    hand = train_by_hand(Net(), rows.split(4), steps=9, accumulate=2, clip=0.3)
    ours = Net()
    quiet(max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.3).fit(ours, loader(rows, 4))
    for a, b in zip(hand.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("callback", [GradientSync({1: 2, 3: 4}), GradientAccumulationScheduler({1: 2, 3: 4})])
def test_gradient_sync_schedules_accumulation_by_epochs(callback: Any) -> None:
    class Watching(Trace):
        def on_train_start(self) -> None:
            self.estimate = self.trainer.estimated_stepping_batches

        def on_train_epoch_end(self) -> None:
            self.per_epoch = [*getattr(self, "per_epoch", []), self.global_step]

    module, trainer = Watching(), quiet(max_epochs=4, callbacks=[callback], enable_checkpointing=False)
    trainer.fit(module, loader([1] * 6))
    assert module.per_epoch == [6, 9, 12, 14]
    assert (module.estimate, module.w.item()) == (14, -14.0)


def test_gradient_sync_takes_one_number() -> None:
    module, trainer = Trace(), quiet(max_epochs=1, callbacks=[GradientSync(3)], enable_checkpointing=False)
    trainer.fit(module, loader([1, 2, 3, 8]))
    assert module.seen == [-2.0, -10.0]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(0.5, [1, 2]), (1, [1, 2]), (2, [2]), (1.0, [2])],
)
def test_validation_intervals_follow_the_scheduled_accumulation(interval: float, expected: list[int]) -> None:
    class Validating(Trace):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def on_validation_start(self) -> None:
            self.at = [*getattr(self, "at", []), self.global_step]

    module = Validating()
    trainer = quiet(max_epochs=1, callbacks=[GradientSync(4)], enable_checkpointing=False, val_check_interval=interval)
    trainer.fit(module, loader([1] * 8), loader([1]))
    assert module.at == expected


def test_gradient_sync_refuses_what_cannot_be() -> None:
    for wrong, message in (
        (0, "must be a whole number >= 1"), ({0: 0}, "must be a whole number >= 1"), ({-1: 2}, "whole numbers from 0 on"),
        ({"a": 2}, "whole numbers from 0 on"),
    ):  # fmt: skip
        with pytest.raises(MisconfigurationException, match=message):
            GradientSync(wrong)
    with pytest.raises(MisconfigurationException, match="got nothing"):
        GradientAccumulationScheduler({})
    with pytest.raises(MisconfigurationException, match=r"'single_device' sends no gradients; use 'ddp'"):
        quiet(max_epochs=1, callbacks=[GradientSync(comm_hook=print)], enable_checkpointing=False).fit(Scalar(), loader([1]))


def test_no_gradient_crosses_into_the_next_window() -> None:
    class Grads(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))
            self.grads: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return (self.w * batch).mean()

        def on_after_backward(self) -> None:
            self.grads.append(self.w.grad.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Grads()
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(module, loader([2, 4, 8]))
    assert module.grads == [1.0, 3.0, 8.0, 1.0, 3.0, 8.0]
