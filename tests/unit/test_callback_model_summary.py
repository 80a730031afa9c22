"""ModelSummary: the numbers in the table, and that the module is the same afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer
from callbacks import ModelSummary, RichModelSummary, rich_progress, summarize
from callbacks.errors import MisconfigurationException
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.modules import Net as Regression
from tests.helpers.modules import quiet
from tests.helpers.ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2).double()
        self.scale = nn.Parameter(torch.ones(5))
        self.head.requires_grad_(False)
        self.body[1].eval()


def test_layers_and_totals() -> None:
    summary = summarize(Net())
    assert summary.layers == {
        "body": ("Sequential", 24, "train", None),
        "head": ("Linear", 10, "train", None),
        "other params": ("n/a", 5, "n/a", None),
    }
    assert (summary.total_parameters, summary.trainable_parameters) == (39, 29)
    assert summary.model_size == pytest.approx((29 * 4 + 10 * 8) / 1e6)
    assert (summary.train_modules, summary.eval_modules) == (3, 1)
    assert (summary.layer_names, summary.layer_types) == (["body", "head", "other params"], ["Sequential", "Linear", "n/a"])
    assert (summary.param_nums, summary.in_sizes, summary.out_sizes) == ([24, 10, 5], ["?"] * 3, ["?"] * 3)


def test_depth() -> None:
    assert list(summarize(Net(), max_depth=2).layers) == list(summarize(Net(), max_depth=-1).layers)
    assert list(summarize(Net(), max_depth=2).layers) == ["body", "body.0", "body.1", "head", "other params"]
    assert summarize(Net(), max_depth=0).layers == {}
    with pytest.raises(MisconfigurationException, match="max_depth=-2"):
        trainer.summarize(Net(), max_depth=-2)


def test_shared_parameters_count_once_and_lazy_ones_not_yet() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert summarize(net).total_parameters == 8
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    net.example_input_array = torch.ones(1, 2)
    lazy = summarize(net)
    assert lazy.layers["0"].parameters is None
    assert lazy.total_parameters == 4
    assert "lazy layers not counted" in str(lazy) and "lazy layers take their shapes from the first batch" in str(lazy)
    assert isinstance(net[0], nn.LazyLinear)


def test_text() -> None:
    lines = str(summarize(nn.Sequential(nn.Linear(100, 100), nn.ReLU()))).splitlines()
    assert lines[0].split(" | ") == [" ", "Name", "Type  ", "Params", "Mode"]
    assert [cell.strip() for cell in lines[2].split("|")] == ["0", "0", "Linear", "10.1 K", "train"]
    assert [line.split(maxsplit=1)[1] for line in lines[5:7]] == ["K    Trainable params", "Non-trainable params"]
    assert any(line.startswith("0.040 ") and "MB" in line for line in lines)


def test_it_prints_on_rank_0_at_fit_start() -> None:
    for changes, count in (({}, 1), ({"is_global_zero": False}, 0)):
        fake = FakeTrainer("", [ModelSummary()], lightning_module=Net(), **changes).start()
        assert len(fake.printed) == count
    assert FakeTrainer("", [ModelSummary(0)], lightning_module=Net()).start().printed == []
    with pytest.raises(MisconfigurationException, match="max_depth=-3"):
        ModelSummary(-3)


# -- an example ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A convolution, normalisation, attention, a product with a parameter of its own, and dropout; draws, counts and logs in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)
        self.example_input_array = torch.randn(2, 1, 4, 4)

    def forward(self, pictures: torch.Tensor) -> Any:
        self.calls += 1
        self.last = torch.rand(3)
        rows = F.scaled_dot_product_attention(*[self.drop(self.norm(self.conv(pictures)))] * 3)
        return rows @ self.weight, rows


CONV, ATTENTION, PRODUCT = 2 * (2 * 8 * 4 * 4) * 9, 2 * (2 * (2 * 8) * 4 * 4 * 4), 2 * (2 * 8 * 4) * 4 * 6


def test_sizes_and_flops_are_those_by_hand() -> None:
    summary = summarize(Block())
    assert summary.layers["conv"].seen == ([2, 1, 4, 4], [2, 8, 4, 4], CONV)
    assert summary.layers["norm"].seen == ([2, 8, 4, 4], [2, 8, 4, 4], 0)
    assert summary.total_flops == CONV + ATTENTION + PRODUCT
    assert summary.layers["other params"].seen is None
    lines = str(summary).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")][-3:] == ["FLOPs", "In sizes", "Out sizes"]
    assert lines[-1] == "11.8 K    FLOPs of a forward on the example input"


@pytest.mark.parametrize(
    ("layer", "example", "flops"),
    [
        (nn.LSTM(4, 5, batch_first=True), torch.randn(2, 3, 4), 2 * (2 * 3) * (4 * 20 + 5 * 20)),
        (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(2, 8, 16), 2 * 16 * (16 * 48 + 16 * 16 + 2 * 16 * 32) + 2 * 2 * 2 * 8 * 8 * 16),
        (nn.Bilinear(2, 3, 4), (torch.ones(5, 2), torch.ones(5, 3)), None),
        (nn.Linear(3, 4), {"input": torch.ones(5, 3)}, 2 * 5 * 3 * 4),
    ],
    ids=["lstm", "transformer", "tuple", "dict"],
)
def test_layers_that_have_kernels_of_their_own(layer: nn.Module, example: Any, flops: int | None) -> None:
    layer.example_input_array = example
    found = summarize(layer)
    assert found.reason == "" and found.total_flops is not None
    if flops is not None:
        assert found.total_flops == flops


def test_the_module_and_the_random_streams_are_the_same_afterwards() -> None:
    block = Block()
    block.drop.eval()
    before, modes = {n: t.clone() for n, t in block.state_dict().items()}, [m.training for m in block.modules()]
    hooks = [len(m._forward_hooks) for m in block.modules()]
    state = torch.get_rng_state()
    grads = torch.is_grad_enabled()
    summarize(block, max_depth=-1)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled() == grads
    assert {n: t.tolist() for n, t in block.state_dict().items()} == {n: t.tolist() for n, t in before.items()}
    assert block.last is None
    assert ([m.training for m in block.modules()], [len(m._forward_hooks) for m in block.modules()]) == (modes, hooks)
    assert torch.backends.mkldnn.enabled and torch.backends.mha.get_fastpath_enabled()


def test_a_forward_that_fails_is_a_warning_and_changes_nothing() -> None:
    class Failing(Block):
        def forward(self, pictures: torch.Tensor) -> Any:
            super().forward(pictures)
            raise RuntimeError("no such thing")

    block = Failing()
    with pytest.warns(UserWarning, match="no sizes and FLOPs: forward.* failed: RuntimeError: no such thing") as caught:
        summary = summarize(block)
    assert caught[0].filename == __file__
    assert (summary.total_flops, summary.layers["conv"].parameters) == (None, 80)
    assert "failed: RuntimeError: no such thing" in str(summary)
    assert block.training and block.calls == 0 and block.last is None and not block.conv._forward_hooks


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        block = Block()
    summary = summarize(block)
    assert (summary.total_flops, summary.total_parameters) == (CONV + ATTENTION + PRODUCT, 80 + 16 + 24)
    block.weight = nn.Parameter(torch.ones(4, 6))
    assert "not here" in summarize(block).reason


class Exampled(Regression):
    example_input_array = torch.ones(3, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.dtypes.append(self.layers(rows).dtype)
        return self.layers(rows)


@pytest.mark.parametrize(("precision", "kind"), [("bf16-mixed", torch.bfloat16), ("64-true", torch.float64)])
def test_the_example_runs_in_the_fits_precision(precision: str, kind: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    module = Exampled()
    module.dtypes = []
    quiet(accelerator="cpu", max_steps=1, precision=precision, callbacks=[ModelSummary()]).fit(module, [module.rows(4)])
    assert module.dtypes == [kind]
    assert "| [3, 4]   | [3, 1]" in capsys.readouterr().out


def sharded_summary(**settings: Any) -> tuple[int, int, float, str]:
    module, found = Exampled(), []

    class Kept(ModelSummary):
        def show(self, trainer: Any, summary: Any) -> None:
            found.append((summary.total_parameters, summary.layers["layers"].parameters, summary.model_size, summary.reason))

    quiet(accelerator="cpu", max_steps=1, callbacks=[Kept()], **settings).fit(module, [module.rows(4)] * 2)
    return found[0] if found else (0, 0, 0.0, "")


def test_a_sharded_module_gives_the_numbers_of_the_whole() -> None:
    first, second = run_ranks(sharded_summary, strategy="fsdp", devices=2)
    assert first == (49, 49, 49 * 4 / 1e6, "its weights are spread over several processes")
    assert second == (0, 0, 0.0, "")  # rank 0 prints


# -- rich ------------------------------------------------------------------------------------------------------------------


def test_rich_draws_the_same_cells() -> None:
    module = Block()
    (text,) = FakeTrainer("", [RichModelSummary(max_depth=1)], lightning_module=module).start().printed
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert cells == summarize(module).rows()[1:]
    assert all(line.isprintable() for line in text.splitlines())
    assert "11.8 K FLOPs of a forward" in text


def test_rich_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich_progress.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match="RichModelSummary needs the package rich: pip install rich"):
        RichModelSummary()
    monkeypatch.undo()
    with pytest.raises(MisconfigurationException, match="max_depth=-2"):
        RichModelSummary(-2)
