"""Profilers in runs: every action is counted, nothing else changes, and each rank tells what it has."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from callbacks import Callback, ModelCheckpoint
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from trainer import DataModule, PyTorchProfiler, SimpleProfiler


class Watched(Net):
    """`Net` with validation and a part that the user measures."""

    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("my part"):
            return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[:, :4])


class Manual(Watched):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Overridden(Watched):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class Quasi(Watched):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Net.rows(24))


class Hooks(Callback):
    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):  # takes no dataloader_idx
        pass

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with trainer.profiler.profile("callback's part"):
            pass


def fit(kind, profiler, data=None, **settings):
    module = kind()
    trainer = quiet(accelerator="cpu", max_epochs=2, profiler=profiler, seed=1, **settings)
    rows = loader(Net.rows(24), 4, shuffle=True) if data is None else data
    trainer.fit(module, rows, loader(Net.rows(6), 3))
    return module, trainer


def calls(trainer):
    return {name: row[0] for name, row in trainer.profiler.recorded.items()}


def test_every_action_of_a_fit_is_counted(tmp_path, capsys):
    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    plain, _ = fit(Watched, None, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[Hooks(), save])
    module, trainer = fit(Watched, "simple", accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[Hooks(), save])
    assert_same(weights(module), weights(plain), atol=0)
    found = calls(trainer)
    assert found == found | {
        "run_training_epoch": 2, "train_dataloader_next": 12 + 2, "training_step": 12, "my part": 12, "backward": 12, "callback's part": 12,
        "optimizer_zero_grad": 6, "configure_gradient_clipping": 6, "optimizer_step": 6, "boundary": 6, "configure_optimizers": 1,
        "validation_step": 4, "validation_dataloader_next": 4 + 2, "save_checkpoint": 3,
        "[Callback]Hooks.on_train_batch_end": 12, "[Callback]Hooks.on_validation_batch_end": 4, "[Callback]ModelCheckpoint.setup": 1, "[TrainModule]Watched.on_validation_model_eval": 2,
    }  # fmt: skip
    assert found["publish"] >= 2
    report = capsys.readouterr().out
    assert "FIT Profiler Report" in report and "[Callback]Hooks.on_train_batch_end" in report
    assert "step" not in vars(trainer.precision_plugin)  # given back


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Manual, {"training_step": 12, "backward": 12, "optimizer_step": 12}),
        (Overridden, {"training_step": 12, "backward": 12, "optimizer_step": 12}),
        (Quasi, {"training_step": 24, "backward": 24, "optimizer_step": 12}),
    ],
)
def test_slower_paths(kind, expected):
    plain, _ = fit(kind, None)
    module, trainer = fit(kind, "simple")
    assert_same(weights(module), weights(plain), atol=0)
    assert calls(trainer) == calls(trainer) | expected


def test_streams_and_guarded_steps():
    data = torch.utils.data.DataLoader(Stream(), batch_size=4)
    plain, _ = fit(Watched, None, data, bad_loss="raise", accumulate_grad_batches=4)
    module, trainer = fit(Watched, "simple", data, bad_loss="raise", accumulate_grad_batches=4)
    assert_same(weights(module), weights(plain), atol=0)
    assert calls(trainer) == calls(trainer) | {"training_step": 12, "optimizer_step": 4, "train_dataloader_next": 4}


def test_the_data_module_is_seen():
    class Data(DataModule):
        def setup(self, stage):
            self.rows = loader(Net.rows(8), 4)

        def train_dataloader(self):
            return self.rows

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch.to(device)

    trainer = quiet(accelerator="cpu", max_steps=2, profiler="simple")
    trainer.fit(Net(), datamodule=Data())
    assert calls(trainer) == calls(trainer) | {"[DataModule]Data.setup": 1, "[DataModule]Data.transfer_batch_to_device": 2}


def test_evaluation_and_prediction_have_reports_of_their_own(tmp_path):
    module, trainer = fit(Watched, SimpleProfiler(tmp_path, "times"))
    trainer.validate(module, loader(Net.rows(6), 3), verbose=False)
    assert calls(trainer) == calls(trainer) | {"validation_step": 2, "validation_dataloader_next": 3}
    trainer.predict(module, loader(Net.rows(6), 2))
    assert calls(trainer) == calls(trainer) | {"predict_step": 3, "predict_dataloader_next": 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-times-0.txt", "predict-times-0.txt", "validate-times-0.txt"]


def trace_of(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X"]


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_a_failing_run_tells_what_it_has(profiler, tmp_path, capsys):
    class Failing(Watched):
        def training_step(self, batch, batch_idx):
            if self.global_step == 4:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        fit(Failing, profiler, default_root_dir=tmp_path)
    out = capsys.readouterr().out
    assert "FIT Profiler Report" in out and "training_step" in out and "backward" in out
    if profiler == "pytorch":
        (trace,) = tmp_path.glob("*.pt.trace.json")
        assert trace_of(trace).count("backward") == 2  # of steps 3 and 4
    assert not torch.autograd.profiler._is_profiler_enabled
    fit(Watched, profiler, default_root_dir=tmp_path)  # nothing is left open


def test_the_trace_has_the_parts_of_each_step(tmp_path):
    module, _ = fit(Watched, "pytorch", default_root_dir=tmp_path, accumulate_grad_batches=2, callbacks=[Hooks()])
    (trace,) = tmp_path.glob("fit-0.*.pt.trace.json")
    found = trace_of(trace)
    steps = [name for name in found if name.startswith("ProfilerStep")]
    assert steps == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]  # the third to fifth optimizer step
    counts = {name: found.count(name) for name in ("training_step", "my part", "backward", "optimizer_step", "Linear: layers.0")}
    assert counts == {"training_step": 6, "my part": 6, "backward": 6, "optimizer_step": 3, "Linear: layers.0": 8}  # 2 of the validation
    assert "[Callback]Hooks.on_train_batch_end" in found
    assert not any(layer._forward_hooks for layer in module.modules())


class Told(Watched):
    """Leaves with the caller where the logger of rank 0 wrote."""

    def on_train_start(self):
        self.where = self.trainer.log_dir


class Twice(PyTorchProfiler):
    """Reports as without a file, and then to one."""

    def describe(self):
        super().describe()
        self.filename = "again"
        super().describe()


def test_ranks_of_the_local_launcher(tmp_path, capfd):
    profiler = Twice(schedule=torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1), record_shapes=True)
    module, trainer = fit(Told, profiler, strategy="ddp", devices=2, default_root_dir=tmp_path, logger="csv")
    out = capfd.readouterr().out
    assert out.count("FIT Profiler Report") == 1 and "records rank: 0" in out
    assert trainer.profiler is profiler and profiler.filename == "again"  # what rank 0's has come to is back
    for rank in (0, 1):
        assert f"records rank: {rank}" in Path(module.where, f"fit-again-{rank}.txt").read_text()
        (name,) = [name for name in os.listdir(module.where) if name.startswith(f"fit-{rank}.")]
        found = trace_of(Path(module.where, name))
        assert {"ProfilerStep#3", "ProfilerStep#4", "training_step", "optimizer_step"} <= set(found)
        assert found.count("backward") == 2
