"""Whole runs through pipeline stages: checkpoints and resuming elsewhere, the launcher, errors, and what is refused."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Net, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.stacked import Wide, assert_same, rows, weights
from trainer import MisconfigurationException, ModelParallelStrategy, StallError, TrainModule


def staged(micro=2, stages=2, stack="layers", **more):
    return ModelParallelStrategy(pipeline_parallel_size=stages, stack=stack, micro_batches=micro, **more)


class Adam(Wide):
    """`Wide` with an output layer outside of the stack, Adam in two groups, and a schedule."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(1, 1).double()
        torch.nn.init.ones_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.out(self.layers(batch[:, :4])), batch[:, 4:])

    def configure_optimizers(self):
        groups = [{"params": self.layers.parameters()}, {"params": self.out.parameters(), "lr": 0.01}]
        optimizer = torch.optim.Adam(groups, lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}]


def go(folder, steps, path=None, batch_size=4, **settings):
    """Train to `steps`, with a checkpoint after 4 of the 6 steps of an epoch; return the weights."""
    module = Adam()
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = quiet(max_steps=steps, callbacks=[saves], gradient_clip_val=0.5, **settings)
    trainer.fit(module, loader(rows(24), batch_size), ckpt_path=path)
    return weights(module)


PIPE = {"devices": 2, "batch_size": 4}
DDP = {"devices": 2, "batch_size": 2, "strategy": "ddp"}


def test_checkpoints_go_to_and_fro_between_pipeline_one_device_and_ddp(tmp_path):
    expected = go(tmp_path / "one", 10)

    def task():
        found = [go(tmp_path / "pipe", 5, strategy=staged(), **PIPE)]
        file = tmp_path / "pipe" / "step=4.ckpt"
        found += [go(tmp_path / "a", 10, file, strategy=staged(), **PIPE), go(tmp_path / "b", 10, file, **DDP)]
        return [*found, go(tmp_path / "c", 10, tmp_path / "one" / "step=4.ckpt", strategy=staged(), **PIPE)]

    ranks = run_ranks(task)
    one, pipe = (torch.load(tmp_path / name / "step=4.ckpt") for name in ("one", "pipe"))
    assert_same(pipe["state_dict"], one["state_dict"])
    mine, right = pipe["optimizer_states"][0], one["optimizer_states"][0]
    assert mine["param_groups"] == right["param_groups"] and list(mine["state"]) == list(right["state"])
    for index, state in right["state"].items():
        assert_same(mine["state"][index], state)
    for found in ranks:
        for one_of in found[1:]:
            assert_same(one_of, expected)
    assert_same(go(tmp_path / "d", 10, tmp_path / "pipe" / "step=4.ckpt"), expected)


def test_a_run_in_processes_of_its_own():
    expected, module = Adam(), Adam()
    quiet(max_steps=4).fit(expected, loader(rows(24), 4))
    trainer = quiet(max_steps=4, devices=2, strategy=staged(), accelerator="cpu")
    trainer.fit(module, loader(rows(24), 4))
    assert_same(weights(module), weights(expected))
    assert trainer.callback_metrics["loss"].item() == pytest.approx(expected.losses[-1], abs=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_of_a_stage_reaches_the_caller_as_it_is(rank):
    class Own(LookupError):
        pass

    class Failing(torch.nn.Tanh):
        def forward(self, x):
            if type(x) is torch.Tensor and x.shape[1] == self.width and torch.is_grad_enabled():
                raise Own("stage")
            return super().forward(x)

    class Broken(Wide):
        def __init__(self):
            super().__init__()
            self.layers.insert(1 if rank == 0 else 3, Failing())
            self.layers[1 if rank == 0 else 3].width = 8 if rank == 0 else 1

    def task():
        quiet(max_steps=1, devices=2, strategy=staged()).fit(Broken(), loader(rows(8), 4))

    with pytest.raises(LookupError, match="stage"):
        run_ranks(task)


def test_a_stage_that_sleeps_ends_the_run_after_the_time_limit():
    class Sleeping(Wide):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and self.global_step == 1:
                time.sleep(120)
            return super().training_step(batch, batch_idx)

    def task():
        quiet(max_steps=3, devices=4, strategy=staged(), timeout=4).fit(Sleeping(), loader(rows(8), 4))

    with pytest.raises(StallError, match="Rank 1 was last seen in training step 1"):
        run_ranks(task, world_size=4)


# -- refused ----------------------------------------------------------------------------------------------------------------


def of(body, base=Wide):
    """Return a module class with `body` as its training step."""
    return type("Made", (base,), {"training_step": body})


class Manual(Wide):
    automatic_optimization = False


class Backward(Wide):
    def backward(self, loss):
        loss.backward()


class Hooked(Wide):
    def on_before_backward(self, loss):
        pass


class Second(Wide):
    """Its first layer gives two tensors."""

    class Pair(torch.nn.Module):
        def forward(self, x):
            return x, x

    class First(torch.nn.Module):
        def forward(self, pair):
            return pair[0]

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Sequential(self.layers, self.Pair()), self.First())


class Valued(Wide):
    """A layer whose shape depends on values."""

    class Positive(torch.nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0]

    def __init__(self):
        super().__init__()
        self.layers.insert(1, self.Positive())


class Synced(Wide):
    def __init__(self):
        super().__init__()
        self.layers.insert(1, torch.nn.SyncBatchNorm(8))


class Newton(Wide):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def skipping(self, batch, batch_idx):
    return self.layers[2](self.layers[1](self.layers[0](batch[:, :4]))).mean() if self.global_rank == 9 else self.layers[0].weight.sum()


def twice(self, batch, batch_idx):
    return self.loss(batch) + self.loss(batch)


def paired(self, batch, batch_idx):
    return self.layers((batch, batch)).mean()


def frozen(self, batch, batch_idx):
    with torch.no_grad():
        return self.loss(batch)


REFUSED = [  # by all ranks, ahead of the first step
    (Wide, {"stack": None}, {}, r"needs a stack of layers.*there is 'layers'"),
    (Wide, {"stack": "layer"}, {}, "has no such layer. Did you mean 'layers'"),
    (Wide, {"stack": "layers.0"}, {}, "is a Linear; to be spread over stages it must be an nn.Sequential"),
    (Synced, {}, {}, "layers.1 is a SyncBatchNorm"),
    (Newton, {}, {}, "cannot run LBFGS"),
    (Manual, {}, {}, "does not go with manual optimization"),
    (Backward, {}, {}, "a backward of your own"),
    (Hooked, {}, {}, "use on_after_backward"),
    (Wide, {}, {"bad_loss": "skip"}, "bad_loss"),
    (Second, {}, {}, "A stage of the pipeline made a tuple"),
    (Valued, {}, {}, "could not be worked out"),
]
STEPS = [  # by one rank, in the first step
    (of(skipping), {}, {}, "did not call the stack"),
    (of(twice), {}, {}, "called the stack a second time"),
    (of(paired), {}, {}, "was given a tuple"),
    (of(frozen), {}, {}, r"under torch.no_grad\(\)"),
]


def test_what_a_pipeline_cannot_do_is_refused():
    def task(kind, form, settings):
        quiet(max_steps=1, devices=2, strategy=staged(**form), **settings).fit(kind(), loader(rows(8), 4))

    def tasks():
        for kind, form, settings, message in REFUSED:
            with pytest.raises(MisconfigurationException, match=message):
                task(kind, form, settings)

    run_ranks(tasks)
    for kind, form, settings, message in STEPS:
        with pytest.raises(MisconfigurationException, match=message):
            run_ranks(task, kind=kind, form=form, settings=settings)


def test_what_is_refused_when_the_strategy_or_the_trainer_is_made():
    for form, message in [
        ({"micro": 0}, "micro_batches=0"),
        ({"micro": True}, "micro_batches=True"),
        ({"schedule": "Interleaved1F1B"}, "must be '1F1B' or 'GPipe'"),
        ({"schedule": "1f2b"}, "must be '1F1B' or 'GPipe'"),
        ({"tensor_parallel_size": 2}, "cannot be in pipeline stages as well"),
        ({"stages": 1}, "is for a pipeline"),
    ]:
        with pytest.raises(MisconfigurationException, match=message):
            staged(**form)
    with pytest.raises(MisconfigurationException, match="ranks"):
        quiet(devices=3, strategy=staged(), accelerator="cpu")
    with pytest.raises(MisconfigurationException, match=r"has 3 layer\(s\), too few for 4 stages"):
        run_ranks(lambda: quiet(max_steps=1, devices=4, strategy=staged(stages=4)).fit(Wide(), loader(rows(8), 4)), world_size=4)


def test_a_pass_outside_of_a_step_runs_through_all_stages_without_gradients():
    class Looking(Wide):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                self.found = self.layers(batch[:, :4])
            with pytest.raises(MisconfigurationException, match="without gradients"):
                self.layers(batch[:, :4])

            with pytest.raises(MisconfigurationException, match="cannot be copied"):
                copy.deepcopy(self.layers)

    def task(**settings):
        module = Looking()
        quiet(max_steps=3, **settings).fit(module, loader(rows(8), 4))
        return module.found

    class Single(Looking):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                self.found = self.layers(batch[:, :4])

    module = Single()
    quiet(max_steps=3).fit(module, loader(rows(8), 4))
    for found in run_ranks(task, devices=2, strategy=staged()):
        torch.testing.assert_close(found, module.found, rtol=0, atol=1e-12)


class Itself(TrainModule, torch.nn.Sequential):
    """A module that is a stack, in which a stage begins with a layer that works in place."""

    def __init__(self):
        super().__init__()
        self.extend(Net().double().layers)
        self[1] = torch.nn.ELU(inplace=True)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self(batch[:, :4]), batch[:, 4:])

    configure_optimizers = Net.configure_optimizers


def test_a_module_that_is_a_stack_and_three_stages():
    def task(**settings):
        module = Itself()
        quiet(max_steps=5, **settings).fit(module, loader(rows(20), 6))
        return weights(module)

    for found in run_ranks(task, world_size=3, devices=3, strategy=ModelParallelStrategy(pipeline_parallel_size=3)):
        assert_same(found, task())


def test_a_batch_that_cannot_be_cut_goes_through_in_one_piece():
    class Constant(Wide):
        def training_step(self, batch, batch_idx):
            return self.loss(batch["rows"]) * batch["constants"].mean()

    def task(**settings):
        module, batches = Constant(), [{"rows": part, "constants": torch.ones(3)} for part in rows(16).split(4)]
        with warnings.catch_warnings(record=True) as seen:
            quiet(max_steps=3, **settings).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        return module.losses, sum("in one piece" in str(warning.message) for warning in seen)

    expected = task()
    (first, told), (second, silent) = run_ranks(task, devices=2, strategy=staged())
    assert first == pytest.approx(expected[0], abs=1e-12) and second == first
    assert (told, silent, expected[1]) == (1, 0, 0)
