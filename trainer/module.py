"""TrainModule: what a user subclasses. It knows its trainer only as the object it was handed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_map

from trainer.checkpoint.remade import ModuleFromCheckpoint
from trainer.errors import MisconfigurationException
from trainer.hparams import HyperparametersMixin
from trainer.manual import ManualOptimization
from trainer.module_hooks import LoaderMethods, ModuleHooks
from trainer.removed import Gone

__all__ = ["TrainModule"]


class TrainModule(ModuleHooks, LoaderMethods, ManualOptimization, HyperparametersMixin, ModuleFromCheckpoint, Gone, torch.nn.Module):
    """A torch module that says how it is trained.

    Define `training_step` and `configure_optimizers`; the rest is optional. The loss is what `training_step` returns, as
    a tensor or under "loss" in a dict. A dict may also give "count": the number of samples or tokens that the loss is a
    mean over; the update is then the mean over all of them, in every accumulation window and over all ranks.
    """

    _trainer: Any = None
    automatic_optimization: bool = True
    strict_loading: bool = True
    example_input_array: Any = None
    _not_transferred = ("_trainer", "_compiled_call_impl")  # the latter is what module.compile() made
    __jit_unused_properties__ = [  # torch.jit's tracer reads every other attribute  # noqa: RUF012
        "trainer", "device", "dtype", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers", "hparams",
        "hparams_initial", "device_mesh",
    ]  # fmt: skip

    # -- what the user writes ------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch: a scalar tensor, a dict with "loss" (and "count"), or None to skip the batch."""
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Look at one validation batch and `self.log` numbers. With several loaders it also gets `dataloader_idx`."""
        raise NotImplementedError

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Look at one test batch."""
        raise NotImplementedError

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the predictions of a batch; by default `self(batch)`."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, in one of six forms.

        An optimizer; a list of them; two lists (optimizers, schedulers); a dict with "optimizer" and "lr_scheduler"; a tuple
        of such dicts; or None for a module that only runs. "lr_scheduler" is a scheduler or a dict of "scheduler",
        "interval" ("epoch" or "step"), "frequency", "monitor", "strict", "name", "reduce_on_plateau".
        """
        raise NotImplementedError

    def configure_callbacks(self) -> Any:
        """Return a callback or a list of them to add to the trainer's; a callback of the same class replaces the trainer's."""
        return []

    def configure_model(self) -> None:
        """Create large layers here, on every rank, just before they are placed. It may be called more than once."""

    # -- steps that may be taken over ------------------------------------------------------------------------------------

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None) -> None:
        """Take the step. Override to warm up or skip; call `optimizer.step(closure=optimizer_closure)`."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Set gradients to None before the first backward of a step."""
        optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from the (weighted, scaled) loss."""
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of `optimizer`. Override for another rule; call `self.clip_gradients` inside."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance a scheduler; `metric` is the monitored number, or None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- what the user calls ---------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        """The trainer that runs this module.

        Raises:
            RuntimeError: outside a run.
        """
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a Trainer: self.trainer (and self.log, self.optimizers, ...) exist "
                "only inside fit, validate, test or predict."
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.__dict__["_trainer"] = trainer

    @property
    def device_mesh(self) -> Any:
        """torch's DeviceMesh in a run with ModelParallelStrategy, for `parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)`.

        None under other strategies, and outside of the processes of a run: there is nothing to cut then.
        """
        return None if self._trainer is None else self._trainer.strategy.device_mesh

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Add a number to what is published: a float, a scalar tensor, or a torchmetrics metric.

        Outside of a run (a step that is called by hand) it does nothing, and a warning says so. Nothing is read from the device here. With `on_step` (default in training) the mean over the step's batches is published
        at publish points; with `on_epoch` (default elsewhere) the mean over the epoch, each batch weighted by its number of
        samples. Both are exact over all ranks, so `sync_dist` is accepted and changes nothing; a `sync_dist_group` is refused.

        Args:
            name: the name in loggers, in `trainer.callback_metrics` and for monitors.
            value: the number; tensors must hold one element.
            prog_bar: also show it in the progress bar.
            logger: send it to the loggers (default True).
            on_step, on_epoch: publish per step, per epoch; with both, as `name_step` and `name_epoch`.
            reduce_fx: "mean", "sum", "min" or "max" over batches and ranks.
            enable_graph: accepted; values are always detached.
            add_dataloader_idx: append `/dataloader_idx_N` where there are several loaders.
            batch_size: the weight of this value in the mean; default the first dimension of the batch.
            metric_attribute: where a metric object lives in the module, if that cannot be found.
            rank_zero_only: only rank 0's value counts.

        Raises:
            MisconfigurationException: in a hook where nothing can be logged, for a value that is no scalar, or with a
                `sync_dist_group`.
        """
        if sync_dist_group is not None:
            raise _no_groups(f"self.log({name!r}, sync_dist_group=...)")
        trainer = self._trainer
        if trainer is None:
            warnings.warn(f"self.log({name!r}) outside of fit, validate, test and predict does nothing: there is no Trainer.", stacklevel=2)
            return
        trainer._record(
            self, name, value, prog_bar, logger, on_step, on_epoch, reduce_fx,
            add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
        )  # fmt: skip

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Call `log` for every item of a dict, or of a torchmetrics MetricCollection, with these arguments."""
        shared = {"keep_base": False, "copy_state": False} if hasattr(dictionary, "compute_groups") else {}  # one state for several metrics
        for name, value in dictionary.items(**shared):
            self.log(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
                add_dataloader_idx, batch_size, None, rank_zero_only,
            )  # fmt: skip

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack the tensors and numbers in `data` over the ranks: each gets a first dimension of world size. Collective.

        `sync_grads` lets gradients flow back to this rank's part. A process that is alone gets its data back unstacked.
        Numbers and numpy arrays become tensors.

        Raises:
            MisconfigurationException: with a `group`.
        """
        if group is not None:
            raise _no_groups("self.all_gather(group=...)")
        gathered, device = self.trainer._all_gather, self.device

        def gather(leaf: Any) -> Any:
            if isinstance(leaf, (bool, int, float)) or hasattr(leaf, "__array__"):
                return gathered(torch.as_tensor(leaf, device=leaf.device if isinstance(leaf, torch.Tensor) else device), sync_grads)
            return leaf

        return tree_map(gather, data)

    def freeze(self) -> None:
        """Let no parameter require gradients, and go to eval mode."""
        self.requires_grad_(False).eval()

    def unfreeze(self) -> None:
        """Let all parameters require gradients, and go to train mode."""
        self.requires_grad_(True).train()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, without tearing a progress bar."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the parameters (of the first one); without any, that of the run."""
        for tensor in chain(self.parameters(), self.buffers()):  # one after the other: the first is enough
            return tensor.device
        return torch.device("cpu") if self._trainer is None else self._trainer.strategy.root_device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters (of the first floating-point one)."""
        for tensor in self.parameters():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    current_epoch = property(lambda self: self._trainer.current_epoch if self._trainer is not None else 0)
    global_step = property(lambda self: self._trainer.global_step if self._trainer is not None else 0)
    global_rank = property(lambda self: self._trainer.global_rank if self._trainer is not None else 0)
    local_rank = property(lambda self: self._trainer.local_rank if self._trainer is not None else 0)
    logger = property(lambda self: self._trainer.logger if self._trainer is not None else None)
    loggers = property(lambda self: self._trainer.loggers if self._trainer is not None else [])

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles never carry the trainer."""
        return {k: v for k, v in self.__dict__.items() if k not in self._not_transferred}


def _no_groups(call: str) -> MisconfigurationException:
    return MisconfigurationException(f"{call}: values cross all ranks of a run, there are no groups of them; leave it out.")
