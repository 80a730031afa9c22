"""Names of Lightning, of now and of earlier versions, that are not here, and what one writes in their place."""

from __future__ import annotations

from typing import Any

__all__ = ["REMOVED", "REMOVED_ARGUMENTS", "REMOVED_ATTRIBUTES", "REMOVED_EXPORTS", "REMOVED_HOOKS", "REMOVED_STRATEGIES", "REMOVED_STRATEGY_ARGUMENTS", "Gone"]

_CALLBACK = "the callback"

REMOVED: dict[str, str] = {
    "gpus": "accelerator='gpu', devices=...",
    "auto_select_gpus": "devices='auto' or a number, which takes idle GPUs first",
    "num_processes": "accelerator='cpu', devices=...",
    "tpu_cores": "another library: TPUs are not supported",
    "ipus": "another library: IPUs are not supported",
    "hpus": "another library: HPUs are not supported",
    "distributed_backend": "strategy=...",
    "resume_from_checkpoint": "trainer.fit(..., ckpt_path=...), or Trainer(resume=...)",
    "checkpoint_callback": "enable_checkpointing=True or False",
    "weights_save_path": f"default_root_dir=..., or {_CALLBACK} ModelCheckpoint(dirpath=...)",
    "weights_summary": f"enable_model_summary=..., or {_CALLBACK} ModelSummary(max_depth=...)",
    "progress_bar_refresh_rate": f"{_CALLBACK} TQDMProgressBar(refresh_rate=...), or enable_progress_bar=False",
    "process_position": f"{_CALLBACK} TQDMProgressBar(process_position=...)",
    "stochastic_weight_avg": f"{_CALLBACK} WeightAveraging",
    "terminate_on_nan": "bad_loss='raise'",
    "track_grad_norm": f"{_CALLBACK} GradientMonitor",
    "amp_backend": "precision='16-mixed' or 'bf16-mixed'",
    "amp_level": "precision='16-mixed' or 'bf16-mixed'",
    "log_gpu_memory": "trainer.accelerator.get_device_stats(device) in a callback",
    "flush_logs_every_n_steps": "an argument of the logger",
    "replace_sampler_ddp": "use_distributed_sampler=...",
    "multiple_trainloader_mode": "CombinedLoader(loaders, mode)",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "prepare_data_per_node": "nothing: prepare_data runs once a node",
    "move_metrics_to_cpu": "nothing: what is logged does not hold the device's memory",
    "truncated_bptt_steps": "automatic_optimization = False, and steps of your own in training_step",
    "auto_lr_find": "Tuner(trainer).lr_find(module)",
    "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(module)",
    "model_registry": "a logger or checkpoint I/O plug-in",
    "enable_autolog_hparams": "save_hyperparameters(logger=False) in the module and the data module",
    "max_nb_epochs": "max_epochs=...",
    "min_nb_epochs": "min_epochs=...",
    "train_percent_check": "limit_train_batches=...",
    "val_percent_check": "limit_val_batches=...",
    "test_percent_check": "limit_test_batches=...",
    "overfit_pct": "overfit_batches=...",
    "early_stop_callback": f"{_CALLBACK} EarlyStopping",
    "row_log_interval": "log_every_n_steps=...",
    "nb_sanity_val_steps": "num_sanity_val_steps=...",
    "nb_gpu_nodes": "num_nodes=...",
    "default_save_path": "default_root_dir=...",
    "gradient_clip": "gradient_clip_val=...",
    "use_amp": "precision='16-mixed' or 'bf16-mixed'",
}
"""Arguments of `Trainer`."""

REMOVED_STRATEGIES: dict[str, str] = {
    "ddp2": "strategy='ddp'",
    "ddp_cpu": "strategy='ddp', accelerator='cpu'",
    "ddp_sharded": "strategy='fsdp'",
    "ddp_sharded_spawn": "strategy='fsdp'",
    "ddp_fully_sharded": "strategy='fsdp'",
    "fsdp_native": "strategy='fsdp'",
    "fsdp_cpu_offload": "strategy=FSDPStrategy(cpu_offload=True)",
    "horovod": "strategy='ddp'",
    "bagua": "strategy='ddp'",
    "collaborative": "strategy='ddp'",
    "deepspeed": "strategy='fsdp'",
    "deepspeed_stage_2": "strategy=FSDPStrategy(reshard_after_forward=False)",
    "deepspeed_stage_3": "strategy='fsdp'",
}
"""Names of strategies."""

REMOVED_STRATEGY_ARGUMENTS: dict[str, str] = {
    "accelerator": "Trainer(accelerator=...)",
    "device": "Trainer(accelerator=..., devices=...)",
    "parallel_devices": "Trainer(devices=...)",
    "cluster_environment": "nothing, or Trainer(launcher=...): who started the processes is found out by itself",
    "checkpoint_io": "Trainer(plugins=...)",
    "precision_plugin": "Trainer(precision=...), or Trainer(plugins=...)",
    "process_group_backend": "nothing: it follows from the device",
    "timeout": "Trainer(timeout=...), in seconds",
    "start_method": "strategy='ddp', or 'ddp_fork'",
    "ddp_comm_hook": "comm_hook=...",
    "ddp_comm_state": "comm_state=...",
    "ddp_comm_wrapper": "comm_hook=wrapper(hook)",
    "model_averaging_period": "the callback GradientSync(average_every=...)",
    "auto_wrap_policy": "wrap=...",
    "activation_checkpointing": "Trainer(activation_checkpointing=...)",
    "activation_checkpointing_policy": "Trainer(activation_checkpointing=...)",
    "sharding_strategy": "reshard_after_forward=..., shard_size=...",
    "device_mesh": "shard_size=...",
}
"""Arguments of strategies."""

_LIMITS = "trainer.max_epochs, trainer.max_steps (both may be set), trainer.current_epoch, trainer.global_step and trainer.is_last_batch"
_PASS = "what the call returns, and trainer.callback_metrics"

REMOVED_ATTRIBUTES: dict[str, str] = {
    "fit_loop": _LIMITS,
    "train_loop": _LIMITS,
    "validate_loop": _PASS,
    "test_loop": _PASS,
    "predict_loop": _PASS,
    "tuner": "Tuner(trainer)",
    "from_argparse_args": "Trainer(**vars(args)), or the command line",
    "add_argparse_args": "the command line, or arguments of your own",
    "gpus": "trainer.device_ids",
    "devices": "trainer.num_devices and trainer.device_ids",
    "num_gpus": "trainer.num_devices",
    "root_gpu": "trainer.strategy.root_device",
    "tpu_cores": "trainer.num_devices",
    "ipus": "trainer.num_devices",
    "num_processes": "trainer.world_size",
    "data_parallel_device_ids": "trainer.device_ids",
    "batch_idx": "the argument batch_idx of the hooks",
    "total_batch_idx": "trainer.global_step",
    "lr_schedulers": "trainer.lr_scheduler_configs",
    "training_type_plugin": "trainer.strategy",
    "accelerator_connector": "trainer.strategy, trainer.accelerator and trainer.precision_plugin",
    "amp_backend": "trainer.precision",
    "use_amp": "trainer.precision",
    "precision_type": "trainer.precision",
    "weights_save_path": "trainer.default_root_dir, or ModelCheckpoint(dirpath=...)",
    "weights_summary": "the callback ModelSummary",
    "progress_bar_dict": "trainer.progress_bar_metrics",
    "resume_from_checkpoint": "trainer.ckpt_path",
    "terminate_on_nan": "Trainer(bad_loss='raise')",
    "track_grad_norm": "the callback GradientMonitor",
    "prediction_writer_callbacks": "[c for c in trainer.callbacks if isinstance(c, BasePredictionWriter)]",
    "reset_train_dataloader": "Trainer(reload_dataloaders_every_n_epochs=...)",
    "reset_val_dataloader": "Trainer(reload_dataloaders_every_n_epochs=...)",
    "request_dataloader": "trainer.train_dataloader, trainer.val_dataloaders, ...",
    "call_hook": "the method of the module or callback",
}
"""Attributes and methods of a trainer."""

_STORE = "{}(self), and keep what the steps return in an attribute"
_RESULTS = "on_{}_batch_end(self, outputs, batch, batch_idx), which gets what the step returns"

REMOVED_HOOKS: dict[str, str] = {
    "training_epoch_end": _STORE.format("on_train_epoch_end"),
    "validation_epoch_end": _STORE.format("on_validation_epoch_end"),
    "test_epoch_end": _STORE.format("on_test_epoch_end"),
    "training_step_end": _RESULTS.format("train"),
    "validation_step_end": _RESULTS.format("validation"),
    "test_step_end": _RESULTS.format("test"),
    "on_epoch_start": "on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_keyboard_interrupt": "on_exception",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "configure_sharded_model": "configure_model",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
    "on_post_move_to_device": "on_fit_start",
    "on_reset_train_dataloader": "train_dataloader",
    "on_reset_val_dataloader": "val_dataloader",
    "get_progress_bar_dict": "self.log(..., prog_bar=True), or ProgressBar.get_metrics",
    "tbptt_split_batch": "automatic_optimization = False, and a loop of your own in training_step",
}
"""Methods of modules, data modules and callbacks that nobody calls any more."""

REMOVED_ARGUMENTS: dict[str, str] = {
    "optimizer_idx": "for several optimizers set self.automatic_optimization = False, and step self.optimizers() in training_step",
    "hiddens": "for truncated backpropagation set self.automatic_optimization = False, and loop over the parts of a batch in training_step",
    "dataloader_iter": "a step gets one batch; several at a time come from a loader, or from a batch_sampler, of your own",
    "on_tpu": "it is no longer passed",
    "using_native_amp": "it is no longer passed",
    "using_lbfgs": "it is no longer passed; isinstance(optimizer.optimizer, torch.optim.LBFGS) tells",
    "unused": "it is no longer passed",
}
"""Arguments of hooks and steps."""


REMOVED_EXPORTS: dict[str, str] = {
    "to_torchscript": "torch.export.export(module, (example,)), or torch.jit.trace(module, example)",
    "to_onnx": "torch.onnx.export(module, (example,), path)",
    "to_tensorrt": "torch.export.export(module, (example,)) and TensorRT's own compiler",
}
"""Methods of modules that turn them into something else."""


class Gone:
    """Those methods: calling one says what to use. (Properties could not: torch's modules swallow their errors.)"""

    def to_torchscript(self, *args: Any, **kwargs: Any) -> Any:
        """Not here; see the error."""
        raise _gone("to_torchscript")

    def to_onnx(self, *args: Any, **kwargs: Any) -> Any:
        """Not here; see the error."""
        raise _gone("to_onnx")

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> Any:
        """Not here; see the error."""
        raise _gone("to_tensorrt")


def _gone(name: str) -> AttributeError:
    return AttributeError(f"TrainModule has no {name}: use {REMOVED_EXPORTS[name]}.")
