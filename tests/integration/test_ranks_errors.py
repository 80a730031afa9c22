"""Several ranks: what cannot work is named, and no rank waits for another that is gone (cases C21, C23, C24)."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import RemoteTraceback, run_ranks
from trainer import MisconfigurationException, Trainer
from trainer.strategies import DDPStrategy


class Sparing(Net):
    """Has a layer that takes part in the loss only where `uses` says so, by rank and batch."""

    def __init__(self, uses=lambda rank, batch_idx: False):
        super().__init__()
        self.spare, self.uses = torch.nn.Linear(4, 1), uses

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.spare(batch[:, :4]).mean() if self.uses(self.global_rank, batch_idx) else loss


UNUSED = {
    "never used": (lambda rank, i: False, 1),
    "unused from batch 1 on": (lambda rank, i: i == 0, 1),
    "unused on rank 1": (lambda rank, i: rank == 0, 1),
    "unused in the last batch of a window": (lambda rank, i: i % 2 == 0, 2),
}


@pytest.mark.parametrize("case", UNUSED)
def test_c24_unused_parameters_are_named_with_the_option_to_set(case):
    uses, accumulate = UNUSED[case]

    def task():
        module = Sparing(uses)
        trainer = quiet(strategy="ddp", devices=2, max_epochs=1, accumulate_grad_batches=accumulate)
        trainer.fit(module, loader(Net.rows(8), 1))

    with pytest.raises(MisconfigurationException, match=r"spare\.weight, spare\.bias.*ddp_find_unused_parameters_true"):
        run_ranks(task)


@pytest.mark.parametrize("strategy", ["ddp_find_unused_parameters_true", DDPStrategy(True, gradient_as_bucket_view=True)])
def test_c24_the_option_trains_as_one_process_does(strategy):
    def uses(rank, batch_idx):
        return batch_idx % 2 == 0

    def task(devices=2, strategy=strategy):
        torch.manual_seed(0)
        module = Sparing(uses)
        quiet(strategy=strategy, devices=devices, max_epochs=1).fit(module, loader(Net.rows(8), 4 // devices))
        return module.state_dict()

    first, second = run_ranks(task)
    for name, right in task(1, "auto").items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], right, rtol=0, atol=1e-6)


class OwnError(Exception):
    def __init__(self, code, where):
        super().__init__(code, where)
        self.code = code


class Failing(Scalar):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise OwnError(7, "step")
        return super().training_step(batch, batch_idx)


def test_c21_the_ranks_own_exception_comes_first_and_nobody_hangs():
    def task():
        quiet(strategy="ddp", devices=2, max_epochs=1).fit(Failing(), loader(range(8), num_workers=2))

    with pytest.raises(OwnError) as caught:
        run_ranks(task)
    assert caught.value.code == 7 and isinstance(caught.value.__cause__, RemoteTraceback)
    assert "rank 1" in str(caught.value.__cause__)


class NoLoss(Scalar):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)


class OtherReduction(Scalar):
    def training_step(self, batch, batch_idx):
        self.log("x", 1.0, reduce_fx="sum" if self.global_rank else "mean")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "message"),
    [(NoLoss, "returned None on a run of several ranks"), (OtherReduction, "'x' was logged with reduce_fx='mean' on one rank and 'sum'")],
)
def test_what_ranks_must_do_alike(module, message):
    def task():
        quiet(strategy="ddp", devices=2, max_epochs=1, log_every_n_steps=1).fit(module(), loader(range(4)))

    with pytest.raises(MisconfigurationException, match=message):
        run_ranks(task)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 3, "strategy": "ddp"}, r"devices=3, but torchrun started 2 process\(es\)"),
        ({"devices": 1}, r"devices=1, but torchrun started 2 process\(es\)"),
        ({"num_nodes": 2, "strategy": "ddp"}, r"num_nodes=2, but torchrun started 1 node"),
        ({"strategy": "single_device"}, "uses one device, but 2 are asked for"),
    ],
)
def test_c23_a_mismatch_with_the_launcher_is_named_before_any_rendezvous(monkeypatch, settings, message):
    found = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException, match=message):
        Trainer(**settings)
    quiet(devices=1, launcher=False, max_epochs=1).fit(Scalar(), loader([1.0]))  # one switch turns detection off
