"""Tuner.lr_find against a loop by hand; that nothing but the attribute changes, whichever search it was, and what is wrong use."""

from __future__ import annotations

import gc
import math
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from callbacks import BatchSizeFinder, CSVLogger, LearningRateFinder, ModelCheckpoint
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.tuned import OPTIONS, ROWS, Manual, Tuned, exact, range_test
from trainer import MisconfigurationException, Tuner
from trainer.tuner.curve import LRCurve


@pytest.fixture(autouse=True)
def quick_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole collection takes longer here than a trial of these sizes; `test_nothing_of_a_trial_is_left_in_the_next` has whole ones."""
    monkeypatch.setattr(gc, "collect", partial(gc.collect, 1))


# -- lr_find -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"min_lr": 1e-5, "max_lr": 10.0, "num_training": 31}, np.geomspace(1e-5, 10, 31)),
        ({"min_lr": 0.0, "max_lr": 0.2, "num_training": 24, "mode": "Linear"}, np.linspace(0, 0.2, 24)),
        ({"min_lr": 1e-3, "max_lr": 900.0, "num_training": 30, "early_stop_threshold": 2}, np.geomspace(1e-3, 900, 30)),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_curve_is_that_of_a_loop_by_hand(options: dict[str, Any], rates: Any, accumulate: int) -> None:
    module, trainer = Tuned(), exact(accumulate_grad_batches=accumulate)
    curve = Tuner(trainer).lr_find(module, **options)
    right = range_test(rates.tolist(), list(ROWS.split(4)), accumulate, options.get("early_stop_threshold", 4.0))
    assert curve.results["lr"] == pytest.approx(right[0], rel=1e-12)
    assert curve.results["loss"] == pytest.approx(right[1], rel=1e-9)
    assert (len(right[0]) < len(rates)) == ("mode" not in options)
    steepest = 10 + int(np.gradient(right[1][10:-1]).argmin())
    assert curve.suggestion() == module.lr == pytest.approx(rates[steepest], rel=1e-12)
    assert curve.suggestion(skip_begin=0, skip_end=0) == pytest.approx(rates[int(np.gradient(right[1]).argmin())])
    assert (curve.lr_min, curve.lr_max, curve.num_training) == tuple(options[n] for n in ("min_lr", "max_lr", "num_training"))


def test_manual_optimization_has_the_same_curve() -> None:
    curves = [Tuner(exact()).lr_find(module, **OPTIONS, num_training=12, update_attr=False) for module in (Tuned(), Manual())]
    assert curves[0].results == curves[1].results and curves[0].results["loss"][-1] > 0


class Losses(Tuned):
    """Its losses are those it is told, whatever the weights."""

    def __init__(self, *losses: float | None) -> None:
        super().__init__()
        self.losses = losses

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.losses[min(self.global_step, len(self.losses) - 1)]
        return None if loss is None else self.loss(batch) * 0 + loss


@pytest.mark.parametrize(
    ("losses", "threshold", "found"),
    [
        ([5.0], 4.0, [5.0] * 6),
        ([1.0, math.nan, 1.0], 4.0, [1.0, math.nan]),
        ([1.0, math.inf, 1.0], None, [1.0, math.nan, 1.0, 1.0, 1.0, 1.0]),
        ([1.0, None, 1.0], 4.0, [1.0, math.nan, 1.0, 1.0, 1.0, 1.0]),
        ([-2.0, -2.0, 1.0], 4.0, [-2.0, -2.0, -2 + 3 * 0.02 / (1 - 0.98**3), *([None] * 3)]),
        ([-2.0, 99.0, 1.0], 4.0, [-2.0, (0.98 * -2 * 0.02 + 99 * 0.02) / (1 - 0.98**2)]),
    ],
)
def test_smoothing_and_ends(losses: list[Any], threshold: float | None, found: list[Any]) -> None:
    module = Losses(*losses)
    with pytest.warns(UserWarning) as told:
        curve = Tuner(exact()).lr_find(module, num_training=6, early_stop_threshold=threshold)
    assert len(curve.results["loss"]) == len(curve.results["lr"]) == len(found)
    for mine, right in zip(curve.results["loss"], found, strict=True):
        assert right is None or mine == pytest.approx(right, rel=1e-12, nan_ok=True)
    assert curve.suggestion() is None and module.lr == 0.1
    assert any("too few finite losses for a suggestion, so lr stays" in str(one.message) for one in told)


def test_points_without_a_loss_are_left_out_of_the_suggestion() -> None:
    curve = LRCurve("exponential", 1e-4, 1.0, 5)
    curve.results = {"lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "loss": [3.0, 2.9, math.nan, 1.0, 1.2]}
    steepest = int(np.gradient([3.0, 2.9, 1.0, 1.2], [0, 1, 3, 4]).argmin())
    assert curve.suggestion(0, 0) == [1e-4, 1e-3, 1e-1, 1.0][steepest]
    assert curve.suggestion(2, 2) is None


def test_the_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curve = Tuner(exact()).lr_find(Tuned(), num_training=30)
    figure = curve.plot(suggest=True)
    (axes,) = figure.axes
    line, point = axes.lines
    assert axes.get_xscale() == "log" and np.allclose(line.get_ydata(), curve.results["loss"])
    assert point.get_xdata()[0] == curve.suggestion()
    other, axes = plt.subplots()
    assert curve.plot(ax=axes, show=True) is other and len(axes.lines) == 1
    plt.close("all")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MisconfigurationException, match="pip install matplotlib"):
        curve.plot()


# -- nothing else changes ------------------------------------------------------------------------------------------------------


class Busy(Tuned):
    """Changes everything that steps can change; fails in its 13th step, or with a batch of 12, if it is told so."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(most=9)
        self.error, self.seen, self.notes, self.mixed = error, 0, [], {"deep": [1]}
        self.norm, self.drop = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Linear(1, 1).requires_grad_(False)
        self.drop.eval()
        self.running = torch.zeros(2)
        self.layers[0].weight.grad = torch.ones(8, 4)

    def on_train_start(self) -> None:
        self.started = True

    def on_train_end(self) -> None:
        assert self.started
        (Path(self.trainer.default_root_dir).parent / "ended").touch()

    def configure_callbacks(self) -> Any:
        return ModelCheckpoint(every_n_train_steps=1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen += self.started
        if self.error is not None and (self.seen == 13 or len(batch) == 12):
            raise self.error
        self.notes.append(self.seen)
        self.mixed["deep"].append(self.mixed.setdefault("more", random.random() + np.random.rand()))
        self.late = self.running.add_(1)
        self.eval()
        self.frozen.requires_grad_(True)
        self.hparams.batch_size_seen = len(batch)
        self.logger.experiment.add_scalar("x", 1.0, self.global_step)
        self.trainer.save_checkpoint("inside.ckpt")
        batch = batch.float()
        rows = torch.cat([self.norm(self.drop(batch[:, :4])), batch[:, 4:]], 1) + torch.rand(1) * 0.01
        return super().training_step(rows, batch_idx)


def state(module: Any, trainer: Any) -> list[Any]:
    tensors = {**weights(module), "running": module.running.clone(), "grad": module.layers[0].weight.grad.clone()}
    plain = {n: v for n, v in vars(module).items() if isinstance(v, int | float | str | None)}
    lists = [list(module.notes), {"deep": [1]} == module.mixed, hasattr(module, "late"), dict(module.hparams)]
    flags = [m.training for m in module.modules()], [p.requires_grad for p in module.parameters()]
    mine = [trainer.global_step, trainer.current_epoch, trainer.max_epochs, trainer.settings, list(trainer.callbacks), trainer.loggers]
    names = set(vars(trainer)), trainer.state.status, trainer.optimizers, trainer.model
    return [tensors, plain, lists, flags, mine, names, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("error", [None, RuntimeError("of the user"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("what", ["lr", "batch_size"])
def test_everything_is_as_before(what: str, error: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    settings = {"logger": CSVLogger(), "callbacks": [ModelCheckpoint(every_n_train_steps=1)], "precision": "32-true", "seed": 5}
    module, trainer = Busy(error), exact(**settings)
    parameter = module.layers[0].weight
    before, tuner = state(module, trainer), Tuner(trainer)
    options = {"update_attr": False, "num_training": 20} if what == "lr" else {"init_val": 3, "batch_arg_name": "batch_size"}
    search = tuner.lr_find if what == "lr" else tuner.scale_batch_size
    if error is None:
        search(module, **options)
        assert module.hparams.batch_size == (4 if what == "lr" else 6)
        module.hparams.batch_size = 4
    else:
        with pytest.raises(type(error)) as caught:
            search(module, **options)
        assert caught.value is error
    after = state(module, trainer)
    assert_same(after[0], before[0], 0)
    assert after[1:] == before[1:] and module.layers[0].weight is parameter and parameter.dtype == torch.float32
    assert list(Path.cwd().iterdir()) == [] and (tmp_path / "ended").exists() == (error is None or what == "batch_size")


def test_a_fit_after_it_is_the_fit_without_it() -> None:
    found = []
    for tunes in (False, True):
        torch.manual_seed(1)
        module, trainer = Tuned(lr=0.01), quiet(accelerator="cpu", max_epochs=2)
        module.train_dataloader = lambda module=module: loader(ROWS.float(), module.hparams.batch_size, shuffle=True)
        if tunes:
            Tuner(trainer).lr_find(module, num_training=20, update_attr=False)
            Tuner(trainer).scale_batch_size(module, max_val=4)
        trainer.fit(module)
        found.append(weights(module))
    assert_same(*found, 0)


# -- wrong use -----------------------------------------------------------------------------------------------------------------


class Two(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=self.lr) for layer in (self.layers[0], self.layers[2])]


class Misnamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.learnin_rate, self.batchsize = 0.1, 4
        self.train_dataloader = lambda: loader(ROWS, 4)


class Fixed(Tuned):
    def train_dataloader(self) -> Any:
        return loader(ROWS, 4)


class Listed(Tuned):
    def train_dataloader(self) -> Any:
        return list(ROWS.split(4))


@pytest.mark.parametrize(
    ("what", "module", "options", "message"),
    [
        ("lr_find", Two(), {}, "lr_find tries learning rates on one optimizer; configure_optimizers returned 2"),
        ("lr_find", Misnamed(), {}, r"no attribute 'lr' or 'learning_rate' .* Did you mean 'learnin_rate'\? .* attr_name="),
        ("lr_find", Tuned(), {"attr_name": "eta"}, "Tuned has no attribute 'eta' that could be set"),
        ("lr_find", Tuned(), {"attr_name": "training_step"}, "no attribute 'training_step'"),
        ("lr_find", Tuned(), {"method": "test"}, "method='test' must be 'fit'"),
        ("lr_find", Tuned(), {"mode": "exponentially"}, r"must be one of exponential, linear. Did you mean 'exponential'\?"),
        ("lr_find", Tuned(), {"min_lr": 0}, "min_lr=0, max_lr=1: the rates grow from min_lr"),
        ("lr_find", Tuned(), {"min_lr": 2}, "to a larger max_lr"),
        ("lr_find", Tuned(), {"num_training": 1}, "num_training=1 must be a whole number >= 2"),
        ("lr_find", Tuned(), {"early_stop_threshold": 1}, "early_stop_threshold=1 must be above 1"),
        ("lr_find", Tuned(), {"dataloaders": [1]}, "pass train_dataloaders= and val_dataloaders="),
        ("scale_batch_size", Misnamed(), {}, r"Misnamed has no attribute 'batch_size' .* Did you mean 'batchsize'\? .* batch_arg_name="),
        ("scale_batch_size", Tuned(), {"train_dataloaders": [ROWS]}, r"make it in Tuned.train_dataloader .* batch_size=self.batch_size, and pass none"),
        ("scale_batch_size", Tuned(), {"method": "test", "dataloaders": [ROWS]}, "make it in Tuned.test_dataloader"),
        ("scale_batch_size", Tuned(), {"method": "test", "val_dataloaders": [ROWS]}, "with method='test' pass dataloaders="),
        ("scale_batch_size", Tuned(), {"method": "train"}, "method='train' must be one of fit, validate, test, predict"),
        ("scale_batch_size", Fixed(), {}, "train_dataloader made a loader with batches of 4 while batch_size was 1: it has to follow"),
        ("scale_batch_size", Listed(), {}, "train_dataloader made a loader with batches of 4 while batch_size was 1: it has to follow"),
        ("scale_batch_size", Tuned(), {"mode": "pow"}, "mode='pow' must be one of power, binsearch"),
        ("scale_batch_size", Tuned(), {"margin": 1}, "margin=1 must be a share"),
        ("scale_batch_size", Tuned(), {"init_val": 0}, "init_val=0 must be a whole number >= 1"),
        ("scale_batch_size", Tuned(), {"steps_per_trial": True}, "steps_per_trial=True must be a whole number"),
    ],
)
def test_wrong_use(what: str, module: Any, options: dict[str, Any], message: str) -> None:
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        getattr(Tuner(exact()), what)(module, **options)
    assert_same(weights(module), before, 0)


def test_a_limit_of_no_batches_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="limit_train_batches=0 allows none"):
        Tuner(exact(limit_train_batches=0)).lr_find(Tuned())
    with pytest.raises(MisconfigurationException, match="limit of batches for test is 0"):
        Tuner(exact(limit_test_batches=0)).scale_batch_size(Tuned(), method="test")


def test_lazy_layers_are_refused() -> None:
    module = Tuned()
    module.lazy = torch.nn.LazyLinear(1)
    with pytest.raises(MisconfigurationException, match="has lazy layers"):
        Tuner(exact()).lr_find(module)


def test_fast_dev_run_searches_for_nothing() -> None:
    module, trainer = Tuned(), exact(fast_dev_run=True)
    for search in (Tuner(trainer).lr_find, Tuner(trainer).scale_batch_size):
        with pytest.warns(UserWarning, match="nothing is searched for"):
            assert search(module) is None
    trainer = exact(fast_dev_run=True, callbacks=[finder := LearningRateFinder(), BatchSizeFinder()])
    with pytest.warns(UserWarning, match="nothing is searched for"):
        trainer.fit(module)
    assert trainer.global_step == 1 and finder.optimal_lr is None and module.lr == 0.1


class Asking(Tuned):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ask()

    def on_train_start(self) -> None:
        self.ask_early()

    def ask(self) -> None:
        Tuner(self.trainer).lr_find(self)

    def ask_early(self) -> None: ...


def test_inside_of_a_run_there_are_the_callbacks() -> None:
    with pytest.raises(MisconfigurationException, match="A Tuner works outside of runs"):
        exact().fit(Asking())
    module = Asking()
    module.ask_early = lambda: LearningRateFinder().lr_find(module.trainer, module)
    with pytest.raises(MisconfigurationException, match="A search works in one of on_fit_start, .*, not in on_train_start"):
        exact().fit(module)


# -- ranks ---------------------------------------------------------------------------------------------------------------------


def test_ranks_that_the_product_starts() -> None:
    module, trainer = Tuned(), exact(strategy="ddp", devices=2, accumulate_grad_batches=2)
    curve = Tuner(trainer).lr_find(module, **OPTIONS, num_training=24)
    right = range_test(np.geomspace(1e-4, 1, 24).tolist(), list(ROWS.split(8)), 2)
    assert curve.results["lr"] == pytest.approx(right[0], rel=1e-12)
    assert curve.results["loss"] == pytest.approx(right[1], rel=1e-6)
    assert module.lr == curve.suggestion() and trainer.global_step == 0 and module.sizes == []
    assert module.layers[0].weight.dtype == torch.float32
    assert_same(weights(module), weights(Tuned()), 0)
