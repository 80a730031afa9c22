"""Resume on several ranks, and at another number of ranks than the file was saved with."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, Noisy, Stop, assert_continues, noisy_loader, train

DDP = {"strategy": "ddp", "devices": 2}


def test_c03_every_rank_resumes_to_the_bit(tmp_path):
    def task():
        def data(workers):
            return noisy_loader(23, batch_size=3, num_workers=workers)  # 4 steps an epoch, the last one short

        whole = train(data(0), **DDP)
        saved = train(data(2), tmp_path, **DDP)
        assert_continues(saved, whole, 0)
        for step, workers in ((1, 2), (3, 0), (4, 2), (5, 1), (7, 0)):
            resumed = train(data(workers), resume_from=tmp_path / f"step={step}.ckpt", **DDP)
            assert_continues(resumed, whole, step)
        return [(entry["draws"], entry["samples"], entry["data"]) for entry in whole.steps]

    first, second = run_ranks(task)
    assert len(first) == len(second) == 8
    draws = [draw for steps in (first, second) for entry in steps for draw in entry[0]]
    assert len(set(draws)) == len(draws)  # no stream is shared
    for start in (0, 4):
        assert sorted(sum((entry[1] for steps in (first, second) for entry in steps[start : start + 4]), [])) == list(range(23))


def test_a_failing_rank_does_not_wait_for_the_others_to_save(tmp_path):
    class Dying(Scalar):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 2:
                raise Stop

        def on_exception(self, exception):
            if isinstance(exception, Stop):
                self.trainer.save_checkpoint(tmp_path / "dying.ckpt")

    def task():
        quiet(max_epochs=1, **DDP).fit(Dying(), loader(range(8)))

    with pytest.raises(Stop):
        run_ranks(task)
    assert list(tmp_path.iterdir()) == []


def test_resume_on_ranks_with_validation_inside_the_epoch_and_accumulation(tmp_path):
    class Validating(Noisy):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.layers(batch[:, 1:].float()).mean() + torch.rand(()))

    def task():
        def go(**more):
            data = noisy_loader(35, batch_size=3), noisy_loader(7, batch_size=2)
            return train(data[0], val=data[1], module=Validating(), accumulate_grad_batches=2, val_check_interval=2, **more, **DDP)

        whole = go(save_to=tmp_path)
        for step in range(1, 6):
            assert_continues(go(resume_from=tmp_path / f"step={step}.ckpt"), whole, step)
        return whole.epochs

    first, second = run_ranks(task)
    assert first == second


class Seeing(Scalar):
    def __init__(self):
        super().__init__()
        self.seen, self.ends = [], {}

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        self.log("mean", batch.mean(), on_epoch=True, on_step=False)
        self.log("sum", batch.sum(), on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("least", batch.min(), on_epoch=True, on_step=False, reduce_fx="min")
        return super().training_step(batch, batch_idx)


def see(folder=None, resume_from=None, batch_size=1, **settings):
    """Train on 0 .. 12 in shuffled order; return what this rank saw, the weight and the epoch's numbers."""
    module = Seeing()
    trainer = quiet(max_epochs=1, seed=9, callbacks=[EveryStep(folder)] if folder else [], **settings)
    trainer.fit(module, loader(range(13), batch_size, shuffle=True), ckpt_path=resume_from)
    return module.seen, module.w.item(), {name: value.item() for name, value in trainer.callback_metrics.items()}


NUMBERS = {"mean": 6.0, "sum": 78.0, "least": 0.0}


def test_two_ranks_resume_as_one(tmp_path):
    def task():
        return see(tmp_path, **DDP)

    (first, weight, numbers), (second, _, _) = run_ranks(task)
    assert numbers == NUMBERS and sorted(first + second[: 13 // 2]) == list(range(13))
    order = [sample for pair in zip(first, second) for sample in pair][:13]
    for step in (1, 3, 6):
        seen, resumed_weight, resumed_numbers = see(resume_from=tmp_path / f"step={step}.ckpt", batch_size=2)
        assert seen == order[2 * step :]  # one rank with twice the batch size does what both did
        assert resumed_numbers == NUMBERS
        assert abs(resumed_weight - weight) < 1e-5


def test_one_rank_resumes_as_two(tmp_path):
    order, weight, numbers = see(tmp_path, batch_size=2)
    assert numbers == NUMBERS and sorted(order) == list(range(13))

    def task():
        return [see(resume_from=tmp_path / f"step={step}.ckpt", **DDP) for step in (1, 3, 5)]

    for step, (first, second) in zip((1, 3, 5), zip(*run_ranks(task))):
        assert first[0] == order[2 * step :: 2]
        assert second[0][: (13 - 2 * step) // 2] == order[2 * step + 1 :: 2]
        assert first[2] == second[2] == NUMBERS
        assert first[1] == second[1] and abs(first[1] - weight) < 1e-5


def test_a_new_number_of_ranks_gives_every_rank_its_own_stream(tmp_path):
    train(noisy_loader(16, batch_size=4), tmp_path)

    def task():
        def go():
            return train(noisy_loader(16, batch_size=2), resume_from=tmp_path / "step=2.ckpt", **DDP)

        first, second = go(), go()
        assert_continues(first, second, 2)  # it repeats itself
        return [draw for entry in first.steps for draw in entry["draws"]]

    first, second = run_ranks(task)
    assert len(first) == 18 and not set(first) & set(second)
