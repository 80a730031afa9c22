"""Which of how many processes this one is: a value that launchers make and everybody else reads."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """The place of one process in a run.

    `rank` counts over all nodes, `local_rank` on this node, `node_rank` the nodes. `init_method` is what
    `torch.distributed.init_process_group` needs to join the others, or None for a process that is alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    init_method: str | None = None

    @property
    def is_global_zero(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0
