"""One forward of a module on its `example_input_array`: sizes and FLOPs of its layers. The module is the same afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map_only

__all__ = ["Seen", "obstacle", "on_device_of", "run_example", "unchanged"]


class Seen(NamedTuple):
    """What a layer was given and gave: shapes, of several tensors a list of shapes, "?" for what has none; the FLOPs of its calls."""

    in_size: Any
    out_size: Any
    flops: int


def obstacle(module: torch.nn.Module) -> str | None:
    """Return why this process cannot run the module's forward by itself, or None."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(isinstance(t, UninitializedParameter) for t in tensors):
        return "lazy layers take their shapes from the first batch"
    if any(hasattr(t, "placements") for t in tensors):  # a DTensor: a shard of it is here
        return "its weights are spread over several processes"
    if len({t.is_meta for t in tensors}) > 1:
        return "some of its weights are not here (on the device 'meta')"
    return None


def on_device_of(module: torch.nn.Module, example: Any) -> Any:
    """Return the example with its tensors where the module's are."""
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    return tree_map_only(torch.Tensor, lambda t: t.to(device), example)


def run_example(module: torch.nn.Module, example: Any, context: AbstractContextManager[Any] = nullcontext()) -> dict[str, Seen]:  # noqa: B008
    """Return, by name ("" for the module itself), what every layer that was called has seen.

    Args:
        example: the arguments of forward: a tuple or list of them, a dict of named ones, or the only one.
        context: in which the forward runs (autocast, say).

    Raises:
        Exception: whatever the forward raises.
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to load where there is triton

    example = on_device_of(module, example)
    counter = FlopCounterMode(display=False)
    seen: dict[str, tuple[Any, Any, int]] = {}
    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        for name, layer in module.named_modules():
            stack.callback(layer.register_forward_hook(_Hook(seen, name), with_kwargs=True).remove)
        for manager in (torch.compiler.set_stance("force_eager"), _in_steps(), torch.no_grad(), context, counter):
            stack.enter_context(manager)
        if isinstance(example, dict):
            module(**example)
        else:
            module(*example) if isinstance(example, (list, tuple)) else module(example)
    counts, root = counter.get_flop_counts(), type(module).__name__
    flops = {name: sum(counts.get(f"{root}.{name}" if name else "Global", {}).values()) for name in seen}
    return {name: Seen(*sizes, flops[name]) for name, sizes in seen.items()}


class _Hook:
    """Notes the sizes of the first call of a layer."""

    def __init__(self, seen: dict[str, Any], name: str) -> None:
        self.seen, self.name = seen, name

    def __call__(self, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, (torch.Tensor, list, tuple))] or ["?"]
        self.seen.setdefault(self.name, (_size(given[0] if len(given) == 1 else given), _size(output)))


def _size(value: Any) -> Any:
    if hasattr(value, "shape"):
        return list(value.shape)
    return [_size(part) for part in value if part is not None] if isinstance(value, (list, tuple)) else "?"


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Put the module in eval mode for a while; modes, buffers and the random streams are as before afterwards."""
    modes = [(m, m.training) for m in module.modules()]
    buffers = [(m, name, b, None if b is None else b.clone()) for m in module.modules() for name, b in m._buffers.items()]
    devices = {t.device for t in (*module.parameters(), *module.buffers()) if t.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices=[d.index for d in devices], device_type=kind):
            module.eval()
            yield
    finally:
        for m, training in modes:
            m.training = training
        with torch.no_grad():
            for m, name, buffer, kept in buffers:
                m._buffers[name] = buffer
                if buffer is not None and not buffer.is_meta and not torch.equal(buffer, kept):
                    buffer.copy_(kept)


@contextmanager
def _in_steps() -> Iterator[None]:
    """Let attention, transformer and recurrent layers compute in plain steps: fused kernels are not counted on every device."""
    libraries = [library for library in (torch.backends.cudnn, torch.backends.mkldnn) if hasattr(library, "enabled")]
    before = torch.backends.mha.get_fastpath_enabled(), [library.enabled for library in libraries]
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for library in libraries:
            library.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        for library, enabled in zip(libraries, before[1], strict=True):
            library.enabled = enabled
