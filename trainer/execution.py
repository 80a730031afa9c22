"""How a call of `Trainer.fit` (validate, ...) becomes a run: the job, the processes that do it, and the loop in each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trainer import config, outcome
from trainer.calls import Calls
from trainer.datamodule import DataModule
from trainer.earlier import checkpoint_for, where_to_go_on
from trainer.errors import MisconfigurationException, SIGTERMException
from trainer.job import Job, Task
from trainer.launchers import restarted
from trainer.leaving import ask_to_requeue
from trainer.loops import evaluate, fit, predict
from trainer.loops.precheck import check_job
from trainer.run import Run
from trainer.signals import USR1
from trainer.world import World

__all__ = ["Execution"]

_LOOPS = {"fit": fit.fit, "validate": evaluate.evaluate, "test": evaluate.evaluate, "predict": predict.predict}


class Execution(Calls):
    """The part of `Trainer` that chooses the process, makes a `Run` there, and hands it to a loop."""

    _launcher: Any
    _world: World

    def _job(self, fn: str, model: Any, datamodule: Any, loaders: dict[str, Any], ckpt_path: Any, **options: Any) -> Job:
        for stage, given in loaders.items():
            if isinstance(given, DataModule):
                loaders[stage], datamodule = None, given
        if ckpt_path is None:
            ckpt_path = self._chosen_ckpt
        if ckpt_path is None and fn == "fit":
            ckpt_path = self.settings.resume or ("auto" if self.settings.auto_requeue and restarted.requeued() else None)
        if model is None:
            if fn != "fit" and ckpt_path is None and self._module is not None:
                ckpt_path = self._best_of_last_fit(fn)
            model = self._module
            datamodule = datamodule or (None if any(v is not None for v in loaders.values()) else self._datamodule)
        job = Job(fn, model, datamodule, loaders, None, **options)
        check_job(job, saves=bool(self.checkpoint_callbacks))
        if self._run is not None:
            raise MisconfigurationException(f"trainer.{fn} was called inside a run of the same Trainer; make another Trainer for it.")
        self._module, self._datamodule = model, datamodule
        job.ckpt_path = checkpoint_for(self, ckpt_path)
        job.continues = job.ckpt_path is not None and ckpt_path in ("last", "auto")
        return job

    def _best_of_last_fit(self, fn: str) -> str | None:
        """Without a model and a path, the best checkpoint of the fit before is meant, where there is one: as in Lightning, said aloud."""
        best = next((c.best_model_path for c in self.checkpoint_callbacks if c.best_model_path), None)
        if best is not None:
            self.warn(f"trainer.{fn}() without a model uses the best checkpoint, {best}. Pass the model to use its current weights.")
        return best

    def _performer(self) -> Callable[[Job], Any]:
        """Return what runs a job, here or in processes of its own. It is not called here: between `fit` and the step each frame counts."""
        return self._launch if self._makes_processes() else partial(self.execute, self._world)

    def _makes_processes(self) -> bool:
        if self._launcher is not None:
            return self._launcher.world is None
        return self.strategy.processes(self.settings.devices.count) > 1

    def _launch(self, job: Job) -> Any:
        """Run the job in new processes of this machine, and take what comes back into the caller's objects."""
        try:
            launcher = self._launcher or config.make_launcher(self.strategy, self.strategy.processes(self.settings.devices.count))
            found = launcher.launch(Task(self, job))
        except BaseException as error:
            self.results.fn, self.results.status = job.fn, _status_of(error)
            if job.fn == "fit" and job.work is None and isinstance(error, KeyboardInterrupt):
                self.warn(f"Weights and counters of the interrupted fit ended with its ranks. {where_to_go_on(self)}")
            self.results.received_sigterm = isinstance(error, SIGTERMException)
            raise
        return outcome.apply(self, job, found)

    def execute(self, world: World, job: Job) -> Any:
        """Run the job in this process, as the rank that `world` says. Collective."""
        self._world, self._module, self._datamodule = world, job.module, job.datamodule
        self.results.fn, self.results.status, self.results.ckpt_path = job.fn, "running", job.ckpt_path
        self.results.continues = job.continues
        self.results.received_sigterm = False
        self.results.clear_metrics()
        if job.fn == "fit" or job.ckpt_path is not None:
            self._ended = None  # its optimizers no longer belong to the weights
        run = self._run = Run(self, world, job)
        status = "failed"
        try:
            run.open()
            value = (job.work or _LOOPS[job.fn])(run)
            run.finish_saves()
            status = "finished"
        except BaseException as error:
            status = _status_of(error)
            stall = None if run.watch is None else run.watch.explain(error)
            self.strategy.stuck = stall is not None
            run.fail(error if stall is None else stall)
            if stall is not None:
                raise stall from error
            raise
        finally:
            self.results.status = status
            if job.fn == "fit":
                self.results.position = run.position
                if status != "finished":
                    self.results.sums = []  # a step may have been half logged
            try:
                run.close(status)
            finally:
                self._run = None
                self._heed_no_more(run)
                if job.fn == "fit" and job.work is None and status == "interrupted" and not run.notice.bits and (run.dist.alone or self._launcher is not None):
                    self.print(f"Interrupted after step {self.global_step}. {where_to_go_on(self)}")
            if job.fn == "fit" and status == "finished" and run.last_ranks is not None and self.strategy.plain_afterwards:
                self._ended = run
        if run.notice.bits:  # too late to end the fit, which is over, but not to end the program
            raise SIGTERMException
        return value

    def _heed_no_more(self, run: Run) -> None:
        """Give the signals back; one that came is remembered, and the job goes back into its queue if that is wanted."""
        run.notice.close()
        self.results.received_sigterm = run.notice.bits != 0
        if run.notice.bits & USR1 and self.settings.auto_requeue:
            ask_to_requeue(self)


def _status_of(error: BaseException) -> str:
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
