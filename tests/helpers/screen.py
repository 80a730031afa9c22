"""A terminal for tests: a pseudo-terminal in the place of standard output, and what one would see on it."""

from __future__ import annotations

import os
import re
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Screen", "rendered", "screen"]

_PART = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+|\x1b")


def rendered(text: str) -> list[str]:
    """Return the lines that a terminal shows after `text`: it knows \\r, \\n, cursor up and the deletion of lines."""
    lines, row, column = [""], 0, 0
    for part in _PART.findall(text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b"):
            number = int("".join(c for c in part if c.isdigit()) or 1)
            if part.endswith("A"):
                row = max(row - number, 0)
            elif part.endswith("K"):
                lines[row] = "" if number == 2 else lines[row][:column]
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


class Screen:
    """What was written to the terminal up to now."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        termios.tcsetwinsize(self.slave, (30, 100)) if hasattr(termios, "tcsetwinsize") else None
        self.stream = os.fdopen(os.dup(self.slave), "w", encoding="utf-8")
        self._bytes = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self._bytes += data
        except OSError:  # nobody holds the other end
            pass

    def close(self) -> str:
        """Return all that was written."""
        self.stream.close()
        os.close(self.slave)
        self._reader.join()
        os.close(self.master)
        return self._bytes.decode()


@contextmanager
def screen() -> Iterator[list[str]]:
    """Put a pseudo-terminal in the place of standard output; the list holds all that was written after the block."""
    terminal, before, found = Screen(), sys.stdout, []
    sys.stdout = terminal.stream
    try:
        yield found
    finally:
        sys.stdout = before
        found.append(terminal.close())
