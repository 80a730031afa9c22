"""Several ranks: who sees which samples, and doing things together (cases C14, C19, C20)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import Callback
from tests.helpers.datasets import Drawing
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ports import free_port
from tests.helpers.ranks import run_ranks
from trainer import DataModule


def ddp(world_size=2, **settings):
    return quiet(**{"strategy": "ddp", "devices": world_size, **settings})


class Uneven(IterableDataset):
    """Cuts itself by rank: 3 samples for rank 0, 5 for rank 1."""

    def __iter__(self):
        yield from torch.arange(3.0 + 2 * dist.get_rank())


class UnevenBatches:
    """An iterable of batches that cuts itself by rank."""

    def __iter__(self):
        for number in range(3 + 2 * dist.get_rank()):
            yield torch.tensor([float(number)])


class Counting(Scalar):
    """Remembers the batches of every epoch; has a buffer, which DDP sends around before each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def on_train_epoch_start(self):
        self.seen.append([])

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.seen[-1] += batch.tolist()
        self.log("x", batch.mean(), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("v", batch.mean())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_c14_ranks_of_different_lengths_stop_together_with_the_first(accumulate, workers):
    def task():
        found = []
        for data in (DataLoader(Uneven(), batch_size=1, num_workers=workers), UnevenBatches()):
            module, trainer = Counting(), ddp(max_epochs=2, accumulate_grad_batches=accumulate)
            trainer.fit(module, data, data)
            found.append((module.seen, trainer.global_step, trainer.callback_metrics["v"].item(), module.w.item()))
        return found

    first, second = run_ranks(task)
    for (seen, steps, v, w), (other_seen, other_steps, other_v, other_w) in zip(first, second, strict=True):
        assert steps == other_steps == 2 * -(-3 // accumulate) and w == other_w and v == other_v
        assert v == (0 + 1 + 2 + 0 + 1 + 2 + 3 + 4) / 8  # evaluation takes every sample
        assert seen == [[0.0, 1.0, 2.0]] * 2
        assert other_seen == [[0.0, 1.0, 2.0] + ([3.0] if accumulate == 2 else [])] * 2  # a step's group of batches is whole


def test_c14_lists_of_a_ranks_own():
    def task():
        lists = [[torch.tensor([float(i)]) for i in range(3 + 2 * rank)] for rank in (0, 1)]
        module, trainer = Counting(), ddp(max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, lists[trainer.global_rank])
        return module.seen, trainer.global_step

    assert run_ranks(task) == [([[0.0, 1.0, 2.0]] * 2, 6)] * 2


class Draws(Scalar):
    """Keeps what the data drew (index, torch, numpy, random) and a draw of its own in each step."""

    def __init__(self):
        super().__init__()
        self.rows, self.own = [], []

    def training_step(self, batch, batch_idx):
        self.rows += batch.tolist()
        self.own.append(torch.rand(()).item())
        return self.w * batch.mean().float()


def test_c19_no_stream_repeats_and_all_follow_from_the_one_seed():
    def task(seed):
        found = []
        for workers in (0, 1, 2):
            module = Draws()
            data = DataLoader(Drawing(8), batch_size=2, num_workers=workers, shuffle=True)
            ddp(max_epochs=3, seed=seed).fit(module, data)
            found.append((module.rows, module.own))
        return found

    first, second = run_ranks(task, seed=1)
    assert first[0] == first[1] == first[2] and second[0] == second[1] == second[2]  # 0, 1 and 2 workers
    (rows, own), (other_rows, other_own) = first[0], second[0]
    for epoch in range(3):
        part = slice(4 * epoch, 4 * epoch + 4)
        assert sorted(r[0] for r in rows[part] + other_rows[part]) == list(range(8))
    assert [r[0] for r in rows[:4]] != [r[0] for r in rows[4:8]]
    for column in (1, 2, 3):
        assert len({r[column] for r in rows + other_rows}) == 2 * 3 * 4
    assert len({*own, *other_own}) == 2 * 3 * 2
    assert run_ranks(task, seed=1)[0][0] == first[0] and run_ranks(task, seed=2)[0][0][0] != rows


def test_c20_a_users_ordered_sampler_is_dealt_out_in_its_order():
    def task():
        found = []
        for batch_size in (1, 2):
            module = Counting()
            data = DataLoader(torch.arange(8.0), batch_size=batch_size, sampler=range(7, -1, -1))
            ddp(max_epochs=1).fit(module, data)
            found.append(module.seen[0])
        return found

    assert run_ranks(task) == [[[7, 5, 3, 1]] * 2, [[6, 4, 2, 0]] * 2]


def test_runs_follow_each_other_where_rank_0_holds_the_store():
    def task(port):
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # as where the variables are set by hand
        os.environ["MASTER_PORT"] = str(port)
        found = []
        for _ in range(5):
            module = Scalar()
            ddp(max_epochs=1).fit(module, loader(range(4)))
            found.append(module.w.item())
        return found

    assert run_ranks(task, port=free_port()) == [[-3.0] * 5] * 2


class Preparing(DataModule):
    """Writes a file slowly in prepare_data; every rank reads it in setup."""

    def prepare_data(self):
        time.sleep(0.3)
        with open("calls", "a") as file:
            file.write(f"{self.trainer.global_rank} ")
        Path(f"data.{self.trainer.node_rank}").write_text("5.0")

    def setup(self, stage):
        self.value = float(Path(f"data.{self.trainer.node_rank}").read_text())

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.full((4,), self.value)))


class Tensors(Scalar):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


@pytest.mark.parametrize("nodes", [1, 2])
def test_prepare_data_runs_once_on_each_node_while_the_others_wait(nodes):
    def task():
        if nodes == 2:  # a node of its own for each rank
            rank = os.environ["RANK"]
            os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank, "GROUP_WORLD_SIZE": "2"})
        trainer, module = ddp(2 // nodes, num_nodes=nodes, max_epochs=1), Tensors()
        trainer.fit(module, datamodule=Preparing())
        return module.w.item()

    assert run_ranks(task) == [-10.0, -10.0]
    assert sorted(Path("calls").read_text().split()) == [str(rank) for rank in range(nodes)]


class StopsOnOne(Callback):
    """Rank 1 alone wishes to stop in step 3."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            trainer.should_stop = True


@pytest.mark.parametrize(("settings", "steps"), [({}, 3), ({"min_steps": 5}, 5), ({"min_epochs": 2}, 8), ({"accumulate_grad_batches": 2}, 3)])
def test_a_wish_of_one_rank_stops_all_at_the_same_step(settings, steps):
    def task():
        trainer = ddp(max_epochs=5, callbacks=[StopsOnOne()], **settings)
        trainer.fit(Scalar(), loader(range(8)))
        return trainer.global_step

    assert run_ranks(task) == [steps, steps]


def skip_on_rank_one():
    rank, seen = int(os.environ["RANK"]), []

    class Skipper(Scalar):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if rank == 1 and batch_idx == 2 and self.current_epoch == 0 else None

        def training_step(self, batch, batch_idx):
            seen.append((self.current_epoch, batch_idx))
            return super().training_step(batch, batch_idx)

    ddp(max_epochs=2).fit(Skipper(), loader(torch.arange(8.0)))
    return seen


def test_an_epoch_skipped_on_one_rank_is_skipped_on_all():
    want = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert run_ranks(skip_on_rank_one, 2) == [want, want]
