"""Saving in the background: the state of the step that asked, training in the meantime, errors that come up, nothing lost."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch

from callbacks import Callback, Logger, ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.resume import assert_continues, assert_equal, noisy_loader, train
from trainer import AsyncCheckpointIO, TorchCheckpointIO
from trainer.checkpoint import io
from trainer.checkpoint.snapshot import Snapshots
from trainer.errors import CheckpointError


def keeper(folder, name="{step}", **more):
    return ModelCheckpoint(folder, name, **{"every_n_train_steps": 1, "async_save": True, **more})


def read(path):
    return torch.load(path, weights_only=True)


class SlowDisk(TorchCheckpointIO):
    """Writes when it is let: each save waits for `go`. (No disk here is slow enough to be sure of.)"""

    def __init__(self):
        super().__init__()
        self.go, self.began, self.tables = threading.Semaphore(0), threading.Event(), []

    def save_checkpoint(self, table, path):
        self.began.set()
        assert self.go.acquire(timeout=30)
        if "global_step" in table:
            self.tables.append((table["global_step"], table["state_dict"]["w"].item()))
        super().save_checkpoint(table, path)


# -- what is written ---------------------------------------------------------------------------------------------------------


def test_files_and_weights_are_those_of_saves_that_wait(tmp_path):
    at_once = train(noisy_loader(), tmp_path / "a")
    ways = {"b": {"callbacks": [keeper(tmp_path / "b", save_top_k=-1)]}, "c": {"plugins": [AsyncCheckpointIO()], "save_to": tmp_path / "c"}}
    for folder, settings in ways.items():
        assert_continues(train(noisy_loader(), **settings), at_once, step=0)
        names = sorted(os.listdir(tmp_path / folder))
        assert names == sorted(os.listdir(tmp_path / "a")) and len(names) == 8
        for name in names:
            right, found = read(tmp_path / "a" / name), read(tmp_path / folder / name)
            assert_equal({k: v for k, v in found.items() if k != "callbacks"}, {k: v for k, v in right.items() if k != "callbacks"})
        assert_continues(train(noisy_loader(), resume_from=tmp_path / folder / "step=5.ckpt"), at_once, step=5)


def test_training_goes_on_while_the_state_of_the_step_that_asked_is_written(tmp_path):
    disk, seen = SlowDisk(), []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 3:
                assert disk.began.wait(30)
            seen.append((trainer.global_step, module.w.item(), os.path.exists(tmp_path / "step=3.ckpt")))
            if trainer.global_step == 5:
                disk.go.release()

    saver = keeper(tmp_path, every_n_train_steps=3)
    quiet(max_steps=6, plugins=disk, callbacks=[Watch(), saver, AllowNext(disk)]).fit(Scalar(), loader([1] * 6))
    assert seen == [(step, -step, False) for step in range(6)]
    table = read(tmp_path / "step=6.ckpt")
    assert (table["global_step"], table["state_dict"]["w"].item()) == (6, -6.0) and os.listdir(tmp_path) == ["step=6.ckpt"]
    assert disk.tables == [(3, -3.0), (6, -6.0)]


class AllowNext(Callback):
    """The last save is waited for by the end of fit."""

    def __init__(self, disk):
        self.disk = disk

    def on_train_end(self, trainer, module):
        self.disk.go.release()


def test_a_link_moves_and_an_old_file_goes_when_the_new_one_is_whole(tmp_path):
    disk, seen = SlowDisk(), {}

    class Told(Logger):
        steps = ()

        def after_save_checkpoint(self, checkpoint_callback):
            self.steps = (*self.steps, Path(checkpoint_callback.best_model_path).name)

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 3:
                seen["during"] = (os.readlink(tmp_path / "last.ckpt"), sorted(os.listdir(tmp_path)))
                disk.go.release()

    logger, saver = Told(), keeper(tmp_path, save_last="link")
    disk.go.release(2)
    quiet(max_steps=4, plugins=disk, callbacks=[Watch(), saver, AllowNext(disk)], logger=logger).fit(Scalar(), loader([1] * 4))
    assert seen["during"] == ("step=2.ckpt", [".step=3.ckpt.claim", "last.ckpt", "step=2.ckpt"])
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=4.ckpt"] and os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"
    assert saver.best_model_path == str(tmp_path / "step=4.ckpt") and logger.steps == tuple(f"step={n}.ckpt" for n in (1, 2, 3, 4))
    assert read(tmp_path / "last.ckpt")["global_step"] == 4


def test_best_and_last_are_right_and_whole_when_fit_returns(tmp_path):
    class Validated(Scalar):
        values = (3.0, 1.0, 2.0, 4.0)

        def validation_step(self, batch, batch_idx):
            self.log("val", self.values[self.current_epoch])

    def books(folder, later):
        saver = ModelCheckpoint(tmp_path / folder, monitor="val", save_top_k=2, save_last=True, async_save=later)
        quiet(max_epochs=4, callbacks=[saver]).fit(Validated(), loader([1, 1]), loader([0]))
        table = read(saver.last_model_path)
        scores = {Path(path).name: score.item() for path, score in saver.best_k_models.items()}
        return sorted(os.listdir(tmp_path / folder)), scores, Path(saver.best_model_path).name, table["global_step"], table["state_dict"]

    assert books("later", True) == books("now", False)
    names, scores, best = books("again", True)[:3]
    assert names == ["epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt", "last.ckpt"] and best == "epoch=1-step=4.ckpt"
    assert scores == {"epoch=1-step=4.ckpt": 1.0, "epoch=2-step=6.ckpt": 2.0}


# -- errors ------------------------------------------------------------------------------------------------------------------


class Fails(TorchCheckpointIO):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def save_checkpoint(self, table, path):
        if table["global_step"] == self.at:
            raise OSError(28, "No space left on device", str(path))
        super().save_checkpoint(table, path)


class Steps(Scalar):
    """Counts its steps."""

    taken = 0

    def training_step(self, batch, batch_idx):
        self.taken += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("at", [2, 4, 6])
def test_an_error_of_the_writer_comes_up_as_it_is_and_the_books_name_what_is_there(tmp_path, at):
    module, saver = Steps(), keeper(tmp_path, every_n_train_steps=2)
    trainer = quiet(max_steps=6, plugins=Fails(at), callbacks=[saver])
    with pytest.raises(OSError, match="No space left on device") as caught:
        trainer.fit(module, loader([1] * 6))
    assert caught.value.filename == str(tmp_path / f"step={at}.ckpt")
    assert at <= module.taken <= min(at + 2, 6)  # at the next boundary, save, or the end, whichever came first
    assert os.listdir(tmp_path) == ([f"step={at - 2}.ckpt"] if at > 2 else [])
    assert saver.best_model_path == (str(tmp_path / f"step={at - 2}.ckpt") if at > 2 else "")
    assert trainer.state.status == "failed"


def test_an_error_reaches_every_rank(tmp_path):
    def task():
        saver = keeper(tmp_path, every_n_train_steps=2, save_last=True)
        with pytest.raises(OSError, match="No space left on device") as caught:
            quiet(max_steps=8, strategy="ddp", devices=2, plugins=Fails(4), callbacks=[saver]).fit(Scalar(), loader([1] * 16))
        return type(caught.value), saver.best_model_path

    assert run_ranks(task) == [(OSError, str(tmp_path / "step=2.ckpt"))] * 2
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt"]


def test_what_cannot_be_saved_is_told_at_once(tmp_path):
    class Wrong(Scalar):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = threading

    with pytest.raises(CheckpointError, match="mine: it is a builtins.module"):
        quiet(max_steps=3, callbacks=[keeper(tmp_path)]).fit(Wrong(), loader([1] * 3))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_ends_in_the_middle_waits_for_its_file(tmp_path, error):
    class Ending(Scalar):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                raise error
            return super().training_step(batch, batch_idx)

        def on_exception(self, exception):
            slow.ended.set()

    saver, slow = keeper(tmp_path), Slowly(3)
    with pytest.raises(error):
        quiet(max_steps=6, callbacks=[saver]).fit(Ending(), loader([1] * 6))
    assert os.listdir(tmp_path) == ["step=3.ckpt"] and read(saver.best_model_path)["global_step"] == 3
    slow.ended.clear()
    with pytest.raises(error), pytest.warns(UserWarning, match="being written when the run ended is not there: .*No space left"):
        quiet(max_steps=6, plugins=slow, callbacks=[keeper(tmp_path / "b")]).fit(Ending(), loader([1] * 6))
    assert os.listdir(tmp_path / "b") == ["step=2.ckpt"]


class Slowly(Fails):
    """Fails when the run has ended already."""

    def __init__(self, at):
        super().__init__(at)
        self.ended = threading.Event()

    def save_checkpoint(self, table, path):
        if table["global_step"] == self.at:
            assert self.ended.wait(60)
        super().save_checkpoint(table, path)


def test_a_process_killed_while_writing_leaves_the_former_file(tmp_path):
    whole = train(noisy_loader(), tmp_path / "whole")

    def killed():
        sync = os.fsync

        def die(descriptor):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if "step=3" in name:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(descriptor)

        os.fsync = die
        train(noisy_loader(), callbacks=[keeper(tmp_path / "checkpoints", save_last="link")], launcher=False)

    with pytest.raises(RankError, match="-9"):
        run_ranks(killed, world_size=1)
    left = sorted(os.listdir(tmp_path / "checkpoints"))
    assert left[-2:] == ["last.ckpt", "step=2.ckpt"] and len(left) == 4  # a part of step 3, and the claim on its name
    resumed = train(noisy_loader(), resume_from="auto", default_root_dir=tmp_path, callbacks=[keeper(tmp_path / "checkpoints", save_last="link")])
    assert_continues(resumed, whole, step=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["last.ckpt", "step=8.ckpt"]


# -- the plug-in and the copies ------------------------------------------------------------------------------------------------


def test_the_plugin_alone_waits_where_it_has_to(tmp_path):
    disk = SlowDisk()
    storage = AsyncCheckpointIO(disk)
    weight = torch.zeros(3)
    storage.save_checkpoint({"state_dict": {"w": weight}}, tmp_path / "a.ckpt")
    weight += 1
    disk.go.release()
    assert torch.equal(storage.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)["state_dict"]["w"], torch.zeros(3))
    again = pickle.loads(pickle.dumps(AsyncCheckpointIO()))
    again.save_checkpoint({"n": 1}, tmp_path / "b.ckpt")
    again.save_checkpoint({"n": 2}, tmp_path / "b.ckpt")
    again.wait()
    assert io.load(tmp_path / "b.ckpt") == {"n": 2}
    again.save_checkpoint({"n": 3}, tmp_path)
    for call in (lambda: again.save_checkpoint({"n": 4}, tmp_path / "b.ckpt"), again.wait):
        if call != again.wait:
            with pytest.raises(CheckpointError, match="it is a folder"):
                call()
        else:
            call()  # the error came up once
    assert io.load(tmp_path / "b.ckpt") == {"n": 2}


def test_a_save_after_fit_is_on_the_disk_on_return(tmp_path):
    trainer = quiet(max_steps=2, plugins=[AsyncCheckpointIO()])
    trainer.fit(Scalar(), loader([1, 1]))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert read(tmp_path / "a.ckpt")["global_step"] == 2


def test_copies_keep_what_is_shared_and_take_the_same_memory_again():
    base = torch.arange(12.0)
    state = {"whole": base, "view": base.view(3, 4)[:, 1:], "turned": base.view(3, 4).t(), "n": [1, (2.5, torch.tensor(3))], "tied": base,
             "sparse": torch.eye(3).to_sparse(), "empty": torch.empty(0), "nowhere": torch.empty(2, device="meta"),
             "counter": Counter("aab"), "ordered": OrderedDict(b=1, a=2)}  # fmt: skip
    snapshots = Snapshots()
    copy = snapshots.take(state)
    place = copy["whole"].data_ptr()
    assert copy["tied"].data_ptr() == place and copy["view"].untyped_storage().data_ptr() == place and copy["turned"].stride() == (1, 4)
    base.mul_(2)
    for name, value in (("view", [[1, 2, 3], [5, 6, 7], [9, 10, 11]]), ("whole", list(range(12)))):
        assert copy[name].tolist() == value
    assert copy["counter"] == Counter("aab") and list(copy["ordered"].items()) == [("b", 1), ("a", 2)]
    assert copy["n"] == [1, (2.5, torch.tensor(3))] and copy["sparse"].to_dense().equal(torch.eye(3)) and copy["nowhere"].is_meta
    again = snapshots.take(state)
    assert again["whole"].data_ptr() == place and again["whole"].tolist() == [2.0 * n for n in range(12)]
    base.resize_(20).zero_()
    assert snapshots.take({"whole": base})["whole"].tolist() == [0.0] * 20
