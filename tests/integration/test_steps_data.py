"""How data reach the steps: several loaders, data modules, transfer hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.modules import Scalar, loader, quiet
from trainer import CombinedLoader, DataModule, MisconfigurationException


class Validating(Scalar):
    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", batch.mean())
        self.log("all", batch.mean(), add_dataloader_idx=False)
        if dataloader_idx == 1:
            self.log("second", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("end", 9.0)

    test_step = validation_step


def test_several_validation_loaders_have_names_and_dicts_of_their_own() -> None:
    module, trainer = Validating(), quiet(max_epochs=1)
    loaders = [loader([1, 2, 3], 2), loader([10])]
    found = trainer.validate(module, loaders, verbose=False)
    assert found == [
        {"loss/dataloader_idx_0": 2.0, "all": 4.0, "end": 9.0},
        {"loss/dataloader_idx_1": 10.0, "second/dataloader_idx_1": 1.0, "all": 4.0, "end": 9.0},
    ]
    trainer.fit(module, loader([1]), loaders)
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == {**found[0], **found[1]}


def test_one_validation_loader_has_plain_names_and_validate_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = quiet().validate(Validating(), [loader([1, 2, 3], 2)])
    assert found == [{"loss": 2.0, "all": 2.0, "end": 9.0}]
    assert "loss" in (table := capsys.readouterr().out) and "9" in table
    found = quiet().test(Validating(), {"a": loader([1]), "b": loader([5])})
    assert [numbers.get(f"loss/dataloader_idx_{i}") for i, numbers in enumerate(found)] == [1.0, 5.0]
    assert "loader 1" in capsys.readouterr().out


def test_several_prediction_loaders_give_a_list_each() -> None:
    class Predicting(Scalar):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int) -> Any:
            return (dataloader_idx, batch_idx, batch.tolist())

    found = quiet().predict(Predicting(), [loader([1, 2, 3], 2), loader([4])])
    assert found == [[(0, 0, [1.0, 2.0]), (0, 1, [3.0])], [(1, 0, [4.0])]]


class Collecting(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        flat = torch.utils._pytree.tree_map(lambda t: None if t is None else t.tolist(), batch)
        self.seen.append(flat)
        self.log("n", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return self.w * 1.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [([1.0], [7.0]), ([2.0], [8.0])]),
        ("max_size", [([1.0], [7.0]), ([2.0], [8.0]), ([3.0], None)]),
        ("max_size_cycle", [([1.0], [7.0]), ([2.0], [8.0]), ([3.0], [7.0])]),
    ],
)
def test_combined_loaders_in_training(mode: str, expected: list[Any]) -> None:
    module, trainer = Collecting(), quiet(max_epochs=1)
    trainer.fit(module, CombinedLoader({"a": loader([1, 2, 3]), "b": loader([7, 8])}, mode))
    assert [(b["a"], b["b"]) for b in module.seen] == expected
    assert trainer.global_step == len(expected)


def test_a_dict_or_list_of_training_loaders_cycles_the_shorter() -> None:
    module = Collecting()
    quiet(max_epochs=1).fit(module, {"a": loader([1, 2, 3]), "b": loader([7, 8])})
    assert module.seen == [{"a": [1.0], "b": [7.0]}, {"a": [2.0], "b": [8.0]}, {"a": [3.0], "b": [7.0]}]
    module = Collecting()
    quiet(max_epochs=1).fit(module, [loader([1, 2, 3]), loader([7, 8])])
    assert [list(b) for b in module.seen] == [[[1.0], [7.0]], [[2.0], [8.0]], [[3.0], [7.0]]]


# -- transfer hooks --------------------------------------------------------------------------------------------------------------


class Hooks:
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", dataloader_idx))
        return batch + 1

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append((device.type, dataloader_idx))
        return batch * 2

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("after", dataloader_idx))
        return batch + 0.5


class HookedModule(Hooks, Validating):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []


class HookedData(Hooks, DataModule):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def train_dataloader(self) -> Any:
        return loader([1])

    def val_dataloader(self) -> Any:
        return [loader([1]), loader([2])]


def test_transfer_hooks_of_the_module() -> None:
    module, trainer = HookedModule(), quiet(max_epochs=1)
    trainer.fit(module, loader([1]), [loader([1]), loader([2])])
    assert module.calls == [(name, index) for index in (0, 0, 1) for name in ("before", "cpu", "after")]
    assert module.w.item() == -4.5
    assert trainer.callback_metrics["loss/dataloader_idx_1"].item() == 6.5


def test_transfer_hooks_of_the_data_module_win() -> None:
    module, data = HookedModule(), HookedData()
    quiet(max_epochs=1).fit(module, datamodule=data)
    assert (module.calls, len(data.calls), module.w.item()) == ([], 9, -4.5)


def test_batches_of_any_structure_arrive_as_they_are() -> None:
    class Odd:
        def __init__(self) -> None:
            self.moved = None

        def to(self, device: torch.device, **_: Any) -> Odd:
            self.moved = device
            return self

    class Takes(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.got = batch
            return self.w * 1.0

    odd = Odd()
    module, batch = Takes(), {"x": [torch.ones(1), "text"], "o": odd, "n": None}
    quiet(max_epochs=1).fit(module, [batch])
    assert module.got["x"][1] == "text"
    assert module.got["o"] is odd
    assert module.got["n"] is None


# -- data modules ------------------------------------------------------------------------------------------------------------------


def test_a_data_module_gives_loaders_and_gets_its_hooks_in_order() -> None:
    class Data(DataModule):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def prepare_data(self) -> None:
            self.calls.append("prepare")

        def setup(self, stage: str) -> None:
            assert self.trainer.state.fn == stage
            self.calls.append(f"setup {stage}")

        def teardown(self, stage: str) -> None:
            self.calls.append(f"teardown {stage}")

        def on_exception(self, exception: BaseException) -> None:
            self.calls.append(type(exception).__name__)

        def train_dataloader(self) -> Any:
            return loader([1, 2])

        def val_dataloader(self) -> Any:
            return loader([3])

    class Fails(Validating):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    data, trainer = Data(), quiet(max_epochs=1)
    trainer.fit(Validating(), data)
    assert trainer.validate(verbose=False)[0]["loss"] == 3.0  # model and data of the run before
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1).fit(Fails(), datamodule=data)
    assert data.calls == [
        "prepare", "setup fit", "teardown fit", "prepare", "setup validate", "teardown validate",
        "prepare", "setup fit", "ZeroDivisionError", "teardown fit",
    ]  # fmt: skip
    assert data.trainer is None


def test_from_datasets_makes_loaders_that_shuffle_training_only() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([5.0])

    numbers = torch.arange(4.0)
    data = DataModule.from_datasets(numbers, [numbers, numbers[:1]], predict_dataset=Stream(), batch_size=2)
    train, val, predict = data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()
    assert isinstance(train.sampler, torch.utils.data.RandomSampler)
    assert [type(v.sampler).__name__ for v in val] == ["SequentialSampler"] * 2
    assert (train.batch_size, len(val[1]), [b.tolist() for b in predict]) == (2, 1, [[5.0]])
    assert str(data) == "DataModule(train, val, predict)"
    with pytest.raises(NotImplementedError):
        data.test_dataloader()
    found = quiet().validate(Validating(), datamodule=data, verbose=False)
    assert [numbers.get(f"loss/dataloader_idx_{i}") for i, numbers in enumerate(found)] == [1.5, 0.0]


def test_from_datasets_of_a_subclass_passes_its_arguments_on() -> None:
    class Mine(DataModule):
        def __init__(self, batch_size: int, factor: int) -> None:
            self.save_hyperparameters()

    data = Mine.from_datasets(torch.arange(4.0), batch_size=3, factor=2)
    assert dict(data.hparams) == {"batch_size": 3, "factor": 2}
    assert isinstance(data.train_dataloader(), DataLoader)
    assert str(Mine(1, 1)) == "Mine(no loaders)"


def test_new_loaders_are_asked_for_every_n_epochs() -> None:
    class Reloads(Scalar):
        calls = 0

        def train_dataloader(self) -> Any:
            self.calls += 1
            return loader([float(self.calls)])

    for every, calls in ((0, 1), (1, 4), (2, 2)):
        module = Reloads()
        quiet(max_epochs=4, reload_dataloaders_every_n_epochs=every).fit(module)
        assert module.calls == calls
    assert module.w.item() == -(1 + 1 + 2 + 2)


def test_a_loader_hook_that_returns_nothing_is_named() -> None:
    class Nothing(Scalar):
        def train_dataloader(self) -> Any: ...

    with pytest.raises(MisconfigurationException, match="Nothing.train_dataloader returned None, not a loader"):
        quiet(max_epochs=1).fit(Nothing())


def test_a_stage_without_a_loader_is_named_when_it_is_asked_for() -> None:
    class Asks(Scalar):
        def on_train_start(self) -> None:
            self.answers = (self.trainer.val_dataloaders, self.trainer.num_val_batches, self.trainer.num_training_batches)
            self.trainer._run.loaders.sources("test")

    module = Asks()
    with pytest.raises(MisconfigurationException, match="There is no test loader: define test_dataloader in Asks or in a DataModule, or pass"):
        quiet(max_epochs=1).fit(module, loader([1, 2]))
    assert module.answers == (None, [], 2)
