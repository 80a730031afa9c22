"""When training starts, validates and ends: limits, intervals, wishes to stop, and what is put back afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from callbacks import CSVLogger, ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from trainer import MisconfigurationException


class Watching(Scalar):
    """Remembers the epochs it trained in, the samples it saw, and at which step it was validated on what."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []
        self.samples: list[float] = []
        self.validated: list[tuple[int, list[float]]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append(self.current_epoch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.samples += batch.tolist()
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validated.append((self.global_step, []))

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated[-1][1].extend(batch.tolist())

    @property
    def at(self) -> list[int]:
        return [step for step, _ in self.validated]


def fit(batches: int = 4, module: Watching | None = None, **settings: Any) -> tuple[Watching, Any]:
    module, trainer = module or Watching(), quiet(**settings)
    trainer.fit(module, loader(range(batches)), loader([7, 8, 9]))
    return module, trainer


def test_c33_intervals_count_optimizer_steps_across_epochs() -> None:
    module, _ = fit(7, max_epochs=4, accumulate_grad_batches=2, val_check_interval=2, check_val_every_n_epoch=None)
    assert module.at == [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({}, [5, 10, 15]),
        ({"check_val_every_n_epoch": 2}, [10]),
        ({"val_check_interval": 2}, [2, 4, 7, 9, 12, 14]),
        ({"val_check_interval": 0.4}, [2, 4, 7, 9, 12, 14]),
        ({"val_check_interval": 0.01}, [*range(1, 16)]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": 2}, [8]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12]),
        ({"limit_val_batches": 0}, []),
    ],
)
def test_when_validation_runs(settings: dict[str, Any], at: list[int]) -> None:
    assert fit(5, max_epochs=3, **settings)[0].at == at


class Declared(IterableDataset):
    """Says 8 and gives 6."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[float]:
        yield from map(float, range(6))


def test_c42_a_wrong_declared_length_is_said_once_and_validation_runs_at_the_real_end() -> None:
    module, trainer = Watching(), quiet(max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(Declared(), batch_size=1), loader([1]))
    assert (module.at, len(module.samples)) == ([6, 12], 12)
    assert len([w for w in caught if "8" in str(w.message) and "6" in str(w.message)]) == 1


def test_a_fraction_of_an_unknown_length_and_an_interval_longer_than_the_epoch_are_refused() -> None:
    module = Watching()
    with pytest.raises(MisconfigurationException, match=r"val_check_interval=0.5 is a fraction of an epoch, whose length"):
        quiet(max_epochs=1, val_check_interval=0.5).fit(module, (torch.ones(1) for _ in range(3)), loader([1]))
    with pytest.raises(MisconfigurationException, match=r"more than the 4 optimizer steps of an epoch.*check_val_every_n_epoch=None"):
        fit(module=module, max_epochs=1, val_check_interval=5)
    assert module.w.item() == 0.0


def test_c50_a_second_fit_says_that_there_is_nothing_to_do_and_goes_on_when_the_limit_is_raised() -> None:
    module, trainer = fit(max_epochs=2)
    with pytest.warns(UserWarning, match=r"Nothing to do: max_epochs=2 is already reached. Raise it \(trainer.max_epochs = ...\)"):
        trainer.fit(module, loader(range(4)))
    assert (module.epochs, trainer.global_step, trainer.current_epoch) == ([0, 1], 8, 2)
    trainer.max_epochs = 4
    trainer.fit(module, loader(range(4)))
    assert (module.epochs, trainer.global_step, trainer.current_epoch) == ([0, 1, 2, 3], 16, 4)


def test_c50_with_steps_the_second_fit_goes_on_inside_the_epoch() -> None:
    module, trainer = fit(6, max_steps=4)
    with pytest.warns(UserWarning, match="max_steps=4 is already reached. Raise it"):
        trainer.fit(module, loader(range(6)))
    trainer.max_steps = 9
    trainer.fit(module, loader(range(6)))
    assert (module.samples, trainer.global_step) == ([0, 1, 2, 3, 4, 5, 0, 1, 2], 9)


def test_limits_are_checked_also_when_they_are_changed() -> None:
    trainer = quiet(max_epochs=1)
    for name, wrong in (("max_epochs", "3"), ("max_epochs", -2), ("max_steps", 1.5), ("accumulate_grad_batches", 0)):
        with pytest.raises(MisconfigurationException, match=f"{name}={wrong!r} must be a whole number"):
            setattr(trainer, name, wrong)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 3}, 3),
        ({"max_epochs": 2, "max_steps": 99}, 8),
        ({"max_epochs": 0}, 0),
        ({"max_steps": 0}, 0),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 1, "limit_train_batches": 0.5}, 2),
        ({"max_epochs": 1, "limit_train_batches": 99}, 4),
        ({"max_epochs": 1, "limit_train_batches": 1.0}, 4),
        ({"max_epochs": 1, "limit_train_batches": 1}, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_limits_of_training(settings: dict[str, Any], steps: int) -> None:
    module, trainer = fit(**settings)
    assert (trainer.global_step, len(module.samples)) == (steps, steps)


@pytest.mark.parametrize("settings", [{"max_epochs": 2}, {"max_steps": 5}])
def test_no_training_batches_means_nothing_to_do(settings: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="Nothing to do: limit_train_batches=0"):
        _, trainer = fit(limit_train_batches=0, **settings)
    assert trainer.global_step == 0


def test_limits_of_evaluation_and_prediction() -> None:
    class Predicting(Watching):
        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.samples += batch.tolist()

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return batch.item()

    module, data = Predicting(), loader([1, 2, 3, 4])
    trainer = quiet(max_epochs=1, limit_val_batches=0.5, limit_test_batches=3, limit_predict_batches=1)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    assert (module.validated[0][1], module.samples, trainer.predict(module, data)) == ([1, 2], [1, 2, 3], [1.0])
    assert trainer.predict(module, data, return_predictions=False) is None


def test_overfit_batches_takes_training_in_order_and_for_validation_too() -> None:
    module, trainer = Watching(), quiet(max_epochs=2, overfit_batches=2)
    trainer.fit(module, loader(range(6), shuffle=True))
    assert module.samples == [0, 1, 0, 1]
    assert module.validated == [(2, [0, 1]), (4, [0, 1])]


@pytest.mark.parametrize(("run", "batches"), [(True, 1), (2, 2)])
def test_fast_dev_run_does_a_little_of_everything_and_writes_nothing(run: int, batches: int, own_directory: Any) -> None:
    class Everything(Watching):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.tested = batch_idx + 1

        def on_train_start(self) -> None:
            self.logger.experiment.add_scalar("x", 1.0)  # there is something that takes it

    module = Everything()
    trainer = quiet(fast_dev_run=run, logger=CSVLogger(), callbacks=ModelCheckpoint(), enable_checkpointing=True, enable_model_summary=True)
    trainer.fit(module, loader(range(5)), loader(range(5)))
    trainer.test(module, loader(range(5)), verbose=False)
    assert (len(module.samples), len(module.validated[0][1]), module.tested) == (batches,) * 3
    assert (len(trainer.loggers), trainer.log_dir) == (1, None)
    assert quiet(fast_dev_run=run, logger=False).loggers == []
    assert list(own_directory.iterdir()) == []


def test_max_time_stops_at_a_boundary() -> None:
    for given in (timedelta(0), {"seconds": 0}, "00:00:00:00"):
        module, trainer = fit(max_time=given)
        assert trainer.global_step == 1
    _, trainer = fit(max_time="01:00:00:00", max_epochs=1)
    assert trainer.global_step == 4
    _, trainer = fit(max_time=timedelta(0), min_steps=3)
    assert trainer.global_step == 3


@pytest.mark.parametrize(("settings", "steps"), [({}, 2), ({"min_steps": 3}, 3), ({"min_epochs": 2}, 8), ({"min_steps": 6, "min_epochs": 1}, 6)])
def test_a_wish_to_stop_waits_for_the_minimum(settings: dict[str, Any], steps: int) -> None:
    class Stops(Watching):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 2:
                self.trainer.should_stop = True

    assert fit(max_epochs=5, module=Stops(), **settings)[1].global_step == steps


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("path", ["plain", "closure", "manual"])
def test_minus_one_skips_the_rest_of_the_epoch(path: str, accumulate: int) -> None:
    class Skips(Watching):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return -1 if batch.item() == 3 else None

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("x", batch.sum())
            if not self.automatic_optimization:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    module = Skips()
    if path == "closure":
        module.optimizer_step = lambda epoch, i, optimizer, closure: optimizer.step(closure)
    elif path == "manual":
        accumulate, module.automatic_optimization = 1, False
    _, trainer = fit(6, module=module, max_epochs=2, accumulate_grad_batches=accumulate, val_check_interval=1)
    assert module.samples == [0, 1, 2] * 2
    steps = 1 if accumulate == 2 else 3
    assert (trainer.global_step, module.at) == (2 * steps, [*range(1, 2 * steps + 1)])
    assert accumulate == 2 or trainer.callback_metrics["x"].item() == 2.0  # of the last step that was taken
    assert module.epochs == [0, 1]


def test_c49_every_mode_is_put_back_after_validation() -> None:
    class Norms(Watching):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.BatchNorm1d(1).eval()
            self.live = torch.nn.BatchNorm1d(1)
            self.modes: list[tuple[bool, ...]] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.modes.append((self.training, self.frozen.training, self.live.training))

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert not any(m.training for m in self.modules())

        test_step = predict_step = validation_step

    module = Norms()
    _, trainer = fit(module=module, max_epochs=1, val_check_interval=2, num_sanity_val_steps=2)
    assert module.modes == [(True, False, True)] * 4
    trainer.validate(module, loader([1]), verbose=False)
    trainer.validate(module, loader([1]), verbose=False)
    trainer.test(module, loader([1]), verbose=False)
    trainer.predict(module, loader([1]))
    assert [m.training for m in module.modules()] == [True, False, True]


def test_c49_a_module_wholly_in_eval_mode_is_announced_and_stays_so() -> None:
    module = Watching()
    module.eval()
    with pytest.warns(UserWarning, match=r"Every layer of the module is in eval mode.*model.train\(\)"):
        fit(module=module, max_epochs=1)
    assert not module.training
