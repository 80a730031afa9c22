"""`trainer.devices`: what a user may ask for, and the errors for what does not exist."""

from __future__ import annotations

import pytest
import torch

from trainer import Trainer
from trainer.accelerators import BUILT_IN, Accelerator
from trainer.devices import Devices, resolve
from trainer.errors import MisconfigurationException


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has so many devices of each type."""

    def pretend(**counts):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: counts.get("cuda", 0))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(counts.get("mps", 0)))

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


# -- GPUs that others use ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(machine, monkeypatch, tmp_path):
    """Pretend that the machine has GPUs with so much use, (MiB, percent), as a program nvidia-smi on the PATH tells; note its calls."""

    def pretend(*use, models=None, visible=None, **environment):
        machine(cuda=len(use) if visible is None else len(visible.split(",")))
        models = models or ["NVIDIA H200"] * len(use)
        rows = "".join(f"GPU-{i}{i}{i}-abc, {model}, {mib}, {busy}\n" for i, (model, (mib, busy)) in enumerate(zip(models, use)))
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\ncat <<'END'\n{rows}END\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"CUDA_VISIBLE_DEVICES": visible, **environment}.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    pretend.calls = tmp_path / "calls"
    return pretend


def chosen(wanted):
    found = resolve("cuda", wanted, idle_first=True)
    return found.indices, found.note


def test_auto_takes_idle_gpus_and_says_which(gpus):
    gpus((3, 0), (40321, 97), (700, 9), (200, 55))
    said = "devices='auto' takes cuda device(s) 0, 2; others use 1, 3 (40321 MiB, 97 % busy; 200 MiB, 55 % busy)."
    assert chosen("auto") == ((0, 2), said)
    assert gpus.calls.read_text() == "--query-gpu=uuid,name,memory.used,utilization.gpu --format=csv,noheader,nounits\n"
    assert resolve("cuda", "auto").indices == (0, 1, 2, 3)  # a rank, or a caller that does not want it


def test_a_trainer_takes_the_idle_one_and_says_so(gpus, capsys):
    gpus((9000, 90), (3, 0))
    assert Trainer(accelerator="gpu", devices=1, logger=False).device_ids == [1]
    assert capsys.readouterr().out == "devices=1 takes cuda device(s) 1; others use 0 (9000 MiB, 90 % busy).\n"


def test_a_number_takes_idle_gpus_first(gpus):
    gpus((9000, 50), (3, 0), (5000, 0), (3, 0))
    assert chosen(1) == ((1,), "devices=1 takes cuda device(s) 1; others use 0 (9000 MiB, 50 % busy).")
    assert chosen("2")[0] == (1, 3)
    with pytest.warns(UserWarning, match=r"devices=3: others use cuda device\(s\) 2 \(5000 MiB, 0 % busy\)"):
        assert chosen(3)[0] == (1, 2, 3)


def test_nothing_is_said_where_nothing_is_left_out(gpus):
    gpus((3, 0), (3, 0), (9000, 90))
    assert chosen(2) == ((0, 1), "")
    gpus((3, 0), (3, 0))
    assert chosen("auto") == ((0, 1), "")


def test_all_with_a_warning_where_none_is_idle(gpus):
    gpus((9000, 50), (8000, 20))
    with pytest.warns(UserWarning, match=r"devices='auto': others use cuda device\(s\) 0, 1 \(9000 MiB, 50 % busy; 8000 MiB, 20 % busy\)"):
        assert chosen("auto") == ((0, 1), "")


@pytest.mark.parametrize("wanted", [[1, 0], "0,", -1, 2, torch.device("cuda", 1)])
def test_where_there_is_no_choice_nobody_asks(gpus, wanted):
    gpus((9000, 50), (8000, 20))
    if isinstance(wanted, torch.device):
        assert resolve(wanted, idle_first=True).indices == (1,)
    else:
        chosen(wanted)
    gpus((9000, 50))
    chosen("auto")
    assert not gpus.calls.exists()


@pytest.mark.parametrize("visible", ["3,1", "GPU-333,GPU-111-abc"])
def test_cuda_visible_devices(gpus, visible):
    gpus((3, 0), (3, 0), (3, 0), (9000, 90), visible=visible)
    assert chosen("auto") == ((1,), "devices='auto' takes cuda device(s) 1; others use 0 (9000 MiB, 90 % busy).")


def test_where_the_order_of_gpus_is_not_known_all_are_taken(gpus):
    mixed = {"models": ["T400", "H200"]}
    gpus((3, 0), (9000, 90), **mixed)  # CUDA counts the fastest first
    assert chosen("auto") == ((0, 1), "")
    gpus((3, 0), (9000, 90), CUDA_DEVICE_ORDER="PCI_BUS_ID", **mixed)
    assert chosen("auto")[0] == (0,)
    gpus((3, 0), (9000, 90), visible="GPU-111,GPU-000", **mixed)
    assert chosen("auto")[0] == (1,)
    gpus((3, 0), (9000, 90), visible="MIG-1,MIG-2")
    assert chosen("auto") == ((0, 1), "")
    gpus((3, 0), ("[N/A]", "[N/A]"))
    assert chosen("auto") == ((0, 1), "")


@pytest.mark.parametrize("program", [None, "#!/bin/sh\nexit 9\n"])
def test_without_nvidia_smi_all_are_taken(machine, monkeypatch, tmp_path, program):
    machine(cuda=2)
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(program)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chosen("auto") == ((0, 1), "")


def test_what_this_process_holds_is_not_others(gpus, monkeypatch):
    gpus((9000, 90), (3, 0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: (8000 * 2**20, 0)[index])
    assert chosen("auto") == ((0, 1), "")


# -- the built-in accelerators, and others -----------------------------------------------------------------------------------


def test_counts_come_from_torch():
    assert BUILT_IN["cuda"]().auto_device_count() == torch.cuda.device_count()
    assert BUILT_IN["mps"]().auto_device_count() == int(torch.backends.mps.is_available())
    assert BUILT_IN["cpu"]().get_device_stats(torch.device("cpu"))["cpu_load"] >= 0


class Rack(Accelerator):
    name, device_type = "rack", "meta"
    count = 3

    def is_available(self):
        return self.count > 0

    def auto_device_count(self):
        return self.count


def test_an_accelerator_object():
    rack = Rack()
    found = resolve(rack)
    assert (found.type, found.indices, found.accelerator) == ("meta", (0, 1, 2), rack)
    assert resolve(rack, 2, idle_first=True).device(1) == torch.device("meta", 1)
    with pytest.raises(MisconfigurationException, match="this machine has 3 rack device"):
        resolve(rack, 4)
    rack.count = 0
    with pytest.raises(MisconfigurationException, match="accelerator='rack' was asked for, but it finds no device on this machine"):
        resolve(rack)
    rack.count, rack.parse_devices = 3, lambda devices: []
    with pytest.raises(MisconfigurationException, match="accelerator='rack': devices='none' gives no device"):
        resolve(rack, "none")
    with pytest.raises(MisconfigurationException, match="unknown accelerator <class .*Rack'>; .* or give an Accelerator object"):
        resolve(Rack)
