"""`Trainer(bad_loss=)`: a NaN, infinite or missing loss ends the run, or its whole step is left out, on all ranks alike."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from callbacks import Callback, GradientSync
from tests.helpers.modules import Net, Scalar, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.integration.test_gates import Logged, reads_of
from trainer import BadLossError, MisconfigurationException

BAD = 6  # the sample that spoils its batch: step 2 of six, whatever way four samples a step are shared out
NAN, INF, NONE = math.nan, math.inf, -1e9  # what is in its place; the module answers NONE with None


def rows(value: float | None = NAN) -> torch.Tensor:
    data = Net.rows(24, torch.float64)
    if value is not None:
        data[BAD, 4] = value
    return data


class Bad(Net):
    """Logs its loss, and returns None for a batch with the mark."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if (batch == NONE).any():
            return None
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}}


def fit(value: float = NAN, batch: int = 4, callbacks: Any = None, **settings: Any) -> dict[str, Any]:
    """Train one epoch of 24 samples; return what came of it."""
    module, trainer = Bad(), quiet(accelerator="cpu", precision="64-true", max_epochs=1, callbacks=callbacks, **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader(rows(value), batch))
    told = [str(w.message) for w in told if "loss" in str(w.message)]
    metrics = {name: float(number) for name, number in trainer.callback_metrics.items()}
    return {"weights": weights(module), "told": told, "step": trainer.global_step, "metrics": metrics}


def by_hand(data: torch.Tensor | None = None, left_out: int = 1) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights, and the mean loss, of five steps of four samples: the second of six is left out, and the schedule waits."""
    module = Net().double()
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for step, batch in enumerate((rows(None) if data is None else data).split(4)):
        if step != left_out:
            optimizer.zero_grad()
            loss = module.loss(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            optimizer.param_groups[0]["lr"] *= 0.9
    return weights(module), sum(losses) / len(losses)


def check(found: dict[str, Any], where: str) -> None:
    expected, mean = by_hand()
    assert_same(found["weights"], expected)
    assert found["step"] == 6
    assert found["metrics"]["loss_epoch"] == pytest.approx(mean, rel=1e-6)  # what the step logged is forgotten
    assert found["told"] == [f"Bad loss in step 2 (epoch 0): {where}. The step is left out on all ranks."]


# -- leaving steps out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "settings", "where"),
    [
        (NAN, {}, "nan on rank 0, batch 1, samples [4, 5, 6, 7]"),
        (INF, {"batch": 2, "accumulate_grad_batches": 2}, "inf on rank 0, batch 3, samples [6, 7]"),
        (NONE, {"batch": 1, "accumulate_grad_batches": 4}, "None on rank 0, batch 6, samples [6]"),
        (NAN, {"strategy": "dp", "devices": 2}, "nan on rank 0, batch 1, samples [4, 5, 6, 7]"),
    ],
    ids=["nan", "inf-window", "none-window", "nan-dp"],
)
def test_a_bad_batch_leaves_out_its_whole_step(value: float, settings: dict[str, Any], where: str) -> None:
    check(fit(value, bad_loss="skip", **settings), where)


def fits() -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "ddp_find_unused_parameters_true", "fsdp"):
        found[strategy, "nan"] = fit(NAN, 1, strategy=strategy, devices=2, bad_loss="skip", accumulate_grad_batches=2)
        if strategy != "fsdp":
            found[strategy, "none"] = fit(NONE, 1, strategy=strategy, devices=2, bad_loss="skip", accumulate_grad_batches=2)
    last = fit(NONE, 1, strategy="ddp", devices=2, bad_loss="skip", accumulate_grad_batches=2, callbacks=[GradientSync(2, average_every=1)])
    return {**found, "local": last}


def test_ranks_leave_out_the_step_of_one_process() -> None:
    first, second = run_ranks(fits)
    for key, found in first.items():
        if key == "local":  # post-local SGD averages weights: it is not the run of one process, but it left out the same step
            assert found["step"] == 6 and all(t.isfinite().all() for t in found["weights"].values())
            continue
        check(found, f"{'nan' if key[1] == 'nan' else 'None'} on rank 0, batch 3, samples [6]")
        assert_same(second[key]["weights"], found["weights"], atol=0)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows())


def test_samples_of_an_iterable_are_unknown() -> None:
    module = Net()
    with pytest.raises(BadLossError, match=r"Bad loss in step 4 \(epoch 0\): nan on rank 0, batch 3, samples \[unknown\]"):
        quiet(accelerator="cpu", precision="64-true", max_epochs=1, bad_loss="raise").fit(module, torch.utils.data.DataLoader(Stream(), 2))


class Refuses(Net):
    """Ends its first epoch ahead of the second batch of a window, whose first batch has left gradients on its rank."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


def refused_under_fsdp() -> dict[str, torch.Tensor]:
    module = Refuses()
    quiet(accelerator="cpu", precision="64-true", strategy="fsdp", devices=2, max_epochs=2, accumulate_grad_batches=2).fit(module, loader(rows(None), 1))
    return weights(module)


def test_a_window_that_a_hook_ends_leaves_no_gradient_behind() -> None:
    module = Net().double()
    optimizer = module.configure_optimizers()
    for batch in [*rows(None).split(4)[:1], *rows(None).split(4)]:
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    assert_same(run_ranks(refused_under_fsdp)[0], weights(module))


def none_under_fsdp() -> None:
    class Late(Bad):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 0 else loss

    quiet(accelerator="cpu", strategy="fsdp", devices=2, max_steps=1, bad_loss="skip").fit(Late(), loader(Net.rows(4), 2))


def test_none_is_refused_where_ranks_wait_in_the_forward() -> None:
    with pytest.raises(MisconfigurationException, match="not with FSDP"):
        run_ranks(none_under_fsdp)


# -- ending the run --------------------------------------------------------------------------------------------------------


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def test_raise_comes_ahead_of_the_update_and_a_resume_goes_on_there(tmp_path: Path) -> None:
    with pytest.raises(BadLossError, match=r"step 2 \(epoch 0\): nan on rank 0, batch 1, samples \[4, 5, 6, 7\]. The weights are those before"):
        fit(bad_loss="raise", callbacks=[Saves(tmp_path / "before.ckpt")])
    table = torch.load(tmp_path / "before.ckpt", weights_only=True)
    assert table["global_step"] == 1
    module, trainer = Bad(), quiet(accelerator="cpu", precision="64-true", max_epochs=1)
    trainer.fit(module, loader(rows(None), 4), ckpt_path=tmp_path / "before.ckpt")  # the sample is repaired
    assert_same(weights(module), by_hand(left_out=-1)[0])


def raising() -> str:
    try:
        fit(NAN, 2, strategy="ddp", devices=2, bad_loss="raise", accumulate_grad_batches=1)
    except BadLossError as error:
        return str(error)
    return ""


def test_all_ranks_raise() -> None:
    texts = run_ranks(raising)
    assert texts[0] == texts[1] != "" and "nan on rank 0, batch 1, samples [4, 6]" in texts[0]


def test_stop_ends_the_run_at_the_boundary_with_good_weights(tmp_path: Path) -> None:
    class Asks(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.at_boundary(lambda trainer: trainer.save_checkpoint(tmp_path / "last.ckpt"))

    found = fit(bad_loss="stop", callbacks=[Asks()])
    assert found["step"] == 2 and len(found["told"]) == 1
    table = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert table["global_step"] == 2
    assert_same(table["state_dict"], found["weights"])
    assert_same(found["weights"], by_hand(rows(None)[:4])[0])


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_policy_reads_the_device_once_a_step(accumulate: int, tmp_path: Path) -> None:
    found = reads_of(Logged(), tmp_path, log_every_n_steps=0, bad_loss="skip", accumulate_grad_batches=accumulate)
    assert [name for name, _ in found] == ["tolist"] * (20 // accumulate)


# -- without a policy, and where there can be none ---------------------------------------------------------------------------


def test_by_default_published_numbers_tell_of_it_once() -> None:
    found = fit(log_every_n_steps=3)
    assert len(found["told"]) == 1
    assert found["told"][0].startswith("'loss_step' is nan in step 3; the numbers before that were published are of step 0.")
    assert fit(log_every_n_steps=0)["told"] == []


class Manual(Scalar):
    automatic_optimization = False


class Closing(Scalar):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(optimizer_closure)


@pytest.mark.parametrize("module", [Manual, Closing])
@pytest.mark.parametrize("settings", [{"bad_loss": "skip"}, {"recover_oom": True}], ids=str)
def test_steps_that_the_module_takes_cannot_be_watched(module: type[Scalar], settings: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match="watch the steps that the trainer takes"):
        quiet(accelerator="cpu", max_steps=1, **settings).fit(module(), loader([1]))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="Did you mean 'skip'"):
        quiet(bad_loss="skipp")
