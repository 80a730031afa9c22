"""Pipeline stages train as one process on one device: losses, weights, windows, clipping, precision, numbers, evaluation."""

from __future__ import annotations

import pytest
import torch

from callbacks import EMAWeightAveraging
from tests.helpers.modules import loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.stacked import ThreeFour, Wide, assert_same, rows, weights
from trainer import ModelParallelStrategy, TrainModule

SHAPES = [(27, 3), (23, 4), (25, 2)]  # samples, accumulated batches: short last windows, batches that do not divide


def staged(micro=4, stages=2, stack="net", **more):
    return ModelParallelStrategy(pipeline_parallel_size=stages, stack=stack, micro_batches=micro, **more)


class Deep(TrainModule):
    """A stack between a layer and a head that share a weight, and a way around the stack; logs, validates, predicts."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.enter, self.leave = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False)
            self.leave.weight = torch.nn.Parameter(torch.randn(4, 8) / 4)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Linear(6, 8))
            self.back, self.idle = torch.nn.Linear(8, 8), torch.nn.Linear(2, 2)
        self.back.weight = self.extra = torch.nn.Parameter(torch.eye(8))
        self.double()
        self.losses, self.norms = [], []

    def score(self, batch):
        x = self.enter(batch[:, :4]) @ self.extra
        try:
            y = self.net(x)
        except Exception:  # what ends the step on the first stage is nothing that user code should catch
            y = x
        return self.leave(self.back(y).tanh() + x)[:, :1]

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.score(batch), batch[:, 4:])

    def training_step(self, batch, batch_idx):
        self.log("first", batch.mean(), on_step=True, on_epoch=True)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))
        self.log("total", batch.sum(), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self.score(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def fit(samples, accumulate=1, batch_size=4, module=None, steps=12, val=None, dtype=torch.float64, **settings):
    module = Deep() if module is None else module
    trainer = quiet(**{"max_steps": steps, "accumulate_grad_batches": accumulate, "log_every_n_steps": 1, **settings})
    trainer.fit(module, loader(rows(samples).to(dtype), batch_size), None if val is None else loader(rows(val), 3))
    assert all(not t.is_meta for t in (*module.parameters(), *module.buffers())) and "forward" not in vars(module.net)
    assert module.back.weight is module.extra
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module), module.losses, numbers


def same(found, expected, atol=1e-12):
    assert_same(found[0], expected[0], atol)
    assert found[1] == pytest.approx(expected[1], abs=atol)
    assert found[2] == pytest.approx(expected[2], abs=atol)


def test_two_stages_equal_one_device():
    def task():
        found = [fit(*shape, devices=2, strategy=staged(), gradient_clip_val=0.5, val=7) for shape in SHAPES]
        return [*found, fit(*SHAPES[0], devices=2, strategy=staged(3, schedule="gpipe"), gradient_clip_val=0.5, val=7)]

    ranks = run_ranks(task)
    expected = [fit(*shape, gradient_clip_val=0.5, val=7) for shape in [*SHAPES, SHAPES[0]]]
    assert {"val", "total", "first_step", "loss_epoch"} < set(expected[0][2])
    for first, second, right in zip(*ranks, expected, strict=True):
        same(first, right)
        same(second, first, atol=0)


class Gradients(Deep):
    def on_before_zero_grad(self, optimizer):
        self.order = ["zero_grad"]

    def on_after_backward(self):
        self.order.append("after_backward")

    def on_before_optimizer_step(self, optimizer):
        assert self.order == ["zero_grad", "after_backward"]
        self.grads = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [8, 7, 1])  # four equal parts; one, as 7 has no divisor up to 4; one sample
def test_c43_two_stages_four_micro_batches_give_the_gradients_of_the_whole_model(size):
    def task(**settings):
        module = Gradients()
        quiet(max_steps=1, **settings).fit(module, loader(rows(size), size))
        return module.grads

    expected, ranks = task(), run_ranks(task, devices=2, strategy=staged())
    assert {"extra", "net.0.weight", "net.3.weight"} < set(expected) and "idle.weight" not in expected
    assert set(ranks[0]) | set(ranks[1]) == set(expected) and "net.3.weight" not in ranks[0]
    for found in ranks:
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)


def test_c44_stage_gradients_of_norm_3_and_4_are_clipped_together():
    class Clipped(ThreeFour):
        def on_before_optimizer_step(self, optimizer):
            pass

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.before = {n: p.grad.item() for n, p in self.named_parameters() if p.grad is not None}
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            self.after = {n: p.grad.item() for n, p in self.named_parameters() if p.grad is not None}

    def task():
        module = Clipped()
        quiet(max_steps=1, devices=2, strategy=staged(), gradient_clip_val=1.0).fit(module, loader(torch.ones(4, dtype=torch.float64), 4))
        return module.before, module.after

    first, second = run_ranks(task)
    assert first[0] == {"net.0.w": 3.0} and second[0] == {"net.1.w": 4.0}
    assert first[1] == pytest.approx({"net.0.w": 0.6}, abs=1e-6) and second[1] == pytest.approx({"net.1.w": 0.8}, abs=1e-6)
    assert first[1]["net.0.w"] / 3.0 == second[1]["net.1.w"] / 4.0


class Seeing(Deep):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(batch[:, 0].tolist())


def test_c45_two_stages_times_two_data_groups():
    def task():
        module = Seeing()
        found = fit(27, 3, 2, module, val=7, gradient_clip_val=0.5, devices=4, strategy=staged(2))
        trainer = quiet(devices=4, strategy=staged(2))
        return found, module.seen, trainer.predict(module, loader(rows(7), 1)), trainer.validate(module, loader(rows(7), 1), verbose=False)

    ranks = run_ranks(task, world_size=4)
    module = Deep()
    expected = fit(27, 3, 4, module, val=7, gradient_clip_val=0.5)
    one = quiet()
    predictions, numbers = one.predict(module, loader(rows(7), 1)), one.validate(module, loader(rows(7), 1), verbose=False)
    for found, seen, predicted, validated in ranks:
        assert_same(found[0], expected[0])
        assert found[2] == pytest.approx(expected[2], abs=1e-12)
        assert len(predicted) == 7
        for mine, right in zip(predicted, predictions, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)
        assert validated[0] == pytest.approx(numbers[0], abs=1e-12)
    seen = [rank[1] for rank in ranks]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert not {x for batch in seen[0] for x in batch} & {x for batch in seen[2] for x in batch}


class Counting(Deep):
    """Counts some of its samples, hands something out, and steps through a closure of its own."""

    def training_step(self, batch, batch_idx):
        kept = batch[:, 0] > -0.8
        count = int(kept.sum())
        loss = ((self.score(batch)[:, 0] - batch[:, 4]).square() * kept).sum() / max(count, 1)
        self.log("kept", float(count), reduce_fx="sum")
        return {"loss": loss, "count": count, "rows": len(batch)}

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.norms.append((float(outputs["count"]), outputs.get("rows")))


def test_counts_closures_and_other_outputs():
    def task():
        module = Counting()
        return fit(25, 2, 6, module, devices=2, strategy=staged(3)), module.norms

    module = Counting()
    expected, (first, second) = fit(25, 2, 6, module), run_ranks(task)
    for found, norms in (first, second):
        same(found, expected)
        assert [count for count, _ in norms] == [count for count, _ in module.norms]
    assert second[1][0] == (module.norms[0][0], [2, 2, 2]) and first[1][0][1] is None  # what else a step gives is on the last stage


class Normed(Deep):
    """BatchNorm in the stack and outside of it, and a frozen first layer."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, torch.nn.BatchNorm1d(8).double())
        self.around = torch.nn.BatchNorm1d(1).double()
        self.net[0].requires_grad_(False)

    def score(self, batch):
        return self.around(super().score(batch))


class Halved(Normed):
    """The same on one device, in the parts that the pipeline makes of a batch."""

    def training_step(self, batch, batch_idx):
        return torch.stack([super(Halved, self).training_step(part, batch_idx) for part in batch.chunk(2)]).mean()


def test_batchnorm_averages_and_frozen_layers():
    settings = {"steps": 6, "val": 6, "callbacks": [EMAWeightAveraging(decay=0.7)]}

    def task():
        return fit(24, 1, 8, Normed(), devices=2, strategy=staged(2), **settings)

    expected = fit(24, 1, 8, Halved(), **settings)
    assert expected[0]["around.num_batches_tracked"] == 12
    for found in run_ranks(task):
        assert_same(found[0], expected[0])
        assert found[2]["val"] == pytest.approx(expected[2]["val"], abs=1e-12)


def test_bf16_mixed_rounds_as_the_accumulation_of_the_parts_does():
    def task(accumulate, batch_size, **settings):
        module = Wide().float()
        trainer = quiet(max_steps=8, accumulate_grad_batches=accumulate, **settings)
        trainer.fit(module, loader(rows(24).float(), batch_size))
        return weights(module)

    expected, full = task(2, 4, precision="bf16-mixed"), task(2, 4)
    for found in run_ranks(task, accumulate=1, batch_size=8, precision="bf16-mixed", devices=2, strategy=staged(2, stack="layers")):
        assert_same(found, expected, atol=1e-6)
    assert max((full[name] - tensor).abs().max() for name, tensor in expected.items()) > 1e-4


class Overflowing(Deep):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 1:  # too much for 16 bits in the gradient of the last stage alone
            loss = loss + self.net[3].bias.sum() * torch.inf
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.norms.append(self.enter.weight.detach().clone())


def test_a_stage_whose_gradients_overflow_makes_all_skip_the_step():
    def task():
        module = Overflowing().float()
        fit(24, 1, 8, module, steps=3, dtype=torch.float32, precision="16-mixed", devices=2, strategy=staged(2))
        return [not torch.equal(a, b) for a, b in zip(module.norms, module.norms[1:], strict=False)]

    assert run_ranks(task) == [[False, True]] * 2
