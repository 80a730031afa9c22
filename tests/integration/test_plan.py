"""A plan is true: what is planned for a rank is what the rank of a real run holds, sends and keeps."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torchvision
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _comm_mode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.gpt import GPT, Block
from tests.helpers.modules import quiet
from tests.helpers.ranks import run_ranks
from trainer import DDPStrategy, FSDPStrategy, ModelParallelStrategy, TrainModule
from trainer.planning import plan


class Small(GPT):
    """The example's GPT, of sizes that ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=30, heads=3, length=32)


class ResNet(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


MODELS: dict[Any, Any] = {Small: torch.zeros(6, 33, dtype=torch.long), ResNet: (torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.long))}


def part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def nbytes(things: Any) -> int:
    return sum(part(t).numel() * part(t).element_size() for t in tree_leaves(things) if isinstance(t, torch.Tensor))


class Messages(TorchDispatchMode):
    """Counts what torch's CommDebugMode calls a collective, and messages to one rank, with their bytes. (That mode hooks layers, which ReLU(inplace=True) does not stand.)"""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.collectives = {*_comm_mode.CommDebugMode().comm_registry, *_comm_mode.c10d_collective_ops}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if getattr(func, "_overloadpacket", None) in self.collectives or str(func) in ("c10d.send.default", "c10d.recv_.default"):
            self.seen["messages"] += 1
            self.seen["bytes"] += max(nbytes(args[0]), nbytes(args[1]), nbytes(out) if "functional" in func.namespace else 0)
        return out


class Measured:
    """Mixed into a module: what its third step keeps and sends, and what the rank holds after it. It has no hook of the trainer: these cost messages."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 2 or self.trainer.strategy.pipeline is not None:
            return super().training_step(batch, batch_idx)
        sizes, own = {}, set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            own.update(part(t).untyped_storage()._cdata for t in (*self.parameters(), *self.buffers()))
            storage = part(tensor).untyped_storage()
            sizes.setdefault(storage._cdata, (storage.nbytes(), storage))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = super().training_step(batch, batch_idx)
        self.kept = sum(size for key, (size, _) in sizes.items() if key not in own)
        return output

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)
        return optimizer

    def before_step(self, *_: Any) -> None:
        self.sent = dict(self.messages.seen)
        ddp = getattr(self.trainer.strategy, "_ddp", None)
        told = "" if ddp is None else ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
        self.buckets = sorted(int(number) for number in told.replace(",", " ").split())

    def after_step(self, optimizer: Any, *_: Any) -> None:
        self.messages.seen.clear()
        self.found = {
            "parameters": nbytes([p for p in self.parameters() if not p.is_meta]),  # of another stage
            "gradients": nbytes([p.grad for p in self.parameters()]),
            "optimizer": nbytes(list(optimizer.state.values())),
            "buffers": nbytes(list(self.buffers())),
            **self.sent,
        }


class Kept:
    """The most bytes that autograd keeps at a time, parameters and buffers aside: for stages, which keep several parts of a batch."""

    def __init__(self, module: Any) -> None:
        self.module, self.now, self.most = module, 0, 0
        self.holders: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> Any:
        own = {t.untyped_storage()._cdata for t in (*self.module.parameters(), *self.module.buffers()) if not t.is_meta}
        storage = tensor.untyped_storage()
        return tensor if storage._cdata in own else Holder(self, tensor, storage)


class Holder:
    def __init__(self, kept: Kept, tensor: torch.Tensor, storage: Any) -> None:
        self.kept, self.tensor, self.key, self.size = kept, tensor, storage._cdata, storage.nbytes()
        kept.holders[self.key] += 1
        kept.now += self.size if kept.holders[self.key] == 1 else 0
        kept.most = max(kept.most, kept.now)

    def __del__(self) -> None:
        self.kept.holders[self.key] -= 1
        self.kept.now -= self.size if self.kept.holders[self.key] == 0 else 0


def measured(kind: Any, batch: Any, strategy: Any, devices: int, **settings: Any) -> tuple[dict[str, int], list[int]]:
    """Run three steps with the trainer; return what the last one was measured to be, and DDP's own account of its buckets."""
    module = type(kind.__name__, (Measured, kind), {})()
    module.messages = Messages()
    trainer = quiet(accelerator="cpu", devices=devices, strategy=strategy, max_steps=3, log_every_n_steps=0, **settings)
    staged, kept = getattr(strategy, "pipeline_parallel_size", 1) > 1, Kept(module)
    unpack = lambda held: held.tensor if isinstance(held, Holder) else held
    with module.messages, torch.autograd.graph.saved_tensors_hooks(kept.pack, unpack) if staged else nullcontext():
        trainer.fit(module, [batch] * 4 * devices)
    return {**module.found, "activations": kept.most if staged else module.kept}, module.buckets


def planned(found: Any, checkpointed: bool = False) -> dict[str, int]:
    memory, transfers = (found.checkpointed, found.transfers_checkpointed) if checkpointed else (found.memory, found.transfers)
    names = ("parameters", "gradients", "optimizer", "buffers", "activations")
    counts = {"messages": len(transfers), "bytes": sum(t.bytes for t in transfers)} if transfers else {}
    return {**{name: getattr(memory, name) for name in names}, **counts}


def assert_true(found: dict[str, int], expected: dict[str, int], what: Any = None) -> None:
    activations, right = found.pop("activations"), expected["activations"]
    assert activations == pytest.approx(right, rel=0.05), what
    assert {**found, "activations": right} == expected, what


@pytest.mark.parametrize("kind", MODELS)
def test_one_device(kind):
    found, _ = measured(kind, MODELS[kind], "auto", 1)
    assert_true(planned(plan(kind(), MODELS[kind])), found)


def test_activation_checkpointing_on_one_device():
    found, _ = measured(Small, MODELS[Small], "auto", 1, activation_checkpointing=Block)
    assert_true(planned(plan(Small(), MODELS[Small]), checkpointed=True), found)


class Cut(Small):
    """Its perceptrons are computed by several ranks together."""

    def configure_model(self) -> None:
        for block in self.blocks:
            parallelize_module(block.mlp, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def cases(ranks: int) -> list[Any]:
    found: list[Any] = [(kind, name, {}) for kind in MODELS for name in ("ddp", "fsdp")]
    if ranks == 2:
        found.append((Small, FSDPStrategy(), {"precision": "bf16-mixed"}))
        found.append((ResNet, DDPStrategy(bucket_cap_mb=4, gradient_as_bucket_view=True), {}))
        found.append((Cut, ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), {}))
        found.append((Small, ModelParallelStrategy(pipeline_parallel_size=2, stack="blocks", micro_batches=3, schedule="GPipe"), {}))
    else:
        found.append((Small, FSDPStrategy(shard_size=2), {}))
        found.append((Cut, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2), {}))
        found.append((Small, ModelParallelStrategy(data_parallel_size=2, pipeline_parallel_size=2, stack="blocks", micro_batches=3), {}))
    return found


def all_measured(ranks: int) -> Any:
    return [measured(kind, MODELS.get(kind, MODELS[Small]), strategy, ranks, **more) for kind, strategy, more in cases(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks):
    by_rank = run_ranks(all_measured, ranks, timeout=180, ranks=ranks)
    for i, (kind, strategy, more) in enumerate(cases(ranks)):
        batch = MODELS.get(kind, MODELS[Small])
        for rank in range(ranks):
            found, buckets = by_rank[rank][i]
            if rank and found == by_rank[rank - 1][i][0]:
                continue
            expected = plan(kind, batch, strategy, ranks, rank=rank, **more)
            assert_true(planned(expected), found, (kind.__name__, expected.strategy, rank))
            if buckets:
                assert sorted(t.bytes for t in expected.transfers if t.operation == "all_reduce") == buckets
