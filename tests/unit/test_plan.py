"""What a plan says of models whose figures can be worked out by hand, what it refuses, and how it is printed, saved and ordered."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import trainer.planning
from tests.helpers.modules import Net
from trainer import (
    DDPStrategy,
    FSDPStrategy,
    MisconfigurationException,
    ModelParallelDDPStrategy,
    ModelParallelStrategy,
    TrainModule,
    compare_plans,
    plan,
)
from trainer.planning import Transfer

ROOT = Path(__file__).parents[2]
ROWS = torch.zeros(16, 5)
WEIGHTS = 4 * (4 * 8 + 8 + 8 + 1)  # bytes of Net's parameters


class Wide(TrainModule):
    """Two layers of 512 x 512 without bias, Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 512, bias=False))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layers(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


X = torch.zeros(32, 512)
MATRIX = 4 * 512 * 512


def test_figures_by_hand():
    found = plan(Wide, X)
    memory = found.memory
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.buffers) == (2 * MATRIX, 2 * MATRIX, 4 * MATRIX + 2 * 4, 0)
    assert memory.activations == 2 * 4 * 32 * 512  # what goes into each layer
    assert memory.total == memory.state + memory.activations
    assert found.flops == 2 * 32 * 512 * 512 * 5  # two products forward, three backward: the batch needs no gradient
    assert found.transfers == ()
    assert found.seconds() is None


def test_the_model_is_left_as_it_is():
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    plan(module, ROWS, "ddp", 8)
    assert all(torch.equal(value, before[name]) and type(value) is torch.Tensor for name, value in module.state_dict().items())
    assert module._trainer is None
    assert not torch_dist.is_initialized()


def test_a_model_without_memory():
    with torch.device("meta"):
        module = Net()
    assert plan(module, ROWS.to("meta")).memory == plan(Net, ROWS).memory == plan(Net(), ROWS).memory


def test_tied_weights_count_once():
    class Tied(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].weight = self.layers[0].weight

    for model in (Tied, Tied()):
        assert plan(model, X).memory.parameters == MATRIX


@pytest.mark.parametrize(("precision", "weight"), [("64-true", 8), ("bf16-true", 2), ("bf16-mixed", 4), ("16-mixed", 4)])
def test_number_formats(precision, weight):
    assert plan(Net, ROWS, precision=precision).memory.parameters == WEIGHTS // 4 * weight


def test_ddp_sends_gradients_once():
    found = plan(Wide, X, DDPStrategy(bucket_cap_mb=1), 1024, bandwidth=1e9)
    assert [t.bytes for t in found.transfers] == [MATRIX + 32, MATRIX]  # the first with what ranks wish
    assert found.memory.communication == 2 * MATRIX + 32
    assert found.seconds() == pytest.approx(2 * 1023 / 1024 * (2 * MATRIX + 32) / 1e9)
    assert plan(Wide, X, DDPStrategy(gradient_as_bucket_view=True), 2).memory.communication == 0


def test_accumulated_batches_are_sent_once():
    once, often = (plan(Wide, X, "ddp", 2, accumulate_grad_batches=n) for n in (1, 4))
    assert often.transfers == once.transfers
    assert often.flops == 4 * once.flops


def test_shards_of_1024_ranks():
    found = plan(Wide, X, FSDPStrategy(shard_size=8), 1024, num_nodes=128, bandwidth={"shard": 4e11, "replicate": 5e10, "data": 5e10})
    assert found.mesh == {"replicate": 128, "shard": 8}
    assert (found.memory.parameters, found.memory.gradients) == (2 * MATRIX // 8, 2 * MATRIX // 8)
    sent = found.communicated()
    assert sent["all_gather", "shard"] == (4, 4 * MATRIX)  # forward and backward
    assert sent["reduce_scatter", "shard"] == (2, 2 * MATRIX)
    assert sent["all_reduce", "replicate"] == (2, 2 * MATRIX // 8)
    expected = 6 * MATRIX * 7 / 8 / 4e11 + 2 * 127 / 128 * 2 * MATRIX / 8 / 5e10
    assert found.seconds() == pytest.approx(expected + 2 * 1023 / 1024 * 8 / 5e10)


ROW = 4 * 512


def test_devices_of_a_process_by_hand(tmp_path):
    found = plan(Wide, X, ModelParallelDDPStrategy(2, "layers", micro_batches=2), 4, bandwidth=1e9)
    assert (found.world_size, found.micro_batches, len(found.devices)) == (2, 2, 2)
    for s, device in enumerate(found.devices):
        state = (device.parameters, device.gradients, device.optimizer, device.buffers, device.communication)
        assert state == (MATRIX, MATRIX, 2 * MATRIX + 4, 0, MATRIX + (32 if s == 0 else 0))  # on the first also what ranks wish
        assert device.activations == 32 * ROW  # both halves of what goes into the layer
    for name in ("parameters", "gradients", "optimizer", "activations", "communication", "total"):
        assert getattr(found.memory, name) == sum(getattr(device, name) for device in found.devices)
    # Two halves go to the second device and back to the first, and so do their gradients.
    assert found.communicated() == {("copy", "device"): (8, 8 * 16 * ROW), ("all_reduce", "data"): (2, 2 * MATRIX + 32)}
    assert found.seconds() == pytest.approx((8 * 16 * ROW + 2 * MATRIX + 32) / 1e9)
    # A half of the batch is kept for the second device; of the first, the halves are views of one batch.
    assert [device.recomputed for device in found.devices_checkpointed] == [32 * ROW, 16 * ROW]
    assert found.checkpointed.total == sum(device.total for device in found.devices_checkpointed)
    assert found.flops == plan(Wide, X).flops
    assert found.flops_in_line() == found.flops * 3 / 4  # a half, both halves at once, a half
    stage = plan(Wide, X, strategy=ModelParallelStrategy(pipeline_parallel_size=2, stack="layers", micro_batches=2), world_size=2, rank=0)
    assert stage.micro_batches == 2 and stage.flops_in_line() == stage.flops * 3 / 2  # it waits for the other while the last part is there
    found.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["devices"][1]["total"] == found.devices[1].total
    assert "of it all of device 1" in str(found)


def test_what_both_devices_need_is_there_twice():
    class Rectified(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Sequential(self.layers[0], torch.nn.ReLU()), self.layers[1])
            self.scale = torch.nn.Parameter(torch.ones(512))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return (self.layers(batch) * self.scale).mean()

    found = plan(Rectified, X, ModelParallelDDPStrategy(2, "layers"), 2)
    # The batch, what ReLU put out, and the output that came back to be scaled; on the other a copy of what ReLU put out.
    assert [device.activations for device in found.devices] == [3 * 32 * ROW, 32 * ROW]
    assert [device.parameters for device in found.devices] == [MATRIX + ROW, MATRIX]
    assert found.transfers == (Transfer("copy", 32 * ROW, "device", 2),) * 4
    assert plan(Rectified, X).memory.activations == 3 * 32 * ROW


def test_layers_go_where_the_strategy_balances_them():
    class Uneven(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(n, m, bias=False) for n, m in [(512, 64), (64, 64), (64, 512), (512, 512)]))

    found = plan(Uneven, X, ModelParallelDDPStrategy(2, "layers"), 2)
    assert [device.parameters for device in found.devices] == [(64 + 8 + 64) * ROW, 512 * ROW]


def test_devices_of_a_process_in_order():
    found = compare_plans(Wide, X, 8, 12 * MATRIX, bandwidth=1e9, speed=1e12, stack="layers")
    by_name = {choice.strategy: choice for choice in found.choices}
    times = [choice.seconds(1e12) / choice.plan.batches for choice in found.choices if choice.fits]
    assert len(times) == 3
    assert times == sorted(times)
    assert found.best.strategy == "ddp"
    spread = by_name["model_parallel_ddp, 2 devices"]
    assert spread.fits
    assert "a step takes 4 batches" in spread.reason
    assert spread.total == spread.plan.devices[0].total < by_name["ddp"].total
    assert spread.seconds(1e12) < by_name["ddp"].seconds(1e12)  # of a step, of half as many batches
    assert "too few for 4 devices" in by_name["model_parallel_ddp, 4 devices"].reason
    tight = compare_plans(Wide, X, 2, 6 * MATRIX, strategies=["ddp"], stack="layers")
    assert [(c.strategy, c.fits) for c in tight.choices] == [("model_parallel_ddp, 2 devices", True), ("ddp", False)]


def test_a_checkpointed_layer_is_computed_again_up_to_what_backward_needs():
    found = plan(Wide, X, activation_checkpointing="layers")
    assert found.layers == ("layers",)
    assert found.checkpointed.activations == 4 * 32 * 512  # what goes into the first
    assert found.checkpointed.recomputed == found.memory.activations == 2 * 4 * 32 * 512
    assert found.flops_checkpointed == found.flops + 2 * 32 * 512 * 512  # the first, whose output the second needs
    assert plan(Wide, X).layers == ("layers.0", "layers.1")


@pytest.mark.parametrize(
    ("transfer", "wire"),
    [("all_reduce", 150.0), ("all_gather", 75.0), ("reduce_scatter", 75.0), ("all_to_all", 75.0), ("broadcast", 100), ("send", 100), ("recv", 0)],
)
def test_what_a_ring_sends(transfer, wire):
    assert Transfer(transfer, 100, "data", 4).wire == wire
    assert Transfer(transfer, 100, "data", 1).wire == 0


# -- out -----------------------------------------------------------------------------------------------------------------------


def test_table_and_file(tmp_path):
    found = plan(Wide, X, "ddp", 4, bandwidth=1e9)
    text = str(found)
    assert "Wide, strategy ddp, 4 rank(s), precision 32-true" in text
    assert "optimizer                                   4.194 MB" in text
    found.save(tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["memory"]["total"] == found.memory.total
    assert saved["transfers"][0] == {"operation": "all_reduce", "bytes": MATRIX + 32, "dimension": "data", "ranks": 4}
    assert saved["seconds"] == found.seconds()


def test_strategies_in_order(tmp_path):
    state = 8 * MATRIX  # weights, gradients and Adam's two averages
    roomy = compare_plans(Wide, X, 8, 20 * MATRIX, num_nodes=2, bandwidth=1e9, speed=1e12)
    assert [(c.strategy, c.fits) for c in roomy.choices] == [("ddp", True), ("fsdp, shard_size=4", True), ("fsdp", True)]
    assert roomy.best.strategy == "ddp"
    assert roomy.best.seconds(1e12) == pytest.approx(roomy.best.plan.seconds() + roomy.best.plan.flops / 1e12)
    tight = compare_plans(Wide, X, 8, state, num_nodes=2)
    assert [c.strategy for c in tight.choices if not c.fits] == ["ddp"]
    assert "weights, gradients and optimizer alone are 8.389 MB" in tight.choices[-1].reason
    assert compare_plans(Wide, X, 8, "1kB").best is None
    tight.save(tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text())["choices"][0]["fits"] is True
    assert "does not fit" in str(tight)
    several = compare_plans(Wide, X, 6, "1GiB", strategies=["ddp", FSDPStrategy(shard_size=4)])
    assert several.choices[1].reason.startswith("not possible: FSDPStrategy(shard_size=4) does not divide the 6 ranks")
    assert several.memory == 2**30


# -- refused -------------------------------------------------------------------------------------------------------------------


class Reads(Wide):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layers(batch[batch[:, 0] > 0]).mean()


class Asks(Wide):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.layers(batch).mean()
        return loss if loss.item() > 0 else -loss


class Misfits(Wide):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layers(batch[:, :7]).mean()


class Manual(Wide):
    automatic_optimization = False


class Lossless(Wide):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None


class Closures(Wide):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((Reads, X), {}, r"Reads.training_step cannot be planned: the operation aten\.nonzero"),
        ((Asks, X), {}, r"Asks.training_step cannot be planned: the operation aten\._local_scalar_dense"),
        ((Misfits, X), {}, r"Misfits.training_step cannot be planned: it failed on tensors without values at the operation aten.mm.default.*reduction dim"),
        ((Manual, X), {}, "manual optimization cannot be planned"),
        ((Lossless, X), {}, "Lossless.training_step returned no loss, but a NoneType"),
        ((Closures, X), {}, "LBFGS cannot be planned"),
        ((torch.nn.Linear(2, 2), X), {}, "must be a TrainModule or a function that makes one, got a Linear"),
        ((Wide, X, "ddp", 6), {"num_nodes": 4}, "world_size=6 does not divide by num_nodes=4"),
        ((Wide, X, FSDPStrategy(shard_size=4), 6), {}, r"shard_size=4\) does not divide the 6 ranks"),
        ((Wide, X, ModelParallelStrategy(2, 2), 6), {}, "data_parallel_size=2 x pipeline_parallel_size=1 x tensor_parallel_size=2 make 4 ranks"),
        ((Wide, X, ModelParallelStrategy(pipeline_parallel_size=4, stack="layers"), 4), {}, "2 layer.s., too few for 4 stages"),
        ((Wide, X, ModelParallelStrategy(pipeline_parallel_size=2), 2), {}, "names the nn.Sequential"),
        ((Wide, X, ModelParallelDDPStrategy(2), 4), {}, "can be planned with a stack"),
        ((Wide, X, ModelParallelDDPStrategy(2, "layers"), 3), {}, "3 devices on a node do not divide"),
        ((Wide, X, ModelParallelDDPStrategy(2, "layers"), 4), {"rank": 2}, "must be one of the ranks 0 to 1"),
        ((Wide, X, ModelParallelDDPStrategy(2, "layers"), 4), {"bandwidth": {"data": 1.0}}, "no number for 'device'"),
        ((Wide, X, ModelParallelDDPStrategy(2, "layers", comm_hook=print), 4), {}, r"ModelParallelDDPStrategy\(comm_hook=...\) cannot be planned"),
        ((Wide, X, "dp", 1), {}, "strategy='dp' cannot be planned. These can"),
        ((Wide, X, DDPStrategy(comm_hook=print), 2), {}, "comm_hook=...\\) cannot be planned"),
        ((Wide, X, "ddp", 0), {}, r"world_size=0\) must be a whole number"),
        ((Wide, X, "ddp", 2), {"rank": 2}, "must be one of the ranks 0 to 1"),
        ((Wide, X, "ddp", 2), {"bandwidth": {"shard": 1.0}}, "no number for 'data'"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(arguments, settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        plan(*arguments, **settings)
    assert not torch_dist.is_initialized()


def test_memory_that_is_none():
    with pytest.raises(MisconfigurationException, match="must be a number of bytes"):
        compare_plans(Wide, X, 2, "80 apples")
    with pytest.raises(MisconfigurationException, match=r"aten\.nonzero"):
        compare_plans(Reads, X, 2, "80GB")


def test_inside_a_process_group():
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(MisconfigurationException, match="has joined one already"):
            plan(Wide, X)
    finally:
        torch_dist.destroy_process_group()


# -- the command line ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from trainer import TrainModule, plan

class Model(TrainModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def batch():
    return torch.zeros(2, 8)

assert callable(plan)
if __name__ == "__main__":
    raise SystemExit("trained")
"""


def test_the_command_in_a_process_of_its_own(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trainer.plan", str(tmp_path / "script.py:Model"), "--arg", "width=8", "--batch-shape", "2,8", "--memory", "1GB"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1. single_device" in done.stdout


def test_the_command(tmp_path, capsys, monkeypatch):
    from trainer.planning.command import main

    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").write_text(SCRIPT)
    script = str(tmp_path / "script.py")
    assert main([f"{script}:Model", "--arg", "width=8", "--batch", "batch", "--strategy", "ddp", "--world-size", "4", "--json", str(tmp_path / "p.json")]) == 0
    assert "Model, strategy ddp, 4 rank(s)" in capsys.readouterr().out
    assert json.loads((tmp_path / "p.json").read_text())["memory"]["parameters"] == 4 * 9
    for arguments, message in [
        (["Modell", "--memory", "1GB", "--batch", "batch"], "no class or function 'Modell'. Did you mean 'Model'?"),
        (["Model", "--batch", "batch"], "Give --memory"),
        (["Model", "--memory", "1GB"], "no train_dataloader and no example_input_array"),
        (["Model", "--memory", "1GB", "--batch-shape", "2,x"], "must be whole numbers"),
        (["Model", "--strategy", "ddp", "--shard-size", "2", "--batch", "batch"], "belongs to --strategy fsdp"),
        (["Model", "--strategy", "ddp", "--stack", "net", "--batch", "batch"], "--stack belongs to a comparison"),
        (["Model", "--strategy", "ddp", "--arg", "8", "--batch", "batch"], "must be NAME=VALUE"),
    ]:
        assert main([f"{script}:{arguments[0]}", *arguments[1:]]) == 1
        assert message in capsys.readouterr().err
    assert main(["nothing.py:Model", "--memory", "1GB"]) == 1
    assert main(["Model", "--memory", "1GB"]) == 1


def test_the_name_is_the_function_in_either_order():
    with pytest.raises(ImportError, match="from trainer import plan"):
        importlib.import_module("trainer.plan")
    assert trainer.plan is plan is trainer.planning.plan
