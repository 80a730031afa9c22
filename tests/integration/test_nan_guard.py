"""NaNGuard: names what is not finite, where it begins and when, on all ranks; looks at the device in checked steps only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from callbacks import Callback, NaNGuard, NonFiniteError
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from trainer import MisconfigurationException


class Log(torch.nn.Module):
    """NaN for what is far below 0."""

    def forward(self, x):
        return torch.log(x + 50)


class Breaks(Net):
    """Learns slowly. A row of -1000 makes the output of layers.2 NaN; `spoil` acts on the loss of a step, counted from 1."""

    def __init__(self, spoil=None):
        super().__init__()
        with torch.no_grad():
            self.layers[0].weight.fill_(0.1)
        self.layers[1] = torch.nn.Identity()
        self.layers.insert(2, Log())
        self.spoil, self.before = spoil or {}, None

    def training_step(self, batch, batch_idx):
        self.before = weights(self)
        loss = self.loss(batch)
        change = self.spoil.get(self.global_step + 1)
        return loss if change is None else change(self, loss)


    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def rows(bad=None, value=-1000.0, count=24):
    found = Net.rows(count) / 10
    if bad is not None:
        found[bad] = value
    return found


def fit(guard, module, data=None, **settings):
    trainer = quiet(**{"accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, "callbacks": [guard], **settings})
    trainer.fit(module, loader(rows() if data is None else data, 4))
    return trainer


def test_the_layer_in_which_it_begins():
    module = Breaks()
    with pytest.raises(NonFiniteError) as caught:
        fit(NaNGuard(), module, rows(bad=9))
    message = str(caught.value)
    assert message.startswith("Gradients are not finite in step 3 (epoch 0, batch 2): layers.0.weight, layers.0.bias, layers.3.weight")
    assert "It begins with the output of layers.2 (Log) in batch 2, on rank 0." in message
    assert "The step that was checked before, 2, was fine. The weights are those before the step." in message
    assert_same(weights(module), module.before, atol=0)
    assert not any(layer._forward_hooks for layer in module.modules())


def test_the_batch_of_a_window():
    with pytest.raises(NonFiniteError, match=r"in step 2 \(epoch 0, batch 3, 4, 5\).*It begins with the batch itself in batch 4, on rank 0"):
        fit(NaNGuard(every_n_steps=2), Breaks(), rows(bad=17, value=float("inf")), accumulate_grad_batches=3)


def nan_gradient(module, loss):
    return loss + (module.layers[3].bias * 0).abs().sqrt().sum()


def test_loss_and_backward():
    module = Breaks({4: nan_gradient})
    with pytest.raises(NonFiniteError, match=r"Gradients .* in step 4 .*: layers.3.bias, on rank 0\. The outputs of all layers are finite"):
        fit(NaNGuard(), module)
    with pytest.raises(NonFiniteError, match=r"Loss or weights are not finite in step 4 .*: layers.3.bias, on rank 0"):
        fit(NaNGuard("weights"), Breaks({4: nan_gradient}))
    with pytest.raises(NonFiniteError, match="step 2 .*: the loss, on rank 0"):
        fit(NaNGuard("loss", find_layer=False), Breaks({2: lambda module, loss: loss * float("inf")}))


def test_weights_that_were_bad_before():
    module = Breaks()
    with torch.no_grad():
        module.layers[3].bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"Weights are not finite ahead of the first step \(after step 0\): layers.3.bias, on rank 0"):
        fit(NaNGuard(), module)


def test_large_numbers_are_finite():
    module = Breaks({2: lambda module, loss: loss * 1e25})  # the square of its gradients overflows
    fit(NaNGuard(), module, max_steps=2)
    assert max(p.grad.abs().max() for p in module.parameters()) > 1e20


def test_scaled_overflows_are_left_to_the_scaler():
    module = Breaks({2: lambda module, loss: loss * 1e36})
    trainer = fit(NaNGuard(), module, precision="16-mixed")
    assert trainer.global_step == 12 and all(p.isfinite().all() for p in module.parameters())


class Reads(TorchFunctionMode):
    """Counts reads of device values, by step."""

    def __init__(self):
        super().__init__()
        self.module, self.steps = None, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("__bool__", "tolist", "item"):
            self.steps.append(self.module.global_step)
        return function(*args, **(kwargs or {}))


def test_only_checked_steps_read_the_device():
    class Hooked(Callback):
        def on_before_backward(self, trainer, module, loss):
            watched.append(bool(module.layers[0]._forward_hooks))

    watched, reads = [], Reads()
    module = reads.module = Breaks()
    with reads:
        fit(NaNGuard(every_n_steps=5), module, log_every_n_steps=0, callbacks=[NaNGuard(every_n_steps=5), Hooked()])
    assert watched == [step % 5 == 0 for step in range(1, 13)]
    assert reads.steps == [0, 4, 5, 9, 10]  # ahead of the first step; before and after the update of the fifth and tenth


def on_ranks(strategy):
    data = rows(bad=11)  # of rank 1, in step 2
    try:
        fit(NaNGuard(), Breaks(), data, strategy=strategy, devices=2)
    except NonFiniteError as error:
        return str(error)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_end_with_the_same_error(strategy):
    one, other = run_ranks(on_ranks, strategy=strategy)
    assert one == other
    assert "Gradients are not finite in step 2 (epoch 0, batch 1): layers.0.weight" in one
    assert "It begins with the output of layers.2 (Log) in batch 1, on rank 1." in one


def test_manual_optimization():
    class Manual(Breaks):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    with pytest.raises(NonFiniteError, match="in step 3 .* begins with the output of layers.2"):
        fit(NaNGuard(), Manual(), rows(bad=9))


def test_layers_of_compiled_runs_are_left_alone():
    for options in (None, {}):
        guard, module = NaNGuard(), Breaks()
        trainer = SimpleNamespace(log_every_n_steps=1, precision="32-true", settings=SimpleNamespace(compile=options), publishes_step=True, global_step=0)
        guard.on_fit_start(trainer, module)
        guard.on_train_batch_start(trainer, module, rows(), 0)
        assert bool(module.layers[2]._forward_hooks) == (options is None)


@pytest.mark.parametrize("arguments", [{"check": "losses"}, {"check": ()}, {"every_n_steps": 0}, {"every_n_steps": 1.5}])
def test_refused_arguments(arguments):
    with pytest.raises(MisconfigurationException, match=f"NaNGuard.{next(iter(arguments))}="):
        NaNGuard(**arguments)


def test_a_fit_that_publishes_nothing_is_refused():
    with pytest.raises(MisconfigurationException, match="Give it every_n_steps"):
        fit(NaNGuard(), Breaks(), log_every_n_steps=0)
