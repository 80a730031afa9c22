"""`trainer.devices`: what a user may ask for, and the errors for what does not exist."""

from __future__ import annotations

import pytest
import torch

from trainer import devices
from trainer.devices import Devices, resolve
from trainer.errors import MisconfigurationException


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has so many devices of each type."""

    def pretend(**counts):
        monkeypatch.setattr(devices, "_count", lambda kind: counts.get(kind, 0))

    pretend()
    return pretend


@pytest.mark.parametrize(
    ("accelerator", "wanted", "indices"),
    [
        ("auto", "auto", (0,)),
        ("cpu", "auto", (0,)),
        ("cpu", 1, (0,)),
        ("cpu", 3, (0, 1, 2)),
        ("cpu", "2", (0, 1)),
        ("cpu", [0, 1], (0, 1)),
        (torch.device("cpu"), 2, (0, 1)),
    ],
)
def test_cpu(machine, accelerator, wanted, indices):
    found = resolve(accelerator, wanted)
    assert found == Devices("cpu", indices)
    assert found.count == len(indices)
    assert found.device(found.count - 1) == torch.device("cpu")


@pytest.mark.parametrize(
    ("accelerator", "wanted", "indices"),
    [
        ("auto", "auto", (0, 1, 2, 3)),
        ("gpu", -1, (0, 1, 2, 3)),
        ("cuda", "-1", (0, 1, 2, 3)),
        ("gpu", 2, (0, 1)),
        ("gpu", "2", (0, 1)),
        ("cuda", [3, 1], (3, 1)),
        ("cuda", (2,), (2,)),
        ("cuda", "0,2", (0, 2)),
        ("cuda", "1,", (1,)),
        (torch.device("cuda", 2), "auto", (2,)),
        (torch.device("cuda"), "auto", (0, 1, 2, 3)),
    ],
)
def test_cuda(machine, accelerator, wanted, indices):
    machine(cuda=4)
    found = resolve(accelerator, wanted)
    assert found == Devices("cuda", indices)
    assert [found.device(rank) for rank in range(found.count)] == [torch.device("cuda", index) for index in indices]


def test_mps(machine):
    machine(mps=1)
    assert resolve("auto") == resolve("gpu", 1) == resolve("mps", [0]) == Devices("mps", (0,))
    assert resolve("mps").device(0) == torch.device("mps", 0)
    assert resolve("cpu") == Devices("cpu", (0,))


def test_a_finished_value_passes():
    value = Devices("cuda", (7,))
    assert resolve(value) is value


@pytest.mark.parametrize(
    ("accelerator", "wanted", "message"),
    [
        ("gqu", "auto", "unknown accelerator 'gqu'.* Did you mean 'gpu'"),
        (None, "auto", "unknown accelerator None"),
        ("mps", "auto", "'mps' was asked for, but torch sees only cuda and cpu"),
        ("cuda", 3, "this machine has 2 cuda"),
        ("cuda", [0, 2], r"no cuda device 2; this machine has 2 \(0..1\)"),
        ("cuda", "0,0", "cuda device 0 twice"),
        ("cuda", 0, "at least 1 cuda device"),
        ("cuda", -2, "devices=-2: ask for at least 1"),
        ("cuda", [0, -1], "index -1 is negative"),
        ("cuda", [], "names no cuda device"),
        ("cuda", ",", "names no cuda device"),
        ("cuda", True, "devices=True is not understood"),
        ("cuda", [True], "is not understood"),
        ("cuda", 1.5, "devices=1.5 is not understood"),
        ("cuda", "all", "devices='all' is not understood"),
        ("cuda", None, "devices=None is not understood"),
        ("cpu", 0, "number of processes; it must be at least 1"),
        ("cpu", -1, "number of processes; it must be at least 1"),
        ("cpu", [], "names no cpu device"),
        ("cpu", [0, 0], "cpu device 0 twice"),
    ],
)
def test_what_cannot_be(machine, accelerator, wanted, message):
    machine(cuda=2)
    with pytest.raises(MisconfigurationException, match=message):
        resolve(accelerator, wanted)


@pytest.mark.parametrize("name", ["gpu", "cuda", "mps"])
def test_no_accelerator_on_this_machine(machine, name):
    with pytest.raises(MisconfigurationException, match=f"accelerator='{name}' was asked for, but torch sees only cpu"):
        resolve(name)


@pytest.mark.parametrize("local_rank", [2, -1])
def test_more_processes_than_devices(local_rank):
    with pytest.raises(MisconfigurationException, match=r"has no device: 2 cuda device\(s\)"):
        Devices("cuda", (0, 1)).device(local_rank)


def test_counts_come_from_torch():
    assert devices._count("cuda") == torch.cuda.device_count()
    assert devices._count("mps") == int(torch.backends.mps.is_available())
