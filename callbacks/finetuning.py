"""BaseFinetuning: layers that are frozen at first and trained from some epoch on."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from callbacks import freezing
from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException
from callbacks.pruning_masks import named_parameters

__all__ = ["BaseFinetuning"]


class BaseFinetuning(Callback):
    """Override `freeze_before_training` and `finetune_function` to train a module in stages.

    In `configure_optimizers` give the optimizer what is trained at first: `(p for p in self.parameters() if p.requires_grad)`. Layers that
    are unfrozen later come into parameter groups of their own (`unfreeze_and_add_param_group`); schedulers that keep a rate for every group
    learn of them. DDP averages the gradients of unfrozen layers from that epoch on.

    Checkpoints keep the groups and what was frozen: a resume goes on to the bit, and `finetune_function` is not called a second time for
    an epoch that is resumed in its middle.

    Raises:
        MisconfigurationException: when a fit starts, for a checkpoint that names parameters which the module does not have, and for a
            strategy that keeps layers on other ranks alone.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None  # groups and frozen parts, of a checkpoint or of the fit before
        self._live: tuple[Any, Any] | None = None  # (trainer, module) inside a fit
        self._epoch = -1  # the last epoch for which `finetune_function` was called

    def freeze_before_training(self, module: Any) -> None:
        """Freeze what is not trained at first: `self.freeze(module.backbone)`. Called at the start of a fit, before optimizers are made."""
        raise NotImplementedError(f"{type(self).__name__} has to define freeze_before_training(module)")

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is trained from `epoch` (counted from 0) on. Called for every optimizer before the first batch of every epoch."""
        raise NotImplementedError(f"{type(self).__name__} has to define finetune_function(module, epoch, optimizer)")

    # -- freezing: what the two methods above are made of ------------------------------------------------------------------

    flatten_modules = staticmethod(freezing.flatten_modules)
    filter_params = staticmethod(freezing.filter_params)
    make_trainable = staticmethod(freezing.make_trainable)
    freeze_module = staticmethod(freezing.freeze_module)
    freeze = staticmethod(freezing.freeze)
    filter_on_optimizer = staticmethod(freezing.filter_on_optimizer)
    unfreeze_and_add_param_group = staticmethod(freezing.unfreeze_and_add_param_group)

    # -- when --------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.global_step == 0:  # a new training; a checkpoint is read after this
            self._saved, self._epoch = None, -1
        self.freeze_before_training(module)

    def regroup(self, trainer: Any, module: Any) -> None:
        """Bring optimizers that were just made, and what is frozen, to where the training stood that goes on."""
        if any(p.is_meta for p in module.parameters()):
            raise MisconfigurationException(
                f"{type(self).__name__}: strategy {trainer.strategy.name!r} keeps layers on other ranks, where they cannot be unfrozen from here. Use "
                "strategy='ddp' or 'fsdp'."
            )
        self._live, saved, self._saved = (trainer, module), self._saved, None
        if saved is None:
            return
        named, groups = dict(named_parameters(module)), saved["internal_optimizer_metadata"]
        names = {name for of_one in groups.values() for group in of_one for name in group["params"]}
        if unknown := sorted({*names, *saved.get("frozen", ())} - named.keys()):
            raise MisconfigurationException(
                f"{type(self).__name__}: the checkpoint names the parameter {unknown[0]!r}, which the module does not have. It is of another module."
            )
        for optimizer, of_one in zip(trainer.optimizers, groups.values(), strict=True):
            count = len(optimizer.param_groups)
            for group, kept in zip(optimizer.param_groups, of_one):
                group["params"] = [named[name] for name in kept["params"]]
            for kept in of_one[count:]:
                optimizer.add_param_group({**kept, "params": [named[name] for name in kept["params"]]})
            _tell_schedulers(trainer, optimizer, count)
        frozen = saved.get("frozen", named.keys() - names)  # a file of Lightning names the groups alone
        for name, parameter in named.items():
            parameter.requires_grad = name not in frozen
        for path, layer in freezing.batchnorms(module):
            layer.track_running_stats = path not in saved.get("untracked", ())

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        epoch = trainer.current_epoch
        if epoch == self._epoch:
            return
        self._epoch = epoch
        before = [p.requires_grad for p in module.parameters()]
        for optimizer in trainer.optimizers:
            count = len(optimizer.param_groups)
            self.finetune_function(module, epoch, optimizer)
            _tell_schedulers(trainer, optimizer, count)
        if before != [p.requires_grad for p in module.parameters()]:
            trainer.rewrap()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if self._live is not None:
            self._saved, self._live = self._state(), None

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Say by names which parameters are in which group, and what is frozen."""
        trainer, module = self._live  # type: ignore[misc]
        names = {id(p): name for name, p in named_parameters(module)}  # those of a pruned module, too
        return {
            "internal_optimizer_metadata": {
                index: [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
                for index, optimizer in enumerate(trainer.optimizers)
            },
            "frozen": [name for name, p in named_parameters(module) if not p.requires_grad],
            "untracked": [path for path, layer in freezing.batchnorms(module) if not layer.track_running_stats],
            "epoch": self._epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        return self._state() if self._live is not None else self._saved or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved, self._epoch = state_dict, state_dict.get("epoch", -1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}


def _tell_schedulers(trainer: Any, optimizer: Optimizer, count: int) -> None:
    """Let schedulers that keep something for each group know those beyond the first `count`: they begin at their present rate."""
    new = optimizer.param_groups[count:]
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        if not new or getattr(scheduler, "optimizer", None) is not optimizer or not hasattr(scheduler, "base_lrs"):
            continue
        for group in new:
            group.setdefault("initial_lr", group["lr"])
            scheduler.base_lrs.append(group["initial_lr"])
            if hasattr(scheduler, "lr_lambdas"):
                scheduler.lr_lambdas.append(scheduler.lr_lambdas[-1])
