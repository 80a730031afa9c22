"""GradientMonitor, ThroughputMonitor, DeviceStatsMonitor and StragglerMonitor: which numbers come when, on one and two ranks."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import callbacks.straggler
import callbacks.throughput
from callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientMonitor,
    LambdaCallback,
    Logger,
    StragglerMonitor,
    ThroughputMonitor,
)
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from trainer import MisconfigurationException, TrainModule


class Kept(Logger):
    """Keeps what a logger gets: (step, name) -> value."""

    name, version = "kept", 0

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, str], float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.numbers.update({(step, name): value for name, value in metrics.items() if name != "epoch"})

    def named(self, name: str) -> dict[int, float]:
        return {step: value for (step, one), value in self.numbers.items() if one == name}


def fit(module: TrainModule, data: Any, *more: Callback, val: Any = None, **settings: Any) -> tuple[Any, Kept]:
    logger = Kept()
    trainer = quiet(accelerator="cpu", **{"max_epochs": 1, "logger": logger, **settings, "callbacks": list(more)})
    trainer.fit(module, data, val)
    return trainer, logger


# -- GradientMonitor -------------------------------------------------------------------------------------------------------


def norms_by_hand(rows: torch.Tensor, steps: int, size: int, p: float = 2.0) -> list[dict[str, float]]:
    """The gradients' norms of each step of Net, in 64 bits."""
    net, found = Net().double(), []
    optimizer = net.configure_optimizers()
    for batch in rows.split(size)[:steps]:
        optimizer.zero_grad()
        net.loss(batch).backward()
        grads = {name: torch.cat([q.grad.flatten() for q in net.layers[i].parameters()]) for i, name in ((0, "layers.0"), (2, "layers.2"))}
        one = {f"grad_norm/{name}": torch.linalg.vector_norm(grad, p).item() for name, grad in grads.items()}
        found.append({**one, "grad_norm": torch.linalg.vector_norm(torch.cat(list(grads.values())), p).item()})
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return found


ROWS = Net.rows(24, torch.float64)
EXACT: dict[str, Any] = {"precision": "64-true", "gradient_clip_val": 0.1}


def test_the_norms_are_those_of_a_loop_by_hand_at_publish_points_alone() -> None:
    trainer, logger = fit(Net(), loader(ROWS, 4), GradientMonitor(), log_every_n_steps=2, **EXACT)
    hand = norms_by_hand(ROWS, 6, 4)
    assert {step for step, _ in logger.numbers} == {2, 4, 6}
    for (step, name), value in logger.numbers.items():
        assert value == pytest.approx(hand[step - 1][name], abs=1e-12)
    assert {name for _, name in logger.numbers} == set(hand[0]) == set(trainer.callback_metrics)


@pytest.mark.parametrize("p", [1, "inf"])
def test_other_norms_and_depths(p: Any) -> None:
    hand = norms_by_hand(ROWS, 1, 24, float(p))[0]
    _, by_layer = fit(Net(), loader(ROWS, 24), GradientMonitor(p), **EXACT)
    assert {name: value for (_, name), value in by_layer.numbers.items()} == pytest.approx(hand, abs=1e-12)
    for depth, names in ((0, {"grad_norm"}), (1, {"grad_norm", "grad_norm/layers"})):
        _, logger = fit(Net(), loader(ROWS, 24), GradientMonitor(p, depth), **EXACT)
        assert {name for _, name in logger.numbers} == names
        assert all(value == pytest.approx(hand["grad_norm"], abs=1e-12) for value in logger.numbers.values())


def _norms_on_ranks(strategy: str) -> dict[tuple[int, str], float]:
    trainer, logger = fit(Net(), loader(ROWS, 2), GradientMonitor(), strategy=strategy, devices=2, log_every_n_steps=1, **EXACT)
    return {(6, name): value.item() for name, value in trainer.callback_metrics.items()} | logger.numbers


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_log_the_norms_of_the_whole_gradients(strategy: str) -> None:
    hand = norms_by_hand(ROWS, 6, 4)
    first, second = run_ranks(_norms_on_ranks, strategy=strategy)
    assert len(first) == 18 and len(second) == 3
    for numbers in (first, second):
        for (step, name), value in numbers.items():
            assert value == pytest.approx(hand[step - 1][name], abs=1e-12 if numbers is first else 1e-6)  # callback_metrics have 32 bits


def test_several_optimizers_have_totals_of_their_own_and_frozen_layers_none() -> None:
    class Two(Net):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.layers[0].bias.requires_grad_(False)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.layers[i].parameters(), lr=0.1) for i in (0, 2)]

    _, logger = fit(Two(), loader(ROWS, 24), GradientMonitor(), precision="64-true")
    numbers = {name: value for (_, name), value in logger.numbers.items()}
    assert numbers.keys() == {"grad_norm_0", "grad_norm_1", "grad_norm/layers.0", "grad_norm/layers.2"}
    assert numbers["grad_norm_1"] == numbers["grad_norm/layers.2"] == pytest.approx(norms_by_hand(ROWS, 1, 24)[0]["grad_norm/layers.2"])


def test_what_it_logs_can_be_monitored_and_mistakes_are_refused() -> None:
    trainer, _ = fit(Net(), loader(ROWS, 4), GradientMonitor(), EarlyStopping("grad_norm", stopping_threshold=1e9), max_epochs=5, **EXACT)
    assert trainer.current_epoch == 1
    for arguments, name in (((0,), "norm_type=0"), (("two",), "norm_type='two'"), ((2.0, -1), "depth=-1")):
        with pytest.raises(MisconfigurationException, match=name):
            GradientMonitor(*arguments)


# -- ThroughputMonitor -----------------------------------------------------------------------------------------------------


class Timed(Scalar):
    """A training step takes a second, a validation step ten, on the clock of the monitors."""

    flops_per_batch = 5e9

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        for name in ("throughput", "straggler"):  # in this process, which a test may not share with others
            importlib.import_module(f"callbacks.{name}").perf_counter = lambda: self.now

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.now += 10


@pytest.fixture(autouse=True)
def clock() -> Any:
    before = callbacks.throughput.perf_counter
    yield
    callbacks.throughput.perf_counter = callbacks.straggler.perf_counter = before


def monitor(**more: Any) -> ThroughputMonitor:
    return ThroughputMonitor(len, lambda batch: 3 * len(batch), **more)


def test_throughput_counts_training_without_validation() -> None:
    settings: dict[str, Any] = {"log_every_n_steps": 2, "val_check_interval": 3, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    trainer, logger = fit(Timed(), loader(range(24), 2), monitor(available_flops=1e10), val=loader(range(6), 2), **settings)
    assert logger.named("train/time") == {2: 4.0, 4: 8.0, 6: 12.0}  # two batches of a second in each step
    assert logger.named("train/batches") == {2: 4.0, 4: 8.0, 6: 12.0} and logger.named("train/lengths") == {2: 24.0, 4: 48.0, 6: 72.0}
    assert logger.named("train/samples") == {2: 8.0, 4: 16.0, 6: 24.0}
    for name, rate in (("batches", 1.0), ("samples", 2.0), ("items", 6.0), ("flops", 5e9)):
        assert logger.named(f"train/device/{name}_per_sec") == {4: rate, 6: rate}
        assert logger.named(f"train/{name}_per_sec") == {}  # of all ranks: there is one
    assert logger.named("train/device/mfu") == {4: 0.5, 6: 0.5}
    assert logger.named("validate/time") == {3: 30.0, 6: 30.0} and logger.named("validate/device/samples_per_sec") == {3: 0.2, 6: 0.2}
    assert not trainer.callback_metrics  # they differ from rank to rank


def test_rates_reach_back_one_window() -> None:
    class Slowing(Timed):
        flops_per_batch = None

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.now += self.global_step  # the n-th batch takes n seconds
            return super().training_step(batch, batch_idx)

    _, logger = fit(Slowing(), loader(range(6)), ThroughputMonitor(len, window_size=2, separator="-"), log_every_n_steps=1)
    assert logger.named("train-device-batches_per_sec") == pytest.approx({2: 1 / 2, 3: 2 / 5, 4: 2 / 7, 5: 2 / 9, 6: 2 / 11})
    assert not logger.named("train-lengths") and not logger.named("train-device-flops_per_sec")
    _, whole = fit(Slowing(), loader(range(6)), ThroughputMonitor(len, window_size=5), log_every_n_steps=2)
    assert whole.named("train/device/batches_per_sec") == pytest.approx({4: 2 / 7, 6: 4 / 18})
    with pytest.raises(MisconfigurationException, match="window_size=0"):
        ThroughputMonitor(len, window_size=0)


def test_test_and_predict_are_measured_whole() -> None:
    class Both(Timed):
        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.now += 2

        predict_step = test_step

    logger = Kept()
    trainer, module = quiet(accelerator="cpu", logger=logger, callbacks=[monitor()]), Both()
    trainer.test(module, loader(range(6), 2), verbose=False)
    trainer.predict(module, loader(range(4), 1))
    assert logger.named("test/device/samples_per_sec") == {0: 1.0} and logger.named("predict/device/batches_per_sec") == {0: 0.5}


def _throughput_on_ranks() -> dict[int, dict[str, float]]:
    _, logger = fit(Timed(), loader(range(16), 2), monitor(), strategy="ddp", devices=2, log_every_n_steps=2)
    return {step: {n: v for (s, n), v in logger.numbers.items() if s == step} for step, _ in logger.numbers}


def test_the_ranks_together_do_the_multiple() -> None:
    first, second = run_ranks(_throughput_on_ranks)
    assert second == {} and first.keys() == {2, 4}
    assert (first[4]["train/device/samples_per_sec"], first[4]["train/samples_per_sec"], first[4]["train/flops_per_sec"]) == (2.0, 4.0, 1e10)


# -- DeviceStatsMonitor ----------------------------------------------------------------------------------------------------


def test_figures_of_the_device_come_at_publish_points() -> None:
    pytest.importorskip("psutil")
    settings: dict[str, Any] = {"log_every_n_steps": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    trainer, logger = fit(Timed(), loader(range(16), 2), DeviceStatsMonitor(), val=loader(range(4), 2), **settings)
    for hook, steps in (("on_train_batch_start", {2, 4}), ("on_train_batch_end", {2, 4}), ("on_validation_end", {4})):
        for figure in ("cpu_load", "cpu_percent", "cpu_vm_percent", "cpu_swap_percent"):
            found = logger.named(f"DeviceStatsMonitor.{hook}/{figure}")
            assert found.keys() == steps and all(0 <= value and math.isfinite(value) for value in found.values())
    assert not trainer.callback_metrics
    assert fit(Timed(), loader(range(4)), DeviceStatsMonitor(cpu_stats=False))[1].numbers == {}


def test_device_stats_need_a_logger_and_psutil(monkeypatch: Any) -> None:
    with pytest.raises(MisconfigurationException, match="the trainer has no logger"):
        fit(Timed(), loader(range(4)), DeviceStatsMonitor(), logger=False)
    monkeypatch.setattr("callbacks.device_stats.find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match="needs the package psutil"):
        fit(Timed(), loader(range(4)), DeviceStatsMonitor(cpu_stats=True))
    _, logger = fit(Timed(), loader(range(4)), DeviceStatsMonitor())
    assert {name.partition("/")[2] for _, name in logger.numbers} == {"cpu_load"}


# -- StragglerMonitor ------------------------------------------------------------------------------------------------------


class Slow(Dataset):
    """Takes the seconds of its rank to fetch an item."""

    def __init__(self, module: Timed, seconds: float) -> None:
        self.module, self.seconds = module, seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.module.now += self.seconds
        return torch.ones(())


def _straggling(fetch: float, forward: float, **settings: Any) -> tuple[list[Any], Kept, list[str]]:
    """Rank 1 takes so much longer than rank 0 to fetch a batch, and to compute on it."""
    module, spy = Timed(), StragglerMonitor(per_rank=True)
    warned: list[str] = []
    seen: list[Any] = []
    step = module.training_step

    def extra(trainer: Any, module: Any) -> None:
        trainer.warn = warned.append if trainer.is_global_zero else trainer.warn
        module.slow = forward if trainer.global_rank == 1 else 0.0
        module.train_data.seconds += fetch if trainer.global_rank == 1 else 0.0

    def training_step(batch: torch.Tensor, batch_idx: int) -> Any:
        module.now += module.slow
        return step(batch, batch_idx)

    module.train_data = Slow(module, 0.5)
    module.__dict__["training_step"] = training_step
    watch = LambdaCallback(setup=lambda t, m, stage: extra(t, m), on_train_batch_end=lambda t, m, *_: seen.append(list(spy.times)))
    _, logger = fit(module, DataLoader(module.train_data, batch_size=1), spy, watch, log_every_n_steps=2, **settings)
    return seen, logger, warned


def _two_ranks(fetch: float, forward: float) -> tuple[list[Any], dict[tuple[int, str], float], list[str]]:
    seen, logger, warned = _straggling(fetch, forward, strategy="ddp", devices=2)
    return seen[-1], logger.numbers, warned


@pytest.mark.parametrize(("fetch", "forward", "reason"), [(3.0, 0.0, "waits for data"), (0.0, 2.0, "computes")])
def test_the_slow_rank_is_named_with_its_reason(fetch: float, forward: float, reason: str) -> None:
    (times, numbers, warned), (same, none, silent) = run_ranks(_two_ranks, fetch=fetch, forward=forward)
    assert times == same == [(1.5, 0.5, 1.0), (1.5 + fetch + forward, 0.5 + fetch, 1.0 + forward)]
    assert none == {} and silent == []
    at_the_end = {name: value for (step, name), value in numbers.items() if step == 4}
    assert at_the_end == {
        "straggler/step_time": 1.5 + (fetch + forward) / 2, "straggler/data_wait": 0.5 + fetch, "straggler/forward": 1.0 + forward,
        "straggler/slowest_rank": 1.0, "straggler/skew": (1.5 + fetch + forward) / 1.5,
        "straggler/data_wait/rank_0": 0.5, "straggler/data_wait/rank_1": 0.5 + fetch,
        "straggler/forward/rank_0": 1.0, "straggler/forward/rank_1": 1.0 + forward,
    }  # fmt: skip
    (text,) = [text for text in warned if "validation" not in text]
    assert text.startswith("Rank 1 is the slow one in step 2") and f"It {reason} longer" in text


def test_alone_there_is_no_skew_and_validation_is_no_wait() -> None:
    module = Timed()
    watch = StragglerMonitor()
    settings: dict[str, Any] = {"log_every_n_steps": 3, "val_check_interval": 2, "accumulate_grad_batches": 2}
    _, logger = fit(module, DataLoader(Slow(module, 0.25), batch_size=1), watch, val=loader([1.0]), **settings)
    assert logger.named("straggler/step_time") == {3: 2.5, 4: 2.5} and logger.named("straggler/data_wait") == {3: 0.5, 4: 0.5}
    assert logger.named("straggler/forward") == {3: 2.0, 4: 2.0} and logger.named("straggler/skew") == {}
    with pytest.raises(MisconfigurationException, match="threshold=1"):
        StragglerMonitor(1)
