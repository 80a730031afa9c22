"""StochasticWeightAveraging: against torch's AveragedModel, SWALR and update_bn in a loop by hand, on resume, on ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from trainer import FSDPStrategy, MisconfigurationException

EPOCHS = 6


class Normed(Net):
    """`Net` in 64-bit with BatchNorm and dropout, an epoch schedule, and a note of all it computes on."""

    interval = "epoch"

    def __init__(self, norm=True):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            if norm:
                self.layers.insert(1, torch.nn.BatchNorm1d(8))
        self.double()
        self.rates, self.ends, self.seen = [], [], []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if torch.is_grad_enabled():
            self.rates.append(self.optimizers().param_groups[0]["lr"])
        else:
            self.seen.append(batch)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def on_train_epoch_end(self):
        self.ends.append(weights(self))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.7), "interval": self.interval}]


def by_hand(start, batches, anneal=2, strategy="cos", rate=0.02, avg_fn=None, norm=True):
    """The recipe of torch's documentation; return (averaged module, learning rates of the steps)."""
    module = Normed(norm)
    ([optimizer], [config]) = module.configure_optimizers()
    averaged, rates = AveragedModel(module, avg_fn=avg_fn), []
    for epoch in range(EPOCHS):
        if epoch == start:
            swa = SWALR(optimizer, rate, anneal, strategy)
        for batch in batches:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
        if epoch >= start:
            averaged.update_parameters(module)
            swa.step()
        else:
            config["scheduler"].step()
    averaged.module.forward = averaged.module.loss
    update_bn(batches, averaged)
    return averaged.module, rates


ROWS = Net.rows(24, torch.float64)
BATCHES = list(ROWS.split(4))


def train(swa, folder=None, resume_from=None, module=None, data=None, **settings):
    module = module or Normed()
    callbacks = [swa, *settings.pop("callbacks", [])]
    if folder:
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = quiet(callbacks=callbacks, **{"accelerator": "cpu", "max_epochs": EPOCHS, "log_every_n_steps": 1, **settings})
    trainer.fit(module, loader(ROWS, 4) if data is None else data, loader(Net.rows(7, torch.float64), 3), ckpt_path=resume_from)
    return module, trainer


@pytest.mark.parametrize(
    ("arguments", "start", "expected"),
    [
        ({"swa_epoch_start": 3, "annealing_epochs": 2}, 2, {}),
        ({"swa_epoch_start": 0.5, "annealing_epochs": 3, "annealing_strategy": "linear", "device": None}, 2, {"anneal": 3, "strategy": "linear"}),
        ({"swa_epoch_start": 0.0, "annealing_epochs": 0}, 0, {"anneal": 0}),
        ({"swa_epoch_start": 5, "annealing_epochs": 2, "avg_fn": lambda a, c, n: torch.maximum(a, c)}, 4, {"avg_fn": lambda a, c, n: torch.maximum(a, c)}),
    ],
)
def test_torchs_recipe(arguments, start, expected):
    swa = StochasticWeightAveraging(swa_lrs=0.02, **arguments)
    module, trainer = train(swa)
    averaged, rates = by_hand(start, BATCHES, **expected)
    assert_same(weights(module), weights(averaged))
    torch.testing.assert_close(module.rates, rates, rtol=0, atol=1e-15)
    assert swa.n_averaged == EPOCHS - start and swa.swa_start == start
    assert [layer.momentum for layer in module.modules() if isinstance(layer, torch.nn.BatchNorm1d)] == [0.1]
    assert len(module.seen) == 6 and trainer.global_step == 36  # one pass, which trains nothing
    plain, expected_trainer = train(Callback())
    assert expected_trainer.callback_metrics.keys() == trainer.callback_metrics.keys()
    assert plain.rates[: 6 * start] == module.rates[: 6 * start]


def test_a_schedule_by_steps_rests_and_a_rate_for_each_group():
    class Stepwise(Normed):
        interval = "step"

    module, _ = train(StochasticWeightAveraging([0.02], 4, annealing_epochs=1), module=Stepwise())
    torch.testing.assert_close(module.rates[:18], [0.1 * 0.7**i for i in range(18)])
    assert len(set(module.rates[18:24])) == 1 and set(module.rates[24:]) == {0.02}


def shuffled(folder, resume_from=None):
    swa = StochasticWeightAveraging(0.02, 3, annealing_epochs=2)
    return train(swa, folder, resume_from, seed=3, data=loader(ROWS, 4, shuffle=True))[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a")
    return shuffled(folder), folder


@pytest.mark.parametrize("step", [12, 15, 33, 36])
@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_resume_is_equal_to_the_bit(step, uninterrupted, tmp_path):
    expected, folder = uninterrupted
    found = shuffled(tmp_path, folder / f"step={step}.ckpt")
    assert_same(weights(found), weights(expected), atol=0)
    assert found.rates == expected.rates[step:]
    if step < 36:
        one, other = (torch.load(where / "step=36.ckpt", weights_only=True) for where in (folder, tmp_path))
        for key in ("state_dict", "averaged_model_state"):
            assert_same(one[key], other[key], atol=0)
        assert one["averaging_state"] == other["averaging_state"]
        assert one["averaging_state"]["n_averaged"] == 4


def test_checkpoints_hold_the_weights_of_training_and_the_average(tmp_path):
    module, trainer = train(StochasticWeightAveraging(0.02, 3), tmp_path)
    table = torch.load(tmp_path / "step=30.ckpt", weights_only=True)
    assert_same(table["state_dict"], module.ends[4], atol=0)
    names = [name for name, _ in module.named_parameters()]
    mean = {name: (module.ends[2][name] + module.ends[3][name] + module.ends[4][name]) / 3 for name in names}
    assert_same({name: table["averaged_model_state"][name] for name in names}, mean)
    assert "averaged_model_state" not in torch.load(tmp_path / "step=12.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "end.ckpt")  # after the fit
    end = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert_same(end["state_dict"], weights(module), atol=0)
    assert_same(end["current_model_state"], module.ends[5], atol=0)
    longer, _ = train(StochasticWeightAveraging(0.02, 3), max_epochs=8)
    resumed, _ = train(StochasticWeightAveraging(0.02, 3), resume_from=tmp_path / "end.ckpt", max_epochs=8)
    assert_same(weights(resumed), weights(longer), atol=0)


def test_a_fit_that_ends_inside_an_epoch_goes_on(tmp_path):
    module, _ = train(StochasticWeightAveraging(0.02, 3, 2), callbacks=[ModelCheckpoint(tmp_path, "{step}")], max_steps=27)
    for name, _ in module.named_parameters():
        torch.testing.assert_close(module.state_dict()[name], (module.ends[2][name] + module.ends[3][name]) / 2)
    expected, _ = train(StochasticWeightAveraging(0.02, 3, 2))
    resumed, _ = train(StochasticWeightAveraging(0.02, 3, 2), resume_from=tmp_path / "step=27.ckpt")
    assert_same(weights(resumed), weights(expected), atol=0)
    assert resumed.rates == expected.rates[27:]
    assert_same(resumed.ends[-1], expected.ends[-1], atol=0)  # the statistics of training, too


def test_frozen_statistics_stay_and_an_error_leaves_the_weights_of_training():
    class Frozen(Normed):
        def on_train_epoch_start(self):
            self.layers[1].eval()

    module, _ = train(StochasticWeightAveraging(0.02, 3), module=Frozen())
    assert module.seen == [] and torch.equal(module.layers[1].running_mean, torch.zeros(8, dtype=torch.float64))

    class Failing(Normed):
        def training_step(self, batch, batch_idx):
            if not torch.is_grad_enabled() and batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(ZeroDivisionError):
        train(StochasticWeightAveraging(0.02, 3), module=module)
    assert_same(weights(module), module.ends[-1], atol=0)
    assert module.layers[1].momentum == 0.1


class Drawing(Normed):
    """Draws in each step."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + torch.rand(()) * 0


def test_the_pass_for_statistics_moves_no_random_stream():
    states = []
    for callback in (Callback(), StochasticWeightAveraging(0.02, 3)):
        train(callback, module=Drawing(), seed=5)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    with pytest.raises(MisconfigurationException, match="works inside a run only"):
        quiet().training_pass()


def test_nothing_is_averaged_ahead_of_the_start():
    with pytest.warns(UserWarning, match="so nothing is averaged"):
        module, _ = train(StochasticWeightAveraging(0.02, 20))
    assert_same(weights(module), module.ends[-1], atol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"swa_lrs": 0.0}, {"swa_lrs": []}, {"swa_lrs": [0.1, -1]}, {"swa_lrs": "0.1"}, {"swa_epoch_start": 0}, {"swa_epoch_start": 1.5},
        {"annealing_epochs": -1}, {"annealing_strategy": "exp"},
    ],
)  # fmt: skip
def test_refused_arguments(arguments):
    with pytest.raises(MisconfigurationException, match=next(iter(arguments))):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})


def test_refused_fits():
    class Manual(Normed):
        automatic_optimization = False

    class Two(Normed):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(self.layers[i].parameters(), lr=0.1) for i in (0, -1)]

    for module, arguments, settings, match in (
        (Manual(), {}, {}, "manual optimization"),
        (Two(), {}, {}, "this fit has 2"),
        (Normed(), {"swa_lrs": [0.1, 0.2]}, {}, "2 learning rates, but the optimizer 1"),
        (Normed(), {}, {"max_epochs": -1, "max_steps": 3}, "has no limit"),
    ):
        with pytest.raises(MisconfigurationException, match=match):
            train(StochasticWeightAveraging(**{"swa_lrs": 0.02, **arguments}), module=module, **settings)


def on_ranks(norm, strategy, rows, batch, folder=None):
    def swa():
        return StochasticWeightAveraging(0.02, 3, 2)

    settings = {"strategy": strategy, "devices": 2, "data": loader(rows, batch)}
    module, _ = train(swa(), folder, module=Normed(norm), **settings)
    if folder is not None:
        found, _ = train(swa(), resume_from=folder / "step=20.ckpt", module=Normed(norm), **settings)
        assert_same(weights(found), weights(module), atol=0)
    return weights(module), module.seen


def test_two_ranks_end_with_the_same_statistics():
    rows = Net.rows(21, torch.float64)  # the last batches: three samples and two
    (one, seen), (other, others) = run_ranks(on_ranks, norm=True, strategy="ddp", rows=rows, batch=4)
    assert_same(other, one, atol=0)
    averaged = Normed()
    averaged.load_state_dict(copy.deepcopy(one))
    averaged.forward = averaged.loss
    update_bn([*seen, *others], averaged)
    assert_same(one, weights(averaged))
    assert sorted(torch.cat([*seen, *others])[:, 0].tolist()) == sorted(rows[:, 0].tolist())


def test_sharded_weights_and_checkpoints(tmp_path):
    strategy = FSDPStrategy(state_dict_type="sharded")
    for found, _ in run_ranks(on_ranks, norm=False, strategy=strategy, rows=ROWS, batch=2, folder=tmp_path):
        averaged, _ = by_hand(2, BATCHES, norm=False)
        assert_same(found, weights(averaged))
