"""Trainer arguments of earlier Lightning versions, and what one writes in their place."""

from __future__ import annotations

__all__ = ["REMOVED"]

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
    "auto_lr_find": "a learning rate of your own",
    "auto_scale_batch_size": "a batch size of your own",
    "model_registry": "a logger or checkpoint I/O plug-in",
}
