"""Seeds and random states: everything random in a run is a function of one seed and of named keys.

The three generators that user code draws from are torch (CPU and accelerators), `numpy.random` and `random`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["derive", "isolate_rng", "keyed_rng", "rng_state", "seed_everything", "seed_rngs", "set_rng_state"]

_LIMIT = 2**32  # the largest range that numpy.random.seed takes


def derive(seed: int, *keys: int | str) -> int:
    """Return a seed in [0, 2**32) for the stream named by `keys` under `seed`; other keys give unrelated streams.

    A keyed BLAKE2b digest, so neighbouring keys (rank 0 and 1, epoch 3 and 4) share nothing and the value is the same on
    every machine and Python version.
    """
    text = "/".join(map(str, (seed, *keys)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % _LIMIT


def seed_rngs(seed: int) -> None:
    """Seed torch's CPU generator, `random` and, where it is loaded, `numpy.random`. The cheap form for data workers."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _LIMIT)


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed torch (all devices), `random` and `numpy.random`; return the seed used.

    Args:
        seed: the seed, 0 <= seed < 2**32; None draws one from the operating system.
        workers: accepted for Lightning's sake. Data workers are always seeded from the run's seed.
        verbose: print the seed that was set.

    Raises:
        ValueError: when `seed` is out of range.
    """
    if seed is None:
        seed = random.SystemRandom().randrange(_LIMIT)
    seed = int(seed)
    if not 0 <= seed < _LIMIT:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}.")
    seed_rngs(seed)
    torch.manual_seed(seed)  # also the accelerators, lazily
    if verbose:
        print(f"Seed set to {seed}")
    return seed


def rng_state(devices: bool = True) -> dict[str, Any]:
    """Return the state of every generator as tensors and plain containers (loadable with `weights_only=True`)."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, pos, has_gauss, cached = numpy.random.get_state()
        words = torch.from_numpy(keys.astype("int64"))
        state["numpy"] = [str(kind), words, int(pos), int(has_gauss), float(cached)]
    if devices and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned. Generators that the state does not name stay as they are."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, pos, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), pos, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Put every generator back, on leaving, to where it was on entering."""
    state = rng_state(devices=include_cuda)
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def keyed_rng(seed: int) -> Iterator[None]:
    """Run a block under CPU generators seeded with `seed`; the caller's streams go on afterwards as if nothing was drawn."""
    with isolate_rng(include_cuda=False):
        seed_rngs(seed)
        yield
