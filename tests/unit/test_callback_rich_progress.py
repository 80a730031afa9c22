"""RichProgressBar: themes, columns, what needs no terminal. What a run shows is in tests/integration/test_progress_terminal.py."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import pytest
import torch

from callbacks import (
    RichProgressBar,
    RichProgressBarTheme,
    progress_passes,
    rich_progress,
)
from callbacks.errors import MisconfigurationException
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.screen import rendered


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich_progress, "DRAW_SECONDS", 0.0)


def console(**more: Any) -> dict[str, Any]:
    return {"file": io.StringIO(), "force_terminal": True, "width": 100, "legacy_windows": False, **more}


def fit(bar: RichProgressBar, epochs: int = 1, **changes: Any) -> FakeTrainer:
    metrics = {"loss": torch.tensor(0.25), "[bold]": 2}
    trainer = FakeTrainer("", [bar], progress_bar_metrics=metrics, num_training_batches=5, max_epochs=epochs, **changes).start()
    for _ in range(epochs):
        trainer.hook("on_train_epoch_start")
        for i in range(5):
            trainer.hook("on_train_batch_end", None, None, i)
        trainer.hook("on_train_epoch_end")
        trainer.current_epoch += 1
    trainer.hook("on_train_end")
    trainer.hook("teardown", stage="fit")
    return trainer


def test_theme_and_arguments_of_the_console() -> None:
    given = console(color_system="standard")
    theme = RichProgressBarTheme(description="red", metrics="green", metrics_text_delimiter=" ; ", metrics_format=".1e")
    fit(RichProgressBar(theme=theme, console_kwargs=given))
    text = given["file"].getvalue()
    assert "\x1b[31mEpoch 0/0" in text
    assert "\x1b[32mloss: 2.5e-01 ; [bold]: 2" in text  # as it is, no markup of rich's
    given = console(color_system=None)
    fit(RichProgressBar(console_kwargs=given))
    assert "\x1b[31m" not in given["file"].getvalue() and "loss: 0.250 [bold]: 2" in given["file"].getvalue()


@pytest.mark.parametrize(("leave", "kept"), [(False, ["Epoch 2/2"]), (True, ["Epoch 0/2", "Epoch 1/2", "Epoch 2/2"])])
def test_leave_keeps_every_epoch(leave: bool, kept: list[str]) -> None:
    given = console(color_system=None)
    fit(RichProgressBar(leave=leave, console_kwargs=given), epochs=3)
    lines = [line for line in rendered(given["file"].getvalue()) if line]
    assert [line.partition(" ━")[0] for line in lines] == kept
    assert all("5/5" in line for line in lines)


def test_columns_of_ones_own() -> None:
    class Short(RichProgressBar):
        def configure_columns(self, trainer: Any) -> list[Any]:
            return [*super().configure_columns(trainer)[:1], "{task.completed} of {task.total}"]

    given = console(color_system=None)
    bar = Short(console_kwargs=given)
    fit(bar)
    assert [line for line in rendered(given["file"].getvalue()) if line] == ["Epoch 0/0 5 of 5"]
    assert (bar.train_progress_bar, bar.val_progress_bar) == (None, None)


@pytest.mark.parametrize(("stage", "description"), [("validate", "Validation"), ("test", "Testing"), ("predict", "Predicting")])
def test_evaluation_of_several_loaders(stage: str, description: str) -> None:
    given = console(color_system=None)
    sizes = {f"num_{name}_batches": [2, float("inf")] for name in ("val", "test", "predict")}
    trainer = FakeTrainer("", [RichProgressBar(console_kwargs=given)], **sizes)
    trainer.state.fn = stage
    word = "validation" if stage == "validate" else stage
    trainer.hook("setup", stage=stage)
    trainer.hook(f"on_{word}_start")
    for loader, batches in enumerate((2, 3)):
        for i in range(batches):
            trainer.hook(f"on_{word}_batch_end", None, None, i, loader)
    trainer.hook(f"on_{word}_end")
    trainer.hook("teardown", stage=stage)
    first, second = [line for line in rendered(given["file"].getvalue()) if line]
    assert first.startswith(f"{description} DataLoader 0") and "2/2" in first
    assert second.startswith(f"{description} DataLoader 1") and " 3 " in second and "--:--" in second


def test_what_is_no_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ({}, console(force_terminal=False), console(force_jupyter=True)):  # no widgets without ipywidgets
        monkeypatch.setattr(rich_progress.importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else object())
        fit(RichProgressBar(console_kwargs=given))
        assert capsys.readouterr().out == "Epoch 0/0: 5/5, in 00:00, loss=0.25, [bold]=2\n"


def test_it_draws_on_rank_0_and_when_it_is_on() -> None:
    for changes, rate in (({"is_global_zero": False}, 1), ({}, 0)):
        given = console()
        bar = RichProgressBar(refresh_rate=rate, console_kwargs=given)
        fit(bar, **changes)
        assert bar.is_disabled and given["file"].getvalue() == ""


def test_it_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = pickle.loads(pickle.dumps(RichProgressBar(theme=RichProgressBarTheme(time="red"), console_kwargs={"width": 80})))
    assert bar.theme.time == "red" and bar.refresh_rate == 1
    monkeypatch.setattr(sys, "stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    trainer = FakeTrainer("", [bar], num_training_batches=5).start()
    trainer.hook("on_train_epoch_start")
    assert bar.train_progress_bar.total == 5
    assert pickle.loads(pickle.dumps(bar)).train_progress_bar is None
    trainer.hook("teardown", stage="fit")


def test_rich_is_optional_and_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationException, match=r"RichProgressBar\(refresh_rate=-1\)"):
        RichProgressBar(refresh_rate=-1)
    assert issubclass(RichProgressBar, progress_passes.PassesBar)
    monkeypatch.setattr(rich_progress.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match="RichProgressBar needs the package rich: pip install rich"):
        RichProgressBar()
