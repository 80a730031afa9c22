"""The order of an epoch: which entry of the data comes at which place, as a pure function of (seed, epoch).

An order is a `range` (sequential), an int64 tensor (torch's own shuffling; 8 bytes an entry) or a list (whatever a user's
sampler gave). It is worked out once an epoch; cutting it into batches costs the same at every place.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainer.errors import MisconfigurationException
from trainer.seed import derive, keyed_rng

__all__ = ["Order", "is_random", "make_order", "own_generator", "sampler_length", "sequential", "unwrap_batches"]

Order = range | torch.Tensor | list


def make_order(sampler: Any, seed: int, key: str, epoch: int, initial: dict[int, int]) -> Order:
    """Return all entries `sampler` gives in this epoch. The global generators and the sampler's own stay as they were.

    Args:
        sampler: a sampler or batch sampler; `set_epoch(epoch)` is called where it, or the sampler inside it, has one.
        seed: the run's seed; key: the loader's name among the run's loaders, so that no two share an order.
        initial: from the id of a generator that a sampler carries to the seed it had when the run began.
    """
    for part in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
    if type(sampler) is SequentialSampler:
        return range(len(sampler.data_source))
    generator = own_generator(sampler)
    if generator is not None:
        # The user's generator names the shuffling; the epoch is mixed in so that an epoch does not depend on those before it.
        seed = initial.get(id(generator), generator.initial_seed())
    mixed = derive(seed, "order", key, epoch)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return torch.randperm(sampler.num_samples, generator=torch.Generator().manual_seed(mixed))
    if generator is None:
        with keyed_rng(mixed):
            return _listed(sampler)
    state = generator.get_state()
    try:
        generator.manual_seed(mixed)
        with keyed_rng(mixed):
            return _listed(sampler)
    finally:
        generator.set_state(state)


def _listed(sampler: Any) -> list[Any]:
    """Return what a sampler gives, up to its declared length: some go on for ever and mean the length as the end of an epoch."""
    return list(islice(sampler, sampler_length(sampler)))


def own_generator(sampler: Any) -> torch.Generator | None:
    """Return the torch.Generator a sampler (or the sampler inside a batch sampler) carries, if it does."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def sampler_length(sampler: Any) -> int:
    """Return how many entries a sampler says it gives.

    Raises:
        MisconfigurationException: when it has no length, so that an epoch would have no end.
    """
    try:
        return len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise MisconfigurationException(
            f"The sampler {type(sampler).__name__} has no __len__, so the length of an epoch is unknown. Give it one, or make the "
            "data an IterableDataset."
        ) from error


def is_random(sampler: Any) -> bool:
    """True for samplers whose order is drawn: what `shuffle=False` replaces."""
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def sequential(sampler: Any, dataset: Any) -> Sampler | list:
    """Return the fixed order that takes the place of a random sampler: the same entries, not shuffled."""
    if isinstance(sampler, SubsetRandomSampler):
        return list(sampler.indices)
    return SequentialSampler(dataset)


def unwrap_batches(batch_sampler: Any) -> tuple[Any, int, bool] | None:
    """Return (sampler, batch size, drop_last) of exactly torch's own BatchSampler, which ranks can cut by samples."""
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    return None
