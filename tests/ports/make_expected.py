"""Writes expected/*.json beside it: what PyTorch Lightning does with the programs in programs/. The tests need only the files.

Run once, with pytorch-lightning 2.6, scikit-learn and torchmetrics installed: `python tests/ports/make_expected.py [NAME ...]`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
PROGRAMS = ("classifier", "autoencoder", "gan", "transfer", "sequence", "multi_loader")


def main(names: list[str]) -> None:
    """Run the programs and write what they return."""
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(HERE / "programs"))
    torch.set_num_threads(1)
    for name in names or PROGRAMS:
        with tempfile.TemporaryDirectory() as root:
            os.chdir(root)
            found = importlib.import_module(name).main(root)
            os.chdir(HERE)
        (HERE / "expected" / f"{name}.json").write_text(json.dumps(found) + "\n")
        print(name, "done")


if __name__ == "__main__":
    main(sys.argv[1:])
