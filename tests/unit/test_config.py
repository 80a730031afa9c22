"""The checks and readings of single arguments. Wrong arguments of Trainer as a whole are in test_misuse."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import DDPStrategy, MisconfigurationException, Precision, SingleDeviceStrategy, Trainer, arguments, config
from trainer.launchers import LocalLauncher
from trainer.settings import apply_global_switches


@pytest.mark.parametrize(
    ("given", "read"),
    [(None, None), (1.0, None), (1, 1), (0, 0), (0.0, 0.0), (0.25, 0.25), (7, 7), (3.0, 3)],
)
def test_limits_tell_one_batch_from_all(given: Any, read: Any) -> None:
    found = arguments.limit("limit_train_batches", given)
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None),
        (timedelta(hours=2), timedelta(hours=2)),
        ({"minutes": 3, "seconds": 4}, timedelta(seconds=184)),
        ("01:02:03:04", timedelta(days=1, hours=2, minutes=3, seconds=4)),
    ],
)
def test_time_limits(given: Any, read: Any) -> None:
    assert arguments.time_limit(given) == read


@pytest.mark.parametrize("wrong", ["1:2:3", "a:b:c:d", 12, {"hour": 1}])
def test_time_limits_that_are_none(wrong: Any) -> None:
    with pytest.raises(MisconfigurationException, match="'DD:HH:MM:SS'"):
        arguments.time_limit(wrong)


def test_durations() -> None:
    assert arguments.duration("timeout", None) is None
    assert arguments.duration("timeout", 1.5) == timedelta(seconds=1.5)
    assert arguments.duration("timeout", timedelta(days=1)) == timedelta(days=1)
    for wrong in (0, -1, "1", True, timedelta(0)):
        with pytest.raises(MisconfigurationException, match="timeout=.* must be a number of seconds > 0 or a timedelta"):
            arguments.duration("timeout", wrong)


@pytest.mark.parametrize(("given", "every", "read"), [(None, 1, 1.0), (3, 1, 3), (3, None, 3), (0.5, 1, 0.5), (1, 1, 1)])
def test_validation_intervals(given: Any, every: int | None, read: Any) -> None:
    found = arguments.val_interval(given, every)
    assert (found, type(found)) == (read, type(read))


def test_whole_numbers_numbers_and_choices() -> None:
    assert arguments.at_least("n", None, 1, none=True) is None
    assert arguments.at_least("n", -1, 1, also=(-1,)) == -1
    assert arguments.positive("x", None) is None
    assert arguments.positive("x", 0.5) == 0.5
    assert arguments.one_of("c", "a", ("a", "b")) == "a"
    for wrong in (None, 0, 1.0, True, "1"):
        with pytest.raises(MisconfigurationException, match=r"n=.* must be a whole number >= 1\."):
            arguments.at_least("n", wrong, 1)
    for wrong in (-0.1, True, "1"):
        with pytest.raises(MisconfigurationException, match="x=.* must be a number >= 0 or None"):
            arguments.positive("x", wrong)
    with pytest.raises(MisconfigurationException, match=r"c='bb' must be one of 'aa', 'b'\. Did you mean 'b'\?|Did you mean 'aa'"):
        arguments.one_of("c", "bb", ("aa", "b"))


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, True])
def test_seeds(wrong: Any) -> None:
    assert arguments.seed(None) is None
    assert arguments.seed(2**32 - 1) == 2**32 - 1
    with pytest.raises(MisconfigurationException, match="seed="):
        arguments.seed(wrong)


def test_strategies_by_name_and_as_objects() -> None:
    assert type(config.make_strategy("auto", 1)) is SingleDeviceStrategy
    assert type(config.make_strategy("auto", 2)) is DDPStrategy
    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_find_unused_parameters_false"):
        assert not config.make_strategy(name, 2).find_unused_parameters
    assert config.make_strategy("ddp_find_unused_parameters_true", 2).find_unused_parameters
    mine = DDPStrategy()
    assert config.make_strategy(mine, 1) is mine
    for wrong, processes, message in (
        ("ddpp", 1, r"strategy='ddpp' is unknown. Did you mean 'ddp'\? Choose one of auto, single_device, ddp"),
        (DDPStrategy, 1, r"must be a name or a Strategy, got the class DDPStrategy: write DDPStrategy\(\)"),
        ("single_device", 2, "uses one device, but 2 are asked for"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            config.make_strategy(wrong, processes).check(processes, 1)


def test_plugins() -> None:
    class IO:
        def save_checkpoint(self, table: dict[str, Any], path: Any) -> None: ...
        def load_checkpoint(self, path: Any, weights_only: bool) -> Any: ...

    precision, io = Precision(), IO()
    assert config.plugins(None) == []
    assert config.plugins(io) == [io]
    assert config.plugins((precision, io)) == [precision, io]
    with pytest.raises(MisconfigurationException, match=r"plugins must be Precision objects, Launchers or objects with save_checkpoint.*got int"):
        config.plugins([io, 3])


def test_an_argument_that_neither_ddp_has_is_refused_where_it_is_written() -> None:
    for name, message in {"timeout": "Use Trainer\\(timeout=", "static_graf": "Did you mean 'static_graph'"}.items():
        with pytest.raises(MisconfigurationException, match=f"DDPStrategy has no argument '{name}'.*{message}"):
            DDPStrategy(**{name: 3})


def test_accumulation_and_a_static_graph_exclude_each_other_where_ranks_reduce() -> None:
    static = DDPStrategy(static_graph=True)
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=2 with static_graph=True"):
        Trainer(accelerator="cpu", devices=2, strategy=static, accumulate_grad_batches=2)
    for allowed in ({"devices": 1, "accumulate_grad_batches": 2}, {"devices": 2}):
        Trainer(accelerator="cpu", strategy=static, **allowed)


def test_the_root_folder_is_absolute_and_expanded(own_directory: Path) -> None:
    assert arguments.root_dir(None) == str(own_directory)
    assert arguments.root_dir("a/b") == str(own_directory / "a" / "b")
    assert arguments.root_dir(Path("~/x")) == os.path.expanduser("~/x")
    with pytest.raises(MisconfigurationException, match="default_root_dir=3 must be a path"):
        arguments.root_dir(3)


def test_settings_of_a_plain_trainer() -> None:
    trainer = Trainer(accelerator="cpu")
    assert (trainer.max_epochs, trainer.max_steps, trainer.min_epochs, trainer.min_steps) == (1000, -1, None, None)
    assert (trainer.log_every_n_steps, trainer.accumulate_grad_batches, trainer.num_sanity_val_steps) == (50, 1, 2)
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch, trainer.limit_train_batches) == (1.0, 1, 1.0)
    assert (trainer.precision, str(trainer.accelerator), trainer.num_devices, trainer.world_size, trainer.num_nodes) == ("32-true", "cpu", 1, 1, 1)
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm, trainer.fast_dev_run) == (None, "norm", False)
    assert [type(c).__name__ for c in trainer.callbacks] == ["TQDMProgressBar", "ModelSummary", "ModelCheckpoint"]
    assert [type(logger).__name__ for logger in trainer.loggers] == ["TensorBoardLogger"]
    assert (trainer.global_step, trainer.current_epoch, trainer.should_stop, trainer.state.status) == (0, 0, False, "initializing")
    assert (trainer.training, trainer.validating, trainer.testing, trainer.predicting, trainer.sanity_checking) == (False,) * 5


@pytest.mark.parametrize(("arguments", "epochs"), [({"max_steps": 5}, -1), ({"max_epochs": -1}, -1), ({"max_time": "00:01:00:00"}, None), ({"max_epochs": 0}, 0)])
def test_the_default_of_1000_epochs_gives_way_to_other_limits(arguments: dict[str, Any], epochs: int | None) -> None:
    assert Trainer(**arguments).max_epochs == epochs


def test_switches_turn_default_parts_off() -> None:
    bare = Trainer(barebones=True)
    assert (bare.callbacks, bare.loggers, bare.num_sanity_val_steps, bare.log_every_n_steps) == ([], [], 0, 0)
    off = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    assert (off.callbacks, off.loggers, off.logger) == ([], [], None)


def test_global_switches_are_set_during_a_run_and_put_back() -> None:
    settings = Trainer(deterministic="warn", benchmark=True, detect_anomaly=True).settings
    before = torch.backends.cudnn.benchmark
    restore = apply_global_switches(settings)
    try:
        inside = (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark, torch.is_anomaly_enabled(),
        )  # fmt: skip
    finally:
        restore()
    assert inside == (True, True, True, True)
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()) == (False, before, False)


def test_unknown_keyword_arguments() -> None:
    class Made:
        @arguments.known_arguments
        def __init__(self, *, first: int = 1, second: int = 2) -> None:
            self.sum = first + second

    assert Made(first=5).sum == 7
    with pytest.raises(TypeError, match=r"Trainer has no argument 'secnd'. Did you mean 'second'\?"):
        Made(secnd=1)


def test_a_launcher_object_is_used() -> None:
    assert Trainer(launcher=LocalLauncher(2), accelerator="cpu", devices=2, strategy="ddp", logger=False)._makes_processes()
    with pytest.raises(MisconfigurationException, match="devices=3 differs from the launcher's 2 processes"):
        Trainer(launcher=LocalLauncher(2), accelerator="cpu", devices=3, strategy="ddp", logger=False)
    with pytest.raises(MisconfigurationException, match="one process cannot act as 2 processes"):
        Trainer(launcher="in-process", accelerator="cpu", devices=2, strategy="ddp", logger=False)
    assert not Trainer(launcher="in-process", logger=False)._makes_processes()


def test_more_processes_than_the_machine_can_bear_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="devices=999 would start 999 processes on .* cores. Ask for fewer"):
        Trainer(accelerator="cpu", devices=999, strategy="ddp", logger=False)
