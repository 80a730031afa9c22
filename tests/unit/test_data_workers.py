"""What a forked loader worker inherits from its rank."""

from __future__ import annotations

import gc
import os

import pytest
from torch.utils.data import DataLoader, Dataset

from tests.helpers.datasets import source, train


class Trap:
    """Garbage, once nobody holds it; notes when another process than its own collects it."""

    def __init__(self, marker):
        self.me, self.pid, self.marker = self, os.getpid(), marker

    def __del__(self):
        if os.getpid() != self.pid:
            self.marker.write_text("collected in a worker")


class Collecting(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        own = [[] for _ in range(10)]
        for item in own:
            item.append(item)
        del own, item
        return index + 100 * (gc.collect() >= 10) + 1000 * gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_a_worker_never_runs_the_finalizers_of_its_ranks_garbage(tmp_path, collects):
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(0) if collects else gc.disable()  # the garbage is still there when the workers are forked
    try:
        for _ in range(100):
            Trap(tmp_path / "marker")
        loader = DataLoader(Collecting(), batch_size=1, num_workers=2)
        found = [batch[0] for batch in train(source(loader))]
        assert gc.isenabled() == collects
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    assert not (tmp_path / "marker").exists()
    assert found == [i + 100 + 1000 * collects for i in range(4)]  # its own garbage a worker does collect
