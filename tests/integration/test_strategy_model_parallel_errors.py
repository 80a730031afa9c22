"""What model_parallel and model_parallel_ddp refuse, and that they leave the module as it was."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Linear, Sequential

from tests.helpers.modules import Net, loader, quiet
from trainer import MisconfigurationException, ModelParallelDDPStrategy


def refused(module, message, devices=2, **arguments):
    with pytest.raises(MisconfigurationException, match=message):
        trainer = quiet(max_steps=1, strategy=ModelParallelDDPStrategy(**arguments), devices=devices)
        trainer.fit(module, loader(Net.rows(4), 4))
    assert "forward" not in vars(module.layers)


@pytest.mark.parametrize("argument", ["devices_per_replica", "micro_batches"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_numbers(argument, value):
    with pytest.raises(MisconfigurationException, match=f"{argument}={value!r} must be a whole number >= 1"):
        ModelParallelDDPStrategy(**{argument: value})


def test_micro_batches_is_a_number():
    with pytest.raises(MisconfigurationException, match="micro_batches=None must be a whole number"):
        ModelParallelDDPStrategy(micro_batches=None)


def test_devices_that_do_not_divide():
    with pytest.raises(MisconfigurationException, match="gives 2 devices to each process, and 3 devices .* Ask for devices=2, 4"):
        quiet(strategy="model_parallel_ddp", devices=3)


def test_micro_batches_without_a_stack():
    refused(Net(), r"micro_batches=2 needs a stack .*there is 'layers'", micro_batches=2)


def test_a_stack_that_does_not_exist():
    refused(Net(), "stack='layer': Net has no such layer. Did you mean 'layers'", stack="layer")


def test_a_layer_that_is_no_stack():
    refused(Net(), "stack='layers.0' is a Linear; .* must be an nn.Sequential", stack="layers.0")


class Skipping(Sequential):
    def forward(self, x):
        return x


def test_a_stack_with_a_forward_of_its_own():
    module = Net()
    module.layers = Skipping(*module.layers)
    refused(module, "is a Skipping; .* without a forward of its own", stack="layers")


def test_ranks_that_would_wait_for_each_other_in_every_micro_batch():
    module = Net()
    module.layers.insert(1, torch.nn.SyncBatchNorm(8))
    refused(module, "layer '1' is a SyncBatchNorm", stack="layers", micro_batches=2)


def test_too_few_layers():
    refused(Net(), r"has 3 layer\(s\), too few for 4 devices", devices=4, stack="layers")


def test_a_tensor_that_two_stages_share():
    module = Net()
    one, two = Linear(4, 4), Linear(4, 4)
    two.weight = one.weight
    module.layers = Sequential(one, torch.nn.Tanh(), two)
    refused(module, "layers.0.weight and layers.2.weight are one tensor", stack="layers")
    module = Net()
    module.tied = module.layers[2].weight  # outside of the stack, so on the first device
    refused(module, "one tensor", stack="layers")


def test_a_parameter_on_a_device_of_others():
    module = Net()
    module.head = Linear(2, 2, device="meta")
    refused(module, r"head.weight is on meta, but this process owns cpu, cpu. Place every layer .*there is 'layers'")


def test_a_sample_that_the_stack_does_not_take():
    refused(Net(), "could not be measured", stack="layers", sample=torch.zeros(2, 3))


def test_an_input_of_the_whole_module_balances_as_well():
    class Called(Net):
        def forward(self, batch):
            return self.layers(batch[:, :4])

    module = Called()
    module.example_input_array = torch.zeros(8, 5)
    quiet(max_steps=1, strategy=ModelParallelDDPStrategy(stack="layers"), devices=2).fit(module, loader(Net.rows(4), 4))
    module.example_input_array = torch.zeros(8, 3)
    refused(module, "could not be measured", stack="layers")
