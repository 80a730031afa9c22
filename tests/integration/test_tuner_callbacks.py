"""LearningRateFinder and BatchSizeFinder: a fit with them is the fit with what they find; and both on ranks."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import BatchSizeFinder, Callback, CSVLogger, LearningRateFinder
from tests.helpers.modules import assert_same, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.tuned import OPTIONS, ROWS, Manual, Tuned, exact
from trainer import MisconfigurationException, Tuner, outcome
from trainer.job import Job


@pytest.fixture(autouse=True)
def quick_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole collection takes longer here than a trial of these sizes; `test_nothing_of_a_trial_is_left_in_the_next` has whole ones."""
    monkeypatch.setattr(gc, "collect", partial(gc.collect, 1))


class Scheduled(Tuned):
    """Its schedule needs to know how long the fit is."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, total=self.total: 1 - step / total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("kind", [Tuned, Scheduled])
def test_a_fit_with_both_finders_is_the_fit_with_what_they_find(kind: type[Tuned]) -> None:
    module = kind(most=20)
    sizes, rates = BatchSizeFinder(), LearningRateFinder(**OPTIONS, num_training_steps=30)
    trainer = exact(callbacks=[sizes, rates])
    trainer.fit(module)
    assert sizes.optimal_batch_size == module.hparams.batch_size == 16 and trainer.global_step == 2 * 4
    tuned = kind(batch_size=16)
    curve = Tuner(exact()).lr_find(tuned, **OPTIONS, num_training=30)
    assert rates.optimal_lr.results == curve.results and module.lr == tuned.lr == curve.suggestion() != 0.1
    right = kind(lr=curve.suggestion(), batch_size=16)
    exact().fit(right)
    assert_same(weights(module), weights(right), 0)
    assert module.sizes == right.sizes


class Milestones(LearningRateFinder):
    """As Lightning's documentation shows it."""

    def __init__(self, milestones: tuple[int, ...], **options: Any) -> None:
        super().__init__(**options)
        self.milestones, self.found = milestones, {}

    def on_fit_start(self, *_: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch in self.milestones:
            self.lr_find(trainer, module)
            self.found[trainer.current_epoch, trainer.global_step] = [group["lr"] for group in trainer.optimizers[0].param_groups]


class SizeMilestones(BatchSizeFinder):
    def on_fit_start(self, *_: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.scale_batch_size(trainer, module)


class Noisy(Tuned):
    """Draws random numbers and has a buffer, so that a trace of a search would show."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = torch.nn.BatchNorm1d(5)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return super().training_step(self.norm(batch + 0.01 * torch.rand(len(batch), 5)), batch_idx)


def test_searches_at_later_epochs() -> None:
    found = []
    for callbacks in ([], [Milestones((0, 1, 2), num_training_steps=20, update_attr=False)]):
        torch.manual_seed(2)
        trainer, module = exact(max_epochs=3, callbacks=callbacks), Noisy()
        trainer.fit(module)
        found.append((weights(module), trainer.global_step, trainer.callback_metrics))
    assert_same(found[0][0], found[1][0], 0)
    assert found[0][1:] == found[1][1:] and callbacks[0].optimal_lr.results["loss"]

    finder, sizes, module = Milestones((0, 2), **OPTIONS, num_training_steps=30), SizeMilestones(), Scheduled(most=20)
    trainer = exact(max_epochs=3, callbacks=[finder, sizes])
    trainer.fit(module)
    assert trainer.global_step == 16 + 4 + 4 and module.hparams.batch_size == 16 and set(module.sizes[32:]) == {16}
    (epoch0, at_start), (epoch2, later) = finder.found.items()
    assert epoch0 == (0, 0) and epoch2 == (2, 20)
    assert at_start[1] == at_start[0] / 10 and later == [module.lr, module.lr] == [finder.optimal_lr.suggestion()] * 2
    last = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
    assert last == pytest.approx([module.lr * (1 - 24 / module.total)] * 2)


class Writing(Noisy):
    """Writes by itself."""

    def on_train_epoch_start(self) -> None:
        self.trainer.save_checkpoint(f"{len(self.trainer.callbacks)}-callbacks.ckpt")

    def on_train_batch_end(self, *_: Any) -> None:
        self.logger.log_metrics({"direct": float(self.global_step)}, self.global_step)


def test_searches_inside_of_a_fit_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number, finder in enumerate((Callback(), Milestones((0, 1), num_training_steps=20, update_attr=False))):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        torch.manual_seed(2)
        exact(callbacks=[finder], logger=CSVLogger(name="log", version="v"), log_every_n_steps=1).fit(Writing())
        files = {str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("*") if path.is_file()}
        found.append((files, Path("log/v/metrics.csv").read_text()))
    assert found[0] == found[1] and found[0][0] == {"1-callbacks.ckpt", "log/v/metrics.csv", "log/v/hparams.yaml"}


def test_a_fit_that_goes_on_keeps_what_was_found(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [BatchSizeFinder(), LearningRateFinder(**OPTIONS, num_training_steps=30)]

    first, trainer = Tuned(most=20), exact(callbacks=callbacks())
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer.max_epochs = 4
    trainer.fit(first)
    second, trainer = Tuned(most=20), exact(max_epochs=4, callbacks=callbacks())
    trainer.fit(second, ckpt_path=tmp_path / "half.ckpt")
    assert second.lr == first.lr != 0.1 and second.hparams.batch_size == first.hparams.batch_size == 16
    assert second.sizes == [16] * 8 + [16] * 8 or set(second.sizes) == {16}
    assert trainer.global_step == 16 and trainer.callbacks[1].optimal_lr is None
    assert trainer.callbacks[0].optimal_batch_size == 16


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_an_evaluation_uses_the_size_that_is_found(method: str) -> None:
    module, finder = Tuned(most=20, where=method), BatchSizeFinder()
    trainer = exact(callbacks=[finder])
    found = getattr(trainer, method)(module, **({} if method == "predict" else {"verbose": False}))
    assert finder.optimal_batch_size == 16 and set(module.sizes) == {16} and len(module.sizes) == 4
    assert method != "test" or found == [{"size": 16.0}]
    assert method != "predict" or torch.equal(torch.cat(found), ROWS[:, 0])


def test_the_callbacks_arguments_are_checked_at_once() -> None:
    with pytest.raises(MisconfigurationException, match="must be one of exponential, linear"):
        LearningRateFinder(mode="log")
    with pytest.raises(MisconfigurationException, match="must be one of power, binsearch"):
        BatchSizeFinder(mode="fast")


# -- ranks ---------------------------------------------------------------------------------------------------------------------


def test_hyper_parameters_come_back_from_ranks() -> None:
    there, here, trainer = Tuned(batch_size=16), Tuned(), exact()
    there.hparams.loss = here.hparams.loss = torch.nn.MSELoss()
    apart = outcome.collect(trainer, Job("fit", there, None, {}, None), 7, [])
    mine, hparams = here.hparams.loss, here.hparams
    trainer.callbacks.clear()
    assert outcome.apply(trainer, Job("fit", here, None, {}, None), apart) == 7
    assert here.hparams is hparams and hparams.batch_size == 16 and hparams.loss is mine


def on_ranks() -> dict[str, Any]:
    """Rank 1 alone runs out of memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", partial(gc.collect, 1))
        return searches()


def searches() -> dict[str, Any]:
    module = Tuned(most=20, rank=1)
    before = weights(module)
    found = Tuner(exact(strategy="ddp", devices=2)).scale_batch_size(module, mode="binsearch", margin=0.0, init_val=16, max_trials=5)
    assert_same(weights(module), before, 0)
    finders = [BatchSizeFinder(init_val=16), LearningRateFinder(**OPTIONS, num_training_steps=20)]
    fitted = Tuned(most=20, rank=1)
    trainer = exact(strategy="ddp", devices=2, callbacks=finders)
    trainer.fit(fitted)
    again = Tuned(lr=fitted.lr, batch_size=16)
    exact(strategy="ddp", devices=2).fit(again)
    assert_same(weights(fitted), weights(again), 0)
    validated = Tuner(exact(strategy="ddp", devices=2)).scale_batch_size(Tuned(most=7, where="validate", rank=1), method="validate", init_val=4)
    with pytest.raises(MisconfigurationException, match="on several ranks does not go with manual optimization"):
        Tuner(exact(strategy="ddp", devices=2)).scale_batch_size(Manual())
    return {"size": found, "lr": fitted.lr, "fitted": finders[0].optimal_batch_size, "validated": validated, "steps": trainer.global_step}


def test_ranks_agree() -> None:
    first, second = run_ranks(on_ranks)
    assert first == second
    assert (first["size"], first["fitted"], first["validated"], first["steps"]) == (20, 16, 4, 4) and first["lr"] != 0.1
