"""The program that each local rank runs: `python worker.py FOLDER`. It takes over the launcher's import path, then becomes a rank.

Started by its path and not with `-m`: a project that the caller found through `sys.path` is then found here as well, and no file
in the working directory can hide a module of the standard library.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys


def _start(folder: str) -> None:
    with open(os.path.join(folder, "start.json"), encoding="utf-8") as file:
        start = json.load(file)
    sys.path[:] = start["path"]  # also drops this file's own folder, which Python put first
    sys.argv[:] = start["argv"]
    for name, value in start["environment"].items():
        os.environ.setdefault(name, value)  # before torch is loaded: OpenMP reads its variable once
    # Before torch, which takes long to load: whoever dies meanwhile is noticed too.
    line = importlib.import_module("trainer.launchers.supervisor").Line(folder, int(os.environ["RANK"]))
    gc.disable()  # importing torch makes many objects and no garbage
    rank = importlib.import_module("trainer.launchers.rank")
    gc.freeze()
    gc.enable()
    rank.main(folder, line)


if __name__ == "__main__":
    _start(sys.argv[1])
