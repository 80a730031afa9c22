"""Moving a project from PyTorch Lightning to this trainer.

    python -m trainer.migrate PATH            show what would change, and what is to do by hand
    python -m trainer.migrate PATH --write    change the files
    python -m trainer.migrate PATH --check    say by the exit status alone whether anything is left to change

The exit status is 0 when nothing is to do by hand, 1 when something is (with --check: or could be changed), 2 when it was called wrongly.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.migrate",
        description="Rewrite programs, notebooks and YAML files for PyTorch Lightning. Without --write nothing is changed.",
    )
    parser.add_argument("path", type=Path, help="a file, or the folder of a project")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="change the files")
    how.add_argument("--check", action="store_true", help="show no differences; status 1 when anything would change")
    given = parser.parse_args(arguments)
    if not given.path.exists():
        parser.error(f"there is no {given.path}")
    if importlib.util.find_spec("libcst") is None:
        print("python -m trainer.migrate needs libcst: pip install 'torch-trainer-kit[migrate]', or pip install libcst.", file=sys.stderr)
        return 2
    from trainer.migrate import project  # needs libcst

    found = project.migrate(given.path)
    changed = [one for one in found if one.after != one.before]
    failed = []
    for one in changed:
        if given.write:
            try:
                project.write(one)
            except OSError as error:
                failed.append(f"{one.path}: cannot be written ({error}): it is as it was.")
        elif not given.check:
            sys.stdout.write(_difference(str(one.path), one.before, one.after))
    sys.stdout.flush()
    by_hand = len(failed)
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    for one in found:
        for note in one.notes:
            by_hand += note.by_hand
            print(f"{one.path}:{note.place}: {'' if note.by_hand else 'note: '}{note.text}", file=sys.stderr)
    verb = "changed" if given.write else "to change"
    print(f"{len(changed) - len(failed)} file(s) {verb}, {by_hand} place(s) to change by hand.", file=sys.stderr)
    if changed and not given.write and not given.check:
        print("Nothing was written; --write does.", file=sys.stderr)
    return int(by_hand > 0 or (given.check and bool(changed)))


def _difference(path: str, before: str, after: str) -> str:
    old, new = (list(io.StringIO(text, newline="")) for text in (before, after))  # splits where lines end, and nowhere else
    lines = difflib.unified_diff(old, new, path, path)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
