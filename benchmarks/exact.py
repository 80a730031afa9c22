"""Small cases with right values, run under this trainer and under the others that are installed, each as its own documentation teaches.

    python benchmarks/exact.py [--case LETTER ...] [--only NAME ...]

The right value is what a loop by hand gives, worked out on paper. Every run has a new process, the resumed one of (c) as well, as after a
kill. Where a trainer teaches one way first and has another, official one that is meant to be exact, the table shows both: the second after
the stroke, with a letter for the note below the table. "-": not installed, or has no such number; an error is shown by its type.

(a) 5 samples of value 1, batch 1, 2 batches a step, loss (w * x).mean(), SGD, lr 1: the weight after an epoch. Each step takes the mean of
    the samples it saw, and that is 1, three times.
(b) one step of two batches, of 1 sample with value 1 and of 3 with value 5: the mean over the 4 samples is 4.
(c) saved after step 9 of 12, in the middle of epoch 2, and resumed; samples shuffled, dropout in the network: the largest difference of the
    final weights to those of the run that never stopped, the same with the dropout at 0, and how many of the 12 samples that epoch did
    not see exactly once.
(d) the mean of the samples 1..5 in a validation on two ranks, batch 2.
(e) the mean that is logged of a training epoch: samples 1, 1, 1, 1, 6, batch 4.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import logging
import multiprocessing
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exact_ways import (
    STEPS_AN_EPOCH,
    STOP,
    accelerate_counted_weight,
    accelerate_resume,
    accelerate_validation,
    accelerate_weight,
    short_window,
    styled_epoch_mean,
    styled_resume,
    styled_validation,
    styled_weight,
    transformers_epoch_mean,
    transformers_resume,
    transformers_validation,
    transformers_weight,
    uneven_window,
)

from tests.helpers.ranks import run_ranks

PEERS = ("ours", "pytorch-lightning", "accelerate", "transformers")
Ways = dict[str, list[tuple[Callable[..., Any], str]]]  # by trainer: what runs the case, and the letter of its note
NOTES = {
    "n": 'the step returns {"loss": ..., "count": samples}; a short last batch of a loader needs no count',
    "g": "the loop of its guide on samples of variable size in the place of accumulate()",
    "l": "compute_loss_func=, a sum over num_items_in_batch; each batch is one sequence, its samples are the tokens",
    "s": "with torchdata's StatefulDataLoader",
    "m": "compute_metrics= over the gathered predictions; ahead of the stroke eval_loss",
}


def quietly(task: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return task(*args, **settings)


def alone(task: Callable[..., Any], *args: Any) -> Any:
    """Run it in a new process, forked from this one, which has run nothing itself."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(quietly, task, *args).result()


def on_two_ranks(task: Callable[..., Any]) -> Any:
    return run_ranks(partial(quietly, task), 2)[0]


def resumed(task: Callable[..., Any]) -> tuple[float, float, int]:
    """Return the largest difference of the weights with and without dropout, and how many samples the epoch did not see exactly once."""
    differences = {}
    for dropout in (0.0, 0.5):
        with tempfile.TemporaryDirectory() as folder:
            weights, seen = alone(task, folder, False, dropout)
            weights_after, seen_after = alone(task, folder, True, dropout)
        differences[dropout] = max(abs(a - b) for a, b in zip(weights, weights_after, strict=True))
    epoch = Counter(round(12 * x) for x in seen[2 * STEPS_AN_EPOCH : 2 * STOP] + seen_after)
    return differences[0.5], differences[0.0], sum(epoch[i] != 1 for i in range(12))


def windows(data: Callable[[], DataLoader], values: list[Any]) -> Ways:
    """The ways of each trainer to accumulate over `data`, whose batches are `values` for the one that makes its own loader."""
    return {
        "ours": [(partial(styled_weight, "ours", data), "")],
        "pytorch-lightning": [(partial(styled_weight, "pytorch-lightning", data), "")],
        "accelerate": [(partial(accelerate_weight, data), ""), (partial(accelerate_counted_weight, data), "g")],
        "transformers": [(partial(transformers_weight, values), "")],
    }


def cases() -> dict[str, tuple[list[tuple[str, str]], Callable[..., Any], Ways]]:
    """By letter: rows (name, right value), how to run a way, and the ways of each trainer with the letter of their note."""
    uneven = windows(uneven_window, [[1.0], [5.0, 5.0, 5.0]])
    uneven["ours"].append((partial(styled_weight, "ours", uneven_window, True), "n"))
    uneven["transformers"].append((partial(transformers_weight, [[1.0], [5.0, 5.0, 5.0]], True), "l"))
    styled_ways = {name: [(partial(styled_resume, name), "")] for name in PEERS[:2]}
    styled_ways["pytorch-lightning"].append((partial(styled_resume, "pytorch-lightning", stateful=True), "s"))
    resume = {
        **styled_ways,
        "accelerate": [(accelerate_resume, ""), (partial(accelerate_resume, stateful=True), "s")],
        "transformers": [(transformers_resume, "")],
    }
    validation = {
        **{name: [(partial(styled_validation, name), "")] for name in PEERS[:2]},
        "accelerate": [(accelerate_validation, "")],
        "transformers": [(partial(transformers_validation, "eval_loss"), ""), (partial(transformers_validation, "eval_mean"), "m")],
    }
    means = {**{name: [(partial(styled_epoch_mean, name), "")] for name in PEERS[:2]}, "transformers": [(transformers_epoch_mean, "")]}
    return {
        "a": ([("(a) weight, short last window", "-3")], alone, windows(short_window, [1.0] * 5)),
        "b": ([("(b) weight, batches of 1 and 3", "-4")], alone, uneven),
        "c": ([("(c) resumed: weights differ by", "0"), ("    the same without dropout", "0"), ("    samples not seen once", "0")], resumed, resume),
        "d": ([("(d) validation mean, 2 ranks", "3")], on_two_ranks, validation),
        "e": ([("(e) logged mean of an epoch", "2")], alone, means),
    }


def values_of(run: Callable[..., Any], way: Callable[..., Any], rows: int) -> list[str]:
    """The cells of one way: its numbers, "-" if the trainer is not there, the type of its error."""
    try:
        found = run(way)
    except ImportError:
        return ["-"] * rows
    except Exception as error:  # whatever a trainer raises is its result
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return [type(error).__name__] * rows
    return [f"{value:.4g}" for value in (found if isinstance(found, tuple) else (found,))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=list("abcde"), choices=list("abcde"), metavar="LETTER")
    parser.add_argument("--only", nargs="+", default=list(PEERS), choices=PEERS, metavar="NAME")
    args = parser.parse_args()
    for module in ("torch._dynamo", "trainer.trainer", "pytorch_lightning", "accelerate", "transformers.trainer"):  # once for all the processes
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    table, notes = [["case", "right", *args.only]], set()
    for letter, (rows, run, ways) in cases().items():
        if letter not in args.case:
            continue
        columns = []
        for peer in args.only:
            cells = [[f"{text} [{note}]" if note else text for text in values_of(run, way, len(rows))] for way, note in ways.get(peer, [])]
            notes |= {note for _, note in ways.get(peer, []) if note}
            columns.append([" / ".join(parts) for parts in zip(*cells, strict=True)] or ["-"] * len(rows))
            print(f"({letter}) {peer}: {columns[-1]}", file=sys.stderr)
        table += [[*row, *(column[i] for column in columns)] for i, row in enumerate(rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(*(f"\n[{letter}] {NOTES[letter]}" for letter in NOTES if letter in notes), sep="", end="\n" * bool(notes))
    versions = []
    for name in ("torch", *PEERS[1:], "torchdata"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    print("\n" + ", ".join(versions))


if __name__ == "__main__":
    main()
