"""TensorBoardLogger beside its numbers: charts of the Custom Scalars tab, images, texts, histograms, figures, and what a resume takes back."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from callbacks import Logger, TensorBoardLogger
from callbacks.errors import MisconfigurationException
from callbacks.loggers.tb_files import SESSION_END, event_files, forget
from callbacks.loggers.tb_layout import Charts
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.modules import Scalar, loader, quiet


def read(logger: Any) -> EventAccumulator:
    (file,) = event_files(str(logger.log_dir))
    return EventAccumulator(file, size_guidance={TENSORS: 0}).Reload()


def started(root: Path, logger: TensorBoardLogger, **changes: Any) -> tuple[TensorBoardLogger, FakeTrainer]:
    trainer = FakeTrainer(root, [logger], **changes)
    logger.resolve(trainer)
    trainer.hook("on_fit_start")
    return logger, trainer


# -- charts ----------------------------------------------------------------------------------------------------------------

NAMES = {  # what the monitors publish, and losses and metrics by several conventions -> (category, chart)
    "loss": ("losses and metrics", "loss"),
    "train/loss": ("losses and metrics", "loss"),
    "val_loss_epoch": ("losses and metrics", "loss"),
    "val_acc/dataloader_idx_1": ("losses and metrics", "acc"),
    "test.acc": ("losses and metrics", "acc"),
    "step_time": ("losses and metrics", "step_time"),
    "lr-SGD": ("optimization", "learning rate"),
    "lr-Adam-1/pg2": ("optimization", "learning rate"),
    "my_lr": ("optimization", "learning rate"),
    "lr-SGD-momentum": ("optimization", "momentum"),
    "lr-Adam/pg1-weight_decay": ("optimization", "weight decay"),
    "grad_norm": ("optimization", "gradient norm"),
    "grad_norm_1": ("optimization", "gradient norm"),
    "grad_norm/net.0": ("optimization", "gradient norm by layer"),
    "train/device/samples_per_sec": ("throughput", "samples a second"),
    "train.samples_per_sec": ("throughput", "samples a second"),
    "train/device/items_per_sec": ("throughput", "items a second"),
    "train/batches_per_sec": ("throughput", "batches a second"),
    "train/device/flops_per_sec": ("throughput", "operations a second"),
    "train/device/mfu": ("throughput", "share of the device's operations"),
    "straggler/data_wait": ("throughput", "seconds a step: all, data wait, forward"),
    "system/on_train_batch_end/allocated_bytes.all.peak": ("memory", "device memory in bytes"),
    "system/on_train_batch_end/cpu_vm_percent": ("memory", "memory of the machine in percent"),
    "straggler/skew": ("ranks", "skew: slowest rank / the others"),
    "straggler/slowest_rank": ("ranks", "slowest rank"),
    "straggler/data_wait/rank_3": ("ranks", "data wait by rank, seconds a step"),
    "straggler/forward/rank_0": ("ranks", "forward by rank, seconds a step"),
    "system/on_train_batch_start/allocated_bytes.all.peak": None,
    "system/on_train_batch_end/num_ooms": None,
    "train/time": None,
    "validate/device/samples_per_sec": None,
    "epoch": None,
    "best/val_acc": None,
    "hp_metric": None,
}


@pytest.mark.parametrize("front", ["", "p-"])
def test_every_name_is_in_its_chart_and_in_no_other(front: str) -> None:
    charts = Charts(front)
    assert charts.add(front + name for name in NAMES) and not charts.add([f"{front}val_loss"])
    layout = charts.layout()
    assert list(layout) == ["losses and metrics", "optimization", "throughput", "memory", "ranks"]
    assert list(layout["losses and metrics"]) == ["loss", "acc", "step_time"]  # losses first
    found = {
        name: [(category, title) for category, some in layout.items() for title, (_, (pattern,)) in some.items() if re.match(pattern, front + name)]
        for name in NAMES
    }
    assert found == {name: [chart] if chart else [] for name, chart in NAMES.items()}


def layouts(logger: Any) -> list[tuple[int, list[str]]]:
    """Return (step, charts) of every layout in the file."""
    events = read(logger).Tensors("custom_scalars__config__")
    found = [(event.step, layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])) for event in events]
    return [(step, [chart.title for category in layout.category for chart in category.chart]) for step, layout in found]


def test_the_layout_grows_with_the_names_and_is_written_only_then(tmp_path: Path) -> None:
    logger, _ = started(tmp_path, TensorBoardLogger())
    for step in (1, 2, 3):
        logger.publish({"loss": 1.0, "epoch": 0.0}, step, "train")
    logger.publish({"loss": 1.0, "val_acc": 0.5, "epoch": 0.0}, 3, "validate")
    logger.finalize("success")
    assert layouts(logger) == [(1, ["loss"]), (3, ["loss", "acc"])]


def test_a_layout_of_ones_own_or_none(tmp_path: Path) -> None:
    own = {"mine": {"both": ["Multiline", ["a", "b"]], "band": ["Margin", ["a", "low", "high"]]}}
    logger, trainer = started(tmp_path, TensorBoardLogger(name="own", layout=own, log_config=False))
    trainer.hook("on_train_start")
    logger.publish({"loss": 1.0}, 1, "train")
    logger.finalize("success")
    assert layouts(logger) == [(1, ["both", "band"])]
    logger, trainer = started(tmp_path, TensorBoardLogger(name="none", layout=False, log_config=False))
    trainer.hook("on_train_start")
    logger.publish({"loss": 1.0}, 1, "train")
    logger.finalize("success")
    assert read(logger).Tags()["tensors"] == []


def test_figures_of_the_machine_do_not_come_first(tmp_path: Path) -> None:
    logger, _ = started(tmp_path, TensorBoardLogger(prefix="p"))
    logger.publish({"loss": 1.0, "DeviceStatsMonitor.on_train_batch_end/cpu_percent": 50.0}, 1, "train")
    logger.finalize("success")
    assert read(logger).Tags()["scalars"] == ["p-loss", "p-system/on_train_batch_end/cpu_percent"]
    assert layouts(logger) == [(1, ["loss", "load of the processor in percent"])]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"layout": ["a"]}, r"layout= takes True, False or \{"), ({"layout": {"a": {"b": ["Line", ["c"]]}}}, "chart 'b' is"),
    ({"layout": {"a": {"b": ["Multiline", "c"]}}}, "chart 'b' is"), ({"layout": {"a": {"b": ["Margin", ["c"]]}}}, "needs three names"),
    ({"best": {"acc": "most"}}, "must say \"min\" or \"max\""),
])  # fmt: skip
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        TensorBoardLogger(**arguments)


# -- by hand ---------------------------------------------------------------------------------------------------------------


class ByHand(Scalar):
    """Logs a text everywhere, on all loggers, and calls it by the place."""

    def note(self, place: str) -> None:
        for logger in self.loggers:
            logger.log_text(place, place)

    def on_train_start(self) -> None:
        self.note("on_train_start")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.note("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("validation_step")

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("test_step")


class Deaf(Logger):
    """A logger that can show nothing but numbers."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass


def test_what_is_logged_by_hand_stands_at_the_step_it_belongs_to_and_not_in_the_sanity_check(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, log_config=False)
    trainer = quiet(accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, num_sanity_val_steps=1, logger=[logger, Deaf()])
    trainer.fit(ByHand(), loader([1] * 4), loader([1]))
    trainer.test(ByHand(), loader([1]), verbose=False)
    events = read(logger)
    found = {tag: [event.step for event in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    assert found == {
        "on_train_start": [0], "training_step": [1, 1, 2, 2], "on_before_optimizer_step": [1, 2], "on_train_batch_end": [1, 1, 2, 2],
        "validation_step": [2], "on_train_epoch_end": [2], "test_step": [2],
    }  # fmt: skip


def pixels(logger: Any, tag: str) -> numpy.ndarray:
    (event,) = read(logger).Images(tag)
    return numpy.asarray(Image.open(io.BytesIO(event.encoded_image_string)))


def test_images_come_back(tmp_path: Path) -> None:
    logger, _ = started(tmp_path, TensorBoardLogger(prefix="p"))
    colors = torch.rand(3, 64, 80)
    logger.log_image("one", colors, 4)
    logger.log_image("bytes", torch.full((1, 64, 64), 200, dtype=torch.uint8), 4)
    logger.log_image("several", [torch.zeros(1, 64, 64), torch.ones(1, 64, 64), torch.ones(1, 64, 64)], 4)
    logger.log_image("beyond", numpy.array([[[-2.0, 0.0], [2.0, numpy.nan]]]), 4)
    logger.finalize("success")
    numpy.testing.assert_array_equal(pixels(logger, "p-one"), (colors * 255).round().byte().permute(1, 2, 0).numpy())
    assert (pixels(logger, "p-bytes") == 200).all()
    grid = pixels(logger, "p-several")
    assert grid.shape == (134, 134, 3) and grid[40, 40, 0] == 0 and grid[40, 100, 0] == grid[100, 40, 0] == 255
    assert pixels(logger, "p-beyond")[::32, ::32, 0].tolist() == [[0, 128], [255, 128]]  # enlarged; one shift and scale for all


@pytest.mark.parametrize("shape", [(64, 64), (2, 64, 64), (1, 2, 64, 64), (0, 3, 64, 64)])
def test_other_shapes_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    logger, _ = started(tmp_path, TensorBoardLogger())
    with pytest.raises(MisconfigurationException, match=re.escape(f"with 1 or 3 channels; the shape here is {shape}")):
        logger.log_image("x", torch.zeros(shape))


def test_histograms_texts_and_figures(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    logger, trainer = started(tmp_path, TensorBoardLogger(), global_step=3)
    logger.log_histogram("h", torch.tensor([1.0, 1.0, 3.0, float("nan")]))
    logger.log_histogram("empty", [float("nan")])
    figure, axes = pyplot.subplots()
    axes.plot([1, 2])
    logger.log_figure("f", figure)
    assert not pyplot.fignum_exists(figure.number)
    trainer.sanity_checking = True
    logger.log_histogram("not", [1.0])
    logger.log_image("not", torch.zeros(1, 64, 64))
    logger.finalize("success")
    events = read(logger)
    (h,) = events.Histograms("h")
    assert (h.step, h.histogram_value.min, h.histogram_value.max, h.histogram_value.num, h.histogram_value.sum) == (3, 1.0, 3.0, 3, 5.0)
    assert h.histogram_value.bucket[0] == 2 and h.histogram_value.bucket[-1] == 1 and h.histogram_value.bucket_limit[-1] == 3.0
    assert events.Tags()["histograms"] == ["h"] and events.Tags()["images"] == ["f"] and events.Images("f")[0].step == 3


def test_the_configuration_is_readable(tmp_path: Path) -> None:
    class Model(Scalar):
        def __init__(self, lr: float = 0.5) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = TensorBoardLogger(tmp_path)
    quiet(accelerator="cpu", max_epochs=1, gradient_clip_val=0.25, logger=logger).fit(Model(), loader([1]))
    events = read(logger)
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"] if tag.startswith("config/")}
    assert "| gradient_clip_val | 0.25 |" in texts["config/trainer"] and "| precision | 32-true |" in texts["config/trainer"]
    assert texts["config/hyper_parameters"] == "    lr: 0.5\n"
    assert texts["config/model"] == "1 parameters, 1 of them trained.\n\n    Model()\n"


# -- best values -------------------------------------------------------------------------------------------------------------


def test_best_values_are_told_apart_by_stage_and_may_be_asked_for(tmp_path: Path) -> None:
    logger, _ = started(tmp_path, TensorBoardLogger(best={"acc": "max", "f1": "max"}))
    for step, (train, val) in enumerate([(0.9, 0.5), (0.2, 0.8), (0.4, 0.1)], 1):
        logger.publish({"loss": train, "acc": train}, step, "train")
        logger.publish({"loss": val, "acc": val, "f1": val, "hinge_loss": 10 + val}, step, "validate")
    logger.publish({"loss": 0.0, "f1": 1.0}, 3, "test")
    logger.on_train_epoch_end(None, None)
    state = json.loads(json.dumps(logger.state_dict()))
    logger.finalize("success")

    def best(folder: Path) -> dict[str, float]:
        events = EventAccumulator(str(folder)).Reload()
        return {tag: round(events.Scalars(tag)[-1].value, 6) for tag in events.Tags()["scalars"] if tag.startswith("best/")}

    assert best(Path(logger.log_dir)) == {"best/acc": 0.9, "best/f1": 0.8, "best/hinge_loss": 10.1}
    assert best(Path(logger.log_dir) / "val") == {"best/loss": 0.1, "best/acc": 0.8}
    again = TensorBoardLogger()
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.load_state_dict({"best": {"acc": 1.0}})  # of a file that did not tell stages apart
    assert again.state_dict() == state


# -- a resume ----------------------------------------------------------------------------------------------------------------


def test_the_files_forget_later_steps_and_how_the_run_ended(tmp_path: Path) -> None:
    logger, _ = started(tmp_path, TensorBoardLogger(version="a"))
    logger.log_hyperparams({"lr": 0.1})
    for step in range(1, 6):
        logger.publish({"loss": float(step)}, step, "train")
        logger.log_text("t", "x", step)
    logger.finalize("failed")
    (file,) = event_files(str(logger.log_dir))
    whole = Path(file).read_bytes()
    for torn in (0, 5, 20):  # bytes that a killed writer left behind
        Path(file).write_bytes(whole + whole[:torn])
        assert forget(file, 3, [SESSION_END]) == 3
        events = read(logger)
        assert [e.step for e in events.Scalars("loss")] == [e.step for e in events.Tensors("t")] == [1, 2, 3]
        assert "_hparams_/session_start_info" in events.summary_metadata and "_hparams_/session_end_info" not in events.summary_metadata
        size = Path(file).stat().st_size
        forget(file, 3, [SESSION_END])
        assert Path(file).stat().st_size == size
    assert sorted(p.name for p in Path(logger.log_dir).iterdir()) == sorted([Path(file).name, "hparams.yaml"])


def test_a_logger_that_goes_back_to_an_earlier_step_shows_all_again(tmp_path: Path) -> None:
    logger, trainer = started(tmp_path, TensorBoardLogger())
    for begin, end in ((1, 6), (3, 4)):
        trainer.global_step = begin - 1
        trainer.hook("on_fit_start")
        for step in range(begin, end + 1):
            logger.publish({"loss": float(step), "epoch": 0.0}, step, "train")
        logger.publish({"val_loss": 0.5, "val_acc": 0.5, "epoch": 0.0}, end, "validate")
        logger.finalize("success")
    events = read(logger)
    found = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"loss": [1, 2, 3, 4], "epoch": [1, 2, 3, 4], "val_loss": [4], "val_acc": [4], "best/val_loss": [4]}
    assert layouts(logger) == [(1, ["loss"]), (3, ["loss", "acc"])]


def test_a_file_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    first, _ = started(tmp_path, TensorBoardLogger(version="a"))
    first.publish({"loss": 1.0}, 1, "train")
    first.save()
    second, _ = started(tmp_path, TensorBoardLogger(version="a"), global_step=1)
    second.publish({"loss": 2.0}, 2, "train")
    first.publish({"other": 1.0}, 1, "train")
    first.save()
    second.finalize("success")
    assert len(event_files(str(second.log_dir))) == 2
    first.finalize("success")
