"""C04 and C05: a resume inside accumulation and of learning-rate schedules, from every step."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from callbacks import ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.resume import EveryStep
from trainer import TrainModule

# x = 1..5 in windows of 3, weights 1/size, w falls by the mean of its window: 2, then 4.5, twice
C04 = [-2.0, -6.5, -8.5, -13.0]


def accumulate(max_steps=-1, folder=None, resume_from=None):
    module = Scalar()
    callbacks = [ModelCheckpoint(folder, "last", save_top_k=0, save_last=True)] if folder else []
    trainer = quiet(max_epochs=2, max_steps=max_steps, accumulate_grad_batches=3, callbacks=callbacks)
    trainer.fit(module, loader(range(1, 6)), ckpt_path=resume_from)
    assert trainer.global_step == (4 if max_steps == -1 else max_steps)
    return module.w.item()


def test_c04_any_interruptions_give_the_same_weight(tmp_path):
    assert accumulate() == C04[-1]
    for count in (1, 2, 3):
        for stops in combinations((1, 2, 3), count):
            resume_from = None
            for stop in (*stops, -1):
                folder = tmp_path / f"{stops}"
                weight = accumulate(stop, folder, resume_from)
                assert weight == C04[stop - 1 if stop > 0 else -1]
                resume_from = folder / "last.ckpt"


def test_c04_a_save_inside_a_window_is_written_at_its_end(tmp_path):
    class Saving(Scalar):
        def training_step(self, batch, batch_idx):
            self.trainer.save_checkpoint(tmp_path / f"{self.current_epoch}-{batch_idx}.ckpt")
            return super().training_step(batch, batch_idx)

    quiet(max_epochs=2, accumulate_grad_batches=3).fit(Saving(), loader(range(1, 6)))
    for epoch in range(2):
        for batch in range(5):
            path = tmp_path / f"{epoch}-{batch}.ckpt"
            step = epoch * 2 + batch // 3 + 1
            table = torch.load(path, weights_only=True)
            assert table["global_step"] == step and table["state_dict"]["w"].item() == C04[step - 1]
            if step < 4:
                assert accumulate(resume_from=path) == C04[-1]


class Scheduled(TrainModule):
    """Records the learning rate of every step; logs "m", which stops getting better in epoch 1."""

    def __init__(self, make, interval):
        super().__init__()
        self.make, self.interval = make, interval
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.lrs = []

    def training_step(self, batch, batch_idx):
        group = self.optimizers().param_groups[0]
        self.lrs.append((self.global_step, group["lr"], group["momentum"]))
        self.log("m", [3.0, 2.0, 2.0, 2.0, 1.0, 1.0][self.current_epoch], on_step=self.interval == "step", on_epoch=True)
        return (self.w - batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4, momentum=0.9)
        config = {"scheduler": self.make(optimizer, self.interval), "interval": self.interval, "monitor": "m"}
        return {"optimizer": optimizer, "lr_scheduler": config}


STEPS, EPOCHS = 3, 6  # steps an epoch


def total(interval):
    return EPOCHS if interval == "epoch" else EPOCHS * STEPS


class Halving:
    def __call__(self, n):
        return 0.5**n


SCHEDULES = {
    "step": lambda o, i: schedules.StepLR(o, 1, 0.5),
    "multistep": lambda o, i: schedules.MultiStepLR(o, [1, 3, 8], 0.5),
    "cosine": lambda o, i: schedules.CosineAnnealingLR(o, total(i)),
    "onecycle": lambda o, i: schedules.OneCycleLR(o, 0.4, total_steps=total(i) + 1),
    "lambda": lambda o, i: schedules.LambdaLR(o, lambda n: 1 / (1 + n)),
    "lambda object": lambda o, i: schedules.LambdaLR(o, Halving()),
    "plateau": lambda o, i: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "sequential": lambda o, i: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.ExponentialLR(o, 0.8)], milestones=[2]
    ),
}


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_c05_the_learning_rates_of_the_uninterrupted_run(tmp_path, name, interval):
    def go(folder=None, resume_from=None):
        module = Scheduled(SCHEDULES[name], interval)
        callbacks = [EveryStep(folder)] if folder else []
        trainer = quiet(max_epochs=EPOCHS, callbacks=callbacks)
        trainer.fit(module, loader(range(STEPS)), ckpt_path=resume_from)
        return module.lrs, module.w.item()

    whole, weight = go(tmp_path)
    assert len(whole) == STEPS * EPOCHS and len({lr for _, lr, _ in whole}) > 2
    if interval == "epoch":  # one rate an epoch
        assert all(len({lr for step, lr, _ in whole if step // STEPS == epoch}) == 1 for epoch in range(EPOCHS))
    for step in range(1, STEPS * EPOCHS):
        lrs, w = go(resume_from=tmp_path / f"step={step}.ckpt")
        assert lrs == whole[step:] and w == weight


def test_c05_known_rates():
    expected = {
        "step": [0.4, 0.2, 0.1, 0.05, 0.025, 0.0125],
        "multistep": [0.4, 0.2, 0.2, 0.1, 0.1, 0.1],
        "lambda": [0.4, 0.2, 0.4 / 3, 0.1, 0.08, 0.4 / 6],
        "plateau": [0.4, 0.4, 0.4, 0.2, 0.1, 0.1],  # m: 3, 2, 2, 2, 1, 1
    }
    for name, rates in expected.items():
        module = Scheduled(SCHEDULES[name], "epoch")
        quiet(max_epochs=EPOCHS).fit(module, loader(range(STEPS)))
        assert [lr for _, lr, _ in module.lrs][::STEPS] == pytest.approx(rates)


def test_c05_a_frequency_counts_on_over_a_resume(tmp_path):
    class EverySecond(Scheduled):
        def configure_optimizers(self):
            found = super().configure_optimizers()
            found["lr_scheduler"]["frequency"] = 2
            return found

    for interval in ("epoch", "step"):
        lrs = []
        for resume_from in (None, 1, 4, 5, 8):
            module = EverySecond(SCHEDULES["step"], interval)
            folder = tmp_path / interval
            path = None if resume_from is None else folder / f"step={resume_from}.ckpt"
            quiet(max_epochs=EPOCHS, callbacks=[] if path else [EveryStep(folder)]).fit(module, loader(range(STEPS)), ckpt_path=path)
            lrs.append(module.lrs)
            assert lrs[-1] == lrs[0][resume_from or 0 :]
        unit = STEPS if interval == "epoch" else 1
        assert [lr for _, lr, _ in lrs[0]] == [0.4 * 0.5 ** (step // (2 * unit)) for step in range(STEPS * EPOCHS)]
