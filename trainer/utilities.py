"""Small helpers for users' code: what runs on rank 0 only, and the norms of gradients."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

from trainer.launchers.environment import rank_of_process

__all__ = ["grad_norm", "rank_zero_debug", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]

_log = logging.getLogger("trainer")
if _log.level == logging.NOTSET:
    _log.setLevel(logging.INFO)
if not _log.hasHandlers():  # else the program has said where messages go
    _log.addHandler(logging.StreamHandler())
    _log.propagate = False


class _RankZeroOnly:
    """Decorator: the function runs on global rank 0 alone, and returns `default` elsewhere.

    Which rank this process has is asked when the function is called, so it may be decorated, and called, anywhere: in a run, ahead of
    one, in a program started by torchrun or srun. `rank_zero_only.rank` tells it, too.
    """

    @property
    def rank(self) -> int:
        """The global rank of this process; 0 for one that is alone."""
        return torch_dist.get_rank() if torch_dist.is_available() and torch_dist.is_initialized() else rank_of_process()

    def __call__(self, fn: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return wrapped


rank_zero_only = _RankZeroOnly()


def _caller() -> int:
    """The `stacklevel`, for a function that was called by one of these, of the line outside of this file that led to it."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals is globals():
        frame, level = frame.f_back, level + 1
    return level


@rank_zero_only
def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """Log a message on rank 0, with the logger "trainer" and its level INFO; the arguments are those of `logging.info`."""
    _log.info(*args, **{"stacklevel": _caller(), **kwargs})


@rank_zero_only
def rank_zero_debug(*args: Any, **kwargs: Any) -> None:
    """Log a message on rank 0, with the logger "trainer" and its level DEBUG, which is off by default."""
    _log.debug(*args, **{"stacklevel": _caller(), **kwargs})


@rank_zero_only
def rank_zero_warn(message: Any, stacklevel: int | None = None, category: type[Warning] = UserWarning) -> None:
    """Issue a warning on rank 0, as of the line that called this (or, with `stacklevel`, as `warnings.warn` counts from there)."""
    warnings.warn(message, category, stacklevel=_caller() if stacklevel is None else stacklevel)


@rank_zero_only
def rank_zero_deprecation(message: Any, stacklevel: int | None = None) -> None:
    """Issue a DeprecationWarning on rank 0."""
    warnings.warn(message, DeprecationWarning, stacklevel=_caller() if stacklevel is None else stacklevel)


def grad_norm(module: torch.nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient and of all of them together, for `self.log_dict` in `on_before_optimizer_step`.

    The names are `grad_2.0_norm/layer.weight` and `grad_2.0_norm_total`. Parameters without a gradient are left out. Nothing is read from
    the device. Collective where parameters are cut over ranks.

    Args:
        module: whose parameters.
        norm_type: p of the p-norm; "inf" for the largest element.
        group_separator: what stands between the two parts of a name.

    Raises:
        ValueError: norm_type is not greater than 0.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be a number > 0, or 'inf'; got {norm_type!r}.")
    norms = {name: _norm(q.grad.detach(), p) for name, q in module.named_parameters() if q.grad is not None}
    found = {f"grad_{p}_norm{group_separator}{name}": norm for name, norm in norms.items()}
    if norms:
        first = next(iter(norms.values()))
        found[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms.values()]), p)
    return found


def _norm(grad: torch.Tensor, p: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(grad, p)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a DTensor
