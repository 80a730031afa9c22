"""What the callbacks and loggers of Lightning 2.6 take and have, and that ours take and have it too, or say what to use."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import callbacks
from callbacks import (
    BaseFinetuning,
    Callback,
    CSVLogger,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    Logger,
    MisconfigurationException,
    ModelCheckpoint,
)
from callbacks.backbone_finetuning import multiplicative
from callbacks.callback import HOOKS, check_hook_names
from callbacks.loggers.base import DummyExperiment, rank_zero_experiment
from callbacks.prediction_writer import WriteInterval
from tests.helpers.fake_trainer import FakeTrainer

DOCS = Path(__file__).parents[2] / "docs"
NEEDED = object()

# Taken from pytorch-lightning 2.6.6, which is not there where tests run.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ModelCheckpoint": {
        "dirpath": None, "filename": None, "monitor": None, "verbose": False, "save_last": None, "save_top_k": 1, "save_on_exception": False,
        "save_weights_only": False, "mode": "min", "auto_insert_metric_name": True, "every_n_train_steps": None, "train_time_interval": None,
        "every_n_epochs": None, "save_on_train_epoch_end": None, "enable_version_counter": True,
    },
    "EarlyStopping": {
        "monitor": NEEDED, "min_delta": 0.0, "patience": 3, "verbose": False, "mode": "min", "strict": True, "check_finite": True,
        "stopping_threshold": None, "divergence_threshold": None, "check_on_train_epoch_end": None, "log_rank_zero_only": False,
    },
    "GradientAccumulationScheduler": {"scheduling": NEEDED},
    "LearningRateMonitor": {"logging_interval": None, "log_momentum": False, "log_weight_decay": False},
    "TQDMProgressBar": {"refresh_rate": 1, "process_position": 0, "leave": False},
    "RichProgressBar": {"refresh_rate": 100, "leave": False, "theme": NEEDED, "console_kwargs": None},
    "ModelSummary": {"max_depth": 1},
    "RichModelSummary": {"max_depth": 1},
    "Timer": {"duration": None, "interval": "step", "verbose": True},
    "ThroughputMonitor": {"batch_size_fn": NEEDED, "length_fn": None, "window_size": 100, "separator": "/"},
    "DeviceStatsMonitor": {"cpu_stats": None},
    "OnExceptionCheckpoint": {"dirpath": NEEDED, "filename": "on_exception"},
    "BaseFinetuning": {},
    "BackboneFinetuning": {
        "unfreeze_backbone_at_epoch": 10, "lambda_func": multiplicative, "backbone_initial_ratio_lr": 0.1, "backbone_initial_lr": None,
        "should_align": True, "initial_denom_lr": 10.0, "train_bn": True, "verbose": False, "rounding": 12,
    },
    "BasePredictionWriter": {"write_interval": "batch"},
    "StochasticWeightAveraging": {
        "swa_lrs": NEEDED, "swa_epoch_start": 0.8, "annealing_epochs": 10, "annealing_strategy": "cos", "avg_fn": None, "device": torch.device("cpu"),
    },
    "EMAWeightAveraging": {
        "device": None, "use_buffers": True, "decay": 0.999, "update_every_n_steps": 1, "update_starting_at_step": None, "update_starting_at_epoch": None,
    },
    "WeightAveraging": {"device": None, "use_buffers": True, "avg_fn": None, "multi_avg_fn": None},
    "LearningRateFinder": {
        "min_lr": 1e-8, "max_lr": 1, "num_training_steps": 100, "mode": "exponential", "early_stop_threshold": 4.0, "update_attr": True, "attr_name": "",
    },
    "BatchSizeFinder": {
        "mode": "power", "steps_per_trial": 3, "init_val": 2, "max_trials": 25, "batch_arg_name": "batch_size", "margin": 0.05, "max_val": 8192,
    },
    "SpikeDetection": {
        "mode": "min", "window": 10, "warmup": 1, "atol": None, "rtol": 2.0, "exclude_batches_path": None, "finite_only": True,
    },
    "ModelPruning": {
        "pruning_fn": NEEDED, "parameters_to_prune": (), "parameter_names": None, "use_global_unstructured": True, "amount": 0.5,
        "apply_pruning": True, "make_pruning_permanent": True, "use_lottery_ticket_hypothesis": True, "resample_parameters": False,
        "pruning_dim": None, "pruning_norm": None, "verbose": 0, "prune_on_train_epoch_end": True,
    },
    "TensorBoardLogger": {
        "save_dir": NEEDED, "name": "lightning_logs", "version": None, "log_graph": False, "default_hp_metric": True, "prefix": "", "sub_dir": None,
    },
    "CSVLogger": {"save_dir": NEEDED, "name": "lightning_logs", "version": None, "prefix": "", "flush_logs_every_n_steps": 100},
}  # fmt: skip

OTHER_DEFAULTS: dict[tuple[str, str], tuple[Any, str]] = {
    ("TensorBoardLogger", "save_dir"): (None, "the trainer's default_root_dir"),
    ("TensorBoardLogger", "name"): ("runs", "Lightning's folder carries its name"),
    ("CSVLogger", "save_dir"): (None, "the trainer's default_root_dir"),
    ("CSVLogger", "name"): ("csv_logs", "Lightning's folder carries its name"),
    ("StochasticWeightAveraging", "device"): ("cpu", "the same device"),
    ("RichProgressBar", "refresh_rate"): (1, "drawing is limited by time besides, so every batch may ask"),
    ("RichProgressBar", "theme"): (None, "the same theme, made without loading rich"),
}

HAS: dict[str, str] = {
    "ModelCheckpoint": (
        "CHECKPOINT_EQUALS_CHAR CHECKPOINT_JOIN_CHAR CHECKPOINT_NAME_LAST FILE_EXTENSION STARTING_VERSION auto_insert_metric_name best_k_models "
        "best_model_path best_model_score check_monitor_top_k current_score dirpath every_n_epochs file_exists filename format_checkpoint_name "
        "kth_best_model_path kth_value last_model_path mode monitor save_last save_on_exception save_top_k save_weights_only to_yaml verbose"
    ),
    "EarlyStopping": (
        "best_score check_finite divergence_threshold log_rank_zero_only min_delta mode mode_dict monitor monitor_op order_dict patience stopped_epoch "
        "stopping_reason stopping_reason_message stopping_threshold strict verbose wait_count"
    ),
    "GradientAccumulationScheduler": "epochs get_accumulate_grad_batches going_to_accumulate_grad_batches scheduling",
    "LearningRateMonitor": "last_momentum_values last_weight_decay_values log_momentum log_weight_decay logging_interval lrs",
    "TQDMProgressBar": (
        "BAR_FORMAT disable enable get_metrics has_dataloader_changed init_predict_tqdm init_sanity_tqdm init_test_tqdm init_train_tqdm "
        "init_validation_tqdm is_disabled is_enabled predict_description predict_progress_bar print process_position refresh_rate "
        "reset_dataloader_idx_tracker sanity_check_description test_description test_progress_bar total_predict_batches_current_dataloader "
        "total_test_batches_current_dataloader total_train_batches total_val_batches total_val_batches_current_dataloader train_description "
        "train_progress_bar trainer val_progress_bar validation_description"
    ),
    "RichProgressBar": (
        "configure_columns disable enable get_metrics has_dataloader_changed is_disabled is_enabled predict_description predict_progress_bar_id print "
        "progress refresh refresh_rate reset_dataloader_idx_tracker sanity_check_description test_description test_progress_bar test_progress_bar_id "
        "theme total_predict_batches_current_dataloader total_test_batches_current_dataloader total_train_batches total_val_batches "
        "total_val_batches_current_dataloader train_description train_progress_bar train_progress_bar_id trainer val_progress_bar val_progress_bar_id "
        "val_sanity_check_bar val_sanity_progress_bar_id validation_description"
    ),
    "ModelSummary": "summarize",
    "RichModelSummary": "summarize",
    "Timer": "end_time start_time time_elapsed time_remaining",
    "ThroughputMonitor": "available_flops batch_size_fn kwargs length_fn",
    "OnExceptionCheckpoint": "FILE_EXTENSION ckpt_path dirpath filename",
    "BaseFinetuning": (
        "filter_on_optimizer filter_params finetune_function flatten_modules freeze freeze_before_training freeze_module make_trainable "
        "unfreeze_and_add_param_group"
    ),
    "BackboneFinetuning": (
        "backbone_initial_lr backbone_initial_ratio_lr initial_denom_lr lambda_func previous_backbone_lr rounding should_align train_bn "
        "unfreeze_backbone_at_epoch verbose"
    ),
    "BasePredictionWriter": "interval write_on_batch_end write_on_epoch_end",
    "StochasticWeightAveraging": (
        "avg_fn momenta n_averaged pl_module_contains_batch_norm reset_batch_norm_and_save_state reset_momenta swa_end swa_start transfer_weights "
        "update_parameters"
    ),
    "EMAWeightAveraging": "should_update update_every_n_steps update_starting_at_epoch update_starting_at_step",
    "WeightAveraging": "should_update",
    "LearningRateFinder": "SUPPORTED_MODES lr_find optimal_lr",
    "BatchSizeFinder": "SUPPORTED_MODES optimal_batch_size scale_batch_size",
    "SpikeDetection": "atol bad_batches exclude_batches_path finite_only last_val mode rtol running_mean warmup",
    "ModelPruning": (
        "PARAMETER_NAMES amount apply_lottery_ticket_hypothesis apply_pruning filter_parameters_to_prune make_pruning_permanent pruning_fn "
        "sanitize_parameters_to_prune"
    ),
    "TensorBoardLogger": (
        "LOGGER_JOIN_CHAR NAME_HPARAMS_FILE after_save_checkpoint experiment finalize group_separator hparams log_dir log_graph log_hyperparams "
        "log_metrics name root_dir save save_dir sub_dir version"
    ),
    "CSVLogger": (
        "LOGGER_JOIN_CHAR after_save_checkpoint experiment finalize group_separator log_dir log_graph log_hyperparams log_metrics name root_dir save "
        "save_dir version"
    ),
}
"""Public attributes and methods of an object of each class, besides the hooks."""

HAS_NOT: dict[tuple[str, str], str] = {
    ("RichProgressBar", "progress"): "the object of rich is drawn behind `enable`, `disable` and `print`",
    ("RichProgressBar", "refresh"): "drawing is the bar's business",
    **{
        ("RichProgressBar", f"{stage}_progress_bar_id"): "the bar of a stage itself is `<stage>_progress_bar`"
        for stage in ("train", "val", "test", "predict", "val_sanity")
    },
    ("ModelSummary", "summarize"): "str(trainer.summarize(module)) is the table; override on_fit_start to show it elsewhere",
    ("RichModelSummary", "summarize"): "the same",
    ("LearningRateFinder", "SUPPORTED_MODES"): "an unknown mode is an error that names them",
    ("BatchSizeFinder", "SUPPORTED_MODES"): "an unknown mode is an error that names them",
    ("TensorBoardLogger", "sub_dir"): "log_dir holds it",
    **{
        ("StochasticWeightAveraging", name): "a step of Lightning's own way to the average; n_averaged and swa_start say where it is"
        for name in (
            "avg_fn", "momenta", "pl_module_contains_batch_norm", "reset_batch_norm_and_save_state", "reset_momenta", "swa_end", "transfer_weights",
            "update_parameters",
        )
    },
    ("ThroughputMonitor", "kwargs"): "its entries are arguments, and attributes, of their own",
    ("SpikeDetection", "last_val"): "losses are read at publish points, many at once",
    ("SpikeDetection", "running_mean"): "is no object of torchmetrics",
}

HOOK_ARGUMENTS = {
    "batch, batch_idx": "on_train_batch_start",
    "outputs, batch, batch_idx": "on_train_batch_end",
    "batch, batch_idx, dataloader_idx": "on_validation_batch_start on_test_batch_start on_predict_batch_start",
    "outputs, batch, batch_idx, dataloader_idx": "on_validation_batch_end on_test_batch_end on_predict_batch_end",
    "stage": "setup teardown",
    "exception": "on_exception",
    "loss": "on_before_backward",
    "optimizer": "on_before_optimizer_step on_before_zero_grad",
    "checkpoint": "on_save_checkpoint on_load_checkpoint",
    "": (
        "on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end "
        "on_validation_start on_validation_end on_validation_epoch_start on_validation_epoch_end on_test_start on_test_end on_test_epoch_start "
        "on_test_epoch_end on_predict_start on_predict_end on_predict_epoch_start on_predict_epoch_end on_after_backward"
    ),
}

MADE_WITH: dict[str, dict[str, Any]] = {
    "EarlyStopping": {"monitor": "loss"},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "ThroughputMonitor": {"batch_size_fn": len},
    "OnExceptionCheckpoint": {"dirpath": "."},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_and_defaults_are_lightnings(name: str) -> None:
    wanted = ARGUMENTS[name]
    ours = {key: p for key, p in inspect.signature(getattr(callbacks, name)).parameters.items()}
    assert list(ours)[: len(wanted)] == list(wanted)  # also by position
    for argument, default in wanted.items():
        expected = OTHER_DEFAULTS.get((name, argument), (default, ""))[0]
        assert ours[argument].default == (inspect.Parameter.empty if expected is NEEDED else expected), argument


@pytest.mark.parametrize("name", HAS)
def test_attributes_and_methods_are_lightnings(name: str) -> None:
    made = getattr(callbacks, name)(**MADE_WITH.get(name, {}))
    known = {*dir(type(made)), *vars(made)}
    absent = {attribute for attribute in HAS[name].split() if attribute not in known}
    assert absent <= {attribute for owner, attribute in HAS_NOT if owner == name}


def test_a_callback_has_lightnings_hooks_with_their_arguments() -> None:
    expected = {name: tuple(filter(None, arguments.split(", "))) for arguments, names in HOOK_ARGUMENTS.items() for name in names.split()}
    assert set(expected) == HOOKS
    for name, arguments in expected.items():
        parameters = inspect.signature(getattr(Callback, name)).parameters
        assert list(parameters) == ["self", "trainer", "module", *arguments]
        optional = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
        assert optional == ({"dataloader_idx": 0} if "dataloader_idx" in arguments else {})
    assert LambdaCallback(**dict.fromkeys(expected)) is not None
    assert {"state_key", "state_dict", "load_state_dict"} <= set(vars(Callback))


@pytest.mark.parametrize("hook", sorted(HOOKS - {"setup", "teardown"}))
def test_a_hook_with_a_slip_in_its_name_is_refused(hook: str) -> None:
    for wrong in (f"{hook}s", hook.replace("on_", "on__", 1), hook[:-1]):
        slip = type("Slip", (Callback,), {wrong: lambda self, *_: None})
        with pytest.raises(MisconfigurationException, match=f"Slip.{wrong} is not a hook, so it would never be called. Did you mean '"):
            check_hook_names(slip, HOOKS)
        with pytest.raises(MisconfigurationException, match="there is no such hook"):
            LambdaCallback(**{wrong: print})


@pytest.mark.parametrize("name", callbacks.__all__)
def test_each_has_its_place_in_the_documentation(name: str) -> None:
    pages = ("callbacks", "logging", "migrating")
    assert any(re.search(rf"\b{name}\b", (DOCS / f"{page}.md").read_text(encoding="utf-8")) for page in pages)


# -- what they do ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_callback_tells_whether_a_file_is_there(tmp_path: Path) -> None:
    keeper, trainer = ModelCheckpoint(tmp_path), FakeTrainer(tmp_path)
    (tmp_path / "there.ckpt").touch()
    assert keeper.file_exists(tmp_path / "there.ckpt", trainer) is True
    assert keeper.file_exists(str(tmp_path / "elsewhere.ckpt"), trainer) is False
    assert trainer.broadcasts == 2  # rank 0 looks, all get its answer


@pytest.mark.parametrize(
    ("top_k", "kth"),
    [(3, [("", math.inf), ("", math.inf), ("epoch=0", 3.0), ("epoch=2", 2.0)]), (-1, [("epoch=0", 3.0)] * 4)],
)
def test_the_kth_best_is_known_once_there_are_k(top_k: int, kth: list[tuple[str, float]], tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, "{epoch}", monitor="val", save_top_k=top_k)
    trainer, found = FakeTrainer(tmp_path, [keeper]).start(), []
    for val in (3.0, 1.0, 2.0, 0.5):
        trainer.epoch(val=val)
        found.append((Path(keeper.kth_best_model_path).stem, float(keeper.kth_value)))
    assert found == kth and float(keeper.current_score) == float(keeper.best_model_score) == 0.5


def test_early_stopping_says_which_score_is_better() -> None:
    for mode, better in (("min", True), ("max", False)):
        stop = EarlyStopping("loss", mode=mode)
        assert bool(stop.monitor_op(torch.tensor(1.0), torch.tensor(2.0))) is better
        assert stop.order_dict[stop.mode] == ("<" if better else ">")


def test_without_check_finite_a_nan_is_one_more_check_without_improvement(tmp_path: Path) -> None:
    stop = EarlyStopping("loss", check_finite=False, divergence_threshold=5.0, patience=3)
    trainer = FakeTrainer(tmp_path, [stop]).start()
    for loss, waited in ((1.0, 0), (math.nan, 1), (2.0, 2)):
        trainer.epoch(loss=loss)
        assert (trainer.should_stop, stop.wait_count) == (False, waited)
    trainer.epoch(loss=6.0)
    assert trainer.should_stop and stop.stopping_reason.name == "DIVERGENCE_THRESHOLD"


def test_a_schedule_of_accumulation_can_be_read() -> None:
    schedule = GradientAccumulationScheduler({4: 8, 2: 3})
    assert (schedule.epochs, schedule.scheduling) == ([0, 2, 4], {0: 1, 2: 3, 4: 8})
    assert [schedule.get_accumulate_grad_batches(epoch) for epoch in range(6)] == [1, 1, 3, 3, 8, 8]
    assert schedule.going_to_accumulate_grad_batches() and not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()


@pytest.mark.parametrize(("given", "batch", "epoch"), [("batch", True, False), ("epoch", False, True), ("batch_and_epoch", True, True)])
def test_an_interval_of_writing_is_a_string_that_tells_more(given: str, batch: bool, epoch: bool) -> None:
    interval = callbacks.BasePredictionWriter(given).interval
    assert (interval == given, interval.on_batch, interval.on_epoch) == (True, batch, epoch)
    assert callbacks.BasePredictionWriter(WriteInterval(given)).interval is interval


def test_layers_are_found_frozen_and_made_trainable() -> None:
    linear, norm, inner = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)
    nested = [linear, [nn.Sequential(norm, nn.ModuleDict({"a": inner}))]]
    assert BaseFinetuning.flatten_modules(nested) == [linear, norm, inner]
    assert BaseFinetuning.flatten_modules(nn.ModuleDict({"x": linear, "y": linear})) == [linear]
    BaseFinetuning.freeze(nested)  # BatchNorm layers are trained on
    assert [p.requires_grad for m in (linear, norm, inner) for p in m.parameters()] == [False, False, True, True, False, False]
    assert list(BaseFinetuning.filter_params(nested)) == list(norm.parameters())
    assert list(BaseFinetuning.filter_params(nested, train_bn=False)) == []
    assert list(BaseFinetuning.filter_params(nested, requires_grad=False)) == [*linear.parameters(), *inner.parameters()]
    BaseFinetuning.freeze(nested, train_bn=False)
    assert not norm.track_running_stats and not any(p.requires_grad for p in norm.parameters())
    BaseFinetuning.make_trainable(norm)
    assert norm.track_running_stats and all(p.requires_grad for p in norm.parameters())
    BaseFinetuning.freeze_module(nn.Sequential(norm))  # what a module holds itself
    assert all(p.requires_grad for p in norm.parameters())
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="2 of the parameters are in the optimizer already"):
        assert BaseFinetuning.filter_on_optimizer(optimizer, [*linear.parameters(), *inner.parameters()]) == list(inner.parameters())
    BaseFinetuning.unfreeze_and_add_param_group(inner, optimizer, initial_denom_lr=4.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125] and optimizer.param_groups[1]["params"] == list(inner.parameters())


class Kept(Logger):
    """A logger as Lightning's documentation writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.done: list[str] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> str:
        return "0.1"

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self.rows

    def log_hyperparams(self, params: Any) -> None:
        self.done.append(f"{params}")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.append((step, metrics))

    def save(self) -> None:
        self.done.append("save")


def test_a_logger_of_ones_own_is_saved_at_the_end_with_all_that_it_was_given() -> None:
    logger = Kept()
    logger.on_fit_start(None, None)
    logger.publish({"accuracy": 1.0}, 3, "validate")  # waits for the names that training has
    assert logger.rows == []
    logger.finalize("failed")
    assert (logger.rows, logger.done, logger.group_separator) == ([(3, {"accuracy": 1.0})], ["save"], "/")


def test_only_rank_0_has_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    logger = Kept()
    assert isinstance(logger.experiment, DummyExperiment)
    logger.experiment[0] = logger.experiment[1].add_scalar("a", 1)  # swallowed
    logger.log_metrics({"a": 1.0})
    assert logger.rows == []


def test_names_are_joined_as_a_subclass_says(tmp_path: Path) -> None:
    class Dotted(CSVLogger):
        LOGGER_JOIN_CHAR = "."
        group_separator = ":"

    logger = Dotted(tmp_path, prefix="run")
    logger.log_hyperparams()
    logger.log_metrics({"loss": 1.0, "per": {"class": 2.0}}, step=1)
    logger.finalize("success")
    assert (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")[2:] == ["run.loss", "run.per:class"]
