"""Several ranks train exactly as one: weights, accumulation windows, counts, manual optimization, gathered gradients."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from callbacks import GradientSync
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import train_by_hand
from trainer import DDPStrategy, TrainModule
from trainer.dist import Dist
from trainer.signals import SIGNALS, STOP
from trainer.strategies.rider import BITS
from trainer.writing import LOST

# samples, accumulated batches: a short last window; a short batch inside a window; a last batch without a sample for rank 1
SHAPES = [(27, 3), (23, 4), (25, 2)]
DTYPES = [torch.float32, torch.float64]


def by_hand(samples, accumulate, dtype, joined=4):
    module = Net().to(dtype)
    return train_by_hand(module, Net.rows(samples, dtype).split(joined), 50, accumulate, clip=0.5)


def by_trainer(samples, accumulate, dtype, batch_size, **settings):
    module = Net().to(dtype)
    trainer = quiet(max_steps=50, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, **settings)
    trainer.fit(module, loader(Net.rows(samples, dtype), batch_size))
    assert trainer.global_step == 50
    return module


def weights(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("samples", "accumulate"), SHAPES)
def test_single_device_equals_the_plain_loop_bit_for_bit(samples, accumulate, dtype):
    expected = weights(by_hand(samples, accumulate, dtype))
    found = weights(by_trainer(samples, accumulate, dtype, batch_size=4))
    start = weights(Net().to(dtype))
    for name in expected:
        assert torch.equal(found[name], expected[name])
        assert not torch.allclose(found[name], start[name], atol=1e-2)


def test_ddp_equals_the_plain_loop_on_the_joined_batches():
    def task():
        return [weights(by_trainer(*shape, dtype, 2, strategy="ddp", devices=2)) for shape in SHAPES for dtype in DTYPES]

    ranks = run_ranks(task)
    expected = [weights(by_hand(*shape, dtype)) for shape in SHAPES for dtype in DTYPES]
    for first, second, right in zip(*ranks, expected, strict=True):
        for name, tensor in right.items():
            assert torch.equal(first[name], second[name])
            torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-6 if tensor.dtype == torch.float32 else 1e-13)


class Counting(Scalar):
    """Gradient of a batch: its first number; batches say how many samples they stand for."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.w * batch[0], "count": batch.shape[0]}


class PerSample(Scalar):
    def training_step(self, batch, batch_idx):
        return {"loss": (self.w * batch).mean(), "count": len(batch)}


def test_c29_counts_on_two_ranks():
    def task():
        found = []
        one, three = torch.tensor([1.0]), torch.tensor([5.0, 5.0, 5.0])
        for batches, accumulate in (([one, three], 1), ([one, three] * 2, 2)):
            module = Counting()
            quiet(strategy="ddp", devices=2, max_epochs=1, accumulate_grad_batches=accumulate).fit(module, batches)
            found.append(module.w.item())
        module = PerSample()  # 1, 2 | 6 and, on rank 1, a repeated sample that must not count
        quiet(strategy="ddp", devices=2, max_epochs=1).fit(module, loader([1, 2, 6]))
        found.append(module.w.item())
        module = PerSample()
        quiet(strategy="ddp", devices=2, max_epochs=1, accumulate_grad_batches=2).fit(module, loader([1, 2, 6]))
        return [*found, module.w.item()]

    assert run_ranks(task) == [[-4.0, -4.0, -7.5, -3.0]] * 2


class Adversarial(TrainModule):
    """Two networks with an optimizer each, stepped in turn; the second step of a batch uses the first one's new weights."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.maker = torch.nn.Linear(2, 2)
            self.critic = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        makes, judges = self.optimizers()
        with self.toggled_optimizer(makes):
            makes.zero_grad()
            self.manual_backward(-self.critic(self.maker(batch)).mean())
            makes.step()
        with self.toggled_optimizer(judges):
            judges.zero_grad()
            self.manual_backward(self.critic(self.maker(batch).detach()).square().mean())
            self.manual_backward((1 - self.critic(batch)).square().mean())  # adds to the first one's gradients
            self.clip_gradients(judges, 0.5)
            judges.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.maker.parameters(), lr=0.1), torch.optim.Adam(self.critic.parameters(), lr=0.01)


def test_manual_optimization_with_two_optimizers_equals_one_process():
    data = torch.randn(15, 2, generator=torch.Generator().manual_seed(0))

    def task(devices=2):
        module = Adversarial()
        trainer = quiet(strategy="ddp" if devices == 2 else "auto", devices=devices, max_epochs=3)
        trainer.fit(module, loader(data, 4 // devices))  # the last joined batch has 3 samples, 2 on rank 0
        return weights(module), trainer.global_step

    (first, steps), (second, _) = run_ranks(task)
    expected, one_steps = task(devices=1)
    assert steps == one_steps == 12
    for name, tensor in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-6)
        assert not torch.allclose(tensor, weights(Adversarial())[name], atol=1e-3)


class Gathering(Scalar):
    """Loss (rank + 1) * sum over all ranks' w * x, squared: the gathered part carries gradients, and so does the rest."""

    def training_step(self, batch, batch_idx):
        mine = self.w * batch + 1.0
        every = self.all_gather({"x": mine}, sync_grads=True)["x"]
        self.seen = (every.shape, every.detach().clone(), self.all_gather(batch).clone())
        self.apart = torch.ones_like(every, requires_grad=True)
        return ((self.global_rank + 1) * (every + self.apart)).square().sum()

    def on_after_backward(self):
        self.apart_grad = self.apart.grad.clone()


def test_all_gather_with_gradients_against_the_closed_form():
    def task():
        module = Gathering()
        quiet(strategy="ddp", devices=2, max_steps=1).fit(module, loader([2.0, 3.0]))
        return (*module.seen, module.w.item(), module.apart_grad)

    # Rank r: loss = (r+1)^2 * sum_s (w x_s + 2)^2, and DDP averages the ranks' losses: d/dw = (1 + 4) / 2 * 2 * (4 + 6) at w = 0.
    for rank, (shape, every, plain, w, apart) in enumerate(run_ranks(task)):
        assert shape == (2, 1) and every.tolist() == [[1.0], [1.0]] and plain.tolist() == [[2.0], [3.0]]
        assert w == -(1 + 4) / 2 * 2 * 2 * (2 + 3)
        assert apart.tolist() == [[(rank + 1) ** 2 * 4.0]] * 2  # a gradient beside the gathered one stays this rank's own


def test_a_single_process_gathers_nothing():
    module = Gathering()
    quiet(max_steps=1).fit(module, loader([2.0]))
    assert module.seen[0] == (1,) and module.w.item() == -8.0


class Wishes(Net):
    """Rank 1 wishes to stop in step 2 (counted from 1), in training_step, after backward, or in validation."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        if where == "on_train_batch_end":
            self.on_train_batch_end = lambda *_: self.wish(where)

    def wish(self, where):
        if where == self.where and self.global_rank == 1 and self.global_step == (1 if where == "training_step" else 2):
            self.trainer.should_stop = True

    def training_step(self, batch, batch_idx):
        self.ahead = self.trainer._run.asks_ahead
        self.wish("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.wish("validation_step")


def test_a_wish_of_one_rank_stops_all_at_that_step_also_where_the_ranks_tell_each_other_during_backward():
    def task():
        found = {}
        for where in ("training_step", "on_train_batch_end", "validation_step"):
            module = Wishes(where)
            trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, val_check_interval=2)
            trainer.fit(module, loader(Net.rows(24), 2), loader(Net.rows(4), 2))
            found[where] = (trainer.global_step, module.ahead)
        return found

    expected = {"training_step": (2, True), "on_train_batch_end": (2, False), "validation_step": (2, True)}
    assert run_ranks(task) == [expected, expected]


FORMS = {  # how -> (arguments of the trainer, whether wishes travel with the gradients)
    "ddp": (lambda: {"strategy": "ddp"}, True),
    "accumulation, views": (lambda: {"strategy": DDPStrategy(gradient_as_bucket_view=True), "accumulate_grad_batches": 2}, True),
    "unused parameters": (lambda: {"strategy": "ddp_find_unused_parameters_true"}, True),
    "static graph": (lambda: {"strategy": DDPStrategy(static_graph=True)}, True),
    "bf16-true": (lambda: {"strategy": "ddp", "precision": "bf16-true"}, True),
    "16-mixed": (lambda: {"strategy": "ddp", "precision": "16-mixed"}, True),
    "compressed": (lambda: {"strategy": DDPStrategy(comm_hook=bf16_compress_hook)}, False),
    "on their own": (lambda: {"strategy": "ddp", "callbacks": [GradientSync(average_every=2)]}, False),
}


def test_wishes_travel_with_the_gradients_where_they_arrive_as_they_were_sent(monkeypatch):
    def task():
        apart, found = [], {}
        union_ahead = Dist.union_ahead
        monkeypatch.setattr(Dist, "union_ahead", lambda self, bits: apart.append(bits) or union_ahead(self, bits))
        for name, (form, _) in FORMS.items():
            module = Wishes("training_step")
            trainer = quiet(accelerator="cpu", devices=2, max_epochs=2, **form())
            trainer.fit(module, loader(Net.rows(48), 2))
            found[name] = (trainer.global_step, module.ahead)
            apart.clear()
            trainer = quiet(accelerator="cpu", devices=2, max_steps=3, **form())
            trainer.fit(Net(), loader(Net.rows(48), 2))
            found[name] += (len(apart) < 3,)  # those of the beginning only
        return found

    expected = {name: (2, True, travels) for name, (_, travels) in FORMS.items()}
    assert run_ranks(task) == [expected, expected]


def test_a_wish_travels_also_with_a_loss_of_weight_zero_and_a_dictionary():
    class Weightless(Wishes):
        def training_step(self, batch, batch_idx):
            return {"loss": 0 * super().training_step(batch, batch_idx)}

    def task():
        trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2)
        trainer.fit(Weightless("training_step"), loader(Net.rows(24), 2))
        return trainer.global_step

    assert run_ranks(task) == [2, 2]


def test_every_wish_has_its_bit_in_the_message():
    assert (STOP | SIGNALS | LOST).bit_count() == 4 and STOP | SIGNALS | LOST < 2**BITS
