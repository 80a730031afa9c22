"""How ranks lie in a mesh of three dimensions: its sizes, what goes together, and the place of a rank."""

from __future__ import annotations

from trainer.errors import MisconfigurationException

__all__ = ["DIMS", "Sizes", "check_size", "check_stages", "place", "settle"]

DIMS = ("data_parallel", "pipeline_parallel", "tensor_parallel")
Sizes = tuple[int, int, int]


def check_size(name: str, value: int | str, auto: bool) -> None:
    """Refuse what is no size of a dimension; `auto` allows "auto".

    Raises:
        MisconfigurationException: naming the argument.
    """
    if auto and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = " or 'auto'" if auto else ""
        raise MisconfigurationException(f"ModelParallelStrategy({name}={value!r}) must be a whole number >= 1{also}.")


def check_stages(stages: int, tensor: int | str, stack: str | None, micro_batches: int | None, schedule: str) -> None:
    """Refuse arguments of a pipeline where there is none, and what a pipeline does not go with.

    Raises:
        MisconfigurationException: naming the arguments.
    """
    if stages == 1:
        given = {"stack": stack is not None, "micro_batches": micro_batches is not None, "schedule": schedule != "1F1B"}
        if any(given.values()):
            names = " and ".join(f"{name}=" for name, there in given.items() if there)
            raise MisconfigurationException(f"ModelParallelStrategy({names}...) is for a pipeline: ask for pipeline_parallel_size=2 or more.")
        return
    if tensor not in ("auto", 1):
        raise MisconfigurationException(
            f"ModelParallelStrategy(pipeline_parallel_size={stages}, tensor_parallel_size={tensor}): layers that are cut over ranks cannot be in "
            "pipeline stages as well. Use one of the two, and data_parallel_size beside it."
        )
    if micro_batches is not None and (isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1):
        raise MisconfigurationException(f"ModelParallelStrategy(micro_batches={micro_batches!r}) must be a whole number >= 1, or None for one a stage.")


def settle(data: int | str, stages: int, tensor: int | str, devices: int, num_nodes: int) -> Sizes:
    """Return the sizes along `DIMS` for so many devices a node.

    Raises:
        MisconfigurationException: when they do not multiply to the number of ranks; when there is one rank.
    """
    ranks = devices * num_nodes
    if ranks == 1:
        raise MisconfigurationException(
            "ModelParallelStrategy spreads a model over several ranks, and there is one. Ask for more devices, or leave the strategy out."
        )
    if stages > 1:
        data, tensor = max(ranks // stages, 1) if data == "auto" else int(data), 1
    else:
        data, tensor = num_nodes if data == "auto" else int(data), devices if tensor == "auto" else int(tensor)
    if data * stages * tensor != ranks:
        fits = ranks % (stages * tensor) == 0
        advice = f"Use data_parallel_size={ranks // (stages * tensor)}" if fits else "Choose sizes whose product is the number of ranks"
        raise MisconfigurationException(
            f"ModelParallelStrategy: data_parallel_size={data} x pipeline_parallel_size={stages} x tensor_parallel_size={tensor} make "
            f"{data * stages * tensor} ranks, but there are {ranks} ({num_nodes} node(s) of {devices} devices). {advice}, or ask for other devices."
        )
    return data, stages, tensor


def place(rank: int, sizes: Sizes) -> Sizes:
    """Return the indices of `rank` along `DIMS`; the last moves fastest."""
    _, stages, tensor = sizes
    return rank // (stages * tensor), rank // tensor % stages, rank % tensor
