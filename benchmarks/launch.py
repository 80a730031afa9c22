"""Big data in memory and two processes: start time and peak memory, ours against torch.multiprocessing.spawn and a plain pickle.

    python benchmarks/launch.py [--megabytes 1024] [--processes 2] [--repetitions 3]

Each row is a program of its own that makes the data, hands it to its ranks, and lets each rank read all of it. "Start" is from the
launching call to the moment at which the last rank has its data. "Peak" is the highest sum of proportional memory (PSS, in which
shared pages count once) over the program and its ranks, as sampled every 20 ms.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

from trainer.launchers import LocalLauncher
from trainer.world import World

MB = 2**20


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []
    return [pid, *(one for child in children for one in tree(child))]


def pss(pid: int) -> int:
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return int(found[1]) * 1024 if found else 0


class Peak(threading.Thread):
    """Samples the memory of this process and its descendants until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.highest = max(self.highest, sum(map(pss, tree(os.getpid()))))


def read(rank: int, data: torch.Tensor, folder: str, ranks: int) -> None:
    """What a rank does: note the time, read everything, and stay until all have."""
    Path(folder, f"start.{rank}").write_text(repr(time.time()))
    Path(folder, f"sum.{rank}").write_text(repr(float(data.sum())))
    while len(list(Path(folder).glob("sum.*"))) < ranks:
        time.sleep(0.01)
    time.sleep(0.3)  # a sample of all of them


def ours(data: torch.Tensor, folder: str, ranks: int) -> None:
    def task(world: World) -> None:
        read(world.rank, data, folder, ranks)

    LocalLauncher(ranks).launch(task)


def spawn(data: torch.Tensor, folder: str, ranks: int) -> None:
    mp.spawn(read, (data, folder, ranks), nprocs=ranks)


def _read_pickle(rank: int, path: str, folder: str, ranks: int) -> None:
    with open(path, "rb") as file:
        data = pickle.load(file)
    read(rank, data, folder, ranks)


def copies(data: torch.Tensor, folder: str, ranks: int) -> None:
    """A pickle that each rank loads, as a launcher without a mapped file does."""
    path = os.path.join(folder, "data")
    with open(path, "wb") as file:
        pickle.dump(data, file)
    mp.spawn(_read_pickle, (path, folder, ranks), nprocs=ranks)


WAYS = {"ours": ours, "mp.spawn (shared memory)": spawn, "a pickle for each rank": copies}


def measure(way: str, megabytes: int, ranks: int) -> None:
    """Print start seconds and peak bytes of one way; runs in a process of its own."""
    data = torch.ones(megabytes * MB // 4)
    with tempfile.TemporaryDirectory() as folder:
        peak = Peak()
        peak.start()
        begin = time.time()
        WAYS[way](data, folder, ranks)
        peak.over.set()
        peak.join()
        starts = [float(Path(folder, f"start.{rank}").read_text()) for rank in range(ranks)]
    print(max(starts) - begin, peak.highest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.megabytes, given.processes)
        return
    print(f"{given.megabytes} MB of data, {given.processes} processes")
    print(f"{'':28}{'start s':>10}{'lowest':>10}{'highest':>10}{'peak MB':>10}")
    for way in WAYS:
        rows = []
        for _ in range(given.repetitions):
            command = [sys.executable, __file__, "--measure", way, "--megabytes", str(given.megabytes), "--processes", str(given.processes)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append([float(number) for number in done.stdout.split()])
        starts, peaks = zip(*rows)
        print(f"{way:28}{statistics.median(starts):10.2f}{min(starts):10.2f}{max(starts):10.2f}{max(peaks) / MB:10.0f}")


if __name__ == "__main__":
    main()
