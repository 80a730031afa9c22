"""Sharded checkpoints: every rank writes its parts, a folder is whole or not there, and any strategy loads it."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import warnings

import pytest
import torch

from callbacks import Callback, ModelCheckpoint
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.resume import EveryStep, assert_equal
from trainer import AsyncCheckpointIO, FSDPStrategy
from trainer.checkpoint import checksum, files, io
from trainer.checkpoint.__main__ import main
from trainer.errors import CheckpointError, MisconfigurationException


class Adam(Net):
    """With a buffer, and a bias too small for every rank to have a part of."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, amsgrad=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}}


def fsdp(kind="sharded", **more):
    return {"strategy": FSDPStrategy(state_dict_type=kind, **more), "devices": 2}


def train(where, folder=None, resume=None, **settings):
    """Six steps, three an epoch, each over the same 4 samples wherever it runs; return the weights."""
    module = Adam().double()
    settings = {"max_epochs": 2, "seed": 4, "callbacks": [EveryStep(folder)] if folder else [], **where, **settings}
    quiet(**settings).fit(module, loader(Net.rows(12, torch.float64), 4 // settings.get("devices", 1), shuffle=True), ckpt_path=resume)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_close(found, right):
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of six steps, written whole ("full"), in parts, and in parts by a hybrid that has each part twice."""
    folder = tmp_path_factory.mktemp("saved")

    def task():
        return [train(where, folder / name) for name, where in {"full": fsdp("full"), "parts": fsdp(), "hybrid": fsdp(shard_size=1)}.items()]

    before = os.getcwd()
    os.chdir(folder)
    run_ranks(task)
    os.chdir(before)
    return folder


def test_it_loads_on_the_same_and_other_ranks_under_every_strategy(saved):
    def two():
        return [
            train(fsdp(), resume=saved / "parts" / "step=2.ckpt"), train(fsdp("full"), resume=saved / "hybrid" / "step=3.ckpt"),
            train({"strategy": "ddp", "devices": 2}, resume=saved / "parts" / "step=5.ckpt"),
            train(fsdp(), resume=saved / "full" / "step=2.ckpt"),
        ]  # fmt: skip

    right = train({})
    for found in run_ranks(two)[1]:
        assert_close(found, right)
    for found in run_ranks(lambda: train({**fsdp(), "devices": 4}, resume=saved / "parts" / "step=4.ckpt"), world_size=4):
        assert_close(found, right)
    assert_close(train({}, resume=saved / "hybrid" / "step=2.ckpt"), right)
    alone = Adam.load_from_checkpoint(saved / "parts" / "step=6.ckpt")
    assert torch.allclose(alone.layers[0].weight, right["layers.0.weight"].float(), rtol=0, atol=1e-7)


def test_a_folder_holds_what_the_file_of_the_same_run_holds(saved, tmp_path, capsys):
    right = torch.load(saved / "full" / "step=4.ckpt", weights_only=True)
    for name in ("parts", "hybrid"):
        path = saved / name / "step=4.ckpt"
        assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "table.ckpt"] or name == "hybrid"
        assert main(["consolidate", str(path), str(tmp_path / "one.ckpt")]) == 0
        found = torch.load(tmp_path / "one.ckpt", weights_only=True)
        for table in (found, right):
            table["callbacks"] = None
        assert_equal(found, right)
        assert list(found["state_dict"]) == list(right["state_dict"])
        whole = sum(file.stat().st_size for file in path.glob("__*"))
        assert whole < 2 * (saved / "full" / "step=4.ckpt").stat().st_size
    assert "Wrote" in capsys.readouterr().out


def test_a_damaged_part_is_named_and_passed_over(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved / "parts", folder)
    flip(folder / "step=6.ckpt" / "__1_0.distcp")
    os.remove(folder / "step=5.ckpt" / "__0_0.distcp")
    flip(folder / "step=4.ckpt" / ".metadata")
    flip(folder / "step=3.ckpt" / "table.ckpt")
    os.remove(folder / "step=2.ckpt" / "table.ckpt")
    for step in range(1, 7):
        os.utime(folder / f"step={step}.ckpt", (step, step))
    reasons = {
        6: "__1_0.distcp: its checksum", 5: "__0_0.distcp is missing", 4: r"\.metadata: its checksum", 3: "table.ckpt: its checksum",
        2: "without a file",
    }  # fmt: skip
    for step, reason in reasons.items():
        with pytest.raises(CheckpointError, match=rf"step={step}\.ckpt: it is damaged: .*{reason}"):
            train({}, resume=folder / f"step={step}.ckpt")
    with pytest.warns(UserWarning, match=r"step=2\.ckpt is damaged.*Going on from .*step=1\.ckpt"):
        assert_close(train({}, resume="last", default_root_dir=tmp_path), train({}))


def test_an_index_with_more_than_an_index_in_it_is_not_run(saved, tmp_path):
    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "a.ckpt"
    shutil.copytree(saved / "parts" / "step=1.ckpt", path)
    (path / ".metadata").write_bytes(pickle.dumps(Touch()))
    table = io.load(path / "table.ckpt")
    table["parts"][".metadata"] = checksum.of_file(path / ".metadata")
    io.save(table, path / "table.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt: UnpicklingError: the index names posix\.mkdir"):
        files.load(path)
    assert not (tmp_path / "ran").exists()


# -- whole or not there ----------------------------------------------------------------------------------------------------------


def test_rotation_links_and_overwriting(tmp_path):
    class Again(Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "same.ckpt")
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    def task():
        link = ModelCheckpoint(tmp_path / "link", "{step}", every_n_train_steps=1, save_last="link")
        copy = ModelCheckpoint(tmp_path / "copy", "{step}", every_n_train_steps=2, save_last=True, async_save=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(fsdp(), callbacks=[Again(), link, copy])
        return link.best_model_path, [str(t.message) for t in told if "not written in the background" in str(t.message)]

    (best, told), (_, silent) = run_ranks(task)
    assert best == str(tmp_path / "link" / "step=6.ckpt") and len(told) == 1 and not silent
    assert sorted(os.listdir(tmp_path / "link")) == ["last.ckpt", "step=6.ckpt"] and os.readlink(tmp_path / "link" / "last.ckpt") == "step=6.ckpt"
    assert sorted(os.listdir(tmp_path / "copy")) == ["last.ckpt", "step=6.ckpt"]
    assert sorted(os.listdir(tmp_path)) == ["copy", "link", "same.ckpt", "weights.ckpt"]
    steps = {name: files.load(tmp_path / name)["global_step"] for name in ("same.ckpt", "link/last.ckpt", "copy/last.ckpt")}
    assert steps == {"same.ckpt": 3, "link/last.ckpt": 6, "copy/last.ckpt": 6}
    assert "optimizer_states" not in (weights := files.load(tmp_path / "weights.ckpt")) and len(weights["state_dict"]) == 5


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_nothing_is_left(tmp_path):
    class Fill(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2 and trainer.global_rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def task():
        with pytest.raises(CheckpointError, match=r"step=3\.ckpt: File too large\."):
            train(fsdp(), tmp_path, callbacks=[Fill(), EveryStep(tmp_path)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)

    run_ranks(task)
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt"]
    assert [files.damage(tmp_path / name) for name in os.listdir(tmp_path)] == [None, None]


def test_a_rank_killed_while_writing_leaves_no_folder_of_that_name(tmp_path):
    folder = tmp_path / "checkpoints"

    def killed():
        sync = os.fsync

        def die(descriptor):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if "step=3" in name and "__1_0" in name:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(descriptor)

        os.fsync = die
        train(fsdp(), folder)

    with pytest.raises((RankError, CheckpointError, RuntimeError)):
        run_ranks(killed)
    shown = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    assert shown == ["step=1.ckpt", "step=2.ckpt"]
    assert_close(train({}, folder, resume="auto", default_root_dir=tmp_path), train({}))
    assert sorted(os.listdir(folder)) == [f"step={n}.ckpt" for n in range(1, 7)]  # what it had left is gone


def test_on_one_device_and_with_other_plugins(tmp_path):
    class Theirs:
        def save_checkpoint(self, table, path):
            """Nothing."""

        def load_checkpoint(self, path, weights_only):
            """Nothing."""

    with pytest.raises(MisconfigurationException, match="Theirs writes whole checkpoints.*save_sharded"):
        quiet(**fsdp(), plugins=[AsyncCheckpointIO(Theirs())])
    with pytest.raises(MisconfigurationException, match="state_dict_type='parts'"):
        FSDPStrategy(state_dict_type="parts")
    quiet(strategy=FSDPStrategy(state_dict_type="sharded"), devices=1, max_steps=1, callbacks=[EveryStep(tmp_path)]).fit(Scalar(), loader([1]))
    assert torch.load(tmp_path / "step=1.ckpt", weights_only=True)["global_step"] == 1  # nothing is sharded: a file
