"""The equivalence matrix: every strategy against one process, cell by cell, and the page that shows it."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import matrix
from tests.helpers.modules import weights


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Every cell, measured once."""
    return matrix.measure_all(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("row", [row.title for row in matrix.ROWS])
def test_a_strategy_equals_one_process(cells, row):
    assert {name: cell for name, cell in cells[row].items() if not cell.good} == {}


def test_the_page_shows_what_was_measured(cells):
    assert matrix.page_table() == matrix.table_of(cells)


def test_the_columns_tell_runs_apart(tmp_path):
    """What one process computes differs from column to column by far more than what counts as equal."""
    found, start = matrix.in_rank(matrix.SINGLE, tmp_path), weights(matrix.Layers())
    assert len(found["loss curve"]) == matrix.STEPS and found["resume"].keys() == start.keys()
    runs = {name: found[name][0] for name in ("accumulation", "EMA")} | {name: found[name] for name in ("final weights", "clipping")}
    runs |= {"start": start, "in 32 bits": {k: t.double() for k, t in found["bf16-mixed"][0].items()}}
    for name, one in runs.items():
        for other_name, other in runs.items():
            assert name == other_name or matrix.deviation(one, other) > 0.02, (name, other_name)
    assert [len(p["sample"]) for p in found["predict order"]] == [2, 2, 2, 1]
    samples = torch.cat([p["sample"] for p in found["predict order"]])
    assert torch.equal(samples, matrix.Layers.rows(7, torch.float64)[:, 0])


def test_a_deviation_is_seen():
    one = {"a": [torch.zeros(2), 1.0]}
    assert matrix.deviation(one, {"a": [torch.tensor([0.0, 0.5]), 1.25]}) == 0.5
    for other in ({"b": [torch.zeros(2), 1.0]}, {"a": [torch.zeros(3), 1.0]}, {"a": [torch.zeros(2).double(), 1.0]}, {"a": [torch.zeros(2)]}):
        assert matrix.deviation(one, other) == float("inf")
    assert matrix.deviation({"a": [torch.full((2,), torch.nan), 1.0]}, one) == float("inf")
    good, wrong = matrix.Cell(1e-16), matrix.Cell(error="something else", expected_error="static_graph")
    assert (good.mark, matrix.Cell(1e-3).mark, wrong.mark) == ("=", "✗", "✗")
