"""The surface of Lightning 2.6, as a table: the names, the order of their arguments, their defaults, and what a trainer says outside of a run.

The tables were printed from the installed package; where this one differs on purpose, `DELIBERATE` says why.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import callbacks
import trainer
from tests.helpers.modules import quiet
from trainer import Trainer, TrainModule

TRAINER = """
    accelerator='auto' strategy='auto' devices='auto' num_nodes=1 precision=None logger=None callbacks=None fast_dev_run=False
    max_epochs=None min_epochs=None max_steps=-1 min_steps=None max_time=None limit_train_batches=None limit_val_batches=None
    limit_test_batches=None limit_predict_batches=None overfit_batches=0.0 val_check_interval=None check_val_every_n_epoch=1
    num_sanity_val_steps=None log_every_n_steps=None enable_checkpointing=None enable_progress_bar=None enable_model_summary=None
    accumulate_grad_batches=1 gradient_clip_val=None gradient_clip_algorithm=None deterministic=None benchmark=None inference_mode=True
    use_distributed_sampler=True profiler=None detect_anomaly=False barebones=False plugins=None sync_batchnorm=False
    reload_dataloaders_every_n_epochs=0 default_root_dir=None enable_autolog_hparams=True model_registry=None
"""

METHODS = """
    Trainer: fit | model train_dataloaders=None val_dataloaders=None datamodule=None ckpt_path=None weights_only=None
    Trainer: validate test | model=None dataloaders=None ckpt_path=None verbose=True datamodule=None weights_only=None
    Trainer: predict | model=None dataloaders=None datamodule=None return_predictions=None ckpt_path=None weights_only=None
    Trainer: save_checkpoint | filepath weights_only=None storage_options=None
    Trainer: init_module | empty_init=None
    Trainer: print | *args **kwargs
    TrainModule: all_gather | data group=None sync_grads=False
    TrainModule: backward manual_backward | loss *args **kwargs
    TrainModule: clip_gradients configure_gradient_clipping | optimizer gradient_clip_val=None gradient_clip_algorithm=None
    TrainModule: configure_callbacks configure_model configure_optimizers freeze lr_schedulers on_after_backward on_fit_end on_fit_start
        on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_model_eval on_predict_start on_test_end on_test_epoch_end
        on_test_epoch_start on_test_model_eval on_test_model_train on_test_start on_train_end on_train_epoch_end on_train_epoch_start
        on_train_start on_validation_end on_validation_epoch_end on_validation_epoch_start on_validation_model_eval
        on_validation_model_train on_validation_model_zero_grad on_validation_start predict_dataloader prepare_data test_dataloader
        train_dataloader unfreeze val_dataloader |
    DataModule: predict_dataloader prepare_data state_dict test_dataloader train_dataloader val_dataloader |
    Callback: state_dict |
    TrainModule: load_from_checkpoint | checkpoint_path map_location=None hparams_file=None strict=None weights_only=None **kwargs
    TrainModule: log | name value prog_bar=False logger=None on_step=None on_epoch=None reduce_fx='mean' enable_graph=False
        sync_dist=False sync_dist_group=None add_dataloader_idx=True batch_size=None metric_attribute=None rank_zero_only=False
    TrainModule: log_dict | dictionary prog_bar=False logger=None on_step=None on_epoch=None reduce_fx='mean' enable_graph=False
        sync_dist=False sync_dist_group=None add_dataloader_idx=True batch_size=None rank_zero_only=False
    TrainModule: lr_scheduler_step | scheduler metric
    TrainModule: on_after_batch_transfer on_before_batch_transfer | batch dataloader_idx
    DataModule: on_after_batch_transfer on_before_batch_transfer | batch dataloader_idx
    TrainModule: on_before_backward | loss
    TrainModule: on_before_optimizer_step on_before_zero_grad toggle_optimizer toggled_optimizer untoggle_optimizer | optimizer
    TrainModule: on_load_checkpoint on_save_checkpoint | checkpoint
    TrainModule: on_predict_batch_end on_test_batch_end on_validation_batch_end | outputs batch batch_idx dataloader_idx=0
    TrainModule: on_predict_batch_start on_test_batch_start on_validation_batch_start | batch batch_idx dataloader_idx=0
    TrainModule: on_train_batch_end | outputs batch batch_idx
    TrainModule: on_train_batch_start | batch batch_idx
    TrainModule: optimizer_step | epoch batch_idx optimizer optimizer_closure=None
    TrainModule: optimizer_zero_grad | epoch batch_idx optimizer
    TrainModule: optimizers | use_pl_optimizer=True
    TrainModule: save_hyperparameters | *args ignore=None frame=None logger=True
    DataModule: save_hyperparameters | *args ignore=None frame=None logger=True
    TrainModule: setup teardown | stage
    DataModule: setup teardown | stage
    TrainModule: transfer_batch_to_device | batch device dataloader_idx
    DataModule: transfer_batch_to_device | batch device dataloader_idx
    DataModule: from_datasets | train_dataset=None val_dataset=None test_dataset=None predict_dataset=None batch_size=1 num_workers=0
        **kwargs
    DataModule: load_from_checkpoint | checkpoint_path map_location=None hparams_file=None weights_only=None **kwargs
    DataModule: load_state_dict | state_dict
    Callback: load_state_dict | state_dict
    DataModule: on_exception | exception
    Callback: on_after_backward on_fit_end on_fit_start on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_start
        on_sanity_check_end on_sanity_check_start on_test_end on_test_epoch_end on_test_epoch_start on_test_start on_train_end
        on_train_epoch_end on_train_epoch_start on_train_start on_validation_end on_validation_epoch_end on_validation_epoch_start
        on_validation_start | trainer module
    Callback: on_before_backward | trainer module loss
    Callback: on_before_optimizer_step on_before_zero_grad | trainer module optimizer
    Callback: on_exception | trainer module exception
    Callback: on_load_checkpoint on_save_checkpoint | trainer module checkpoint
    Callback: on_predict_batch_end on_test_batch_end on_validation_batch_end | trainer module outputs batch batch_idx dataloader_idx=0
    Callback: on_predict_batch_start on_test_batch_start on_validation_batch_start | trainer module batch batch_idx dataloader_idx=0
    Callback: on_train_batch_end | trainer module outputs batch batch_idx
    Callback: on_train_batch_start | trainer module batch batch_idx
    Callback: setup teardown | trainer module stage
    CombinedLoader: | iterables mode='min_size'
    seed_everything: | seed=None workers=False verbose=True
    isolate_rng: | include_cuda=True
    grad_norm: | module norm_type group_separator='/'
"""

DELIBERATE = {
    "Trainer precision": "'32-true' is what None stands for",
    "Trainer enable_autolog_hparams": "save_hyperparameters(logger=False) says it where they are",
    "Trainer model_registry": "there is no registry",
    "fit weights_only": "True is what None stands for",
    "validate weights_only": "True is what None stands for",
    "test weights_only": "True is what None stands for",
    "predict weights_only": "True is what None stands for",
    "load_from_checkpoint weights_only": "True is what None stands for",
    "load_from_checkpoint map_location": "a file of another machine's GPU loads; None for where the tensors were",
    "load_from_checkpoint **kwargs": "called overrides",
    "save_checkpoint filepath": "called path; filepath= works",
    "save_checkpoint weights_only": "False is what None stands for",
    "seed_everything workers": "the workers of a run are always seeded, from the run's seed",
}
"""Method (or Trainer) and argument -> why it is, or is called, otherwise here."""

OUTSIDE = {
    "min_epochs": None, "max_steps": -1, "min_steps": None, "limit_train_batches": 1.0, "limit_val_batches": 1.0, "limit_test_batches": 1.0,
    "limit_predict_batches": 1.0, "overfit_batches": 0.0, "fast_dev_run": False, "val_check_interval": 1.0, "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 2, "log_every_n_steps": 50, "accumulate_grad_batches": 1, "gradient_clip_val": None, "should_stop": False,
    "interrupted": False, "received_sigterm": False, "sanity_checking": False, "training": False, "validating": False, "testing": False,
    "predicting": False, "evaluating": False, "ckpt_path": None, "checkpoint_callback": None, "checkpoint_callbacks": [],
    "early_stopping_callback": None, "early_stopping_callbacks": [], "progress_bar_callback": None, "callback_metrics": {}, "logged_metrics": {},
    "progress_bar_metrics": {}, "logger": None, "loggers": [], "optimizers": [], "lr_scheduler_configs": [], "precision": "32-true", "model": None,
    "lightning_module": None, "datamodule": None, "global_rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1, "is_global_zero": True,
    "num_devices": 1, "device_ids": [0], "num_nodes": 1, "train_dataloader": None, "val_dataloaders": None, "test_dataloaders": None,
    "predict_dataloaders": None, "num_val_batches": [], "num_test_batches": [], "num_predict_batches": [], "num_sanity_val_batches": [],
    "enable_validation": False, "is_last_batch": False, "current_epoch": 0, "global_step": 0, "barebones": False, "scaler": None,
    "distributed_sampler_kwargs": None,
}  # fmt: skip
"""What Lightning's trainer says before its first run, too."""

ALSO = "max_epochs gradient_clip_algorithm num_training_batches state callbacks strategy accelerator precision_plugin profiler log_dir default_root_dir"


def of_lightning(signature: str) -> list[tuple[str, str]]:
    """Read "a b=1" as [("a", ""), ("b", "1")]."""
    return [(name, default) for name, _, default in (word.partition("=") for word in signature.split())]


def of_ours(function: Any) -> dict[str, str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    return {stars.get(p.kind, "") + p.name: "" if p.default is p.empty else repr(p.default) for p in parameters}


def differences(name: str, function: Any, signature: str) -> list[str]:
    """Return "name argument" for what Lightning has and this has not, or with another default; order counts among what both have."""
    ours, theirs = of_ours(function), of_lightning(signature)
    common = [argument for argument, _ in theirs if argument in ours]
    positional = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in common]
    assert positional == [argument for argument in common if argument in positional], f"the order of {name}'s arguments"
    return [f"{name} {argument}" for argument, default in theirs if ours.get(argument, "no") != default]


def rows() -> list[tuple[str, str, str]]:
    """Return (owner, method or "", signature) for each method of the table."""
    found = []
    for line in re.split(r"\n(?=    \w)", METHODS.strip("\n")):
        head, _, signature = " ".join(line.split()).partition(" |")
        owner, _, names = head.partition(":")
        found += [(owner, name, signature) for name in names.split() or [""]]
    return found


def test_arguments_are_lightnings_but_for_those_that_are_not_on_purpose() -> None:
    ours = of_ours(Trainer)
    found = [f"Trainer {name}" for name, default in of_lightning(TRAINER) if ours.get(name, "no") != default]
    assert len(rows()) == 136
    for owner, name, signature in rows():
        thing = getattr(callbacks if owner == "Callback" else trainer, owner)
        found += differences(name or owner, getattr(thing, name) if name else thing, signature)
    assert set(found) == set(DELIBERATE)


def test_a_trainer_outside_of_a_run_says_what_lightnings_says() -> None:
    made = quiet(accelerator="cpu", num_sanity_val_steps=None)
    assert {name: getattr(made, name) for name in OUTSIDE} == OUTSIDE
    assert [name for name in ALSO.split() if not hasattr(made, name)] == []
    assert made.strategy.root_device.type == "cpu"
    state = made.state
    assert (state.fn, state.stage, state.status, state.finished) == (None, None, "initializing", False)


def test_a_module_outside_of_a_run_says_what_lightnings_says() -> None:
    module = TrainModule()
    names = "current_epoch global_step global_rank local_rank logger loggers strict_loading automatic_optimization example_input_array".split()
    assert [getattr(module, name) for name in names] == [0, 0, 0, 0, None, [], True, True, None]
    assert (str(module.device), str(module.dtype), dict(module.hparams), dict(module.hparams_initial)) == ("cpu", "torch.float32", {}, {})
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        _ = module.trainer
