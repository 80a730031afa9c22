"""What users import: every public name exists, loads, is documented, and costs nothing until it is used."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import callbacks
import trainer
from trainer import DataModule, Trainer, TrainModule

ROOT = Path(__file__).parents[2]

NAMES = {
    "trainer": (
        "AttributeDict CombinedLoader DDPStrategy DataModule MisconfigurationException SIGTERMException SingleDeviceStrategy Strategy "
        "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler TrainModule Trainer Tuner isolate_rng seed_everything"
    ),
    "callbacks": (
        "BackboneFinetuning BatchSizeFinder LearningRateFinder BaseFinetuning BasePredictionWriter CSVLogger Callback DeviceStatsMonitor EMAWeightAveraging EarlyStopping "
        "GradientAccumulationScheduler GradientMonitor GradientSync HistogramMonitor LambdaCallback LearningRateMonitor Logger ModelCheckpoint ModelPruning ModelSummary "
        "OnExceptionCheckpoint PlanReport ProgressBar RichModelSummary RichProgressBar RichProgressBarTheme SampleImages SeedEverything SpikeDetection StochasticWeightAveraging NaNGuard NonFiniteError StragglerMonitor TQDMProgressBar TensorBoardLogger ThroughputMonitor Timer "
        "WeightAveraging summarize"
    ),
}

ARGUMENTS = """
    accelerator devices num_nodes strategy precision max_epochs min_epochs max_steps min_steps max_time limit_train_batches
    limit_val_batches limit_test_batches limit_predict_batches overfit_batches fast_dev_run val_check_interval check_val_every_n_epoch
    num_sanity_val_steps log_every_n_steps accumulate_grad_batches gradient_clip_val gradient_clip_algorithm logger callbacks
    default_root_dir enable_checkpointing enable_progress_bar enable_model_summary deterministic benchmark inference_mode
    use_distributed_sampler profiler detect_anomaly barebones plugins reload_dataloaders_every_n_epochs seed resume launcher
    timeout
"""

FACE = """
    global_step current_epoch max_epochs max_steps min_epochs min_steps should_stop state interrupted sanity_checking training validating
    testing predicting ckpt_path checkpoint_callback checkpoint_callbacks early_stopping_callback
    early_stopping_callbacks progress_bar_callback callback_metrics logged_metrics progress_bar_metrics logger log_dir optimizers
    lr_scheduler_configs accelerator precision model lightning_module datamodule global_rank local_rank node_rank world_size
    is_global_zero num_devices device_ids num_nodes train_dataloader val_dataloaders test_dataloaders predict_dataloaders
    num_training_batches num_val_batches num_test_batches num_predict_batches num_sanity_val_batches limit_train_batches
    limit_val_batches limit_test_batches limit_predict_batches fast_dev_run accumulate_grad_batches gradient_clip_val
    gradient_clip_algorithm estimated_stepping_batches enable_validation is_last_batch publishes_step logging_step data_shares records
    batch_indices profiler
"""

MODULE = """
    training_step validation_step test_step predict_step configure_optimizers configure_callbacks configure_model train_dataloader
    val_dataloader test_dataloader predict_dataloader log log_dict save_hyperparameters hparams hparams_initial load_from_checkpoint
    strict_loading optimizers lr_schedulers manual_backward automatic_optimization toggle_optimizer untoggle_optimizer
    toggled_optimizer clip_gradients all_gather freeze unfreeze example_input_array print device dtype trainer logger loggers
    current_epoch global_step global_rank local_rank
"""

SIGNATURES = {
    Trainer.fit: "model train_dataloaders val_dataloaders datamodule ckpt_path weights_only",
    Trainer.validate: "model dataloaders ckpt_path verbose datamodule weights_only",
    Trainer.test: "model dataloaders ckpt_path verbose datamodule weights_only",
    Trainer.predict: "model dataloaders datamodule return_predictions ckpt_path",
    Trainer.save_checkpoint: "path weights_only",
    TrainModule.log: (
        "name value prog_bar logger on_step on_epoch reduce_fx enable_graph sync_dist sync_dist_group add_dataloader_idx batch_size "
        "metric_attribute rank_zero_only"
    ),
    TrainModule.save_hyperparameters: "args ignore frame logger",
    TrainModule.optimizer_step: "epoch batch_idx optimizer optimizer_closure",
    callbacks.ModelCheckpoint: (
        "dirpath filename monitor verbose save_last save_top_k save_on_exception save_weights_only mode auto_insert_metric_name every_n_train_steps "
        "train_time_interval every_n_epochs save_on_train_epoch_end enable_version_counter"
    ),
    callbacks.TQDMProgressBar: "refresh_rate process_position leave",
    callbacks.RichProgressBar: "refresh_rate leave theme console_kwargs",
    callbacks.RichProgressBarTheme: (
        "description progress_bar progress_bar_finished progress_bar_pulse batch_progress time processing_speed metrics metrics_text_delimiter metrics_format"
    ),
    callbacks.ModelSummary: "max_depth",
    callbacks.RichModelSummary: "max_depth",
    callbacks.Timer: "duration interval verbose",
    callbacks.OnExceptionCheckpoint: "dirpath filename",
    callbacks.GradientAccumulationScheduler: "scheduling",
    callbacks.BasePredictionWriter: "write_interval",
    callbacks.BasePredictionWriter.write_on_batch_end: "trainer prediction batch_indices batch batch_idx dataloader_idx",
    callbacks.BasePredictionWriter.write_on_epoch_end: "trainer predictions batch_indices",
    callbacks.BaseFinetuning.unfreeze_and_add_param_group: "modules optimizer lr initial_denom_lr train_bn",
    callbacks.BackboneFinetuning: (
        "unfreeze_backbone_at_epoch lambda_func backbone_initial_ratio_lr backbone_initial_lr should_align initial_denom_lr train_bn verbose rounding"
    ),
    callbacks.LearningRateFinder: "min_lr max_lr num_training_steps mode early_stop_threshold update_attr attr_name",
    callbacks.BatchSizeFinder: "mode steps_per_trial init_val max_trials batch_arg_name margin max_val",
    trainer.Tuner.lr_find: (
        "model train_dataloaders val_dataloaders dataloaders datamodule method min_lr max_lr num_training mode early_stop_threshold update_attr attr_name"
    ),
    trainer.Tuner.scale_batch_size: (
        "model train_dataloaders val_dataloaders dataloaders datamodule method mode steps_per_trial init_val max_trials batch_arg_name margin max_val"
    ),
    callbacks.ThroughputMonitor: "batch_size_fn length_fn window_size separator",
    callbacks.DeviceStatsMonitor: "cpu_stats",
    callbacks.StochasticWeightAveraging: "swa_lrs swa_epoch_start annealing_epochs annealing_strategy avg_fn device",
    trainer.Profiler: "dirpath filename",
    trainer.SimpleProfiler: "dirpath filename extended",
    trainer.AdvancedProfiler: "dirpath filename line_count_restriction dump_stats",
    trainer.PyTorchProfiler: (
        "dirpath filename group_by_input_shapes export_to_chrome row_limit sort_by_key record_module_names table_kwargs profiler_kwargs"
    ),
    callbacks.SpikeDetection: "mode window warmup atol rtol exclude_batches_path finite_only",
    callbacks.WeightAveraging: "device use_buffers avg_fn multi_avg_fn",
    callbacks.EMAWeightAveraging: "device use_buffers decay update_every_n_steps update_starting_at_step update_starting_at_epoch",
    callbacks.EarlyStopping: (
        "monitor min_delta patience verbose mode strict check_finite stopping_threshold divergence_threshold check_on_train_epoch_end"
    ),
}


@pytest.mark.parametrize("package", [trainer, callbacks])
def test_all_is_complete_and_loads(package: ModuleType) -> None:
    assert set(NAMES[package.__name__].split()) <= set(package.__all__)
    assert list(package.__all__) == sorted(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        assert value.__doc__, f"{name} has no documentation"
        assert name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'Trainerr'"):
        package.Trainerr


@pytest.mark.parametrize("package", [trainer, callbacks])
def test_all_of_every_sub_module_loads(package: ModuleType) -> None:
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2] in ("worker", "rank", "plan"):  # programs, not modules
            continue
        module = importlib.import_module(found.name)
        assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == [], found.name


def test_the_trainer_takes_lightnings_arguments_by_keyword_only() -> None:
    parameters = inspect.signature(Trainer.__init__).parameters
    assert set(ARGUMENTS.split()) <= set(parameters)
    assert {p.kind for name, p in parameters.items() if name != "self"} == {inspect.Parameter.KEYWORD_ONLY}
    undocumented = [name for name in ARGUMENTS.split() if name not in (Trainer.__doc__ or "")]
    assert undocumented == []


def test_the_face_of_the_trainer_is_readable_outside_a_run() -> None:
    made = Trainer(accelerator="cpu", logger=False)
    inside_only = {"estimated_stepping_batches"}
    for name in set(FACE.split()) - inside_only:
        getattr(made, name)
    assert {"callbacks", "loggers", "strategy", "precision_plugin"} <= set(vars(made))
    assert (made.global_step, made.current_epoch, made.is_global_zero, made.world_size) == (0, 0, True, 1)


def test_a_module_has_what_a_lightning_module_has() -> None:
    assert [name for name in MODULE.split() if not hasattr(TrainModule, name)] == []
    assert [name for name in ("from_datasets", "load_from_checkpoint", "save_hyperparameters") if not hasattr(DataModule, name)] == []


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_parameters_keep_lightnings_names_and_order(function: object) -> None:
    names = [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]
    wanted = SIGNATURES[function].split()  # type: ignore[index]
    assert [name for name in names if name in wanted] == wanted


SLOW = "tensorboard tqdm torchvision torchmetrics rich yaml sklearn torch.distributed.elastic torch.distributed.run torch.utils.tensorboard"


def test_import_loads_nothing_slow_beyond_torch() -> None:
    code = f"""
import sys, torch
before = set(sys.modules)
slow = lambda: [name for name in {SLOW.split()!r} if name in sys.modules and name not in before]
import trainer, callbacks
assert not slow(), slow()
assert len(set(sys.modules) - before) < 20, sorted(set(sys.modules) - before)
from trainer import DataModule, Trainer, TrainModule
assert not slow(), slow()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
