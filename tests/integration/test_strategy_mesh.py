"""Tensor parallel ranks, and groups of them, train as one process does: weights, windows, clipping, numbers, evaluation, predictions."""

from __future__ import annotations

import os

import pytest
import torch
from torchmetrics import CatMetric, SumMetric

from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand
from trainer import ModelParallelStrategy, TrainModule

SHAPES = [(27, 3), (23, 4)]  # samples, accumulated batches: short last windows, a last batch without a sample for a data group
EXACT = {"rtol": 0, "atol": 1e-12}


class Split(TrainModule):
    """A layer, a norm whose activations are cut along the samples, an MLP cut by columns and rows, a layer; or all of it plain."""

    start = 0

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3 + self.start * int(os.environ.get("RANK", "0")))  # `start`: other weights on each rank
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
            self.norm = torch.nn.LayerNorm(8)
            torch.nn.init.normal_(self.norm.weight)
            self.up, self.down = torch.nn.Linear(8, 13), torch.nn.Linear(13, 8)
        self.drop = torch.nn.Dropout(0.0)

    def configure_model(self):
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

        if self.device_mesh is not None:
            mesh = self.device_mesh["tensor_parallel"]
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
                "down": RowwiseParallel(),
            }
            parallelize_module(self, mesh, plan)
            self.spread = lambda x: DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    def forward(self, x):
        x = self.drop(self.first(x))
        mesh = self.device_mesh
        return self.last(self.down(self.up(self.norm(x if mesh is None else self.spread(x))).tanh()))

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self(batch[:, :4]), batch[:, 4:])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def mesh(data, tensor, **more):
    return {"strategy": ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, **more), "devices": data * tensor}


def train(samples, accumulate, batch_size, module=None, **settings):
    """Fit and return the weights; the module must be a plain one again, with the same parameters."""
    module = (Split() if module is None else module).double()
    names = {name: id(p) for name, p in module.named_parameters()}
    quiet(**{"max_steps": 10, "accumulate_grad_batches": accumulate, **settings}).fit(module, loader(Net.rows(samples, torch.float64), batch_size))
    assert names == {name: id(p) for name, p in module.named_parameters()}
    assert all(type(t) in (torch.nn.Parameter, torch.Tensor) for t in module.state_dict(keep_vars=True).values())
    assert all(not m._forward_hooks and not m._forward_pre_hooks and "_distribute_module_applied" not in vars(m) for m in module.modules())
    return weights(module)


class Counted(Split):
    """Other weights on every rank, counts its samples, clips by value, draws in a dropout, uses a parameter on some ranks only."""

    start = 1

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.25)
        self.odd = torch.nn.Parameter(torch.ones(2))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx % 2:
            loss = loss + self.odd.sum()
        return {"loss": loss, "count": len(batch)}


COUNTED = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", "seed": 5}


def test_tensor_parallel_equals_the_plain_loop():
    def task():
        plain = [train(*shape, 4, gradient_clip_val=0.1, **mesh(1, 2)) for shape in SHAPES]
        return *plain, train(25, 2, 4, module=Counted(), **COUNTED, **mesh(1, 2))

    expected = [weights(train_by_hand(Split().double(), Net.rows(n, torch.float64).split(4), 10, k, clip=0.1)) for n, k in SHAPES]
    expected.append(train(25, 2, 4, module=Counted(), **COUNTED))
    first, second = run_ranks(task)
    for one, other, right in zip(first, second, expected, strict=True):
        assert_same(one, right)
        assert_same(other, one, atol=0)


class Recording(Split):
    """Keeps the samples that this rank saw."""

    def __init__(self):
        super().__init__()
        self.samples = []

    def training_step(self, batch, batch_idx):
        self.samples.append(batch[:, 0].tolist())
        return super().training_step(batch, batch_idx)


def test_two_data_groups_of_two_ranks():
    def task():
        module = Recording()
        torch.manual_seed(int(os.environ["RANK"]))  # no seed of the run: the ranks of a group still draw alike
        found = train(27, 3, 2, module=module, gradient_clip_val=0.1, **mesh(2, 2))
        draws = torch.rand(1).item()
        return found, module.samples, draws, [train(n, k, 2, gradient_clip_val=0.1, **mesh(2, 2)) for n, k in SHAPES[1:]]

    ranks = run_ranks(task, world_size=4)
    rows = Net.rows(27, torch.float64)
    right = weights(train_by_hand(Split().double(), rows.split(4), 10, 3, clip=0.1))
    other = weights(train_by_hand(Split().double(), Net.rows(23, torch.float64).split(4), 10, 4, clip=0.1))
    for found, _, _, (more,) in ranks:
        assert_same(found, right)
        assert_same(found, ranks[0][0], atol=0)
        assert_same(more, other)
    seen, draws = [samples for _, samples, *_ in ranks], [draw for *_, draw, _ in ranks]
    assert draws[0] == draws[1] != draws[2] == draws[3]
    assert seen[0] == seen[1] and seen[2] == seen[3]  # one model group, one set of samples
    epoch = [[x for batch in samples[:7] for x in batch] for samples in (seen[0], seen[2])]
    assert not set(epoch[0]) & set(epoch[1]) - {epoch[1][-1]} and set(epoch[0]) | set(epoch[1]) == set(rows[:, 0].tolist())


class Numbers(Split):
    """Numbers and metric objects of all kinds, evaluation, prediction."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.25)
        self.total, self.samples, self.own = SumMetric(), CatMetric(), SumMetric()
        self.direct, self.losses = [], []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("summed", batch.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        return loss

    def on_fit_start(self):
        self.late = SumMetric()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.late.update(batch[:, 0])
        self.log("late", self.late, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.log("epochs", 1.0, reduce_fx="sum")

    def validation_step(self, batch, batch_idx):
        self.total.update(batch[:, 0])
        self.samples.update(batch[:, 0])
        self.own.update(batch[:, 0])
        self.log("total", self.total)
        self.log("val", (self(batch[:, :4]) - batch[:, 4:]).square().mean())
        self.log("lowest", batch.min(), reduce_fx="min")
        self.log("part", self.up.weight.sum() + batch.mean())
        self.log("count", float(len(batch)), reduce_fx="sum")

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.direct.append((self.own.compute().item(), sorted(self.samples.compute().tolist())))
        self.own.reset()
        self.samples.reset()

    def predict_step(self, batch, batch_idx):
        return batch[:, 0] + 0 * self(batch[:, :4]).sum()


def numbers(data, val=7, **settings):
    """Fit with validation in the epoch, then validate, test and predict; return all that comes out."""
    module = Numbers().double()
    trainer = quiet(max_epochs=2, val_check_interval=2, num_sanity_val_steps=1, log_every_n_steps=1, seed=1, **settings)
    few = loader(Net.rows(val, torch.float64), 2)
    trainer.fit(module, loader(Net.rows(20, torch.float64), 4 // data), few)
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trained = weights(module)
    checks = trainer.validate(module, few, verbose=False), trainer.test(module, few, verbose=False)
    return {
        "metrics": found, "weights": trained, "evaluations": checks, "direct": module.direct, "predictions": torch.cat(trainer.predict(module, few)),
        "order": Net.rows(val, torch.float64)[:, 0],
    }  # fmt: skip


def assert_numbers(found, right):
    for key in ("metrics", "evaluations", "direct"):
        torch.testing.assert_close(found[key], right[key], **EXACT)
    assert_same(found["weights"], right["weights"])
    assert torch.equal(found["predictions"], found["order"])


def test_numbers_of_one_model_group_equal_one_device_also_where_it_draws():
    right = numbers(1)
    for found in run_ranks(lambda: numbers(1, **mesh(1, 2))):
        assert_numbers(found, right)


@pytest.mark.parametrize("val", [7, 2])  # 4 batches for two data groups; one batch: the second has none
def test_numbers_of_data_groups_equal_ddp(val):
    def task():
        return numbers(2, val, strategy="ddp", devices=2), numbers(2, val, **mesh(2, 1))

    for right, found in run_ranks(task):
        assert_numbers(found, right)


def test_numbers_of_data_groups_of_several_ranks_equal_ddp():
    right = run_ranks(lambda: numbers(2, strategy="ddp", devices=2))[0]
    for found in run_ranks(lambda: numbers(2, **mesh(2, 2)), world_size=4):
        assert_numbers(found, right)


def test_bf16_mixed():
    def mixed(**settings):
        module = Split()
        quiet(max_steps=12, precision="bf16-mixed", gradient_clip_val=0.5, **settings).fit(module, loader(Net.rows(24), 4))
        return weights(module)

    right = mixed()
    for found in run_ranks(lambda: mixed(**mesh(1, 2))):
        assert_same(found, right, atol=2e-2)
        assert all(t.dtype == torch.float32 for t in found.values())
        assert not torch.allclose(found["up.weight"], Split().up.weight, atol=2e-2)


def test_manual_optimization_averages_over_data_groups():
    class Manual(Split):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()

    right = train(27, 1, 4, gradient_clip_val=0.1)
    for found in run_ranks(lambda: (train(27, 1, 4, module=Manual(), **mesh(1, 2)), train(27, 1, 2, module=Manual(), **mesh(2, 1)))):
        for one in found:
            assert_same(one, right)


def test_from_a_plain_program_with_layers_made_in_configure_model():
    class Later(Split):
        def __init__(self):
            super().__init__()
            del self.up, self.down

        def configure_model(self):
            if not hasattr(self, "up"):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(7)
                    self.up, self.down = torch.nn.Linear(8, 13).double(), torch.nn.Linear(13, 8).double()
            super().configure_model()

        def predict_step(self, batch, batch_idx):
            return batch[:, 0] + 0 * self(batch[:, :4]).sum()

    def fit(module, **settings):
        trainer, data = quiet(max_steps=4, **settings), loader(Net.rows(12, torch.float64), 4)
        trainer.fit(module, data)
        return weights(module), torch.cat(trainer.predict(module, data))

    right, order = fit(Later().double())
    found, predicted = fit(module := Later().double(), **mesh(1, 2))
    assert_same(found, right)
    assert torch.equal(predicted, order) and torch.equal(order, Net.rows(12, torch.float64)[:, 0])
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())


class Later(Split):
    """Trains cut layers at first, by steps over lists; whole ones join their group's optimizer after an epoch."""

    def configure_optimizers(self):
        for layer in (self.first, self.norm, self.last):
            layer.requires_grad_(False)
        return torch.optim.AdamW([*self.up.parameters(), self.down.weight], lr=0.01, foreach=True)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            joining = [p for p in self.parameters() if not p.requires_grad]
            self.optimizers().add_param_group({"params": [*(p.requires_grad_() for p in joining), self.down.bias]})
            self.trainer.rewrap()


def test_parameters_that_join_an_optimizer_later_may_be_cut_and_whole():
    def task():
        return train(8, 1, 4, Later(), max_steps=5, **mesh(1, 2))

    expected = train(8, 1, 4, Later(), max_steps=5)
    for found in run_ranks(task):
        assert_same(found, expected)
