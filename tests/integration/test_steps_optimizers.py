"""Optimizers and schedulers in a fit: forms, intervals, closures, and the methods of a step that a module may take over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.helpers.modules import Net, Scalar, loader, quiet
from trainer import MisconfigurationException


class Scheduled(Scalar):
    """Takes its configuration from outside; remembers the learning rate after every batch and epoch."""

    def __init__(self, configure: Callable[[torch.optim.Optimizer], Any]) -> None:
        super().__init__()
        self.configure, self.by_batch, self.by_epoch = configure, [], []

    def configure_optimizers(self) -> Any:
        return self.configure(torch.optim.SGD(self.parameters(), lr=1.0))

    def lr(self) -> float:
        return self.optimizers().param_groups[0]["lr"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.by_batch.append(self.lr())

    def on_train_epoch_start(self) -> None:
        self.by_epoch.append(self.lr())


def halving(optimizer: Any, **config: Any) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), **config}}


def rates(configure: Any, **settings: Any) -> tuple[list[float], list[float]]:
    module = Scheduled(configure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(max_epochs=3, **settings).fit(module, loader([1, 1, 1, 1]))
    return module.by_batch, module.by_epoch


def test_a_scheduler_goes_by_epochs_unless_told_otherwise() -> None:
    for configure in (halving, lambda o: ([o], [StepLR(o, 1, 0.5)]), lambda o: {"optimizer": o, "lr_scheduler": StepLR(o, 1, 0.5)}):
        assert rates(configure) == ([1.0] * 4 + [0.5] * 4 + [0.25] * 4, [1.0, 0.5, 0.25])


def test_a_scheduler_by_steps_counts_optimizer_steps() -> None:
    assert rates(lambda o: halving(o, interval="step"))[1] == [1.0, 2**-4, 2**-8]
    assert rates(lambda o: halving(o, interval="step"), accumulate_grad_batches=3)[0] == [2.0**-n for n in (0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6)]


def test_frequency_counts_the_units_of_the_interval() -> None:
    assert rates(lambda o: halving(o, frequency=2))[1] == [1.0, 1.0, 0.5]
    assert rates(lambda o: halving(o, interval="step", frequency=3))[1] == [1.0, 0.5, 0.25]


def test_without_an_optimizer_nothing_changes_and_it_is_said() -> None:
    module = Scheduled(lambda o: None)
    module.on_train_batch_end = module.on_train_epoch_start = lambda *a: None
    with pytest.warns(UserWarning, match="configure_optimizers returned None: the weights will not change"):
        quiet(max_epochs=1).fit(module, loader([1, 1]))
    assert module.w.item() == 0.0


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_reduce_on_plateau_reads_the_fresh_number(interval: str) -> None:
    class Plateau(Scheduled):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("flat", 1.0, on_step=interval == "step", on_epoch=interval == "epoch")
            return super().training_step(batch, batch_idx)

    def configure(o: Any) -> Any:
        scheduler = ReduceLROnPlateau(o, factor=0.5, patience=0)
        return {"optimizer": o, "lr_scheduler": {"scheduler": scheduler, "monitor": "flat", "interval": interval}}

    module = Plateau(configure)
    quiet(max_epochs=3).fit(module, loader([1, 1]))
    assert module.by_epoch == ([1.0, 1.0, 0.5] if interval == "epoch" else [1.0, 0.5, 0.125])


def test_a_plateau_monitor_that_nobody_logs_is_an_error_before_the_first_update() -> None:
    def configure(o: Any) -> Any:
        return {"optimizer": o, "lr_scheduler": {"scheduler": ReduceLROnPlateau(o), "monitor": "los"}}

    class Logging(Scheduled):
        on_train_batch_end = Scalar.on_train_batch_end

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("loss", 1.0)
            return super().training_step(batch, batch_idx)

    module = Logging(configure)
    with pytest.raises(MisconfigurationException, match=r"ReduceLROnPlateau\(monitor='los'\).*Did you mean 'loss'\?"):
        quiet(max_epochs=1).fit(module, loader([1]))
    assert module.w.item() == 0.0


@pytest.mark.parametrize("strict", [True, False])
def test_a_number_missing_at_the_time_is_an_error_or_a_warning(strict: bool) -> None:
    class Late(Scheduled):
        def on_validation_epoch_end(self) -> None: ...

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure(o: Any) -> Any:
        return {"optimizer": o, "lr_scheduler": {"scheduler": ReduceLROnPlateau(o), "monitor": "val", "strict": strict}}

    trainer, message = quiet(max_epochs=1), "watches 'val', which was not logged"
    if strict:
        with pytest.raises(MisconfigurationException, match=message):
            trainer.fit(Late(configure), loader([1]), loader([1]))
    else:
        with pytest.warns(UserWarning, match=message):
            trainer.fit(Late(configure), loader([1]), loader([1]))


def test_several_optimizers_need_manual_optimization() -> None:
    module = Scheduled(lambda o: [o, torch.optim.SGD(module.parameters(), lr=1.0)])
    with pytest.raises(MisconfigurationException, match=r"returned 2 optimizers.*automatic_optimization = False"):
        quiet(max_epochs=1).fit(module, loader([1]))


# -- closures ----------------------------------------------------------------------------------------------------------------


class Quasi(Net):
    search: str | None = None

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn=self.search)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lbfgs_equals_the_hand_written_loop(search: str | None, accumulate: int) -> None:
    rows, ours, hand = Net.rows(18), Quasi(), Quasi()
    ours.search = hand.search = search
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(ours, loader(rows, 4))
    optimizer, first, epoch = hand.configure_optimizers(), [], []
    for number in range(2):
        for joined in rows.split(4 * accumulate):
            first.append(hand.loss(joined).item())
            epoch += [first[-1]] * len(joined) * number

            def closure(joined: torch.Tensor = joined) -> torch.Tensor:
                optimizer.zero_grad()
                loss = hand.loss(joined)
                loss.backward()
                return loss

            optimizer.step(closure)
    for a, b in zip(hand.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert trainer.callback_metrics["loss_step"].item() == pytest.approx(first[-1], abs=1e-5)  # not of the closure's later calls
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(sum(epoch) / len(epoch), abs=1e-5)


def test_lbfgs_survives_a_skipped_window_and_refuses_16_mixed() -> None:
    class Skips(Quasi):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    rows, ours, hand = Net.rows(8), Skips(), Quasi()
    quiet(max_epochs=1).fit(ours, loader(rows, 4))
    quiet(max_epochs=1).fit(hand, loader(rows[4:], 4))
    for a, b in zip(hand.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(MisconfigurationException, match="16-mixed cannot scale; use bf16-mixed"):
        quiet(max_epochs=1, precision="16-mixed").fit(Quasi(), loader(rows, 4))


class WarmUp(Scheduled):
    """The warm-up of the learning rate as Lightning documents it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 3:
            scale = min(1.0, float(self.trainer.global_step + 1) / 4)
            for group in optimizer.param_groups:
                group["lr"] = scale


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_an_overridden_optimizer_step_warms_up(precision: str) -> None:
    module = WarmUp(lambda o: o)
    quiet(max_epochs=2, precision=precision).fit(module, loader([1] * 3))
    assert module.by_batch == [0.25, 0.5, 0.75, 0.75, 0.75, 0.75]
    assert module.w.item() == -(1 + 0.25 + 0.5 + 3 * 0.75)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("evaluate", [False, True])
def test_a_skipped_closure_or_step_leaves_weights_and_schedule(precision: str, evaluate: bool) -> None:
    class EverySecond(Scheduled):
        pairs: list[str] = []

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            elif evaluate:
                optimizer_closure()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.pairs.append(f"start {batch_idx}")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.pairs.append(f"end {batch_idx} {batch.item()}")

    module, trainer = EverySecond(lambda o: halving(o, interval="step")), quiet(max_epochs=1, precision=precision)
    module.pairs = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(module, loader([1, 2, 3, 4]))
    assert (module.w.item(), module.by_batch) == (-(2 + 0.5 * 4), [1.0, 0.5, 0.5, 0.25])
    assert module.pairs == [x for i in range(4) for x in (f"start {i}", f"end {i} {i + 1.0}")]


def test_batch_hooks_come_in_pairs_in_a_window_whose_closure_is_skipped() -> None:
    class Never(Scalar):
        pairs: list[str]

        def optimizer_step(self, *args: Any) -> None: ...

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.pairs.append(f"start {batch_idx}")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.pairs.append(f"end {batch_idx}")

    module = Never()
    module.pairs = []
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader([1, 2, 3]))
    assert module.pairs == ["start 0", "end 0", "start 1", "end 1", "start 2", "end 2"]
