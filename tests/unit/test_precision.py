"""The precision plug-ins alone."""

from __future__ import annotations

import pytest
import torch

from trainer import MisconfigurationException, MixedPrecision, Precision
from trainer.config import make_precision
from trainer.precision import TruePrecision
from trainer.precision.plugins import canonical


@pytest.mark.parametrize(
    ("name", "full"),
    [
        (32, "32-true"), ("32", "32-true"), (None, "32-true"), (64, "64-true"), ("64-true", "64-true"), (16, "16-mixed"),
        ("16-mixed", "16-mixed"), ("16-true", "16-true"), ("bf16", "bf16-mixed"), ("BF16-mixed", "bf16-mixed"), ("bf16-true", "bf16-true"),
    ],
)  # fmt: skip
def test_names_users_write(name: str | int | None, full: str) -> None:
    assert canonical(name) == full
    assert make_precision(name, "cpu").precision == full


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(MisconfigurationException, match=r"precision='bf16-mixd' is unknown. Did you mean 'bf16-mixed'\? Choose one of 16-mixed"):
        make_precision("bf16-mixd", "cpu")
    with pytest.raises(MisconfigurationException, match="precision=8 is unknown"):
        canonical(8)


def test_an_object_is_taken_as_it_is() -> None:
    plugin = Precision()
    assert make_precision(plugin, "cpu") is plugin


def test_constructors_refuse_what_they_cannot_do() -> None:
    with pytest.raises(MisconfigurationException, match="TruePrecision takes one of 64-true, 16-true, bf16-true, got '16-mixed'"):
        TruePrecision("16-mixed")
    with pytest.raises(MisconfigurationException, match="MixedPrecision takes '16-mixed' or 'bf16-mixed', got '64-true'"):
        MixedPrecision("64-true")
    with pytest.raises(MisconfigurationException, match="'bf16-mixed' needs no scaler"):
        MixedPrecision("bf16-mixed", scaler=torch.amp.GradScaler("cpu"))


def test_inputs_keep_whole_numbers_and_structure() -> None:
    batch = {"x": torch.ones(2), "n": torch.tensor([1]), "s": "text", "l": [torch.ones(1), 3]}
    out = TruePrecision("64-true").convert_input(batch)
    assert (out["x"].dtype, out["n"].dtype, out["s"], out["l"][0].dtype, out["l"][1]) == (torch.float64, torch.int64, "text", torch.float64, 3)
    assert Precision().convert_input(batch) is batch


def test_the_default_dtype_is_put_back_after_an_error() -> None:
    with pytest.raises(RuntimeError), TruePrecision("64-true").forward_context():
        raise RuntimeError
    assert torch.get_default_dtype() == torch.float32


def scaled() -> tuple[MixedPrecision, torch.nn.Parameter, torch.optim.SGD]:
    weight = torch.nn.Parameter(torch.zeros(()))
    return MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=8.0)), weight, torch.optim.SGD([weight], lr=1.0)


def test_unscaling_happens_once_between_updates() -> None:
    plugin, weight, optimizer = scaled()
    plugin.scale(weight * 3).backward()
    assert weight.grad.item() == 24.0
    plugin.unscale(optimizer)
    plugin.unscale(optimizer)
    assert weight.grad.item() == 3.0
    plugin.step(optimizer)
    assert (weight.item(), plugin.stepped) == (-3.0, True)
    plugin.update()
    assert not plugin.stepped


def test_an_update_without_a_step_does_nothing() -> None:
    plugin, _, _ = scaled()
    plugin.update()
    assert plugin.scaler.get_scale() == 8.0


def test_the_scale_is_state() -> None:
    plugin, weight, optimizer = scaled()
    plugin.scale(weight * float("inf")).backward()
    plugin.step(optimizer)
    plugin.update()
    other = MixedPrecision("16-mixed")
    other.load_state_dict(plugin.state_dict())
    assert other.scaler.get_scale() == 4.0
    other.load_state_dict({})
    assert other.scaler.get_scale() == 4.0
    assert MixedPrecision("bf16-mixed").state_dict() == {}
    assert Precision().state_dict() == {}


def test_bf16_mixed_hands_a_closure_to_the_optimizer() -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def closure() -> torch.Tensor:
        weight.grad = torch.tensor(2.0)
        return torch.tensor(5.0)

    assert MixedPrecision("bf16-mixed").step(optimizer, closure).item() == 5.0
    assert weight.item() == -2.0
