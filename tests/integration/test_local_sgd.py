"""Post-local SGD: ranks step on their own and average weights now and then, against a loop written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import Callback, GradientSync
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import SaveAt
from trainer import DDPStrategy, MisconfigurationException

ROWS, BATCH = 36, 3  # of each rank: 6 steps an epoch


class Curve(Net):
    """In 64 bits; keeps the loss of every step, and the weights that validation and the step's end see."""

    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        self.double()
        self.losses: list[float] = []
        self.validated: list[Any] = []
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.drop(torch.ones(1, dtype=torch.float64)).sum().clamp(0.5, 1.0)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append((self.trainer.global_step, flat(self)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Plain(Curve):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss


def flat(module: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def fit(module: Any, every: int = 2, warmup: int = 0, ckpt_path: Any = None, callbacks: Any = (), rows: int = ROWS, **settings: Any) -> Any:
    sync = GradientSync(settings.pop("accumulate", 1), average_every=every, warmup_steps=warmup)
    trainer = quiet(**{
        "accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 2, "seed": 0, "callbacks": [sync, *callbacks], **settings
    })  # fmt: skip
    data = Net.rows(rows, torch.float64)
    trainer.fit(module, loader(data, BATCH), loader(data[:4], 2), ckpt_path=ckpt_path)
    return trainer


class Ends(Callback):
    """Keeps the rank's weights after every step (GradientSync comes first)."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights.append(flat(module))


def by_hand(every: int, warmup: int, accumulate: int = 1, clip: float | None = None) -> list[list[torch.Tensor]]:
    """Return the weights of both ranks after every step."""
    models = [Plain(), Plain()]
    made = [m.configure_optimizers() for m in models]
    optimizers, schedulers = [x["optimizer"] for x in made], [x["lr_scheduler"] for x in made]
    data, found, steps = Net.rows(ROWS, torch.float64), [[], []], 0
    shares = [data[rank::2].split(BATCH) for rank in range(2)]
    for _ in range(2):
        for first in range(0, len(shares[0]), accumulate):
            for rank, model in enumerate(models):
                optimizers[rank].zero_grad()
                window = shares[rank][first : first + accumulate]
                for batch in window:
                    (model.loss(batch) / len(window)).backward()
            if steps < warmup:
                for pair in zip(*(m.parameters() for m in models), strict=True):
                    mean = sum(p.grad for p in pair) / 2
                    for p in pair:
                        p.grad = mean.clone()
            for rank, model in enumerate(models):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizers[rank].step()
            steps += 1
            if steps > warmup and (steps - warmup) % every == 0:
                with torch.no_grad():
                    for pair in zip(*(m.parameters() for m in models), strict=True):
                        mean = sum(pair) / 2
                        for p in pair:
                            p.copy_(mean)
            for rank, model in enumerate(models):
                found[rank].append(flat(model))
        for scheduler in schedulers:
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("every", "warmup", "settings"),
    [(2, 0, {}), (3, 5, {}), (4, 1, {"accumulate": 4}), (5, 2, {"gradient_clip_val": 0.1}), (100, 0, {})],
)
def test_weights_of_every_step_are_those_of_a_loop_by_hand(every: int, warmup: int, settings: dict[str, Any]) -> None:
    """Also with accumulation and a short last window, and with clipping."""

    def run() -> Any:
        module, ends = Plain(), Ends()
        fit(module, every, warmup, callbacks=[ends], **settings)
        per = settings.get("accumulate", 1)
        return ends.weights[per - 1 :: per] if per == 1 else [ends.weights[i] for i in (3, 5, 9, 11)], flat(module)

    wanted = by_hand(every, warmup, settings.get("accumulate", 1), settings.get("gradient_clip_val"))
    ranks = run_ranks(run)
    for rank, (weights, final) in enumerate(ranks):
        assert len(weights) == len(wanted[rank])
        for mine, theirs in zip(weights, wanted[rank], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(final, (wanted[0][-1] + wanted[1][-1]) / 2, rtol=0, atol=1e-12)
    assert torch.equal(ranks[0][1], ranks[1][1])


def test_with_sgd_and_averages_of_every_step_it_is_ddp() -> None:
    """Also where the last batch is short on one rank: 7 samples."""

    def run(callbacks: Any) -> Any:
        module = Net().double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.configure_optimizers = lambda: optimizer
        trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, seed=0, callbacks=callbacks)
        trainer.fit(module, loader(Net.rows(7, torch.float64), 2))
        return flat(module)

    local, ddp = run_ranks(run, callbacks=[GradientSync(average_every=1)]), run_ranks(run, callbacks=[])
    torch.testing.assert_close(local[0], ddp[0], rtol=0, atol=1e-12)
    assert torch.equal(local[0], local[1])


def test_validation_sees_the_mean_and_changes_nothing() -> None:
    def run(interval: int) -> Any:
        module, ends = Plain(), Ends()
        fit(module, 4, 1, callbacks=[ends], val_check_interval=interval)
        return module.validated, ends.weights

    every, never = run_ranks(run, interval=1), run_ranks(run, interval=6)
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(every[rank][1], never[rank][1], strict=True))
        for step, seen in every[rank][0]:
            mean = (every[0][1][step - 1] + every[1][1][step - 1]) / 2
            torch.testing.assert_close(seen, mean, rtol=0, atol=1e-14)
    assert [step for step, _ in every[0][0]] == list(range(1, 13))


@pytest.mark.parametrize("warmup", [0, 3])
def test_resume_goes_on_to_the_bit_on_all_ranks(tmp_path: Path, warmup: int) -> None:
    """Each rank has weights, Adam's moments and random numbers of its own."""

    def run(folder: str) -> Any:
        whole, ends = Curve(), Ends()
        fit(whole, 4, warmup, callbacks=[ends])
        found = []
        for step in (1, 2, 4, 5, 6, 7, 11):
            path = f"{folder}/{step}.ckpt"
            first, rest, before, after = Curve(), Curve(), Ends(), Ends()
            fit(first, 4, warmup, callbacks=[before, SaveAt(step, path)], max_steps=step)
            fit(rest, 4, warmup, ckpt_path=path, callbacks=[after])
            same = torch.equal(torch.stack(ends.weights), torch.stack(before.weights + after.weights))
            found.append((same, first.losses + rest.losses == whole.losses, torch.equal(flat(whole), flat(rest))))
        return found

    for found in run_ranks(run, folder=str(tmp_path)):
        assert found == [(True, True, True)] * 7


def test_checkpoint_holds_the_mean_and_resumes_on_one_process(tmp_path: Path) -> None:
    def run(folder: str) -> Any:
        ends = Ends()
        fit(Plain(), 100, 0, callbacks=[ends, SaveAt(5, f"{folder}/5.ckpt")], max_steps=8)
        return ends.weights

    ranks = run_ranks(run, folder=str(tmp_path))
    table = torch.load(tmp_path / "5.ckpt", weights_only=True)
    module = Plain()
    module.load_state_dict(table["state_dict"])
    torch.testing.assert_close(flat(module), (ranks[0][4] + ranks[1][4]) / 2, rtol=0, atol=1e-14)
    alone = Plain()
    trainer = quiet(accelerator="cpu", max_epochs=2, seed=0)
    trainer.fit(alone, loader(Net.rows(ROWS, torch.float64), 2 * BATCH), ckpt_path=tmp_path / "5.ckpt")
    assert trainer.global_step == 12 and torch.isfinite(flat(alone)).all()


def test_manual_optimization_steps_locally_too() -> None:
    class Manual(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.weights: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self.w * batch).mean())
            optimizer.step()
            self.weights.append(self.w.item())

    def run() -> Any:
        module = Manual()
        trainer = quiet(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, seed=0, callbacks=[GradientSync(average_every=2)]
        )
        trainer.fit(module, loader(range(1, 9)))
        return module.weights, module.w.item()

    (a, end), (b, _) = run_ranks(run)
    assert a == [-1, -4, -10, -17] and b == [-2, -6, -11, -19]  # averages of step 2: -5, of step 4: -18
    assert end == -18


def test_what_cannot_be_averaged_is_said() -> None:
    for wrong in ({"average_every": 0}, {"average_every": 1.5}, {"average_every": 2, "warmup_steps": -1}, {"warmup_steps": 3}):
        with pytest.raises(MisconfigurationException, match="average_every|warmup_steps"):
            GradientSync(**wrong)
    with pytest.raises(MisconfigurationException, match="'single_device' has no ranks"):
        quiet(accelerator="cpu", max_epochs=1, callbacks=[GradientSync(average_every=2)]).fit(Scalar(), loader([1]))
    with pytest.raises(MisconfigurationException, match="static_graph=True"):
        run_ranks(_fit_with, settings={"strategy": DDPStrategy(static_graph=True)})
    with pytest.raises(MisconfigurationException, match="16-mixed.*bf16-mixed"):
        run_ranks(_fit_with, settings={"precision": "16-mixed"})
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        run_ranks(_fit_with, settings={}, optimizer=torch.optim.LBFGS)


def _fit_with(settings: dict[str, Any], optimizer: Any = None) -> None:
    module = Scalar()
    if optimizer is not None:
        module.configure_optimizers = lambda: optimizer(module.parameters())
    more = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1, **settings}
    quiet(callbacks=[GradientSync(average_every=2)], **more).fit(module, loader([1.0, 2.0]))
