"""RichProgressBar: bars by the package rich, which is optional; a few plain lines where the output is a file."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from callbacks.errors import MisconfigurationException
from callbacks.progress_drawing import DRAW_SECONDS, Pass, finite, fit_left, interval
from callbacks.progress_passes import PassesBar

__all__ = ["RichProgressBar", "RichProgressBarTheme"]


@dataclass
class RichProgressBarTheme:
    """Styles of rich ("bold red", "#6206E0") for the parts of a RichProgressBar.

    Args:
        description: of the name of the pass ("Epoch 3/9").
        progress_bar, progress_bar_finished, progress_bar_pulse: of the bar; when it is full; when the number of batches is not known.
        batch_progress: of the number of batches ("10/50").
        time: of the time taken, the time left, and the time that the whole fit has left.
        processing_speed: of the batches a second.
        metrics: of the numbers.
        metrics_text_delimiter: stands between two numbers.
        metrics_format: how numbers are written, a format specification.
    """

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(PassesBar):
    """A bar for the epoch, and below it one for its validation, with the time that the epoch and the whole fit have left.

    Where the output is no terminal, it writes plain lines as a TQDMProgressBar does. What is printed meanwhile appears above the bars.

    Args:
        refresh_rate: batches between two drawings (and a tenth of a second at least); 0 turns the bar off.
        leave: keep the bar of every epoch on the screen.
        theme: styles.
        console_kwargs: arguments of `rich.console.Console`.

    Raises:
        MisconfigurationException: rich is not installed; a negative `refresh_rate`.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        need_rich(type(self).__name__)
        super().__init__(refresh_rate, leave)
        self.theme = theme or RichProgressBarTheme()
        self._console_kwargs = console_kwargs or {}

    def _forget(self) -> None:
        super()._forget()
        self._screen: _Screen | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_screen": None}

    val_sanity_check_bar = PassesBar.val_progress_bar

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bars."""
        if self._screen is not None and self._screen.progress is not None and not kwargs.get("file"):
            kwargs.pop("file", None)
            kwargs.pop("flush", None)
            self._screen.console.print(*args, **{"markup": False, "highlight": False, **kwargs})
        else:
            print(*args, **kwargs)

    def configure_columns(self, trainer: Any) -> list[Any]:
        """Return the columns of a bar; override to choose others. A task's `fields` hold the texts "time", "speed" and "metrics"."""
        from rich.progress import BarColumn, TextColumn  # optional

        theme = self.theme
        bar = BarColumn(complete_style=theme.progress_bar, finished_style=theme.progress_bar_finished, pulse_style=theme.progress_bar_pulse)
        texts = [("{task.fields[batches]}", theme.batch_progress), ("{task.fields[time]}", theme.time),
                 ("{task.fields[speed]}", theme.processing_speed), ("{task.fields[metrics]}", theme.metrics)]  # fmt: skip
        first = TextColumn("{task.description}", style=theme.description, markup=False)
        return [first, bar, *(TextColumn(text, style=style, markup=False) for text, style in texts)]

    def _can_draw(self, alone: bool) -> bool:
        from rich.console import Console  # optional

        console = Console(**self._console_kwargs)
        widgets = console.is_jupyter and alone and importlib.util.find_spec("ipywidgets") is not None
        if not widgets and (console.is_jupyter or not console.is_terminal or console.is_dumb_terminal):
            return False
        self._screen = _Screen(console, lambda: self.configure_columns(self.trainer))
        return True

    def _pass(self, stage: str, description: str, total: float, whole: float, nested: bool) -> Pass:
        leave = self._leave if stage == "train" else stage in ("val", "test", "predict") and not nested
        return _Task(self._screen, self.theme, leave, self._refresh_rate, description, total, whole)


class _Screen:
    """The bars that are shown together; when the last is gone, what shall stay is left on the screen."""

    def __init__(self, console: Any, columns: Any) -> None:
        self.console, self.columns = console, columns
        self.progress: Any = None
        self.open = 0

    def add(self, description: str, total: float) -> Any:
        from rich.progress import Progress  # optional

        if self.progress is None:
            self.progress = Progress(*self.columns(), console=self.console, auto_refresh=False)  # without a thread
            self.progress.start()
        self.open += 1
        texts = {"batches": "", "time": "", "speed": "", "metrics": ""}
        task = self.progress.add_task(description, total=finite(total), **texts)
        self.progress.refresh()
        return self.progress.tasks[self.progress.task_ids.index(task)]

    def remove(self, task: Any, leave: bool) -> None:
        self.open -= 1
        if not leave:
            self.progress.remove_task(task.id)
        if self.open:
            self.progress.refresh()
            return
        self.progress.live.transient = not self.progress.tasks
        self.progress.stop()
        self.progress = None


class _Task(Pass):
    """A pass shown by rich."""

    def __init__(
        self, screen: Any, theme: RichProgressBarTheme, leave: bool, every: int, description: str, total: float, whole: float
    ) -> None:
        super().__init__(every, description, total, whole)
        self.screen, self.theme, self.leave = screen, theme, leave
        self.next_batch, self.next_time = 1, 0.0
        self.bar = screen.add(description, total)

    def draw(self, done: int, metrics: Mapping[str, Any], left: float | None) -> None:
        self.mark(done)
        self.end(metrics, left)
        self.next_batch = done + self.every
        self.next_time = time.monotonic() + DRAW_SECONDS

    def end(self, metrics: Mapping[str, Any], left: float | None) -> None:
        here, took = self.done - (self.first or 0), self.took
        times = [interval(took), "--:--" if self.left is None else interval(self.left), fit_left(left)]
        self.screen.progress.update(
            self.bar.id,
            completed=self.done,
            total=finite(self.total),
            batches=self.count,
            time=" • ".join(text for text in times if text),
            speed=f"{here / took:.2f}it/s" if took > 0 else "",
            metrics=self.theme.metrics_text_delimiter.join(f"{name}: {self._number(value)}" for name, value in metrics.items()),
            refresh=True,
        )

    def _number(self, value: Any) -> str:
        return format(value, self.theme.metrics_format) if isinstance(value, float) else str(value)

    def keep(self) -> None:
        self.leave = True

    def close(self) -> None:
        if self.bar is not None:
            self.screen.remove(self.bar, self.leave)
            self.bar = None


def need_rich(who: str) -> None:
    """Raise a MisconfigurationException where rich is not installed."""
    if importlib.util.find_spec("rich") is None:
        raise MisconfigurationException(f"{who} needs the package rich: pip install rich")
