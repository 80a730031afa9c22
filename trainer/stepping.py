"""What one optimizer step of a run consists of, apart from the loop: gradients, clipping, stepping, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer.errors import MisconfigurationException
from trainer.hooks import overrides
from trainer.module import TrainModule
from trainer.optim import LRSchedulerConfig, StepOptimizer, parse_optimizers

__all__ = ["Stepping"]

_LATE = ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end")


class Stepping:
    """The part of `Run` that knows optimizers."""

    def make_optimizers(self) -> None:
        """Make optimizers and schedulers, wrap the module, and decide how this run takes its steps. Collective."""
        self.optimizers, self.schedulers = parse_optimizers(self.module.configure_optimizers())
        if len(self.optimizers) > 1 and self.module.automatic_optimization:
            raise MisconfigurationException(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, but automatic optimization steps one. Set "
                "self.automatic_optimization = False and step them in training_step, or return one with parameter groups."
            )
        if not self.optimizers:
            self.trainer.warn("configure_optimizers returned None: the weights will not change.")
        self.step_optimizers = [StepOptimizer(o, self.take_step) for o in self.optimizers]
        for callback in self.callbacks:
            if hasattr(callback, "regroup"):  # finetuning that goes on: parameter groups as they were when it was saved
                callback.regroup(self.trainer, self.module)
        self.strategy.check_optimizers(self.optimizers)
        self.strategy.late_sync = self.settings.recover_oom
        self.strategy.wrap(training=True)
        self.choose_path()

    def choose_path(self) -> None:
        """Decide once what a step of this run needs, so that the loop asks plain attributes."""
        module, hooks = self.module, self.hooks
        self.manual = not module.automatic_optimization
        self.lbfgs = any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers)
        self.by_closure = not self.manual and (self.lbfgs or overrides(module, TrainModule, "optimizer_step"))
        if self.lbfgs and self.precision.scaler is not None:
            raise MisconfigurationException("LBFGS evaluates the loss several times a step, which 16-mixed cannot scale; use bf16-mixed.")
        if self.manual and self.accumulate != 1:
            raise MisconfigurationException(
                "accumulate_grad_batches works in automatic optimization only; in manual optimization step every n-th batch yourself."
            )
        if self.manual and self.settings.gradient_clip_val:
            raise MisconfigurationException(
                "gradient_clip_val works in automatic optimization only; in manual optimization call self.clip_gradients(optimizer, "
                "gradient_clip_val=...) before optimizer.step()."
            )
        self.guarded = self.settings.bad_loss is not None or self.settings.recover_oom
        if self.guarded and (self.manual or self.by_closure):
            raise MisconfigurationException(
                "bad_loss and recover_oom watch the steps that the trainer takes. With manual optimization, LBFGS or an optimizer_step of your "
                "own, look at the loss yourself, and leave them out."
            )
        if self.strategy.pipeline is not None:
            self._check_staged()
        waits = self.strategy.waits_inside or self.settings.sync_batchnorm
        self.takes_none = self.dist.alone or (self.settings.bad_loss is not None and not waits)
        self.custom_backward = overrides(module, TrainModule, "backward")
        self.custom_zero_grad = overrides(module, TrainModule, "optimizer_zero_grad")
        self.custom_clip = overrides(module, TrainModule, "configure_gradient_clipping")
        self.hears_backward = hooks.used("on_before_backward", "on_after_backward")
        self.hears_zero_grad = hooks.used("on_before_zero_grad")
        self.hears_step = hooks.used("on_before_optimizer_step")
        self.hears_start = hooks.used("on_train_batch_start")
        self.may_refuse = hooks.foreign("on_train_batch_start")  # ours never return -1, so the ranks need not ask each other
        self.hears_end = hooks.used("on_train_batch_end")
        self.step_schedulers = [c for c in self.schedulers if c.interval == "step"]
        self.stepped = True
        if self.precision.scaler is not None or self.by_closure:  # a skipped step is one in which the optimizer was not called
            for optimizer in self.optimizers:
                handle = optimizer.register_step_post_hook(self._note_step)
                self._undo.append(handle.remove)

    def _check_staged(self) -> None:
        """Refuse what cannot be where forward and backward of a batch happen together, in parts, on several ranks."""
        found = {
            "manual optimization": self.manual,
            "a backward of your own": overrides(self.module, TrainModule, "backward"),
            "on_before_backward (use on_after_backward)": self.hooks.used("on_before_backward"),
            "bad_loss": self.settings.bad_loss is not None,
            "recover_oom": self.settings.recover_oom,
        }
        if any(found.values()):
            raise MisconfigurationException(
                f"pipeline_parallel_size > 1 does not go with {', '.join(name for name, used in found.items() if used)}: backward of one part of "
                "a batch runs before forward of the next, on several ranks. Leave it out, or use strategy='ddp' or 'fsdp'."
            )

    def may_stop_late(self) -> bool:
        """True when a hook between backward and the boundary may wish to stop: then the ranks tell each other at the boundary itself."""
        timed = any(callback.stops_in_steps for callback in self.callbacks)
        return timed or self.custom_backward or self.custom_clip or overrides(self.module, TrainModule, "lr_scheduler_step") or any(map(self.hooks.foreign, _LATE))

    def _note_step(self, *_: Any) -> None:
        self.stepped = True

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """From summed gradients to those the optimizer shall see: unscale, hooks, clip."""
        self.precision.unscale(optimizer)
        if self.hears_step:
            self.hooks.call("on_before_optimizer_step", optimizer)
        s = self.settings
        if self.custom_clip:
            method = self.module.configure_gradient_clipping
            self.hooks.within("configure_gradient_clipping", method, optimizer, s.gradient_clip_val, s.gradient_clip_algorithm)
        elif s.gradient_clip_val:
            self.strategy.clip(optimizer, s.gradient_clip_val, s.gradient_clip_algorithm)

    def take_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """What `optimizer.step()` of a StepOptimizer does, in manual optimization and in an overridden `optimizer_step`."""
        if not self.manual:
            if closure is not None and self.precision.scaler is not None:
                loss = closure()
                self.precision.step(optimizer)
                return loss
            return self.precision.step(optimizer, closure)
        loss = closure() if closure is not None else None
        self.precision.unscale(optimizer)
        if self.hears_step:
            self.hooks.call("on_before_optimizer_step", optimizer)
        self.precision.step(optimizer)
        return loss

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward in manual optimization: weighted by this rank's share of the samples, scaled, averaged over ranks. Collective."""
        if not self.manual:
            raise MisconfigurationException(
                "manual_backward belongs to manual optimization: set self.automatic_optimization = False, or return the loss."
            )
        if self.manual_weight is not None:
            loss = loss * self.manual_weight
        if self.hears_backward:
            self.hooks.call("on_before_backward", loss)
        if self.precision.stepped:  # a second cycle of backward and step in one training_step has a scale of its own
            self.precision.update()
        scaled = self.precision.scale(loss)
        self.hooks.within("backward", partial(self.module.backward, **kwargs), scaled, *args)
        self.strategy.sync_gradients()
        if self.hears_backward:
            self.hooks.call("on_after_backward")

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str | None) -> None:
        """Clip as asked; without arguments as the trainer's settings say."""
        s = self.settings
        optimizer = optimizer.optimizer if isinstance(optimizer, StepOptimizer) else optimizer
        if self.manual:
            self.precision.unscale(optimizer)
        self.strategy.clip(optimizer, s.gradient_clip_val if value is None else value, algorithm or s.gradient_clip_algorithm)

    def move_schedulers(self, configs: list[LRSchedulerConfig], count: int) -> None:
        """Advance the schedulers that are due after `count` steps or epochs."""
        for config in configs:
            if config.resting or count % config.frequency:
                continue
            metric = self._monitored(config) if config.reduce_on_plateau else None
            if config.reduce_on_plateau and metric is None:
                continue
            if overrides(self.module, TrainModule, "lr_scheduler_step"):
                self.hooks.within("lr_scheduler_step", self.module.lr_scheduler_step, config.scheduler, metric)
            elif metric is None:
                config.scheduler.step()
            else:
                config.scheduler.step(metric)

    def _monitored(self, config: LRSchedulerConfig) -> torch.Tensor | None:
        if config.interval == "step":
            self.publish_step()
        metrics = self.trainer.results.callback_metrics
        if config.monitor in metrics:
            return metrics[config.monitor]
        message = f"A scheduler watches {config.monitor!r}, which was not logged. There are: {', '.join(metrics) or 'none'}."
        if config.strict:
            raise MisconfigurationException(message)
        self.trainer.warn(message)
        return None
