"""`python -m trainer.plan script.py:Class`: a plan, or a comparison of strategies, on the command line."""

from __future__ import annotations

import argparse
import runpy
import sys
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trainer.errors import MisconfigurationException, nearest
from trainer.planning.compare import compare_plans
from trainer.planning.planner import plan
from trainer.strategies import FSDPStrategy

__all__ = ["main"]

_EPILOG = """The batch is, in this order: --batch-shape (several make a tuple), the function of the script that --batch names, the first batch of the
module's train_dataloader, or its example_input_array. It is what one rank is given. Without --strategy the usual ones are compared."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan; return the exit status: 1 for what cannot be planned."""
    given = _parser().parse_args(arguments)
    try:
        print(_answer(given))
    except MisconfigurationException as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.plan", description="Plan a run on one CPU: memory, messages and arithmetic.", epilog=_EPILOG)
    parser.add_argument("module", metavar="SCRIPT:CLASS", help="a TrainModule, or a function that makes one: train.py:Net or package.module:Net")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the class; may be repeated")
    parser.add_argument("--batch-shape", action="append", metavar="N,N,...[:DTYPE]", help="a tensor of the batch, as 8,3,32,32 or 8:int64; may be repeated")
    parser.add_argument("--batch", metavar="FUNCTION", help="a function of the script that returns a batch")
    parser.add_argument("--strategy", help="plan this one; without it the usual ones are compared")
    parser.add_argument("--shard-size", type=int, help="of --strategy fsdp: ranks over which weights are cut")
    parser.add_argument("--stack", metavar="NAME", help="of a comparison: an nn.Sequential that model_parallel_ddp may spread over devices")
    parser.add_argument("--world-size", type=int, default=1, help="number of devices (default 1)")
    parser.add_argument("--num-nodes", type=int, default=1, help="number of nodes on which they are (default 1)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accumulate-grad-batches", type=int, default=1)
    parser.add_argument("--memory", help="of a device, as 80GB or 80GiB; needed for a comparison")
    parser.add_argument("--bandwidth", type=float, help="bytes a second that a rank sends")
    parser.add_argument("--speed", type=float, help="floating-point operations a second of a device")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    return parser


def _answer(given: argparse.Namespace) -> Any:
    make, batch = _model(given)
    settings = {"num_nodes": given.num_nodes, "precision": given.precision, "accumulate_grad_batches": given.accumulate_grad_batches}
    if given.strategy is None:
        if given.memory is None:
            raise MisconfigurationException("Give --memory (80GB) to compare strategies, or --strategy to plan one.")
        found: Any = compare_plans(make, batch, given.world_size, given.memory, bandwidth=given.bandwidth, speed=given.speed, stack=given.stack, **settings)
    else:
        if given.stack is not None:
            raise MisconfigurationException("--stack belongs to a comparison of strategies: leave out --strategy.")
        if given.shard_size is not None and given.strategy != "fsdp":
            raise MisconfigurationException(f"--shard-size belongs to --strategy fsdp, not to {given.strategy!r}.")
        strategy = given.strategy if given.shard_size is None else FSDPStrategy(shard_size=given.shard_size)
        found = plan(make, batch, strategy, given.world_size, bandwidth=given.bandwidth, **settings)
    if given.json:
        found.save(given.json)
    return found


def _model(given: argparse.Namespace) -> tuple[Callable[[], Any], Any]:
    """Return what makes the module, and a batch for it."""
    path, _, name = given.module.rpartition(":")
    if not path:
        raise MisconfigurationException(f"{given.module!r} must name a script and a class in it: train.py:Net.")
    names = _run(path)
    make = partial(_named(names, name, path), **dict(map(_argument, given.arg)))
    if given.batch_shape:
        tensors = tuple(map(_tensor, given.batch_shape))
        return make, tensors[0] if len(tensors) == 1 else tensors
    if given.batch:
        return make, _named(names, given.batch, path)()
    return make, _batch_of(make())


def _run(path: str) -> dict[str, Any]:
    if not path.endswith(".py"):
        sys.path.insert(0, "")
        return runpy.run_module(path)
    if not Path(path).is_file():
        raise MisconfigurationException(f"There is no file {path}.")
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python itself does for a script
    return runpy.run_path(path)  # not as "__main__": nothing is trained


def _named(names: dict[str, Any], name: str, path: str) -> Any:
    if not callable(names.get(name)):
        callables = [key for key, value in names.items() if callable(value)]
        raise MisconfigurationException(f"{path} has no class or function {name!r}.{nearest(name, callables)}")
    return names[name]


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise MisconfigurationException(f"--arg {text!r} must be NAME=VALUE.")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):  # a word
        return name, value


def _tensor(text: str) -> torch.Tensor:
    """Return an empty tensor of a shape and a number format, without memory for it."""
    shape, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        sizes = [int(number) for number in shape.split(",") if number.strip()]
    except ValueError:
        sizes = [-1]
    if not isinstance(dtype, torch.dtype) or min(sizes, default=0) < 0:
        raise MisconfigurationException(f"--batch-shape {text!r} must be whole numbers and perhaps a number format, as 8,3,32,32 or 8:int64.")
    return torch.empty(sizes, dtype=dtype, device="meta")


def _batch_of(module: Any) -> Any:
    try:
        loader = module.train_dataloader()
    except NotImplementedError:  # it is not the module that has the data
        loader = None
    for batch in islice(loader or (), 1):
        return batch
    if getattr(module, "example_input_array", None) is not None:
        return module.example_input_array
    raise MisconfigurationException(
        f"{type(module).__name__} has no train_dataloader and no example_input_array to take a batch from: give --batch-shape or --batch."
    )
