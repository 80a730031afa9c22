"""PyTorchProfiler: torch.profiler over a few steps, with the actions of the loop and the layers of the module as named ranges."""

from __future__ import annotations

import inspect
import os
import threading
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, record_function, tensorboard_trace_handler

from trainer.errors import MisconfigurationException, nearest
from trainer.profilers.base import Profiler

__all__ = ["PyTorchProfiler"]

_WAIT, _WARMUP, _ACTIVE = 1, 1, 3
_ARGUMENTS = [name for name in inspect.signature(torch.profiler.profile.__init__).parameters if name not in ("self", "use_cuda")]
_TABLE = [name for name in inspect.signature(EventList.table).parameters if name not in ("self", "sort_by", "row_limit")]
_RECORDING = (ProfilerAction.WARMUP, ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class PyTorchProfiler(Profiler):
    """Records what torch does in some steps of a run, on the host and the accelerator, on every rank.

    A step is an optimizer step of a fit (with the validation that follows it), a batch in `validate`, `test` and `predict`. Without a
    `schedule` the third to fifth step are recorded, or all where the run is known to have fewer. Each recorded window is written as
    `<stage>-<filename>-<rank>.<time>.pt.trace.json`, for TensorBoard's profiler plug-in and https://ui.perfetto.dev.

    Args:
        dirpath, filename: see Profiler; traces go to `dirpath` as well.
        group_by_input_shapes: tell calls of an operator with other shapes apart in the report.
        export_to_chrome: write the traces.
        row_limit: rows of the report; -1 for all.
        sort_by_key: a column of the report, "cpu_time_total" or "self_cuda_time_total", say. By default total time on the accelerator, else CPU.
        record_module_names: name the forward of each layer ("Linear: layers.0"). Not in compiled runs.
        table_kwargs: other arguments of torch's `EventList.table`.
        profiler_kwargs: arguments of `torch.profiler.profile`: activities, schedule (None: all steps in one window), on_trace_ready (in
            place of writing traces), record_shapes, profile_memory, with_stack, with_flops, ...

    Raises:
        MisconfigurationException: for an argument or key that torch does not have, or a schedule that is none.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        for name in profiler_kwargs:
            if name not in _ARGUMENTS:
                raise MisconfigurationException(f"PyTorchProfiler({name}=...): torch.profiler.profile has no such argument.{nearest(name, _ARGUMENTS)}")
        for name in table_kwargs or ():
            if name not in _TABLE:
                raise MisconfigurationException(f"PyTorchProfiler(table_kwargs={{{name!r}: ...}}): choose from {', '.join(_TABLE)}.")
        if sort_by_key is not None and sort_by_key not in _sort_keys():
            raise MisconfigurationException(
                f"sort_by_key={sort_by_key!r} is no column of the report.{nearest(sort_by_key, _sort_keys())} Choose from {', '.join(_sort_keys())}."
            )
        _check_schedule(profiler_kwargs.get("schedule"))
        if group_by_input_shapes:
            profiler_kwargs.setdefault("record_shapes", True)
        self.group_by_input_shapes, self.export_to_chrome, self.row_limit = group_by_input_shapes, export_to_chrome, row_limit
        self.sort_by_key, self.record_module_names, self.table_kwargs = sort_by_key, record_module_names, dict(table_kwargs or {})
        self.profiler_kwargs = profiler_kwargs
        self._forget()

    def _forget(self) -> None:
        self.profiler: torch.profiler.profile | None = None
        self.function_events: Any = None
        self._recording = False
        self._ranges: dict[tuple[int, str], Any] = {}  # by thread: replicas of one process run side by side
        self._layers = _LayerNames()

    # -- what a run calls ----------------------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        key = threading.get_ident(), action_name
        if self._recording and key not in self._ranges:
            self._ranges[key] = record_function(action_name)
            self._ranges[key].__enter__()

    def stop(self, action_name: str) -> None:
        opened = self._ranges.pop((threading.get_ident(), action_name), None)
        if opened is not None:
            opened.__exit__(None, None, None)

    def step(self, ahead: int | None = None) -> None:
        if self.profiler is None:
            self.profiler = self._make(ahead)
            self.profiler.start()
        else:
            self.profiler.step()
        self._recording = self.profiler.current_action in _RECORDING
        if self.record_module_names and self.module is not None:
            self._layers.show(self.module, self._recording)

    def summary(self) -> str:
        """Stop recording and return the table of operators of the last window."""
        recorded = self._close()
        if self.function_events is None:
            return f"{self._title()}\nNo step was recorded: the schedule records later ones than this run had." if recorded else ""
        events = self.function_events.key_averages(group_by_input_shapes=self.group_by_input_shapes)
        if not events:
            return ""
        key = self.sort_by_key or ("cuda_time_total" if _on_accelerator(events) else "cpu_time_total")
        table = events.table(sort_by=key, row_limit=self.row_limit, **self.table_kwargs)
        return f"{self._title()}\nProfile stats for: records rank: {self._rank}\n{table}"

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._close()
        self._forget()

    def teardown(self, stage: str | None) -> None:
        self._close()
        self._ranges.clear()
        super().teardown(stage)

    # -- torch's profiler ----------------------------------------------------------------------------------------------------

    def _make(self, ahead: int | None) -> torch.profiler.profile:
        given = dict(self.profiler_kwargs)
        if "schedule" not in given and (ahead is None or ahead >= _WAIT + _WARMUP + _ACTIVE):
            given["schedule"] = torch.profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
        if given.get("schedule") is None:
            given["schedule"] = _all_steps  # with a schedule torch numbers the steps in the trace
        own = given.get("on_trace_ready")
        return torch.profiler.profile(**{**given, "on_trace_ready": partial(self._ready, own)})

    def _ready(self, own: Any, profiler: torch.profiler.profile) -> None:
        """A window is complete."""
        self.function_events = profiler.events()
        if own is not None:
            own(profiler)
        elif self.export_to_chrome:
            tensorboard_trace_handler(self.folder, self._prepare_filename(extension=""))(profiler)

    def _close(self) -> bool:
        """End a recording that goes on, and write it; return whether there was one."""
        self._layers.show(None, False)
        self._recording = False
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return False
        profiler.stop()
        return True

    def __getstate__(self) -> dict[str, Any]:
        own = ("profiler", "function_events", "_ranges", "_layers")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


class _LayerNames:
    """Names the forward of each layer in the trace, by hooks that are there in recorded steps only."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._open = threading.local()  # replicas of one process run in threads

    def show(self, module: torch.nn.Module | None, wanted: bool) -> None:
        if wanted and not self._handles:
            for name, layer in module.named_modules():
                if name:
                    self._handles.append(layer.register_forward_pre_hook(partial(self._enter, f"{type(layer).__name__}: {name}")))
                    self._handles.append(layer.register_forward_hook(self._leave, always_call=True))
        elif not wanted:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _enter(self, name: str, *_: Any) -> None:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        self._open.stack.append(record_function(name))
        self._open.stack[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        if getattr(self._open, "stack", None):
            self._open.stack.pop().__exit__(None, None, None)


def _all_steps(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD


def _check_schedule(schedule: Any) -> None:
    if schedule is not None and not (callable(schedule) and isinstance(schedule(0), ProfilerAction)):
        raise MisconfigurationException(
            f"schedule={schedule!r} must be a function from the number of a step to a torch.profiler.ProfilerAction; torch.profiler.schedule(wait=, "
            "warmup=, active=) makes one."
        )


def _sort_keys() -> list[str]:
    devices = [f"{own}{device}_{what}" for own in ("", "self_") for device in ("cpu", "cuda", "device", "xpu") for what in ("time_total", "memory_usage")]
    return sorted(["count", "cpu_time", "cuda_time", "device_time", *devices])


def _on_accelerator(events: Any) -> bool:
    return any(event.device_time_total for event in events)
