"""Several ranks: what is logged, evaluated and predicted is what one process would see (cases C15-C18, C25, C26)."""

from __future__ import annotations

import pytest
import torch

from callbacks import EarlyStopping, ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from trainer import TrainModule


class Evaluating(Scalar):
    """Logs the mean of the samples and remembers them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen += batch.tolist()
        self.log("mean", batch.mean(), on_step=True, on_epoch=True)
        self.log("most", batch.max(), reduce_fx="max")
        self.log("all", batch.sum(), reduce_fx="sum")

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return {"sample": batch, "twice": 2 * batch}


def ddp(world_size, **settings):
    return quiet(strategy="ddp" if world_size > 1 else "auto", devices=world_size, **settings)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("samples", "mean"), [([1, 2, 3, 4, 5], 3.0), ([7], 7.0)])
def test_c15_every_sample_is_evaluated_once(world_size, samples, mean):
    def task():
        module, trainer, data = Evaluating(), ddp(world_size, max_epochs=1), loader(samples, 2)
        found = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
        seen = list(module.seen)
        trainer.fit(module, loader([1.0] * 4), data)
        return found, seen, trainer.callback_metrics["mean_epoch"].item(), module.seen

    ranks = run_ranks(task, world_size)
    for (validated, tested), _, in_fit, _ in ranks:
        assert validated == tested == ranks[0][0][0]
        assert validated[0]["mean_epoch"] == in_fit == mean
        assert validated[0]["most"] == max(samples) and validated[0]["all"] == sum(samples)
    assert sorted(s for rank in ranks for s in rank[1]) == sorted(2 * samples)
    assert sorted(s for rank in ranks for s in rank[3]) == sorted(3 * samples)


class Sharing(Evaluating):
    """Training logs a constant and the mean of the samples, per step and per epoch."""

    def training_step(self, batch, batch_idx):
        self.log("one", 1.0, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mean", batch.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("given", batch[0], batch_size=10, on_epoch=True)
        self.log("top", batch.max(), reduce_fx="max", on_epoch=True)
        self.log("total", batch.sum(), reduce_fx="sum", on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_one", 1.0, sync_dist=True)


def test_c16_means_weigh_the_ranks_by_their_samples():
    def task(samples, batch_size):
        trainer = ddp(2, max_epochs=1, log_every_n_steps=1)
        trainer.fit(Sharing(), loader(samples, batch_size), loader(samples, 3))
        return {name: value.item() for name, value in trainer.callback_metrics.items()}

    for found in run_ranks(lambda: task([1, 2, 3, 4, 90], 3)):  # 3 samples on rank 0, 2 on rank 1
        assert found["one_step"] == found["one_epoch"] == found["val_one"] == 1.0
        assert found["mean_step"] == found["mean_epoch"] == 20.0 and found["given"] == 1.5
        assert found["top"] == 90.0 and found["total"] == 100.0
    for found in run_ranks(lambda: task([1, 2, 6], 1)):  # the last step: 1 sample on rank 0; rank 1 repeats it and does not count
        assert found["one_step"] == found["one_epoch"] == 1.0
        assert found["mean_step"] == 6.0 and found["mean_epoch"] == found["given"] == 3.0
        assert found["top"] == 6.0 and found["total"] == 9.0


class Disordered(Scalar):
    """The ranks log the same names in another order, and rank 1 a name of its own."""

    def training_step(self, batch, batch_idx):
        self.write("train_", on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.write("val_")

    def write(self, prefix, **how):
        values = {"a": 1.0, "b": 100.0}
        for name in values if self.global_rank == 0 else reversed(values):
            self.log(prefix + name, values[name], **how)
        self.log(prefix + "zero", self.global_rank + 3.0, rank_zero_only=True, **how)
        if self.global_rank == 1:
            self.log(prefix + "lone", 7.0, prog_bar=True, logger=False, **how)


def test_c17_other_orders_and_lone_names():
    def task():
        trainer = ddp(2, max_epochs=1, log_every_n_steps=1)
        trainer.fit(Disordered(), loader([1, 1, 1, 1]), loader([1, 1]))
        plain = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return plain, sorted(trainer.logged_metrics), sorted(trainer.progress_bar_metrics)

    for numbers, logged, bar in run_ranks(task):
        for prefix, kind in (("train_", ""), ("train_", "_step"), ("train_", "_epoch"), ("val_", "")):
            assert [numbers[f"{prefix}{name}{kind}"] for name in ("a", "b", "zero", "lone")] == [1.0, 100.0, 3.0, 7.0]
        assert not [name for name in logged if "lone" in name]
        assert bar == ["train_lone_epoch", "train_lone_step", "val_lone"]


def test_a_rank_without_a_batch_of_a_loader_knows_where_its_numbers_belong():
    def task():
        return ddp(2).validate(Evaluating(), [loader([1, 2], 1), loader([5], 1)], verbose=False)

    first, second = run_ranks(task)
    assert first == second
    names = ("all", "mean_epoch", "most")  # the numbers of the epoch
    assert [sorted(numbers) for numbers in first] == [[f"{name}/dataloader_idx_{i}" for name in names] for i in (0, 1)]
    assert first[1]["mean_epoch/dataloader_idx_1"] == 5.0


class WithObject(Scalar):
    """Logs a metric object that only rank 0 has batches for."""

    def __init__(self, metric):
        super().__init__()
        self.metric = metric

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.metric(batch)
        self.log("m", self.metric, prog_bar=True, logger=False, on_epoch=True)


def test_metric_objects_of_a_rank_without_a_batch():
    metric = pytest.importorskip("torchmetrics").MeanMetric()

    def task():
        trainer = ddp(2)
        return trainer.validate(WithObject(metric), loader([5.0]), verbose=False), trainer.progress_bar_metrics, trainer.logged_metrics

    assert run_ranks(task) == [([{"m": 5.0}], {"m": 5.0}, {})] * 2


class Disagreeing(Scalar):
    """Alone, rank 0 would stop after epoch 1 and rank 1 after epoch 4; the mean over both improves until epoch 2."""

    values = ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (9.0, 4.0, 2.0, 1.0, 8.0, 9.0))

    def validation_step(self, batch, batch_idx):
        self.log("v", self.values[self.global_rank][self.current_epoch])


def test_c18_early_stopping_decides_alike_on_all_ranks():
    def task():
        stopping = EarlyStopping("v", patience=1, mode="min")
        trainer = ddp(2, max_epochs=6, callbacks=[stopping])
        trainer.fit(Disagreeing(), loader([1, 1]), loader([1, 1]))
        return stopping.stopped_epoch, trainer.current_epoch, trainer.global_step

    assert run_ranks(task) == [(3, 4, 4)] * 2


class Normed(TrainModule):
    """BatchNorm sees other means on each rank; what it holds is recorded whenever somebody could look."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)
        self.records = []

    def training_step(self, batch, batch_idx):
        return self.out(self.norm(batch[:, None])).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", self.out(self.norm(batch[:, None])).square().mean())

    def on_validation_start(self):
        self.records.append(self.norm.running_mean.item())

    def on_save_checkpoint(self, checkpoint):
        self.records.append(checkpoint["state_dict"]["norm.running_mean"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_c25_batch_norm_is_that_of_the_checkpoint_on_every_rank():
    train, val = [1.0, 100.0, 2.0, 120.0, 3.0, 90.0, 5.0, 70.0], [0.1, 2.5, 0.9]

    def task():
        module = Normed()
        saving = ModelCheckpoint(dirpath=".", filename="bn", every_n_train_steps=2)
        trainer = ddp(2, max_epochs=1, callbacks=[saving])
        trainer.fit(module, loader(train, 2), loader(val, 2))
        return trainer.callback_metrics["v"].item(), module.records, module.state_dict(), saving.best_model_path

    first, second = run_ranks(task)
    assert first[0] == second[0] and first[1] == second[1] and first[1][0] == first[1][-1]
    assert first[1][0] == pytest.approx(0.1 * 4.0 + 0.9 * 0.1 * 1.5)  # rank 0 had 1, 2 and 3, 5
    alone = quiet().validate(Normed(), loader(val, 2), ckpt_path=first[3], verbose=False)
    assert alone[0]["v"] == pytest.approx(first[0], abs=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_c26_predictions_come_in_the_order_of_the_data(world_size):
    def task():
        trainer, module = ddp(world_size), Evaluating()
        several = trainer.predict(module, [loader(range(7), 2), loader([8, 9], 2)])
        return trainer.predict(module, loader(range(7), 2)), several, trainer.predict(module, loader(range(7)), return_predictions=False)

    for one, several, nothing in run_ranks(task, world_size):
        assert [p["sample"].tolist() for p in one] == [[0, 1], [2, 3], [4, 5], [6]]
        assert torch.cat([p["twice"] for p in one]).tolist() == [0, 2, 4, 6, 8, 10, 12]
        assert [len(part) for part in several] == [4, 1] and several[1][0]["sample"].tolist() == [8, 9]
        assert nothing is None


def test_a_metric_object_does_not_count_a_sample_that_only_keeps_step():
    def task():
        class Both(Scalar):
            def __init__(self):
                super().__init__()
                self.mean = pytest.importorskip("torchmetrics").MeanMetric()

            def training_step(self, batch, batch_idx):
                self.mean(batch)
                self.log("object", self.mean, on_step=False, on_epoch=True)
                self.log("plain", batch.mean(), on_step=False, on_epoch=True)
                return super().training_step(batch, batch_idx)

        trainer = quiet(strategy="ddp", devices=2, max_epochs=1)
        trainer.fit(Both(), loader([1, 1, 1, 1, 6], 2))
        return [trainer.callback_metrics[name].item() for name in ("object", "plain")]

    assert run_ranks(task) == [[2.0, 2.0], [2.0, 2.0]]
