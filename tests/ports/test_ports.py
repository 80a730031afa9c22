"""Six programs for PyTorch Lightning, ported by `python -m trainer.migrate` alone, do what Lightning did with them.

`expected/*.json` holds what Lightning did, step by step (made by make_expected.py). The programs are copied, rewritten and run here.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401  (sets environment variables, which no test may)
import torchmetrics  # noqa: F401  (slow to load)

from trainer.migrate.__main__ import main

HERE = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in (HERE / "expected").glob("*.json"))


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the rewritten programs, which can be imported from it."""
    folder = tmp_path_factory.mktemp("ports") / "programs"
    shutil.copytree(HERE / "programs", folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert main([str(folder), "--write"]) == 0, "something is left to do by hand"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in ("transcript", *PROGRAMS):
        sys.modules.pop(name, None)


def test_nothing_of_lightning_is_left(ported: Path) -> None:
    assert len(PROGRAMS) == 6
    assert [path.name for path in ported.glob("*.py") if "pytorch_lightning" in path.read_text()] == []
    assert main([str(ported), "--check"]) == 0


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_a_ported_program_does_what_it_did(ported: Path, tmp_path: Path, name: str) -> None:
    expected = documented(name, json.loads((HERE / "expected" / f"{name}.json").read_text()))
    found = importlib.import_module(name).main(str(tmp_path))
    assert list(differences(found, expected)) == []


def documented(name: str, expected: Any) -> Any:
    """Return what Lightning did with the differences that docs/migrating.md names: these three, and no others."""
    if name == "gan":  # global_step in manual optimization: every training_step, not every optimizer.step()
        expected["step"] //= 2
    if name == "sequence":  # outputs["loss"] is what the step returned, not divided by accumulate_grad_batches
        expected["losses"] = [2 * loss for loss in expected["losses"]]
    if name == "multi_loader":  # callback_metrics go on after a resume
        before = expected["begun"]["train"][-1]["train_loss_epoch"]
        for metrics in expected["resumed"]["validation"][:2]:
            metrics["train_loss_epoch"] = before
    return expected


def differences(found: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Yield where two transcripts differ by more than 1e-6 of what Lightning had."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            yield f"{place}: {sorted(found)} are not {sorted(expected)}"
        for key in found.keys() & expected.keys():
            yield from differences(found[key], expected[key], f"{place}/{key}")
    elif isinstance(expected, list):
        if len(found) != len(expected):
            yield f"{place}: {len(found)} entries, not {len(expected)}"
        for i, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from differences(one, other, f"{place}/{i}")
    elif isinstance(expected, float):
        if not abs(found - expected) <= 1e-6 * max(1.0, abs(expected)):
            yield f"{place}: {found} is not {expected}"
    elif found != expected:
        yield f"{place}: {found!r} is not {expected!r}"
