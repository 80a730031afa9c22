"""ModelCheckpoint: which files there are after which numbers."""

from __future__ import annotations

import math
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks import ModelCheckpoint
from callbacks import checkpoint_triggers as triggers
from callbacks.errors import CheckpointError, MisconfigurationException
from callbacks.loggers.base import Logger
from tests.helpers.fake_trainer import FakeTrainer

nan = math.nan


def names(folder: Any) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if not path.is_dir())


def run(tmp_path: Path, values: list[float], **arguments: Any) -> tuple[ModelCheckpoint, FakeTrainer]:
    """One epoch of one step for each value of `val_loss`."""
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", monitor=arguments.pop("monitor", "val_loss"), **arguments)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    for value in values:
        trainer.epoch(val_loss=value)
    return checkpoint, trainer


def test_without_monitor_the_newest_is_kept(tmp_path: Path) -> None:
    checkpoint, trainer = run(tmp_path, [1, 2, 3], monitor=None)
    assert names(tmp_path / "c") == ["epoch=2-step=3.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "c" / "epoch=2-step=3.ckpt")
    assert checkpoint.best_model_score is None
    assert [step for _, step, _ in trainer.saved] == [1, 2, 3]


def test_all_or_none_are_kept(tmp_path: Path) -> None:
    run(tmp_path, [1, 2, 3], monitor=None, save_top_k=-1)
    assert names(tmp_path / "c") == [f"epoch={i}-step={i + 1}.ckpt" for i in range(3)]
    _, trainer = run(tmp_path / "none", [1, 2], monitor=None, save_top_k=0)
    assert trainer.saved == []
    _, trainer = run(tmp_path / "last", [1, 2], monitor=None, save_top_k=0, save_last=True)
    assert names(tmp_path / "last" / "c") == ["last.ckpt"]


def test_default_folders(tmp_path: Path) -> None:
    for log_dir, expected in [(None, tmp_path), (str(tmp_path / "runs"), tmp_path / "runs")]:
        checkpoint = ModelCheckpoint()
        FakeTrainer(tmp_path, [checkpoint], log_dir=log_dir).start()
        assert checkpoint.dirpath == str(expected / "checkpoints")
    assert names(tmp_path) == []  # the try of the folder leaves nothing


def test_c07_last_is_the_newest_and_best_the_lowest(tmp_path: Path) -> None:
    checkpoint, _ = run(tmp_path, [1.0, 2.0, 3.0, 4.0], save_last=True)
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt", "last.ckpt"]
    assert Path(checkpoint.last_model_path).read_text() == "epoch 3 step 4"
    assert Path(checkpoint.best_model_path).read_text() == "epoch 0 step 1"
    assert checkpoint.best_model_score is not None and checkpoint.best_model_score.item() == 1.0


def test_c07_holds_for_a_link_too(tmp_path: Path) -> None:
    checkpoint, _ = run(tmp_path, [1.0, 2.0, 3.0, 4.0], save_last="link")
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt", "epoch=3-step=4.ckpt", "last.ckpt"]
    assert os.readlink(checkpoint.last_model_path) == "epoch=3-step=4.ckpt"  # relative
    assert Path(checkpoint.best_model_path).read_text() == "epoch 0 step 1"
    checkpoint, _ = run(tmp_path / "2", [4.0, 3.0], save_last="link")
    assert names(tmp_path / "2" / "c") == ["epoch=1-step=2.ckpt", "last.ckpt"]


def test_c08_a_steps_file_ranks_by_the_same_steps_validation(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", every_n_train_steps=2)
    trainer = FakeTrainer(tmp_path, [checkpoint], val_check_interval=2).start()
    for value in [5.0, 1.0, 5.0, 5.0]:
        trainer.step()
        trainer.step(val_loss=value)  # validation comes between the hook and the boundary
    assert names(tmp_path) == ["epoch=0-step=4.ckpt"]
    assert checkpoint.best_model_path.endswith("epoch=0-step=4.ckpt")


def test_c08_with_saves_asked_for_by_validation(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss")
    trainer = FakeTrainer(tmp_path, [checkpoint], val_check_interval=2).start()
    for value in [5.0, 1.0, 5.0, 5.0]:
        trainer.step()
        trainer.global_step += 1
        trainer.set(val_loss=value)
        trainer.hook("on_validation_end")
        trainer.boundary()
    assert names(tmp_path) == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize("link", [True, "link"])
def test_c09_two_runs_in_one_folder(tmp_path: Path, link: Any) -> None:
    run(tmp_path, [1.0, 2.0], save_last=link)
    with pytest.warns(UserWarning, match="is not empty"):
        second, _ = run(tmp_path, [9.0], save_last=link)
    assert names(tmp_path / "c") == sorted(
        ["epoch=0-step=1-v1.ckpt", "epoch=0-step=1.ckpt", "last.ckpt", *(["epoch=1-step=2.ckpt"] if link == "link" else [])]
    )
    assert Path(second.last_model_path).name == "last.ckpt"
    assert Path(second.last_model_path).read_text() == "epoch 0 step 1"
    if link == "link":
        assert os.readlink(second.last_model_path) == "epoch=0-step=1-v1.ckpt"


def test_c09_a_metrics_slash_makes_no_folder(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}-{val/loss:.2f}", monitor="val/loss")
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    trainer.epoch(val__loss=0.5)
    assert names(tmp_path) == ["epoch=0-val_loss=0.50.ckpt"]


@pytest.mark.parametrize(("mode", "best"), [("min", 2.0), ("max", 5.0)])
def test_c10_nan_is_never_best(tmp_path: Path, mode: str, best: float) -> None:
    checkpoint, _ = run(tmp_path, [nan, 3.0, 2.0, 5.0, nan], mode=mode)
    assert checkpoint.best_model_score is not None and checkpoint.best_model_score.item() == best
    assert len(names(tmp_path / "c")) == 1


def test_c10_infinity_beats_nan_and_nan_alone_has_no_best(tmp_path: Path) -> None:
    checkpoint, trainer = run(tmp_path, [nan])
    assert (checkpoint.best_model_path, checkpoint.best_model_score) == ("", None)
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt"]  # something is there to go on from
    trainer.epoch(val_loss=math.inf)
    assert names(tmp_path / "c") == ["epoch=1-step=2.ckpt"]
    assert checkpoint.best_model_path.endswith("epoch=1-step=2.ckpt")


def test_top_k_keeps_the_k_best_and_a_tie_displaces_nothing(tmp_path: Path) -> None:
    checkpoint, _ = run(tmp_path, [3.0, 1.0, 2.0, 2.0, 5.0], save_top_k=2)
    assert names(tmp_path / "c") == ["epoch=1-step=2.ckpt", "epoch=2-step=3.ckpt"]
    assert {Path(p).name: v.item() for p, v in checkpoint.best_k_models.items()} == {"epoch=1-step=2.ckpt": 1.0, "epoch=2-step=3.ckpt": 2.0}
    assert Path(checkpoint.kth_best_model_path).name == "epoch=2-step=3.ckpt"
    assert checkpoint.kth_value.item() == 2.0
    assert checkpoint.check_monitor_top_k(None, 1.5) and not checkpoint.check_monitor_top_k(None, 2.0)
    assert not checkpoint.check_monitor_top_k(None, None)


def test_a_smaller_k_after_a_resume_prunes_down_to_it(tmp_path: Path) -> None:
    first, _ = run(tmp_path, [4.0, 3.0, 2.0, 5.0], save_top_k=4)
    second = ModelCheckpoint(dirpath=tmp_path / "c", monitor="val_loss", save_top_k=2)
    trainer = FakeTrainer(tmp_path, [second], global_step=4, current_epoch=4, ckpt_path="elsewhere").start()
    second.load_state_dict(first.state_dict())
    trainer.epoch(val_loss=3.5)  # not among the two best
    assert len(names(tmp_path / "c")) == 4
    trainer.epoch(val_loss=1.0)
    assert names(tmp_path / "c") == ["epoch=2-step=3.ckpt", "epoch=5-step=6.ckpt"]


def test_a_failing_copy_leaves_the_books_right(tmp_path: Path) -> None:
    checkpoint, trainer = run(tmp_path, [2.0], save_last=True)
    save = trainer.save_checkpoint

    def no_room_for_two(path: str, weights_only: bool = False) -> None:
        if path.endswith("last.ckpt"):
            raise CheckpointError("no space left")
        save(path, weights_only)

    trainer.save_checkpoint = no_room_for_two
    with pytest.raises(CheckpointError):
        trainer.epoch(val_loss=1.0)
    assert names(tmp_path / "c") == ["epoch=1-step=2.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path.endswith("epoch=1-step=2.ckpt")


def test_one_name_for_all_reuses_only_the_file_that_goes(tmp_path: Path) -> None:
    checkpoint, _ = run(tmp_path, [3.0, 2.0, 1.0, 0.0], save_top_k=2, filename="m")
    assert names(tmp_path / "c") == ["m-v1.ckpt", "m.ckpt"]
    assert {Path(p).name: v.item() for p, v in checkpoint.best_k_models.items()} == {"m.ckpt": 1.0, "m-v1.ckpt": 0.0}
    assert (tmp_path / "c" / "m.ckpt").read_text() == "epoch 2 step 3"
    run(tmp_path / "b", [3.0, 2.0], filename="m")
    assert names(tmp_path / "b" / "c") == ["m.ckpt"]
    run(tmp_path / "a", [3.0, 2.0], filename="m", save_top_k=2, enable_version_counter=False)
    assert names(tmp_path / "a" / "c") == ["m.ckpt"]


def test_new_file_first_then_the_old_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, trainer = run(tmp_path, [2.0])
    before = checkpoint.state_dict()

    def full(path: str, weights_only: bool = False) -> None:
        raise CheckpointError(f"{path}: no space left")

    monkeypatch.setattr(trainer, "save_checkpoint", full)
    with pytest.raises(CheckpointError, match="no space left"):
        trainer.epoch(val_loss=1.0)
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt"]
    assert checkpoint.state_dict() == {**before, "current_score": torch.tensor(1.0), "due": True}  # the books name no file that was not written


def test_not_twice_at_one_step_not_in_sanity_check_not_in_fast_dev_run(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    trainer.sanity_checking = True
    trainer.hook("on_validation_end")
    assert trainer.requests == []
    trainer.sanity_checking = False
    trainer.epoch()
    checkpoint._save(trainer)
    assert len(trainer.saved) == 1
    quick = FakeTrainer(tmp_path, [ModelCheckpoint(dirpath=tmp_path)], fast_dev_run=1).start()
    quick.epoch()
    assert quick.saved == []
    evaluating = FakeTrainer(tmp_path, [ModelCheckpoint(dirpath=tmp_path)])
    evaluating.state.fn = "validate"
    evaluating.hook("on_validation_end")
    assert evaluating.requests == []


@pytest.mark.parametrize(
    ("choice", "validates", "hook"),
    [
        (None, True, "on_validation_end"),
        (None, False, "on_train_epoch_end"),
        (True, True, "on_train_epoch_end"),
        (False, True, "on_validation_end"),
    ],
)
def test_where_epoch_saves_are_asked_for(tmp_path: Path, choice: Any, validates: bool, hook: str) -> None:
    asked = []
    for name in ("on_validation_end", "on_train_epoch_end")[not validates :]:
        trainer = FakeTrainer(tmp_path, [ModelCheckpoint(save_on_train_epoch_end=choice)], enable_validation=validates).start()
        trainer.global_step = 1
        trainer.hook(name)
        asked += [name] * len(trainer.requests)
    assert asked == [hook]


def test_every_n_epochs_and_steps(tmp_path: Path) -> None:
    run(tmp_path, [1, 2, 3, 4], monitor=None, every_n_epochs=2, save_top_k=-1)
    assert names(tmp_path / "c") == ["epoch=1-step=2.ckpt", "epoch=3-step=4.ckpt"]
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "s", every_n_train_steps=3, save_top_k=-1)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    for _ in range(7):
        trainer.hook("on_train_batch_end", None, None, 0)  # inside an accumulation window
        trainer.step()
    assert names(tmp_path / "s") == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]
    assert (checkpoint.every_n_train_steps, checkpoint.every_n_epochs) == (3, 0)


def test_a_fit_that_ends_inside_an_epoch_saves(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    trainer.hook("on_train_end")
    assert trainer.saved == []  # nothing was trained
    trainer.epoch(2)
    trainer.hook("on_train_end")
    assert len(trainer.saved) == 1  # at the epoch's end
    trainer.step()
    trainer.hook("on_train_end")
    assert names(tmp_path) == ["epoch=1-step=3.ckpt"]


def test_time_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(triggers.time, "monotonic", lambda: now[0])
    checkpoint = ModelCheckpoint(dirpath=tmp_path, train_time_interval=timedelta(seconds=10), save_top_k=-1)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    for _ in range(9):
        now[0] += 4
        trainer.step()
    assert [step for _, step, _ in trainer.saved] == [3, 6, 9]


def test_time_interval_asks_the_other_ranks_rarely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr(triggers.time, "monotonic", lambda: now[0])
    timer, trainer = triggers.IntervalTimer(timedelta(seconds=1000)), FakeTrainer(tmp_path, world_size=2)
    due = []
    for step in range(1, 2002):
        now[0] += 1.0
        if timer.due(trainer):
            due.append(step)
    assert due == [1000, 2000]
    assert trainer.broadcasts <= 30


def test_ranks_follow_rank_0s_clock(tmp_path: Path) -> None:
    timer = triggers.IntervalTimer(timedelta(hours=1))
    trainer = FakeTrainer(tmp_path, world_size=2, is_global_zero=False)
    answers = iter([(False, 3), (True, 1)])
    trainer.broadcast = lambda obj, src=0: next(answers)
    assert [timer.due(trainer) for _ in range(4)] == [False, False, False, True]


def test_ranks_other_than_0_delete_and_link_nothing(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", save_last="link")
    trainer = FakeTrainer(tmp_path, [checkpoint], is_global_zero=False, world_size=2)
    checkpoint.dirpath = str(tmp_path / "c")
    for step in (1, 2):
        trainer.global_step = step
        answers = iter([str(tmp_path / "c" / f"e{step}.ckpt"), None])  # the path; how the link went
        trainer.broadcast = lambda obj, src=0, answers=answers: next(answers)
        checkpoint._save(trainer)
    assert names(tmp_path / "c") == ["e1.ckpt", "e2.ckpt"]  # (rank 0 removes e1 and makes the link)
    assert checkpoint.best_model_path.endswith("e2.ckpt")


def test_setup_finds_an_impossible_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MisconfigurationException, match=r"file/below.*is not a folder"):
        FakeTrainer(tmp_path, [ModelCheckpoint(dirpath=tmp_path / "file" / "below")]).start()
    with pytest.raises(MisconfigurationException, match="cannot write there"):
        FakeTrainer(tmp_path, [ModelCheckpoint(dirpath="/proc/checkpoints")]).start()
    FakeTrainer(tmp_path, [ModelCheckpoint(dirpath="/proc/checkpoints")], fast_dev_run=True).start()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mim"}, "Did you mean 'min'"),
        ({"filename": "{epoch:zz}"}, "{epoch:zz} cannot be written: Unknown format code"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": 3}, "ranking needs a metric"),
        ({"save_last": "copy"}, "save_last='copy'"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"train_time_interval": 60}, "timedelta"),
        ({"every_n_train_steps": 5, "every_n_epochs": 1}, "only one of"),
    ],
)
def test_impossible_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ModelCheckpoint(**arguments)


def test_a_monitor_that_nobody_logs(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"'val_los'.*'val_loss'.*Did you mean 'val_loss'"):
        run(tmp_path, [1.0], monitor="val_los")
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", monitor="val_loss", every_n_train_steps=1, save_last=True)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    with pytest.warns(UserWarning, match="Nothing is ranked"):  # before the first validation it may still come
        trainer.step(loss=1.0)
    assert names(tmp_path / "c") == ["last.ckpt"]


def test_a_name_field_that_nobody_logs(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"no metric 'val_los'.*Did you mean 'val_loss'"):
        run(tmp_path, [1.0], filename="{epoch:02d}-{val_los:.1f}")
    assert names(tmp_path / "c") == ["epoch=00-val_los=0.0.ckpt"]


def test_names(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="sub/{epoch:03d}_{val_loss:.3f}", auto_insert_metric_name=False)
    values = {"epoch": 7, "step": 1, "val_loss": torch.tensor(0.25)}
    assert checkpoint.format_checkpoint_name(values) == str(tmp_path / "sub/007_0.250.ckpt")
    assert checkpoint.format_checkpoint_name(values, ver=2) == str(tmp_path / "sub/007_0.250-v2.ckpt")
    assert ModelCheckpoint().format_checkpoint_name(values) == "epoch=7-step=1.ckpt"


def test_a_last_name_with_fields_replaces_its_former_file(tmp_path: Path) -> None:
    class Named(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "last-{epoch}"

    checkpoint = Named(dirpath=tmp_path, save_last=True, save_top_k=0)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    trainer.epoch()
    trainer.epoch()
    assert names(tmp_path) == ["last-epoch=1.ckpt"]


def test_state_returns_plain_values_and_goes_on(tmp_path: Path) -> None:
    first, trainer = run(tmp_path, [3.0, 2.0], save_top_k=2, save_last=True)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second = ModelCheckpoint(dirpath=tmp_path / "c", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = FakeTrainer(tmp_path, [second], global_step=2, current_epoch=2, ckpt_path=first.last_model_path)
    trainer.hook("setup", stage="fit")
    second.load_state_dict(state)
    trainer.hook("on_train_start")
    trainer.epoch(val_loss=1.0)
    assert names(tmp_path / "c") == ["epoch=1-step=2.ckpt", "epoch=2-step=3.ckpt", "last.ckpt"]
    assert first.state_key == second.state_key


def test_resuming_elsewhere_ranks_on_and_deletes_nothing_of_the_old_folder(tmp_path: Path) -> None:
    first, _ = run(tmp_path, [3.0], save_last=True)
    second = ModelCheckpoint(dirpath=tmp_path / "new", monitor="val_loss")
    second.load_state_dict(first.state_dict())
    trainer = FakeTrainer(tmp_path, [second]).start()
    trainer.epoch(val_loss=4.0)
    assert second.best_model_path == first.best_model_path
    trainer.epoch(val_loss=1.0)
    assert names(tmp_path / "new") == ["epoch=1-step=2.ckpt"]
    assert float(second.best_model_score) == 1.0
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt", "last.ckpt"]


def test_a_state_is_ranked_by_a_number_of_its_own_step_alone(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", monitor="val_loss", every_n_train_steps=1, save_top_k=3, save_last=True)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    trainer.step(val_loss=3.0)
    with pytest.warns(UserWarning, match="measured at step 1, not at step 2"):
        trainer.step()
    assert [os.path.basename(path) for path in checkpoint.best_k_models] == ["epoch=0-step=1.ckpt"]
    assert (tmp_path / "c" / "last.ckpt").read_text() == "epoch 0 step 2"


def test_the_file_resumed_from_stays(tmp_path: Path) -> None:
    checkpoint, trainer = run(tmp_path, [3.0])
    trainer.ckpt_path = checkpoint.best_model_path
    trainer.epoch(val_loss=1.0)
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt"]
    trainer.ckpt_path, trainer.continues = checkpoint.best_model_path, True  # found by "auto": a run that never stopped drops it, too
    trainer.epoch(val_loss=0.5)
    assert names(tmp_path / "c") == ["epoch=0-step=1.ckpt", "epoch=2-step=3.ckpt"]


def test_a_file_that_is_gone_or_stuck_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, trainer = run(tmp_path, [3.0])
    os.remove(checkpoint.best_model_path)
    trainer.epoch(val_loss=2.0)

    def stuck(path: str) -> None:
        raise PermissionError("busy")

    monkeypatch.setattr(os, "remove", stuck)
    with pytest.warns(UserWarning, match="could not be deleted"):
        trainer.epoch(val_loss=1.0)


def test_no_symbolic_links_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "symlink", unsupported)
    with pytest.raises(CheckpointError, match="save_last=True"):
        run(tmp_path, [1.0], save_last="link")


def test_on_exception(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)
    trainer = FakeTrainer(tmp_path, [checkpoint]).start()
    trainer.hook("on_exception", ValueError())
    assert trainer.saved == []  # before the first step
    trainer.step()
    trainer.hook("on_exception", ValueError())
    trainer.hook("on_exception", ValueError())
    assert trainer.saved == [("epoch=0-step=1.ckpt", 1, False)]
    several = FakeTrainer(tmp_path, [ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)], world_size=2, global_step=5)
    with pytest.warns(UserWarning, match="needs all ranks"):
        several.hook("on_exception", ValueError())
    assert several.saved == []

    def full(path: str, weights_only: bool = False) -> None:
        raise CheckpointError("no space left")

    trainer.save_checkpoint = full
    trainer.global_step += 1
    with pytest.warns(UserWarning, match="not saved: no space left"):
        trainer.hook("on_exception", ValueError())


def test_weights_only_verbose_loggers_and_yaml(tmp_path: Path) -> None:
    class Told(Logger):
        told: Any = None

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            self.told = checkpoint_callback

    logger = Told()
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_weights_only=True, verbose=True)
    trainer = FakeTrainer(tmp_path, [checkpoint], loggers=[logger]).start()
    trainer.epoch(val_loss=0.5)
    assert trainer.saved == [("epoch=0-step=1.ckpt", 1, True)]
    assert "val_loss = 0.50000" in trainer.printed[0]
    assert logger.told is checkpoint
    checkpoint.to_yaml()
    assert (tmp_path / "best_k_models.yaml").read_text() == f'"{tmp_path}/epoch=0-step=1.ckpt": 0.5\n'


def test_a_folder_with_files_is_announced(tmp_path: Path) -> None:
    run(tmp_path, [1.0])
    with pytest.warns(UserWarning, match="is not empty"):
        run(tmp_path, [1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path / "fresh", [1.0])
