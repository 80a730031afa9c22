"""Which launcher started this process, read from the environment it was given: torchrun (torchelastic) or Slurm's srun.

These launchers make no process. They read who we are, and compare it with what the Trainer asks for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from trainer.errors import MisconfigurationException, nearest
from trainer.launchers.base import InProcessLauncher, Launcher
from trainer.world import World

__all__ = ["SlurmLauncher", "TorchrunLauncher", "detect", "gpu_order", "inside_rank", "rank_of_process"]

T = TypeVar("T")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("local",)  # names of launchers that need no detection


class _StartedElsewhere(Launcher):
    """A launcher that found this process already started as one rank of several."""

    def __init__(self, world: World) -> None:
        self.world = world

    def launch(self, task: Callable[[World], T]) -> T:
        """Return this rank's `task(world)`; exceptions pass through untouched."""
        return task(self.world)

    def check(self, processes_per_node: int | None = None, num_nodes: int | None = None) -> None:
        """Name a difference between the Trainer's numbers and the processes that exist (see `Launcher.check`)."""
        world = self.world
        pairs = (
            ("devices", processes_per_node, world.local_world_size, "process(es) on this node"),
            ("num_nodes", num_nodes, world.num_nodes, "node(s)"),
        )
        for name, wanted, found, unit in pairs:
            if wanted is not None and wanted != found:
                raise MisconfigurationException(
                    f"the Trainer asks for {name}={wanted}, but {self.name} started {found} {unit} "
                    f"(rank {world.rank} of {world.world_size}). Make the two agree, or pass launcher='local' to ignore {self.name}."
                )


class TorchrunLauncher(_StartedElsewhere):
    """A process started by torchrun, by our own local launcher, or with the same variables set by hand.

    Without LOCAL_RANK and LOCAL_WORLD_SIZE each process is taken to have a machine of its own, as job operators start them.

    Raises:
        MisconfigurationException: a variable is missing, no number, or contradicts another.
    """

    name = "torchrun"

    def __init__(self) -> None:
        missing = [name for name in _TORCHRUN if name not in os.environ]
        if missing:
            raise MisconfigurationException(f"launcher='torchrun' needs {', '.join(missing)} in the environment.")
        env = os.environ
        world_size = _number(env, "WORLD_SIZE", low=1)
        rank = _number(env, "RANK", high=world_size)
        local_size = _number(env, "LOCAL_WORLD_SIZE", 1 if "LOCAL_RANK" not in env else None, low=1, high=world_size + 1)
        local_rank = _number(env, "LOCAL_RANK", 0, high=local_size)
        num_nodes = _number(env, "GROUP_WORLD_SIZE", max(1, world_size // local_size), low=1)
        node_rank = _number(env, "GROUP_RANK", rank // local_size, high=num_nodes)
        super().__init__(World(rank, world_size, local_rank, local_size, node_rank, num_nodes, "env://"))

    @classmethod
    def found(cls) -> bool:
        """True when all variables that torchrun sets for a rendezvous are there."""
        return all(name in os.environ for name in _TORCHRUN)


class SlurmLauncher(_StartedElsewhere):
    """A task started by `srun`. The ranks meet at the first node, at MASTER_PORT or a port that follows from the job's number.

    Raises:
        MisconfigurationException: a variable is missing, no number, or contradicts another.
    """

    name = "slurm"

    def __init__(self) -> None:
        env = os.environ
        world_size = _slurm_tasks(env)
        if world_size is None or "SLURM_PROCID" not in env:
            raise MisconfigurationException("launcher='slurm' needs a process started by srun (SLURM_PROCID, SLURM_NTASKS).")
        rank = _number(env, "SLURM_PROCID", high=world_size)
        name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
        num_nodes = _number(env, name, 1, low=1, high=world_size + 1)
        node_rank = _number(env, "SLURM_NODEID", 0, high=num_nodes)
        local_size = _slurm_local_size(env, node_rank, max(1, world_size // num_nodes))
        local_rank = _number(env, "SLURM_LOCALID", rank % local_size, high=local_size)
        method = None if world_size == 1 else f"tcp://{_slurm_address(env, num_nodes)}:{_slurm_port(env)}"
        super().__init__(World(rank, world_size, local_rank, local_size, node_rank, num_nodes, method))

    @classmethod
    def found(cls) -> bool:
        """True inside a task of `srun` with several tasks; False in an interactive shell and in a batch script itself.

        A batch script sees SLURM_PROCID=0 and SLURM_NTASKS of the whole job, and is one process all the same; only `srun` sets
        the step's number.
        """
        env = os.environ
        if env.get("SLURM_JOB_NAME") in ("bash", "interactive") or "SLURM_PTY_PORT" in env:
            return False
        if "SLURM_STEP_ID" not in env and env.get("SLURM_PROCID", "0") == "0":
            return False
        return "SLURM_PROCID" in env and (_slurm_tasks(env) or 1) > 1


_DETECTED: dict[str, type[TorchrunLauncher] | type[SlurmLauncher]] = {
    TorchrunLauncher.name: TorchrunLauncher,  # first: torchrun inside a Slurm job is the one that started us
    SlurmLauncher.name: SlurmLauncher,
}


def detect(requested: str | bool | Launcher | None = None) -> Launcher | None:
    """Return the launcher that started this process as one of several, or None when nobody did.

    Args:
        requested: None looks for itself; False or "local" turn the look off (None is returned); "in-process", "torchrun" or
            "slurm" insist on one; a `Launcher` is returned as it is.

    Raises:
        MisconfigurationException: an unknown name, or variables that are missing or contradict each other.
    """
    if isinstance(requested, Launcher):
        return requested
    if requested == InProcessLauncher.name:
        return InProcessLauncher()
    if requested is False or requested in _LOCAL:
        return None
    if requested is None or requested == "auto":
        return next((kind() for kind in _DETECTED.values() if kind.found()), None)
    if requested not in _DETECTED:
        names = [*_LOCAL, InProcessLauncher.name, *_DETECTED]
        raise MisconfigurationException(
            f"unknown launcher {requested!r}; choose one of {', '.join(names)}.{nearest(str(requested), names)}"
        )
    return _DETECTED[str(requested)]()


def inside_rank() -> bool:
    """Return whether somebody started this process as one of several, also where that is to be ignored."""
    return any(kind.found() for kind in _DETECTED.values())


def rank_of_process() -> int:
    """Return which of the processes of a launch this one is; 0 where nobody launched it, or the variables are not understood."""
    try:
        found = detect()
    except MisconfigurationException:
        return 0
    return 0 if found is None or found.world is None else found.world.rank


def gpu_order() -> tuple[str | None, bool]:
    """Return which GPUs this process may see (CUDA_VISIBLE_DEVICES; None for all), and whether CUDA counts them by their slots."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _number(env: Mapping[str, str], name: str, default: int | None = None, low: int = 0, high: int | None = None) -> int:
    """Read a whole number in [low, high)."""
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise MisconfigurationException(f"environment variable {name} is missing beside the launcher's other variables.")
    if not re.fullmatch(r"-?\d+", text.strip()):
        raise MisconfigurationException(f"environment variable {name} must be a whole number, got {text!r}.")
    value = int(text)
    if value < low or (high is not None and value >= high):
        limit = f"at least {low}" if high is None else f"in {low}..{high - 1}"
        raise MisconfigurationException(f"environment variable {name}={value} must be {limit}; the launcher's variables disagree.")
    return value


def _slurm_tasks(env: Mapping[str, str]) -> int | None:
    """The number of tasks of this step (an interactive step inside a larger allocation has its own, smaller number)."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if name in env:
            return _number(env, name, low=1)
    return None


def _slurm_local_size(env: Mapping[str, str], node_rank: int, default: int) -> int:
    """Tasks on this node, from a list such as "2(x3),1": three nodes with two tasks, one with one."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    sizes: list[int] = []
    for size, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        sizes += [int(size)] * int(repeat or 1)
    return sizes[node_rank] if node_rank < len(sizes) else default


def _slurm_address(env: Mapping[str, str], num_nodes: int) -> str:
    """The first host of the step: "node[03-05,9],x1" -> "node03"."""
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"]
    if num_nodes == 1:
        return "127.0.0.1"
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not hosts:
        raise MisconfigurationException("SLURM_JOB_NODELIST names no host; set MASTER_ADDR to the first node's address.")
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts)  # each bracket becomes its first number
    return first.split(",")[0]


def _slurm_port(env: Mapping[str, str]) -> int:
    """MASTER_PORT, a port that Slurm keeps free for the step (srun --resv-ports), or one that all tasks can work out.

    The last differs from step to step of a job, so that two may run at once.
    """
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT", low=1, high=65536)
    if reserved := re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", "")):
        return int(reserved[0])
    return 15000 + (_number(env, "SLURM_JOB_ID", 0) * 31 + _number(env, "SLURM_STEP_ID", 0)) % 15000
