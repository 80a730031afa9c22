"""PlanReport: planned and measured figures in TensorBoard, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import PlanReport, TensorBoardLogger
from tests.helpers.modules import Net, quiet
from trainer import MisconfigurationException, plan


def test_both_are_logged(tmp_path):
    rows = Net.rows(16)
    planned = plan(Net, rows)
    report, logger = PlanReport(planned), TensorBoardLogger(tmp_path)
    quiet(accelerator="cpu", max_steps=3, logger=logger, callbacks=[report]).fit(Net(), [rows] * 3)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    for name in ("parameters", "gradients", "optimizer", "buffers"):
        (first,), (last,) = events.Scalars(f"plan/{name}"), events.Scalars(f"measured/{name}")
        assert first.value == last.value == getattr(planned.memory, name)
        assert (first.step, last.step) == (0, 3)
    assert events.Scalars("plan/flops")[0].value == planned.flops
    (text,) = events.Tensors("plan/text_summary")
    assert f"| parameters | {planned.memory.parameters:,} | {planned.memory.parameters:,} |" in text.tensor_proto.string_val[0].decode()


def test_a_saved_plan_and_the_other_column(tmp_path):
    planned = plan(Net, Net.rows(16), "ddp", 2)
    planned.save(tmp_path / "plan.json")
    report = PlanReport(tmp_path / "plan.json", checkpointed=True)
    assert report.planned["activations"] == planned.checkpointed.activations
    assert report.planned["communicated"] == sum(t.bytes for t in planned.transfers_checkpointed)


def test_what_is_no_plan(tmp_path):
    for wrong in (7, str(tmp_path / "none.json")):
        with pytest.raises(MisconfigurationException, match="is no plan of trainer.plan"):
            PlanReport(wrong)
    with pytest.raises(MisconfigurationException, match="is no plan of trainer.plan"):
        PlanReport({"losses": []})

    class Flat(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Linear(4, 1)

    with pytest.raises(MisconfigurationException, match="has no column with activation checkpointing"):
        PlanReport(plan(Flat, Net.rows(16)), checkpointed=True)
