"""What each name of Lightning is called here, and what to do about those that are not here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import callbacks
import trainer

__all__ = ["RENAMED", "Target", "advice", "below_root", "counterpart", "find", "is_module", "object_of"]


@dataclass(frozen=True)
class Target:
    """A name and the module that it is imported from."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


RENAMED = {"LightningModule": "TrainModule", "LightningDataModule": "DataModule", "LightningCLI": "TrainerCLI", "LightningArgumentParser": "TrainerArgumentParser"}
_CLI = {"LRSchedulerCallable", "OptimizerCallable", "ReduceLROnPlateau", "SaveConfigCallback", "TrainerArgumentParser", "TrainerCLI"}
"""What `trainer.cli` has: it is not asked, since it needs a package that may be missing."""


_ANNOTATIONS = {
    "STEP_OUTPUT", "TRAIN_DATALOADERS", "EVAL_DATALOADERS", "OptimizerLRScheduler", "LRSchedulerTypeUnion", "LRSchedulerPLType", "LRSchedulerType",
    "ArgsType", "OptimizerConfig", "OptimizerLRSchedulerConfig", "LRSchedulerConfigType",
}  # fmt: skip

_MODULES = {
    "accelerators", "callbacks", "cli", "core", "datamodule", "demos", "environments", "exceptions", "fabric", "io", "loggers", "loops", "module",
    "overrides", "plugins", "precision", "profilers", "pytorch", "strategies", "trainer", "tuner", "utilities", "rank_zero", "seed", "types", "memory",
    "grads", "model_summary", "combined_loader", "early_stopping", "model_checkpoint", "progress", "finetuning", "lr_monitor", "base",
    "logger", "tensorboard", "csv_logs", "wandb", "mlflow", "comet", "neptune", "data", "parsing", "states", "hooks", "optimizer", "layer_sync",
}  # fmt: skip
"""Sub-modules of Lightning that programs import as such (`from pytorch_lightning import callbacks`)."""

_LOGGER = (
    "write it as a subclass of callbacks.Logger (log_metrics, log_hyperparams), or use callbacks.TensorBoardLogger or CSVLogger, whose files "
    "that service can read"
)
_TPU = "TPUs are not supported"
_FOUND = "leave it out: who started the processes is found out by itself (Trainer(launcher=...) insists)"

_ADVICE = {
    "WandbLogger": _LOGGER, "MLFlowLogger": _LOGGER, "CometLogger": _LOGGER, "NeptuneLogger": _LOGGER, "LitLogger": _LOGGER,
    "TestTubeLogger": _LOGGER,
    "XLAProfiler": _TPU, "XLAAccelerator": _TPU, "XLAStrategy": _TPU, "XLAPrecision": _TPU, "XLACheckpointIO": _TPU, "XLAEnvironment": _TPU,
    "TPUAccelerator": _TPU,
    "Fabric": "write the loop by hand with torch.distributed, or move it into a TrainModule",
    "DeepSpeedStrategy": "use trainer.FSDPStrategy (strategy='fsdp'), which shards parameters, gradients and optimizer states",
    "DeepSpeedPrecision": "use trainer.FSDPStrategy with Trainer(precision=...)",
    "FSDPPrecision": "use Trainer(precision=...)", "HalfPrecision": "use Trainer(precision='16-true' or 'bf16-true')",
    "DoublePrecision": "use Trainer(precision='64-true')",
    "BitsandbytesPrecision": "quantise the layers yourself, in configure_model",
    "TransformerEnginePrecision": "use Trainer(precision='bf16-mixed')",
    "TorchSyncBatchNorm": "use Trainer(sync_batchnorm=True)", "LayerSync": "use Trainer(sync_batchnorm=True)",
    "ParallelStrategy": "subclass trainer.Strategy or trainer.DDPStrategy; the methods differ (docs/plugins.md)",
    "CPUAccelerator": "use Trainer(accelerator='cpu')", "CUDAAccelerator": "use Trainer(accelerator='cuda')",
    "MPSAccelerator": "use Trainer(accelerator='mps')",
    "find_usable_cuda_devices": "use Trainer(devices='auto'), or a number, which takes idle GPUs first",
    "SLURMEnvironment": f"{_FOUND}; Trainer(auto_requeue=True) puts the job back into the queue",
    "LightningEnvironment": _FOUND, "TorchElasticEnvironment": _FOUND, "LSFEnvironment": _FOUND, "MPIEnvironment": _FOUND,
    "KubeflowEnvironment": _FOUND, "ClusterEnvironment": _FOUND,
    "Checkpoint": "subclass callbacks.ModelCheckpoint or callbacks.Callback; what has `best_model_path` is found by trainer.checkpoint_callbacks",
    "Loop": "there are no loop objects: the loop is trainer/loops/fit.py",
    "ServableModule": "servable modules are out of scope", "ServableModuleValidator": "servable modules are out of scope",
    "LightningOptimizer": "trainer.optimizers holds the torch.optim objects themselves; self.optimizers() wraps them",
    "LightningEnum": "use enum.Enum with str", "GradClipAlgorithmType": "write 'norm' or 'value'",
    "move_data_to_device": "use torch.utils._pytree.tree_map, or self.transfer_batch_to_device(batch, device, 0)",
    "is_overridden": "compare type(module).name with trainer.TrainModule.name",
    "ModelSummary": "trainer.summarize(module, max_depth) returns the table",
    "QuantizationAwareTraining": "use torch.ao.quantization in a Callback of your own",
    "disable_possible_user_warnings": "use warnings.filterwarnings",
    "find_shared_parameters": "compare parameters with `is`", "set_shared_parameters": "assign one parameter to both layers",
    "is_picklable": "try pickle.dumps", "measure_flops": "use torch.utils.flop_counter.FlopCounterMode",
    "is_shared_filesystem": "write a file on one machine and look for it on another",
    "suggested_max_num_workers": "use len(os.sched_getaffinity(0)), divided by the processes of the machine",
    "__version__": "leave it out, or read importlib.metadata.version('torch-trainer-kit')",
    "*": "name what you use: the names that come with * cannot be told apart from your own",
}  # fmt: skip
_OF_PART = {
    "fabric": "nothing of Lightning Fabric has",
    "loops": "there are no loop objects: the loop is trainer/loops/fit.py",
    "tuner": "find the value by hand",
    "app": "nothing of Lightning Apps has",
    "demos": "copy the demo model that you use",
}
_SAME_IN_FABRIC = {"seed_everything", "AttributeDict", "MisconfigurationException", "rank_zero_only", "rank_zero_info", "rank_zero_warn", "isolate_rng"}


def below_root(dotted: str) -> tuple[str, ...] | None:
    """Return the path of a dotted name below Lightning's root package: ("callbacks", "Timer"); None for what is not Lightning's."""
    root, *path = dotted.split(".")
    if root == "lightning_fabric":
        return ("fabric", *path)
    if root not in ("pytorch_lightning", "lightning"):
        return None
    return tuple(path[1:] if root == "lightning" and path[:1] == ["pytorch"] else path)


def is_module(path: tuple[str, ...]) -> bool:
    """True for a path that names a module of Lightning, not something in it."""
    return all(part in _MODULES or (i + 1 < len(path) and _is_lower(part)) for i, part in enumerate(path))


def object_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return `path` up to the class, function or constant in it: the attributes of that are the program's own business."""
    for i, part in enumerate(path):
        last = i + 1 == len(path)
        if not _is_lower(part) or part in _functions() or (last and part not in _MODULES):
            return path[: i + 1]
    return path


def find(path: tuple[str, ...]) -> Target | None:
    """Return the counterpart of the class, function or constant at `path` below Lightning's root."""
    name = RENAMED.get(path[-1], path[-1])
    if path[0] == "fabric" and name not in _SAME_IN_FABRIC:
        return None
    if name in _ANNOTATIONS:
        return Target("typing", "Any")
    if path[0] == "cli" and name in _CLI:
        return Target("trainer.cli", name)
    if path[0] in ("callbacks", "loggers") or path == ("Callback",):
        return Target("callbacks", name) if name in callbacks.__all__ else None
    return Target("trainer", name) if name in trainer.__all__ else None


def counterpart(target: Target) -> Any:
    """Return the class or function itself; None for those of other packages and of the command line, which may be missing."""
    package = {"callbacks": callbacks, "trainer": trainer}.get(target.module)
    return None if package is None else getattr(package, target.name)


def advice(path: tuple[str, ...]) -> str:
    """Say what to do about a name that has no counterpart."""
    name = path[-1] if path else ""
    what = _ADVICE.get(name) or _OF_PART.get(path[0] if path else "")
    return f"{'.'.join(path) or 'Lightning'} has no counterpart here{': ' + what if what else ''}."


def _is_lower(part: str) -> bool:
    return part == part.lower() and not part.startswith("__")


def _functions() -> set[str]:
    return {name for name in (*trainer.__all__, *callbacks.__all__, *_ADVICE) if _is_lower(name)}
