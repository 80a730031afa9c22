"""BackboneFinetuning: a head is trained first, the backbone below it from some epoch on, at a rate that grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from callbacks.errors import MisconfigurationException
from callbacks.finetuning import BaseFinetuning

__all__ = ["BackboneFinetuning", "multiplicative"]


def multiplicative(epoch: int) -> float:
    """The usual growth of the backbone's learning rate: it doubles every epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Keeps `module.backbone` frozen until an epoch, then trains it as a group of its own.

    From the epoch after that one on its learning rate is multiplied by `lambda_func(epoch + 1)` at the start of every epoch, up to the
    rate of the first group.

    Args:
        unfreeze_backbone_at_epoch: the first epoch, from 0, in which the backbone is trained.
        lambda_func: the factor of each epoch.
        backbone_initial_ratio_lr: the first rate of the backbone is this part of the first group's.
        backbone_initial_lr: the first rate itself; None for the ratio.
        should_align: the rate never exceeds the first group's.
        initial_denom_lr: kept for Lightning's sake; the rate is always given by one of the two above.
        train_bn: whether the BatchNorm layers of the backbone are given to the optimizer with it. They are not frozen before.
        verbose: rank 0 prints both rates at the start of every epoch.
        rounding: digits of what is printed.

    Attributes:
        previous_backbone_lr: the backbone's rate of this epoch; None while it is frozen.

    Raises:
        MisconfigurationException: when a fit starts, for a module without a `backbone` that is a torch module.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch, self.lambda_func = unfreeze_backbone_at_epoch, lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.initial_denom_lr, self.train_bn = should_align, initial_denom_lr, train_bn
        self.verbose, self.rounding = verbose, rounding
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), Module):
            raise MisconfigurationException(
                f"BackboneFinetuning: {type(module).__name__} has no layer self.backbone, made in __init__, which could be frozen. "
                "Name it so, or write a BaseFinetuning of your own."
            )
        if stage == "fit" and trainer.global_step == 0:
            self.previous_backbone_lr = None
        super().setup(trainer, module, stage)

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        rate, mine = optimizer.param_groups[0]["lr"], self.previous_backbone_lr
        if mine is None:  # that epoch, or a later one where a training goes on that was to unfreeze later
            mine = self.backbone_initial_lr if self.backbone_initial_lr is not None else rate * self.backbone_initial_ratio_lr
            self.unfreeze_and_add_param_group(module.backbone, optimizer, mine, self.initial_denom_lr, self.train_bn)
        else:
            mine = self.lambda_func(epoch + 1) * mine
            mine = min(mine, rate) if self.should_align else mine
            optimizer.param_groups[-1]["lr"] = mine
        self.previous_backbone_lr = mine

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        super().on_train_epoch_start(trainer, module)
        if self.verbose and self.previous_backbone_lr is not None:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            trainer.print(f"Learning rates: {round(rate, self.rounding)}, backbone {round(self.previous_backbone_lr, self.rounding)}")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "previous_backbone_lr"})
