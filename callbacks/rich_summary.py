"""RichModelSummary: the table of layers drawn by the package rich, which is optional."""

from __future__ import annotations

import io
import sys
from typing import Any

from callbacks.model_summary import ModelSummary
from callbacks.rich_progress import need_rich
from callbacks.summary import Summary

__all__ = ["RichModelSummary"]


class RichModelSummary(ModelSummary):
    """Print the table of `summarize` when fit starts, on rank 0, drawn by rich; in a file without colours.

    Args:
        max_depth: Levels of nested layers to show; 0 prints nothing, -1 shows all.
        header_style: of the first row.

    Raises:
        MisconfigurationException: rich is not installed; `max_depth` below -1.
    """

    def __init__(self, max_depth: int = 1, header_style: str = "bold magenta") -> None:
        need_rich(type(self).__name__)
        super().__init__(max_depth)
        self._header_style = header_style

    def show(self, trainer: Any, summary: Summary) -> None:
        from rich.console import Console  # optional
        from rich.table import Table

        header, *rows = summary.rows()
        table = Table(header_style=self._header_style)
        for name in header:
            table.add_column(name, justify="right" if name in ("Params", "FLOPs") else "left", style="dim" if not name else "")
        for row in rows:
            table.add_row(*map(escape_markup, row))
        totals = Table.grid(padding=(0, 1))
        for number, text in summary.totals():
            totals.add_row(number, escape_markup(text))
        colours = sys.stdout is not None and sys.stdout.isatty()
        console = Console(file=io.StringIO(), force_terminal=colours, width=None if colours else 400)  # a file has no edge to break lines at
        console.print(*([table] if rows else []), totals, sep="\n")
        trainer.print("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()))


def escape_markup(text: str) -> str:
    """Sizes are in brackets, as rich's markup is."""
    return text.replace("[", "\\[")
