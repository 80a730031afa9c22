"""Every example runs on real input, small, and prints a result that says it worked."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401  (sets variables of the environment when it is first loaded)
import torch
from torchvision import datasets
from torchvision.models import resnet18

from tests.helpers.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run an example as a script, in a folder of its own; return the lines that it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *args: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / f"{name}.py"), *map(str, args)])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capfd.readouterr().out.strip().splitlines()

    return run


def number(line: str, before: str) -> float:
    """The number that follows `before`."""
    return float(re.search(re.escape(before) + r"\s*([\d.]+)", line)[1])


@pytest.mark.filterwarnings("ignore")
def test_gpt_learns_the_same_under_every_strategy(run, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"%d * %d = %d\n" % (a, b, a * b) for a in range(40) for b in range(40)))
    alone = number(run("gpt", "--steps", 12, "--text", text)[-1], "loss")
    assert alone < 3.5  # 5.5 at the beginning
    strategies = {"fsdp": 2, "model_parallel_ddp": 4, "pipeline": 2}  # on so many devices; each in two processes

    def task():
        found = {}
        for strategy, devices in strategies.items():
            sys.argv = ["gpt.py", "--steps", "12", "--text", str(text), "--strategy", strategy, "--devices", str(devices)]
            scope = runpy.run_path(str(EXAMPLES / "gpt.py"))
            found[strategy] = scope["train"](scope["arguments"]()).callback_metrics["loss"].item()
        return found

    assert run_ranks(task, 2) == [pytest.approx(dict.fromkeys(strategies, alone), abs=2e-4)] * 2


def test_gan_draws_what_looks_more_like_digits_than_nothing_does(run):
    line = run("gan", "--epochs", 4)[-1]
    assert number(line, "drawn digits:") < number(line, "black page:")


def test_cartpole_goes_through_its_replay_memory(run):
    assert number(run("cartpole", "--epochs", 2)[-1], "stands for") > 5  # 9 is what falling over takes; learning takes longer than a test


def test_shared_memory_trains_two_ranks_from_one_file(run):
    assert number(run("shared_memory", "--devices", 2, "--epochs", 2)[-1], "loss") < 1.6  # 2.3 at the beginning
    assert [path.name for path in Path().glob("digits*")] == ["digits.npy"]


def test_a_large_batch_takes_less_memory_in_parts_and_gives_the_same_loss(run):
    whole, parts, checkpointed = ((number(line, "loss"), number(line, "backward:")) for line in run("large_batch", "--steps", 2)[-3:])
    assert parts[0] == pytest.approx(whole[0], abs=1e-4) and checkpointed[0] == pytest.approx(whole[0], abs=1e-4)
    assert whole[1] > 4 * parts[1] > 16 * checkpointed[1]


def test_images_from_a_folder_with_weights_of_a_file(run, tmp_path):
    torch.save(resnet18().state_dict(), "weights.pth")
    line = run("images", "--weights", tmp_path / "weights.pth", "--batches", 2, "--batch-size", 16, "--workers", 0, "--strategy", "dp", "--devices", 2)[-1]
    assert line.startswith("dp on 2: val_acc") and number(line, "%,") > 0
    assert len(list(Path("digit_files").glob("*/*/*.png"))) == 1797


def test_images_from_cifar10(run, tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {"data": np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [0, 1, 2, 3]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)  # the sums are those of the real files
    assert "val_acc" in run("images", "--cifar10", tmp_path, "--batches", 1, "--epochs", 1, "--batch-size", 8, "--workers", 0)[-1]


def test_the_service_trains_and_stays_small(tmp_path):
    command = [sys.executable, str(EXAMPLES / "service.py"), "--port", "0", "--folder", str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path, env=environment) as server:
        try:
            address = server.stdout.readline().split()[-1]

            def ask(path: str, data: bytes | None = None) -> dict:
                with urllib.request.urlopen(address + path, data=data, timeout=120) as answer:
                    return json.load(answer)

            found = ask("/train?lr=0.01&epochs=2", b"")
            assert found["accuracy"] > 0.8 and Path(found["weights"]).is_file()
            assert ask("/memory")["megabytes"] < 100  # torch alone takes more
            with pytest.raises(urllib.error.HTTPError, match="500"):
                ask("/train?lr=fast", b"")
            assert ask("/memory")["megabytes"] < 100
        finally:
            server.kill()


def test_the_scripts_say_what_bash_understands():
    for name in ("torchrun.sh", "slurm.sh"):
        assert subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=False).returncode == 0
