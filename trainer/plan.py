"""The command line `python -m trainer.plan`. In Python it is `from trainer import plan`, a function, in whose place no module may come."""

from __future__ import annotations

import sys

from trainer.planning.command import main

if __name__ != "__main__":
    raise ImportError("trainer.plan is a command, `python -m trainer.plan`. The function is had by `from trainer import plan`.")
sys.exit(main())
