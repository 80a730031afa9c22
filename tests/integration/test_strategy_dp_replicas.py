"""dp: what survives a replica and what does not, its errors, random streams and buffers; resume to and from other strategies."""

from __future__ import annotations

import re
import traceback
import warnings

import pytest
import torch

from tests.helpers.modules import Net, Scalar, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import assert_continues, noisy_loader, train
from trainer import DataParallelStrategy, MisconfigurationException

F64 = torch.float64
DP = {"accelerator": "cpu", "strategy": "dp", "devices": 2}


def fit(module, data, **settings):
    trainer = quiet(**{"max_epochs": 1, **DP, **settings})
    trainer.fit(module, data)
    return trainer


# -- what ends with a replica --------------------------------------------------------------------------------------------------


class Setting(Scalar):
    """Sets attributes in its step, on itself and on a layer; appends to a list."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.utils.weight_norm(torch.nn.Linear(1, 1))  # sets `weight` on itself in every forward
        self.register_buffer("total", torch.zeros(()))
        self.seen, self.last = [], None

    def training_step(self, batch, batch_idx):
        self.last, self.layer.calls, self.total = batch_idx, 1, self.total + 1
        self.seen.append(len(batch))
        return (self.layer(batch[:, None]) * self.w).mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_lost_attributes_are_named_once():
    module = Setting()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, loader([1, 2, 3, 4, 5, 6], 3))
    said = [str(w.message) for w in caught if "drops after the step" in str(w.message)]
    assert sorted(re.search(r"set self\.(\S+) on a replica", text)[1] for text in said) == ["last", "layer.calls", "total"]
    assert module.last is None and not hasattr(module.layer, "calls") and module.total == 0
    assert module.seen == [2, 1, 2, 1]  # the list itself is the module's, and the replicas took turns


def test_a_module_that_sets_nothing_is_not_warned_of():
    class Recurrent(Net):
        def __init__(self):
            super().__init__()
            self.rnn, self.attention = torch.nn.LSTM(5, 4, 2, batch_first=True), torch.nn.MultiheadAttention(4, 2, batch_first=True)
            self.norm = torch.nn.BatchNorm1d(4)

        def training_step(self, batch, batch_idx):
            found = self.rnn(batch[:, None])[0]
            assert self.device.type == "cpu" and len(list(self.parameters())) == len(list(Recurrent().parameters()))
            return self.norm(self.attention(found, found, found)[0][:, 0]).square().mean() + self.loss(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Recurrent(), loader(Net.rows(8), 4))


# -- errors --------------------------------------------------------------------------------------------------------------------


class Odd(Exception):
    """Cannot be made of a message alone, as torch's own wrapper would make it."""

    def __init__(self, code, more):
        super().__init__(code, more)
        self.code = code


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("error", [Odd(3, "x"), KeyError("k"), SystemExit(4), StopIteration()], ids=lambda e: type(e).__name__)
def test_an_error_of_a_replica_keeps_type_object_and_traceback(error, concurrent):
    class Failing(Scalar):
        def training_step(self, batch, batch_idx):
            if batch[0] == 3:
                raise error
            self.log("x", 1.0)
            return (self.w * batch).mean()

        def on_exception(self, exception):
            self.heard = exception

    module = Failing()
    trainer = quiet(**{**DP, "strategy": DataParallelStrategy(concurrent=concurrent)}, max_epochs=1)
    with pytest.raises(type(error)) as caught:
        trainer.fit(module, loader([1, 2, 3, 4], 4))
    assert caught.value is error is module.heard
    assert "training_step" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert not hasattr(error, "add_note") or error.__notes__[-1] == "(raised in replica 1 of 2, on cpu)"
    assert module.w == 0 and trainer.callback_metrics == {}


def test_what_a_replica_cannot_log_is_refused_in_its_step():
    class Metric:
        update = compute = reset = lambda self: None

    for value, said in ((torch.ones(2), "takes one number"), (Metric(), "given a Metric on a replica")):

        class Odd(Scalar):
            def training_step(self, batch, batch_idx):
                self.log("x", value)  # noqa: B023
                return super().training_step(batch, batch_idx)

        with pytest.raises(MisconfigurationException, match=said) as caught:
            fit(Odd(), loader([1, 2], 2))
        assert "training_step" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize("ids", [(), (1, 1), (-1,), ("0",), (True,)])
def test_device_ids_that_cannot_be(ids):
    with pytest.raises(MisconfigurationException, match="one or more indices"):
        DataParallelStrategy(device_ids=ids)


def test_what_dp_cannot_do_is_said():
    with pytest.raises(MisconfigurationException, match="one process on one machine, but num_nodes=2"):
        quiet(**DP, num_nodes=2)
    with pytest.raises(MisconfigurationException, match="sync_batchnorm=True works between processes"):
        quiet(**DP, sync_batchnorm=True)
    with pytest.raises(MisconfigurationException, match=r"names more than the trainer's 2 device.*Ask for devices=\[0, 1, 2\]"):
        quiet(**{**DP, "strategy": DataParallelStrategy(device_ids=[0, 1, 2])})
    with pytest.raises(MisconfigurationException, match=r"cpu device 5 is not among the trainer's devices \[0, 1\]"):
        fit(Scalar(), loader([1, 2], 2), strategy=DataParallelStrategy(device_ids=[0, 5]))

    class Manual(Scalar):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward((self.w * batch).mean())
            self.optimizers().step()

    with pytest.raises(MisconfigurationException, match="Manual optimization cannot run under strategy='dp'"):
        fit(Manual(), loader([1, 2], 2))
    module = Manual()
    fit(module, loader([1, 2], 2), devices=1)
    assert module.w == -1.5

    for compiled, name in ((Net(), "layers"), (Net(), "layers.0"), (Net(), "The module")):
        if name == "layers":
            compiled.layers = torch.compile(compiled.layers, backend="eager")
        else:
            (compiled.layers[0] if name == "layers.0" else compiled).compile(backend="eager")
        with pytest.raises(MisconfigurationException, match=f"{name} is compiled"):
            fit(compiled, loader(Net.rows(4), 4))


def test_dp_inside_ranks_is_refused():
    def task():
        quiet(strategy="dp", devices=2)

    with pytest.raises(MisconfigurationException, match="process"):
        run_ranks(task)


# -- random streams and buffers ------------------------------------------------------------------------------------------------


class Normed(Net):
    """Net with BatchNorm and a buffer that counts in place."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(8))
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.count += len(batch)
        return self.loss(batch)


@pytest.mark.parametrize("concurrent", [False, True])
def test_buffers_are_those_of_the_first_replica(concurrent, tmp_path):
    rows, module, hand = Net.rows(18, F64), Normed().double(), Normed().double()
    trainer = fit(module, loader(rows, 6), devices=3, strategy=DataParallelStrategy(concurrent=concurrent), max_epochs=4)
    optimizer = hand.configure_optimizers()
    for batch in rows.split(6) * 4:  # each part is normalised by itself; the statistics that stay are the first's
        parts = batch.chunk(3)
        others = [{n: b.clone() for n, b in hand.named_buffers()} for _ in parts[1:]]
        losses = [hand.training_step(parts[0], 0)]
        for part, buffers in zip(parts[1:], others, strict=True):
            losses.append(_loss(hand, part, buffers))
        optimizer.zero_grad()
        (sum(losses) / 3).backward()
        optimizer.step()
    assert_same(weights(module), weights(hand), atol=1e-9)
    assert module.count == 2 * 12 and module.layers[1].num_batches_tracked == 12
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert_same(torch.load(tmp_path / "a.ckpt")["state_dict"], weights(module), atol=0)


def _loss(module, part, buffers):
    class Stepping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self):
            return self.module.training_step(part, 0)

    return torch.func.functional_call(Stepping(), {f"module.{name}": b for name, b in buffers.items()}, ())


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*on a replica")
def test_c03_a_resume_with_dropout_batchnorm_and_draws_continues_to_the_bit(tmp_path):
    data = noisy_loader(23, batch_size=6)  # 4 steps an epoch, the last one short
    whole = train(data, tmp_path, **DP)
    for step in (1, 4, 6):
        assert_continues(train(data, resume_from=tmp_path / f"step={step}.ckpt", **DP), whole, step)
    assert len(whole.steps) == 2 * 8 and all(entry["step"] == i // 2 for i, entry in enumerate(whole.steps))


class Momentum(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 4:
            self.trainer.save_checkpoint(f"{self.folder}/4.ckpt")


SETTINGS = {
    "single": {"strategy": "single_device", "devices": 1, "size": 4},
    "dp": {"strategy": "dp", "devices": 3, "size": 4},
    "ddp": {"strategy": "ddp", "devices": 2, "size": 2},
}


def part_of_a_run(kind, folder, ckpt_path=None):
    """Train 7 steps of 27 rows in batches of 4 (over all ranks), or those after step 4."""
    settings = dict(SETTINGS[kind])
    module, size = Momentum().double(), settings.pop("size")
    module.folder = folder
    trainer = quiet(accelerator="cpu", max_steps=11, seed=5, gradient_clip_val=0.5, **settings)
    trainer.fit(module, loader(Net.rows(27, F64), size, shuffle=True), ckpt_path=ckpt_path)
    assert trainer.global_step == 11
    return weights(module)


@pytest.mark.parametrize(("before", "after"), [("dp", "single"), ("single", "dp"), ("dp", "dp"), ("dp", "ddp"), ("ddp", "dp")])
def test_resume_on_another_strategy(before, after, tmp_path):
    def part(kind, ckpt_path=None):
        if kind == "ddp":
            return run_ranks(part_of_a_run, kind=kind, folder=str(tmp_path), ckpt_path=ckpt_path)[0]
        return part_of_a_run(kind, str(tmp_path), ckpt_path)

    whole = part_of_a_run("single", str(tmp_path))
    assert_same(part(before), whole, atol=1e-9)
    assert_same(part(after, str(tmp_path / "4.ckpt")), whole, atol=1e-9)
