"""One seed for everything: streams, states, and what a run does with it."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from callbacks import SeedEverything
from tests.helpers.modules import Scalar, loader, quiet
from trainer import MisconfigurationException, isolate_rng, seed_everything
from trainer.seed import derive, keyed_rng, rng_state, set_rng_state


def draws() -> list[float]:
    return [torch.rand(1).item(), random.random(), numpy.random.rand()]


@pytest.fixture(autouse=True)
def streams_put_back() -> Any:
    with isolate_rng():
        yield


def test_all_three_generators_follow_from_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert seed_everything(7) == 7
    first = draws()
    assert capsys.readouterr().out == "Seed set to 7\n"
    seed_everything(7, workers=True, verbose=False)
    assert draws() == first
    seed_everything(8, verbose=False)
    assert draws() != first
    assert capsys.readouterr().out == ""


def test_without_a_seed_one_is_drawn_and_returned() -> None:
    seed = seed_everything(verbose=False)
    first = draws()
    assert 0 <= seed < 2**32
    assert seed_everything(seed, verbose=False) == seed
    assert draws() == first


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_seeds_out_of_range(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*32\), got"):
        seed_everything(wrong)
    with pytest.raises(MisconfigurationException, match=r"SeedEverything\(seed=.*\): the seed must be a whole number in \[0, 2\*\*32\)"):
        SeedEverything(wrong)


@pytest.mark.parametrize("wrong", [1.5, "1", None, True])
def test_seeds_that_are_no_numbers(wrong: Any) -> None:
    with pytest.raises(MisconfigurationException, match="the seed must be a whole number"):
        SeedEverything(wrong)


def test_derived_seeds_are_fixed_and_unrelated() -> None:
    assert derive(1, "rank", 0) == 313127273  # on every machine and Python version
    keys = [(rank, epoch) for rank in range(20) for epoch in range(20)]
    assert len({derive(3, "order", *key) for key in keys} | {derive(4, "order", *key) for key in keys}) == 800
    assert all(0 <= derive(seed, "x") < 2**32 for seed in range(50))


def test_isolated_and_keyed_blocks_leave_the_streams_as_they_were() -> None:
    seed_everything(5, verbose=False)
    first, second = draws(), draws()
    seed_everything(5, verbose=False)
    with isolate_rng():
        assert draws() == first
        draws()
    with keyed_rng(9):
        keyed = draws()
    assert draws() == first
    with keyed_rng(9):
        assert draws() == keyed
    with pytest.raises(KeyError), isolate_rng():
        draws()
        raise KeyError
    assert draws() == second


def test_a_state_is_plain_and_brings_the_streams_back(tmp_path: Any) -> None:
    random.gauss(0, 1)  # leaves a half-used pair in the state
    numpy.random.randn()
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = [*draws(), random.gauss(0, 1), numpy.random.randn()]
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [*draws(), random.gauss(0, 1), numpy.random.randn()] == expected


class Draws(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen += [batch.item(), torch.rand(1).item(), random.random(), numpy.random.rand()]
        return super().training_step(batch, batch_idx)


def fit(**settings: Any) -> list[float]:
    module = Draws()
    quiet(max_epochs=2, **settings).fit(module, loader(range(6), shuffle=True))
    return module.seen


def test_a_seeded_run_repeats_itself_whatever_came_before() -> None:
    by_argument = fit(seed=3)
    draws()
    assert fit(seed=3) == by_argument
    assert fit(callbacks=[SeedEverything(3)], enable_checkpointing=False) == by_argument
    assert fit(seed=4) != by_argument
    assert sorted(by_argument[0:24:4]) == sorted(by_argument[24::4]) == [0, 1, 2, 3, 4, 5]
    assert by_argument[0:24:4] != by_argument[24::4]


def test_seed_everything_before_a_run_seeds_the_run() -> None:
    seed_everything(3, verbose=False)
    first = fit()
    seed_everything(3, verbose=False)
    assert fit() == first
    assert fit() != first
