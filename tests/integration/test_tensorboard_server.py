"""What a real TensorBoard server answers about runs on the digits data: numbers, charts, tables, pictures, texts."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from callbacks import (
    Callback,
    DeviceStatsMonitor,
    GradientMonitor,
    HistogramMonitor,
    LearningRateMonitor,
    Logger,
    ModelCheckpoint,
    SampleImages,
    StragglerMonitor,
    TensorBoardLogger,
    ThroughputMonitor,
)
from examples.digits import DigitNet, Digits
from tests.helpers.modules import quiet
from tests.helpers.tensorboard_server import Server, serving

STEPS = 6  # of an epoch; there are two


class Net(DigitNet):
    """The example's module, which also says what its graph is, and logs by hand."""

    def __init__(self, lr: float, extra: str | None = None) -> None:
        super().__init__(lr)
        self.save_hyperparameters(*(["lr"] if extra is None else []))
        self.example_input_array = torch.zeros(2, 1, 8, 8)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.net(pictures)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        for logger in self.loggers:
            logger.log_text("note", f"at step **{self.global_step}**")


class Truth(Logger):
    """Every published number, by (stage, name): a list of (step, value)."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def publish(self, metrics: dict[str, float], step: int, stage: str) -> None:
        for name, value in metrics.items():
            self.lines.setdefault((stage, name), []).append((step, value))


class Gradients(Callback):
    """The gradients that the optimizer gets, by step."""

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found[trainer.global_step + 1] = module.net[0].weight.grad.clone()


class Stop(Callback):
    """Breaks off in a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step + 1 == self.step:
            raise RuntimeError("broken off")


def fit(root: Path, version: str, module: Net, *extra: Callback, ckpt_path: Any = None) -> SimpleNamespace:
    truth, gradients = Truth(), Gradients()
    monitors = [LearningRateMonitor(), GradientMonitor(), StragglerMonitor(), ThroughputMonitor(lambda batch: len(batch[0])), DeviceStatsMonitor()]
    shown = [HistogramMonitor(every_n_steps=3), SampleImages(num_images=4)]
    best = ModelCheckpoint(root / "best" / version, monitor="val_acc", mode="max")
    every = ModelCheckpoint(root / "saved" / version, every_n_train_steps=4, save_top_k=-1)
    trainer = quiet(
        accelerator="cpu", max_epochs=2, limit_train_batches=2 * STEPS, accumulate_grad_batches=2, log_every_n_steps=2, seed=0, num_sanity_val_steps=1,
        logger=[TensorBoardLogger(root / "logs", name="", version=version, log_graph=True), truth],
        callbacks=[*monitors, *shown, gradients, best, every, *extra],
    )  # fmt: skip
    trainer.fit(module, datamodule=Digits(batch_size=16), ckpt_path=ckpt_path)
    return SimpleNamespace(lines=truth.lines, gradients=gradients.found, module=module, trainer=trainer)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """Three runs: two with other hyper-parameters, and one like the first that is broken off in step 9 and resumed from step 4."""
    root = tmp_path_factory.mktemp("digits")
    torch.manual_seed(0)
    start = Net(0.01).state_dict()

    def module(**hparams: Any) -> Net:
        made = Net(**hparams)
        made.load_state_dict(start)
        return made

    whole, other = fit(root, "whole", module(lr=0.01)), fit(root, "other", module(lr=0.001, extra="x"))
    with pytest.raises(RuntimeError, match="broken off"):
        fit(root, "resumed", module(lr=0.01), Stop(9))
    for folder in ("resumed", "resumed/val"):  # a process that is killed may leave half a record
        (file,) = (root / "logs" / folder).glob("events.out.tfevents*")
        with open(file, "ab") as events:
            events.write(b"\x50\0\0\0\0\0\0\0half")
    (checkpoint,) = (root / "saved" / "resumed").glob("*step=4.ckpt")
    resumed = fit(root, "resumed", module(lr=0.01), ckpt_path=checkpoint)
    (root / "logs" / "whole" / "host_1.1234567890.pt.trace.json").write_text('{"traceEvents": []}')  # as PyTorchProfiler leaves it
    return {"root": root / "logs", "whole": whole, "other": other, "resumed": resumed}


@pytest.fixture(scope="module")
def server(runs: dict[str, Any]) -> Iterator[Server]:
    def loaded(server: Server) -> bool:
        """The last records of every file are there."""
        ended = server.post("plugin/hparams/session_groups", {"allowedStatuses": ["STATUS_SUCCESS"], "colParams": [], "sliceSize": 9})
        found = server.plugin("scalars", "tags")
        return len(ended.get("sessionGroups", ())) == 3 and all("best/loss" in found.get(f"{run}/val", ()) for run in ("whole", "other", "resumed"))

    with serving(runs["root"], loaded) as found:
        yield found


def test_every_run_has_one_event_file_and_one_for_validation(runs: dict[str, Any], server: Server) -> None:
    for run in ("whole", "other", "resumed"):
        assert len(list((runs["root"] / run).glob("events.out.tfevents*"))) == 1
        assert len(list((runs["root"] / run).rglob("events.out.tfevents*"))) == 2
    assert sorted(server.get("runs")) == sorted(f"{run}{part}" for run in ("whole", "other", "resumed") for part in ("", "/val"))


@pytest.mark.parametrize("run", ["whole", "other"])
def test_every_published_number_is_a_point_at_its_optimizer_step(runs: dict[str, Any], server: Server, run: str) -> None:
    assert runs[run].lines["train", "loss"][-1][0] == 2 * STEPS
    for (stage, name), points in runs[run].lines.items():
        place = f"{run}/val" if (stage, name) == ("validate", "loss") else run  # one chart, two lines
        expected = sorted(dict(points).items())
        found = server.scalars(place, name.replace("DeviceStatsMonitor.", "system/"))
        if name == "epoch":  # once a step, whoever publishes
            assert [step for step, _ in found] == sorted({step for step, _ in points} | {step for step, _ in runs[run].lines["train", "epoch"]})
            assert all(epoch == (step - 1) // STEPS for step, epoch in found)
        else:
            assert [step for step, _ in found] == [step for step, _ in expected], name
            numpy.testing.assert_allclose([value for _, value in found], [value for _, value in expected], rtol=1e-6, err_msg=name)
    walls = [wall for wall, *_ in server.plugin("scalars", "scalars", run=run, tag="loss")]
    assert walls == sorted(walls) and walls[0] > 1e9


def test_a_resumed_run_continues_every_line_without_doubled_points(runs: dict[str, Any], server: Server) -> None:
    steps = {"loss": [2, 4, 6, 8, 10, 12], "val_acc": [6, 12], "grad_norm": [2, 4, 6, 8, 10, 12], "best/val_acc": [12]}
    for tag, expected in steps.items():
        assert [step for step, _ in server.scalars("resumed", tag)] == expected
        assert server.scalars("resumed", tag) == server.scalars("whole", tag)  # to the bit
    for tag in ("loss", "best/loss"):
        assert server.scalars("resumed/val", tag) == server.scalars("whole/val", tag)
    for kind, page, tag in (("histograms", "histograms", "gradients/net.0.weight"), ("histograms", "histograms", "weights/net.9.bias")):
        lines = [[entry[1:] for entry in server.plugin(kind, page, run=run, tag=tag)] for run in ("resumed", "whole")]
        assert lines[0] == lines[1] and [step for step, _ in lines[0]] == [3, 6, 9, 12]
    for tag, expected_steps in (("samples/train", [1, STEPS + 1]), ("samples/val", [STEPS, 2 * STEPS])):
        images = server.plugin("images", "images", run="resumed", tag=tag, sample=0)
        assert [image["step"] for image in images] == expected_steps
    assert [text["step"] for text in server.plugin("text", "text", run="resumed", tag="config/trainer")] == [1, 5]  # as it was resumed


def test_c38_the_hparams_table_has_every_runs_final_and_best_numbers(runs: dict[str, Any], server: Server) -> None:
    experiment = server.post("plugin/hparams/experiment", {"includeMetrics": True})
    assert sorted(info["name"] for info in experiment["hparamInfos"]) == ["extra", "lr"]
    columns = [{"hparam": name} for name in ("lr", "extra")] + [{"metric": info["name"]} for info in experiment["metricInfos"]]
    every = [f"STATUS_{status}" for status in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
    table = server.post("plugin/hparams/session_groups", {"allowedStatuses": every, "colParams": columns, "sliceSize": 9})
    groups = {group["name"]: group for group in table["sessionGroups"]}
    assert set(groups) == {"whole", "other", "resumed"}
    for run, lr in (("whole", 0.01), ("other", 0.001), ("resumed", 0.01)):
        group, lines = groups[run], runs["whole" if run == "resumed" else run].lines
        assert group["hparams"]["lr"] == lr and group["sessions"][0]["status"] == "STATUS_SUCCESS"
        found = {(m["name"]["group"], m["name"]["tag"]): m["value"] for m in group["metricValues"]}
        assert not [name for name, value in found.items() if value == -1 or "hp_metric" in name]
        accuracy, losses = ([value for _, value in lines["validate", name]] for name in ("val_acc", "loss"))
        expected = {("", "loss"): lines["train", "loss"][-1][1], ("", "val_acc"): accuracy[-1], ("", "best/val_acc"): max(accuracy),
                    ("val", "loss"): losses[-1], ("val", "best/loss"): min(losses)}  # fmt: skip
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_the_custom_charts_show_what_the_monitors_publish(server: Server) -> None:
    layout = server.plugin("custom_scalars", "layout")
    charts = {category["title"]: {chart["title"]: chart["multiline"]["tag"][0] for chart in category["chart"]} for category in layout["category"]}
    assert list(charts) == ["losses and metrics", "optimization", "throughput", "memory", "ranks"][: len(charts)]
    assert list(charts["losses and metrics"]) == ["loss", "acc"] and "learning rate" in charts["optimization"]

    def lines(category: str, title: str, run: str = "whole") -> set[str]:
        answer = server.plugin("custom_scalars", "scalars", run=run, tag=charts[category][title])
        assert answer["regex_valid"]
        return {name for name, points in answer["tag_to_events"].items() if points}

    assert lines("losses and metrics", "loss") == {"loss"} == lines("losses and metrics", "loss", "whole/val")
    assert lines("losses and metrics", "acc") == {"acc", "val_acc"}
    assert lines("optimization", "learning rate") == {"lr-AdamW"}
    assert lines("optimization", "gradient norm") == {"grad_norm"}
    assert lines("optimization", "gradient norm by layer") == {f"grad_norm/net.{i}" for i in (0, 1, 4, 5, 9)}
    assert lines("throughput", "samples a second") == {"train/device/samples_per_sec"}
    assert lines("throughput", "seconds a step: all, data wait, forward") == {f"straggler/{name}" for name in ("step_time", "data_wait", "forward")}


def test_histograms_count_the_very_weights_and_gradients(runs: dict[str, Any], server: Server) -> None:
    last = server.plugin("histograms", "histograms", run="whole", tag="weights/net.0.weight")[-1]
    compare(last, 12, runs["whole"].module.net[0].weight.detach())
    for entry, step in zip(server.plugin("histograms", "histograms", run="whole", tag="gradients/net.0.weight"), (3, 6, 9, 12), strict=True):
        compare(entry, step, runs["whole"].gradients[step])


def compare(entry: Any, step: int, values: torch.Tensor) -> None:
    """Compare an entry of the histogram page (wall time, step, buckets) with a count by numpy."""
    _, found, buckets = entry
    left, right, counts = (numpy.array(column) for column in zip(*buckets, strict=True))
    assert (found, counts.sum()) == (step, values.numel())
    numpy.testing.assert_allclose((left[0], right[-1]), (values.min(), values.max()), rtol=1e-6)
    inside = [((values >= low - 1e-7) & (values <= high + 1e-7)).sum().item() for low, high in zip(left, right, strict=True)]
    assert all(math.isclose(count, number, abs_tol=2) for count, number in zip(counts, inside, strict=True))  # values on an edge


def test_the_pictures_are_those_of_the_batch(server: Server) -> None:
    (_, last) = server.plugin("images", "images", run="whole", tag="samples/val", sample=0)
    found = numpy.asarray(Image.open(io.BytesIO(server.get(f"plugin/images/individualImage?{last['query']}&x="))).convert("L"), dtype=float)
    data = Digits(batch_size=16)
    data.setup("fit")
    first = next(iter(data.val_dataloader()))[0][:4, 0]
    assert found.shape == (2 * 66 + 2, 2 * 66 + 2)  # a grid of 2 x 2, each enlarged to 64, with 2 pixels around it
    for i, expected in enumerate(first):
        top, left = 2 + 66 * (i // 2), 2 + 66 * (i % 2)
        numpy.testing.assert_allclose(found[top + 4 : top + 64 : 8, left + 4 : left + 64 : 8] / 255, expected, atol=0.003)


def test_texts_and_the_graph(server: Server) -> None:
    texts = {tag: server.plugin("text", "text", run="whole", tag=tag) for tag in server.plugin("text", "tags")["whole"]}
    assert set(texts) == {"config/trainer", "config/hyper_parameters", "config/model", "note"}
    assert "<td>accumulate_grad_batches</td>" in texts["config/trainer"][0]["text"].replace('align="left"', "")
    assert "lr: 0.01" in texts["config/hyper_parameters"][0]["text"]
    assert "29,258 parameters" in texts["config/model"][0]["text"] and "Conv2d(1, 32" in texts["config/model"][0]["text"]
    assert [(text["step"], "<strong>" in text["text"]) for text in texts["note"]] == [(STEPS, True), (2 * STEPS, True)]
    graph = server.plugin("graphs", "graph", run="whole", conceptual="false", limit_attr_size=1024, large_attrs_key="_too_large")
    assert b"Conv2d" in graph and b"Linear" in graph
