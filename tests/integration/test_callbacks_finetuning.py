"""BaseFinetuning and BackboneFinetuning: what is trained when, at which rate, and that a resume between the stages is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import BackboneFinetuning, BaseFinetuning, GradientMonitor, GradientSync
from tests.helpers.modules import assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, assert_equal
from trainer import MisconfigurationException, Trainer, TrainModule

ROWS = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))


class Tuned(TrainModule):
    """A backbone with BatchNorm and a head; the optimizer gets at first what is trainable."""

    optimizer: Any = None
    schedule: Any = None

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.Dropout(0.2))
            self.head = nn.Linear(3, 1)
        self.rates: list[tuple[int, list[float]]] = []
        self.end: Any = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.rates.append((self.global_step, [group["lr"] for group in self.optimizers().param_groups]))
        return nn.functional.mse_loss(self.head(self.backbone(batch[:, :4])), batch[:, 4:])

    def on_train_end(self) -> None:
        self.end = self.optimizers().state_dict()

    def configure_optimizers(self) -> Any:
        made = (self.optimizer or torch.optim.AdamW)([p for p in self.parameters() if p.requires_grad], lr=0.08)
        return made if self.schedule is None else ([made], [{"scheduler": self.schedule(made), "interval": "epoch"}])


class Staged(BaseFinetuning):
    """The last linear layer of the backbone is trained from epoch 1 on, the first from epoch 2 on; BatchNorm stays frozen until then."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[3], optimizer)
        elif epoch == 2:
            self.unfreeze_and_add_param_group([module.backbone[0], module.backbone[1]], optimizer, lr=0.002)


def fit(callback: Any, module: Any = None, folder: Any = None, resume: Any = None, **settings: Any) -> Tuned:
    module = module or Tuned()
    extra = [] if folder is None else [EveryStep(folder)]
    data = loader(ROWS, batch_size=settings.pop("batch_size", 4), shuffle=settings.pop("shuffle", True))
    trainer = quiet(accelerator="cpu", **{"max_epochs": 4, "seed": 4, "precision": "64-true", **settings, "callbacks": [callback, *extra]})
    trainer.fit(module, data, ckpt_path=resume)
    return module


def by_hand(epochs: int = 4) -> nn.Module:
    """The same three stages in a plain loop, without dropout and shuffling, with SGD."""
    module = Tuned().double()
    module.backbone[4] = nn.Identity()
    layers, norm = module.backbone, module.backbone[1]
    for p in layers.parameters():
        p.requires_grad = False
    norm.track_running_stats = False
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.08)
    for epoch in range(epochs):
        if epoch == 1:
            layers[3].requires_grad_(True)
            optimizer.add_param_group({"params": list(layers[3].parameters()), "lr": 0.008})
        if epoch == 2:
            layers[0].requires_grad_(True), norm.requires_grad_(True)
            norm.track_running_stats = True
            optimizer.add_param_group({"params": [*layers[0].parameters(), *norm.parameters()], "lr": 0.002})
        for rows in ROWS.double().split(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(module.head(layers(rows[:, :4])), rows[:, 4:]).backward()
            optimizer.step()
    return module


class Plain(Tuned):
    optimizer = torch.optim.SGD

    def __init__(self) -> None:
        super().__init__()
        self.backbone[4] = nn.Identity()


def test_stages_are_those_of_a_loop_by_hand() -> None:
    for epochs in (1, 2, 4):
        assert_same(weights(fit(Staged(), Plain(), shuffle=False, max_epochs=epochs)), weights(by_hand(epochs)), atol=0)
    frozen, trained = weights(Plain().double()), weights(fit(Staged(), Plain(), shuffle=False, max_epochs=2))
    moved = {name for name, before in frozen.items() if not torch.equal(before, trained[name])}
    assert moved == {"head.weight", "head.bias", "backbone.3.weight", "backbone.3.bias"}  # nor the statistics of BatchNorm


@pytest.mark.parametrize("kind", [Staged, lambda: BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)])
def test_a_resume_between_and_inside_stages_is_exact_to_the_bit(kind: Any, tmp_path: Path) -> None:
    whole = fit(kind(), folder=tmp_path)
    for step in (2, 4, 6, 8, 11, 12):  # inside and at the end of the epochs, 4 steps each
        resumed = fit(kind(), resume=tmp_path / f"step={step}.ckpt")
        assert resumed.rates == [entry for entry in whole.rates if entry[0] >= step]
        assert_same(weights(resumed), weights(whole), atol=0)
        assert_equal(resumed.end, whole.end)


def test_a_second_fit_goes_on_with_the_groups_of_the_first(tmp_path: Path) -> None:
    whole = fit(Staged(), Plain(), shuffle=False, max_epochs=4)
    module, data = Plain(), loader(ROWS, batch_size=4)
    trainer = quiet(accelerator="cpu", max_steps=10, seed=4, precision="64-true", callbacks=[Staged()])  # inside of the last stage
    trainer.fit(module, data)
    trainer.max_steps = 16
    trainer.fit(module, data)
    assert module.rates == whole.rates
    assert_same(weights(module), weights(whole), atol=0)  # SGD without momentum keeps nothing between fits


@pytest.mark.filterwarnings("error:.*in the optimizer already")  # BatchNorm layers, which are trained from the beginning
def test_the_backbone_follows_its_rate() -> None:
    module = fit(BackboneFinetuning(1, lambda epoch: 2.0 if epoch < 4 else 100.0, backbone_initial_ratio_lr=0.25))
    rates = {tuple(entry) for _, entry in module.rates}
    assert [sorted(rates)[i] for i in range(3)] == [(0.08,), (0.08, 0.02), (0.08, 0.04)]
    assert max(rates) == (0.08, 0.08)  # 4.0, but for the alignment
    own = fit(BackboneFinetuning(2, backbone_initial_lr=0.5, should_align=False)).rates
    assert [entry for _, entry in own[::4]] == [[0.08], [0.08], [0.08, 0.5], [0.08, 1.0]]


def test_a_backbone_may_be_unfrozen_earlier_than_was_meant_and_anew(tmp_path: Path) -> None:
    fit(BackboneFinetuning(9), folder=tmp_path, max_epochs=2)
    earlier = BackboneFinetuning(1, backbone_initial_lr=0.01)
    assert fit(earlier, resume=tmp_path / "step=8.ckpt").rates[::4] == [(8, [0.08, 0.01]), (12, [0.08, 0.02])]
    assert earlier.previous_backbone_lr == 0.02
    assert [rates for _, rates in fit(earlier, max_epochs=3).rates[::4]] == [[0.08], [0.08, 0.01], [0.08, 0.02]]  # a new training


@pytest.mark.parametrize("gamma", ["step", "lambda"])
def test_schedulers_take_the_new_group_along(gamma: str, tmp_path: Path) -> None:
    class Scheduled(Tuned):
        schedule = staticmethod(
            (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
            if gamma == "step"
            else (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch))
        )

    whole = fit(Staged(), Scheduled(), tmp_path)
    assert [len(rates) for _, rates in whole.rates[::4]] == [1, 2, 3, 3]
    assert [rates[0] for _, rates in whole.rates[::4]] == [0.08, 0.04, 0.02, 0.01]
    for step in (6, 9):
        resumed = fit(Staged(), Scheduled(), resume=tmp_path / f"step={step}.ckpt")
        assert resumed.rates == whole.rates[step:]
        assert_same(weights(resumed), weights(whole), atol=0)


def test_mistakes_are_named(tmp_path: Path) -> None:
    class Headless(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.body = self.backbone
            del self.backbone

    with pytest.raises(MisconfigurationException, match="Headless has no layer self.backbone"):
        fit(BackboneFinetuning(), Headless())

    class All(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="2 of the parameters are in the optimizer already"):
        module = fit(Staged(), All(), max_epochs=2)
    assert module.rates[-1] == (7, [0.1])

    class Wider(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head2 = self.head
            del self.head

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {k.replace("head", "head2"): v for k, v in checkpoint["state_dict"].items()}

    fit(Staged(), Plain(), tmp_path, max_epochs=1)
    with pytest.raises(MisconfigurationException, match="names the parameter 'head.bias', which the module does not have"):
        fit(Staged(), Wider(), resume=tmp_path / "step=2.ckpt")


def _on_ranks(strategy: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    whole = fit(Staged(), Sliced(), folder, shuffle=False, batch_size=2, strategy=strategy, devices=2)
    resumed = fit(Staged(), Sliced(), resume=folder / "step=6.ckpt", shuffle=False, batch_size=2, strategy=strategy, devices=2)
    return [weights(whole), weights(resumed)]


class Sliced(Plain):
    """Without BatchNorm, whose statistics are those of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone[1] = nn.LayerNorm(6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_unfrozen_layers_together(strategy: str, tmp_path: Path) -> None:
    alone = weights(fit(Staged(), Sliced(), shuffle=False))
    ranks = run_ranks(_on_ranks, strategy=strategy, folder=tmp_path)
    for whole, resumed in ranks if strategy == "ddp" else ranks[:1]:  # FSDP brings all weights together on rank 0
        assert_same(whole, alone, atol=1e-12)
        assert_same(resumed, whole, atol=0)


def _with_power_sgd() -> dict[str, torch.Tensor]:
    sync = GradientSync(comm_hook="powersgd", comm_options={"start_powerSGD_iter": 2, "min_compression_rate": 0.1})
    module = Sliced()
    trainer = quiet(accelerator="cpu", seed=4, max_epochs=4, strategy="ddp", devices=2, callbacks=[Staged(), sync])
    trainer.fit(module, loader(ROWS, batch_size=2))
    return weights(module)


def test_power_sgd_begins_anew_with_the_new_buckets() -> None:
    first, second = run_ranks(_with_power_sgd)
    assert_same(first, second, atol=0)
    moved = [name for name, before in weights(Sliced()).items() if not torch.equal(before, first[name])]
    assert len(moved) == len(first)


@pytest.mark.parametrize("call", [Staged().regroup, GradientMonitor().on_fit_start])
def test_layers_on_other_ranks_are_refused(call: Any) -> None:
    module = Plain()
    module.head.to("meta")
    with pytest.raises(MisconfigurationException, match="strategy 'single_device' keeps layers on other ranks"):
        call(Trainer(accelerator="cpu", logger=False), module)


def test_rewrap_belongs_into_a_run() -> None:
    with pytest.raises(MisconfigurationException, match="rewrap works inside a run only"):
        Trainer(accelerator="cpu", logger=False).rewrap()
