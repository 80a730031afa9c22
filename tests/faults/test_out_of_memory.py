"""`Trainer(recover_oom=True)`: a step that runs out of memory is computed again in parts, on all ranks, with the same update."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import GradientSync
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from trainer import MisconfigurationException


class RunsOut(torch.autograd.Function):
    """Has memory in forward and none in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory (a test).")


class Hungry(Net):
    """Has memory for so many samples at once, on one rank or on all; keeps the sizes of the parts it was given."""

    def __init__(self, most: int, where: str = "forward", rank: int | None = None, counts: bool = False) -> None:
        super().__init__()
        self.most, self.where, self.rank, self.counts = most, where, rank, counts
        self.sizes: list[int] = []
        self.hooks: list[str] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.sizes.append(len(batch))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if len(batch) > self.most and self.rank in (None, self.global_rank):
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory (a test).")
            if self.where == "text":
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes.")
            loss = RunsOut.apply(loss)
        return {"loss": loss, "count": len(batch), "seen": batch_idx} if self.counts else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks.append(f"start {batch_idx}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append(f"end {batch_idx} {outputs['loss'].item():.10f}")


def fit(most: int, batch: int = 6, module: dict[str, Any] | None = None, rows: int = 22, **settings: Any) -> dict[str, Any]:
    settings = {"recover_oom": True, "max_epochs": 2, **settings}
    module, trainer = Hungry(most, **module or {}), quiet(accelerator="cpu", precision="64-true", **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader(Net.rows(rows, torch.float64), batch))
    told = [str(w.message).partition(":")[0] for w in told if "memory" in str(w.message)]
    metrics = {name: float(number) for name, number in trainer.callback_metrics.items()}
    return {"weights": weights(module), "told": told, "sizes": module.sizes, "metrics": metrics, "hooks": module.hooks, "step": trainer.global_step}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same(found["weights"], expected["weights"])
    assert found["step"] == expected["step"]
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert [hook[:7] for hook in found["hooks"]] == [hook[:7] for hook in expected["hooks"]]


@pytest.mark.parametrize("where", ["forward", "backward", "text"])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"module": {"counts": True}}], ids=str)
def test_the_update_is_that_of_the_whole_batch(where: str, settings: dict[str, Any]) -> None:
    module = {"where": where, **settings.pop("module", {})}
    whole = fit(100, module=module, recover_oom=False, **settings)
    found = fit(2, module=module, **settings)
    same(found, whole)  # batches of 6, 6, 6 and 4 samples
    assert found["told"] == ["Out of memory in step 1"]
    assert found["sizes"][-8:-4] == [2, 2, 1, 1] and found["sizes"][-4:] == [1] * 4  # the split stays: four parts a batch
    assert sum(size > 2 for size in found["sizes"]) == 2


def test_replicas_of_one_process_as_well() -> None:
    same(fit(2, strategy="dp", devices=2), fit(100, recover_oom=False))


def test_what_an_attempt_held_is_free_ahead_of_the_next() -> None:
    class Watched(Hungry):
        held: Any = None
        alive: tuple[bool, ...] = ()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if self.held is not None:
                self.alive += (self.held() is not None,)
            hidden = self.layers[0](batch[:, :4])
            self.held = weakref.ref(hidden)
            return super().training_step(batch, batch_idx) + 0 * hidden.sum()

    module = Watched(2)
    with pytest.warns(UserWarning, match="4 parts"):
        quiet(accelerator="cpu", precision="64-true", max_steps=1, recover_oom=True).fit(module, loader(Net.rows(6, torch.float64), 6))
    assert module.alive == (False,) * 5  # 6, then 3, then 2, 2, 1, 1 samples


def test_metric_objects_count_each_sample_once() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Metered(Hungry):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.mean.update(batch[:, 0].mean(), weight=len(batch))
            self.all.update(batch[:, 0])
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.seen = self.all.compute()

    module, rows = Metered(2), Net.rows(12, torch.float64)
    trainer = quiet(accelerator="cpu", precision="64-true", max_epochs=1, recover_oom=True)
    with pytest.warns(UserWarning, match="4 parts"):
        trainer.fit(module, loader(rows, 6))
    torch.testing.assert_close(module.seen.double(), rows[:, 0], rtol=1e-6, atol=0)
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(rows[:, 0].mean().item(), rel=1e-6)


def on_ranks() -> dict[str, Any]:
    """Only rank 1 runs out; the last step has samples for rank 0 alone."""
    two = {"strategy": "ddp", "devices": 2, "rows": 19, "batch": 3}
    found = {}
    for where in ("forward", "backward"):
        found[where] = fit(1, module={"where": where, "rank": 1}, bad_loss="skip" if where == "forward" else None, **two)
    return {**found, "window": fit(1, module={"rank": 1}, accumulate_grad_batches=2, **two)}


def test_all_ranks_do_it_when_one_runs_out() -> None:
    for rank, found in enumerate(run_ranks(on_ranks)):
        for key, result in found.items():
            whole = fit(100, rows=19, recover_oom=False, accumulate_grad_batches=1 + (key == "window"))
            assert_same(result["weights"], whole["weights"])
            assert result["metrics"]["loss_epoch"] == pytest.approx(whole["metrics"]["loss_epoch"], rel=1e-6)
            assert result["told"] == ([] if rank else ["Out of memory in step 1"])
            assert set(result["sizes"][-6:]) == {1}


def hopeless() -> str:
    try:
        fit(0, strategy="ddp", devices=2, module={"rank": 1})
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_run_ends_when_nothing_is_left_to_cut() -> None:
    first, second = run_ranks(hopeless)
    assert second.startswith("OutOfMemoryError: CUDA out of memory (a test).\nrecover_oom=True cannot help: the batch is of one sample by now")
    assert first and "OutOfMemory" not in first  # it waits for gradients that do not come, and hears that its peer is gone


def test_a_checkpoint_remembers_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    trainer, module = quiet(accelerator="cpu", precision="64-true", max_steps=2, recover_oom=True), Hungry(3)
    data = loader(Net.rows(22, torch.float64), 6)
    with pytest.warns(UserWarning, match="in step 1: from here on each batch is computed in 2 parts"):
        trainer.fit(module, data)
    trainer.save_checkpoint(path)
    again = Hungry(3)
    quiet(accelerator="cpu", precision="64-true", max_epochs=2, recover_oom=True).fit(again, data, ckpt_path=path)
    assert again.sizes[:3] == [3, 3, 2] and max(again.sizes) == 3
    assert_same(weights(again), fit(100, recover_oom=False)["weights"])


class Named(Hungry):
    """Batches with names, and a number that belongs to all samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(batch["names"]) == len(batch["rows"]) and batch["scale"].ndim == 0
        assert batch["names"] == [str(int(row[0] * 1000)) for row in batch["rows"]]
        return super().training_step(batch["rows"], batch_idx)


def test_names_are_cut_with_their_samples() -> None:
    rows = Net.rows(6, torch.float64)
    batch = {"rows": rows, "names": [str(int(row[0] * 1000)) for row in rows], "scale": torch.tensor(1.0)}
    module = Named(2)
    with pytest.warns(UserWarning, match="4 parts"):
        quiet(accelerator="cpu", precision="64-true", max_steps=1, recover_oom=True).fit(module, [batch])
    assert module.sizes == [6, 3, 2, 2, 1, 1]


def test_other_errors_go_through_and_batches_without_samples_are_named() -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("shapes do not match") if isinstance(batch, torch.Tensor) else torch.OutOfMemoryError("memory is out")

    trainer = quiet(accelerator="cpu", max_steps=1, recover_oom=True)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.fit(Broken(), [torch.ones(4)])
    with pytest.raises(torch.OutOfMemoryError, match="memory is out\nrecover_oom=True cannot help"):
        trainer.fit(Broken(), [[torch.ones(4), torch.ones(3)]])


def test_where_it_cannot_work() -> None:
    with pytest.raises(MisconfigurationException, match="cannot work with strategy='fsdp'"):
        quiet(accelerator="cpu", strategy="fsdp", devices=2, recover_oom=True)


def with_hook() -> None:
    quiet(accelerator="cpu", strategy="ddp", devices=2, max_steps=1, recover_oom=True, callbacks=[GradientSync(comm_hook="bf16")]).fit(
        Net(), loader(Net.rows(4), 2)
    )


def test_a_communication_hook_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="without a comm_hook"):
        run_ranks(with_hook)
