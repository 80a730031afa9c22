"""What `self.log` does with a value: sums on the value's device, read only when numbers are published.

Between two publish points nothing here waits for a device. At a publish point the ranks compare the names they hold, add
up one vector, and one transfer brings the result to the host. Sums are kept in 64-bit floats where the device has them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.dist import Dist
from trainer.entries import REDUCTIONS, Entry
from trainer.errors import MisconfigurationException
from trainer.metric_objects import is_metric, load_object, object_state

__all__ = ["Collector", "Published", "batch_size_of", "is_metric"]


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of the first tensor found in it, else 1."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, dict):
        batch = batch.values()
    elif isinstance(batch, (str, bytes)) or not isinstance(batch, Iterable):
        return 1
    for item in batch:
        if isinstance(item, (torch.Tensor, dict, list, tuple)):
            return batch_size_of(item)
    return 1


@dataclass
class Published:
    """The numbers of one publish point, equal on all ranks."""

    callback: dict[str, float] = field(default_factory=dict)
    logger: dict[str, float] = field(default_factory=dict)
    bar: dict[str, float] = field(default_factory=dict)
    loader: dict[str, int | None] = field(default_factory=dict)
    epochs: set[str] = field(default_factory=set)
    """The names that stand for a whole epoch."""

    def join(self, other: Published) -> Published:
        """Take in `other`, whose numbers win; return self."""
        for name, numbers in vars(other).items():
            getattr(self, name).update(numbers)
        return self


class Collector:
    """Everything logged in one stage (training, or one validation pass).

    Args:
        dist: the ranks to reduce over.
        find_metric: returns the metric object at an attribute path of the module, for a rank that did not log it itself.
        records: None where every rank's numbers count; else whether this rank's do. The others saw the same samples as one that does.
    """

    def __init__(self, dist: Dist, find_metric: Callable[[str], Any] | None = None, records: bool | None = None) -> None:
        self.dist = dist
        self.find_metric = find_metric
        self.records = records
        self.entries: dict[str, Entry] = {}
        self._guests: list[Any] = []  # metric objects that only other ranks logged
        self._signature: tuple[tuple[Any, ...], int] = ((), 0)

    # -- logging: hot --------------------------------------------------------------------------------------------------

    def entry(
        self, name: str, loader: int | None, reduce: Any, on_step: bool, on_epoch: bool, bar: bool, logger: bool
    ) -> Entry:
        """Return the entry of `name`, made on first use. The flags of a name are those of its first call.

        Raises:
            MisconfigurationException: for a reduction other than mean, sum, min, max, or one that changed.
        """
        key = name if loader is None else f"{name}/dataloader_idx_{loader}"
        found = self.entries.get(key)
        if found is None:
            if not isinstance(reduce, Hashable) or reduce not in REDUCTIONS:
                raise MisconfigurationException(
                    f"self.log({name!r}, reduce_fx={reduce!r}): reduce_fx must be 'mean', 'sum', 'min' or 'max'."
                )
            found = self.entries[key] = Entry(key, REDUCTIONS[reduce], on_step, on_epoch, bar, logger)
            found.loader = loader
        elif found.on_step != on_step or found.on_epoch != on_epoch or REDUCTIONS.get(reduce) != found.reduce:
            raise MisconfigurationException(
                f"self.log({name!r}) was called with other on_step, on_epoch or reduce_fx before in this stage; give each its own name."
            )
        return found

    def flags(self) -> list[tuple[Any, ...]]:
        """Return the names and flags of what was logged, for `expect` of a rank that logs nothing itself."""
        return [e.flags() for e in self.entries.values()]

    def expect(self, flags: Iterable[tuple[Any, ...]]) -> None:
        """Know the names that another rank logs."""
        for one in flags:
            self.entries.setdefault(one[0], Entry.of(one))

    # -- publishing ----------------------------------------------------------------------------------------------------

    def publish_step(self, step: int | None = None) -> Published:
        """Return the values that were logged during step `step`, reduced over its batches and over ranks. Collective.

        Without a step, those of the last time that each name was logged.
        """
        due = {
            e.label("step"): e
            for e in self.entries.values()
            if e.on_step and e.step_items and step in (None, e.step)
        }
        rows = {key: (e.reduce, *e.step_total()) for key, e in due.items()}
        return self._file(self._across_ranks(rows, due), due)

    def publish_epoch(self) -> Published:
        """Return the reduced values of the epoch and forget them. Collective."""
        published = self.peek_epoch()
        self.reset()
        return published

    def peek_epoch(self) -> Published:
        """Return the reduced values of the epoch so far, and go on. Collective."""
        due = {e.label("epoch"): e for e in self.entries.values() if e.on_epoch}
        rows = {
            key: (e.reduce, e.total, e.weight) for key, e in due.items() if e.metric is None and e.total is not None
        }
        objects = {key: e for key, e in due.items() if e.metric is not None}
        values = self._across_ranks(rows, due)
        values.update(self._compute_metrics(objects))
        published = self._file(values, {**due, **objects})
        published.epochs.update(values)
        return published

    def mark(self) -> dict[str, tuple[Any, ...]]:
        """Return where all sums stand now, for `back_to`."""
        return {
            key: (e, None if e.total is None else e.total.clone(), e.weight, e.step, e.step_items, e.metric)
            for key, e in self.entries.items()
        }

    def back_to(self, mark: dict[str, tuple[Any, ...]]) -> None:
        """Forget what was logged since `mark`."""
        self.entries = {key: values[0] for key, values in mark.items()}
        for e, *values in mark.values():
            e.total, e.weight, e.step, e.step_items, e.metric = values

    def reset(self) -> None:
        """Forget all sums; the next epoch starts from nothing."""
        for entry in self.entries.values():
            if entry.metric is not None and entry.on_epoch:
                entry.metric.reset()
        for metric in self._guests:
            metric.reset()
        self._guests.clear()
        self.entries.clear()

    def _file(self, values: dict[str, float], due: dict[str, Entry]) -> Published:
        """Sort values into what callbacks, loggers and the bar see; a name logged both ways is also found by its own name."""
        out = Published()
        for key, value in values.items():
            entry = due[key]
            out.callback[key], out.loader[key] = value, entry.loader
            if entry.on_step and entry.on_epoch:
                out.callback[entry.name], out.loader[entry.name] = value, entry.loader
            if entry.logger:
                out.logger[key] = value
            if entry.bar:
                out.bar[key] = value
        return out

    def _compute_metrics(self, due: dict[str, Entry]) -> dict[str, float]:
        """Compute metric objects on all ranks in one order, also on ranks that had no batch to log them in: `due` gets those too."""
        mine = {key: (e.path, e.flags()) for key, e in due.items()}
        every: dict[str, Any] = {}
        for found in self.dist.gather(mine) if self.dist.agree(bool(mine)) else []:
            every = {**found, **every}
        values = {}
        for key in sorted(every):
            path, flags = every[key]
            if key not in mine:
                due[key] = Entry.of(flags)
                due[key].metric = self._metric_at(key, path)
                self._guests.append(due[key].metric)
            if self.records is not False:
                values[key] = _one_number(key, due[key].metric.compute())
        if every and self.records is not None:
            values = next(found for found in self.dist.gather(values if self.records else None) if found is not None)
        return values

    def _metric_at(self, key: str, path: str | None) -> Any:
        if path is None or self.find_metric is None:
            raise MisconfigurationException(
                f"{key!r} was logged as a metric object on another rank, and this rank cannot find that object. Make the "
                "metric an attribute of the module, or pass metric_attribute= its name."
            )
        return self.find_metric(path)

    def _across_ranks(self, rows: dict[str, tuple[str, torch.Tensor, float]], due: dict[str, Entry]) -> dict[str, float]:
        """Reduce (kind, sum, weight) rows over the ranks; a name that only some ranks hold is reduced over those.

        `due` holds the entries of the rows, and gets those of names that only other ranks hold.
        """
        kinds = {key: row[0] for key, row in rows.items()}
        if not self.dist.alone:
            kinds = self._common_names(rows, due)
        if not kinds:
            return {}
        numbers = dict(zip(rows, _to_host([row[1] for row in rows.values()]), strict=True))
        if self.dist.alone:
            return {key: _ratio(kinds[key], numbers[key], rows[key][2]) for key in rows}
        sums, extremes = [], []
        for key, kind in kinds.items():
            mine = None if self.records is False else rows.get(key)
            if kind in ("mean", "sum"):
                sums += [numbers[key], mine[2]] if mine else [0.0, 0.0]
            else:
                sign = 1.0 if kind == "max" else -1.0
                extremes.append(sign * numbers[key] if mine else -math.inf)
        total = iter(self.dist.sum(torch.tensor(sums, dtype=torch.float64)).tolist())
        peak = iter(self.dist.maximum(torch.tensor(extremes, dtype=torch.float64)).tolist() if extremes else [])
        out = {}
        for key, kind in kinds.items():
            if kind in ("mean", "sum"):
                out[key] = _ratio(kind, next(total), next(total))
            else:
                out[key] = next(peak) * (1.0 if kind == "max" else -1.0)
        return out

    def _common_names(self, rows: Iterable[str], due: dict[str, Entry]) -> dict[str, str]:
        """Agree on names, their order and flags. One small header where all ranks hold the same; else they travel."""
        names = tuple(sorted((key, due[key].flags()) for key in rows))
        if self._signature[0] != names:
            digest = hashlib.blake2b(repr(names).encode(), digest_size=7).digest()
            self._signature = (names, int.from_bytes(digest, "little"))
        mark = self._signature[1]
        high, low = self.dist.maximum(torch.tensor([mark, -mark], dtype=torch.int64)).tolist()
        if high == -low:
            return {key: due[key].reduce for key, _ in names}
        every: dict[str, tuple[Any, ...]] = {}
        for found in self.dist.gather(dict(names)):
            for key, flags in found.items():
                kind, first = flags[1], every.setdefault(key, flags)[1]
                if kind != first:
                    raise MisconfigurationException(
                        f"{key!r} was logged with reduce_fx={first!r} on one rank and {kind!r} on another."
                    )
        due.update({key: Entry.of(flags) for key, flags in every.items()})
        return {key: due[key].reduce for key in sorted(every)}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sums of the current epoch, so that a mid-epoch resume ends with the same epoch means."""
        state = {}
        for key, e in self.entries.items():
            if e.on_epoch:
                state[key] = {
                    "reduce": e.reduce, "on_step": e.on_step, "bar": e.bar, "logger": e.logger, "path": e.path,
                    "weight": e.weight, "total": None if e.total is None else e.total.detach().cpu().clone(),
                    "objects": [] if e.metric is None else [object_state(e.metric)],
                }  # fmt: skip
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take back what `state_dict` returned; sums go to `device`, where the values will be."""
        self.entries.clear()
        for key, s in state.items():
            e = self.entries[key] = Entry(key, s["reduce"], s["on_step"], True, s["bar"], s["logger"])
            e.weight = s["weight"]
            e.total = None if s["total"] is None else s["total"].to(device)
            e.path = s["path"]
            if e.path is not None and self.find_metric is not None:
                e.metric = self.find_metric(e.path)
            if s.get("objects"):
                load_object(key, e.metric, s["objects"], device)


def _one_number(key: str, value: Any) -> float:
    if isinstance(value, dict) or getattr(value, "numel", lambda: 1)() != 1:
        raise MisconfigurationException(
            f"{key!r} was logged as a metric object that computes more than one number. Log its parts, or numbers made of them, "
            "under names of their own."
        )
    return float(value)


def _ratio(kind: str, total: float, weight: float) -> float:
    if kind != "mean":
        return total
    return total / weight if weight else math.nan


def _to_host(tensors: list[torch.Tensor]) -> list[float]:
    """Read scalars with one transfer a device."""
    out = [0.0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    for device, indices in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        values = torch.stack([tensors[i].detach().reshape(()).to(wide) for i in indices]).tolist()
        for i, value in zip(indices, values, strict=True):
            out[i] = value
    return out
