"""Plug-ins by name: what is found, when one looks, and what is said where it goes wrong. Their use is in test_plugin_package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from callbacks import CSVLogger, TensorBoardLogger
from tests.helpers.modules import quiet
from tests.helpers.plugins import PACKAGE, write_dist_info
from trainer import CheckpointIO, MisconfigurationException, Strategy, Trainer, plugins
from trainer.strategies import DDPStrategy


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of plug-ins, installed for the time of a test."""
    site = tmp_path / "site"
    write_dist_info(site)
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.filterwarnings("ignore:package toy-plugins")
def test_every_kind_by_name(installed: Path) -> None:
    import toy_plugins as toys

    trainer = quiet(accelerator="toy_cpu", devices=1, strategy="toy_average", logger=["toy_lines", "csv"], plugins="toy_gzip", callbacks="toy_counters")
    assert type(trainer.strategy) is toys.AverageStrategy
    assert type(trainer.accelerator) is toys.ToyAccelerator
    assert [type(logger) for logger in trainer.loggers] == [toys.Lines, CSVLogger]
    assert type(trainer.checkpoint_io) is toys.GzipIO and isinstance(trainer.checkpoint_io, CheckpointIO)
    assert [type(callback) for callback in trainer.callbacks] == [toys.Counter, toys.Counter]
    assert quiet(accelerator="toy_cpu", strategy="toy_average").num_devices == 3  # its own count


@pytest.mark.filterwarnings("ignore:package toy-plugins")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "toy_averag"}, r"strategy='toy_averag' is unknown. Did you mean 'toy_average'\? Choose one of auto, .*ddp.*, toy_average \(plug-in\)"),
        ({"accelerator": "toy"}, r"accelerator='toy' is unknown.* Choose one of auto, cpu, cuda, gpu, mps, toy_cpu \(plug-in\), or give an object"),
        ({"logger": "toy_line"}, r"logger='toy_line' is unknown. Did you mean 'toy_lines'\? Choose one of csv, tensorboard, toy_lines \(plug-in\)"),
        ({"plugins": "gzip"}, r"plugins='gzip' is unknown.* Choose one of toy_gzip \(plug-in\)"),
        ({"callbacks": ["toy_counter"]}, r"callbacks='toy_counter' is unknown. Did you mean 'toy_counters'\?"),
        ({"strategy": "toy_gone"}, r"strategy='toy_gone' of package toy-plugins 1.2 \(toy_plugins.gone:Strategy\) cannot be made: ModuleNotFoundError"),
        ({"strategy": "toy_wrong"}, r"strategy='toy_wrong' of package toy-plugins 1.2 \(toy_plugins:Lines\) made a Lines, not a Strategy"),
    ],
)  # fmt: skip
def test_what_is_said(installed: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        Trainer(**arguments)


def test_a_built_in_name_cannot_be_taken_over(installed: Path) -> None:
    assert type(quiet(accelerator="cpu", strategy="ddp").strategy) is DDPStrategy
    said = r"package toy-plugins 1.2 \(toy_plugins:AverageStrategy\) offers strategy='ddp', a name that is built in; its own is not used"
    with pytest.warns(UserWarning, match=said):
        quiet(accelerator="cpu", strategy="toy_average")


@pytest.mark.filterwarnings("ignore:package")
def test_a_name_that_two_packages_offer(installed: Path) -> None:
    write_dist_info(installed, "other-toys")
    config = installed / "other_toys-1.2.dist-info" / "entry_points.txt"
    config.write_text("[trainer.strategies]\ntoy_average = elsewhere:Strategy\n")
    with pytest.raises(MisconfigurationException, match=r"strategy='toy_average' is offered by package .* and by package .*; uninstall one"):
        quiet(accelerator="cpu", strategy="toy_average")


def test_an_installation_that_is_found_twice_is_one(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dist_info(tmp_path / "again")
    monkeypatch.syspath_prepend(str(tmp_path / "again"))
    made = plugins.make("strategies", "strategy", "toy_average", Strategy)
    assert made.name == "toy_average"


def test_nobody_looks_for_built_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("looked for plug-ins"))
    trainer = Trainer(accelerator="cpu", strategy="ddp", logger=["csv", "tensorboard"], callbacks=[], plugins=[])
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger, TensorBoardLogger]
    Trainer()
    Trainer(accelerator="auto", strategy="auto")


def test_without_any_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    with pytest.raises(MisconfigurationException, match="plugins='gzip' is unknown. Choose one of none: no plug-in is installed, or give an object"):
        Trainer(plugins="gzip")
    with pytest.raises(MisconfigurationException, match="plugins must be Precision objects.* got the class CheckpointIO"):
        Trainer(plugins=CheckpointIO)
