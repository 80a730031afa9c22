"""FSDP's checkpoints are plain and interchangeable; the caller's module is plain afterwards; what cannot work says so."""

from __future__ import annotations


import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Net, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, Stop
from trainer import FSDPStrategy


class Adam(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += self.global_rank + 1  # rank 0's is the one
        return self.loss(batch) + self.norm(batch[:1, :4].expand(2, 4) * 1.0).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        late = [p for name, p in self.named_parameters() if "layers.2" in name]
        early = [p for name, p in self.named_parameters() if "layers.2" not in name]
        return torch.optim.AdamW([{"params": late, "lr": 0.02}, {"params": early}], lr=0.01, amsgrad=True)


PLACES = {
    "fsdp": {"strategy": "fsdp", "devices": 2},
    "hybrid": {"strategy": FSDPStrategy(shard_size=1, wrap=()), "devices": 2},
    "ddp": {"strategy": "ddp", "devices": 2},
    "single": {"devices": 1},
}


def train(place, folder=None, resume=None, module=None, **settings):
    """Six steps, three an epoch, each over the same 4 samples wherever it runs; return the weights."""
    module = (module or Adam()).double()
    settings = {"max_epochs": 2, "seed": 4, "callbacks": [EveryStep(folder)] if folder else [], **PLACES[place], **settings}
    data = loader(Net.rows(12, torch.float64), 4 // settings["devices"], shuffle=True)
    quiet(**settings).fit(module, data, loader(Net.rows(3, torch.float64), 2), ckpt_path=resume)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for key, value in right.items():
        if isinstance(value, dict):
            assert_equal(left[key], value)
        elif isinstance(value, list):
            assert_equal(dict(enumerate(left[key])), dict(enumerate(value)))
        elif isinstance(value, torch.Tensor):
            assert type(left[key]) is torch.Tensor and left[key].device.type == "cpu", key
            torch.testing.assert_close(left[key], value, rtol=0, atol=1e-10)
        else:
            assert left[key] == value, key


class Even(Adam):
    """Without statistics of a batch, which differ with its size."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.norm.weight.square().sum() + self.norm.bias.sum()


def test_checkpoints_go_in_all_directions(tmp_path):
    def task():
        whole = {place: train(place, tmp_path / place, module=Even()) for place in ("fsdp", "ddp", "hybrid")}
        resumed = {}
        for source in whole:
            for place in whole:
                for step in (2, 3):
                    resumed[source, place, step] = train(place, resume=tmp_path / source / f"step={step}.ckpt", module=Even())
        return whole, resumed

    single = train("single", tmp_path / "single", module=Even())
    whole, resumed = run_ranks(task)[1]
    for found in (*whole.values(), *resumed.values()):
        assert_equal(found, single)
    for source in whole:  # fsdp -> single
        assert_equal(train("single", resume=tmp_path / source / "step=2.ckpt", module=Even()), single)
    for found in run_ranks(lambda: train("fsdp", resume=tmp_path / "single" / "step=2.ckpt", module=Even())):  # single -> fsdp
        assert_equal(found, single)
    saved = {place: torch.load(tmp_path / place / "step=4.ckpt", weights_only=True) for place in ("single", "fsdp", "hybrid")}
    for place in ("fsdp", "hybrid"):
        for key in ("state_dict", "optimizer_states", "global_step", "epoch"):
            assert_equal({key: saved[place][key]}, {key: saved["single"][key]})
        assert list(saved[place]["state_dict"]) == list(saved["single"]["state_dict"])


def test_c25_buffers_are_rank_zeros_everywhere(tmp_path):
    def task():
        return train("fsdp", tmp_path / "f"), train("ddp", tmp_path / "d")

    for fsdp, ddp in run_ranks(task):
        assert fsdp["seen"] == 6
        assert_equal(fsdp, ddp)
    found, right = (torch.load(tmp_path / name / "step=5.ckpt", weights_only=True)["state_dict"] for name in "fd")
    assert_equal(found, right)


class Placed(Even):
    """Shards layers itself, on the trainer's mesh."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        mesh = self.trainer.strategy.mesh
        if mesh is not None:
            fully_shard(self.layers[0], mesh=mesh)
            self.units = lambda: [n for n, m in self.named_modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)]

    def on_fit_start(self):
        self.found = self.units() if hasattr(self, "units") else []


def test_layers_that_configure_model_sharded(tmp_path):
    def task():
        module = Placed()
        first = train("fsdp", tmp_path, module=module)
        assert module.found == ["", "layers.0"]
        again = train("hybrid", resume=tmp_path / "step=3.ckpt", module=module)  # the same object, sharded a second time
        return first, again, train("fsdp", resume=tmp_path / "step=3.ckpt", module=Placed())

    expected = train("single", module=Even())
    for results in run_ranks(task):
        for found in results:
            assert_equal(found, expected)


def test_the_local_launcher_brings_whole_weights_back(tmp_path):
    module = Even()
    parameters = list(module.parameters())
    found = train("fsdp", module=module, callbacks=[ModelCheckpoint(tmp_path, save_last=True)])
    assert all(a is b and type(a) is torch.nn.Parameter for a, b in zip(module.parameters(), parameters))
    assert_equal(found, train("single", module=Even()))


class Unequal(Net):
    """Made anew, and differently, on each rank, as layers of configure_model are; logs the norm of its gradients."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        torch.nn.init.constant_(self.layers[0].weight, self.global_rank + 1.0)
        torch.nn.init.constant_(self.layers[2].weight, self.global_rank + 1.0)
        fully_shard(self.layers[0], mesh=self.trainer.strategy.mesh)

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))


def test_copies_are_equal_and_a_sharded_number_is_logged_whole():
    def task():
        module = Unequal()
        trainer = quiet(strategy=FSDPStrategy(shard_size=1), devices=2, max_steps=1, log_every_n_steps=1)
        trainer.fit(module, loader(Net.rows(4), 2))
        return module.layers[0].weight.mean().item(), trainer.callback_metrics["norm"].item(), module.layers[2].weight.mean().item()

    def sharded():
        module = Even()
        module.on_before_optimizer_step = lambda o: module.log("norm", torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
        trainer = quiet(**where, max_steps=1, log_every_n_steps=1)
        trainer.fit(module.double(), loader(Net.rows(4, torch.float64), 4 // where["devices"]))
        return trainer.callback_metrics["norm"].item()

    first, second = run_ranks(task)
    assert first == second and abs(first[0] - 1) < 0.5
    found = []
    for where in PLACES.values():
        found += run_ranks(sharded) if where["devices"] == 2 else [sharded()]
    assert max(found) - min(found) < 1e-6 and found[0] > 0.1


class Failing(Even):
    who = (0, 1)

    def on_train_batch_start(self, batch, batch_idx):
        if self.who != "backward" and self.global_rank in self.who and self.global_step == 2:
            raise Stop

    def on_before_backward(self, loss):
        if self.who == "backward" and self.global_step == 2:
            raise Stop


@pytest.mark.parametrize("who", [(0, 1), "backward"])
def test_after_an_exception_on_all_ranks_the_weights_are_whole(who, tmp_path):
    def task():
        whole = train("fsdp", tmp_path)["layers.0.weight"]
        module = Failing()
        module.who = who
        with pytest.raises(Stop):
            train("fsdp", module=module)
        assert type(module) is Failing and all(type(p) is torch.nn.Parameter for p in module.parameters())
        kept = module.layers[0].weight.detach().clone()
        module.who = ()
        again = train("fsdp", module=module, resume=tmp_path / "step=2.ckpt")["layers.0.weight"]  # the object can be used on
        return kept, whole, again

    for kept, whole, again in run_ranks(task):
        assert torch.equal(kept, torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]["layers.0.weight"])
        assert torch.equal(again, whole)


def test_after_an_exception_on_one_rank_there_is_nothing_wrong_to_use():
    def task():
        module = Failing()
        module.who = (1,)
        with pytest.warns(UserWarning, match="Load a checkpoint"), pytest.raises((Stop, RuntimeError)):
            train("fsdp", module=module)
        return all(p.is_meta and type(p) is torch.nn.Parameter for p in module.parameters())

    assert run_ranks(task) == [True, True]  # long before the time-out of a collective, of 30 minutes
