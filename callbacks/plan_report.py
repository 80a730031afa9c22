"""PlanReport: the figures of a plan beside those of the run, in the loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["PlanReport"]

class PlanReport(Callback):
    """Sends what `trainer.plan` worked out to the loggers when training starts, and what rank 0 really held when it ends.

    The numbers are `plan/...` at step 0 and `measured/...` at the last step, with the same names: bytes of parameters, gradients, optimizer
    and buffers; on an accelerator also `measured/total`, the most memory of tensors at a time. Loggers that take texts get both as a table.

    Args:
        plan: a Plan, or the path of the JSON file that it was saved to. Make it ahead of the run: a plan needs torch's process group for itself.
        checkpointed: the run has activation checkpointing, so the plan's second column counts.

    Raises:
        MisconfigurationException: for what is no plan, and for `checkpointed` with a plan without that column.
    """

    def __init__(self, plan: Any, checkpointed: bool = False) -> None:
        found = plan if isinstance(plan, Mapping) else plan.to_dict() if hasattr(plan, "to_dict") else _read(plan)
        memory = found.get("checkpointed" if checkpointed else "memory") if isinstance(found, Mapping) else None
        if not isinstance(memory, Mapping):
            what = "has no column with activation checkpointing" if checkpointed else "is no plan of trainer.plan(...), nor the path of one"
            raise MisconfigurationException(f"PlanReport(plan={type(plan).__name__}) {what}.")
        transfers = found.get("transfers_checkpointed" if checkpointed else "transfers") or []
        flops = found.get("flops_checkpointed" if checkpointed else "flops") or 0
        self.planned = {name: float(value) for name, value in memory.items()}
        self.planned.update(flops=float(flops), communicated=float(sum(t["bytes"] for t in transfers)))
        self.measured: dict[str, float] = {}
        """What rank 0 held; filled when training ends."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Log the plan."""
        self._reset(module)
        trainer.log_metrics({f"plan/{name}": value for name, value in self.planned.items()}, step=trainer.logging_step, loggers_only=True)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Log what was measured."""
        states = (value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values())
        self.measured["parameters"] = float(_bytes(p for p in module.parameters() if not p.is_meta))
        self.measured["gradients"] = float(_bytes(p.grad for p in module.parameters()))  # those of the last step
        self.measured["optimizer"] = float(_bytes(states))
        self.measured["buffers"] = float(_bytes(b for b in module.buffers() if not b.is_meta))
        device = _device(module)
        if device is not None and device.type == "cuda":
            self.measured["total"] = float(torch.cuda.max_memory_allocated(device))
        trainer.log_metrics({f"measured/{name}": value for name, value in self.measured.items()}, step=trainer.logging_step, loggers_only=True)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                writer = getattr(getattr(logger, "experiment", None), "add_text", None)
                if writer is not None:
                    writer("plan", self.table(), trainer.global_step)

    def table(self) -> str:
        """Return planned and measured figures side by side, as a Markdown table."""
        names = dict.fromkeys([*self.planned, *self.measured])
        rows = [f"| {name} | {_number(self.planned.get(name))} | {_number(self.measured.get(name))} |" for name in names]
        return "\n".join(["| bytes on rank 0 | planned | measured |", "|---|---:|---:|", *rows])

    def _reset(self, module: Any) -> None:
        self.measured.clear()
        device = _device(module)
        if device is not None and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def _read(path: Any) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (TypeError, ValueError, OSError) as error:
        raise MisconfigurationException(f"PlanReport(plan={path!r}) is no plan of trainer.plan(...), nor the path of one: {error}") from error


def _device(module: Any) -> torch.device | None:
    return next((p.device for p in module.parameters() if not p.is_meta), None)


def _bytes(tensors: Any) -> int:
    parts = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
