"""SpikeDetection: which losses are spikes, when they are found, and what is left for the next run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import SpikeDetection, TrainingSpikeException
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep
from trainer import MisconfigurationException


class Given(Scalar):
    """The loss of a batch is its number."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return batch.mean() + 0 * self.w


def fit(losses: list[float], spy: SpikeDetection, folder: Path, resume: Any = None, **settings: Any) -> int:
    """Return the steps taken; a spike ends the fit."""
    saver = [EveryStep(folder)] if settings.pop("save", False) else []
    trainer = quiet(accelerator="cpu", **{"max_epochs": 1, "log_every_n_steps": 1, **settings, "default_root_dir": folder, "callbacks": [spy, *saver]})
    try:
        trainer.fit(Given(), loader(losses), ckpt_path=resume)
    except TrainingSpikeException as spike:
        assert str(spike).startswith(f"The loss {losses[spy.bad_batches[-1]['batch']]:.6g} of batch {spy.bad_batches[-1]['batch']} in epoch 0")
    return trainer.global_step


CASES = [
    ([4, 3, 2, 2.5, 9], {}, 4),  # mean 2.875: 9 is more than three times it
    ([4, 3, 2, 2.5, 8], {}, None),
    ([4, 3, 2, 2.5, 8], {"window": 2}, 4),  # mean 2.25
    ([4, 3, 2, 2.5, 5], {"atol": 2.0, "rtol": None}, 4),
    ([4, 3, 2, 2.5, 4.8], {"atol": 2.0, "rtol": None}, None),
    ([4, 3, 2, 2.5, 5], {"atol": 2.0}, None),  # both limits
    ([4, 3, 50, 2, 2], {"warmup": 3}, None),
    ([-1, -2, -9], {"mode": "min"}, None),  # better
    ([9, 9, -20], {"mode": "max"}, 2),
    ([4, math.nan, 3], {}, 1),
    ([4, math.inf, 3, 12], {"finite_only": False}, 3),  # and it does not count in the mean
    ([math.nan, 4, 3], {"warmup": 1}, None),
]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("losses", "arguments", "found"), CASES, ids=str)
def test_what_a_spike_is(losses: list[float], arguments: Any, found: int | None, every: int, tmp_path: Path) -> None:
    spy = SpikeDetection(**arguments)
    steps = fit(losses, spy, tmp_path, log_every_n_steps=every)
    file = tmp_path / "skip_batches.json"
    if found is None:
        assert (steps, spy.bad_batches, file.exists()) == (len(losses), [], False)
    else:
        assert spy.bad_batches == json.loads(file.read_text()) == [{"epoch": 0, "batch": found - 1}, {"epoch": 0, "batch": found}]
        assert steps == (found + 1 if every == 1 else min(-(-(found + 1) // 3) * 3, len(losses)))  # the next publish point


def test_without_publish_points_the_epochs_end_is_one(tmp_path: Path) -> None:
    spy = SpikeDetection(exclude_batches_path=tmp_path / "deep" / "bad.json")
    assert fit([4, 3, 99, 2, 2], spy, tmp_path, log_every_n_steps=0) == 5
    assert len(json.loads((tmp_path / "deep" / "bad.json").read_text())) == 2


def test_a_resumed_run_judges_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    losses = [4.0, 3.0, 2.0, 2.5, 3.0, 8.9]  # the mean of all before is 2.9, of the last two 2.75
    whole = SpikeDetection()
    assert fit(losses, whole, tmp_path, save=True, log_every_n_steps=5) == 6 and whole.bad_batches == [
        {"epoch": 0, "batch": 4}, {"epoch": 0, "batch": 5}
    ]  # fmt: skip
    for step in (1, 3, 5):  # also with losses that nobody has looked at yet
        resumed = SpikeDetection()
        assert fit(losses, resumed, tmp_path / "other", resume=tmp_path / f"step={step}.ckpt", log_every_n_steps=5) == 6
        assert resumed.bad_batches == whole.bad_batches


def test_a_spike_on_one_rank_ends_all(tmp_path: Path) -> None:
    found = run_ranks(_ranks, folder=tmp_path)
    assert found == [(3, [{"epoch": 0, "batch": 1}, {"epoch": 0, "batch": 2}], "on rank 1 is far from the mean 1 ")] * 2


def _ranks(folder: Path) -> tuple[int, list[dict[str, int]], str]:
    spy = SpikeDetection()
    trainer = quiet(accelerator="cpu", max_epochs=1, log_every_n_steps=1, strategy="ddp", devices=2, default_root_dir=folder, callbacks=[spy])
    with pytest.raises(TrainingSpikeException) as caught:
        trainer.fit(Given(), loader([1, 1, 1, 1, 1, 90, 1, 1]))
    text = str(caught.value)
    return trainer.global_step, spy.bad_batches, text[text.index("on rank") : text.index("of those")]


@pytest.mark.parametrize("arguments", [{"mode": "low"}, {"window": 0}, {"warmup": -1}], ids=str)
def test_arguments_that_cannot_be_are_refused(arguments: Any) -> None:
    with pytest.raises(MisconfigurationException, match="SpikeDetection"):
        SpikeDetection(**arguments)
