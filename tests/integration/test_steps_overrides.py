"""Parts of a step that a module takes over, and manual optimization."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.modules import Net, Scalar, loader, quiet
from trainer import MisconfigurationException, TrainModule


def test_an_overridden_backward_gets_the_weighted_loss() -> None:
    class Own(Scalar):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.log("loss_seen", loss)
            (loss * 2).backward()

    module, trainer = Own(), quiet(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, loader([2, 4]))
    assert module.w.item() == -6.0
    assert trainer.callback_metrics["loss_seen"].item() == 0.0


def test_an_overridden_zero_grad_decides_what_is_dropped() -> None:
    class Keeps(Scalar):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self.calls = [*getattr(self, "calls", []), (epoch, batch_idx, type(optimizer).__name__)]

    module = Keeps()
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(module, loader([1, 1, 1]))
    assert module.calls == [(0, 0, "SGD"), (0, 2, "SGD"), (1, 0, "SGD"), (1, 2, "SGD")]
    assert module.w.item() == -(1 + 2 + 3 + 4)


def test_an_overridden_clipping_gets_the_settings_and_may_log() -> None:
    class Own(Scalar):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            self.got = (gradient_clip_val, gradient_clip_algorithm)
            self.log("norm", self.w.grad.norm())
            self.clip_gradients(optimizer, gradient_clip_val * 2, gradient_clip_algorithm)

    module, trainer = Own(), quiet(max_epochs=1, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    trainer.fit(module, loader([9]))
    assert (module.got, module.w.item(), trainer.callback_metrics["norm"].item()) == ((0.5, "value"), -1.0, 9.0)


@pytest.mark.parametrize(("algorithm", "expected"), [("norm", [-0.6, 0.8]), ("value", [-1.0, 1.0])])
def test_gradient_clipping_by_norm_and_by_value(algorithm: str, expected: list[float]) -> None:
    class Two(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return (self.w * batch).sum()

    module = Two()
    quiet(max_epochs=1, gradient_clip_val=1.0, gradient_clip_algorithm=algorithm).fit(module, loader(torch.tensor([[3.0, -4.0]])))
    torch.testing.assert_close(module.w.detach(), torch.tensor(expected))


def test_an_overridden_scheduler_step_gets_scheduler_and_metric() -> None:
    class Own(Scalar):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            plain = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [plain, {"scheduler": plateau, "monitor": "x"}]

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("x", 5.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls = [*getattr(self, "calls", []), (type(scheduler).__name__, None if metric is None else float(metric))]

    module = Own()
    quiet(max_epochs=2).fit(module, loader([1]))
    assert module.calls == [("StepLR", None), ("ReduceLROnPlateau", 5.0)] * 2


def test_a_step_that_takes_only_the_batch_and_one_that_takes_anything() -> None:
    class One(Scalar):
        def training_step(self, batch: torch.Tensor) -> Any:
            return (self.w * batch).mean()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val", batch.mean())

    class Any_(Scalar):
        def training_step(self, *args: Any) -> Any:
            assert len(args) == 2
            return super().training_step(*args)

    for module in (One(), Any_()):
        trainer = quiet(max_epochs=1)
        trainer.fit(module, loader([1, 2]), loader([4, 6]) if isinstance(module, One) else None)
        assert module.w.item() == -3.0
    assert One().training_step(torch.ones(1)).item() == 0.0


# -- manual optimization -------------------------------------------------------------------------------------------------------


class Gan(TrainModule):
    """Two weights with an optimizer each, stepped in every training step."""

    def __init__(self, clip: float | None = None, together: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))
        self.clip, self.together, self.calls = clip, together, 0

    def configure_optimizers(self) -> Any:
        pairs = [(o := torch.optim.SGD([p], lr=1.0), torch.optim.lr_scheduler.StepLR(o, 1, 0.5)) for p in (self.a, self.b)]
        return [o for o, _ in pairs], [{"scheduler": s, "interval": "step"} for _, s in pairs]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.calls += 1
        losses = (self.a * batch).mean(), (self.b * batch * 10).mean()
        optimizers = self.optimizers()
        if self.together:
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                self.manual_backward(loss)
            for optimizer in optimizers:
                if self.clip:
                    self.clip_gradients(optimizer, self.clip)
                optimizer.step()
            return
        for optimizer, loss in zip(optimizers, losses, strict=True):
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.manual_backward(loss)
                if self.clip:
                    self.clip_gradients(optimizer, self.clip)
                optimizer.step()


def test_c34_manual_steps_are_counted_by_training_step() -> None:
    module, trainer = Gan(), quiet(max_steps=10)
    trainer.fit(module, loader([1.0] * 4))
    assert (module.calls, trainer.global_step) == (10, 10)
    assert (module.a.item(), module.b.item()) == (-10.0, -100.0)  # and schedulers move only when the module steps them


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_manual_clipping_sees_true_gradients(precision: str, together: bool) -> None:
    module, norms = Gan(clip=0.5, together=together), []
    module.on_before_optimizer_step = lambda optimizer: norms.append(optimizer.param_groups[0]["params"][0].grad.item())
    quiet(max_steps=3, precision=precision).fit(module, loader([1.0] * 4))
    assert (module.a.item(), module.b.item()) == pytest.approx((-1.5, -1.5), abs=1e-5)
    assert norms == pytest.approx([0.5] * 6, abs=1e-5)


def test_manual_optimization_in_16_mixed_skips_only_what_overflowed() -> None:
    class Overflow(Gan):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for number, optimizer in enumerate(self.optimizers()):
                optimizer.zero_grad()
                factor = float("inf") if batch_idx == 0 and number == 0 else 1.0
                self.manual_backward((self.a + self.b) * batch.mean() * factor)
                optimizer.step()

    module, trainer = Overflow(), quiet(max_steps=2, precision="16-mixed")
    trainer.fit(module, loader([1.0, 1.0]))
    assert (module.a.item(), module.b.item()) == (-1.0, -2.0)
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**15


def test_manual_schedulers_gradient_toggling_and_single_objects() -> None:
    class One(Scalar):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            loss = (self.w * batch).mean()

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            assert optimizer.step(closure) is loss
            self.lr_schedulers().step()
            return loss

    module = One()
    quiet(max_epochs=1).fit(module, loader([1, 1, 1]))
    assert module.w.item() == -(1 + 0.5 + 0.25)


def test_toggling_leaves_requires_grad_as_it_was() -> None:
    class Frozen(Gan):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.b.requires_grad_(False)
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            self.inside = (self.a.requires_grad, self.b.requires_grad)
            self.untoggle_optimizer(first)
            with self.toggled_optimizer(second, toggle_model=False):
                self.untouched = (self.a.requires_grad, self.b.requires_grad)
            self.after = (self.a.requires_grad, self.b.requires_grad)

    module = Frozen()
    quiet(max_steps=1).fit(module, loader([1.0]))
    assert (module.inside, module.untouched, module.after) == ((True, False),) * 3


def test_misuse_of_manual_and_automatic_optimization_is_named() -> None:
    class Both(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = (self.w * batch).mean()
            self.manual_backward(loss)
            return loss

    with pytest.raises(MisconfigurationException, match=r"manual_backward belongs to manual optimization.*automatic_optimization = False"):
        quiet(max_epochs=1).fit(Both(), loader([1]))
    with pytest.raises(MisconfigurationException, match="step every n-th batch yourself"):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(Gan(), loader([1]))
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        Gan().optimizers()


def test_trained_weights_keep_their_identity_and_gradients_flow_again_after_validation() -> None:
    class Validating(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()

    module = Validating()
    before = list(map(id, module.parameters()))
    quiet(max_epochs=2, val_check_interval=1).fit(module, loader(Net.rows(8), 4), loader(Net.rows(4), 4))
    assert list(map(id, module.parameters())) == before
    assert torch.is_grad_enabled()
