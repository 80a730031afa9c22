"""What one sees of a real run: on a terminal (a pseudo-terminal), and in a file."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from callbacks import (
    Callback,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
    progress_drawing,
    rich_progress,
    tqdm_progress,
)
from callbacks.errors import MisconfigurationException
from tests.helpers.modules import Net, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.screen import rendered, screen
from trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:There is a validation_step but no validation loader")
BARS = [TQDMProgressBar, RichProgressBar]


class Shown(Net):
    """Logs to the bar, and validates."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), prog_bar=True)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw every batch, however fast they come, and nothing that depends on the load of the machine."""
    for module in (rich_progress, tqdm_progress):
        monkeypatch.setattr(module, "DRAW_SECONDS", 0.0)
    monkeypatch.setattr(progress_drawing, "STATUS_SECONDS", 3600.0)


def fit(bar: Any, **settings: Any) -> Trainer:
    usual = {"accelerator": "cpu", "max_epochs": 2, "num_sanity_val_steps": 1, "enable_progress_bar": True, "log_every_n_steps": 1}
    trainer = quiet(**{**usual, "callbacks": [bar], **settings})
    trainer.fit(Shown(), loader(Net.rows(8), 2), loader(Net.rows(6), 2))
    return trainer


@pytest.mark.parametrize("kind", BARS)
def test_a_terminal_shows_sanity_check_epochs_and_validation(kind: type, eager: None) -> None:
    threads = set(threading.enumerate())
    with screen() as found:
        trainer = fit(kind())
    text, lines = found[0], [line for line in rendered(found[0]) if line]
    for description, count in (("Sanity Checking", "1/1"), ("Epoch 0/1", "4/4"), ("Validation", "3/3"), ("Epoch 1/1", "4/4")):
        assert description in text and count in text[text.index(description) :], description
    assert text.index("Sanity Checking") < text.index("Epoch 0/1") < text.index("Validation") < text.rindex("Epoch 1/1")
    assert len(lines) == 1 and lines[0].startswith("Epoch 1/1")  # all else was replaced
    assert f"val={trainer.callback_metrics['val']:.4g}" in lines[0] or f"val: {trainer.callback_metrics['val']:.3f}" in lines[0]
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("kind", BARS)
def test_what_is_printed_is_above_the_bar(kind: type, eager: None) -> None:
    class Talks(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.print(f"half of [{trainer.current_epoch}]")

    with screen() as found:
        fit(kind(leave=True), callbacks=[kind(), Talks()])
    lines = [line for line in rendered(found[0]) if line]
    assert lines[:2] == ["half of [0]", "half of [1]"] and lines[2].startswith("Epoch 1/1") and len(lines) == 3


@pytest.mark.parametrize("kind", BARS)
def test_a_fit_that_fails_leaves_the_bar_where_it_stood(kind: type, eager: None) -> None:
    class Failing(Shown):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    with screen() as found, pytest.raises(RuntimeError, match="on purpose"):
        quiet(accelerator="cpu", max_epochs=1, callbacks=[kind()], enable_progress_bar=True).fit(Failing(), loader(Net.rows(8), 2))
    (line,) = [line for line in rendered(found[0]) if line]
    assert line.startswith("Epoch 0/0") and "3/4" in line


@pytest.mark.parametrize("kind", BARS)
def test_c40_a_file_gets_a_few_lines(kind: type, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(accelerator="cpu", max_epochs=1, callbacks=[kind()], enable_progress_bar=True)
    trainer.fit(Shown(), loader(0.1 * Net.rows(500)), loader(Net.rows(6), 2))
    out, err = capfd.readouterr()
    lines = (out + err).splitlines()
    assert len(lines) <= 5 and lines[-1].startswith("Epoch 0/0: 500/500, in ")
    assert all(char == "\n" or char.isprintable() for char in out + err)


class Wrong(IterableDataset):
    """Says 8 and gives 6."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(Net.rows(6))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_c42_the_bar_does_not_believe_a_declared_length(capfd: pytest.CaptureFixture[str]) -> None:
    validated = []

    class Noted(Shown):
        def on_validation_start(self) -> None:
            validated.append(self.global_step)

    trainer = quiet(accelerator="cpu", max_epochs=2, callbacks=[TQDMProgressBar()], enable_progress_bar=True)
    trainer.fit(Noted(), DataLoader(Wrong(), batch_size=1), loader(Net.rows(2)))
    ends = [line.split(", in")[0] for line in capfd.readouterr().out.splitlines() if line.startswith("Epoch")]
    assert validated == [6, 12]
    assert ends[-1] == "Epoch 1/1: 6"


# -- ahead of the first batch ----------------------------------------------------------------------------------------------


class Rows(IterableDataset):
    def __iter__(self) -> Any:
        return iter(Net.rows(12))


@pytest.mark.parametrize(("kind", "workers"), [(TQDMProgressBar, 0), (TQDMProgressBar, 1), (RichProgressBar, 0)])
def test_draining_is_seen(kind: type, workers: int, eager: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = DataLoader(Rows(), batch_size=2, num_workers=workers)
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1)
    quiet(accelerator="cpu", max_steps=5, callbacks=[saved]).fit(Shown(), data)
    path = next(tmp_path.glob("*step=4.ckpt"))
    with screen() as found:
        quiet(accelerator="cpu", max_epochs=1, callbacks=[kind()], enable_progress_bar=True).fit(Shown(), data, ckpt_path=path)
    text = found[0]
    at = text.index("Resuming: passing over data")
    assert text.index("Epoch 0/0") < at
    assert ("8/8" if workers else "5/8") in text[at:]  # what workers pass over is seen when it is over
    lines = [line for line in rendered(text) if line]
    assert lines[-1].startswith("Epoch 0/0") and "6" in lines[-1] and not any("Resuming" in line for line in lines)
    capfd.readouterr()
    quiet(accelerator="cpu", max_epochs=1, callbacks=[kind()], enable_progress_bar=True).fit(Shown(), data, ckpt_path=path)
    assert capfd.readouterr().out.count("Passing over 8 items of data") == 1


class Prepares(Shown):
    def prepare_data(self) -> None:
        for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer)]:
            timer.join()  # this is taken to last longer than a moment

    def setup(self, stage: str) -> None:
        self.prepare_data()


def test_data_preparation_and_set_up_are_told_when_they_last(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_drawing, "LINE_SECONDS", 0.01)
    quiet(accelerator="cpu", max_steps=1, enable_progress_bar=True).fit(Prepares(), loader(Net.rows(8), 2))
    lines = [re.sub(r" in \d\d:\d\d", "", line) for line in capfd.readouterr().out.splitlines()]
    assert lines[:4] == ["Preparing data ...", "Preparing data: done", "Setting up ...", "Setting up: done"]


def prepared_text(**settings: Any) -> list[str]:
    progress_drawing.LINE_SECONDS = 0.01
    told: list[str] = []

    class Bar(TQDMProgressBar):
        def print(self, *args: Any, **kwargs: Any) -> None:
            told.append(str(args[0]))

    quiet(accelerator="cpu", max_steps=1, callbacks=[Bar()], enable_progress_bar=True, **settings).fit(Prepares(), loader(Net.rows(8), 2))
    return told


def test_on_several_ranks_the_first_tells_it() -> None:
    first, second = run_ranks(prepared_text, strategy="ddp", devices=2)
    assert first[0] == "Preparing data (once a node; the other processes wait) ..."
    assert second == []


# -- one bar a trainer -----------------------------------------------------------------------------------------------------


def test_one_bar_a_trainer() -> None:
    bar = RichProgressBar()
    assert Trainer(accelerator="cpu", callbacks=[bar]).progress_bar_callback is bar
    assert Trainer(accelerator="cpu", enable_progress_bar=False).progress_bar_callback is None
    with pytest.raises(MisconfigurationException, match="enable_progress_bar=False, but callbacks= holds a RichProgressBar"):
        Trainer(accelerator="cpu", callbacks=[bar], enable_progress_bar=False)
    with pytest.raises(MisconfigurationException, match=r"holds 2 progress bars \(TQDMProgressBar, RichProgressBar\)"):
        Trainer(accelerator="cpu", callbacks=[TQDMProgressBar(), bar])


class Percent(ProgressBar):
    """As Lightning's manual shows it: hooks, and the properties of the base."""

    def __init__(self) -> None:
        super().__init__()
        self.enable = True
        self.seen: list[Any] = []

    def disable(self) -> None:
        self.enable = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.seen.append((self.train_description, 100 * (batch_idx + 1) / self.total_train_batches, sorted(self.get_metrics(trainer, pl_module))))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            description = self.sanity_check_description if trainer.sanity_checking else self.validation_description
            self.seen.append((description, dataloader_idx, self.total_val_batches_current_dataloader, self.total_val_batches))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.reset_dataloader_idx_tracker()


def test_a_bar_written_for_lightning() -> None:
    bar = Percent()
    trainer = quiet(accelerator="cpu", max_epochs=1, num_sanity_val_steps=1, callbacks=[bar], enable_progress_bar=True, log_every_n_steps=1)
    trainer.fit(Shown(), loader(Net.rows(8), 2), [loader(Net.rows(4), 2), loader(Net.rows(9), 3)])
    sanity, training, validation = bar.seen[:2], bar.seen[2:6], bar.seen[6:]
    assert sanity == [("Sanity Checking", 0, 1, 5), ("Sanity Checking", 1, 1, 5)]
    assert training == [("Training", 25.0, []), ("Training", 50.0, ["loss"]), ("Training", 75.0, ["loss"]), ("Training", 100.0, ["loss"])]
    assert validation == [("Validation", 0, 2, 5), ("Validation", 1, 3, 5)]
    assert trainer.progress_bar_callback is bar
