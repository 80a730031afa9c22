"""`python -m trainer.checkpoint`: what is in a file is shown, and nothing of it is run."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
from collections import Counter

import numpy
import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import quiet
from tests.helpers.resume import Noisy, noisy_loader, train
from trainer.checkpoint import io
from trainer.checkpoint.__main__ import main

ROOT = pathlib.Path(__file__).resolve().parents[2]


def shown(capsys, *arguments, status=0):
    assert main(list(map(str, arguments))) == status
    out, err = capsys.readouterr()
    return out if status == 0 else out + err


def test_what_a_fit_saved(tmp_path, capsys):
    class Sized(Noisy):
        def __init__(self, width, names=("a", "b")):
            super().__init__()
            self.save_hyperparameters()

    train(noisy_loader(), module=Sized(width=3), callbacks=[ModelCheckpoint(tmp_path, "a", every_n_train_steps=3)], max_steps=3)
    lines = shown(capsys, "show", tmp_path / "a.ckpt").splitlines()
    assert lines[0] == str(tmp_path / "a.ckpt")
    facts = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:8]}
    size = f"{os.path.getsize(tmp_path / 'a.ckpt') / 1000:.1f} kB"
    assert facts == {"kind": "checkpoint, format 1", "checksum": "ok", "size": size, "global_step": "3", "epoch": "0", "seed": "11", "ranks": "1"}
    text = "\n".join(lines)
    assert "hyper-parameters\n  width: 3\n  names: ['a', 'b']\n" in text
    assert "weights: 9 tensors, 74 numbers, 300 B" in text  # 24 + 5 * 8 + 8 + 1 of four bytes, 1 of eight
    assert "  layers.0.weight               8x3     float32  96 B\n" in text
    assert "  layers.1.num_batches_tracked  number  int64     8 B\n" in text
    assert "optimizer 0: 18 tensors, 120 numbers, 480 B; lr 0.025" in text  # two moments of 57, and 6 counters
    assert "ModelCheckpoint{" in text and "  data: {samples: 12}" in text


def test_weights_only_damage_and_what_is_no_checkpoint(tmp_path, capsys):
    trainer = quiet(max_steps=1)
    trainer.fit(Noisy(), noisy_loader())
    trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    assert "weights only (cannot be resumed from)" in shown(capsys, "show", tmp_path / "w.ckpt")
    content = bytearray((tmp_path / "w.ckpt").read_bytes())
    content[1000] ^= 1
    (tmp_path / "w.ckpt").write_bytes(content)
    assert "checksum    DAMAGED: its checksum is another than when it was written" in shown(capsys, "show", tmp_path / "w.ckpt", status=1)
    assert "There is no" in shown(capsys, "show", tmp_path / "none.ckpt", status=1)
    assert "DAMAGED: it is a folder without a file table.ckpt" in shown(capsys, "show", tmp_path, status=1)
    (tmp_path / "text").write_text("hello, this is no checkpoint")
    assert "no file written by torch.save" in shown(capsys, "show", tmp_path / "text", status=1)
    torch.save([1, 2], tmp_path / "list.pt")
    assert "it holds a list" in shown(capsys, "show", tmp_path / "list.pt", status=1)


class Evil:
    def __init__(self, folder, how):
        self.folder, self.how = folder, how

    def __reduce__(self):
        if self.how == "call":
            return os.mkdir, (self.folder,)
        return eval, (f"__import__('os').mkdir({self.folder!r})",)


@pytest.mark.parametrize("how", ["call", "eval"])
def test_nothing_in_a_file_is_run(tmp_path, capsys, how):
    torch.save({"state_dict": {"w": torch.ones(2, 3)}, "hyper_parameters": {"bad": Evil(str(tmp_path / "ran"), how)}}, tmp_path / "a.ckpt")
    text = shown(capsys, "show", tmp_path / "a.ckpt")
    assert not (tmp_path / "ran").exists()
    assert "bad: <posix.mkdir>" in text or "bad: <__builtin__.eval>" in text
    assert "  w  2x3  float32  24 B" in text and "none: another program wrote the file" in text
    torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


def test_objects_of_every_kind_are_told_by_name(tmp_path, capsys):
    shared = torch.zeros(4, dtype=torch.bfloat16)
    table = {
        "pytorch-lightning_version": "2.5.0", "global_step": 7, "epoch": 1,
        "state_dict": {"p": torch.nn.Parameter(torch.ones(3)), "half": shared, "view": shared[1:], "small": torch.ones(2, dtype=torch.float8_e4m3fn),
                       "z": torch.ones(1, dtype=torch.complex64), "u": torch.ones(2, dtype=torch.uint16), "far": torch.empty(5, 6, device="meta")},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}],
        "hyper_parameters": argparse.Namespace(lr=1), "odd": {"path": pathlib.Path("x"), "array": numpy.ones(3), "counter": Counter("ab"), "b": b"\xff\x00",
                                                               "dtype": torch.int8, "device": torch.device("cpu"), "set": {1}, "size": torch.Size([2])},
        "steer\x1b[2J": "the\x1b[31m terminal",
    }  # fmt: skip
    torch.save(table, tmp_path / "a.ckpt")
    text = shown(capsys, "show", tmp_path / "a.ckpt")
    table = " ".join(text.split())
    for part in (
        "kind checkpoint by Lightning 2.5.0", "p 3 float32 12 B", "view 3 bfloat16 6 B", "small 2 float8_e4m3fn 2 B", "u 2 uint16 4 B",
        "z 1 complex64 8 B", "far 5x6 float32 120 B", "optimizer 0: 1 tensors, 3 numbers, 12 B; lr 0.1, 0.2",
        "hyper-parameters <argparse.Namespace>", "odd: {path: <pathlib.PosixPath>", "steer?[2J",
    ):  # fmt: skip
        assert part in table, part
    assert "\x1b" not in text


def test_the_command(tmp_path, capsys):
    io.save({"state_dict": {"w": torch.ones(2)}, "format": 1}, tmp_path / "a.ckpt")
    command = [sys.executable, "-m", "trainer.checkpoint", "show", "a.ckpt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and "w  2  float32  8 B" in done.stdout
    message = f"{tmp_path}/a.ckpt is no sharded checkpoint: it is a file already.\n"
    assert shown(capsys, "consolidate", tmp_path / "a.ckpt", tmp_path / "b.ckpt", status=1) == message
    assert "damaged: it is a folder without a file table.ckpt" in shown(capsys, "consolidate", tmp_path, tmp_path / "b.ckpt", status=1)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_value_that_holds_itself_or_is_endless_is_cut_short(tmp_path, capsys):
    ring, deep, wide = {"w": torch.ones(2)}, [], [torch.ones(1)]
    ring["self"] = ring
    for _ in range(150):
        deep = [deep]
    for _ in range(30):
        wide = [wide] * 10
    torch.save({"state_dict": ring, "deep": deep, "wide": wide, "optimizer_states": [{"state": wide}]}, tmp_path / "a.ckpt")
    text = shown(capsys, "show", tmp_path / "a.ckpt")
    assert "weights: 1 tensors, 2 numbers" in text and "optimizer 0: 1 tensors, 1 numbers" in text and "deep: [[[" in text
