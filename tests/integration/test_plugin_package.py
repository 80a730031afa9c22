"""Training with an outside package of plug-ins (tests/plugin_package): every kind at once, by name and by object, wherever ranks come from."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.plugins import PACKAGE, write_dist_info
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:package toy-plugins")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder that makes the plug-ins visible."""
    write_dist_info(tmp_path / "site")
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def by_hand(epochs):
    return weights(train_by_hand(Net().double(), Net.rows(24, torch.float64).split(8), 3 * epochs))


def checkpoint():
    return ModelCheckpoint(dirpath="kept", save_last=True, save_top_k=0)


NAMES = {"accelerator": "toy_cpu", "strategy": "toy_average", "precision": "64-true", "logger": "toy_lines", "plugins": "toy_gzip"}


def fit(epochs, callbacks, path=None, devices=2, **settings):
    """Train on two ranks, logging every step."""

    class Logged(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    module = Logged()
    trainer = quiet(devices=devices, max_epochs=epochs, log_every_n_steps=1, callbacks=callbacks, **{**NAMES, **settings})
    trainer.fit(module, loader(Net.rows(24, torch.float64), 4), ckpt_path=path)
    return trainer, weights(module)


def test_by_name_from_a_script_and_resumed_as_objects(site):
    Path("script.py").write_text(textwrap.dedent("""
        from tests.integration.test_plugin_package import checkpoint, fit
        trainer, _ = fit(1, ["toy_counters", checkpoint()])
        counter = trainer.callbacks[0]
        print(type(counter).__name__, counter.batches, counter.toys)
        """))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGE), str(site)]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "script.py"], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "Counter 3 1.0\n"), done.stderr
    assert Path("lines.txt").read_text() == "".join(f"{step} ['epoch', 'loss']\n" for step in (1, 2, 3))
    with gzip.open("kept/last.ckpt") as file:
        table = torch.load(file, weights_only=True)
    assert_same(table["state_dict"], by_hand(1))

    import toy_plugins as toys

    objects = {"accelerator": toys.ToyAccelerator(), "strategy": toys.AverageStrategy(), "logger": toys.Lines(), "plugins": toys.GzipIO()}
    trainer, found = fit(2, [toys.Counter(), checkpoint()], "kept/last.ckpt", **objects)
    assert_same(found, by_hand(2))
    assert trainer.callbacks[0].batches == 3 and trainer.accelerator.own is None


def test_by_name_in_ranks_that_exist(site):
    path = os.pathsep.join([str(PACKAGE), str(site)])

    def rank(path):
        sys.path[:0] = path.split(os.pathsep)
        trainer, found = fit(2, "toy_counters", devices="auto")
        return found, trainer.num_devices, [callback.batches for callback in trainer.callbacks]

    for found, devices, batches in run_ranks(rank, path=path):
        assert_same(found, by_hand(2))
        assert (devices, batches) == (2, [6, 6])
