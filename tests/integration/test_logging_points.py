"""Which numbers are published, when, and what they are the mean of. Loggers get nothing else."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from callbacks import Logger
from tests.helpers.modules import Net, Scalar, loader, quiet


class Memory(Logger):
    """Keeps (step, name, value) of everything published, but for the epoch."""

    def __init__(self) -> None:
        self.points: list[tuple[int, str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points += [(step, name, value) for name, value in metrics.items() if name != "epoch"]

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, found, value in self.points if found == name]


class Logs(Scalar):
    """Logs the mean of the batch in training (as told) and in validation."""

    options: dict[str, Any] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("x", batch.mean(), **self.options)
        return super().training_step(batch, batch_idx)


def fit(data: Any, options: dict[str, Any] | None = None, module: Any = None, val: Any = None, **settings: Any) -> tuple[Memory, Any]:
    memory, module = Memory(), module or Logs()
    module.options = options or {}
    trainer = quiet(**{"max_epochs": 1, "logger": memory, "log_every_n_steps": 1, **settings})
    trainer.fit(module, data, val)
    return memory, trainer


def test_c30_a_step_of_several_batches_logs_their_mean() -> None:
    memory, _ = fit(loader(range(1, 9)), accumulate_grad_batches=4)
    assert memory.points == [(1, "x", 2.5), (2, "x", 6.5)]


def test_c35_one_point_a_step() -> None:
    memory, _ = fit(loader([1] * 8), accumulate_grad_batches=4)
    assert [step for step, _ in memory.of("x")] == [1, 2]


@pytest.mark.parametrize("options", [{"on_epoch": True, "on_step": False}, {"on_epoch": True}, {"on_step": False}])
def test_c37_the_epoch_mean_is_over_samples(options: dict[str, Any]) -> None:
    _, trainer = fit(loader([1, 1, 1, 1, 6], 4), options)
    assert trainer.callback_metrics["x"].item() == 2.0


def test_c37_in_validation_and_by_a_size_of_ones_own() -> None:
    class Validating(Scalar):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("x", batch.mean())
            self.log("y", batch.mean(), batch_size=1)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("z", batch["a"].mean())

    trainer, module = quiet(), Validating()
    assert trainer.validate(module, loader([1, 1, 1, 1, 6], 4), verbose=False) == [{"x": 2.0, "y": 3.5}]
    batches = [{"s": "text", "a": torch.tensor(v)} for v in ([1.0] * 4, [6.0])]
    assert trainer.test(module, batches, verbose=False) == [{"z": 2.0}]


@pytest.mark.parametrize(
    ("every", "steps"),
    [(50, [16, 32]), (1, [*range(1, 33)]), (10, [10, 16, 20, 30, 32]), (0, [])],
)
def test_c41_the_last_step_of_an_epoch_is_always_written(every: int, steps: list[int]) -> None:
    memory, _ = fit(loader([1] * 16), max_epochs=2, log_every_n_steps=every)
    assert [step for step, _ in memory.of("x")] == steps


def test_c41_so_is_the_last_step_of_a_fit_that_ends_in_mid_epoch() -> None:
    class Stops(Logs):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = self.global_step == 5

    assert [s for s, _ in fit(loader([1] * 16), max_steps=20, max_epochs=-1, log_every_n_steps=50)[0].of("x")] == [16, 20]
    assert [s for s, _ in fit(loader([1] * 16), module=Stops(), log_every_n_steps=50)[0].of("x")] == [5]


def test_forked_names() -> None:
    memory, trainer = fit(loader([1, 3]), {"on_step": True, "on_epoch": True, "prog_bar": True})
    assert memory.points == [(1, "x_step", 1.0), (2, "x_step", 3.0), (2, "x_epoch", 2.0)]
    assert {n: v.item() for n, v in trainer.callback_metrics.items()} == {"x": 2.0, "x_step": 3.0, "x_epoch": 2.0}
    assert {n: v.item() for n, v in trainer.logged_metrics.items()} == {"x_step": 3.0, "x_epoch": 2.0}
    assert trainer.progress_bar_metrics == {"x_step": 3.0, "x_epoch": 2.0}


def test_what_goes_to_the_logger_and_to_the_bar() -> None:
    memory, trainer = fit(loader([1, 3]), {"logger": False, "prog_bar": True})
    assert (memory.points, trainer.progress_bar_metrics, trainer.logged_metrics) == ([], {"x": 3.0}, {})
    assert trainer.callback_metrics["x"].item() == 3.0


@pytest.mark.parametrize(("reduce", "epoch", "steps"), [("mean", 3.0, [2.0, 5.0]), ("sum", 9.0, [4.0, 5.0]), ("min", 1.0, [1.0, 5.0]), ("max", 5.0, [3.0, 5.0])])
def test_reductions_over_the_batches_of_a_step_and_of_an_epoch(reduce: str, epoch: float, steps: list[float]) -> None:
    options = {"reduce_fx": reduce, "on_step": True, "on_epoch": True}
    memory, _ = fit(loader([1, 3, 5]), options, accumulate_grad_batches=2)
    assert [value for _, value in memory.of("x_step")] == steps
    assert memory.of("x_epoch") == [(2, epoch)]
    by_function, _ = fit(loader([1, 3, 5]), {**options, "reduce_fx": {"mean": torch.mean, "sum": torch.sum, "min": min, "max": max}[reduce]})
    assert by_function.of("x_epoch") == [(3, epoch)]


def test_defaults_of_every_hook() -> None:
    """As in Lightning: hooks of a training batch log the step, all others the epoch."""
    by_step = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
               "on_train_batch_end"]  # fmt: skip
    by_epoch = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start",
                "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end"]  # fmt: skip

    class Everywhere(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation_step", 7.0)

        def optimizer_step(self, *args: Any) -> None:
            super().optimizer_step(*args)
            self.log("optimizer_step", 7.0)

        def optimizer_zero_grad(self, *args: Any) -> None:
            super().optimizer_zero_grad(*args)
            self.log("optimizer_zero_grad", 7.0)

    module = Everywhere()
    for name in by_step + by_epoch:
        setattr(module, name, lambda *args, name=name: module.log(name, 7.0))
    memory, _ = fit(loader([1, 1]), module=module, val=loader([1]))
    per_step = {name for step, name, _ in memory.points if step == 1}
    assert per_step == {*by_step, "x", "optimizer_step", "optimizer_zero_grad"}
    assert {name for step, name, _ in memory.points if step == 2} == per_step | {*by_epoch, "validation_step"}
    assert {value for _, name, value in memory.points if name != "x"} == {7.0}


def test_per_step_numbers_of_evaluation_are_those_of_its_last_batch() -> None:
    class Validating(Logs):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("v", batch.mean(), on_step=True)
            self.log("s", batch.mean(), on_step=True, on_epoch=False)

    memory, trainer = fit(loader([1]), module=Validating(), val=loader([1, 5]))
    assert {n: v for _, n, v in memory.points if n != "x"} == {"v_step": 5.0, "v_epoch": 3.0, "s": 5.0}
    assert trainer.callback_metrics["v"].item() == 3.0


def test_log_dict_whole_numbers_booleans_and_arrays_of_one() -> None:
    import numpy

    class Kinds(Logs):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            kinds = {"int": 2, "bool": True, "long": torch.tensor([3]), "flag": torch.tensor(True), "numpy": numpy.float32(1.5),
                     "array": numpy.array(4), "half": torch.tensor(0.5, dtype=torch.bfloat16)}  # fmt: skip
            self.log_dict(kinds, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    _, trainer = fit(loader([1, 1, 1], 2), module=Kinds(), accumulate_grad_batches=2)
    expected = {"int": 2.0, "bool": 1.0, "long": 3.0, "flag": 1.0, "numpy": 1.5, "array": 4.0, "half": 0.5}
    for name, value in expected.items():
        assert trainer.callback_metrics[f"{name}_step"].item() == value
        assert trainer.callback_metrics[f"{name}_epoch"].item() == value


def test_a_value_changed_in_place_afterwards_was_logged_as_it_was() -> None:
    class Reuses(Logs):
        def on_fit_start(self) -> None:
            self.buffer = torch.zeros(())

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.buffer.fill_(batch.item())
            self.log("b", self.buffer, on_step=True, on_epoch=True)
            self.buffer.fill_(-1)
            return self.w * 1.0

    memory, _ = fit(loader([1, 3]), module=Reuses())
    assert memory.points == [(1, "b_step", 1.0), (2, "b_step", 3.0), (2, "b_epoch", 2.0)]


def test_c39_logging_holds_no_graph_and_no_memory_grows() -> None:
    class Graph(Net):
        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, int] = {}
            self.old: list[weakref.ref[torch.Tensor]] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            assert not any(ref() is not None for ref in self.old)
            activation = self.layers(batch[:, :4])
            self.old.append(weakref.ref(activation))
            loss = activation.square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("kept", loss, enable_graph=True)
            return {"loss": loss, "activation_mean": activation.mean()}

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx in (5, 105):
                gc.collect()
                self.alive[batch_idx] = sum(type(o) is torch.Tensor for o in gc.get_objects())

    module = Graph()
    fit(loader(Net.rows(106)), module=module, log_every_n_steps=1000)
    assert module.alive[105] == module.alive[5] > 0


def test_nothing_is_logged_or_stored_by_the_sanity_check() -> None:
    class Sane(Logs):
        checked = 0

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.checked += self.trainer.sanity_checking
            self.log("val", batch.mean())
            torch.rand(1)

        def on_train_start(self) -> None:
            self.metrics_then = dict(self.trainer.callback_metrics)
            self.draw = torch.rand(1).item()

    draws = []
    for n, checked in ((0, 0), (2, 2), (-1, 3)):
        torch.manual_seed(5)
        module = Sane()
        memory, _ = fit(loader([1]), module=module, val=loader([1, 2, 3]), num_sanity_val_steps=n)
        assert (module.checked, module.metrics_then, memory.of("val")) == (checked, {}, [(1, 2.0)])
        draws.append(module.draw)
    assert len(set(draws)) == 1


def test_epoch_end_hooks_see_the_numbers_of_their_own_epoch():
    seen = []

    class Watching(Scalar):
        def training_step(self, batch, batch_idx):
            self.log("train", float(self.current_epoch), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val", 10.0 + self.current_epoch)

        def on_validation_epoch_end(self):
            seen.append(("val", self.trainer.callback_metrics["val"].item()))

        def on_train_epoch_end(self):
            seen.append(("train", self.trainer.callback_metrics["train"].item()))

        def on_train_end(self):
            seen.append(("epochs", self.current_epoch))

    quiet(max_epochs=2).fit(Watching(), loader([1, 1]), loader([1]))
    assert seen == [("val", 10.0), ("train", 0.0), ("val", 11.0), ("train", 1.0), ("epochs", 2)]
