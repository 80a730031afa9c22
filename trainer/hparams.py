"""Hyper-parameters: the arguments of a module or data module, remembered so that a checkpoint can rebuild it."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainer.errors import MisconfigurationException

__all__ = ["CLASS_PATH", "AttributeDict", "HyperparametersMixin", "accepted_arguments", "add_hparams", "class_only", "made_again", "read_hparams"]

CLASS_PATH = "_class_path"
"""Among hyper-parameters, the class that a command line made of them; some may then be configurations of objects (see trainer.cli)."""
_COMMAND_LINE = frozenset([CLASS_PATH, "_instantiator"])  # the latter is Lightning's


class AttributeDict(dict[str, Any]):
    """A dict whose items are attributes too: `hparams.lr` is `hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"No hyper-parameter {name!r}; there are: {', '.join(map(str, self)) or 'none'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


class class_only(classmethod):  # noqa: N801  (used as a decorator)
    """A classmethod that makes a new object, and whose call on an object is a mistake: that one would stay as it is."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        method = super().__get__(None, owner)
        if instance is None:
            return method

        @functools.wraps(method)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            name = f"{owner.__qualname__}.{method.__name__}" if owner is not None else method.__name__
            raise TypeError(f"{name}(...) returns a new object, and would leave this one as it is: call it on the class, and take what it returns.")

        return refuse


class HyperparametersMixin:
    """Gives a class `save_hyperparameters()` and `hparams`."""

    _log_hyperparams = True

    @property
    def hparams(self) -> AttributeDict:
        """The saved hyper-parameters; changes to it reach the next checkpoint."""
        return self.__dict__.setdefault("_hparams", AttributeDict())

    def _keep_configuration(self, saved: Mapping[str, Any]) -> None:
        """After `accepted_arguments` made objects of `saved`, the hyper-parameters are what they were made of: a file can hold that again."""
        if not _COMMAND_LINE.isdisjoint(saved):
            add_hparams(self, {name: value for name, value in saved.items() if name in self.hparams or name == CLASS_PATH})

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyper-parameters as they were when they were saved."""
        return copy.deepcopy(self.__dict__.get("_hparams_initial", AttributeDict()))

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Remember the arguments of `__init__`, from which this is called.

        Args:
            args: names of arguments to keep (all, when none is named), or one dict or namespace to keep as it is.
            ignore: names to leave out; for arguments that a checkpoint cannot hold as plain values (modules, paths).
            frame: the frame of `__init__`, when the call is made from a helper.
            logger: also send the hyper-parameters to the loggers.

        Raises:
            MisconfigurationException: when a name is not an argument of `__init__`, or for what is neither name, dict nor namespace.
        """
        self.__dict__["_log_hyperparams"] = logger
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        if len(args) == 1 and not isinstance(args[0], str):
            given = args[0] if isinstance(args[0], Mapping) else getattr(args[0], "__dict__", None)
            if given is None:
                raise _no_names(args[0])
        else:
            if frame is None:
                frame = inspect.currentframe().f_back  # type: ignore[union-attr]
            given = _init_arguments(self, frame)
            for name in args:
                if not isinstance(name, str):
                    raise _no_names(name)
            unknown = [name for name in args if name not in given]
            if unknown:
                raise MisconfigurationException(
                    f"save_hyperparameters({unknown[0]!r}): __init__ has no such argument; it has {', '.join(given) or 'none'}."
                )
            if args:
                given = {name: given[name] for name in args}
        self.hparams.update({name: value for name, value in given.items() if name not in ignored})
        for name in ignored:  # a base class may have saved it
            self.hparams.pop(name, None)
        self.__dict__["_hparams_initial"] = AttributeDict(copy.deepcopy(_copyable(self.hparams)))


def add_hparams(owner: HyperparametersMixin, values: Mapping[str, Any]) -> None:
    """Add to the hyper-parameters of an owner, as if they had been saved with the others."""
    owner.hparams.update(values)
    owner.__dict__["_hparams_initial"] = AttributeDict({**owner.hparams_initial, **copy.deepcopy(dict(values))})


def _no_names(value: Any) -> MisconfigurationException:
    return MisconfigurationException(
        f"save_hyperparameters takes names of arguments, or one dict or namespace; got {type(value).__name__}."
    )


def _copyable(values: dict[str, Any]) -> dict[str, Any]:
    """Drop what cannot be copied (open files, locks); a checkpoint refuses it by name anyway."""
    out = {}
    for name, value in values.items():
        try:
            out[name] = copy.deepcopy(value)
        except Exception:  # any class may fail to copy in any way
            continue
    return out


def _init_arguments(owner: Any, frame: FrameType | None) -> dict[str, Any]:
    """Collect the arguments of the `__init__` frames of `owner`: where a name comes up twice, the subclass that called decides."""
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name != "__init__":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__init__":
        info = inspect.getargvalues(frame)
        if not info.args or info.locals.get(info.args[0]) is not owner:
            break
        found |= {name: info.locals[name] for name in info.args[1:] if name in info.locals}  # keyword-only ones are among them
        found |= info.locals.get(info.keywords, {})
        frame = frame.f_back
    return found


def accepted_arguments(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that `cls.__init__` takes; where they come from a command line, with objects made of their configurations."""
    if not _COMMAND_LINE.isdisjoint(values):
        return _made(cls, accepted_arguments(cls, {name: value for name, value in values.items() if name not in _COMMAND_LINE}))
    if cls.__init__ in (object.__init__, torch.nn.Module.__init__):  # their signature says **kwargs, which they refuse
        return {}
    parameters = inspect.signature(cls.__init__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def made_again(cls: type, saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return an object of `cls` with the saved hyper-parameters as arguments, but for `overrides`."""
    saved = {name: value for name, value in saved.items() if name not in overrides}
    made = cls(**{**accepted_arguments(cls, saved), **overrides})
    made._keep_configuration(saved)
    return made


def _made(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `cls` with objects in the place of their class paths and file paths, as the command line makes them."""
    try:
        from jsonargparse import (  # optional: only configurations of objects need it
            ArgumentParser,
            Namespace,
        )
    except ImportError:
        raise MisconfigurationException(
            f"The checkpoint's arguments of {cls.__name__} come from a command line; making objects of them needs jsonargparse: "
            'pip install "torch-trainer-kit[cli]"'
        ) from None
    parser = ArgumentParser(exit_on_error=False)
    others = set(inspect.signature(cls.__init__).parameters) - {"self", *values}
    names = {name.partition(".")[2] for name in parser.add_class_arguments(cls, "made", fail_untyped=False, instantiate=False, skip=others)}
    known = {name: value for name, value in values.items() if name in names}
    made = parser.instantiate(parser.parse_object({"made": known})).get("made", Namespace())
    return {**values, **vars(made)}


def read_hparams(path: str | Path) -> dict[str, Any]:
    """Read `name: value` lines, as `hparams.yaml` of a run holds them.

    Raises:
        MisconfigurationException: when the file holds something else, or nested lines while PyYAML is not installed.
    """
    text = Path(path).read_text()
    try:
        import yaml  # optional: only nested files need it
    except ImportError:
        found = _read_lines(path, text)
    else:
        found = yaml.safe_load(text) or {}
    if not isinstance(found, dict):
        raise MisconfigurationException(f"{path} does not hold `name: value` lines.")
    return found


def _read_lines(path: str | Path, text: str) -> dict[str, Any]:
    """Read what CSVLogger and TensorBoardLogger write, except for nested values."""
    found = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not colon or not value.strip() or line[0] in " -":
            raise MisconfigurationException(f"{path} is more than `name: value` lines; reading it needs PyYAML: pip install pyyaml")
        value = {".nan": "NaN", ".inf": "Infinity", "-.inf": "-Infinity"}.get(value.strip(), value)
        try:
            found[name.strip(' "')] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip(' "')] = value.strip()
    return found
