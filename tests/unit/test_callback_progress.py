"""TQDMProgressBar: what is drawn on a terminal, what is written to a file, and what a batch costs."""

from __future__ import annotations

import io
import math
import pickle
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks import (
    ProgressBar,
    Timer,
    TQDMProgressBar,
    progress_drawing,
    progress_passes,
    tqdm_progress,
)
from callbacks.errors import MisconfigurationException
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.screen import rendered


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """time.monotonic() that a test moves, in place of the modules' `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (progress_drawing, progress_passes, tqdm_progress):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def output(monkeypatch: pytest.MonkeyPatch, kind: type = io.StringIO) -> Any:
    stream = kind()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def train(trainer: FakeTrainer, clock: Clock, batches: int, seconds: float, epochs: int = 1, first: int = 0) -> None:
    """Epochs of batches that take `seconds` each; ends the fit."""
    for _ in range(epochs):
        trainer.hook("on_train_epoch_start")
        for i in range(first, batches):
            clock.now += seconds
            trainer.global_step += 1
            trainer.hook("on_train_batch_end", None, None, i)
        trainer.hook("on_train_epoch_end")
        trainer.current_epoch += 1
    trainer.hook("on_train_end")
    trainer.hook("teardown", stage="fit")


def fit(bar: TQDMProgressBar, **changes: Any) -> FakeTrainer:
    return FakeTrainer("", [bar], progress_bar_metrics={"loss": torch.tensor(0.25)}, **changes).start()


def test_c40_a_file_gets_a_line_for_a_short_run(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch)
    train(fit(TQDMProgressBar(), num_training_batches=500, max_epochs=3), clock, 500, 0.001, epochs=3)
    lines = out.getvalue().splitlines()
    assert lines == ["Epoch 0/2: 500/500, in 00:00, fit 00:01 left, loss=0.25", "Epoch 2/2: 500/500, in 00:00, loss=0.25"]


def test_c40_a_long_run_gets_rare_lines_without_control_characters(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch)
    train(fit(TQDMProgressBar(), num_training_batches=3600), clock, 3600, 1.0)
    text = out.getvalue()
    assert [line.split(",")[0] for line in text.splitlines()[:4]] == [f"Epoch 0/1: {n}/3600" for n in (10, 30, 70, 150)]
    assert len(text.splitlines()) == 16  # 10 s, 20 s, 40 s, ... and then every 5 minutes
    assert text.splitlines()[0] == "Epoch 0/1: 10/3600, 59:50 left, fit 1:59:50 left, loss=0.25"
    assert all(char == "\n" or char.isprintable() for char in text)


def test_many_short_epochs_are_rate_limited_and_the_last_is_told(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch)
    train(fit(TQDMProgressBar(), num_training_batches=2, max_epochs=101), clock, 2, 0.5, epochs=101)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 12
    assert lines[-1].startswith("Epoch 100/100: 2/2")


def test_an_unknown_length_and_a_resumed_epoch_in_lines(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch)
    train(fit(TQDMProgressBar(), num_training_batches=float("inf")), clock, 3, 1.0)
    assert out.getvalue() == "Epoch 0/1: 3, in 00:03, fit 00:03 left, loss=0.25\n"
    out = output(monkeypatch)
    train(fit(TQDMProgressBar(), num_training_batches=200), clock, 200, 1.0, first=100)
    assert out.getvalue().splitlines()[0] == "Epoch 0/1: 110/200, 01:30 left, fit 04:50 left, loss=0.25"  # 1 s a batch, as it was


def left(clock: Clock, trainer: FakeTrainer, clock_of: progress_drawing.FitClock, batches: int, seconds: float) -> float | None:
    clock.now += seconds
    return clock_of.left(trainer, batches)


def test_the_time_that_a_fit_has_left(clock: Clock) -> None:
    by_epochs = FakeTrainer("", num_training_batches=10, max_epochs=3)
    judged = progress_drawing.FitClock()
    assert left(clock, by_epochs, judged, 1, 100.0) is None  # the first batch, with whatever is slow in it, does not count
    assert left(clock, by_epochs, judged, 6, 5.0) == pytest.approx(24.0)
    by_epochs.current_epoch = 1
    assert left(clock, by_epochs, judged, 1, 15.0) == pytest.approx(2.0 * 19)  # a validation of 10 s is among them
    by_steps = FakeTrainer("", num_training_batches=math.inf, max_epochs=-1, max_steps=100, global_step=41)
    judged = progress_drawing.FitClock()
    assert left(clock, by_steps, judged, 1, 1.0) is None
    by_steps.global_step = 51
    assert left(clock, by_steps, judged, 11, 20.0) == pytest.approx(2.0 * 49)
    by_time = FakeTrainer("", max_epochs=-1, max_time=timedelta(minutes=2))
    judged = progress_drawing.FitClock()
    assert left(clock, by_time, judged, 1, 30.0) == 90.0
    assert left(clock, by_time, judged, 2, 100.0) == 0.0
    by_time.callbacks, by_time.max_time = [Timer(duration=timedelta(seconds=50))], None
    assert left(clock, by_time, judged, 3, 1.0) == 50.0  # it has not begun
    by_steps.max_steps = by_steps.max_epochs = -1
    assert left(clock, by_steps, progress_drawing.FitClock(), 1, 1.0) is None


def test_the_first_limit_counts_and_an_unknown_length_is_that_of_the_epoch_before(clock: Clock) -> None:
    both = FakeTrainer("", num_training_batches=10, max_epochs=100, max_steps=20, global_step=1)
    judged = progress_drawing.FitClock()
    judged.left(both, 1)
    both.global_step = 6
    assert left(clock, both, judged, 6, 10.0) == pytest.approx(28.0)
    stream = FakeTrainer("", num_training_batches=math.inf, max_epochs=3)
    judged = progress_drawing.FitClock()
    assert left(clock, stream, judged, 1, 1.0) is None
    assert left(clock, stream, judged, 5, 4.0) is None
    stream.current_epoch, judged.length = 1, 10
    assert left(clock, stream, judged, 5, 10.0) == pytest.approx(15.0)


def test_the_epoch_in_which_max_steps_ends_the_fit(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    output(monkeypatch, Terminal)
    bar = TQDMProgressBar()
    trainer = fit(bar, num_training_batches=100, max_steps=10, accumulate_grad_batches=2, global_step=4)
    trainer.hook("on_train_epoch_start")
    assert bar.train_progress_bar.total == 12
    trainer.hook("on_train_batch_end", None, None, 8)
    assert (bar.train_progress_bar.total, bar.train_progress_bar.n) == (20, 9)  # resumed after 8 batches
    trainer.hook("on_train_batch_end", None, None, 20)  # the accumulation has grown
    clock.now += 1
    trainer.hook("on_train_batch_end", None, None, 21)
    assert bar.train_progress_bar.total == 100
    trainer.hook("teardown", stage="fit")


def test_a_fit_that_ends_inside_an_epoch_tells_where(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch)
    trainer = fit(TQDMProgressBar(), num_training_batches=100)
    trainer.hook("on_train_epoch_start")
    trainer.hook("on_train_batch_end", None, None, 6)
    trainer.hook("on_train_end")
    assert out.getvalue() == "Epoch 0/1: 7/100, in 00:00, loss=0.25\n"


def test_bars_of_ones_own(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    class Own(TQDMProgressBar):
        BAR_FORMAT = "<{desc}|{n_fmt} of {total_fmt}>"

        def init_validation_tqdm(self) -> Any:
            bar = super().init_validation_tqdm()
            bar.set_description("looking")
            return bar

    out = output(monkeypatch, Terminal)
    trainer = fit(Own(), num_training_batches=5)
    trainer.hook("on_train_epoch_start")
    evaluate(trainer, "validation")
    trainer.hook("teardown", stage="fit")
    assert "<Epoch 0/1|0 of 5>" in out.getvalue() and "<looking: |2 of 2>" in out.getvalue()


def test_disable_and_enable(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch, Terminal)
    bar = TQDMProgressBar()
    trainer = fit(bar, num_training_batches=5)
    trainer.hook("on_train_epoch_start")
    bar.disable()
    evaluate(trainer, "validation")
    for done in range(5):
        bar.show_draining(done, 4)
    assert "Epoch" not in rendered(out.getvalue())[0] and "Validation" not in out.getvalue() and "Resuming" not in out.getvalue()
    bar.enable()
    train(trainer, clock, 5, 1.0)
    assert rendered(out.getvalue())[0].startswith("Epoch 0/1: 100%")


def test_draining_does_not_count_as_training(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    for kind in (io.StringIO, Terminal):
        out = output(monkeypatch, kind)
        trainer = fit(TQDMProgressBar(), num_training_batches=100)
        (bar,) = trainer.callbacks
        trainer.hook("on_train_epoch_start")
        for done in range(1, 501):
            clock.now += 1.0
            bar.show_draining(done, 500)
        clock.now += 1.0
        trainer.hook("on_train_batch_end", None, None, 50)
        assert bar._train.took == 1.0
        trainer.hook("teardown", stage="fit")
        if kind is io.StringIO:
            lines = [line.split(",")[0] for line in out.getvalue().splitlines()]
            assert lines == ["Passing over 500 items of data", *(f"Resuming: passing over data: {n}/500" for n in (11, 31, 71, 151, 311))]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch, Terminal)
    bar = TQDMProgressBar()
    trainer = fit(bar, num_training_batches=5, logger=SimpleNamespace(version=3))
    train(trainer, clock, 5, 1.0, epochs=2)
    text = out.getvalue()
    assert "Epoch 1/1: 100%" in text and "5/5" in text and "v_num=3, loss=0.25" in text
    assert text.count("\n") == 1  # the bar of epoch 0 was replaced, that of the last one stays
    assert bar.train_progress_bar is None


def test_leave_keeps_every_epoch(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch, Terminal)
    train(fit(TQDMProgressBar(leave=True), num_training_batches=5), clock, 5, 1.0, epochs=3)
    assert out.getvalue().count("\n") == 3


def test_drawing_is_limited_by_time_and_by_batches(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    output(monkeypatch, Terminal)
    for rate, seconds, expected in ((1, 0.0, 2), (1, 0.06, 51), (1, 1.0, 101), (20, 1.0, 6), (0, 1.0, 0)):
        bar = TQDMProgressBar(refresh_rate=rate)
        trainer = fit(bar, num_training_batches=100)
        asked: list[int] = []
        monkeypatch.setattr(bar, "get_metrics", lambda *_, asked=asked: asked.append(1) or {})
        train(trainer, clock, 100, seconds)
        assert len(asked) == expected, (rate, seconds)  # the last is the end of the epoch


def test_a_resumed_bar_begins_in_the_middle(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    output(monkeypatch, Terminal)
    bar = TQDMProgressBar()
    trainer = fit(bar, num_training_batches=10)
    trainer.hook("on_train_epoch_start")
    trainer.hook("on_train_batch_end", None, None, 6)
    assert (bar.train_progress_bar.initial, bar.train_progress_bar.n, bar.train_progress_bar.total) == (6, 7, 10)
    trainer.hook("teardown", stage="fit")


def evaluate(trainer: FakeTrainer, word: str, batches: int = 2, loaders: int = 1) -> None:
    trainer.hook(f"on_{word}_start")
    for loader in range(loaders):
        for i in range(batches):
            trainer.hook(f"on_{word}_batch_end", None, None, i, loader)
    trainer.hook(f"on_{word}_end")


@pytest.mark.parametrize(
    ("word", "fn", "text"), [("validation", "validate", "Validation"), ("test", "test", "Testing"), ("predict", "predict", "Predicting")]
)
def test_evaluation(monkeypatch: pytest.MonkeyPatch, clock: Clock, word: str, fn: str, text: str) -> None:
    two = {"num_val_batches": [2, 2], "num_test_batches": [2, 2], "num_predict_batches": [2, 2]}
    for kind in (Terminal, io.StringIO):
        out = output(monkeypatch, kind)
        trainer = FakeTrainer("", [TQDMProgressBar()])
        trainer.state.fn = fn
        trainer.hook("setup", stage=fn)
        evaluate(trainer, word)
        trainer.__dict__.update(two)
        evaluate(trainer, word, loaders=2)
        trainer.hook("teardown", stage=fn)
        if kind is Terminal:
            assert f"{text}: 100%" in out.getvalue() and f"{text} DataLoader 1: 100%" in out.getvalue()
        else:
            assert [line.split(",")[0] for line in out.getvalue().splitlines()] == [
                f"{text}: 2/2", f"{text} DataLoader 0: 2/2", f"{text} DataLoader 1: 2/2"
            ]  # fmt: skip


def test_validation_inside_fit(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch, Terminal)
    bar = TQDMProgressBar()
    trainer = fit(bar, num_sanity_val_batches=[1])
    trainer.sanity_checking = True
    trainer.hook("on_validation_start")
    assert (bar.val_progress_bar.total, bar.val_progress_bar.desc) == (1, "Sanity Checking")
    trainer.hook("on_validation_end")
    trainer.sanity_checking = False
    trainer.hook("on_train_epoch_start")
    trainer.hook("on_validation_start")
    assert (bar.val_progress_bar.total, bar.val_progress_bar.pos, bar.train_progress_bar.pos) == (2, -1, 0)
    trainer.hook("on_validation_end")
    assert bar.val_progress_bar is None
    trainer.hook("teardown", stage="fit")
    assert bar.train_progress_bar is None
    out = output(monkeypatch)
    trainer = fit(TQDMProgressBar())
    evaluate(trainer, "validation")
    assert out.getvalue() == ""  # in a file, the epoch's line tells the numbers


def test_ranks_other_than_0_are_silent(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch, Terminal)
    bar = TQDMProgressBar()
    trainer = fit(bar, is_global_zero=False)
    evaluate(trainer, "validation", loaders=2)
    train(trainer, clock, 5, 1.0)
    assert (out.getvalue(), bar.is_enabled, bar.is_disabled) == ("", False, True)


def test_print_keeps_the_bar(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch, Terminal)
    bar = TQDMProgressBar()
    trainer = fit(bar)
    bar.print("before", 1)
    assert out.getvalue() == "before 1\n"
    trainer.hook("on_train_epoch_start")
    bar.print("between", 2, sep="-")
    assert "between-2\n" in out.getvalue()
    assert out.getvalue().index("between-2") < out.getvalue().rindex("Epoch 0/1:")
    trainer.hook("teardown", stage="fit")


def test_nothing_is_left_running_and_bars_do_not_travel(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    output(monkeypatch, Terminal)
    before = tqdm_progress.Bar.monitor  # somebody else's bar in this process may have started tqdm's thread
    bar = TQDMProgressBar()
    trainer = fit(bar)
    trainer.hook("on_train_epoch_start")
    copy = pickle.loads(pickle.dumps(bar))
    assert copy.train_progress_bar is None
    assert tqdm_progress.Bar.monitor is before
    trainer.hook("teardown", stage="fit")
    with pytest.raises(MisconfigurationException, match="there is no run"):
        bar.trainer  # noqa: B018


def test_where_output_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    output(monkeypatch)
    assert tqdm_progress.bar_class(alone=True) is None
    output(monkeypatch, Terminal)
    assert tqdm_progress.bar_class(alone=True) is tqdm_progress.Bar
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setattr(tqdm_progress.importlib.util, "find_spec", lambda name: None)
    assert tqdm_progress.bar_class(alone=True) is None  # a notebook without ipywidgets
    monkeypatch.setattr(tqdm_progress.importlib.util, "find_spec", lambda name: object())
    from tqdm.notebook import tqdm as notebook

    found = tqdm_progress.bar_class(alone=True)
    assert found is not None and issubclass(found, notebook)


def test_negative_arguments() -> None:
    with pytest.raises(MisconfigurationException, match="refresh_rate=-1"):
        TQDMProgressBar(refresh_rate=-1)
    with pytest.raises(MisconfigurationException, match="process_position=-1"):
        TQDMProgressBar(process_position=-1)


def test_a_bar_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(ProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {n: v for n, v in super().get_metrics(trainer, module).items() if n != "v_num"}

    bar = Own()
    trainer = fit(bar, logger=SimpleNamespace(version="a-long-version"), num_val_batches=[2, 3])  # type: ignore[arg-type]
    assert bar.get_metrics(trainer, None) == {"loss": 0.25}
    assert ProgressBar.get_metrics(bar, trainer, None)["v_num"] == "sion"
    assert (bar.total_train_batches, bar.total_val_batches, bar.total_val_batches_current_dataloader) == (4, 5, 2)


def test_a_terminal_without_a_size_still_shows_the_bar(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = output(monkeypatch, Terminal)
    out.fileno = lambda: 1
    monkeypatch.setattr(tqdm_progress.os, "get_terminal_size", lambda fd: SimpleNamespace(columns=0, lines=0))
    train(fit(TQDMProgressBar(), num_training_batches=5), clock, 5, 1.0)
    assert "Epoch 0/1: 100%" in out.getvalue()
    assert max(map(len, out.getvalue().split("\r"))) <= 81
