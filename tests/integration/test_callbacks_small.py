"""Timer, LambdaCallback, OnExceptionCheckpoint, GradientAccumulationScheduler and BasePredictionWriter in real runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import callbacks.timer
from callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    GradientAccumulationScheduler,
    GradientSync,
    LambdaCallback,
    OnExceptionCheckpoint,
    Timer,
)
from tests.helpers.modules import Net, Scalar, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, Stop
from trainer import MisconfigurationException
from trainer.outcome import _picklable_attributes

# -- Timer -----------------------------------------------------------------------------------------------------------------


class Ticking(Scalar):
    """A training step takes `speed` seconds, a validation or test step 10, on a clock of the test's own."""

    def __init__(self, speed: float = 1.0) -> None:
        super().__init__()
        self.speed, self.now = speed, 1000.0
        callbacks.timer.time = SimpleNamespace(monotonic=lambda: self.now)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.now += self.speed
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.now += 10

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.now += 10


@pytest.fixture(autouse=True)
def clock() -> Any:
    before = callbacks.timer.time
    yield
    callbacks.timer.time = before


def timed(timer: Timer, folder: Any = None, resume: Any = None, **settings: Any) -> tuple[Any, Ticking]:
    module = Ticking()
    extra = [] if folder is None else [EveryStep(folder)]
    trainer = quiet(accelerator="cpu", **{"max_epochs": 5, **settings, "callbacks": [timer, *extra]})
    trainer.fit(module, loader(range(4)), ckpt_path=resume)
    return trainer, module


def test_the_timer_stops_at_a_step_or_at_an_epochs_end(capsys: Any) -> None:
    for interval, steps in (("step", 6), ("epoch", 8)):
        timer = Timer("00:00:00:06", interval)
        trainer, _ = timed(timer)
        assert (trainer.global_step, timer.time_elapsed(), timer.time_remaining()) == (steps, float(steps), 6.0 - steps)
        assert (timer.start_time(), timer.end_time("train")) == (1000.0, 1000.0 + steps)
    assert capsys.readouterr().out.count("Timer: the limit of 0:00:06 is reached; training stops.") == 2
    assert timed(Timer(verbose=False))[0].global_step == 20
    assert timed(Timer({"seconds": 2}, verbose=False), min_steps=3)[0].global_step == 3
    assert capsys.readouterr().out == ""


def test_the_timer_measures_every_stage() -> None:
    timer = Timer()
    trainer, module = quiet(accelerator="cpu", max_epochs=2, num_sanity_val_steps=1, callbacks=[timer]), Ticking()
    assert (timer.time_elapsed(), timer.start_time(), timer.time_remaining()) == (0.0, None, None)
    trainer.fit(module, loader(range(4)), loader(range(3)))
    assert (timer.time_elapsed("train"), timer.time_elapsed("validate"), timer.time_elapsed("test")) == (68.0, 30.0, 0.0)
    trainer.test(module, loader(range(2)), verbose=False)
    assert (timer.time_elapsed("test"), timer.time_elapsed()) == (20.0, 68.0)
    trainer.max_epochs = 3
    trainer.fit(module, loader(range(4)))
    assert timer.time_elapsed() == 72.0  # goes on where the first fit ended


def test_the_limit_holds_for_the_whole_of_a_training_that_is_resumed(tmp_path: Path) -> None:
    timed(Timer({"seconds": 6}), tmp_path)
    timer = Timer({"seconds": 6})
    trainer, module = timed(timer, resume=tmp_path / "step=4.ckpt")
    assert (trainer.global_step, timer.time_elapsed(), module.now) == (6, 6.0, 1002.0)
    used_up, module = timed(Timer({"seconds": 6}), resume=tmp_path / "step=6.ckpt")
    assert (used_up.global_step, module.now, used_up.state.status) == (6, 1000.0, "finished")
    assert timed(Timer({"seconds": 9}), resume=tmp_path / "step=6.ckpt")[0].global_step == 9


def _two_clocks() -> tuple[int, float]:
    module = Ticking()
    timer = Timer({"seconds": 6}, verbose=False)

    def faster(trainer: Any, module: Any) -> None:
        module.speed += trainer.global_rank

    trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=9, callbacks=[timer, LambdaCallback(on_train_start=faster)])
    trainer.fit(module, loader(range(8)))
    return trainer.global_step, timer.time_elapsed()


def test_ranks_stop_together_with_the_first_whose_time_is_up() -> None:
    assert run_ranks(_two_clocks) == [(3, 3.0), (3, 6.0)]


@pytest.mark.parametrize("arguments", [{"duration": "6 h"}, {"duration": 6}, {"duration": {"hour": 1}}, {"interval": "batch"}], ids=str)
def test_a_timer_that_cannot_be_is_refused(arguments: Any) -> None:
    with pytest.raises(MisconfigurationException, match=f"Timer\\({next(iter(arguments))}="):
        Timer(**arguments)
    with pytest.raises(MisconfigurationException, match="Did you mean 'train'"):
        Timer().time_elapsed("training")


# -- LambdaCallback --------------------------------------------------------------------------------------------------------


def test_functions_are_hooks() -> None:
    seen: list[Any] = []
    made = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append((trainer.global_step, outputs["loss"].item())),
        on_train_end=None,
        teardown=lambda *_, **named: seen.append(named),
    )
    quiet(accelerator="cpu", max_epochs=1, callbacks=made).fit(Scalar(), loader([1.0, 2.0]))
    assert seen == ["fit", (1, 0.0), (2, -2.0), {"stage": "fit"}]


def test_a_function_may_log_what_another_callback_monitors() -> None:
    late = LambdaCallback(on_train_batch_end=lambda t, m, o, b, i: m.log("late", 1.0, on_step=False, on_epoch=True))
    trainer = quiet(accelerator="cpu", max_epochs=9, callbacks=[late, EarlyStopping("late", patience=2)])
    trainer.fit(Scalar(), loader([1.0, 2.0]))
    assert trainer.current_epoch == 3


def test_functions_stay_the_callers_after_a_run_in_other_processes() -> None:
    made = LambdaCallback(on_train_end=lambda trainer, module: None)
    made.count = 3  # type: ignore[attr-defined]
    assert _picklable_attributes(made) == {"count": 3}


def test_names_that_are_no_hooks_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="on_train_batch_ends.*Did you mean 'on_train_batch_end'"):
        LambdaCallback(on_train_batch_ends=print)
    with pytest.raises(MisconfigurationException, match="on_train_end='now'"):
        LambdaCallback(on_train_end="now")


# -- OnExceptionCheckpoint -------------------------------------------------------------------------------------------------


class Failing(Net):
    fails_at = 3

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise Stop
        return super().training_step(batch, batch_idx)


def net(module: Any, callback: Any = None, resume: Any = None, **settings: Any) -> Any:
    trainer = quiet(accelerator="cpu", max_epochs=2, seed=1, callbacks=[callback] if callback else [], **settings)
    trainer.fit(module, loader(Net.rows(16), 4, shuffle=True), ckpt_path=resume)
    return module


def test_a_fit_that_failed_goes_on_from_its_last_step(tmp_path: Path) -> None:
    keeper = OnExceptionCheckpoint(tmp_path / "new", "failed")
    with pytest.raises(Stop):
        net(Failing(), keeper)
    assert keeper.ckpt_path == str(tmp_path / "new" / "failed.ckpt")
    assert torch.load(keeper.ckpt_path, weights_only=True)["global_step"] == 3
    whole = weights(net(Net()))
    assert_same(weights(net(Net(), keeper, resume=keeper.ckpt_path)), whole, atol=0)
    assert list((tmp_path / "new").iterdir()) == []  # it ended well
    with pytest.raises(MisconfigurationException, match="must not be empty"):
        OnExceptionCheckpoint(tmp_path, "")


def test_of_several_ranks_none_saves_and_rank_0_says_so(tmp_path: Path) -> None:
    def run(folder: Path) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                net(Failing(), OnExceptionCheckpoint(folder), devices=2, strategy="ddp")
            except Stop:
                return [str(one.message) for one in caught if "OnException" in str(one.message)]
        return ["did not fail"]

    first, second = run_ranks(run, folder=tmp_path)
    assert first == ["OnExceptionCheckpoint: nothing is saved, as a save needs all 2 ranks, and one has failed."]
    assert second == [] and list(tmp_path.iterdir()) == []


# -- GradientAccumulationScheduler -----------------------------------------------------------------------------------------


def test_accumulation_follows_the_schedule_and_nothing_else() -> None:
    schedule = GradientAccumulationScheduler({1: 2, 3: 4})
    assert [schedule.get_accumulate_grad_batches(epoch) for epoch in range(5)] == [1, 2, 2, 4, 4]
    assert schedule.going_to_accumulate_grad_batches() and not GradientAccumulationScheduler({2: 1}).going_to_accumulate_grad_batches()
    steps: list[int] = []
    watch = LambdaCallback(on_train_epoch_end=lambda trainer, module: steps.append(trainer.global_step))
    trainer = quiet(accelerator="cpu", max_epochs=4, callbacks=[schedule, watch])
    trainer.fit(Scalar(), loader(range(8)))
    assert steps == [8, 12, 16, 18]
    with pytest.raises(MisconfigurationException, match="both say how many batches"):
        quiet(accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, callbacks=[schedule]).fit(Scalar(), loader(range(8)))


def test_manual_optimization_accumulates_by_itself() -> None:
    class Manual(Scalar):
        automatic_optimization = False

    for callback in (GradientSync({1: 2}), GradientAccumulationScheduler({0: 2})):
        with pytest.raises(MisconfigurationException, match="step every n-th batch yourself"):
            quiet(accelerator="cpu", max_epochs=2, callbacks=[callback]).fit(Manual(), loader(range(8)))


# -- BasePredictionWriter --------------------------------------------------------------------------------------------------


class Doubling(Scalar):
    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"twice": batch * 2}


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path, interval: str) -> None:
        super().__init__(interval)
        self.folder, self.batches, self.epochs = folder, [], []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, index: int, dataloader: int) -> None:
        self.batches.append((dataloader, index, batch_indices, prediction["twice"].tolist(), batch.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((predictions, batch_indices), self.folder / f"{trainer.global_rank}.pt")
        self.epochs.append((predictions, batch_indices))


def written(folder: Path, interval: str, *data: Any, **settings: Any) -> tuple[Writer, Any]:
    writer = Writer(folder, interval)
    trainer = quiet(accelerator="cpu", callbacks=[writer], **settings)
    return writer, trainer.predict(Doubling(), list(data) if len(data) > 1 else data[0], return_predictions=False)


def test_predictions_are_written_with_their_places(tmp_path: Path) -> None:
    writer, returned = written(tmp_path, "batch_and_epoch", loader([5, 6, 7, 8, 9], 2))
    assert returned is None
    assert writer.batches == [(0, 0, [0, 1], [10, 12], [5, 6]), (0, 1, [2, 3], [14, 16], [7, 8]), (0, 2, [4], [18], [9])]
    ((predictions, indices),) = writer.epochs
    assert [p["twice"].tolist() for p in predictions] == [[10, 12], [14, 16], [18]] and indices == [[[0, 1], [2, 3], [4]]]
    assert writer._predictions == []  # nothing is kept beyond the run
    alone, _ = written(tmp_path, "batch", loader([5, 6], 2))
    assert (len(alone.batches), alone.epochs) == (1, [])
    two, _ = written(tmp_path, "epoch", loader([1, 2], 2), loader([3], 1))
    ((predictions, indices),) = two.epochs
    assert [[p["twice"].tolist() for p in of_one] for of_one in predictions] == [[[2, 4]], [[6]]]
    assert (indices, two.batches) == ([[[0, 1]], [[0]]], [])


def test_the_places_are_those_of_the_sampler_and_unknown_for_streams(tmp_path: Path) -> None:
    data = loader(range(10), 3, sampler=torch.utils.data.SubsetRandomSampler(range(2, 9)))
    writer, _ = written(tmp_path, "batch", data, seed=3)
    assert [indices for _, _, indices, _, _ in writer.batches] == [batch for *_, batch in writer.batches]
    assert sorted(i for _, _, indices, _, _ in writer.batches for i in indices) == list(range(2, 9))

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([1.0, 2.0])

    writer, _ = written(tmp_path, "batch", torch.utils.data.DataLoader(Stream(), batch_size=1))
    assert [indices for _, _, indices, _, _ in writer.batches] == [None, None]


def test_every_rank_writes_its_own(tmp_path: Path) -> None:
    def run(folder: Path) -> None:
        written(folder, "epoch", loader(range(7), 2), devices=2, strategy="ddp")

    run_ranks(run, folder=tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [indices for _, indices in found] == [[[[0, 1], [4, 5]]], [[[2, 3], [6]]]]
    for predictions, (indices,) in found:
        assert [p["twice"].tolist() for p in predictions] == [[2 * i for i in batch] for batch in indices]


def test_a_writer_without_its_method_is_refused_before_it_predicts() -> None:
    class Half(BasePredictionWriter):
        def write_on_batch_end(self, *_: Any) -> None: ...

    with pytest.raises(MisconfigurationException, match="Half.*has to define write_on_epoch_end"):
        quiet(accelerator="cpu", callbacks=[Half("batch_and_epoch")]).predict(Doubling(), loader([1.0]))
    with pytest.raises(MisconfigurationException, match="write_interval='epochs'.*Did you mean 'epoch'"):
        Half("epochs")
