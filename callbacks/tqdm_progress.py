"""TQDMProgressBar: bars by tqdm on a terminal and in a notebook, a few plain lines where the output is a file."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from callbacks.errors import MisconfigurationException
from callbacks.progress_drawing import DRAW_SECONDS, Pass, finite, fit_left, listed
from callbacks.progress_passes import PassesBar

__all__ = ["TQDMProgressBar"]


class Bar(tqdm):
    """tqdm without its watching thread and its inter-process lock: one process draws, and nothing is left running."""

    monitor_interval = 0


Bar.set_lock(threading.RLock())


class BarPass(Pass):
    """A pass shown by tqdm."""

    def __init__(self, bar: Any, every: int, total: float, whole: float) -> None:
        super().__init__(every, total=total, whole=whole)
        self.next_batch, self.next_time = 1, 0.0
        self.bar = bar
        bar.reset(total=finite(total))

    def draw(self, done: int, metrics: Mapping[str, Any], left: float | None) -> None:
        begins = self.first is None
        self.mark(done)
        if begins:
            self.bar.initial = self.first
        self._show(metrics, left)
        self.next_batch = done + self.every
        self.next_time = time.monotonic() + DRAW_SECONDS

    def end(self, metrics: Mapping[str, Any], left: float | None) -> None:
        self._show(metrics, left)

    def _show(self, metrics: Mapping[str, Any], left: float | None) -> None:
        self.bar.n, self.bar.total = self.done, finite(self.total)
        self.bar.set_postfix_str(", ".join(part for part in (fit_left(left), listed(metrics)) if part), refresh=False)
        self.bar.refresh()

    def restart(self) -> None:
        super().restart()
        self.bar.reset(total=self.bar.total)

    def keep(self) -> None:
        self.bar.leave = True

    def close(self) -> None:
        self.bar.close()


class TQDMProgressBar(PassesBar):
    """A bar for the epoch, one for validation, test and prediction, with the time that the epoch and the whole fit have left.

    On a terminal and in a notebook it is drawn by tqdm, at most each `refresh_rate` batches and each tenth of a second. Where the
    output is a file or a pipe, it writes plain lines without control characters: the first after 10 s, then with growing pauses of
    up to 5 minutes; at the end of epochs, no more often than each 10 s; and when training ends. Override `init_train_tqdm` and its
    like to make the bars yourself, and `get_metrics` to choose the numbers.

    Args:
        refresh_rate: Batches between two drawings; 0 turns the bar off.
        process_position: Lines to leave free above the bar.
        leave: Keep the bar of every epoch on the screen.

    Raises:
        MisconfigurationException: a negative argument.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    """tqdm's `bar_format`, where the number of batches is known."""

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        if process_position < 0:
            raise MisconfigurationException(f"TQDMProgressBar(process_position={process_position}): expected 0 or more.")
        self._process_position = process_position

    def _forget(self) -> None:
        super()._forget()
        self._bar_class: type = Bar

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bar_class": Bar}

    @property
    def process_position(self) -> int:
        """Lines left free above the bar."""
        return self._process_position

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: Any = None) -> None:
        """Print above the bar."""
        bars = (self._train.bar, self._evaluation.bar, self._drain.bar)
        if self._bar_class is not Bar or not any(bar is not None for bar in bars):
            print(*args, sep=sep, end=end, file=file, flush=True)
        else:
            Bar.write(sep.join(map(str, args)), file=file or sys.stdout, end=end)

    # -- bars ------------------------------------------------------------------------------------------------------------

    def init_sanity_tqdm(self) -> Any:
        """Return the bar of the sanity check; override to make another, as with the following."""
        return self._make(self.sanity_check_description, nested=True, leave=False)

    def init_train_tqdm(self) -> Any:
        """Return the bar of an epoch. It gets its description and total later."""
        return self._make(self.train_description, leave=self._leave)

    def init_validation_tqdm(self) -> Any:
        """Return the bar of a validation."""
        nested = self.trainer.state.fn == "fit"
        return self._make(self.validation_description, nested=nested, leave=not nested)

    def init_test_tqdm(self) -> Any:
        """Return the bar of a test."""
        return self._make(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Return the bar of a prediction."""
        return self._make(self.predict_description, leave=True)

    def _make(self, description: str, leave: bool, nested: bool = False) -> Any:
        position = self._process_position + (nested and self._train.bar is not None)
        return self._bar_class(
            desc=description, position=position, leave=leave, file=sys.stdout, smoothing=0, disable=self.is_disabled, **_width()
        )

    def _can_draw(self, alone: bool) -> bool:
        found = bar_class(alone)
        self._bar_class = found or Bar
        return found is not None

    def _pass(self, stage: str, description: str, total: float, whole: float, nested: bool) -> Pass:
        if stage == "drain":
            bar = self._make(description, leave=False, nested=True)
        else:
            bar = getattr(self, f"init_{_NAMES.get(stage, stage)}_tqdm")()
        if stage == "train" or "DataLoader" in description:
            bar.set_description_str(description, refresh=False)
        if total > 0 and finite(total) is not None and bar.bar_format is None:
            bar.bar_format = self.BAR_FORMAT
        return BarPass(bar, self._refresh_rate, total, whole)


_NAMES = {"val": "validation", "sanity_val": "sanity"}


def bar_class(alone: bool) -> type | None:
    """Return the tqdm class for where standard output goes, or None where plain lines are due.

    Args:
        alone: False in one of several processes, which have no way to the widgets of the notebook that started them.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        return notebook_bar() if alone and importlib.util.find_spec("ipywidgets") is not None else None
    return Bar if sys.stdout is not None and sys.stdout.isatty() else None


def notebook_bar() -> type:
    """Return tqdm's widget, without its watching thread; one that is closed ahead of its total is no failure."""
    from tqdm.notebook import tqdm as notebook  # optional: needs ipywidgets

    class NotebookBar(notebook):
        monitor_interval = 0

        def close(self) -> None:
            if self.disable:
                return
            super().close()
            self.container.children[1].bar_style = ""
            self.disp(close=not self.leave, check_delay=False)

    return NotebookBar


def _width() -> dict[str, Any]:
    """Follow the terminal's size; one that reports none (a container's, a CI job's) is taken for 80 by 24."""
    try:
        known = os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except (OSError, ValueError):  # no terminal underneath: a notebook
        known = True
    return {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}
