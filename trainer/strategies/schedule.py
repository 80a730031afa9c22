"""Training through pipeline stages with the schedules of torch.distributed.pipelining, around a training step that knows nothing of them.

That package takes a while to load, so `mesh.py` imports this file when a run needs it.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleGPipe,
    get_schedule_class,
)
from torch.func import functional_call

from trainer.errors import MisconfigurationException
from trainer.strategies.line import one_tensor, read_header
from trainer.strategies.pipeline import Stages

__all__ = ["Drive", "check_schedule"]

_KEPT = 8  # kinds of batches whose stages are kept, with their buffers
_Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what goes from one stage to the next."""


class _Reached(BaseException):
    """A training step has come to the stack: what follows happens on other ranks. User code that catches Exception lets it through."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


class Drive:
    """Forward and backward of one batch after the other, cut into micro-batches that travel through the stages.

    The first stage runs the training step up to the stack and computes its layers from there; the last one runs the training step
    with the stack's output put in, and backward starts from what it returns. The engine between them is torch's: a schedule that is
    handed the numbers of the micro-batches.

    Args:
        stages: the stack, cut.
        schedule: the name of a torch schedule with one stage a rank.
    """

    def __init__(self, stages: Stages, schedule: str) -> None:
        self.stages, self.schedule = stages, schedule
        self._engines: OrderedDict[Any, PipelineScheduleSingle] = OrderedDict()

    def train(
        self,
        count: int,
        step: Callable[[int], Any],
        loss_of: Callable[[Any], torch.Tensor],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> list[Any]:
        """Add the gradients of a batch; return what the steps returned, on the last stage. Collective over the pipeline.

        Args:
            count: of micro-batches.
            step: runs the training step on one of them, by its number.
            loss_of: returns what backward starts from, of what a step returned.
            context: of every part of a forward pass.

        Raises:
            what a step or a layer raised, as it is.
            MisconfigurationException: for a step that does not call the stack once.
        """
        stages = self.stages
        self.step, self.loss_of, self.context = step, loss_of, context
        self.outputs: list[Any] = []
        self.error: Exception | None = None
        self.ahead = self._head(0) if stages.index == 0 else None  # other stages must know its kind before they can begin
        engine = self._engine(stages.line.announce(self.ahead, 0), count)
        numbers = torch.arange(count)
        more = {"return_outputs": False} if _MAY_DROP_OUTPUTS else {}
        try:
            if stages.index == 0:
                engine.step(numbers, **more)
            else:
                engine.step(target=numbers if stages.index == stages.last else None, **more)
        except RuntimeError:  # what torch makes of an exception of a layer, or of the training step of the first stage
            if self.error is None:
                raise
        finally:
            stages.on_call = None
            del self.step, self.loss_of  # they hold the batch
        if self.error is not None:
            raise self.error
        outputs, self.outputs = self.outputs, []
        return outputs

    # -- the training step, from both ends -----------------------------------------------------------------------------------

    def compute(self, value: torch.Tensor) -> torch.Tensor:
        """The forward pass of this rank's stage: of a micro-batch's number on the first, of activations on the others."""
        try:
            if self.stages.index == 0:
                value, self.ahead = self._head(int(value)) if self.ahead is None else self.ahead, None
            with self.context():
                return self.stages.compute(value)
        except Exception as error:
            self.error = error
            raise

    def _head(self, number: int) -> torch.Tensor:
        """Run the training step up to the stack; return what the stack was called with."""
        self.stages.on_call = _reach
        try:
            with self.context():
                self.step(number)
        except _Reached as reached:
            return reached.value
        finally:
            self.stages.on_call = None
        raise _uncalled()

    def tail(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Run the training step with the stack's output; return what backward starts from."""
        given = [output]

        def give(value: Any) -> torch.Tensor:
            if not given:
                raise MisconfigurationException(
                    "training_step called the stack a second time. Between pipeline stages it can pass once a step: join the inputs, or put what "
                    "is used twice outside of the stack."
                )
            return given.pop()

        self.stages.on_call = give
        try:
            with self.context():
                found = self.step(int(number))
        finally:
            self.stages.on_call = None
        if given:
            raise _uncalled()
        self.outputs.append(found)
        return self.loss_of(found)

    # -- torch's engine ------------------------------------------------------------------------------------------------------

    def _engine(self, header: torch.Tensor, count: int) -> PipelineScheduleSingle:
        """Return the schedule for a batch whose micro-batches enter the stack as `header` says; made once for each kind."""
        key = (*header.tolist(), count, self.stages.stack.training)
        found = self._engines.get(key)
        if found is None:
            found = self._engines[key] = self._make(header, count)
            if len(self._engines) > _KEPT:
                self._engines.popitem(last=False)
        self._engines.move_to_end(key)
        return found

    def _make(self, header: torch.Tensor, count: int) -> PipelineScheduleSingle:
        stages = self.stages
        with self.context():
            kinds = kinds_between(stages, read_header(header))
        given = torch.empty(1, dtype=torch.int64, device="meta") if stages.index == 0 else _meta(kinds[stages.index - 1])
        stage = _Stage(
            _Layers(self), stages.index, stages.count, stages.device, given, _meta(kinds[stages.index]), group=stages.line.group
        )
        kind = get_schedule_class(self.schedule)
        if count < stages.count:  # torch's 1F1B wants a micro-batch for each stage; GPipe needs none, but older torch refuses
            kind = ScheduleGPipe
        engine = kind(stage, max(count, stages.count), loss_fn=self.tail, scale_grads=False)
        engine._n_microbatches = count
        return engine


class _Stage(PipelineStage):
    """Torch's stage without the greeting that opens NCCL's connections: on the CPU torch 2.9 sends more bytes of it than are received."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()


class _Layers(torch.nn.Module):
    """What torch calls as the module of this rank's stage."""

    def __init__(self, drive: Drive) -> None:
        super().__init__()
        self.compute = drive.compute

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.compute(value)


def _meta(kind: _Kind) -> torch.Tensor:
    shape, dtype = kind
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point or dtype.is_complex)


def _reach(value: Any) -> Any:
    one_tensor(value, "was given")
    if not torch.is_grad_enabled():
        raise MisconfigurationException(
            "training_step called the stack under torch.no_grad(), but stages are computed apart from it, with gradients. Freeze the layers "
            "(requires_grad_(False)), and call the stack outside of no_grad."
        )
    raise _Reached(value)


def _uncalled() -> MisconfigurationException:
    return MisconfigurationException(
        "training_step did not call the stack, which is cut into pipeline stages: call the nn.Sequential itself, once, not its layers."
    )


def kinds_between(stages: Stages, entering: _Kind) -> list[_Kind]:
    """Return what each stage puts out for what enters the first. Nothing is computed: tensors have shapes alone.

    Raises:
        MisconfigurationException: where shapes depend on values, or a layer does not take what it is given.
    """
    kinds = []
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            shape, dtype = entering
            value = torch.empty(shape, dtype=dtype, device=stages.device)
            for layers in stages.runs:
                for layer in layers:
                    own = {name: _fake(t, stages.device) for name, t in (*layer.named_parameters(), *layer.named_buffers())}
                    value = functional_call(layer, own, (value,))
                value = one_tensor(value, "made").contiguous()
                kinds.append((tuple(value.shape), value.dtype))
    except Exception as error:  # whatever a layer raises
        raise MisconfigurationException(
            f"The shapes of what goes from stage to stage could not be worked out: {error!r}. Each layer of the stack must take what the one "
            "before it makes, and shapes may depend on shapes alone, not on values."
        ) from error
    return kinds


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def check_schedule(name: Any) -> None:
    """Refuse what is no schedule with one stage a rank.

    Raises:
        MisconfigurationException: naming those that there are.
    """
    try:
        fits = isinstance(name, str) and issubclass(get_schedule_class(name), PipelineScheduleSingle)
        fits = fits and get_schedule_class(name) is not PipelineScheduleSingle
    except ValueError:
        fits = False
    if not fits:
        raise MisconfigurationException(
            f"schedule={name!r} must be '1F1B' or 'GPipe', torch's schedules with one stage a rank."
        )


_MAY_DROP_OUTPUTS = "return_outputs" in inspect.signature(PipelineScheduleSingle.step).parameters
