"""Looking at checkpoints from the command line.

    python -m trainer.checkpoint show FILE              what is in it, and whether it is whole
    python -m trainer.checkpoint consolidate DIR FILE   make one file of a sharded checkpoint
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from trainer.checkpoint import files, io
from trainer.checkpoint.contents import describe
from trainer.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit status: 1 for a file that is damaged, not there, or no checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m trainer.checkpoint", description="Look at checkpoints. Nothing in a file is run.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print what is in a checkpoint, and whether it is whole")
    show.add_argument("file", help="a checkpoint file, or the folder of a sharded one")
    consolidate = commands.add_parser("consolidate", help="make one plain file of a sharded checkpoint")
    consolidate.add_argument("folder", metavar="dir", help="the folder of a sharded checkpoint")
    consolidate.add_argument("file", help="the file to write")
    given = parser.parse_args(arguments)
    try:
        if given.command == "show":
            text, whole = describe(given.file)
            print(text)
            return 0 if whole else 1
        if os.path.isfile(given.folder):
            raise CheckpointError(f"{given.folder} is no sharded checkpoint: it is a file already.")
        io.save(files.load(given.folder), given.file)
        print(f"Wrote {given.file}.")
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
