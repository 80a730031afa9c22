"""dp: replicas in one process train exactly as one device does on the whole batch; what they log, return, lose and refuse."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.helpers.modules import Net, Scalar, assert_same, loader, quiet, weights
from tests.helpers.reference import train_by_hand
from trainer import DataParallelStrategy, MisconfigurationException, MixedPrecision

F64 = torch.float64
KINDS = [("dp", 2), ("dp", 3), ("dp", 20), (DataParallelStrategy(concurrent=True), 3), (DataParallelStrategy(device_ids=[2, 0]), 3)]


def dp(devices=2, **settings):
    return quiet(**{"accelerator": "cpu", "strategy": "dp", "devices": devices, **settings})


def fit(module, data, devices=2, **settings):
    """Train with dp on `devices`, or on a single device for None; return the trainer."""
    place = {"strategy": "single_device", "devices": 1} if devices is None else {"devices": devices}
    trainer = dp(**{"max_epochs": 1, **place, **settings})
    trainer.fit(module, data)
    return trainer


class Curve(Net):
    """Remembers the loss of each step, in `curve`, and whether a replica ran it, in `who`."""

    def __init__(self):
        super().__init__()
        self.curve, self.who = [], set()

    def training_step(self, batch, batch_idx):
        self.who.add((threading.current_thread().name, getattr(self, "_is_replica", False)))
        self.log("loss", loss := self.loss(batch), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        assert threading.current_thread() is threading.main_thread() and not hasattr(self, "_is_replica")
        self.log("val", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return batch[:, 0]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.curve.append(outputs["loss"].item())


# -- equal to one device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "devices"), KINDS)
@pytest.mark.parametrize(("samples", "accumulate"), [(27, 1), (25, 3), (23, 4)])  # a last batch of 3, of 1, a short window
def test_curve_and_weights_equal_those_of_the_whole_batch(strategy, devices, samples, accumulate):
    rows, one, many = Net.rows(samples, F64), Curve().double(), Curve().double()
    settings = {"max_steps": 30, "max_epochs": -1, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "log_every_n_steps": 1}
    first = fit(one, loader(rows, 4), None, **settings)
    second = fit(many, loader(rows, 4), devices, strategy=strategy, **settings)
    assert_same(weights(many), weights(one))
    assert_same(weights(many), weights(train_by_hand(Net().double(), rows.split(4), 30, accumulate, clip=0.5)))
    assert torch.allclose(torch.tensor(many.curve), torch.tensor(one.curve), rtol=0, atol=1e-6)
    assert second.callback_metrics.keys() == first.callback_metrics.keys() >= {"loss_step", "loss_epoch"}
    for name, value in first.callback_metrics.items():
        assert abs(second.callback_metrics[name] - value) < 1e-6
    parts = max(len(batch.chunk(len(second.strategy._devices))) for batch in rows.split(4))
    assert {name for name, replica in many.who if replica} == {f"dp-replica-{i}" for i in range(parts)}


def test_one_process_and_one_device_are_the_module_itself():
    trainer = dp(7)
    assert trainer.strategy.processes(7) == 1 and trainer.world_size == 1
    module = Curve()
    fit(module, loader(Net.rows(8), 4), 1)
    assert module.who == {("MainThread", False)}


def test_c12_state_dicts_are_plain_and_the_module_stays_whole(tmp_path):
    module, plain = Curve(), Net()
    children = list(module.modules())
    trainer = fit(module, loader(Net.rows(8), 4))
    trainer.save_checkpoint(tmp_path / "dp.ckpt")
    assert torch.load(tmp_path / "dp.ckpt")["state_dict"].keys() == plain.state_dict().keys()
    assert_same(weights(Curve.load_from_checkpoint(tmp_path / "dp.ckpt")), weights(module))
    assert all(a is b for a, b in zip(module.modules(), children, strict=True)) and not hasattr(module, "_is_replica")
    assert all(isinstance(p, torch.nn.Parameter) and p.is_leaf for p in module.parameters())


def test_evaluation_uses_the_module_on_the_first_device():
    rows = Net.rows(7, F64)
    module, trainer = Curve().double(), dp(2, max_epochs=1)
    trainer.fit(module, loader(rows, 4), loader(rows, 2))
    mean = sum(module.loss(row[None]) for row in rows) / 7
    assert abs(trainer.callback_metrics["val"] - mean) < 1e-6
    assert torch.equal(torch.cat(trainer.predict(module, loader(rows, 2))), rows[:, 0])


class Lbfgs(Curve):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


class Overridden(Curve):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [Lbfgs, Overridden])
def test_paths_with_a_closure(kind):
    found = []
    for devices in (None, 3):
        module = kind().double()
        trainer = fit(module, loader(Net.rows(12, F64), 4), devices, log_every_n_steps=1, accumulate_grad_batches=2)
        found.append((weights(module), trainer.callback_metrics["loss_epoch"]))
    assert_same(found[1][0], found[0][0], atol=1e-9)
    assert abs(found[1][1] - found[0][1]) < 1e-6


def test_a_step_that_takes_the_batch_alone():
    class Alone(Scalar):
        def training_step(self, batch):
            return (self.w * batch).mean()

    module = Alone()
    fit(module, loader([1, 2, 3], 3))
    assert module.w.item() == pytest.approx(-2.0)


# -- precision -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_replicas_compute_in_the_precision_of_the_run(precision, dtype, concurrent):
    class Seen(Curve):
        dtypes = set()  # noqa: RUF012

        def training_step(self, batch, batch_idx):
            self.dtypes.add((self.layers(batch[:, :4]).dtype, torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

    one, many, again = Seen(), Seen(), Seen()
    strategy = DataParallelStrategy(concurrent=concurrent)
    for module, devices in ((one, None), (many, 2), (again, 2)):
        place = {} if devices is None else {"strategy": strategy}
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if precision == "16-mixed" else None
        place["plugins"] = MixedPrecision(precision, "cpu", scaler)
        fit(module, loader(Net.rows(16), 4), devices, max_epochs=5, gradient_clip_val=1.0, **place)
    assert Seen.dtypes == {(dtype, True)}
    assert_same(weights(many), weights(one), atol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(many.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(many.parameters(), Net().parameters(), strict=True))


def test_c31_an_overflow_skips_the_step():
    class Infinite(Scalar):
        def training_step(self, batch, batch_idx):
            return (self.w * batch).mean() * (float("inf") if batch_idx == 0 else 1.0)

    module = Infinite()
    trainer = fit(module, loader([1, 2, 3, 4], 2), precision="16-mixed")
    assert module.w.item() == -3.5 and trainer.precision_plugin.scaler.get_scale() == 2.0**15


def test_64_true_makes_new_tensors_wide_in_the_threads():
    class Wide(Curve):
        def training_step(self, batch, batch_idx):
            assert torch.zeros(1).dtype == batch.dtype == F64
            return super().training_step(batch, batch_idx)

    one, many = Wide(), Wide()
    fit(one, loader(Net.rows(9), 4), None, precision="64-true")
    fit(many, loader(Net.rows(9), 4), 2, precision="64-true")
    assert_same(weights(many), weights(one))


# -- what a step returns ---------------------------------------------------------------------------------------------------


class Counting(Scalar):
    """Batches are (values, mask): the mean is over the values under the mask, of which a part may have none."""

    kind = staticmethod(int)

    def training_step(self, batch, batch_idx):
        values, mask = batch["pair"]
        count = mask.sum()
        assert batch["note"] == "a constant" and batch["scale"].ndim == 0
        loss = (self.w * values * mask * batch["scale"]).sum() / count.clamp(min=0 if self.kind in (int, float) else 1)
        return {"loss": loss, "count": self.kind(count), "seen": values.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs = outputs


@pytest.mark.parametrize("kind", [int, float, lambda count: count], ids=["int", "float", "tensor"])
def test_c29_counts_are_summed_over_replicas(kind):
    values, mask = torch.tensor([1.0, 2, 3, 6, 5]), torch.tensor([1.0, 1, 1, 0, 0])  # parts of 2, 2 and 1 samples; the last counts none
    batch = {"pair": (values, mask), "note": "a constant", "scale": torch.tensor(1.0)}
    rest = {"pair": (values + 5, mask.flip(0)), "note": "a constant", "scale": torch.tensor(1.0)}
    module = Counting()
    module.kind = kind
    fit(module, [batch, rest], 3, accumulate_grad_batches=2)
    assert module.w.item() == pytest.approx(-(1 + 2 + 3 + 8 + 11 + 10) / 6, abs=1e-6)
    assert int(module.outputs["count"]) == 3 and [len(part) for part in module.outputs["seen"]] == [2, 2, 1]


def test_none_from_some_replicas_or_all():
    class Skipping(Scalar):
        def training_step(self, batch, batch_idx):
            return None if batch[0] < 0 else (self.w * batch).mean()

    module = Skipping()
    trainer = fit(module, loader([-1, -1, 3, 5], 4))
    assert module.w.item() == -4.0 and trainer.global_step == 1
    module = Skipping()
    fit(module, loader([-1, -1, -1, -1, 2, 2, 2, 2], 4))
    assert module.w.item() == -2.0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda loss, first: 3, "returned int"),
        (lambda loss, first: loss.detach() if first else loss, "detached"),
        (lambda loss, first: {"x": loss} if first else loss, "a dict with the keys 'x'"),
        (lambda loss, first: {"loss": loss, "count": "many"}, "'count' as str"),
        (lambda loss, first: loss.expand(2), "shape"),
        (lambda loss, first: {"loss": loss, "count": 1} if first else loss, "on some replicas and not on others"),
    ],
)
def test_c51_what_cannot_be_a_loss_is_named(answer, said):
    class Odd(Scalar):
        def training_step(self, batch, batch_idx):
            return answer((self.w * batch).mean(), bool(batch[0] == 1))

    with pytest.raises(MisconfigurationException, match=said):
        fit(Odd(), loader([1, 2], 2))


# -- batches ---------------------------------------------------------------------------------------------------------------


def test_batches_that_cannot_be_cut():
    class Any(Scalar):
        def training_step(self, batch, batch_idx):
            assert threading.current_thread() is threading.main_thread()
            return self.w * 1.0

    with pytest.warns(UserWarning, match="no tensor with samples"):
        fit(Any(), [["a", "b"], [torch.tensor(1.0)]])
    fit(Any(), loader([1, 2], 1))
    with pytest.raises(MisconfigurationException, match=r"shape \(4, 1\) and \(3,\) differ"):
        fit(Any(), [{"x": torch.ones(4, 1), "y": torch.ones(3)}])


# -- logging ---------------------------------------------------------------------------------------------------------------


class Logs(Scalar):
    """Logs in every way; the later replica is the faster one."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02 / (1 + batch[0].item()))
        value = batch.mean()
        self.log("mean", value, on_step=True, on_epoch=True)
        value.zero_()  # what was logged is the value at that time
        self.log_dict({"sum": float(batch.sum()), "one": 1}, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("max", batch.max(), reduce_fx="max")
        self.log("two", batch[0], batch_size=2)
        if batch[0] > 2:
            self.log("late", batch[0])
        self.log("first" if batch[0] == 1 else "other", 1.0)
        return (self.w * batch).mean()


@pytest.mark.parametrize("concurrent", [False, True])
def test_replicas_log_as_one_step_in_their_order(concurrent):
    trainer = fit(Logs(), loader([1, 2, 3, 4, 5], 5), 3, strategy=DataParallelStrategy(concurrent=concurrent), log_every_n_steps=1)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found == {
        "mean_step": 3.0, "sum": 15.0, "one": 3.0, "max": 5.0, "two": 3.0, "first": 1.0, "late": pytest.approx(11 / 3),
        "other": 1.0, "mean_epoch": 3.0, "mean": 3.0,
    }  # fmt: skip
    assert list(trainer.logged_metrics)[:3] == ["mean_step", "max", "two"]
