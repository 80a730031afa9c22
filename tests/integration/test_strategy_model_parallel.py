"""model_parallel and model_parallel_ddp train as one process on one device: losses, weights, gradients, clipping, precision."""

from __future__ import annotations

import copy

import pytest
import torch

from callbacks import Callback
from tests.helpers.modules import Net, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand
from tests.helpers.stacked import (
    ThreeFour,
    Wide,
    assert_same,
    fit,
    rows,
    stacked,
    weights,
)
from trainer import ModelParallelDDPStrategy, TrainModule

SHAPES = [(27, 3), (23, 4), (25, 2)]  # samples, accumulated batches; see test_ranks_exact


class Placed(Wide):
    """Places its layers itself, on the devices of its process."""

    def configure_model(self):
        first, second = self.trainer.strategy.devices
        self.layers[0].to(first)
        self.layers[1:].to(second)
        self.seen = [str(first), str(second)]


@pytest.mark.parametrize("kind", [Wide, Placed])
def test_one_process_with_two_devices_equals_the_plain_loop(kind):
    strategy = stacked(each=None) if kind is Wide else "model_parallel"
    for shape in SHAPES:
        module = fit(shape, 4, kind, strategy=strategy, devices=2)
        assert_same(weights(module), weights(train_by_hand(Wide(), rows(shape[0]).split(4), 20, shape[1], clip=0.5)))
        one = fit(shape, 4)
        assert module.losses == pytest.approx(one.losses, abs=1e-12)
        assert "forward" not in vars(module.layers) and type(module.layers[0]) is torch.nn.Linear


def test_two_processes_with_two_devices_each_equal_the_plain_loop():
    def task():
        found = [weights(fit(shape, 2, strategy=stacked(), devices=4)) for shape in SHAPES]
        return [*found, weights(fit(SHAPES[0], 2, Placed, strategy="model_parallel_ddp", devices=4))]

    ranks = run_ranks(task)
    expected = [weights(train_by_hand(Wide(), rows(n).split(4), 20, k, clip=0.5)) for n, k in [*SHAPES, SHAPES[0]]]
    for first, second, right in zip(*ranks, expected, strict=True):
        assert_same(first, second, atol=0)
        assert_same(first, right)


class Itself(TrainModule, torch.nn.Sequential):
    """A module that is a stack."""

    def __init__(self):
        super().__init__()
        self.extend(Net().double().layers)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self(batch[:, :4]), batch[:, 4:])

    configure_optimizers = Net.configure_optimizers


def test_a_module_that_is_a_stack_needs_no_name():
    class Watching(Itself):
        def on_train_start(self):
            self.kind = type(self.forward).__name__

    strategy = ModelParallelDDPStrategy(micro_batches=2)
    module, one = fit(SHAPES[0], 4, Watching, strategy=strategy, devices=3), fit(SHAPES[0], 4, Itself)
    assert_same(weights(module), weights(one))
    assert module.kind == "Pipeline" and "forward" not in vars(module)


class Gradients(Wide):
    def on_before_optimizer_step(self, optimizer):
        self.grads = [p.grad.clone() for p in self.parameters()]


@pytest.mark.parametrize("size", [8, 7, 3, 1])  # four equal parts; uneven ones; fewer samples than parts
def test_c43_two_stages_four_micro_batches_give_the_gradients_of_the_whole_model(size):
    def grads(**settings):
        module = Gradients()
        quiet(max_steps=1, **settings).fit(module, loader(rows(size), size))
        return module.grads

    for one, whole in zip(grads(strategy=stacked(micro=4), devices=2), grads(), strict=True):
        torch.testing.assert_close(one, whole, rtol=0, atol=1e-12)
        assert whole.abs().max() > 1e-3


def test_c44_clipping_uses_the_norm_over_all_stages_on_every_rank():
    def task(devices=4):
        module = ThreeFour()
        strategy = ModelParallelDDPStrategy(2, stack="net", micro_batches=2)
        trainer = quiet(max_steps=1, gradient_clip_val=1.0, strategy=strategy, devices=devices)
        trainer.fit(module, loader(torch.ones(4, 1, dtype=torch.float64), 2))
        return module.before, module.total, [4 - module.net[0].w.item(), 3 - module.net[1].w.item()]

    for before, total, steps in [*run_ranks(task), task(devices=2)]:
        assert before == [3.0, 4.0] and total == 5.0
        assert steps == pytest.approx([0.6, 0.8], abs=1e-6)  # both times 0.2; torch divides by the norm + 1e-6


class Counting(Wide):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "count": len(batch)}


def test_counts_and_manual_optimization():
    class Manual(Wide):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    def task():
        found = []
        for kind in (Counting, Manual):
            module = kind()
            quiet(max_epochs=2, strategy=stacked(), devices=4).fit(module, loader(rows(22), 2))
            found.append(weights(module))
        return found

    expected = weights(train_by_hand(Wide(), rows(22).split(4), 12))
    for found in run_ranks(task):
        for one in found:
            assert_same(one, expected)


def test_bf16_mixed_equals_one_device():
    def run(micro=1, batch_size=4, **settings):
        module = Net()
        quiet(max_epochs=2, precision="bf16-mixed", **settings).fit(module, loader(Net.rows(16), batch_size))
        return weights(module)

    one = run()
    assert_same(run(strategy=stacked(micro=1), devices=2), one, atol=0)
    assert_same(run(strategy=stacked(micro=2), devices=2), one, atol=5e-3)  # sums of the parts are rounded to 8 bits
    joined = run_ranks(lambda: (run(strategy=stacked(micro=1), devices=4, batch_size=2), run(strategy="ddp", devices=2, batch_size=2)))
    for ours, ddp in joined:
        assert_same(ours, ddp, atol=0)


class Averages(Callback):
    """A copy of the module that follows its weights, made and used in the run."""

    def on_fit_start(self, trainer, module):
        self.copy = copy.deepcopy(module.layers)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with torch.no_grad():
            for mine, its in zip(self.copy.parameters(), module.layers.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        self.output = self.copy(batch[:, :4]).detach()


def test_a_copy_made_in_the_run_has_its_own_layers():
    def run(**settings):
        averages = Averages()
        module = Wide()
        quiet(max_epochs=1, callbacks=[averages], **settings).fit(module, loader(rows(8), 4))
        return averages.output, module.layers(rows(8)[4:, :4])

    (ours, own), (one, _) = run(strategy=stacked(), devices=2), run()
    torch.testing.assert_close(ours, one, rtol=0, atol=1e-12)
    assert not torch.allclose(ours, own)
