"""Damaged checkpoint files: every changed byte is noticed, "auto" and "last" pass such a file over, an explicit path is refused."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.resume import assert_continues, noisy_loader, train
from trainer.checkpoint import checksum, files, io
from trainer.errors import CheckpointError


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "a.ckpt"
    io.save({"state_dict": {"w": torch.randn(300)}, "n": 3, "text": "abc"}, path)
    return path


def is_refused(path, weights_only=True):
    with pytest.raises(CheckpointError, match=r"a\.ckpt: it is damaged") as caught:
        io.load(path, weights_only=weights_only)
    return str(caught.value)


@contextlib.contextmanager
def changed(path, place, bits):
    """Flip `bits` of the byte at `place`, and back again."""
    descriptor = os.open(path, os.O_RDWR)
    byte = os.pread(descriptor, 1, place)
    try:
        os.pwrite(descriptor, bytes([byte[0] ^ bits]), place)
        yield
    finally:
        os.pwrite(descriptor, byte, place)
        os.close(descriptor)


def test_a_changed_byte_is_noticed_wherever_it_is(saved):
    size = os.path.getsize(saved)
    assert files.damage(saved) is None
    for place in range(size):
        with changed(saved, place, bits=(0x01, 0x80, 0xFF)[place % 3]):
            assert files.damage(saved) is not None, place
            if place % 97 == 0 or place > size - 30:
                is_refused(saved, weights_only=bool(place % 2))
    assert io.load(saved)["n"] == 3


def test_a_cut_an_empty_one_and_zeros_are_noticed(saved):
    whole = saved.read_bytes()
    wrong = [whole[:n] for n in range(0, len(whole), 7)]  # a disk that was full, under a program that did not look
    wrong += [whole[:-1], whole + b"\0", whole[:200] + whole[264:], bytes(len(whole))]
    wrong += [whole[:512] + bytes(512) + whole[1024:], whole[:-512] + bytes(512)]  # blocks that never reached the disk
    for content in wrong:
        saved.write_bytes(content)
        assert files.damage(saved) is not None, len(content)
        is_refused(saved)


def test_damage_is_found_in_random_places_of_a_file_of_some_megabytes(saved):
    io.save({"state_dict": {"w": torch.randn(500_000)}}, saved)
    generator = random.Random(0)
    for _ in range(20):
        with changed(saved, generator.randrange(os.path.getsize(saved)), bits=1 << generator.randrange(8)):
            is_refused(saved)
    assert files.damage(saved) is None


def test_a_damaged_file_is_not_run_although_it_is_trusted(saved, tmp_path):
    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    writer = checksum.ChecksumWriter
    with open(saved, "wb") as file:
        out = writer(file)
        torch.save({"a": Touch()}, out)
        out.seal()
    whole = saved.read_bytes()
    saved.write_bytes(whole.replace(b"checksum crc32", b"checksum crc33"))
    is_refused(saved, weights_only=False)
    assert not (tmp_path / "ran").exists()
    saved.write_bytes(whole)
    io.load(saved, weights_only=False)
    assert (tmp_path / "ran").exists()


def test_files_with_and_without_checksum_are_read_by_torch_and_by_us(saved, tmp_path):
    assert torch.load(saved, weights_only=True)["n"] == torch.load(saved, weights_only=True, mmap=True)["n"] == 3
    torch.save({"n": 4}, tmp_path / "theirs.ckpt")
    torch.save({"n": 5}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert not checksum.has_checksum(tmp_path / "theirs.ckpt") and checksum.has_checksum(saved)
    for name, n in (("theirs", 4), ("old", 5)):
        assert files.damage(tmp_path / f"{name}.ckpt") is None
        assert io.load(tmp_path / f"{name}.ckpt")["n"] == n


# -- what a run does with them ---------------------------------------------------------------------------------------------


def flip(path):
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 4
    Path(path).write_bytes(content)


@pytest.mark.parametrize("wanted", ["last", "auto"])
def test_the_newest_whole_file_is_taken_and_the_others_are_told(tmp_path, wanted):
    whole = train(noisy_loader(), tmp_path / "all")
    train(noisy_loader(), tmp_path / "checkpoints", max_steps=5)
    folder = tmp_path / "checkpoints"
    flip(folder / "step=5.ckpt")
    (folder / "step=4.ckpt").write_bytes(b"")
    for step, path in enumerate(sorted(folder.iterdir()), 1):
        os.utime(path, (step, step))
    with pytest.warns(UserWarning) as told:
        resumed = train(noisy_loader(), resume_from=wanted, default_root_dir=tmp_path)
    assert_continues(resumed, whole, step=3)
    lines = [str(line.message) for line in told if "is damaged" in str(line.message)]
    assert len(lines) == 2 and "step=5.ckpt is damaged: its checksum" in lines[0] and "step=4.ckpt is damaged: it is empty" in lines[1]
    assert all(line.endswith(f"Going on from {folder}/step=3.ckpt.") for line in lines)


def test_an_explicit_path_is_refused_before_a_step_is_taken(tmp_path):
    train(noisy_loader(), tmp_path, max_steps=2)
    flip(tmp_path / "step=2.ckpt")
    module = Scalar()
    for trainer_call in ("fit", "load"):
        with pytest.raises(CheckpointError, match=r"step=2\.ckpt: it is damaged: its checksum"):
            if trainer_call == "fit":
                quiet(max_steps=3).fit(module, loader([1]), ckpt_path=tmp_path / "step=2.ckpt")
            else:
                Scalar.load_from_checkpoint(tmp_path / "step=2.ckpt")
    assert module.w.item() == 0


def test_where_nothing_is_whole_a_run_is_not_started_afresh(tmp_path):
    keeper = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    quiet(max_steps=2, callbacks=[keeper]).fit(Scalar(), loader([1, 1]))
    for path in (tmp_path / "checkpoints").iterdir():
        flip(path)
    for wanted in ("last", "auto"):
        with pytest.raises(CheckpointError, match=r"No checkpoint is whole\. .*last\.ckpt is damaged.*Remove them to start afresh"):
            quiet(max_steps=3, default_root_dir=tmp_path).fit(Scalar(), loader([1]), ckpt_path=wanted)


def test_a_plugin_that_does_not_know_damage_is_trusted(tmp_path):
    class Text:
        def save_checkpoint(self, table, path):
            raise NotImplementedError

        def load_checkpoint(self, path, weights_only):
            return {"state_dict": {"w": torch.tensor(float(Path(path).read_text()))}, "global_step": 0, "epoch": 0}

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "a.ckpt").write_text("7.5")
    module = Validated()
    quiet(plugins=Text(), default_root_dir=tmp_path).validate(module, loader([1]), ckpt_path="last", verbose=False)
    assert module.w.item() == 7.5


class Validated(Scalar):
    def validation_step(self, batch, batch_idx):
        self.log("w", self.w)
