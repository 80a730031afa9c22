"""The charts of TensorBoard's Custom Scalars tab, worked out from the names that a run publishes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from callbacks.errors import MisconfigurationException

__all__ = ["Charts", "check_layout", "tag_of"]

_STAGE = r"((train|training|val|valid|validation|test)[_/.-])?"
_KIND = r"(_step|_epoch)?(/dataloader_idx_\d+)?"
_MONITOR = "system/on_train_batch_end/"

_KNOWN = (
    ("optimization", "learning rate", r"(.*[-_/ .])?(lr|learning_rate)([-_/ .].*)?(?<!-momentum)(?<!-weight_decay)$"),
    ("optimization", "gradient norm", r"grad_norm(_\d+)?$"),
    ("optimization", "gradient norm by layer", r"grad_norm/"),
    ("optimization", "momentum", r".*-momentum$"),
    ("optimization", "weight decay", r".*-weight_decay$"),
    ("throughput", "samples a second", r"train\W.*samples_per_sec$"),
    ("throughput", "items a second", r"train\W.*items_per_sec$"),
    ("throughput", "batches a second", r"train\W.*batches_per_sec$"),
    ("throughput", "operations a second", r"train\W.*flops_per_sec$"),
    ("throughput", "share of the device's operations", r"train\W.*\bmfu$"),
    ("throughput", "seconds a step: all, data wait, forward", r"straggler/(step_time|data_wait|forward)$"),
    ("memory", "device memory in bytes", _MONITOR + r"((allocated|reserved)_bytes\.all\.(current|peak)|allocated_bytes|driver_bytes)$"),
    ("memory", "memory of the machine in percent", _MONITOR + r"cpu_vm_percent$"),
    ("memory", "load of the processor in percent", _MONITOR + r"cpu_percent$"),
    ("ranks", "skew: slowest rank / the others", r"straggler/skew$"),
    ("ranks", "slowest rank", r"straggler/slowest_rank$"),
    ("ranks", "data wait by rank, seconds a step", r"straggler/data_wait/rank_"),
    ("ranks", "forward by rank, seconds a step", r"straggler/forward/rank_"),
)
"""Category, title, and what the names of the lines look like: those of LearningRateMonitor, GradientMonitor, ThroughputMonitor,
StragglerMonitor and DeviceStatsMonitor."""

_NO_CHART = re.compile(
    r"epoch$|hp_metric$|best/|system/|(train|validate|test|predict)\W(\w+\W)?(time|batches|samples|lengths|mfu|\w+_per_sec)$"
)


class Charts:
    """Collects names; each belongs to one chart. Runs with the same names have the same charts, so that TensorBoard joins them.

    A loss or metric shares its chart with those that are called alike but for the stage: acc, val_acc, test/acc, acc_epoch.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._names: set[str] = set()
        self._charts: dict[tuple[int, str, str], str] = {}  # (place, category, title) -> regular expression of the names

    def add(self, names: Iterable[str]) -> bool:
        """Take in names, which all begin with the prefix; return True when there is a chart more than before."""
        new, before = set(names) - self._names, len(self._charts)
        self._names |= new
        for name in new:
            self._place(name.removeprefix(self._prefix))
        return len(self._charts) > before

    def _place(self, name: str) -> None:
        for place, (category, title, pattern) in enumerate(_KNOWN):
            if re.match(pattern, name):
                self._charts[place, category, title] = re.escape(self._prefix) + pattern
                return
        if not _NO_CHART.match(name):
            title = re.sub(rf"{_KIND}$", "", re.sub(f"^{_STAGE}", "", name)) or name
            place = -2 if "loss" in title.lower() else -1
            self._charts[place, "losses and metrics", title] = f"{re.escape(self._prefix)}{_STAGE}{re.escape(title)}{_KIND}$"

    def layout(self) -> dict[str, dict[str, list[Any]]]:
        """Return the charts in the format of `SummaryWriter.add_custom_scalars`: losses, metrics, then the monitors'."""
        found: dict[str, dict[str, list[Any]]] = {}
        for (_, category, title), pattern in sorted(self._charts.items()):
            found.setdefault(category, {})[title] = ["Multiline", [pattern]]
        return found


def tag_of(name: str) -> str:
    """Return how TensorBoard shall call a number: it sorts by name, and the machine's figures are not what one looks for first."""
    return f"system/{name.removeprefix('DeviceStatsMonitor.')}" if name.startswith("DeviceStatsMonitor.") else name


def check_layout(layout: Any) -> None:
    """Refuse what is neither True nor False nor a layout of one's own.

    Raises:
        MisconfigurationException: saying what is wrong with it.
    """
    if isinstance(layout, bool):
        return
    form = 'layout= takes True, False or {"category": {"chart": ["Multiline", ["regular expression of names", ...]]}}'
    if not isinstance(layout, Mapping) or not all(isinstance(charts, Mapping) for charts in layout.values()):
        raise MisconfigurationException(f"{form}; got {layout!r}.")
    for charts in layout.values():
        for title, chart in charts.items():
            if not isinstance(chart, (list, tuple)) or len(chart) != 2 or chart[0] not in ("Multiline", "Margin") or isinstance(chart[1], str):
                raise MisconfigurationException(f"{form}; chart {title!r} is {chart!r}.")
            if chart[0] == "Margin" and len(chart[1]) != 3:
                raise MisconfigurationException(f'layout=: the "Margin" chart {title!r} needs three names (value, lower, upper); got {list(chart[1])!r}.')
