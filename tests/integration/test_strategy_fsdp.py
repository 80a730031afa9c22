"""FSDP trains as one process and as ddp do: weights, windows, clipping, numbers, evaluation with uneven shards."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.modules import Net, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand
from trainer import FSDPStrategy, TrainModule

SHAPES = [(27, 3), (23, 4), (25, 2)]  # samples, accumulated batches: short last windows, a last batch without a sample for a rank
FORMS = {
    "fsdp": {},
    "whole": {"wrap": ()},
    "classes": {"wrap": torch.nn.Linear, "reshard_after_forward": False},
    "function": {"wrap": lambda m: getattr(m, "out_features", 0) == 8},
    "copies": {"shard_size": 1},
}
EXACT = {"rtol": 0, "atol": 1e-12}


def weights(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **(tolerance or EXACT))


def train(samples, accumulate, batch_size, module=None, **settings):
    module = (Net() if module is None else module).double()
    kind, names = type(module), {name: id(p) for name, p in module.named_parameters()}
    quiet(max_steps=20, accumulate_grad_batches=accumulate, **settings).fit(module, loader(Net.rows(samples, torch.float64), batch_size))
    assert type(module) is kind and names == {name: id(p) for name, p in module.named_parameters()}  # the same, plain objects
    assert all(not m._forward_hooks and not m._forward_pre_hooks and not m._state_dict_pre_hooks for m in module.modules())
    assert "training_step" not in vars(module) and all(type(p) is torch.nn.Parameter for p in module.parameters())
    return weights(module)


def test_fsdp_equals_the_plain_loop_on_the_joined_batches():
    def task():
        plain = [train(*shape, 2, strategy="fsdp", devices=2, gradient_clip_val=0.5) for shape in SHAPES]
        return plain + [train(*SHAPES[0], 2, strategy=FSDPStrategy(**form), devices=2, gradient_clip_val=0.5) for form in FORMS.values()]

    first, second = run_ranks(task)
    for shape, one, other in zip(SHAPES + SHAPES[:1] * len(FORMS), first, second, strict=True):
        expected = weights(train_by_hand(Net().double(), Net.rows(shape[0], torch.float64).split(4), 20, shape[1], clip=0.5))
        assert_close(one, expected)
        assert_close(other, one, rtol=0, atol=0)


def test_hybrid_sharding_on_four_ranks():
    def task():
        strategy = FSDPStrategy(shard_size=2)
        seen = []

        class Looking(Net):
            def on_fit_start(self):
                seen.append((strategy.mesh.mesh.tolist(), strategy.mesh.mesh_dim_names, self.layers[0].weight.to_local().shape))

        found = train(27, 3, 1, module=Looking(), strategy=strategy, devices=4, gradient_clip_val=0.5)
        assert strategy.mesh is None
        return found, seen

    for found, seen in run_ranks(task, world_size=4):
        assert seen == [([[0, 1], [2, 3]], ("replicate", "shard"), (4, 4))]
        assert_close(found, weights(train_by_hand(Net().double(), Net.rows(27, torch.float64).split(4), 20, 3, clip=0.5)))


class Value(Net):
    """Clips by value, logs, counts its samples, and steps through a closure of its own."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True)
        return {"loss": loss, "count": len(batch)}

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_counts_closures_and_clipping_by_value():
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}

    def task():
        return train(25, 2, 2, module=Value(), strategy="fsdp", devices=2, **settings)

    expected = train(25, 2, 4, module=Value(), **settings)
    for found in run_ranks(task):
        assert_close(found, expected)


class Odd(TrainModule):
    """Tied weights across blocks, a frozen layer, a parameter that no loss uses, blocks that are smaller than the ranks."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)])
        self.first.weight = self.last.weight = self.blocks[1].weight
        self.blocks[0].requires_grad_(False)
        self.idle = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        x = self.first(batch[:, :4]).tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return (self.last(batch[:, :4]).mean(1) + x[:, 0] - batch[:, 4]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def test_tied_frozen_and_unused_parameters():
    def task():
        found = train(27, 3, 2, module=Odd(), strategy="fsdp", devices=2, gradient_clip_val=0.5)
        module = Odd()
        quiet(max_steps=1, strategy="fsdp", devices=2).fit(module, loader(Net.rows(8), 2))
        assert module.first.weight is module.last.weight is module.blocks[1].weight
        assert [p.requires_grad for p in module.blocks[0].parameters()] == [False, False] and module.idle.tolist() == [1, 1, 1]
        return found

    expected = train(27, 3, 4, module=Odd(), gradient_clip_val=0.5)
    for found in run_ranks(task):
        assert_close(found, expected)


def test_ranks_that_use_different_parameters():
    class Branching(Net):
        def __init__(self):
            super().__init__()
            self.branch = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return loss + self.branch(batch[:, :4]).mean() if self.global_rank == 1 else loss

    def task():
        torch.manual_seed(0)
        ddp = train(24, 1, 2, module=Branching(), strategy="ddp_find_unused_parameters_true", devices=2)
        torch.manual_seed(0)
        fsdp = train(24, 1, 2, module=Branching(), strategy=FSDPStrategy(find_unused_parameters=True), devices=2)
        return ddp, fsdp

    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch has no such option; the error says so")
    for ddp, fsdp in run_ranks(task):
        assert_close(fsdp, ddp)


class Norm(Net):
    """BatchNorm, numbers, validation, test and prediction."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.seen, self.losses, self.after = [], [], None

    def forward(self, x):
        return self.layers(self.norm(x))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self(batch[:, :4]), batch[:, 4:])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.seen.append(len(batch))
        self.log("val", self(batch[:, :4]).mean())
        self.log("direct", self.layers[0].weight.sum() + batch.mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[:, 0] + 0 * self(batch[:, :4]).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def numbers(strategy, devices, val=7, **settings):
    """Fit with validation in the epoch, then validate, test and predict; return all that comes out."""
    module = Norm().double()
    trainer = quiet(
        strategy=strategy, devices=devices, max_epochs=2, val_check_interval=2, num_sanity_val_steps=1, log_every_n_steps=1, seed=1, **settings
    )
    data, few = loader(Net.rows(20, torch.float64), 4 // devices), loader(Net.rows(val, torch.float64), 2)
    trainer.fit(module, data, few)
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trained = weights(module)
    checks = trainer.validate(module, few, verbose=False), trainer.test(module, few, verbose=False)
    return {
        "metrics": found, "losses": module.losses, "weights": trained, "evaluations": checks, "predictions": torch.cat(trainer.predict(module, few)),
        "order": Net.rows(val, torch.float64)[:, 0],
    }  # fmt: skip


@pytest.mark.parametrize("val", [7, 2])  # 4 batches for two ranks; one batch: rank 1 has none
def test_numbers_and_evaluation_equal_ddp(val):
    def task():
        return numbers("ddp", 2, val), numbers("fsdp", 2, val), numbers(FSDPStrategy(wrap=()), 2, val, inference_mode=False)

    for ddp, *others in run_ranks(task):
        for found in others:
            torch.testing.assert_close(found["metrics"], ddp["metrics"], **EXACT)
            torch.testing.assert_close(found["losses"], ddp["losses"], **EXACT)
            assert_close(found["weights"], ddp["weights"])
            torch.testing.assert_close(found["evaluations"], ddp["evaluations"], **EXACT)
            assert torch.equal(found["predictions"], found["order"])


def test_a_rank_without_validation_batches_trains_on_with_the_others():
    class Validated(Net):  # all its weights are in parts, none in the module itself
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch))

    def task(strategy="fsdp", devices=2):
        module = Validated().double()
        trainer = quiet(strategy=strategy, devices=devices, max_epochs=3, val_check_interval=2)
        trainer.fit(module, loader(Net.rows(16, torch.float64), 4 // devices), loader(Net.rows(2, torch.float64), 2))
        return weights(module)

    for found in run_ranks(task):
        assert_close(found, task("auto", 1))


def test_uneven_validation_is_the_mean_over_all_samples():
    class Mean(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val", batch[:, 0].mean() + 0 * self.layers(batch[:, :4]).sum())

    def task():
        trainer = quiet(strategy="fsdp", devices=2)
        rows = torch.arange(1.0, 6.0).repeat_interleave(5).view(5, 5)
        return [trainer.validate(Mean(), loader(rows[:n], 2), verbose=False)[0]["val"] for n in (5, 1)]

    assert run_ranks(task) == [[3.0, 1.0]] * 2


def mixed(strategy, devices, precision):
    class Counted(Norm):
        steps = 0

        def on_before_optimizer_step(self, optimizer):
            self.steps += 1

    module = Counted()
    quiet(strategy=strategy, devices=devices, max_steps=12, precision=precision, gradient_clip_val=0.5).fit(module, loader(Net.rows(24), 2))
    return weights(module)


def test_mixed_precision():
    def task():
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        own = quiet(strategy=FSDPStrategy(mixed_precision=policy), devices=2, max_steps=12)
        module = Net()
        own.fit(module, loader(Net.rows(24), 2))
        own = quiet(strategy="fsdp", devices=2, max_steps=12)
        full = Net()
        own.fit(full, loader(Net.rows(24), 2))
        names = ("bf16-mixed", "16-mixed")
        return [(mixed("fsdp", 2, name), mixed("ddp", 2, name)) for name in names], weights(module), weights(full), weights(Net())

    for pairs, policy, full, start in run_ranks(task):
        for fsdp, ddp in pairs:
            assert_close(fsdp, ddp, rtol=0, atol=1e-5)
        assert_close(policy, full, rtol=0, atol=3e-2)
        assert all(t.dtype == torch.float32 for t in policy.values()) and not torch.equal(policy["layers.0.weight"], full["layers.0.weight"])
        assert not torch.allclose(policy["layers.0.weight"], start["layers.0.weight"], atol=1e-2)
