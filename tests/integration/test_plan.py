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
from trainer import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelDDPStrategy,
    ModelParallelStrategy,
    TrainModule,
)
from trainer.planning import plan
from trainer.strategies import stages


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


class OnDevices:
    """The devices of a process with a stack spread over them: which computes, and what goes from one to another."""

    def __init__(self, stack: Any) -> None:
        self.now, self.layers, self.moved, self.send = 0, {}, Counter(), stages._to
        for s, (first, end, _) in enumerate(stack.forward.stages):
            for layer in stack[first:end]:
                self.layers[layer] = s
                layer.register_forward_pre_hook(lambda *_, s=s: setattr(self, "now", s))
                layer.register_forward_hook(lambda *_: setattr(self, "now", 0))
        self.entry = stack.register_forward_pre_hook(lambda _, args: self.count(args, -1))

    def __enter__(self) -> None:
        stages._to = self.to

    def __exit__(self, *_: object) -> None:
        stages._to = self.send

    def count(self, values: Any, sign: int = 1) -> None:
        """What comes to the first stage was there already."""
        for t in (t for t in tree_leaves(values) if isinstance(t, torch.Tensor)):
            self.moved["bytes"] += sign * nbytes(t)
            if t.requires_grad:
                t.register_hook(lambda g: self.moved.update({"bytes": sign * nbytes(g)}))

    def to(self, value: torch.Tensor, device: Any) -> torch.Tensor:
        found = self.send(value, device).clone()  # as from one device to another
        self.count(found)
        return found

    def of(self, module: Any, optimizer: Any, kept: Counter[int]) -> list[dict[str, int]]:
        """What each holds."""
        home = {t: s for layer, s in self.layers.items() for t in (*layer.parameters(), *layer.buffers())}
        found = []
        for s in range(max(self.layers.values()) + 1):
            params, buffers = ([t for t in tensors if home.get(t, 0) == s] for tensors in (module.parameters(), module.buffers()))
            held = {"parameters": params, "gradients": [p.grad for p in params], "optimizer": [optimizer.state[p] for p in params], "buffers": buffers}
            found.append({**{name: nbytes(t) for name, t in held.items()}, "activations": kept[s]})
        return found


class Measured:
    """Mixed into a module: what its third step keeps and sends, and what the rank holds after it. It has no hook of the trainer: these cost messages."""

    on: OnDevices | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 2 or self.trainer.strategy.pipeline is not None:
            return super().training_step(batch, batch_idx)
        sizes, own = {}, set()
        stack = getattr(self.trainer.strategy, "_stack", None)
        self.on = None if stack is None else OnDevices(stack)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            own.update(part(t).untyped_storage()._cdata for t in (*self.parameters(), *self.buffers()))
            storage = part(tensor).untyped_storage()
            sizes.setdefault(storage._cdata, (storage.nbytes(), storage, self.on.now if self.on else 0))
            return tensor

        with self.on or nullcontext(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = super().training_step(batch, batch_idx)
        self.kept = Counter()
        for key, (size, _, device) in sizes.items():
            self.kept[device] += size if key not in own else 0
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
        self.devices = self.on and (self.on.of(self, optimizer, self.kept), self.on.moved["bytes"])


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


def measured(kind: Any, batch: Any, strategy: Any, devices: int, **settings: Any) -> tuple[dict[str, int], list[int], Any]:
    """Run three steps with the trainer; return what the last one was measured to be, DDP's own account of its buckets, and the same by device."""
    module = type(kind.__name__, (Measured, kind), {})()
    module.messages = Messages()
    trainer = quiet(accelerator="cpu", devices=devices, strategy=strategy, max_steps=3, log_every_n_steps=0, **settings)
    staged, kept = getattr(strategy, "pipeline_parallel_size", 1) > 1, Kept(module)
    unpack = lambda held: held.tensor if isinstance(held, Holder) else held
    with module.messages, torch.autograd.graph.saved_tensors_hooks(kept.pack, unpack) if staged else nullcontext():
        trainer.fit(module, [batch] * 4 * devices)
    return {**module.found, "activations": kept.most if staged else module.kept.total()}, module.buckets, module.devices


def planned(found: Any, checkpointed: bool = False) -> dict[str, int]:
    memory, transfers = (found.checkpointed, found.transfers_checkpointed) if checkpointed else (found.memory, found.transfers)
    names = ("parameters", "gradients", "optimizer", "buffers", "activations")
    transfers = [t for t in transfers if t.operation != "copy"]
    counts = {"messages": len(transfers), "bytes": sum(t.bytes for t in transfers)} if transfers else {}
    return {**{name: getattr(memory, name) for name in names}, **counts}


def assert_true(found: dict[str, int], expected: dict[str, int], what: Any = None) -> None:
    activations, right = found.pop("activations"), expected["activations"]
    assert activations == pytest.approx(right, rel=0.05), what
    assert {**found, "activations": right} == expected, what


@pytest.mark.parametrize("kind", MODELS)
def test_one_device(kind):
    found, *_ = measured(kind, MODELS[kind], "auto", 1)
    assert_true(planned(plan(kind(), MODELS[kind])), found)


def test_activation_checkpointing_on_one_device():
    found, *_ = measured(Small, MODELS[Small], "auto", 1, activation_checkpointing=Block)
    assert_true(planned(plan(Small(), MODELS[Small]), checkpointed=True), found)


class Deep(GPT):
    def __init__(self) -> None:
        super().__init__(layers=3, width=30, heads=3, length=32)


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
        found.append((Deep, ModelParallelDDPStrategy(2, stack="blocks", micro_batches=4), {}))
    else:
        found.append((Small, FSDPStrategy(shard_size=2), {}))
        found.append((Cut, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2), {}))
        found.append((Small, ModelParallelStrategy(data_parallel_size=2, pipeline_parallel_size=2, stack="blocks", micro_batches=3), {}))
    return found


def all_measured(ranks: int) -> Any:
    return [measured(kind, MODELS.get(kind, MODELS[Small]), strategy, devices(strategy, ranks), **more) for kind, strategy, more in cases(ranks)]


def devices(strategy: Any, ranks: int) -> int:
    return ranks * getattr(strategy, "devices_per_replica", 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks):
    by_rank = run_ranks(all_measured, ranks, timeout=180, ranks=ranks)
    for i, (kind, strategy, more) in enumerate(cases(ranks)):
        batch = MODELS.get(kind, MODELS[Small])
        for rank in range(ranks):
            found, buckets, by_device = by_rank[rank][i]
            if rank and found == by_rank[rank - 1][i][0]:
                continue
            expected = plan(kind, batch, strategy, devices(strategy, ranks), rank=rank, **more)
            assert_true(planned(expected), found, (kind.__name__, expected.strategy, rank))
            if buckets:
                assert sorted(t.bytes for t in expected.transfers if t.operation == "all_reduce") == buckets
            assert (by_device is not None) == bool(expected.devices)
            if by_device is not None:
                held, moved = by_device
                assert len(held) == len(expected.devices) == 2
                for device, right in zip(expected.devices, held, strict=True):
                    assert_true({name: getattr(device, name) for name in right}, right, rank)
                assert sum(t.bytes for t in expected.transfers if t.operation == "copy") == moved > 0
