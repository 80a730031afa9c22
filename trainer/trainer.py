"""Trainer: its arguments, and the four functions that one calls."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from trainer import config, launchers
from trainer.accelerators import Accelerator
from trainer.arguments import at_least, known_arguments
from trainer.checkpoint.plugin import CheckpointIO
from trainer.datamodule import DataModule
from trainer.defaults import Callback, Logger, make_callbacks, make_loggers
from trainer.errors import MisconfigurationException
from trainer.execution import Execution
from trainer.launchers.base import Launcher
from trainer.loops import statistics
from trainer.module import TrainModule
from trainer.precision import Precision
from trainer.profilers import Profiler
from trainer.results import Results
from trainer.run import Run
from trainer.settings import make_settings
from trainer.strategies import Strategy
from trainer.tuner import inside
from trainer.world import World

__all__ = ["Trainer"]

class Trainer(Execution):
    """Trains, validates, tests and predicts with a TrainModule, on the devices and with the strategy that its arguments name.

    All arguments are keyword-only, checked here, and mean what they mean in PyTorch Lightning 2.x unless said otherwise.

    Args:
        accelerator: "auto", "cpu", "gpu"/"cuda", "mps", the name of a plug-in or an Accelerator object.
        devices: "auto" (on cuda all that nobody else uses, and a line that says which), a number (idle ones first), a list of indices,
            "0,1", or -1 for all. On the CPU the number of processes.
        num_nodes: machines; for more than one start the program with torchrun or srun on each.
        strategy: "auto", "ddp", "ddp_find_unused_parameters_true", ..., the name of a plug-in or a Strategy object.
        precision: "32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true", "64-true"; also 16, 32, 64, "bf16".
        max_epochs, min_epochs, max_steps, min_steps: limits; -1 for none. Steps are optimizer steps. Without any, 1000 epochs.
        max_time: a timedelta, a dict of its arguments, or "DD:HH:MM:SS"; training stops at the next boundary.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: batches (int) or a fraction (float).
        overfit_batches: train (and validate) on so many batches, in order.
        fast_dev_run: run n (True: 1) batches of everything, with no loggers and checkpoints.
        val_check_interval: validate every so many optimizer steps (int) or at this fraction of an epoch (float).
        check_val_every_n_epoch: validate in every n-th epoch only; None counts val_check_interval across epochs.
        num_sanity_val_steps: validation batches tried ahead of step 1; -1 for all, 0 for none.
        log_every_n_steps: publish step numbers every so many optimizer steps; 0 for never.
        accumulate_grad_batches: batches of one optimizer step.
        gradient_clip_val, gradient_clip_algorithm: clip gradients by total "norm" or each "value".
        logger: True (TensorBoard under `runs/`), False, "tensorboard", "csv", the name of a plug-in, a logger or a list.
        callbacks: a callback, the name of a plug-in or a list.
        default_root_dir: where everything is written; fixed now, so that a later chdir does not move it. Default: here.
        enable_checkpointing, enable_progress_bar, enable_model_summary: whether to add the default callback of that kind.
        deterministic: True, "warn" or False: torch.use_deterministic_algorithms during runs.
        benchmark: torch.backends.cudnn.benchmark during runs.
        inference_mode: evaluate under inference_mode (else no_grad).
        use_distributed_sampler: False leaves samplers alone: each rank sees what its loader gives.
        profiler: "simple", "advanced", "pytorch" or a Profiler: measures what takes how long, and reports at the end of each run.
        uneven: when the ranks' training data end at different times (iterables): "stop" with the first that has none, or "join": go on
            until the last has none, each step the mean over the samples that are left.
        sync_batchnorm: BatchNorm layers take their statistics over all ranks (cuda); they are plain ones again after the run.
        compile: True, a dict of torch.compile's arguments, or a mode of it: steps go through torch.compile during runs. The module stays as it is.
        activation_checkpointing: layers that are computed again in backward in place of keeping what is inside them: module classes, names
            ("layers.*"), a list of either, or a function (name, layer) -> bool.
        detect_anomaly: find the operation that made a NaN gradient (slow).
        bad_loss: what to do when the loss of a training step is NaN, infinite or None on any rank: "raise" ahead of the update, "skip" the
            optimizer step on all ranks, "stop" after doing so. None looks at published numbers alone. Costs a read of the loss a step.
        recover_oom: when memory runs out in a training step, compute it again, on all ranks, with every batch in half as large parts.
        barebones: no logging, checkpoints, bars and checks: the loop alone.
        plugins: a Precision object, a CheckpointIO (an object with save_checkpoint(table, path) and load_checkpoint(path, weights_only)), the
            name of one of a plug-in, a Launcher (in the place of `launcher=`), or a list of them.
        reload_dataloaders_every_n_epochs: ask for new loaders so often; 0 for never.
        seed: the one seed of a run: model streams of each rank, data order, augmentation. None continues torch's.
        resume: "auto", "last" or a path: the default of `fit(ckpt_path=)`.
        auto_requeue: under Slurm, when SIGUSR1 announces the end of the job's time: after saving, put the job back into the queue
            (scontrol requeue); when it runs again, it resumes by itself, as with resume="auto".
        launcher: "torchrun", "slurm" or a Launcher to insist on it, "local" or False to look for none; None looks who started this
            process.
        timeout: how long (seconds) a rank waits for another in a collective (default: torch's). When it is over, StallError says where every
            rank was, and all end.

    Raises:
        MisconfigurationException: for every argument that cannot work, saying what to change.
    """

    @known_arguments
    def __init__(
        self,
        *,
        accelerator: Accelerator | str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        strategy: Strategy | str = "auto",
        precision: Precision | int | str = "32-true",
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        fast_dev_run: int | bool = False,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        logger: Logger | bool | str | list[Logger | str] | None = None,
        callbacks: Callback | str | list[Callback | str] | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        uneven: str = "stop",
        sync_batchnorm: bool = False,
        compile: bool | str | dict[str, Any] = False,
        activation_checkpointing: Any = None,
        detect_anomaly: bool = False,
        bad_loss: str | None = None,
        recover_oom: bool = False,
        barebones: bool = False,
        plugins: Precision | CheckpointIO | Launcher | str | list[Precision | CheckpointIO | Launcher | str] | None = None,
        reload_dataloaders_every_n_epochs: int = 0,
        seed: int | None = None,
        resume: str | None = None,
        auto_requeue: bool = False,
        launcher: Launcher | bool | str | None = None,
        timeout: timedelta | float | None = None,
    ) -> None:
        given = dict(locals())  # `make_settings` reads most of the arguments
        self._run: Run | None = None
        self._ended: Run | None = None  # the last fit in this process, for a checkpoint of its end
        self._module: TrainModule | None = None
        self._datamodule: DataModule | None = None
        self._world = World()
        self.results = Results()
        plugins = config.plugins(plugins)
        self._launcher = launchers.detect(config.one_launcher(launcher, plugins))
        world = self._launcher.world if self._launcher is not None else None
        if world is not None:
            self._world = world
            num_nodes = world.num_nodes if num_nodes == 1 else num_nodes
        named = None if strategy == "auto" else config.make_strategy(strategy, 1)
        found = config.find_devices(accelerator, devices, named, world)
        if found.note:
            self.print(found.note)
        self.strategy = named or config.make_strategy("auto", found.count * at_least("num_nodes", num_nodes, 1))
        self.strategy.check(found.count, num_nodes)
        self._check_launch(self.strategy.processes(found.count), num_nodes)
        self.precision_plugin = config.make_precision(config.one_precision(precision, plugins), found.type)
        self.checkpoint_io = config.checkpoint_io(plugins, self.strategy)
        self.profiler = config.make_profiler(profiler, barebones)
        self.settings = make_settings(given, found, num_nodes, self.strategy)
        quiet = self.settings.fast_dev_run > 0 or barebones
        self.loggers = [] if barebones else make_loggers(logger, silent=self.settings.fast_dev_run > 0)
        self.callbacks = make_callbacks(
            callbacks,
            checkpoint=not quiet and enable_checkpointing is not False,
            bar=not barebones and enable_progress_bar is not False,
            summary=not quiet and enable_model_summary is not False,
            forbid_checkpoint=enable_checkpointing is False,
            forbid_bar=enable_progress_bar is False,
        )

    def _check_launch(self, processes: int, num_nodes: int) -> None:
        """Find out now whether the processes that exist, or can be made, are those that are asked for."""
        if self._launcher is not None:
            self._launcher.check(processes, num_nodes)
        elif num_nodes > 1:
            raise MisconfigurationException(
                f"num_nodes={num_nodes}: start the program on every node with torchrun (--nnodes={num_nodes}) or srun."
            )
        cores = os.cpu_count() or 1
        if self._launcher is None and processes > max(8, 4 * cores):
            raise MisconfigurationException(
                f"devices={processes} would start {processes} processes on {cores} cores. Ask for fewer, or insist with "
                f"launcher=trainer.launchers.LocalLauncher({processes})."
            )

    # -- the four functions ------------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = True,
    ) -> None:
        """Train `model`; afterwards it holds the trained weights. A further fit of this trainer goes on where this one ended.

        Args:
            model: the module.
            train_dataloaders: a loader, any iterable of batches, or a list or dict of loaders; else the datamodule's or module's.
            val_dataloaders: one or a list.
            datamodule: gives the loaders that are not passed.
            ckpt_path: resume from this file; "last" the newest of earlier runs, "best" the best of the run before, "auto" the newest
                if there is one.
            weights_only: load only tensors and plain values, which is safe for files of strangers.

        Raises:
            MisconfigurationException: before step 1, for what cannot work; the message says what to change.
            CheckpointError: when a checkpoint cannot be read or written.
            SIGTERMException: SIGTERM or SIGUSR1 came, and a checkpoint is there from which a fit goes on.
            RestartError: torchrun restarts this fit, and it gets no further.
        """
        loaders = {"train": train_dataloaders, "validate": val_dataloaders}
        self._performer()(self._job("fit", model, datamodule, loaders, ckpt_path, weights_only=weights_only is not False))

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = True,
    ) -> list[dict[str, float]]:
        """Validate, every sample exactly once; return one dict of metrics for each loader.

        Arguments are those of `fit`; without a model it is the one of the run before, with `verbose` rank 0 prints the numbers.

        Raises:
            MisconfigurationException: without a model to validate, a `validation_step` or a loader.
        """
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = True,
    ) -> list[dict[str, float]]:
        """Test, every sample exactly once; see `validate`.

        Raises:
            MisconfigurationException: without a model to test, a `test_step` or a loader.
        """
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = True,
    ) -> list[Any] | None:
        """Return what `predict_step` gives for every batch, in data set order, whatever the number of ranks.

        With several loaders a list of such lists. `return_predictions=False` keeps nothing.

        Raises:
            MisconfigurationException: without a model or a loader.
        """
        job = self._job("predict", model, datamodule, {"predict": dataloaders}, ckpt_path, weights_only=weights_only is not False)
        job.return_predictions = return_predictions is not False
        return self._performer()(job)

    def _evaluate(self, fn: str, model: Any, loaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any, weights_only: Any) -> Any:
        job = self._job(fn, model, datamodule, {fn: loaders}, ckpt_path, weights_only=weights_only is not False)
        found = self._performer()(job)
        if verbose and self.is_global_zero:
            for index, numbers in enumerate(found):
                self.print(_table(fn, index if len(found) > 1 else None, numbers))
        return found

    def tune(self, search: Any) -> Any:
        """Inside a run: search for a learning rate or a batch size, and go on with it. What LearningRateFinder and BatchSizeFinder call. Collective."""
        if self._run is None:
            raise MisconfigurationException("trainer.tune is for callbacks: use Tuner(trainer).lr_find(module) or Tuner(trainer).scale_batch_size(module).")
        return inside.tune(self._run, search)

    def training_pass(self) -> None:
        """Inside a fit, between steps: compute `training_step` on the training data once, without gradients, for statistics (BatchNorm). Collective.

        Nothing it logs is kept, no random stream moves, no hook is called.

        Raises:
            MisconfigurationException: outside of a run.
        """
        statistics.training_pass(self._live("training_pass"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_ended": None, "_launcher": None}


def _table(fn: str, index: int | None, numbers: dict[str, float]) -> str:
    title = fn if index is None else f"{fn}, loader {index}"
    width = max([len(title), *map(len, numbers)], default=0)
    lines = [f"{title:<{width}}", "-" * (width + 14)]
    return "\n".join([*lines, *(f"{name:<{width}}  {value:>12.6g}" for name, value in numbers.items())])
