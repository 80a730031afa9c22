"""What else a file brings back: precision, callbacks, metric objects, data module, numbers logged outside of steps."""

from __future__ import annotations

import contextlib

import pytest
import torch

from callbacks import EarlyStopping, ModelCheckpoint
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, Noisy, Stop, noisy_loader, train
from trainer import DataModule
from trainer.checkpoint.find import newest


class Overflowing(Net):
    """The loss of two batches is infinite; records scale, tracker and rate before every step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def training_step(self, batch, batch_idx):
        scaler = self.trainer.precision_plugin.scaler
        state = scaler.state_dict()
        loss = self.loss(batch)
        self.found.append((state["scale"], state["_growth_tracker"], self.optimizers().param_groups[0]["lr"], loss.item()))
        return loss * (float("inf") if batch_idx in (1, 4) else 1.0)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_the_loss_scale_of_16_mixed_goes_on(tmp_path):
    def go(folder=None, resume_from=None):
        module = Overflowing()
        trainer = quiet(max_epochs=2, precision="16-mixed", callbacks=[EveryStep(folder)] if folder else [])
        scaler = trainer.precision_plugin.scaler
        scaler.set_growth_interval(2)
        trainer.fit(module, loader(Net.rows(24), 4), ckpt_path=resume_from)
        return module.found, module.layers[0].weight

    whole, weight = go(tmp_path)
    scales = [scale for scale, *_ in whole]
    assert scales[:4] == [65536.0, 65536.0, 32768.0, 32768.0] and scales[4] == 65536.0 and scales[5] == 32768.0
    for step in range(1, 12):
        found, resumed_weight = go(resume_from=tmp_path / f"step={step}.ckpt")
        assert found == whole[step:]
        assert torch.equal(resumed_weight, weight)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_every_precision_resumes_to_the_bit(tmp_path, precision):
    def go(folder=None, resume_from=None):
        module = Net()
        trainer = quiet(max_epochs=2, precision=precision, callbacks=[EveryStep(folder)] if folder else [])
        trainer.fit(module, loader(Net.rows(12), 4), ckpt_path=resume_from)
        return module.layers[0].weight

    weight = go(tmp_path)
    assert weight.dtype == {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    for step in range(1, 6):
        assert torch.equal(go(resume_from=tmp_path / f"step={step}.ckpt"), weight)


class Validated(Scalar):
    """Logs the given validation value of each epoch."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def validation_step(self, batch, batch_idx):
        self.log("val", self.values[self.current_epoch])


def test_early_stopping_goes_on_counting(tmp_path):
    def go(folder=None, resume_from=None):
        stopping = EarlyStopping("val", patience=3)
        callbacks = [stopping, *([EveryStep(folder)] if folder else [])]
        trainer = quiet(max_epochs=10, callbacks=callbacks)
        trainer.fit(Validated([3, 1, 2, 2, 2, 2, 2, 0, 0, 0]), loader(range(2)), loader(range(2)), ckpt_path=resume_from)
        return trainer.current_epoch, stopping.wait_count, stopping.best_score.item(), stopping.stopped_epoch

    assert go(tmp_path) == (5, 3, 1.0, 4)
    for step in range(1, 10):
        assert go(resume_from=tmp_path / f"step={step}.ckpt") == (5, 3, 1.0, 4)


def test_model_checkpoint_goes_on_ranking(tmp_path):
    values = [3.0, 1.0, 5.0, 2.0, 4.0]

    class Dying(Validated):
        stop = -1

        def training_step(self, batch, batch_idx):
            if self.global_step == self.stop:
                raise Stop
            return super().training_step(batch, batch_idx)

    def go(folder, stop=-1, resume_from=None):
        keeper = ModelCheckpoint(folder, "{epoch}", monitor="val", save_top_k=2, save_last=True)
        module, trainer = Dying(values), quiet(max_epochs=5, callbacks=[keeper, EveryStep(f"{folder}-steps")])
        module.stop = stop
        with contextlib.suppress(Stop):
            trainer.fit(module, loader(range(2)), loader(range(2)), ckpt_path=resume_from)
        return keeper

    whole = go(tmp_path / "whole")
    path = None
    for stop in (2, 5, 6, -1):
        keeper = go(tmp_path / "parts", stop, path)
        path = newest(str(file) for folder in ("parts", "parts-steps") for file in (tmp_path / folder).iterdir())

    def view(found):
        scores = {path.rpartition("/")[2]: score.item() for path, score in found.best_k_models.items()}
        return scores, found.best_model_path.rpartition("/")[2], found.best_model_score.item(), found.kth_value.item()

    assert view(keeper) == view(whole) == ({"epoch=1.ckpt": 1.0, "epoch=3.ckpt": 2.0}, "epoch=1.ckpt", 1.0, 2.0)
    for folder in ("whole", "parts"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]


# -- metric objects ------------------------------------------------------------------------------------------------------


class Least(torch.nn.Module):
    """A metric around another one, without a state of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def update(self, value):
        self.inner.update(value)

    def compute(self):
        return self.inner.compute()["raw"]

    def reset(self):
        self.inner.reset()


class Measured(Noisy):
    """Logs torchmetrics objects: sums, lists, and one inside another."""

    def __init__(self):
        super().__init__()
        metrics = pytest.importorskip("torchmetrics")
        self.mean = metrics.MeanMetric()
        self.listed = metrics.SpearmanCorrCoef()
        self.largest = metrics.MaxMetric()
        self.range = Least(metrics.MinMaxMetric(metrics.MeanMetric()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.listed.update(batch[:, 1], batch[:, 2])
        self.largest(batch[:, 3])
        self.range.update(loss.detach())
        for name in ("mean", "listed", "largest", "range"):
            self.log(f"m/{name}", getattr(self, name), on_step=False, on_epoch=True)
        return loss


def measured(**more):
    return train(noisy_loader(23, 3), module=Measured(), **more)


def test_torchmetrics_objects_go_on_in_the_middle_of_an_epoch(tmp_path):
    pytest.importorskip("torchmetrics")
    whole = measured(save_to=tmp_path)
    assert {"m/mean", "m/listed", "m/largest"} <= set(whole.epochs[0])
    losses = torch.tensor([entry["loss"] for entry in whole.steps[8:]])
    assert whole.epochs[1]["m/mean"] == pytest.approx(losses.mean().item())
    used = Measured()
    for step in (1, 7, 8, 13):
        assert torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["global_step"] == step
        resumed = measured(resume_from=tmp_path / f"step={step}.ckpt")
        assert resumed.epochs == {epoch: whole.epochs[epoch] for epoch in resumed.epochs}
        train(noisy_loader(23, 3), module=used, resume_from=tmp_path / f"step={step}.ckpt", max_steps=step + 1)
    used.epochs.clear()  # a module whose metrics still hold the parts of other runs
    train(noisy_loader(23, 3), module=used, resume_from=tmp_path / "step=8.ckpt")
    assert used.epochs == {1: whole.epochs[1]}


def test_torchmetrics_objects_on_ranks(tmp_path):
    pytest.importorskip("torchmetrics")
    ddp = {"strategy": "ddp", "devices": 2}

    def task():
        whole = measured(save_to=tmp_path, **ddp)
        for step in (1, 3, 4, 5):
            resumed = measured(resume_from=tmp_path / f"step={step}.ckpt", **ddp)
            assert resumed.epochs == {epoch: whole.epochs[epoch] for epoch in resumed.epochs}
        return whole.epochs, [(entry["loss"], entry["data"]) for entry in whole.steps]

    (first, steps), (second, more) = run_ranks(task)
    assert first == second
    assert first[0]["m/mean"] == pytest.approx(sum(loss for loss, _ in steps[:4] + more[:4]) / 8)
    alone = train(noisy_loader(23, 6), module=Measured(), resume_from=tmp_path / "step=3.ckpt")  # both ranks' states are merged
    columns = torch.tensor([row for _, rows in steps[:4] + more[:4] for row in rows])
    assert alone.epochs[0]["m/largest"] == columns[:, 2].max().float()
    assert alone.epochs[0]["m/listed"] == pytest.approx(first[0]["m/listed"], abs=1e-6)
    losses = [loss for loss, _ in steps[:3] + more[:3]] + [alone.steps[0]["loss"]]
    assert alone.epochs[0]["m/mean"] == pytest.approx(sum(losses) / 7)


def test_a_metric_object_without_a_visible_state_is_named(tmp_path):
    class Hidden:
        def __init__(self):
            self.total = 0.0

        def update(self, value):
            self.total += value

        def compute(self):
            return self.total

        def reset(self):
            self.total = 0.0

    class Holding(Scalar):
        def __init__(self):
            super().__init__()
            self.hidden = Hidden()

        def training_step(self, batch, batch_idx):
            self.hidden.update(1.0)
            self.log("hidden", self.hidden, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    quiet(max_epochs=1, callbacks=[EveryStep(tmp_path)]).fit(Holding(), loader(range(4)))
    with pytest.warns(UserWarning, match="'hidden' is a metric object whose state the checkpoint could not keep"):
        quiet(max_epochs=1).fit(Holding(), loader(range(4)), ckpt_path=tmp_path / "step=2.ckpt")


# -- the rest ------------------------------------------------------------------------------------------------------------


def test_numbers_logged_outside_of_steps_survive(tmp_path):
    class Logging(Scalar):
        def on_train_epoch_start(self):
            self.log("start", 1.0 + self.current_epoch)

        def training_step(self, batch, batch_idx):
            self.log("x", batch.mean(), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("end", 5.0 + self.current_epoch)

    for step in (None, 1, 2, 3, 4, 5):
        callbacks = [EveryStep(tmp_path)] if step is None else []
        path = None if step is None else tmp_path / f"step={step}.ckpt"
        trainer = quiet(max_epochs=2, callbacks=callbacks)
        trainer.fit(Logging(), loader(range(3)), ckpt_path=path)
        assert {n: v.item() for n, v in trainer.callback_metrics.items()} == {"start": 2.0, "x": 1.0, "end": 6.0}


def test_a_data_module_keeps_its_state(tmp_path):
    class Data(DataModule):
        def __init__(self, size=4):
            super().__init__()
            self.save_hyperparameters()
            self.size, self.loaded = size, None

        def train_dataloader(self):
            return loader(range(self.size))

        def state_dict(self):
            return {"sizes": [self.size]}

        def load_state_dict(self, state):
            self.loaded = state

    quiet(max_epochs=1, callbacks=[EveryStep(tmp_path)]).fit(Scalar(), datamodule=Data())
    data = Data()
    quiet(max_epochs=1).fit(Scalar(), datamodule=data, ckpt_path=tmp_path / "step=2.ckpt")
    assert data.loaded == {"sizes": [4]}
    assert torch.load(tmp_path / "step=2.ckpt", weights_only=True)["datamodule_hyper_parameters"] == {"size": 4}


def test_another_seed_does_not_break_the_order_of_a_running_epoch(tmp_path):
    def go(seed, resume_from=None):
        return train(noisy_loader(), None if resume_from else tmp_path, resume_from, seed=seed)

    whole = go(11)
    with pytest.warns(UserWarning, match="made with seed=11.*seed=12 is not used"):
        resumed = go(12, tmp_path / "step=2.ckpt")
    assert resumed.steps == whole.steps[2:]
