"""Kill a training again and again, at random instants and at every call to the file system, and compare what it leaves with a run never stopped.

    python benchmarks/kill.py [--kills 200] [--seed N] [--async-save]

One and two ranks, with and without loader workers; a random process of the run (the caller, a rank, a worker) gets kill -9 during set-up, steps,
validation, writing or rotation, and the same command is given again. After every kill all checkpoints that have a name must load. At the end of each
part the weights, the points in TensorBoard and CSV, the files and what is in them must equal those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.test_kill import counted  # noqa: E402
from tests.helpers.killed import differences, outcome, survive  # noqa: E402
from tests.helpers.ranks import RankError, run_ranks  # noqa: E402

PARTS = [(1, 0), (1, 2), (2, 0), (2, 1)]  # ranks, workers


def at_random(folder: Path, kills: int, chance: random.Random, options: list[str]) -> tuple[int, list[str]]:
    """Kill `kills` times, in as many trainings as it takes; return the number of kills and what was wrong."""
    wrong = survive(folder / "whole", 0, chance, *options)
    expected, done, run = outcome(folder / "whole"), [], 0
    while len(done) < kills:
        run += 1
        place = folder / f"run{run}"
        found = survive(place, min(10, kills - len(done)), chance, *options, show=done.append)
        found += [f"{place.name}: {line}" for line in differences(outcome(place), expected)]
        if found:
            print(*found, *done[-10:], sep="\n", flush=True)
        wrong += found
    return len(done), wrong


def at_every_call(folder: Path) -> tuple[int, list[str]]:
    """Kill one process ahead of each of the calls of an epoch that change a file or a name."""
    (folder / "whole").mkdir(parents=True)
    (calls,) = run_ranks(counted, 1, folder=folder / "whole")
    expected, wrong = outcome(folder / "whole"), []
    for n, name in enumerate(calls):
        place = folder / str(n)
        place.mkdir()
        try:
            run_ranks(counted, 1, folder=place, die_at=n)
        except RankError:
            run_ranks(counted, 1, folder=place)
        found = [f"call {n} ({name}): {line}" for line in differences(outcome(place), expected)]
        if found:
            print(*found, sep="\n", flush=True)
        wrong += found
    return len(calls), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="at random instants, over all parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    args = parser.parse_args()
    chance, wrong = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for ranks, workers in PARTS:
            options = ["--ranks", str(ranks), "--workers", str(workers), *(["--async-save"] if args.async_save else [])]
            start = time.monotonic()
            count, found = at_random(Path(folder, f"{ranks}-{workers}"), -(-args.kills // len(PARTS)), chance, options)
            print(f"{ranks} rank(s), {workers} worker(s): {count} kills, {len(found)} differences, {time.monotonic() - start:.0f} s", flush=True)
            wrong += found
        start = time.monotonic()
        count, found = at_every_call(Path(folder, "calls"))
        print(f"ahead of every call to the file system: {count} kills, {len(found)} differences, {time.monotonic() - start:.0f} s")
    sys.exit(bool(wrong + found))


if __name__ == "__main__":
    main()
