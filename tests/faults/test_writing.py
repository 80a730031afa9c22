"""Places that cannot be written: the error names the path, former files stay, training could go on. And two runs in one folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import time

import pytest
import torch

from callbacks import Callback, ModelCheckpoint, checkpoint_files
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, assert_continues, noisy_loader, train
from trainer.checkpoint import io, temporary
from trainer.errors import CheckpointError, MisconfigurationException

CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


@contextlib.contextmanager
def full_disk(room=4000):
    """No file can grow beyond `room` bytes: what the system says is another word for a full disk, and comes from the same call."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Fill(Callback):
    """Fills the disk ahead of a step; `fit` of the test frees it."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.finish_saves()
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("later", [False, True], ids=["now", "async_save"])
def test_c06_a_disk_that_fills_up_ends_the_run_and_loses_nothing_that_was_there(tmp_path, later):
    whole = train(noisy_loader(), tmp_path / "whole")
    keeper = ModelCheckpoint(tmp_path / "a", "{step}", every_n_train_steps=1, save_top_k=1, async_save=later, save_last="link")
    with full_disk(10**9), pytest.raises(CheckpointError, match=r"a/step=4\.ckpt: File too large"):
        train(noisy_loader(), callbacks=[keeper, Fill(3)])
    assert sorted(os.listdir(tmp_path / "a")) == ["last.ckpt", "step=3.ckpt"]  # the newest whole one, although top 1 wanted another
    assert keeper.best_model_path == os.path.realpath(keeper.last_model_path) == str(tmp_path / "a" / "step=3.ckpt")
    assert_continues(train(noisy_loader(), resume_from=keeper.last_model_path), whole, step=3)


def test_c06_a_program_that_catches_the_error_trains_on_as_if_nothing_had_been(tmp_path):
    class Trying(Callback):
        errors = ()

        def on_train_epoch_start(self, trainer, module):
            with full_disk():
                for path in (tmp_path / "a.ckpt", tmp_path, tmp_path / "file" / "a.ckpt", "/proc/nowhere/a.ckpt"):
                    with pytest.raises(CheckpointError) as caught:
                        trainer.save_checkpoint(path)
                    self.errors = (*self.errors, str(caught.value))

    (tmp_path / "file").write_text("")
    trying = Trying()
    assert_continues(train(noisy_loader(), callbacks=[trying]), train(noisy_loader()), step=0)
    start = "Could not save the checkpoint to "
    assert list(trying.errors[:4]) == [
        f"{start}{tmp_path}/a.ckpt: File too large.",
        f"{start}{tmp_path}: it is a folder. Give the name of a file.",
        f"{start}{tmp_path}/file/a.ckpt: Not a directory.",
        f"{start}/proc/nowhere/a.ckpt: No such file or directory.",
    ]
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_taken_away_and_a_name_taken_by_a_folder(tmp_path):
    class Spoil(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2 and self.how == "file":
                (tmp_path / "a").rename(tmp_path / "kept")
                (tmp_path / "a").write_text("")
            elif trainer.global_step == 2:
                (tmp_path / "a" / "last.ckpt").unlink()
                (tmp_path / "a" / "last.ckpt").mkdir()

    for how, message in (("file", r"a/step=3\.ckpt: Not a directory"), ("folder", r"a/last\.ckpt: it is a folder")):
        spoil = Spoil()
        spoil.how = how
        keeper = ModelCheckpoint(tmp_path / "a", "{step}", every_n_train_steps=1, save_last=True)
        with pytest.raises(CheckpointError, match=message):
            train(noisy_loader(), callbacks=[keeper, spoil])
        assert keeper.best_model_path.endswith("step=2.ckpt" if how == "file" else "step=3.ckpt")
        if how == "file":
            assert sorted(os.listdir(tmp_path / "kept")) == ["last.ckpt", "step=2.ckpt"]
            (tmp_path / "a").unlink()


def mount(libc, flags, source, target):
    if libc.mount(source, os.fsencode(target), None, flags, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))


def test_a_folder_that_becomes_read_only(tmp_path):
    def alone():
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS) != 0:
            return None
        try:
            mount(libc, MS_REC | MS_PRIVATE, None, "/")  # what follows goes with this process, and nobody else sees it
            mount(libc, MS_BIND, os.fsencode(tmp_path), tmp_path)
        except OSError:
            return None
        close = Callback()
        close.on_train_batch_start = lambda trainer, *_: trainer.global_step != 2 or mount(libc, MS_BIND | MS_REMOUNT | MS_RDONLY, None, tmp_path)
        module, told = Scalar(), []
        for keeper, error in ((EveryStep(tmp_path), CheckpointError), (ModelCheckpoint(tmp_path), MisconfigurationException)):
            with pytest.raises(error) as caught:
                quiet(max_steps=4, callbacks=[keeper, close], launcher=False).fit(module, loader([1] * 4))
            told.append(str(caught.value))
        return told, sorted(os.listdir(tmp_path)), module.w.item()

    found = run_ranks(alone, world_size=1)[0]
    if found is None:
        pytest.skip("this machine does not let us mount a folder read-only")
    assert found == (
        [
            f"Could not save the checkpoint to {tmp_path}/step=3.ckpt: Read-only file system.",
            f"ModelCheckpoint(dirpath='{tmp_path}'): cannot write there: '{tmp_path}': Read-only file system",
        ],
        ["step=1.ckpt", "step=2.ckpt"],
        -3.0,
    )


# -- what others left, and what others do ----------------------------------------------------------------------------------


def test_leftovers_of_killed_writers_go_and_those_of_live_ones_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    def left_by(pid, name, named=temporary.temporary_name):
        return tmp_path / named(name).replace(f".{os.getpid()}.", f".{pid}.")

    gone, alive = left_by(dead.pid, "step=1.ckpt"), left_by(os.getppid(), "step=1.ckpt")
    for file in (gone, alive):
        file.write_bytes(b"PK")
    left_by(dead.pid, "step=0.ckpt", checkpoint_files._temporary).mkdir()  # it was removing a sharded one
    for name in (".step=2.ckpt.claim", ".step=9.ckpt.claim"):
        (tmp_path / name).symlink_to(f"{dead.pid}@{os.uname().nodename}")
    other = tmp_path / ".step=3.ckpt.claim"
    other.symlink_to(f"{os.getppid()}@{os.uname().nodename}")
    quiet(max_steps=3, callbacks=[EveryStep(tmp_path)]).fit(Scalar(), loader([1] * 3))
    assert sorted(os.listdir(tmp_path)) == sorted([alive.name, other.name, "step=1.ckpt", "step=2.ckpt", "step=3-v1.ckpt"])


def test_c09_two_runs_that_save_into_one_folder_at_once_overwrite_nothing(tmp_path):
    def alone():
        me = int(os.environ["RANK"])  # two processes, which are nothing to each other
        (tmp_path / f"ready{me}").touch()
        while not (tmp_path / f"ready{1 - me}").exists():
            time.sleep(0.005)
        keeper = ModelCheckpoint(tmp_path / "a", "m", every_n_train_steps=1, save_top_k=-1, save_last=True)
        quiet(max_steps=12, callbacks=[keeper], launcher=False).fit(Scalar(), loader([me + 1.0] * 12))

    run_ranks(alone)
    names = sorted(os.listdir(tmp_path / "a"))
    assert len(names) == 25 and "last.ckpt" in names and "m-v23.ckpt" in names
    found = sorted(torch.load(tmp_path / "a" / name, weights_only=True)["state_dict"]["w"].item() for name in names if name != "last.ckpt")
    assert found == sorted([-1.0 * n for n in range(1, 13)] + [-2.0 * n for n in range(1, 13)])
    assert io.load(tmp_path / "a" / "last.ckpt")["global_step"] == 12


def test_resuming_into_another_folder_leaves_the_old_one_as_it_was(tmp_path):
    def keeper(folder):
        return ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=2, save_top_k=1, save_last="link")

    train(noisy_loader(), callbacks=[keeper("old")], max_steps=4)
    before = {path.name: (path.lstat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "old").iterdir()}
    train(noisy_loader(), callbacks=[keeper("new")], resume_from=tmp_path / "old" / "last.ckpt")
    assert {path.name: (path.lstat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "old").iterdir()} == before
    assert sorted(before) == ["last.ckpt", "step=4.ckpt"]
    assert sorted(os.listdir(tmp_path / "new")) == ["last.ckpt", "step=8.ckpt"]
