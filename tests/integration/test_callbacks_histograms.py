"""HistogramMonitor and the counting behind it, compared with numpy, alone and on ranks."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import callbacks.binning
from callbacks import HistogramMonitor, Logger
from callbacks.binning import Histogram, histogram
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from trainer import MisconfigurationException


class Kept(Logger):
    """Keeps histograms by (step, key)."""

    def __init__(self) -> None:
        self.found: dict[tuple[int | None, str], Histogram] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_histogram(self, key: str, values: Any, step: int | None = None) -> None:
        assert (step, key) not in self.found
        self.found[step, key] = values


def check(found: Histogram, values: torch.Tensor) -> None:
    """Compare with numpy's count of the same values."""
    flat = values.detach().flatten().double().numpy()
    counts, edges = numpy.histogram(flat, bins=len(found.counts), range=(found.low, found.high))
    assert (found.low, found.high, found.number) == (flat.min(), flat.max(), flat.size)
    assert found.counts == tuple(counts)
    assert found.limits == pytest.approx(edges[1:], abs=1e-12)
    assert (found.total, found.squares) == pytest.approx((flat.sum(), (flat**2).sum()), rel=1e-12)


@pytest.mark.parametrize("piece", [1 << 22, 7])
def test_counts_are_numpys_whatever_the_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks.binning, "_PIECE", piece)
    values = torch.randn(30, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    check(histogram(values), values)
    check(histogram(values.numpy()), values)
    check(histogram(values.t()), values)


def test_odd_values() -> None:
    assert histogram(torch.tensor([])) is None and histogram([float("nan"), float("inf")]) is None
    check(histogram([1.0, float("nan"), 3.0, float("-inf")]), torch.tensor([1.0, 3.0]))
    constant = histogram(torch.ones(5))
    assert (constant.low, constant.high, constant.number, constant.total) == (1.0, 1.0, 5, 5.0)
    half = torch.tensor([0.5, 2.0, -1.0], dtype=torch.bfloat16)
    check(histogram(half), half)
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,))
    check(histogram(sparse), torch.tensor([1.0, 5.0]))


def by_hand(rows: torch.Tensor, accumulate: int) -> list[dict[str, torch.Tensor]]:
    """Gradients and weights of each optimizer step of Net."""
    net, found = Net().double(), []
    optimizer = net.configure_optimizers()
    for batch in rows.split(4 * accumulate):
        optimizer.zero_grad()
        net.loss(batch).backward()
        step = {f"gradients/{name}": p.grad.clone() for name, p in net.named_parameters()}
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        found.append({**step, **{f"weights/{name}": p.detach().clone() for name, p in net.named_parameters()}})
    return found


ROWS = Net.rows(48, torch.float64)


def fit(monitor: HistogramMonitor, batch: int = 4, **settings: Any) -> dict[tuple[int | None, str], Histogram]:
    logger = Kept()
    exact = {"precision": "64-true", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": 1}
    quiet(accelerator="cpu", logger=logger, callbacks=[monitor], **exact, **settings).fit(Net(), loader(ROWS, batch))
    return logger.found


def test_every_second_step_of_accumulated_batches_ahead_of_clipping() -> None:
    hand, found = by_hand(ROWS, 2), fit(HistogramMonitor(every_n_steps=2))
    assert set(found) == {(step, name) for step in (2, 4, 6) for name in hand[0]}
    for (step, name), counted in found.items():
        near(counted, hand[step - 1][name])


def near(found: Histogram, values: torch.Tensor) -> None:
    """Like `check`, for numbers that another order of additions may have moved in the last digits."""
    assert (found.low, found.high) == pytest.approx((values.min().item(), values.max().item()), abs=1e-12)
    assert found.number == values.numel()
    assert (found.total, found.squares) == pytest.approx((values.sum().item(), values.square().sum().item()), abs=1e-11)
    counts = numpy.histogram(values.flatten(), bins=len(found.counts))[0]
    assert numpy.abs(numpy.cumsum(counts) - numpy.cumsum(found.counts)).max() <= 1  # one value may lie on an edge


def test_the_last_step_of_an_epoch_and_one_of_the_two() -> None:
    assert {step for step, _ in fit(HistogramMonitor())} == {6}
    assert {name.partition("/")[0] for _, name in fit(HistogramMonitor(gradients=False))} == {"weights"}
    assert {name.partition("/")[0] for _, name in fit(HistogramMonitor(weights=False))} == {"gradients"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_count_every_value_once_and_rank_zero_shows_it(strategy: str) -> None:
    first, second = run_ranks(fit, monitor=HistogramMonitor(every_n_steps=3), batch=2, strategy=strategy, devices=2)
    hand = by_hand(ROWS, 2)
    assert second == {} and set(first) == {(step, name) for step in (3, 6) for name in hand[0]}
    for (step, name), counted in first.items():
        near(counted, hand[step - 1][name])


def test_an_optimizer_that_steps_twice_in_a_batch_is_shown_once() -> None:
    class Twice(Scalar):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for factor in (1.0, 2.0):
                optimizer.zero_grad()
                self.manual_backward(factor * self.w * batch.mean())
                optimizer.step()

    logger = Kept()
    quiet(accelerator="cpu", max_epochs=1, logger=logger, callbacks=[HistogramMonitor(1)]).fit(Twice(), loader([3.0, 5.0]))
    assert {key: value.total for key, value in logger.found.items()} == {
        (1, "gradients/w"): 3.0, (1, "weights/w"): -9.0, (2, "gradients/w"): 5.0, (2, "weights/w"): -24.0,
    }  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), [({"every_n_steps": 0}, "every_n_steps=0"), ({"weights": False, "gradients": False}, "show nothing")])
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        HistogramMonitor(**arguments)


def test_layers_on_other_ranks_are_refused() -> None:
    module = Net()
    module.layers.to("meta")
    trainer = quiet(accelerator="cpu")
    with pytest.raises(MisconfigurationException, match="keeps layers on other ranks"):
        HistogramMonitor().on_fit_start(trainer, module)
