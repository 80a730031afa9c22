"""Training data that end at different times on the ranks: stop together, or go on until the last has none (C14)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.modules import Net, Scalar, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import SaveAt
from trainer import DataError, MisconfigurationException

PARTS = ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0, 40.0, 50.0])


class PerRank(IterableDataset):
    """Each rank has its own items; asking for the rank makes the data layer leave the sharding to this class."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return iter(self.parts[rank])


class Noted(Scalar):
    """Also draws a number a step, logs the mean of what it saw, and keeps the weight after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.seen: list[float] = []
        self.weights: list[float] = []
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.double().mean().item())
        self.draws.append(torch.rand(()).item())
        self.log("x", batch.double().mean(), on_step=False, on_epoch=True)
        return (self.w * batch.double()).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(self.w.item())


def train(parts: Any, batch_size: int = 1, module: Any = None, ckpt_path: Any = None, **settings: Any) -> Any:
    module = module or Noted()
    trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=settings.pop("max_epochs", 1), seed=0, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(PerRank(parts), batch_size=batch_size), ckpt_path=ckpt_path)
    return module, trainer


def fit(**settings: Any) -> Any:
    module, trainer = train(**settings)
    return module.seen, module.weights, trainer.global_step, trainer.callback_metrics.get("x")


def test_c14_stop_is_the_default_and_ends_with_the_first() -> None:
    for seen, weights, steps, _ in run_ranks(fit, parts=PARTS):
        assert steps == 3 and len(seen) == 3
        assert weights == pytest.approx([-5.5, -16.5, -33.0])


def test_c14_join_goes_on_with_the_mean_of_what_is_left() -> None:
    ranks = run_ranks(fit, parts=PARTS, uneven="join")
    for _, weights, steps, logged in ranks:
        assert steps == 5
        assert weights == pytest.approx([-5.5, -16.5, -33.0, -73.0, -123.0], abs=1e-12)
        assert float(logged) == pytest.approx(156 / 8)  # each real sample once
    assert ranks[0][0] == [1, 2, 3, 3, 3] and ranks[1][0] == [10, 20, 30, 40, 50]


def test_join_weighs_by_samples_in_a_window_with_short_batches() -> None:
    """Batches of 2 and 2 per step: steps over {1,2,3 | 10..40} and {50}; the last window of one rank is one short batch."""
    for _, weights, steps, _ in run_ranks(fit, parts=PARTS, uneven="join", batch_size=2, accumulate_grad_batches=2):
        assert steps == 2
        first = -(1 + 2 + 3 + 10 + 20 + 30 + 40) / 7
        assert weights[-1] == pytest.approx(first - 50, abs=1e-12)


class Counted(Noted):
    """Gives counts of its own: a token a unit of the value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch.double()
        return {"loss": (self.w * batch).mean(), "count": batch.sum()}


def test_join_with_counts_of_the_step() -> None:
    def run() -> Any:
        return train(PARTS, module=Counted(), uneven="join")[0].weights

    wanted, w = [], 0.0
    for a, b in ((1, 10), (2, 20), (3, 30), (0, 40), (0, 50)):
        w -= (a * a + b * b) / (a + b)
        wanted.append(w)
    for weights in run_ranks(run):
        assert weights == pytest.approx(wanted, abs=1e-10)


def test_join_in_manual_optimization() -> None:
    class Manual(Noted):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self.w * batch.double()).mean())
            optimizer.step()

    def run() -> Any:
        return train(PARTS, module=Manual(), uneven="join")[0].weights

    for weights in run_ranks(run):
        assert weights == pytest.approx([-5.5, -16.5, -33.0, -73.0, -123.0], abs=1e-12)


def test_join_of_loaders_with_whole_batches_weighs_batches_alike() -> None:
    class Mine:
        def __iter__(self) -> Any:
            rank = torch.distributed.get_rank()
            return (torch.tensor([x, x]) for x in PARTS[rank])

    def run() -> Any:
        module = Noted()
        quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, uneven="join", seed=0).fit(module, Mine())
        return module.weights

    for weights in run_ranks(run):
        assert len(weights) == 10 and weights[4] == pytest.approx(-123.0, abs=1e-12) and weights[9] == pytest.approx(-246.0, abs=1e-12)


@pytest.mark.parametrize(("accumulate", "workers"), [(1, 0), (2, 0)])
def test_join_resumes_to_the_bit_from_every_step(tmp_path: Path, accumulate: int, workers: int) -> None:
    """Two epochs, also from where one rank has run out: it repeats the same batch again."""

    def run(folder: str) -> Any:
        whole, trainer = train(PARTS, uneven="join", max_epochs=2, accumulate_grad_batches=accumulate)
        found = []
        for step in range(1, trainer.global_step):
            path = f"{folder}/{step}.ckpt"
            first, _ = train(PARTS, uneven="join", max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[SaveAt(step, path)], max_steps=step)
            rest, second = train(PARTS, uneven="join", max_epochs=2, accumulate_grad_batches=accumulate, ckpt_path=path)
            found.append((first.seen + rest.seen, first.weights + rest.weights, first.draws + rest.draws, second.global_step))
        return (whole.seen, whole.weights, whole.draws, trainer.global_step), found

    for whole, found in run_ranks(run, folder=str(tmp_path)):
        assert whole[3] == (10 if accumulate == 1 else 6) and found
        for pieces in found:
            assert pieces == whole


def test_join_on_shared_data_is_the_single_process_run() -> None:
    """A stream that the data layer shards itself: 7 samples on two ranks, batch 1 + 1 against batch 2."""

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(Net.rows(7, torch.float64))

    def run(batch_size: int, **settings: Any) -> Any:
        module = Net().double()
        quiet(accelerator="cpu", max_epochs=3, seed=0, **settings).fit(module, DataLoader(Stream(), batch_size=batch_size))
        return module.state_dict()

    one = run(2, devices=1)
    for state in run_ranks(run, batch_size=1, devices=2, strategy="ddp", uneven="join"):
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, one[key], rtol=0, atol=1e-12)


def test_join_names_a_rank_without_any_batch() -> None:
    with pytest.raises(DataError, match="1 ranks have no batch at all.*uneven='stop'"):
        run_ranks(fit, parts=([], [1.0, 2.0]), uneven="join")


def test_all_ranks_without_a_batch() -> None:
    with pytest.raises(DataError, match="gave no batch"):
        run_ranks(fit, parts=([], []), uneven="join")


def test_unknown_policy() -> None:
    with pytest.raises(MisconfigurationException, match="uneven='joined' must be one of 'stop', 'join'. Did you mean 'join'"):
        quiet(uneven="joined")
