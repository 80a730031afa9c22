"""Big data in memory: a tensor data set handed to `fit` lies once in memory for all ranks, whatever their number."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.modules import Net, Scalar, loader, quiet
from trainer.launchers import LocalLauncher, bulk
from trainer.launchers.transport import dumps, loads

MB = 2**20
SIZE = 200 * MB


def memory():
    """Return (private, proportional) bytes of this process."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return found["Private_Clean"] + found["Private_Dirty"], found["Pss"]


def big():
    return torch.arange(SIZE // 8, dtype=torch.float64).view(-1, 1024)  # 25600 rows


class Measuring(Scalar):
    """Reads all data (each rank its half), then notes its memory."""

    def training_step(self, batch, batch_idx):
        (rows,) = batch
        assert rows.shape == (64, 1024)
        self.total = getattr(self, "total", 0.0) + rows.sum().item()
        return (self.w * rows.float()).mean()

    def on_train_epoch_end(self):
        totals = self.all_gather(torch.tensor(self.total, dtype=torch.float64))
        self.found = [totals.sum().item(), *map(list, zip(*self.trainer._run.dist.gather(memory())))]


def fit(rows):
    module = Measuring()
    trainer = quiet(strategy="ddp", devices=2, max_epochs=1, log_every_n_steps=0, accelerator="cpu")
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=64))
    return module.found


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")
def test_the_ranks_do_not_copy_the_data():
    rows = big()[:24576]
    rows = rows.clone()  # a storage of 192 MB, which is all of it
    size = rows.nbytes
    _, little_private, little_pss = fit(rows[:2048].clone())
    total, private, pss = fit(rows)
    assert total == rows.sum().item()
    assert sum(private) - sum(little_private) < 0.2 * size, (private, little_private)
    assert sum(pss) - sum(little_pss) < 1.2 * size, (pss, little_pss)  # once for both, where n copies would be 2


def test_a_ranks_write_stays_its_own():
    rows = big()

    def task(world):
        before = memory()[0] if Path("/proc/self/smaps_rollup").exists() else 0
        rows[world.rank] = -1.0
        Path(f"wrote.{world.rank}").touch()
        while not Path(f"wrote.{1 - world.rank}").exists():
            pass
        other = rows[1 - world.rank]
        grown = (memory()[0] if before else 0) - before
        Path(f"seen.{world.rank}").write_text(repr((rows[world.rank].sum().item(), other[0].item(), grown < 50 * MB)))

    LocalLauncher(2).launch(task)
    assert Path("seen.0").read_text() == "(-1024.0, 1024.0, True)"
    assert Path("seen.1").read_text() == "(-1024.0, 0.0, True)"
    assert rows[:2].flatten().tolist() == list(range(2048))


def test_the_file_is_private_in_memory_and_gone_afterwards():
    rows = torch.ones(MB)
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def task(world):
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("/task.bulk")]
        folder = Path(lines[0].split()[-1]).parent
        return str(folder), stat.S_IMODE(folder.stat().st_mode), rows.sum().item()

    folder, mode, total = LocalLauncher(1).launch(task)
    assert (mode, total) == (0o700, MB) and not Path(folder).exists()
    if bulk.base_folder(4 * MB):
        assert folder.startswith("/dev/shm/trainer-") and set(os.listdir("/dev/shm")) <= before
    with pytest.raises(ValueError, match="mine"):
        LocalLauncher(1).launch(lambda world: raise_with(rows))
    assert {name for name in os.listdir("/dev/shm") if name.startswith("trainer-")} <= before


def raise_with(rows):
    raise ValueError("mine", len(rows))


def test_the_usual_place_where_memory_has_no_room(monkeypatch):
    assert bulk.base_folder(2**60) is None and bulk.base_folder(0) is None
    monkeypatch.setattr(bulk, "_MEMORY_FILES", "/no/such/place")
    assert bulk.base_folder(10) is None
    rows = torch.arange(MB)
    assert LocalLauncher(1).launch(lambda world: int(rows.sum())) == int(rows.sum())


def journey(value):
    """Send `value` as a launch does, and in one pickle as results come back; yield both."""
    apart = bulk.Apart()
    payload = dumps(value, apart)
    bulk.write("parcel", payload, apart)
    found = bulk.read("parcel")
    os.unlink("parcel.bulk")
    return [found, loads(dumps(value))], len(apart.buffers)


@pytest.mark.parametrize("rows", [8, 8192])
def test_sharing_survives(rows):
    base = torch.randn(rows, 4)
    layer, tied = torch.nn.Linear(4, rows), torch.nn.Linear(4, rows)
    tied.weight = layer.weight
    buffered = torch.nn.BatchNorm1d(3)
    value = {"base": base, "view": base[1:3], "column": base.t()[0], "layers": torch.nn.ModuleList([layer, tied]), "norm": buffered}
    both, count = journey(value)
    assert (count > 0) == (rows > 8)
    for found in both:
        assert torch.equal(found["base"], base) and torch.equal(found["column"], base[:, 0])
        found["base"][1] = 7.0
        assert found["view"][0].tolist() == [7.0] * 4 and found["column"][1] == 7.0  # one memory
        assert found["layers"][0].weight is found["layers"][1].weight
        assert isinstance(found["layers"][0].weight, torch.nn.Parameter) and found["layers"][0].weight.requires_grad
        assert not torch.equal(found["base"], base)  # and not the sender's
        assert found["norm"].num_batches_tracked.item() == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(0, 5, dtype=torch.int64),
        torch.tensor(3.5),
        torch.randn(20000, dtype=torch.bfloat16),
        torch.arange(50000).bool(),
        torch.randn(30000, dtype=torch.complex64).conj(),
        torch.randn(200, 300).t(),
        torch.randn(10, 1).expand(10, 5000),
        torch.randn(100, 100).to_sparse(),
        torch.empty(4, device="meta"),
        torch.randn(50000, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.layout}-{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_every_kind_of_tensor_arrives(tensor):
    for found in journey(tensor)[0]:
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and found.requires_grad == tensor.requires_grad
        if tensor.device.type != "meta":
            assert torch.equal(found.detach().to_dense() if found.is_sparse else found, tensor.to_dense() if tensor.is_sparse else tensor)


def test_arrays_and_many_tensors():
    numpy = pytest.importorskip("numpy")
    array, several = numpy.arange(100000), [torch.full((5000,), float(i)) for i in range(100)]
    both, count = journey((array, several))
    assert count == 101
    for found, tensors in both:
        assert numpy.array_equal(found, array) and all(torch.equal(a, b) for a, b in zip(tensors, several))
        found[0], tensors[0][0] = 5, 9.0
    assert array[0] == 0 and several[0][0] == 0


def test_a_small_weight_is_ordinary_memory_and_a_model_of_big_ones_trains():
    small = journey(torch.zeros(3))[0][0]
    small.resize_(10)

    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)  # so many weights diverge with Net's

    torch.manual_seed(0)
    one, two = Wide(), Wide()
    two.load_state_dict(one.state_dict())
    quiet(max_epochs=1).fit(one, loader(Net.rows(16), 4))
    quiet(strategy="ddp", devices=2, max_epochs=1).fit(two, loader(Net.rows(16), 2))
    for a, b in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
