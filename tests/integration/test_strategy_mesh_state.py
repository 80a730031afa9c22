"""Checkpoints of ranks that cut layers are plain and go everywhere; a module is plain after a failure; what cannot work says so."""

from __future__ import annotations

import math
import os
import re

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, Stop
from trainer import MisconfigurationException, ModelParallelStrategy, Trainer, TrainModule, outcome


def mesh(data, tensor, **more):
    return {"strategy": ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, **more), "devices": data * tensor}


def cut(module, plan=("up", "down")):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if module.device_mesh is not None:
        styles = ColwiseParallel(), RowwiseParallel()
        parallelize_module(module, module.device_mesh["tensor_parallel"], dict(zip(plan, styles, strict=False)))


class Split(TrainModule):
    """Cut layers between whole ones, parameter groups in another order, dropout, a buffer, numbers and a metric object."""

    rate = 0.0

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
            self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.drop, self.total = torch.nn.Dropout(self.rate), SumMetric()
        self.register_buffer("seen", torch.zeros(()))

    def configure_model(self):
        cut(self)

    def training_step(self, batch, batch_idx):
        self.seen += self.global_rank + 1  # rank 0's is the one
        x = self.drop(self.first(batch[:, :4]))
        self.total.update(batch[:, 0])
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("sum", batch[:, 0].sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return torch.nn.functional.mse_loss(self.last(self.down(self.up(x).tanh())), batch[:, 4:])

    def configure_optimizers(self):
        late = [p for name, p in self.named_parameters() if name.startswith(("down", "last"))]
        early = [p for name, p in self.named_parameters() if not name.startswith(("down", "last"))]
        return torch.optim.AdamW([{"params": late, "lr": 0.02}, {"params": early}], lr=0.01, amsgrad=True)


class Drawing(Split):
    rate = 0.3


PLACES = {"mesh": mesh(1, 2), "data": mesh(2, 1), "ddp": {"strategy": "ddp", "devices": 2}, "single": {"devices": 1}, "both": mesh(2, 2)}
SHARES = {"mesh": 1, "single": 1, "ddp": 2, "data": 2, "both": 2}


def train(place, folder=None, resume=None, kind=Split, **settings):
    """Six steps, three an epoch, each over the same 4 samples wherever it runs; return weights and numbers."""
    module = kind().double()
    trainer = quiet(**{"max_epochs": 2, "seed": 4, "callbacks": [EveryStep(folder)] if folder else [], **PLACES[place], **settings})
    data = loader(Net.rows(12, torch.float64), 4 // SHARES[place], shuffle=True)
    trainer.fit(module, data, ckpt_path=resume)
    return weights(module), {name: value.item() for name, value in trainer.callback_metrics.items()}


def assert_equal(found, right, atol=1e-12):
    assert_same(found[0], right[0], atol=atol)
    assert found[1].keys() == right[1].keys() and all(math.isclose(found[1][k], right[1][k], abs_tol=1e-12) for k in right[1])


def assert_tables(found, right):
    """Compare nested containers of a checkpoint; every tensor is a plain one on the host."""
    if isinstance(right, dict):
        assert list(found) == list(right)
        for key in right:
            assert_tables(found[key], right[key])
    elif isinstance(right, list):
        for one, other in zip(found, right, strict=True):
            assert_tables(one, other)
    elif isinstance(right, torch.Tensor):
        assert type(found) is torch.Tensor and found.device.type == "cpu"
        torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    else:
        assert found == right


def test_folders_to_which_every_rank_writes_its_parts(tmp_path):
    def task():
        parted = mesh(2, 2, save_distributed_checkpoint=True)
        whole = train("both", tmp_path / "parts", **parted)
        return whole, train("both", resume=tmp_path / "parts" / "step=2.ckpt", **parted)

    for whole, resumed in run_ranks(task, world_size=4):
        assert_equal(resumed, whole, atol=0)
    assert sum(name.endswith(".distcp") for name in os.listdir(tmp_path / "parts" / "step=2.ckpt")) >= 2
    single = train("single")
    assert_equal(train("single", resume=tmp_path / "parts" / "step=4.ckpt"), single)
    with pytest.raises(MisconfigurationException, match="stages of a pipeline are put together by rank 0"):
        ModelParallelStrategy(pipeline_parallel_size=2, stack="net", save_distributed_checkpoint=True)


def test_checkpoints_go_in_all_directions(tmp_path):
    names = ("mesh", "data", "ddp")

    def task():
        whole = {place: train(place, tmp_path / place) for place in names}
        pairs = [("mesh", "mesh", 2), ("mesh", "ddp", 2), ("ddp", "mesh", 1), ("mesh", "data", 3)]
        return whole, [train(place, resume=tmp_path / source / f"step={step}.ckpt") for source, place, step in pairs]

    single = train("single", tmp_path / "single")
    assert single[1]["total"] == pytest.approx(single[1]["sum"])
    for whole, resumed in run_ranks(task):
        for found in (*whole.values(), *resumed):
            assert_equal(found, single)
    assert_equal(train("single", resume=tmp_path / "mesh" / "step=2.ckpt"), single)
    assert_equal(run_ranks(lambda: train("mesh", resume=tmp_path / "single" / "step=2.ckpt"))[1], single)
    files = {place: torch.load(tmp_path / place / "step=4.ckpt", weights_only=True) for place in ("single", *names)}
    for place in names:
        for key in ("state_dict", "optimizer_states", "global_step", "epoch"):
            assert_tables(files[place][key], files["single"][key])


def test_what_dropout_draws_goes_on_as_on_one_device(tmp_path):
    def task():
        whole = train("mesh", tmp_path / "mesh", kind=Drawing)
        return whole, train("mesh", resume=tmp_path / "mesh" / "step=2.ckpt", kind=Drawing), train(
            "mesh", resume=tmp_path / "single" / "step=2.ckpt", kind=Drawing
        )

    single = train("single", tmp_path / "single", kind=Drawing)
    for whole, resumed, crossed in run_ranks(task):
        assert_equal(whole, single)
        assert_equal(resumed, whole, atol=0)
        assert_equal(crossed, single)
    assert_equal(train("single", resume=tmp_path / "mesh" / "step=2.ckpt", kind=Drawing), single)


def test_two_groups_of_two_ranks_resume_and_hand_over_to_ddp(tmp_path):
    def four():
        return train("both", tmp_path / "both", kind=Drawing), train("both", resume=tmp_path / "both" / "step=2.ckpt", kind=Drawing)

    right = run_ranks(lambda: train("ddp", tmp_path / "ddp", kind=Drawing))[0]  # two data groups draw as two ranks of ddp
    for whole, resumed in run_ranks(four, world_size=4):
        assert_equal(whole, right)
        assert_equal(resumed, whole, atol=0)
    for found in run_ranks(lambda: train("ddp", resume=tmp_path / "both" / "step=2.ckpt", kind=Drawing)):
        assert_equal(found, right)


def test_a_failure_of_all_ranks_leaves_a_plain_module():
    class Failing(Split):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 2:
                raise Stop

    class Broken(Split):
        def configure_model(self):
            cut(self)
            raise Stop

    def task():
        found = []
        for kind in (Failing, Broken):
            module = kind().double()
            with pytest.raises(Stop):
                quiet(max_steps=4, **mesh(1, 2)).fit(module, loader(Net.rows(12, torch.float64), 4))
            assert all(type(p) is torch.nn.Parameter for p in module.parameters()) and not module.up._forward_hooks
            found.append(weights(module))
        return found

    module = Split().double()
    quiet(max_steps=2).fit(module, loader(Net.rows(12, torch.float64), 4))
    for failed, broken in run_ranks(task):
        assert_same({**failed, "seen": module.seen}, weights(module))
        assert_same(broken, weights(Split().double()))


def test_a_failure_of_one_rank_leaves_cut_weights_empty():
    class Failing(Split):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 2 and self.global_rank == 1:
                raise Stop

    def task():
        module = Failing().double()
        with pytest.warns(UserWarning, match="Load a checkpoint"), pytest.raises((Stop, RuntimeError)):
            quiet(max_steps=4, **mesh(1, 2)).fit(module, loader(Net.rows(12, torch.float64), 4))
        return {name: p.is_meta for name, p in module.named_parameters() if type(p) is torch.nn.Parameter}

    for found in run_ranks(task):
        assert found == {name: name.startswith(("up", "down")) for name, _ in Split().named_parameters()}


# -- what cannot work ----------------------------------------------------------------------------------------------------------


class Half(Split):
    """Cuts on a mesh of its own."""

    def configure_model(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(self, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(use_local_output=False)})


class Sharded(Split):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.up, mesh=self.device_mesh["data_parallel"])


class Tied(Split):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.down.weight = self.up.weight


class Quasi(Split):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Fused(Split):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


class Early(Split):
    def __init__(self):
        super().__init__()
        self.kept = (list(self.parameters()),)

    def configure_optimizers(self):
        return torch.optim.SGD(self.kept[0], lr=0.1)


class Factored(Split):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=0.1)


RUNS = [
    (Net, {}, r"tensor_parallel_size=2, but no layer of Net was cut.*parallelize_module"),
    (Half, {}, r"up\.weight was cut on another mesh"),
    (Sharded, {}, r"fully_shard does not go with ModelParallelStrategy"),
    (Tied, {}, r"up\.weight and down\.weight were one tensor"),
    (Quasi, {}, "cannot run LBFGS"),
    (Fused, {}, r"SGD\(fused=True\) cannot step cut and whole parameters together"),
    (Early, {}, "holds parameters that are not the module's"),
    (Split, {"precision": "16-mixed"}, r"cannot scale losses.*bf16-mixed"),
    (Split, {"compile": True}, "cannot run compiled code"),
]


def test_runs_that_cannot_work_are_refused_on_every_rank(tmp_path):
    def task():
        found = []
        for kind, settings, _ in RUNS:
            module = kind()
            with pytest.raises(MisconfigurationException) as caught:
                quiet(**{**mesh(1, 2), "max_steps": 2, **settings}).fit(module, loader(Net.rows(8), 4))
            assert all(type(p) is torch.nn.Parameter for p in module.parameters())
            found.append(str(caught.value))
        rows = Net.rows(8)
        with pytest.raises(MisconfigurationException) as caught:
            quiet(max_steps=2, **mesh(1, 2)).fit(Split(), DataLoader(rows, 2, sampler=DistributedSampler(rows, 2, int(os.environ["RANK"]))))
        with pytest.raises(MisconfigurationException, match=r"of parameter \d has the shape .*can load only what has its parameter's shape"):
            quiet(max_steps=2, **mesh(1, 2)).fit(Factored(), loader(rows, 4), ckpt_path=tmp_path / "step=1.ckpt")
        return found, str(caught.value)

    quiet(max_steps=1, callbacks=[EveryStep(tmp_path)]).fit(Factored(), loader(Net.rows(8), 4))

    for found, sampler in run_ranks(task):
        for text, (*_, pattern) in zip(found, RUNS, strict=True):
            assert re.search(pattern, text), text
        assert "need the same samples: part 0 of 1" in sampler


SIZES = [
    ({}, {"devices": 1}, "spreads a model over several ranks, and there is one"),
    ({"tensor_parallel_size": 2}, {"devices": 4}, r"1 x pipeline_parallel_size=1 x tensor_parallel_size=2 make 2 ranks, but there are 4 .*data_parallel_size=2"),
    ({"tensor_parallel_size": 3}, {"devices": 4}, "Choose sizes whose product is the number of ranks"),
    ({}, {"devices": 2, "sync_batchnorm": True}, "would count the samples of a model group once for each of its ranks"),
]


@pytest.mark.parametrize(("sizes", "settings", "text"), SIZES)
def test_sizes_that_do_not_fit_are_refused_at_once(sizes, settings, text):
    with pytest.raises(MisconfigurationException, match=text):
        Trainer(accelerator="cpu", strategy=ModelParallelStrategy(**sizes), **settings)


@pytest.mark.parametrize("sizes", [{"data_parallel_size": 0}, {"tensor_parallel_size": True}, {"pipeline_parallel_size": "auto"}])
def test_sizes_are_whole_numbers(sizes):
    with pytest.raises(MisconfigurationException, match=r"must be a whole number >= 1"):
        ModelParallelStrategy(**sizes)


def test_auto_is_the_nodes_and_the_devices_of_a_node():
    strategy = ModelParallelStrategy()
    strategy.check(8, 2)
    assert strategy.sizes == (2, 1, 8)


def test_layers_that_the_calling_process_could_not_make_are_named():
    class Asking(Net):
        def configure_model(self):
            torch.nn.Linear(1, 1).to(self.device_mesh.device_type)
            self.more = torch.nn.Linear(4, 1)

    module = Asking()
    with pytest.warns(UserWarning, match=r"configure_model made no more\.weight .*Make layers first and cut them afterwards"):
        outcome._load_weights(quiet(), module, {"more.weight": torch.ones(1, 4), "layers.2.bias": torch.ones(1)})
    assert module.layers[2].bias.item() == 1


def test_device_mesh_outside_of_a_run():
    assert Net().device_mesh is None
