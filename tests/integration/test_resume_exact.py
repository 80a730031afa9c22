"""A run that was interrupted and resumed with new objects is, to the bit, the run that was not."""

from __future__ import annotations

import pytest
import torch

from callbacks import Callback, SeedEverything
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.resume import EveryStep, Noisy, Stop, assert_continues, noisy_loader, train


class Seeing(Scalar):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return super().training_step(batch, batch_idx)


def see(data, folder=None, resume_from=None, **settings):
    module = Seeing()
    callbacks = [EveryStep(folder)] if folder else []
    quiet(max_epochs=1, seed=3, callbacks=callbacks, **settings).fit(module, data, ckpt_path=resume_from)
    return module.seen


def test_c01_the_rest_of_the_samples_each_once(tmp_path):
    assert see(loader(range(1, 21)), tmp_path) == list(range(1, 21))
    assert see(loader(range(1, 21)), resume_from=tmp_path / "step=5.ckpt") == list(range(6, 21))


@pytest.mark.parametrize("workers", [0, 2])
def test_c02_the_rest_of_the_shuffled_order(tmp_path, workers):
    def data():
        return loader(range(10), shuffle=True, num_workers=workers)

    whole = see(data(), tmp_path)
    assert sorted(whole) == list(range(10)) and whole != list(range(10))
    assert see(data(), resume_from=tmp_path / "step=4.ckpt") == whole[4:]


def test_c02_without_a_given_seed_the_order_is_the_one_of_the_saved_run(tmp_path):
    class Asking(Seeing):  # makes the loaders before the seed of the file is known
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 10
            return super().configure_optimizers()

    seen = []
    for resume_from in (None, tmp_path / "step=4.ckpt"):
        module = Asking()
        torch.manual_seed(len(seen))
        callbacks = [] if resume_from else [EveryStep(tmp_path)]
        quiet(max_epochs=1, callbacks=callbacks).fit(module, loader(range(10), shuffle=True), ckpt_path=resume_from)
        seen.append(module.seen)
    assert seen[1] == seen[0][4:]


def test_c02_a_seed_that_a_callback_sets_reaches_loaders_made_before_it():
    class Early(Callback):
        def setup(self, trainer, module, stage):
            assert trainer.num_training_batches == 10

    orders = []
    for callbacks in ([Early(), SeedEverything(4)], [SeedEverything(4)]):
        module = Seeing()
        quiet(max_epochs=1, callbacks=callbacks).fit(module, loader(range(10), shuffle=True))
        orders.append(module.seen)
    assert orders[0] == orders[1]


@pytest.fixture(scope="module")
def uninterrupted():
    return train(noisy_loader())


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_c03_every_step_of_two_epochs_resumes_to_the_bit(tmp_path, workers, uninterrupted):
    def data():
        return noisy_loader(num_workers=workers)

    saved = train(data(), tmp_path)
    assert_continues(saved, uninterrupted, 0)  # neither workers nor saving change anything
    assert len({entry["draws"][0] for entry in saved.steps}) == 8
    for step in range(1, 9) if workers == 2 else (2, 4, 7):
        if step == 8:
            continue  # nothing is left
        resumed = train(data(), resume_from=tmp_path / f"step={step}.ckpt")
        assert_continues(resumed, uninterrupted, step)


def test_c03_the_number_of_workers_may_change_at_a_resume(tmp_path, uninterrupted):
    train(noisy_loader(num_workers=2), tmp_path)
    for step, workers in ((2, 0), (5, 1)):
        resumed = train(noisy_loader(num_workers=workers), resume_from=tmp_path / f"step={step}.ckpt")
        assert_continues(resumed, uninterrupted, step)


def test_resume_with_accumulation_and_validation_inside_the_epoch(tmp_path):
    class Validating(Noisy):
        def validation_step(self, batch, batch_idx):
            self.log("val", (self.layers(batch[:, 1:].float())).mean() + torch.rand(()))

    def go(**more):
        data = noisy_loader(22), noisy_loader(6)
        return train(data[0], val=data[1], module=Validating(), accumulate_grad_batches=2, val_check_interval=2, **more)

    whole = go()
    assert len(whole.steps) == 12 and max(entry["step"] for entry in whole.steps) == 5
    go(save_to=tmp_path)
    for step in range(1, 6):
        assert_continues(go(resume_from=tmp_path / f"step={step}.ckpt"), whole, step)


def test_resume_after_an_exception_in_the_middle_of_a_window(tmp_path):
    class Dying(Noisy):
        def training_step(self, batch, batch_idx):
            if len(self.steps) == self.last:
                raise Stop
            return super().training_step(batch, batch_idx)

    whole = train(noisy_loader(22), accumulate_grad_batches=3)
    for last in (4, 5, 7, 10):
        module = Dying()
        module.last = last
        folder = tmp_path / str(last)
        with pytest.raises(Stop):
            train(noisy_loader(22), folder, module=module, accumulate_grad_batches=3)
        step = module.steps[-1]["step"] + (last in (6, 9))
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert newest.name == f"step={step}.ckpt"
        assert_continues(train(noisy_loader(22), resume_from=newest, accumulate_grad_batches=3), whole, step)


@pytest.mark.parametrize("kind", ["list", "dict", "iterable", "generator function"])
def test_resume_of_other_kinds_of_loaders(tmp_path, kind):
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (torch.tensor(float(i)) for i in range(7))

    class Loader:
        def __iter__(self):
            return (torch.tensor([float(i)]) for i in range(7))

    class Pairs(Seeing):
        def training_step(self, batch, batch_idx):
            if isinstance(batch, dict):
                self.seen.append([part.item() for part in batch.values()])
                return super(Seeing, self).training_step(batch["a"], batch_idx)
            return super().training_step(batch, batch_idx)

    def data():
        return {
            "list": [torch.tensor([float(i)]) for i in range(7)],
            "dict": {"a": loader(range(7), shuffle=True), "b": loader(range(10, 13), shuffle=True)},
            "iterable": torch.utils.data.DataLoader(Numbers(), batch_size=1),
            "generator function": Loader(),
        }[kind]

    def go(folder=None, resume_from=None):
        module = Pairs()
        quiet(max_epochs=2, seed=1, callbacks=[EveryStep(folder)] if folder else []).fit(module, data(), ckpt_path=resume_from)
        return module.seen, module.w.item()

    whole, weight = go(tmp_path)
    assert len(whole) == 14
    for step in range(1, 14):
        assert go(resume_from=tmp_path / f"step={step}.ckpt") == (whole[step:], weight)
