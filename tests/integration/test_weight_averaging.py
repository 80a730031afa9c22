"""Averaged weights: against averages worked out by hand, in validation, in checkpoints, on resume, on ranks, after the fit."""

from __future__ import annotations

import pytest
import torch

from callbacks import EMAWeightAveraging, GradientSync, ModelCheckpoint, WeightAveraging
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from trainer import FSDPStrategy, MisconfigurationException

DECAY = 0.8


class Watched(Net):
    """`Net` in 64-bit with a BatchNorm, which keeps its weights after every step, and what validation sees."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.layers.insert(1, torch.nn.BatchNorm1d(8))
        self.double()
        self.history, self.validated = [], []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if len(self.history) < self.global_step:
            self.history.append(whole(self))

    def validation_step(self, batch, batch_idx):
        self.validated.append({k: t.detach().clone() for k, t in (*self.named_parameters(), *self.named_buffers())})  # whole ones, on each rank
        self.log("val", self.loss(batch))


def whole(module):
    """The weights in one piece, also where a rank holds a part."""
    found = {k: t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in module.state_dict().items()}
    return {k: t.detach().clone() for k, t in found.items()}


def assert_seen(validated, expected):
    assert_same(validated, {name: expected[name] for name in validated})
    assert len(validated) == len(expected)


def by_hand(history, decay=DECAY):
    """The moving average of a list of weights; counters are the last ones."""
    average = dict(history[0])
    for new in history[1:]:
        average = {k: decay * average[k] + (1 - decay) * t if t.is_floating_point() else t for k, t in new.items()}
    return average


def train(average, folder=None, resume_from=None, module=None, **settings):
    module = module or Watched()
    callbacks = [average, *settings.pop("callbacks", [])]
    if folder:
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1))
    settings = {"max_epochs": 2, "seed": 3, **settings}
    trainer = quiet(callbacks=callbacks, **settings)
    batch = 4 // settings.get("devices", 1)
    trainer.fit(module, loader(Net.rows(24, torch.float64), batch, shuffle=True), loader(Net.rows(7, torch.float64), 3), ckpt_path=resume_from)
    return module, trainer


def test_moving_average_by_hand(tmp_path):
    module, trainer = train(EMAWeightAveraging(decay=DECAY), tmp_path, accumulate_grad_batches=2)
    assert trainer.global_step == 6 and len(module.history) == 6
    expected = by_hand(module.history)
    assert_same(weights(module), expected)
    assert not torch.allclose(module.history[-1]["layers.0.weight"], expected["layers.0.weight"], atol=1e-3)
    for validated, steps in zip(module.validated, [3, 3, 3, 6, 6, 6], strict=True):
        assert_seen(validated, by_hand(module.history[:steps]))
    for step in range(1, 7):
        table = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert_same(table["state_dict"], by_hand(module.history[:step]))
        assert_same(table["current_model_state"], module.history[step - 1], atol=0)
        assert table["averaging_state"] == {"n_averaged": step}


@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (lambda: EMAWeightAveraging(decay=DECAY, update_every_n_steps=3, update_starting_at_step=2), [3, 6, 9]),
        (lambda: EMAWeightAveraging(decay=DECAY, update_every_n_steps=0, update_starting_at_epoch=0), [5, 11]),
        (lambda: EMAWeightAveraging(decay=DECAY, update_every_n_steps=5, update_starting_at_epoch=1), [0, 5, 10, 11]),
    ],
)
def test_update_points(make, taken):
    module, _ = train(make())
    counters = {name: tensor for name, tensor in module.history[-1].items() if not tensor.is_floating_point()}  # the module's own
    assert_same(weights(module), by_hand([module.history[i] for i in taken]) | counters)


def test_equal_weights_and_functions_of_the_user():
    plain, _ = train(WeightAveraging(use_buffers=False))
    mean = {k: torch.stack([h[k] for h in plain.history]).double().mean(0) for k in plain.history[0]}
    averaged = {name for name, _ in plain.named_parameters()}
    assert_same(weights(plain), {k: mean[k] if k in averaged else t for k, t in plain.history[-1].items()})

    class Later(WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return step_idx is not None and step_idx >= 4

    largest, _ = train(Later("cpu", avg_fn=lambda average, current, n: torch.maximum(average, current)))
    last = {k: torch.stack([h[k] for h in largest.history[4:]]).amax(0) for k in plain.history[0]}
    assert_same(weights(largest), last)


def test_without_an_update_nothing_is_averaged(tmp_path):
    module, _ = train(EMAWeightAveraging(update_starting_at_step=100), tmp_path)
    assert_same(weights(module), module.history[-1], atol=0)
    assert_seen(module.validated[0], module.history[5])
    assert "current_model_state" not in torch.load(tmp_path / "step=3.ckpt", weights_only=True)


@pytest.mark.parametrize("step", [4, 6, 9])
def test_resume_is_equal_to_the_bit(tmp_path, step):
    expected, _ = train(EMAWeightAveraging(decay=DECAY), tmp_path / "a")
    found, _ = train(EMAWeightAveraging(decay=DECAY), tmp_path / "b", resume_from=tmp_path / "a" / f"step={step}.ckpt")
    assert_same(weights(found), weights(expected), atol=0)
    one, other = (torch.load(tmp_path / name / "step=12.ckpt", weights_only=True) for name in "ab")
    for key in ("state_dict", "current_model_state"):
        assert_same(one[key], other[key], atol=0)
    assert one["averaging_state"] == other["averaging_state"] == {"n_averaged": 12}


def test_a_file_by_lightning_counts_in_a_tensor(tmp_path):
    expected, _ = train(EMAWeightAveraging(decay=DECAY), tmp_path)
    table = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    table["averaging_state"] = {"n_averaged": torch.tensor(5)}
    torch.save(table, "lightning.ckpt")
    found, _ = train(EMAWeightAveraging(decay=DECAY), resume_from="lightning.ckpt")
    assert_same(weights(found), weights(expected), atol=0)


def test_a_checkpoint_after_the_fit_goes_on_with_the_weights_of_training(tmp_path):
    expected, _ = train(EMAWeightAveraging(decay=DECAY), max_epochs=3)
    module, trainer = train(EMAWeightAveraging(decay=DECAY))
    trainer.save_checkpoint("end.ckpt")
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    assert_same(weights(module), by_hand(module.history))  # saving changes nothing
    found, _ = train(EMAWeightAveraging(decay=DECAY), resume_from="end.ckpt", max_epochs=3)
    assert_same(weights(found), weights(expected), atol=0)
    small = torch.load("weights.ckpt", weights_only=True)
    assert_same(small["state_dict"], weights(module), atol=0)
    assert not {"current_model_state", "averaging_state"} & small.keys()


def test_a_checkpoint_without_averages_begins_anew(tmp_path):
    train(ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1))
    with pytest.warns(UserWarning, match="made without EMAWeightAveraging"):
        module, _ = train(EMAWeightAveraging(decay=DECAY), resume_from=tmp_path / "step=6.ckpt")
    assert_same(weights(module), by_hand(module.history[-6:]))


class Failing(Watched):
    def validation_step(self, batch, batch_idx):
        if self.trainer.global_step > 6:
            self.seen = whole(self)
            raise ZeroDivisionError


def test_an_exception_in_validation_leaves_the_weights_of_training():
    module = Failing()
    with pytest.raises(ZeroDivisionError):
        train(EMAWeightAveraging(decay=DECAY), module=module)
    assert_same(weights(module), module.history[-1], atol=0)
    assert_same(module.seen, by_hand(module.history))


def test_refusals():
    for wrong in ({"decay": 1.5}, {"decay": -0.1}, {"update_every_n_steps": -1}):
        with pytest.raises(MisconfigurationException):
            EMAWeightAveraging(**wrong)
    with pytest.raises(MisconfigurationException, match="not both"):
        WeightAveraging(avg_fn=max, multi_avg_fn=max)
    with pytest.raises(MisconfigurationException, match="Two callbacks"):
        train(WeightAveraging(), callbacks=[EMAWeightAveraging()])
    with pytest.raises(MisconfigurationException, match="average_every"):
        train(WeightAveraging(), callbacks=[GradientSync(average_every=2)], strategy="ddp")


class Parts(Watched):
    """Compares on the ranks, where sharded weights can be put together."""

    def __init__(self, norm=True):
        super().__init__()
        if not norm:
            self.layers[1] = torch.nn.Identity()  # ranks normalise by their own samples: not the numbers of one process


def on_ranks(strategy, folder, norm):
    strategy = FSDPStrategy(state_dict_type="sharded") if strategy == "sharded" else strategy
    settings = {"strategy": strategy, "devices": 2, "inference_mode": strategy != "fsdp"}
    module, _ = train(EMAWeightAveraging(decay=DECAY), folder / "a", module=Parts(norm), **settings)
    resumed, _ = train(EMAWeightAveraging(decay=DECAY), folder / "b", folder / "a" / "step=7.ckpt", module=Parts(norm), **settings)
    assert_same(weights(resumed), weights(module), atol=0)
    return weights(module), module.history, module.validated


@pytest.mark.parametrize(("strategy", "norm"), [("ddp", True), ("fsdp", True), ("fsdp", False)])
def test_two_ranks(strategy, norm, tmp_path):
    expected, _ = train(EMAWeightAveraging(decay=DECAY), tmp_path / "one", module=Parts(norm))
    (end, history, validated), (other_end, _, other_validated) = run_ranks(on_ranks, strategy=strategy, folder=tmp_path, norm=norm)
    assert_same(end, by_hand(history))
    assert_same(other_end, end, atol=0)
    for seen in (validated, other_validated):
        assert_seen(seen[0], by_hand(history[:6]))
    one, other = (torch.load(tmp_path / name / "step=12.ckpt", weights_only=True) for name in "ab")
    for key in ("state_dict", "current_model_state"):
        assert_same(one[key], other[key], atol=0)
    assert_same(one["state_dict"], end)
    if not norm:
        assert_same(end, weights(expected))
        found, _ = train(EMAWeightAveraging(decay=DECAY), resume_from=tmp_path / "a" / "step=7.ckpt", module=Parts(norm))
        assert_same(weights(found), weights(expected))


def test_sharded_checkpoints(tmp_path):
    expected, _ = train(EMAWeightAveraging(decay=DECAY), module=Parts(norm=False))
    for found, *_ in run_ranks(on_ranks, strategy="sharded", folder=tmp_path, norm=False):  # resumed as well
        assert_same(found, weights(expected))
    found, _ = train(EMAWeightAveraging(decay=DECAY), resume_from=tmp_path / "a" / "step=7.ckpt", module=Parts(norm=False))
    assert_same(weights(found), weights(expected))


def test_processes_of_the_local_launcher():
    expected, _ = train(EMAWeightAveraging(decay=DECAY), module=Parts(norm=False))
    average = EMAWeightAveraging(decay=DECAY)
    module, _ = train(average, module=Parts(norm=False), strategy="fsdp", devices=2)
    assert average.n_averaged == 12
    assert_same(weights(module), weights(expected))


@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_resuming_a_finished_fit_leaves_the_averages(tmp_path):
    whole_run, _ = train(EMAWeightAveraging(decay=DECAY), tmp_path)
    again, _ = train(EMAWeightAveraging(decay=DECAY), resume_from=sorted(tmp_path.glob("*.ckpt"), key=lambda p: p.stat().st_mtime_ns)[-1])
    assert_same(weights(again), weights(whole_run), atol=0)
