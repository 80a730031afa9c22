"""Stages of a stack: costs, the best cut against all cuts, the order of work, moves between devices, and what cannot work."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from torch.nn import Linear, Sequential

from trainer import MisconfigurationException, ModelParallelDDPStrategy, TrainModule
from trainer.devices import Devices
from trainer.dist import Dist
from trainer.strategies.stages import Pipeline, balance, layer_costs, move_rest
from trainer.world import World

CPU, META = torch.device("cpu"), torch.device("meta")


def heaviest(costs, ends):
    assert ends[-1] == len(costs)
    runs = [costs[a:b] for a, b in itertools.pairwise([0, *ends])]
    assert all(runs)
    return max(map(sum, runs))


def test_balance_is_the_best_of_all_cuts():
    draw = random.Random(0)
    for _ in range(300):
        costs = [draw.choice([0, 1, 2, 5, 30]) for _ in range(draw.randint(1, 8))]
        stages = draw.randint(1, len(costs))
        cuts = itertools.combinations(range(1, len(costs)), stages - 1)
        assert heaviest(costs, balance(costs, stages)) == min(heaviest(costs, [*cut, len(costs)]) for cut in cuts)


def test_costs_are_weights_and_activations():
    stack = Sequential(Linear(10, 20), torch.nn.BatchNorm1d(20), Sequential(torch.nn.ReLU(), torch.nn.Dropout()), Linear(20, 1))
    stack[3].requires_grad_(False)
    alone = [4 * 220 * 4, 4 * 40 * 4 + 40 * 4 + 8, 0, 21 * 4]  # float32; BatchNorm's buffers: two vectors and an int64
    assert layer_costs(stack) == alone
    before, state = copy.deepcopy(stack.state_dict()), torch.get_rng_state()
    sample = torch.zeros(7, 10, dtype=torch.float64)  # is brought to the weights' format
    outputs = [7 * 20 * 4, 7 * 20 * 4, 2 * 7 * 20 * 4, 7 * 1 * 4]
    assert layer_costs(stack, stack, sample) == [a + b for a, b in zip(alone, outputs, strict=True)]
    assert all(torch.equal(stack.state_dict()[name], t) for name, t in before.items())  # nothing ran: not even BatchNorm's averages
    assert torch.equal(torch.get_rng_state(), state) and not any(part._forward_hooks for part in stack.modules())


def test_a_sample_that_does_not_fit_is_an_error_that_says_so():
    stack = Sequential(Linear(10, 20), Linear(20, 1))
    with pytest.raises(MisconfigurationException, match="could not be measured with the sample.*sample="):
        layer_costs(stack, stack, torch.zeros(2, 9))
    assert not any(part._forward_hooks for part in stack.modules())


class Note(torch.nn.Module):
    def __init__(self, number, seen):
        super().__init__()
        self.number, self.seen = number, seen

    def forward(self, x):
        self.seen.append((self.number, int(x[0]), len(x), x.device.type))
        return x


def test_a_stage_works_on_a_part_while_the_next_one_works_on_the_part_before():
    seen = []
    stack = Sequential(*(Note(i, seen) for i in range(3)))
    output = Pipeline(stack, [1, 3], [CPU, CPU], 3)(torch.arange(7))
    assert torch.equal(output, torch.arange(7))
    assert [entry[:3] for entry in seen] == [
        (0, 0, 3),
        (1, 0, 3), (2, 0, 3), (0, 3, 2),
        (1, 3, 2), (2, 3, 2), (0, 5, 2),
        (1, 5, 2), (2, 5, 2),
    ]  # fmt: skip


def test_parts_move_to_the_device_of_each_stage_and_come_back():
    stack = Sequential(Linear(2, 2).to(META), Linear(2, 2).to(META), torch.nn.Tanh())
    devices = []
    for layer in stack:
        layer.register_forward_hook(lambda m, args, out: devices.append(args[0].device.type))
    batch = torch.zeros(4, 2, device=META)
    assert Pipeline(stack, [1, 3], [META, META], 2)(batch).device == META
    with pytest.raises(NotImplementedError, match="copy out of meta"):  # the way back to the CPU, where this batch came from
        Pipeline(stack, [1, 3], [META, META], 2)(torch.zeros(4, 2))
    assert set(devices) == {"meta"}


def test_containers_of_tensors_are_cut_and_joined():
    class Both(torch.nn.Module):
        def forward(self, both):
            return {"sum": both[0] + both[1], "diff": both[0] - both[1]}

    class Scale(torch.nn.Module):
        def forward(self, both):
            return {name: 2 * value for name, value in both.items()}

    a, b = torch.arange(5.0), torch.ones(5)
    output = Pipeline(Sequential(Both(), Scale()), [1, 2], [CPU, CPU], 2)((a, b))
    assert torch.equal(output["sum"], 2 * (a + b)) and torch.equal(output["diff"], 2 * (a - b))


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean(0)


class Listed(torch.nn.Module):
    def forward(self, x):
        return [x, "text"]


@pytest.mark.parametrize(
    ("layer", "batch", "message"),
    [
        (Mean(), torch.zeros(6, 4), "a tensor of shape"),
        (Listed(), torch.zeros(6, 4), "made str of"),
        (Mean(), (torch.zeros(6), torch.zeros(5)), r"shapes \[\(6,\), \(5,\)\]"),
        (Mean(), torch.zeros(()), r"shapes \[\(\)\]"),
    ],
)
def test_what_cannot_be_cut_or_joined_is_refused(layer, batch, message):
    with pytest.raises(MisconfigurationException, match=message) as caught:
        Pipeline(Sequential(layer, torch.nn.Identity()), [1, 2], [CPU, CPU], 2)(batch)
    assert "micro_batches=1" in str(caught.value)


def test_one_micro_batch_takes_anything():
    assert Pipeline(Sequential(Mean(), torch.nn.Identity()), [1, 2], [CPU, CPU], 1)(torch.ones(6, 4)).shape == (4,)


# -- placing -------------------------------------------------------------------------------------------------------------------


class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        self.body = torch.nn.Module()
        self.body.embed = Linear(2, 4)
        self.body.net = Sequential(Linear(4, 4), Linear(4, 4), Linear(4, 400))
        self.head = Linear(400, 1)


def test_what_is_outside_of_the_stack_moves_alone():
    model = Model()
    names = list(model.state_dict())
    move_rest(model, model.body.net, META)
    assert {n for n, t in model.state_dict().items() if t.device == CPU} == {n for n in names if n.startswith("body.net")}
    assert isinstance(model.scale, torch.nn.Parameter) and list(model.state_dict()) == names


class Pair(ModelParallelDDPStrategy):
    """Owns the CPU and the meta device."""

    def device(self, devices, local_rank):
        self.devices = [CPU, META]
        return CPU


def test_the_strategy_places_the_stages_and_puts_all_back():
    model, strategy = Model(), Pair(2, stack="body.net")
    strategy.setup(model, strategy.device(Devices("cpu", (0, 1)), 0), Dist(World()))
    # the last layer is larger than all others, so it is the second stage; the rest is on the first device
    assert {n for n, t in model.state_dict().items() if t.device == META} == {"body.net.2.weight", "body.net.2.bias"}
    assert isinstance(model.body.net.forward, Pipeline)
    with pytest.raises(NotImplementedError, match="copy out of meta"):  # stage 2 is computed on its device, then handed back
        model.body.net(torch.zeros(3, 4))
    model.body.net[2].to_empty(device=CPU)
    strategy.teardown()
    assert all(t.device == CPU for t in model.state_dict().values()) and "forward" not in vars(model.body.net)
    assert strategy.devices == [CPU, CPU] and strategy.module is None


def test_activations_move_the_cut():
    class Repeat(torch.nn.Module):
        def forward(self, x):
            return x.repeat(1, 50)

    def ends(**more):
        model = Model()
        model.body.net = Sequential(torch.nn.Identity(), Repeat(), Linear(200, 4), Linear(4, 4))
        strategy = Pair(2, stack="body.net", **more)
        strategy.devices = [CPU, CPU]
        strategy.setup(model, CPU, Dist(World()))
        return model.body.net.forward.stages[0][:2]

    assert ends() == (0, 3)  # by weights alone the third layer outweighs all
    assert ends(sample=torch.zeros(1000, 4)) == (0, 2)


def test_the_devices_of_each_process():
    strategy = ModelParallelDDPStrategy(2)
    strategy.check(4, 1)
    assert strategy.processes(4) == 2 and strategy.devices == [CPU, CPU]
    assert strategy.device(Devices("cuda", (4, 5, 6, 7)), 1) == torch.device("cuda", 6)
    assert strategy.devices == [torch.device("cuda", 6), torch.device("cuda", 7)]
    alone = ModelParallelDDPStrategy()
    alone.check(3, 2)
    assert alone.processes(3) == 1 and len(alone.devices) == 3
    with pytest.raises(MisconfigurationException, match="local rank 2 has no device"):
        strategy.device(Devices("cuda", (0, 1)), 1)
