"""TrainModule, DataModule, hooks and helpers with Lightning's meaning, where no other test looks at them."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

from callbacks import Callback
from tests.helpers.modules import Net, Scalar, loader, quiet
from tests.helpers.ranks import run_ranks
from trainer import (
    DataModule,
    MisconfigurationException,
    SingleDeviceStrategy,
    TrainModule,
    grad_norm,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from trainer.hooks import HookTable
from trainer.removed import REMOVED_HOOKS, Gone


def refused(message: str, owner: Any = None, **methods: Any) -> None:
    """A module (or what `owner` is) with these methods must be refused ahead of the first step."""
    base = Scalar if owner is None else owner
    made = type("Own", (base,), methods)()
    with pytest.raises(MisconfigurationException, match=message):
        if issubclass(base, Callback):
            quiet(callbacks=made)
        else:
            quiet(max_epochs=1).fit(made if base is Scalar else Scalar(), loader([1]), datamodule=made if base is DataModule else None)


# -- hooks and the arguments they take ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [Scalar, DataModule, Callback])
def test_hooks_that_lightning_once_called(owner: type) -> None:
    for name, instead in REMOVED_HOOKS.items():
        refused(rf"^Own.{name} is never called. Use {instead.replace('(', '.').replace(')', '.')}", owner, **{name: lambda self, *args: None})


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("on_train_batch_end", lambda self, outputs, batch, batch_idx, unused: None, r"called with \(outputs, batch, batch_idx\): take these. unused: it is no"),
        ("on_train_batch_start", lambda self, batch, batch_idx, dataloader_idx: None, r"on_train_batch_start\(batch, .*\) is called with \(batch, batch_idx\)"),
        ("on_train_epoch_end", lambda self, outputs: None, r"Own.on_train_epoch_end\(outputs\) is called with \(\): take these"),
        ("on_validation_batch_end", lambda self, outputs, batch: None, r"is called with \(outputs, batch, batch_idx, dataloader_idx\)"),
        ("setup", lambda self: None, r"Own.setup\(\) is called with \(stage\)"),
        ("training_step", lambda self, batch, batch_idx, optimizer_idx: None, "optimizer_idx: for several optimizers set self.automatic_optimization = False"),
        ("training_step", lambda self, batch, batch_idx, hiddens: None, "hiddens: for truncated backpropagation"),
        ("training_step", lambda self, dataloader_iter: None, "dataloader_iter: a step gets one batch"),
        ("validation_step", lambda self: None, r"is called with \(batch, batch_idx, dataloader_idx\)"),
        ("lr_scheduler_step", lambda self, scheduler, optimizer_idx, metric: None, r"is called with \(scheduler, metric\): take these. optimizer_idx"),
        ("optimizer_step", lambda self, epoch, batch_idx, optimizer, optimizer_idx, closure, on_tpu: None, "optimizer_closure.*optimizer_idx.* on_tpu"),
        ("backward", lambda self, loss, optimizer: None, r"Own.backward\(loss, optimizer\) is called with \(loss\)"),
    ],
    ids=lambda given: given if isinstance(given, str) and given.isidentifier() else "",
)
def test_a_hook_or_step_that_cannot_be_called(name: str, method: Any, message: str) -> None:
    refused(message, **{name: method})


def test_the_same_for_callbacks_and_data_modules() -> None:
    refused(r"Own.on_train_batch_end\(trainer, module\) is called with \(trainer, module, outputs, batch, batch_idx\)", Callback,
            on_train_batch_end=lambda self, trainer, module: None)  # fmt: skip
    refused(r"Own.setup\(stage, more\) is called with \(stage\)", DataModule, setup=lambda self, stage, more: None)
    refused(r"Own.on_exceptions is not a hook, so it would never be called. Did you mean 'on_exception'\?", DataModule, on_exceptions=lambda self: None)


def test_hooks_and_steps_may_take_less_or_more() -> None:
    said: list[Any] = []

    class Less(Scalar):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

        def validation_step(self, batch: Any) -> None:
            said.append(("step", batch.item()))

        def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
            said.append(("start", batch_idx))

        def on_validation_batch_end(self, *args: Any) -> None:
            said.append(("end", *args[2:]))

        def setup(self, stage: str | None = None, more: int = 0) -> None:
            said.append((stage, more))

    class Watch(Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            said.append(("callback", batch_idx))

    quiet(max_epochs=1, callbacks=Watch()).validate(Less(), [loader([3]), loader([4])], verbose=False)
    first = [("start", 0), ("step", 3.0), ("callback", 0), ("end", 0, 0)]
    assert said == [("validate", 0), *first, ("start", 0), ("step", 4.0), ("callback", 0), ("end", 0, 1)]
    for where, foreign in (("callbacks.watch", False), ("mine", True)):
        Watch.__module__ = where
        assert HookTable(None, [Watch()], Scalar(), None).foreign("on_validation_batch_end") == foreign


def test_modes_are_set_and_put_back_by_the_hooks_for_it() -> None:
    called: list[str] = []

    def noted(name: str) -> Any:
        def hook(self: Any) -> None:
            called.append(name)
            getattr(TrainModule, name)(self)

        return hook

    names = [f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")]
    steps = {f"{stage}_step": lambda self, batch, batch_idx: called.append(f"training={self.training}") for stage in ("validation", "test", "predict")}
    module = type("Own", (Scalar,), {name: noted(name) for name in names} | steps)()
    trainer, data = quiet(max_epochs=1), loader([1])
    trainer.fit(module, data, data)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    assert called == [step for eval_, train in zip(names[::2], names[1::2], strict=True) for step in (eval_, "training=False", train)]
    assert module.training


def test_freezing_a_module() -> None:
    module = Net()
    module.freeze()
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


# -- logging ----------------------------------------------------------------------------------------------------------------------------


def test_a_collection_of_metrics_that_share_their_state() -> None:
    class Classes(Scalar):
        def __init__(self) -> None:
            super().__init__()
            metrics = [MulticlassPrecision(3, average="macro"), MulticlassRecall(3, average="macro")]
            self.metrics = MetricCollection(metrics, prefix="val_")

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.metrics.update(batch[:, 0], batch[:, 1])
            self.log_dict(self.metrics, True, add_dataloader_idx=False)

        def on_validation_end(self) -> None:
            seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    seen: list[dict[str, float]] = []
    pairs = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [2, 0], [2, 2]])
    trainer = quiet(max_epochs=2)
    trainer.fit(Classes(), loader([1]), loader(pairs, batch_size=2))
    right = {"val_MulticlassPrecision": (1 / 2 + 1 / 1 + 2 / 3) / 3, "val_MulticlassRecall": (1 / 2 + 1 / 2 + 2 / 2) / 3}
    assert seen == [pytest.approx(right, abs=1e-6)] * 2
    assert trainer.progress_bar_metrics == pytest.approx(right, abs=1e-6)


def test_what_validate_and_test_return() -> None:
    class Several(Scalar):
        def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("both", batch.mean(), on_step=True, on_epoch=True)
            self.log("of_a_step", 1.0, on_step=True, on_epoch=False)
            self.log("bar", 1.0, prog_bar=True, logger=False, add_dataloader_idx=False)
            self.log(f"own_{dataloader_idx}", 2.0, add_dataloader_idx=False)
            self.log("shared", float(dataloader_idx), add_dataloader_idx=False)

        def on_validation_epoch_end(self) -> None:
            self.log("all", 7.0)

        test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    trainer = quiet()
    for ask in (trainer.validate, trainer.test):
        assert ask(Several(), loader([1, 3]), verbose=False) == [{"both_epoch": 2.0, "own_0": 2.0, "shared": 0.0, "bar": 1.0, "all": 7.0}]
        assert ask(Several(), [loader([1, 3]), loader([5])], verbose=False) == [
            {"both_epoch/dataloader_idx_0": 2.0, "own_0": 2.0, "shared": 1 / 3, "bar": 1.0, "all": 7.0},
            {"both_epoch/dataloader_idx_1": 5.0, "own_1": 2.0, "shared": 1 / 3, "bar": 1.0, "all": 7.0},
        ]


# -- small parts ---------------------------------------------------------------------------------------------------------------------------


def test_a_new_module_is_not_made_by_an_object(tmp_path: Path) -> None:
    class Data(DataModule):
        def __init__(self, size: int = 1) -> None:
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader([1])

    trainer, module, data = quiet(max_epochs=1), Scalar(), Data(3)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for owner in (module, data):
        with pytest.raises(TypeError, match=f"{type(owner).__qualname__}.load_from_checkpoint.* returns a new object, .* call it on the class"):
            owner.load_from_checkpoint(tmp_path / "a.ckpt")
    assert Scalar.load_from_checkpoint(tmp_path / "a.ckpt", map_location=None).w.item() == -1.0
    assert Data.load_from_checkpoint(tmp_path / "a.ckpt").hparams == {"size": 3}
    (tmp_path / "h.yaml").write_text("size: 5\n")
    assert Data.load_from_checkpoint(tmp_path / "a.ckpt", hparams_file=tmp_path / "h.yaml").hparams == {"size": 5}
    assert Data.load_from_checkpoint(tmp_path / "a.ckpt", size=7, weights_only=None).hparams == {"size": 7}


def test_a_subclass_leaves_out_what_its_base_had_saved() -> None:
    class Base(TrainModule):
        def __init__(self, a: int = 1, b: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Child(Base):
        def __init__(self, a: int = 1, b: int = 2, c: int = 3) -> None:
            super().__init__(a, b)
            self.save_hyperparameters(ignore="b")

    assert dict(Child().hparams) == dict(Child().hparams_initial) == {"a": 1, "c": 3}


def test_methods_of_lightnings_module_that_are_not_here() -> None:
    names = [name for name in vars(Gone) if not name.startswith("_")]
    assert names == ["to_torchscript", "to_onnx", "to_tensorrt"]
    for name in names:
        with pytest.raises(AttributeError, match=f"TrainModule has no {name}: use "):
            getattr(Scalar(), name)("file")


def test_device_and_format_follow_the_parameters() -> None:
    module = Net().to(torch.bfloat16)
    assert (module.dtype, module.device) == (torch.bfloat16, torch.device("cpu"))
    assert (module.double().dtype, module.to("meta").device) == (torch.float64, torch.device("meta"))


def test_a_data_module_in_a_run() -> None:
    said: list[Any] = []

    class Data(DataModule):
        def setup(self, stage: str) -> None:
            said.append((stage, self.trainer.datamodule is self, self.trainer.state.fn))

        def train_dataloader(self) -> Any:
            return loader(range(self.trainer.current_epoch + 1))

    trainer, data = quiet(max_epochs=3, reload_dataloaders_every_n_epochs=1), Data()
    trainer.fit(Scalar(), data)
    assert (said, trainer.global_step, trainer.datamodule, data.trainer) == ([("fit", True, "fit")], 6, data, None)


def test_a_module_without_parameters_is_where_the_run_is() -> None:
    module = TrainModule()
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta")))
    assert module.device.type == "meta"
    module.trainer = None
    assert module.device.type == "cpu"


def test_numbers_are_gathered_as_well_as_tensors() -> None:
    def rank() -> Any:
        found: list[Any] = []

        class Gathers(Scalar):
            def on_train_start(self) -> None:
                rank = self.global_rank
                found.append(self.all_gather({"number": rank + 0.5, "pair": (torch.full((2,), rank), True), "name": "x"}))
                found[0]["sampler"] = DistributedSampler(range(5), **self.trainer.distributed_sampler_kwargs, shuffle=False)
                ask, mine = self.trainer.strategy, torch.tensor([rank + 1.0])
                found[0]["reduced"] = [ask.reduce(mine).item(), ask.reduce(mine, reduce_op="sum").item(), ask.all_gather(mine).tolist(), mine.item() - rank]

        quiet(max_epochs=1, accelerator="cpu", strategy="ddp", devices=2).fit(Gathers(), loader([1, 2]))
        return found[0]

    both = run_ranks(rank)
    assert [list(found["sampler"]) for found in both] == [[0, 2, 4], [1, 3, 0]]
    for found in both:
        assert found["number"].tolist() == [0.5, 1.5]
        assert found["pair"][0].tolist() == [[0, 0], [1, 1]]
        assert (found["pair"][1].tolist(), found["name"]) == ([True, True], "x")
        assert found["reduced"] == [1.5, 3.0, [[1.0], [2.0]], 1.0]
    alone = SingleDeviceStrategy()
    assert (alone.reduce(torch.tensor(3.0)).item(), alone.all_gather(torch.tensor(3.0)).item()) == (3.0, 3.0)
    with pytest.raises(MisconfigurationException, match="reduce_op='product'. must be 'mean' or 'sum'"):
        alone.reduce(torch.tensor(3.0), reduce_op="product")


def test_gradient_norms() -> None:
    module = torch.nn.ParameterDict({"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64), "c": torch.zeros(1)})
    module["a"].grad, module["b"].grad = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([-12.0], dtype=torch.float64)
    assert grad_norm(module, 2) == {"grad_2.0_norm/a": 5.0, "grad_2.0_norm/b": 12.0, "grad_2.0_norm_total": 13.0}
    assert grad_norm(module, "inf", "|") == {"grad_inf_norm|a": 4.0, "grad_inf_norm|b": 12.0, "grad_inf_norm_total": 12.0}
    assert grad_norm(torch.nn.Linear(1, 1), 1) == {}
    with pytest.raises(ValueError, match="norm_type must be a number > 0"):
        grad_norm(module, 0)

    class Logs(Scalar):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, 2))

    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.fit(Logs(), loader([3]))
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {"grad_2.0_norm/w": 3.0, "grad_2.0_norm_total": 3.0}


def test_what_runs_on_rank_0_only() -> None:
    def rank() -> Any:
        add = rank_zero_only(lambda a, b=1: a + b, default="no")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rank_zero_warn("careful")
        return add(1, b=2), len(caught), rank_zero_only.rank, (lambda: rank_zero_only(len)([1]))()

    assert run_ranks(rank) == [(3, 1, 0, 1), ("no", 0, 1, None)]


def test_messages_name_the_line_that_sent_them() -> None:
    for send, category in ((rank_zero_warn, UserWarning), (rank_zero_deprecation, DeprecationWarning)):
        with pytest.warns(category, match="of this line") as caught:
            send("of this line")
        assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="kind"):
        rank_zero_warn("kind", category=RuntimeWarning)
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("trainer")
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        rank_zero_info("step %d", 3)
        rank_zero_debug("hidden")
        logger.setLevel(logging.DEBUG)
        rank_zero_debug("shown")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.INFO)
    assert [(record.getMessage(), record.pathname) for record in records] == [("step 3", __file__), ("shown", __file__)]
