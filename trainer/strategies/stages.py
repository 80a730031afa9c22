"""An ordered stack of layers as stages on several devices: what layers cost, where to cut, and the pipelined forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from trainer.errors import MisconfigurationException, nearest

__all__ = ["Pipeline", "balance", "check_stack", "layer_costs", "move_rest", "named_stack", "stacks_of"]

_COPIES = 4  # of a trainable weight: itself, its gradient, and the two averages of Adam


def named_stack(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return the layer of `module` that the argument stack= names.

    Raises:
        MisconfigurationException: when there is none, with the nearest name.
    """
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = [path for path, part in module.named_modules() if isinstance(part, torch.nn.Sequential)]
        raise MisconfigurationException(
            f"stack={name!r}: {type(module).__name__} has no such layer.{nearest(name, names)}{stacks_of(module)}"
        ) from None


def check_stack(stack: torch.nn.Module, what: str, count: int, places: str, advice: str) -> torch.nn.Sequential:
    """Return `stack` if it can be cut into `count` runs of layers, one for each of `places` ("devices", "stages").

    Raises:
        MisconfigurationException: for what is no plain nn.Sequential, with the `advice`; for one with fewer layers.
    """
    ordered = isinstance(stack, torch.nn.Sequential) and type(stack).forward is torch.nn.Sequential.forward
    if not ordered or "forward" in vars(stack):
        raise MisconfigurationException(
            f"{what} is a {type(stack).__name__}; to be spread over {places} it must be an nn.Sequential without a forward of its own. {advice}"
        )
    if len(stack) < count:
        raise MisconfigurationException(
            f"{what} has {len(stack)} layer(s), too few for {count} {places}. Ask for fewer {places}, or split the layers."
        )
    return stack


def stacks_of(module: torch.nn.Module) -> str:
    """Name the stacks of `module`, for a message."""
    names = [repr(name) for name, part in module.named_modules() if name and isinstance(part, torch.nn.Sequential)]
    return f" (there is {', '.join(names[:5])})" if names else " (this module has none)"


def layer_costs(stack: torch.nn.Sequential, root: torch.nn.Module | None = None, sample: Any = None) -> list[int]:
    """Return the bytes that training needs for each layer: four times its trainable weights, its other tensors, its activations.

    Activations are what the innermost modules of a layer put out when `root` is called with `sample`. Nothing is computed: the
    call runs on torch's meta device. Without a `sample` weights alone are counted.

    Raises:
        MisconfigurationException: when the call fails, with its error.
    """
    costs = []
    for layer in stack:
        sizes = [_bytes(p) * (_COPIES if p.requires_grad else 1) for p in layer.parameters()]
        costs.append(sum(sizes) + sum(map(_bytes, layer.buffers())))
    if root is None or sample is None:
        return costs

    handles = []
    for i, layer in enumerate(stack):
        for part in layer.modules():
            if not any(True for _ in part.children()):
                handles.append(part.register_forward_hook(_counter(costs, i)))
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    floating = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    args = tree_map_only(torch.Tensor, lambda t: t.to("meta", floating if t.is_floating_point() else t.dtype), sample)
    try:
        with torch.no_grad(), torch.device("meta"):
            empty = {name: t.detach().to("meta") for name, t in tensors.items()}
            functional_call(root, empty, args if isinstance(args, tuple) else (args,))
    except Exception as error:  # whatever a layer raises for an input that is not its own
        raise MisconfigurationException(
            f"The activations of the stack could not be measured with the sample: {error!r}. Give an input that the stack takes as "
            "sample=..., or none (and no example_input_array) to balance by weights alone."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return costs


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _counter(costs: list[int], i: int) -> Any:
    def count(module: torch.nn.Module, args: Any, output: Any) -> None:
        costs[i] += sum(_bytes(t) for t in tree_leaves(output) if isinstance(t, torch.Tensor))

    return count


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """Cut `costs` into `stages` runs of at least one layer so that the largest sum is smallest; return where each run ends.

    Dynamic programming: the best cut of the first n layers into k runs ends with a last run of one length or another.
    """
    total = [0, *accumulate(costs)]
    count = len(costs)
    best: list[float] = [float("inf")] * (count + 1)  # best[n]: the largest sum of the first n layers, cut into k runs
    best[0], ends = 0, []
    for _ in range(stages):
        last = [min(range(n), key=lambda m: max(best[m], total[n] - total[m]), default=0) for n in range(count + 1)]
        best = [float("inf")] + [max(best[last[n]], total[n] - total[last[n]]) for n in range(1, count + 1)]
        ends.append(last)
    found = [count]
    for last in reversed(ends[1:]):
        found.append(last[found[-1]])
    return found[::-1]


def move_rest(module: torch.nn.Module, stack: torch.nn.Module, device: torch.device) -> None:
    """Move what `module` holds outside of `stack` to `device`."""
    if module is stack:
        return
    if all(part is not stack for part in module.modules()):
        module.to(device)
        return
    if any(t.device != device for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        torch.nn.Module._apply(module, lambda t: t.to(device), recurse=False)
    for child in module.children():
        move_rest(child, stack, device)


class Pipeline:
    """The `forward` of a stack during a run: stage s works on micro-batch i while stage s + 1 works on micro-batch i - 1.

    On accelerators the stages overlap because each device works off its own queue, in backward as well, where autograd has a thread
    a device. On the CPU they follow each other. The output comes back to where the input was.

    It holds the stack, not a bound method, so that a deep copy of the module runs the copied layers.
    """

    def __init__(self, stack: torch.nn.Sequential, ends: Sequence[int], devices: Sequence[torch.device], micro_batches: int) -> None:
        self.stack, self.micro_batches = stack, micro_batches
        self.stages = list(zip([0, *ends], ends, devices, strict=False))

    def __call__(self, batch: Any) -> Any:
        """Return what the layers, one after the other, make of `batch`.

        Raises:
            MisconfigurationException: when input or output cannot be split or joined along dimension 0.
        """
        layers = list(self.stack)
        values = split(batch, self.micro_batches)
        home = next((t.device for t in tree_leaves(batch) if isinstance(t, torch.Tensor)), self.stages[0][2])
        sizes = [_size(value) for value in values]
        last = len(self.stages) - 1
        for tick in range(len(values) + last):
            # The last stage first: what a device hands on must stand in its queue ahead of its work on the next micro-batch.
            for s in range(last, -1, -1):
                i = tick - s
                if 0 <= i < len(values):
                    first, end, device = self.stages[s]
                    value = _to(values[i], device)
                    for layer in layers[first:end]:
                        value = layer(value)
                    values[i] = _to(value, home) if s == last else value
        return join(values, sizes)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True) if device.type != "cpu" else value.to(device)
    return tree_map_only(torch.Tensor, lambda t: _to(t, device), value)


def _size(value: Any) -> int | None:
    """The number of samples: dimension 0 of the tensors, None where they differ or there are none."""
    sizes = {t.shape[0] if t.dim() else None for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def split(batch: Any, count: int) -> list[Any]:
    """Cut the tensors of `batch` along dimension 0 into `count` parts as equal as can be; fewer where there are fewer samples.

    Raises:
        MisconfigurationException: when the tensors have no dimension 0, or of different size.
    """
    if count == 1:
        return [batch]
    size = _size(batch)
    if size is None:
        shapes = [tuple(t.shape) for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        raise MisconfigurationException(
            f"micro_batches={count} cuts the input of the stack along dimension 0, which must be the samples of every tensor in it; got "
            f"the shapes {shapes}. Use micro_batches=1, or give other tensors to the layers in another way."
        )
    count = max(1, min(count, size))
    leaves, spec = tree_flatten(batch)
    parts = [leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[i] for part in parts], spec) for i in range(count)]


def join(values: list[Any], sizes: list[int | None]) -> Any:
    """Put the outputs of the micro-batches together along dimension 0.

    Raises:
        MisconfigurationException: when an output holds something else than a row for each sample.
    """
    if len(values) == 1:
        return values[0]
    flat = [tree_flatten(value) for value in values]
    for (leaves, _), size in zip(flat, sizes, strict=True):
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != size:
                got = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise MisconfigurationException(
                    f"The stack made {got} of a micro-batch of {size} samples; outputs are joined along dimension 0, which must be the "
                    "samples. Use micro_batches=1, or move what combines samples out of the stack."
                )
    return tree_unflatten([torch.cat(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1])
