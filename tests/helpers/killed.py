"""A run that is killed again and again and resumed each time, compared with one that was never stopped.

    python -m tests.helpers.killed FOLDER --ranks 2 --workers 1

is the program that is killed: it validates, logs to TensorBoard and CSV and saves all the time, and goes on with `ckpt_path="auto"`. `survive`
starts it, kills a random process of its tree at a random instant, looks at what lies on the disk, and starts it again, until it ends by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from callbacks import Callback, CSVLogger, ModelCheckpoint, TensorBoardLogger
from tests.helpers.datasets import Drawing
from tests.helpers.resume import Noisy
from trainer import Trainer
from trainer.checkpoint import find, io

__all__ = ["Outcome", "count_calls", "differences", "outcome", "start", "survive", "train"]

ROOT = Path(__file__).resolve().parents[2]
BEGUN, FINAL = "begun", "final.pt"
_MARK = "TRAINER_KILLED_RUN"  # in the environment of all processes of a run
_GONE_S = 60.0  # how long the other processes of a run may take to end after one was killed
_LONG_S = 120.0  # no run takes as long


class Watched(Noisy):
    """Validates as well."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", (self.layers(batch[:, 1:].float()) - batch[:, :1].float() / 10).square().mean())


class Begun(Callback):
    """Tells the one who kills that training has begun."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        Path(BEGUN).touch()


def train(folder: Any, ranks: int = 1, workers: int = 0, epochs: int = 8, async_save: bool = False) -> None:
    """Train in `folder`, from where an earlier run stopped."""
    os.chdir(folder)
    more = {"async_save": True} if async_save else {}
    module = Watched()
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=epochs, seed=7,
        accumulate_grad_batches=2, val_check_interval=3, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        logger=[TensorBoardLogger(".", "tb", "run"), CSVLogger(".", "csv", "run", flush_logs_every_n_steps=1)],
        callbacks=[
            Begun(),
            ModelCheckpoint("saved", every_n_train_steps=1, save_top_k=1, save_last=True, **more),
            ModelCheckpoint("best", "{step}", monitor="val", save_top_k=2, save_on_train_epoch_end=False, **more),
        ],
    )  # fmt: skip
    val = DataLoader(Drawing(10), batch_size=2)
    trainer.fit(module, DataLoader(Drawing(44), batch_size=2, num_workers=workers, shuffle=True), val, ckpt_path="auto")
    torch.save(module.state_dict(), "final.tmp")
    os.replace("final.tmp", FINAL)


def count_calls(die_at: int | None = None) -> list[str]:
    """Count the calls that change names and files from here on, in a list that grows; kill this process ahead of the one numbered `die_at`."""
    made: list[str] = []

    def counted(name: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(made) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            made.append(name)
            return plain(*args, **kwargs)

        return call

    for name in ("replace", "rename", "fsync", "remove", "unlink", "symlink", "link", "mkdir", "rmdir"):
        setattr(os, name, counted(name, getattr(os, name)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--async-save", action="store_true")
    args = parser.parse_args()
    train(args.folder, args.ranks, args.workers, args.epochs, args.async_save)


# -- from outside --------------------------------------------------------------------------------------------------------


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start the program in a session of its own; what it says goes to a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BEGUN).unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: str(folder)}
    with open(folder / "said.txt", "ab") as said:
        command = [sys.executable, "-m", "tests.helpers.killed", str(folder), *options]
        return subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)


def survive(folder: Path, kills: int, chance: random.Random, *options: str, seconds: float = 0.6, show: Any = None) -> list[str]:
    """Run the program to its end, killing one of its processes up to `kills` times; return what was found wrong on the way.

    Args:
        seconds: the kill comes up to so long after training has begun; one in eight comes before.
        show: called with a line after each kill.
    """
    wrong: list[str] = []
    done = 0
    while True:
        process = start(folder, *options)
        target = None
        if done < kills:
            early = chance.random() < 0.125
            _await(lambda: (folder / BEGUN).exists() or process.poll() is not None, chance.uniform(0.0, 3.0) if early else _LONG_S)
            if not early:
                time.sleep(chance.uniform(0.0, seconds))
            target = _kill_one(process.pid, folder, chance)
        if not _await(lambda: process.poll() is not None, _LONG_S if target is None else _GONE_S):
            wrong.append(f"kill {done}: {target} was killed, and the program still ran {_GONE_S:g} s later")
        if not _await(lambda: not _members(folder) - {process.pid}, _GONE_S):
            wrong.append(f"kill {done}: processes are left: {_members(folder)}")
        for pid in _members(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = process.wait()
        if target is None or code == 0:
            if code:
                wrong.append(f"the program ended with {code} though nobody killed it:\n{(folder / 'said.txt').read_text()[-3000:]}")
            return wrong
        done += 1
        wrong += _look(folder, done)
        if show is not None:
            show(f"kill {done}: {target}, exit code {code}, newest {find.newest(map(str, folder.glob('saved/*.ckpt')))}")


def _look(folder: Path, number: int) -> list[str]:
    """Every checkpoint under its own name must load, at any instant."""
    wrong = []
    for path in [*folder.glob("saved/*.ckpt"), *folder.glob("best/*.ckpt")]:
        try:
            io.load(path)
        except Exception as error:
            wrong.append(f"kill {number}: {path} does not load: {error!r}")
    return wrong


def _kill_one(root: int, folder: Path, chance: random.Random) -> str | None:
    """Kill a process of the run at random; return what it was."""
    members = sorted(_members(folder))
    for pid in chance.sample(members, len(members)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            os.kill(pid, signal.SIGKILL)
            return f"{'the caller' if pid == root else 'one of its children'}, of {len(members)} processes ({words[-50:]})"
    return None


def _members(folder: Path) -> set[int]:
    """The living processes of the run in `folder`, also those that lost their parent: all inherited its mark."""
    found, mark = set(), f"{_MARK}={folder}".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(int(entry))
    return found


def _await(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(met)


# -- what came of it -----------------------------------------------------------------------------------------------------


class Outcome(dict):
    """name -> value: weights, points, rows and files of a finished run."""


def outcome(folder: Path) -> Outcome:
    """Return all that a finished run left behind, apart from clocks."""
    found = Outcome()
    for name, tensor in torch.load(folder / FINAL, weights_only=True).items():
        found[f"weights {name}"] = tensor
    for place in sorted({path.parent for path in folder.glob("tb/run/**/events.*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found[f"points {place.relative_to(folder)} {tag}"] = [(e.step, e.value) for e in events.Scalars(tag)]
    with open(folder / "csv/run/metrics.csv", newline="") as file:
        found["rows"] = list(csv.DictReader(file))
    files = [*folder.glob("saved/**/*"), *folder.glob("saved/**/.*"), *folder.glob("best/**/*"), *folder.glob("best/**/.*"), *folder.glob("csv/run/*")]
    found["files"] = sorted({str(path.relative_to(folder)) for path in files})
    for path in sorted(folder.glob("*/*.ckpt")):
        table = io.load(path)
        found[f"file {path.relative_to(folder)}"] = {name: table[name] for name in ("state_dict", "optimizer_states", "progress", "data")}
    return found


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Return the names of what differs, with both values where they are short."""
    lines = [f"{name}: only in one of them" for name in sorted(found.keys() ^ expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        if not _equal(found[name], expected[name]):
            lines.append(f"{name}: {str(found[name])[:600]}\n  in the place of {str(expected[name])[:600]}")
    return lines


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return isinstance(right, (list, tuple)) and len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


if __name__ == "__main__":
    main()
