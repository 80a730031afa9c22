"""Compiled runs: which code of a run goes through torch.compile. The module, its keys, its class and its layers stay what they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from trainer.errors import MisconfigurationException
from trainer.forwards import OwnForward, put_on
from trainer.record import Kept

__all__ = ["compiled", "regions"]

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def compiled(run: Any) -> Callable[[], None]:
    """Have the steps of `run`, or its layers, compiled at their first call; return what undoes it.

    A whole step is one graph, its loss included. Where the strategy works between layers (FSDP gathers their weights there), and in
    manual optimization, which runs backward inside the step, every layer is compiled by itself.

    Raises:
        MisconfigurationException: where torch.compile does not work, with its reason; for a strategy that cannot be compiled.
    """
    options, strategy = run.settings.compile, run.strategy
    apart = strategy.called_apart()
    if apart is None:
        raise MisconfigurationException(f"compile=...: strategy={strategy.name!r} cannot run compiled code. Leave compile out, or use 'ddp'.")
    checkpoints = run.settings.activation_checkpointing is not None
    if checkpoints and str(options.get("backend")).startswith("eager"):
        raise MisconfigurationException(
            f"compile={{'backend': {options['backend']!r}}}: this backend does not repeat random draws in layers that activation_checkpointing "
            "computes again. Use 'aot_eager', which compiles as little, or the default."
        )
    _try_out(options, run.device)
    put_back = _switch(checkpoints)
    if not apart and (run.fn != "fit" or run.module.automatic_optimization):
        strategy.compiler = _Steps(run, options)
        return put_back
    parts = list(regions(run.module, apart))
    if not parts:
        run.tell_once(
            f"compile=... finds nothing to compile: strategy={strategy.name!r} and manual optimization compile each block of layers by itself, "
            "and all that is called on its own here are single layers of torch."
        )
    take_off = put_on(_CompiledForward(part, options) for part in parts)

    def undo() -> None:
        take_off()
        put_back()

    return undo


# -- whole steps ------------------------------------------------------------------------------------------------------------


class _Steps:
    """Makes the compiled version of a step function of the module, once for each."""

    def __init__(self, run: Any, options: dict[str, Any]) -> None:
        self._run, self._options = run, options
        self._made: dict[str, Callable[..., Any]] = {}

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        name = step.__name__
        if name not in self._made:
            self._made[name] = self._compile(step)
        return self._made[name]

    def _compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        trainer, kept, code = self._run.trainer, Kept(), torch.compile(step, **self._options)

        @functools.wraps(step)  # the loop asks for its arguments
        def call(*args: Any) -> Any:
            run = trainer._run  # a search for a learning rate puts another in its place
            recorder, run.recorder = run.recorder, kept  # the recorder's counters would be compiled in, anew for each step
            try:
                output = code(*args)
            finally:
                run.recorder, calls = recorder, kept.take()
            for logged in calls:
                recorder.add(*logged)
            return output

        return call


# -- layers -----------------------------------------------------------------------------------------------------------------


class _CompiledForward(OwnForward):
    """A compiled `forward`. Hooks of the layer, in which FSDP gathers its weights, run outside."""

    def __init__(self, module: torch.nn.Module, options: dict[str, Any]) -> None:
        super().__init__(module)
        self._options, self._code = options, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._code is None:
            self._code = torch.compile(self.plain(), **self._options)
        return self._code(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_code": None}  # a copy compiles its own


def regions(root: torch.nn.Module, apart: Collection[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the outermost layers of `root` with none of `apart` inside. Single layers of torch hold nothing to fuse."""
    for part in root.children():
        if isinstance(part, _CONTAINERS) or any(m in apart for m in part.modules() if m is not part):
            yield from regions(part, apart)
        elif any(True for _ in part.children()) or not type(part).__module__.startswith("torch.nn."):
            yield part


# -- torch.compile here -----------------------------------------------------------------------------------------------------


def _try_out(options: dict[str, Any], device: torch.device) -> None:
    """Compile a function of one line, so that a missing C++ compiler, Triton or backend is known before step 1."""
    if callable(options.get("backend")):
        return
    try:
        torch.compile(_double, **options)(torch.ones(8, device=device))
    except Exception as error:  # whatever a backend raises
        reason = str(error).strip().partition("\n")[0]
        raise MisconfigurationException(
            f"compile=...: torch.compile does not work here ({type(error).__name__}: {reason}). On the CPU it needs a C++ compiler (g++ or clang), "
            "on cuda Triton. Install what is missing, choose another backend (compile={'backend': 'aot_eager'}), or leave compile out."
        ) from error


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _switch(checkpoints: bool) -> Callable[[], None]:
    """Set torch's process-wide switches for a compiled run; return what puts them back.

    Numbers that change from step to step (`global_step`, `current_epoch`) become inputs of a graph. Under DDP a graph is cut where a
    bucket of gradients ends, so that buckets are sent while backward runs; not every torch can do that with `checkpoints` in the graph.
    """
    config = torch._dynamo.config
    wanted = {"allow_unspec_int_on_nn_module": True, **({"optimize_ddp": False} if checkpoints else {})}
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)

    def put_back() -> None:
        for name, value in before.items():
            setattr(config, name, value)

    return put_back
