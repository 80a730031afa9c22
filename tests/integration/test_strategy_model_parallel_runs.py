"""model_parallel and model_parallel_ddp beside training: evaluation, BatchNorm, checkpoints between strategies, launching."""

from __future__ import annotations

import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Net, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand
from tests.helpers.stacked import Wide, assert_same, fit, rows, stacked, weights
from trainer import DDPStrategy

# -- evaluation ------------------------------------------------------------------------------------------------------------


def test_validation_mean_with_uneven_shards_and_the_order_of_predictions():
    def task(**settings):
        module = Wide()
        trainer = quiet(**settings)
        (numbers,) = trainer.validate(module, loader(rows(7), 2), verbose=False)
        return numbers["val"], torch.cat(trainer.predict(module, loader(rows(7), 2)))

    value, predictions = task()
    assert value == pytest.approx(Wide().loss(rows(7)).item(), abs=1e-12)
    ranks = run_ranks(lambda: task(strategy=stacked(), devices=4))
    for found, order in [*ranks, task(strategy=stacked(each=None), devices=3), task(strategy="model_parallel", devices=2)]:
        assert found == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(order, predictions, rtol=0, atol=1e-12)


class Normed(Wide):
    """Its BatchNorm sees micro-batches."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(8, dtype=torch.float64, momentum=None))


def test_batchnorm_takes_its_statistics_from_micro_batches():
    def run(micro):
        module = Normed()
        quiet(max_steps=1, strategy=stacked(micro=micro), devices=2).fit(module, loader(rows(8), 8))
        return module.layers[1]

    hidden = Normed().layers[0](rows(8)[:, :4])
    whole, parts = run(1), run(2)
    torch.testing.assert_close(whole.running_mean, hidden.mean(0))
    torch.testing.assert_close(parts.running_mean, hidden.mean(0))
    torch.testing.assert_close(whole.running_var, hidden.var(0))
    torch.testing.assert_close(parts.running_var, (hidden[:4].var(0) + hidden[4:].var(0)) / 2)
    assert (whole.num_batches_tracked, parts.num_batches_tracked) == (1, 2)


# -- checkpoints -------------------------------------------------------------------------------------------------------------


class Adam(Wide):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def train(steps, folder=None, resume=None, batch_size=4, **settings):
    module = Adam()
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)] if folder else []
    trainer = quiet(max_steps=steps, callbacks=callbacks, seed=1, **settings)
    trainer.fit(module, loader(rows(16), batch_size, shuffle=True), ckpt_path=resume)
    return weights(module)


def test_checkpoints_go_to_and_fro_between_strategies(tmp_path):
    two = {"strategy": stacked(), "devices": 4, "batch_size": 2}
    ddp = {"strategy": DDPStrategy(), "devices": 2, "batch_size": 2}
    whole = train(6, tmp_path / "one")
    saved = torch.load(tmp_path / "one" / "step=3.ckpt", weights_only=True)

    def task():
        joined = train(6, tmp_path / "two", **two)
        train(3, tmp_path / "ddp", **ddp)
        found = [train(6, resume=tmp_path / name / "step=3.ckpt", **two) for name in ("one", "two", "ddp")]
        return [joined, *found, train(6, resume=tmp_path / "two" / "step=3.ckpt", **ddp)]

    for found in run_ranks(task):
        for one in found:
            assert_same(one, whole)
    for settings in ({}, {"strategy": stacked(each=None), "devices": 2}):
        assert_same(train(6, resume=tmp_path / "two" / "step=3.ckpt", **settings), whole)
    assert torch.load(tmp_path / "two" / "step=3.ckpt", weights_only=True)["state_dict"].keys() == saved["state_dict"].keys()


# -- the product's own launcher ------------------------------------------------------------------------------------------------


class Lazy(Wide):
    """Makes its layers where they shall be."""

    def __init__(self):
        super().__init__()
        self.layers = None

    def configure_model(self):
        if self.layers is None:
            first, second = self.trainer.strategy.devices
            made = Net().double().layers
            self.layers = torch.nn.Sequential(made[0].to(first), made[1].to(second), made[2].to(second))


def test_ranks_made_by_the_trainer_bring_weights_back():
    module = fit((27, 3), 2, Lazy, strategy="model_parallel_ddp", devices=4)
    assert_same(weights(module), weights(train_by_hand(Wide(), rows(27).split(4), 20, 3, clip=0.5)))
    with pytest.raises(RuntimeError, match="not attached"):
        _ = module.trainer
