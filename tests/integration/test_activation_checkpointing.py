"""Activation checkpointing of chosen layers: the same numbers to the bit, less memory, and a module that stays what it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.helpers.modules import assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from trainer import (
    DDPStrategy,
    MisconfigurationException,
    ModelParallelDDPStrategy,
    TrainModule,
)


class Block(torch.nn.Module):
    """Holds more inside (32 wide, dropped out) than its input (8 wide)."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.drop = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8), torch.nn.Dropout(0.2)
        self.norm = torch.nn.BatchNorm1d(32, momentum=None) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


class Deep(TrainModule):
    """Three blocks in a stack; counts what autograd keeps for backward in the last training step."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
            self.blocks = torch.nn.Sequential(*(Block(norm) for _ in range(3)))
        self.kept = 0

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.last(self.blocks(self.first(batch[:, :4]))), batch[:, 4:])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.kept, seen = 0, {id(p) for p in self.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in seen and id(tensor._base) not in seen:  # what only backward keeps alive
                self.kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def rows(count: int = 34) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def fit(choice: Any, norm: bool = False, **settings: Any) -> tuple[Deep, Any]:
    module = Deep(norm)
    trainer = quiet(max_epochs=2, precision="64-true", seed=7, accumulate_grad_batches=2, activation_checkpointing=choice, **settings)
    trainer.fit(module, loader(rows(), batch_size=6))
    return module, trainer


def all_blocks(name: str, layer: torch.nn.Module) -> bool:
    return name.startswith("blocks.") and isinstance(layer, Block)


@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "batchnorm"])
def test_same_numbers_to_the_bit_and_less_memory(norm: bool) -> None:
    """BatchNorm with momentum=None averages over all batches it saw: a statistic that moved twice would show in every later one."""
    plain, trainer = fit(None, norm)
    saved, again = fit("blocks.*", norm)
    assert_same(weights(saved), weights(plain), atol=0)
    assert again.callback_metrics == trainer.callback_metrics
    batch, inputs = 4, 3 * 8 + 4 + 8  # the last batch has 34 % 6 samples; each block, and the two layers around, keep their input
    assert saved.kept <= batch * (inputs + 2) < plain.kept / 4  # 2: of the loss


@pytest.mark.parametrize("choice", [Block, [Block], (torch.nn.LayerNorm, Block), ["blocks.[01]", "blocks.2"], all_blocks])
def test_ways_to_choose_layers(choice: Any) -> None:
    assert fit(choice)[0].kept == fit("blocks.*")[0].kept


def passed_on(x: torch.Tensor) -> torch.Tensor:
    return x


def test_the_module_is_as_before_and_its_copies_run_their_own_layers() -> None:
    copies: list[Any] = []

    class Copying(Deep):
        def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
            if not copies:
                copies.extend([copy.deepcopy(self), pickle.loads(pickle.dumps(self.blocks))])

    module = Copying()
    keys, classes = list(module.state_dict()), [type(m) for m in module.modules()]
    before = [set(vars(m)) | ({"forward"} if m is module.blocks[1] else set()) for m in module.blocks.modules()]
    module.blocks[1].forward = passed_on  # the user's own comes back
    quiet(max_epochs=1, activation_checkpointing=Block).fit(module, loader(rows().float(), batch_size=4))
    assert vars(module.blocks[1])["forward"] is passed_on
    assert [set(vars(m)) for m in module.blocks.modules()] == before
    assert (list(module.state_dict()), [type(m) for m in module.modules()]) == (keys, classes)
    copied, stack = copies
    torch.nn.init.zeros_(copied.blocks[0].down.weight)
    torch.nn.init.zeros_(copied.blocks[0].down.bias)
    x = torch.ones(2, 8)
    assert copied.blocks[0](x).equal(x) and not module.blocks[0](x).equal(x)
    stack.eval()[2](x).sum().backward()
    assert stack[2].up.weight.grad is not None


def in_rank(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train plainly and with checkpointed blocks."""
    strategy: Any = {
        "ddp": lambda: "ddp",
        "static_graph": lambda: DDPStrategy(static_graph=True),
        "find_unused_parameters": lambda: DDPStrategy(find_unused_parameters=True),
        "fsdp": lambda: "fsdp",
        "model_parallel_ddp": lambda: ModelParallelDDPStrategy(2, stack="blocks", micro_batches=2),
    }[name]
    found = []
    for choice in (None, "blocks.*"):
        module = Deep(norm=name != "model_parallel_ddp")
        trainer = quiet(
            accelerator="cpu", devices=4 if name == "model_parallel_ddp" else 2, strategy=strategy(), max_epochs=2, precision="64-true", seed=7,
            activation_checkpointing=choice, accumulate_grad_batches=1 if name == "static_graph" else 2,
        )  # fmt: skip
        trainer.fit(module, loader(rows(), batch_size=6))
        found.append(weights(module))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["ddp", "static_graph", "find_unused_parameters", "fsdp", "model_parallel_ddp"])
def test_same_numbers_on_ranks(name: str) -> None:
    for plain, saved in run_ranks(in_rank, name=name):
        assert_same(saved, plain, atol=0)


@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "batchnorm"])
def test_replicas_of_dp_compute_their_own_layers_again(norm: bool) -> None:
    plain, saved = (fit(choice, norm, accelerator="cpu", devices=2, strategy="dp")[0] for choice in (None, "blocks.*"))
    assert_same(weights(saved), weights(plain), atol=0)
    assert saved.kept == 0  # the replica counted, and ended


def test_a_choice_that_fits_nothing_names_what_is_near() -> None:
    with pytest.raises(MisconfigurationException, match="fits no layer of Deep.*blocks"):
        fit("block.*")
    with pytest.raises(MisconfigurationException, match=r"\['Bilinear'\] fits no layer of Deep.*Linear"):
        fit(torch.nn.Bilinear)
    with pytest.raises(MisconfigurationException, match="fits no layer of Deep. Its layers: first"):
        fit(lambda name, layer: False)


def test_what_is_no_layer_is_refused() -> None:
    class Listed(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(self.blocks)

    with pytest.raises(MisconfigurationException, match=r"blocks, a ModuleList, which is never called. Choose its layers: 'blocks.\*'"):
        quiet(activation_checkpointing="blocks").fit(Listed(), loader(rows()))
    for wrong in (3, int, ["blocks", 3]):
        with pytest.raises(MisconfigurationException, match="must be module classes, names of layers"):
            quiet(activation_checkpointing=wrong)
