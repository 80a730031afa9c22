"""Hyper-parameters: which arguments are remembered, from which frames, and what a module is rebuilt from."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.loggers.plain import to_yaml
from trainer import AttributeDict, CheckpointError, DataModule, MisconfigurationException, TrainModule
from trainer.checkpoint import io
from trainer.hparams import read_hparams


class Module(TrainModule):
    def __init__(self, lr: float, size: int = 2, *, name: str = "n", **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(size, 1)


def test_all_arguments_are_kept_by_name() -> None:
    assert dict(Module(0.1, extra=5).hparams) == {"lr": 0.1, "size": 2, "name": "n", "extra": 5}


def test_attribute_access_and_the_initial_copy() -> None:
    module = Module(0.1)
    module.hparams.lr = 0.2
    module.hparams["new"] = [1]
    assert (module.hparams.lr, module.hparams["lr"], module.hparams.new) == (0.2, 0.2, [1])
    assert module.hparams_initial.lr == 0.1
    assert "new" not in module.hparams_initial
    del module.hparams.new
    with pytest.raises(AttributeError, match="No hyper-parameter 'new'; there are: lr, size, name"):
        _ = module.hparams.new
    with pytest.raises(AttributeError, match="there are: none"):
        _ = AttributeDict().x


class Parent(TrainModule):
    def __init__(self, a: int, b: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


class Child(Parent):
    def __init__(self, c: int, b: int = 7) -> None:
        super().__init__(a=c * 10, b=b)


class Grandchild(Child):
    def __init__(self, d: int) -> None:
        super().__init__(c=d + 1)
        self.save_hyperparameters()


def test_frames_of_subclasses_are_read_too_and_the_outermost_wins() -> None:
    assert dict(Child(3).hparams) == {"a": 30, "b": 7, "c": 3}
    assert dict(Grandchild(2).hparams) == {"a": 30, "b": 7, "c": 3, "d": 2}


def test_the_arguments_of_a_foreign_init_around_are_not_read() -> None:
    class Owner:
        def __init__(self, secret: int) -> None:
            self.module = Module(0.1)

    assert "secret" not in Owner(5).module.hparams


@pytest.mark.parametrize(
    ("args", "kwargs", "kept"),
    [
        (("lr",), {}, {"lr": 0.1}),
        (("lr", "name"), {}, {"lr": 0.1, "name": "n"}),
        ((), {"ignore": "lr"}, {"size": 2, "name": "n"}),
        ((), {"ignore": ["lr", "size"]}, {"name": "n"}),
        (({"x": 1, "y": 2},), {}, {"x": 1, "y": 2}),
        (({"x": 1, "y": 2},), {"ignore": ("y",)}, {"x": 1}),
        ((Namespace(x=1),), {}, {"x": 1}),
        ((AttributeDict(x=1),), {}, {"x": 1}),
    ],
)
def test_names_ignore_dicts_and_namespaces(args: Any, kwargs: Any, kept: dict[str, Any]) -> None:
    class Chooses(TrainModule):
        def __init__(self, lr: float, size: int = 2, *, name: str = "n") -> None:
            super().__init__()
            self.save_hyperparameters(*args, **kwargs)

    assert dict(Chooses(0.1).hparams) == kept


def test_a_helper_may_pass_the_frame() -> None:
    import inspect

    class Helped(TrainModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            frame = inspect.currentframe()
            (lambda: self.save_hyperparameters(frame=frame))()

    assert dict(Helped(0.5).hparams) == {"lr": 0.5}


def test_what_cannot_be_saved_so() -> None:
    class Wrong(TrainModule):
        def __init__(self, lr: float, given: Any) -> None:
            super().__init__()
            self.save_hyperparameters(*given)

    with pytest.raises(MisconfigurationException, match=r"save_hyperparameters\('lrr'\): __init__ has no such argument; it has lr, given"):
        Wrong(0.1, ["lrr"])
    for given in ([3], [torch.Size([1])]):
        with pytest.raises(MisconfigurationException, match="takes names of arguments, or one dict or namespace; got"):
            Wrong(0.1, given)
    with pytest.raises(MisconfigurationException, match="takes names of arguments"):
        Wrong(0.1, [{"a": 1}, "lr"])


def save(path: Path, module: TrainModule, **more: Any) -> Path:
    io.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), **more}, path)
    return path


def test_a_module_is_rebuilt_from_its_hyperparameters(tmp_path: Path) -> None:
    module = Module(0.1, size=3, extra=1)
    path = save(tmp_path / "m.ckpt", module)
    loaded = Module.load_from_checkpoint(path)
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    assert dict(loaded.hparams) == {"lr": 0.1, "size": 3, "name": "n", "extra": 1}
    assert Module.load_from_checkpoint(path, lr=9.0).hparams.lr == 9.0
    (tmp_path / "h.yaml").write_text("lr: 0.7\nsize: 3\n")
    assert Module.load_from_checkpoint(path, hparams_file=tmp_path / "h.yaml").hparams.lr == 0.7


def test_arguments_that_the_class_does_not_take_are_left_out(tmp_path: Path) -> None:
    class Narrow(TrainModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(size, 1)

    class Without(TrainModule):
        pass

    path = save(tmp_path / "m.ckpt", Module(0.1))
    assert Narrow.load_from_checkpoint(path).layer.in_features == 2
    assert list(Without.load_from_checkpoint(path, strict=False).parameters()) == []


def test_an_argument_of_the_call_that_the_class_does_not_take_is_an_error(tmp_path: Path) -> None:
    class Narrow(TrainModule):
        def __init__(self, size: int) -> None:
            super().__init__()

    with pytest.raises(TypeError, match="sise"):
        Narrow.load_from_checkpoint(save(tmp_path / "m.ckpt", Module(0.1)), sise=3)
    with pytest.raises(TypeError, match="takes no arguments"):
        DataModule.from_datasets([1.0], factr=2)
    with pytest.raises(TypeError, match="takes no arguments"):
        DataModule.load_from_checkpoint(tmp_path / "m.ckpt", factr=2)


def test_errors_of_loading(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing\.ckpt"):
        Module.load_from_checkpoint(tmp_path / "missing.ckpt")
    with pytest.raises(CheckpointError, match=r"missing\.ckpt"):
        DataModule.load_from_checkpoint(tmp_path / "missing.ckpt")
    path = save(tmp_path / "m.ckpt", Module(0.1))
    with pytest.raises(RuntimeError, match="size mismatch"):
        Module.load_from_checkpoint(path, size=5)

    class Deeper(Module):
        def __init__(self, lr: float, **more: Any) -> None:
            super().__init__(lr)
            self.second = torch.nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r"Missing key.*second.weight"):
        Deeper.load_from_checkpoint(path)
    assert Deeper.load_from_checkpoint(path, strict=False).second.in_features == 1
    Deeper.strict_loading = False
    assert Deeper.load_from_checkpoint(path).second.in_features == 1


def test_a_data_module_is_rebuilt_with_its_state(tmp_path: Path) -> None:
    class Data(DataModule):
        def __init__(self, size: int = 1) -> None:
            self.save_hyperparameters()
            self.at = 0

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.at = state_dict["at"]

    more = {"datamodule_hyper_parameters": {"size": 4}, Data.__qualname__: {"at": 6}}
    path = save(tmp_path / "m.ckpt", Module(0.1), **more)
    data = Data.load_from_checkpoint(path)
    assert (data.hparams.size, data.at) == (4, 6)
    assert Data.load_from_checkpoint(path, size=5).hparams.size == 5


def test_a_file_of_hyperparameters_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "h.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(MisconfigurationException, match=r"h\.yaml does not hold `name: value` lines"):
        read_hparams(tmp_path / "h.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert read_hparams(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize("with_yaml", [True, False])
def test_files_of_the_loggers_are_read_with_and_without_pyyaml(with_yaml: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_yaml:
        pytest.importorskip("yaml")
    else:
        monkeypatch.setitem(sys.modules, "yaml", None)
    values = {"lr": 1e-5, "n": 3, "name": "a: b.info", "flag": True, "none": None, "list": [1, 2.5, "x"], "inf": float("inf")}
    (tmp_path / "h.yaml").write_text("# comment\n" + to_yaml(values) + "bare: word\n")
    assert read_hparams(tmp_path / "h.yaml") == {**values, "bare": "word"}
    (tmp_path / "nested.yaml").write_text(to_yaml({"a": {"b": 1}}))
    if with_yaml:
        assert read_hparams(tmp_path / "nested.yaml") == {"a": {"b": 1}}
    else:
        with pytest.raises(MisconfigurationException, match=r"nested\.yaml is more than `name: value` lines; reading it needs PyYAML"):
            read_hparams(tmp_path / "nested.yaml")
