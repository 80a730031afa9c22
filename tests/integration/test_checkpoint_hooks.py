"""trainer.save_checkpoint from every hook and outside of runs, and load_from_checkpoint."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys

import pytest
import torch

from callbacks import Callback, ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import Epochs, Noisy, Stop, assert_equal, noisy_loader
from trainer import TrainModule
from trainer.checkpoint import temporary
from trainer.errors import CheckpointError, MisconfigurationException

HOOKS = [
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_epoch_start",
    "on_validation_batch_start", "validation_step", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
    "on_train_epoch_end",
]  # fmt: skip


class Transcript(Noisy):
    """Notes what happens, as (hook, step), and saves in one hook, the nth time."""

    def __init__(self, hook=None, nth=0, folder=None):
        super().__init__()
        self.hook, self.left, self.folder = hook, nth, folder
        self.events, self.ends = [], []

    def note(self, name):
        self.events.append((name, self.global_step))
        if name == self.hook:
            if self.left == 0:
                self.trainer.save_checkpoint(self.folder / f"{name}.ckpt")
            self.left -= 1

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")
        self.log("val", self.layers(batch[:, 1:].float()).mean() + torch.rand(()))

    def on_train_end(self):
        super().on_train_end()
        self.ends = {name: value.item() for name, value in self.trainer.callback_metrics.items()}


def _noting(name):
    return lambda self, *args: self.note(name)


for _name in HOOKS:
    if _name not in ("training_step", "validation_step"):
        setattr(Transcript, _name, _noting(_name))


def fit(hook=None, nth=0, folder=None, resume_from=None, **settings):
    module = Transcript(hook, nth, folder)
    trainer = quiet(max_epochs=3, seed=2, accumulate_grad_batches=2, log_every_n_steps=1, callbacks=[Epochs()], **settings)
    trainer.fit(module, noisy_loader(23), noisy_loader(6), ckpt_path=resume_from)  # 6 batches, 3 steps an epoch
    return module


def assert_tail(resumed, whole):
    """The resumed run did what the whole run did from the first batch of that step on, and nothing else."""

    def told(module):
        opening = ("on_train_start", "on_train_epoch_start")  # of a run or an epoch, seen once more
        return [event for event in module.events if event[0] not in opening]

    first, events = resumed.steps[0]["step"], told(whole)
    assert told(resumed) == events[events.index(("on_train_batch_start", first)) :]
    assert resumed.events[:2] == [("on_train_start", first), ("on_train_epoch_start", first)]
    assert resumed.steps == [entry for entry in whole.steps if entry["step"] >= first] and resumed.ends == whole.ends
    assert max(resumed.epochs) == max(whole.epochs) and resumed.epochs == {n: whole.epochs[n] for n in resumed.epochs}
    assert_equal(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert_equal(resumed.optimizer_state, whole.optimizer_state)


@pytest.mark.parametrize("interval", [1.0, 2])
def test_a_save_in_any_hook_continues_with_nothing_lost_or_done_twice(tmp_path, interval):
    whole = fit(val_check_interval=interval)
    for hook in HOOKS:
        count = sum(name == hook for name, *_ in whole.events)
        nth = count // 2 if count > 1 else 0
        saved = fit(hook, nth, tmp_path, val_check_interval=interval)
        assert saved.events == whole.events and saved.steps == whole.steps  # saving disturbs nothing
        resumed = fit(resume_from=tmp_path / f"{hook}.ckpt", val_check_interval=interval)
        assert_tail(resumed, whole)
        table = torch.load(tmp_path / f"{hook}.ckpt", weights_only=True)
        batch = table["progress"]["batch"]
        assert batch % 2 == 0 and table["global_step"] == table["epoch"] * 3 + batch // 2
    last = "on_validation_end" if interval == 1.0 else "on_train_epoch_end"
    assert torch.load(tmp_path / f"{last}.ckpt", weights_only=True)["progress"]["epoch_ended"]


def test_a_save_between_loading_and_the_first_batch_keeps_what_was_loaded(tmp_path):
    whole = fit("training_step", 8, tmp_path)  # epoch 1, inside
    for hook in ("on_train_start", "on_train_epoch_start"):
        again = fit(hook, 0, tmp_path, resume_from=tmp_path / "training_step.ckpt")
        assert_tail(again, whole)
        assert_tail(fit(resume_from=tmp_path / f"{hook}.ckpt"), whole)


def test_a_save_in_a_hook_of_two_ranks(tmp_path):
    def task():
        ddp = {"strategy": "ddp", "devices": 2}
        whole = fit(**ddp)
        for hook in ("training_step", "on_validation_end", "on_train_epoch_end"):
            fit(hook, 1, tmp_path, **ddp)
            assert_tail(fit(resume_from=tmp_path / f"{hook}.ckpt", **ddp), whole)
        return whole.ends

    first, second = run_ranks(task)
    assert first == second


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_save_on_exception_saves_the_state_of_the_last_step(tmp_path, step):
    class Dying(Scalar):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.current_epoch == 1 and batch_idx == step:
                raise Stop
            return loss

    keeper = ModelCheckpoint(tmp_path, "{step}", save_top_k=0, save_on_exception=True)
    with pytest.raises(Stop):
        quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=[keeper]).fit(Dying(), loader(range(6)))
    done = 3 + step // 2
    (path,) = tmp_path.iterdir()
    assert path.name == f"step={done}.ckpt"
    module = Scalar()
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(module, loader(range(6)), ckpt_path=path)
    assert module.w.item() == -15.0  # (0.5 + 2.5 + 4.5) an epoch


# -- outside of runs -----------------------------------------------------------------------------------------------------


def test_save_after_fit_is_the_checkpoint_of_its_end(tmp_path):
    trainer, module = quiet(max_epochs=2), Scalar()
    with pytest.raises(MisconfigurationException, match="there is no model yet"):
        trainer.save_checkpoint(tmp_path / "early.ckpt")
    trainer.fit(module, loader([1, 1, 1]))
    trainer.save_checkpoint(tmp_path / "deep" / "after.ckpt")
    table = torch.load(tmp_path / "deep" / "after.ckpt", weights_only=True)
    assert table["state_dict"]["w"].item() == -6.0 and (table["global_step"], table["epoch"]) == (6, 1)
    assert len(table["optimizer_states"]) == len(table["ranks"]) == 1 and table["progress"]["epoch_ended"]
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    trainer.validate(_Evaluated(), loader([1]), ckpt_path=tmp_path / "deep" / "after.ckpt", verbose=False)
    assert trainer.callback_metrics["w"].item() == -6.0


class _Evaluated(Scalar):
    def validation_step(self, batch, batch_idx):
        self.log("w", self.w)


def test_an_unwritable_path_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    class Saving(Scalar):
        def on_train_start(self):
            self.trainer.save_checkpoint(tmp_path / "file" / "x.ckpt")

    def task():
        with contextlib.suppress(CheckpointError):
            quiet(max_epochs=1, strategy="ddp", devices=2).fit(Saving(), loader([1, 2]))
            return "no error"
        return "error"

    assert run_ranks(task) == ["error", "error"]


def test_hooks_see_and_change_the_table(tmp_path):
    class Mine(Scalar):
        loaded = None

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"steps": self.global_step}

        def on_load_checkpoint(self, checkpoint):
            self.loaded = checkpoint["mine"]

    class Also(Callback):
        def __init__(self):
            self.count, self.loaded = 0, None

        def on_train_batch_end(self, *args):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["also"] = [1]

        def on_load_checkpoint(self, trainer, module, checkpoint):
            self.loaded = checkpoint["also"]

    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3)
    quiet(max_epochs=1, callbacks=[Also(), keeper]).fit(Mine(), loader(range(4)))
    module, also = Mine(), Also()
    quiet(max_epochs=1, callbacks=[also]).fit(module, loader(range(4)), ckpt_path=tmp_path / "step=3.ckpt")
    assert module.loaded == {"steps": 3} and also.loaded == [1] and also.count == 4


# -- load_from_checkpoint ------------------------------------------------------------------------------------------------


class Sized(TrainModule):
    def __init__(self, size, rate=0.5, *, bias=True, extra=None, layer=None):
        super().__init__()
        self.save_hyperparameters(ignore=["layer"])
        self.layer = layer or torch.nn.Linear(size, 1, bias=bias)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


@pytest.fixture
def saved(tmp_path):
    trainer, module = quiet(max_steps=2), Sized(3, extra={"a": [1, None]})
    trainer.fit(module, loader(torch.ones(2, 3)))
    trainer.save_checkpoint(tmp_path / "sized.ckpt")
    return module, tmp_path / "sized.ckpt"


def test_load_from_checkpoint_rebuilds_the_module(saved):
    module, path = saved
    found = Sized.load_from_checkpoint(path)
    assert dict(found.hparams) == {"size": 3, "rate": 0.5, "bias": True, "extra": {"a": [1, None]}}
    assert_equal(dict(found.state_dict()), dict(module.state_dict()))
    assert found.training and found._trainer is None


def test_load_from_checkpoint_takes_other_arguments(saved):
    module, path = saved
    given = torch.nn.Linear(3, 1)
    found = Sized.load_from_checkpoint(str(path), rate=0.1, layer=given)
    assert found.hparams.rate == 0.1 and found.hparams.size == 3 and found.layer is given
    assert torch.equal(given.weight, module.layer.weight)


def test_load_from_checkpoint_is_strict_unless_told_otherwise(saved):
    module, path = saved
    with pytest.raises(RuntimeError, match="layer.bias"):
        Sized.load_from_checkpoint(path, bias=False)
    found = Sized.load_from_checkpoint(path, bias=False, strict=False)
    assert found.layer.bias is None and torch.equal(found.layer.weight, module.layer.weight)

    class Lenient(Sized):
        strict_loading = False

    assert Lenient.load_from_checkpoint(path, bias=False).layer.bias is None
    with pytest.raises(RuntimeError, match="layer.bias"):
        Lenient.load_from_checkpoint(path, bias=False, strict=True)


def test_load_from_checkpoint_names_a_missing_file(saved):
    _, path = saved
    with pytest.raises(CheckpointError, match="sized.ckp: there is no such file. Did you mean 'sized.ckpt'"):
        Sized.load_from_checkpoint(str(path)[:-1])


def test_without_a_model_the_best_checkpoint_is_meant(tmp_path):
    class Rising(Scalar):
        def validation_step(self, batch, batch_idx):
            self.log("val", float(self.current_epoch))

        def test_step(self, batch, batch_idx):
            self.log("w", self.w.detach())

    module, data = Rising(), loader(torch.ones(2))
    trainer = quiet(max_epochs=2, callbacks=[ModelCheckpoint(tmp_path, monitor="val")])
    trainer.fit(module, data, data)
    with pytest.warns(UserWarning, match="uses the best checkpoint"):
        assert trainer.test(dataloaders=data)[0]["w"] == -2.0  # of epoch 0
    module.w.data.fill_(7.0)
    assert trainer.test(module, data)[0]["w"] == 7.0


class Checked(Noisy):
    def validation_step(self, batch, batch_idx):
        self.log("val", batch.sum())


def test_a_checkpoint_saved_after_a_fit_resumes_exactly(tmp_path):
    def fit(max_steps, path=None):
        module = Checked()
        trainer = quiet(max_steps=max_steps, seed=1)
        trainer.fit(module, noisy_loader(10, batch_size=2), ckpt_path=path)
        return module, trainer

    whole, _ = fit(8)
    part, trainer = fit(3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    rest, _ = fit(8, tmp_path / "a.ckpt")
    assert_equal(rest.state_dict(), whole.state_dict())
    assert trainer.validate(part, noisy_loader(4)) is not None  # another run of the same weights changes nothing
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    assert_equal(fit(8, tmp_path / "b.ckpt")[0].state_dict(), whole.state_dict())


def test_a_checkpoint_plugin_writes_and_reads(tmp_path):
    class Shelf:
        kept = {}

        def save_checkpoint(self, table, path):
            self.kept[str(path)] = copy.deepcopy(table)

        def load_checkpoint(self, path, weights_only):
            return self.kept[str(path)]

    path = tmp_path / "a"
    path.touch()  # `ckpt_path` must exist
    trainer = quiet(max_steps=2, plugins=Shelf())
    trainer.fit(Scalar(), loader([1, 1, 1]))
    trainer.save_checkpoint(path)
    module = Scalar()
    quiet(max_steps=3, plugins=Shelf()).fit(module, loader([1, 1, 1]), ckpt_path=path)
    assert module.w.item() == -3.0 and path.stat().st_size == 0
    with pytest.raises(MisconfigurationException, match="storage_options"):
        trainer.save_checkpoint(path, storage_options={})


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path):
    trainer = quiet(max_steps=1)
    trainer.fit(Scalar(), loader([1]))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    left = tmp_path / temporary.temporary_name("b.ckpt").replace(f".{os.getpid()}.", f".{dead.pid}.")
    left.touch()
    other = quiet(max_steps=1)
    other.fit(Scalar(), loader([1]))
    other.save_checkpoint(tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]
