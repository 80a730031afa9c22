"""Make terminal.svg: what a terminal (tmux) shows in the middle of the digits example. Needs tmux and rich; best on an idle machine.

    python docs/pictures/terminal.py
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WIDTH = 122
TMUX = ["tmux", "-L", f"picture-{time.time_ns()}"]


def tmux(*arguments: str) -> str:
    return subprocess.run([*TMUX, *arguments], check=True, capture_output=True, text=True).stdout


def screens(folder: str) -> list[str]:
    """Run the example in `folder`; return what was seen while it validated."""
    (Path(folder) / "examples").symlink_to(ROOT / "examples")
    setting = f"PYTHONPATH={ROOT} PATH={Path(sys.executable).parent}:$PATH PS1='$ ' bash --norc"
    tmux("new-session", "-d", "-x", str(WIDTH), "-y", "26", "-c", folder, setting)
    try:
        time.sleep(1)
        tmux("send-keys", "python examples/digits.py", "Enter")
        found, now, end = [], "", time.monotonic() + 120
        while "Dashboard:" not in now and time.monotonic() < end:
            now = tmux("capture-pane", "-e", "-p")
            if "\nValidation: 100%" in now:
                found.append(now.rstrip())
            time.sleep(0.03)
        return found
    finally:
        tmux("kill-server")


def draw(text: str) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(text), no_wrap=True, overflow="ignore", crop=False)
    svg = console.export_svg(title="examples/digits.py", theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no font from the network
    return re.sub(r"Fira Code(, monospace)?", "DejaVu Sans Mono, Menlo, Consolas, monospace", svg)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        seen = screens(scratch)
    (HERE / "terminal.svg").write_text(draw(seen[len(seen) // 2]))
