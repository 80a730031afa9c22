"""TrainerArgumentParser: jsonargparse's parser, with arguments of whole components, and errors of one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from pydoc import locate
from typing import Any, NoReturn

import docstring_parser
import torch
from jsonargparse import ArgumentParser, class_from_function
from torch.optim import Optimizer

import callbacks
from callbacks.callback import Callback
from trainer.cli.messages import explain
from trainer.cli.optimizers import SCHEDULERS
from trainer.datamodule import DataModule
from trainer.errors import MisconfigurationException
from trainer.hparams import CLASS_PATH
from trainer.module import TrainModule
from trainer.strategies import Strategy
from trainer.trainer import Trainer

__all__ = ["TrainerArgumentParser"]

_COMPONENTS = (Trainer, TrainModule, DataModule, Callback)
_NAMED = (Callback, Strategy, Optimizer, *SCHEDULERS, DataModule, torch.nn.Module)


class TrainerArgumentParser(ArgumentParser):
    """Reads command lines, YAML files and, with `default_env=True`, environment variables into one configuration.

    Args:
        args, kwargs: those of jsonargparse.ArgumentParser. Options cannot be abbreviated unless `allow_abbrev=True`.
        description: What `--help` says at its beginning.
        env_prefix: How the names of environment variables begin: TRAINER_FIT__TRAINER__MAX_EPOCHS.
        default_env: Whether environment variables are read.
    """

    def __init__(
        self, *args: Any, description: str = "Train and use a model.", env_prefix: str = "TRAINER", default_env: bool = False, **kwargs: Any
    ) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        for name in callbacks.__all__:  # a class can be named without its package once it is loaded
            with suppress(ImportError):  # of what it needs, rich for example
                getattr(callbacks, name)
        self.callback_keys: list[str] = []
        self.optimizers: dict[str, tuple[Any, str]] = {}  # key -> class (or tuple of base classes), where it is linked to
        self.lr_schedulers: dict[str, tuple[Any, str]] = {}

    def add_component_args(
        self, component: Callable[..., Any], nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a Trainer, TrainModule, DataModule or Callback, or of a function that returns one, under a key; return their names.

        Args:
            component: the class or function.
            nested_key: "early_stopping" makes `--early_stopping.patience`. Callbacks that are added so are in the trainer.
            subclass_mode: take the class too, which may be any subclass: `--model MyModel --model.lr 0.1`.
            required: whether there must be one, in subclass mode.

        Raises:
            MisconfigurationException: for anything else.
        """
        cls: Any = component if isinstance(component, type) else class_from_function(component) if callable(component) else None
        if cls is None or not issubclass(cls, _COMPONENTS):
            raise MisconfigurationException(
                f"{component!r} has no arguments for a command line: give a Trainer, TrainModule, DataModule or Callback class, or a function "
                "with one of them as its return type."
            )
        if issubclass(cls, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(cls, nested_key, fail_untyped=False, required=required)
        added = self.add_class_arguments(cls, nested_key, fail_untyped=False, instantiate=not issubclass(cls, Trainer), sub_configs=True)
        self._share_help(cls, nested_key)
        return added

    add_lightning_class_args = add_component_args

    def add_optimizer_args(self, optimizer_class: Any = (Optimizer,), nested_key: str = "optimizer", link_to: str = "AUTOMATIC") -> None:
        """Add the arguments of an optimizer under a key.

        Args:
            optimizer_class: its class; or a tuple of base classes, which leaves the choice to the command line (`--optimizer Adam`).
            nested_key: the key.
            link_to: the key of an argument of the module that takes them as class path and arguments; "AUTOMATIC" makes the optimizer in
                the place of `configure_optimizers`.
        """
        self._add_made_later(optimizer_class, nested_key, "params")
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(self, lr_scheduler_class: Any = SCHEDULERS, nested_key: str = "lr_scheduler", link_to: str = "AUTOMATIC") -> None:
        """Add the arguments of a learning-rate scheduler under a key; as `add_optimizer_args`."""
        self._add_made_later(lr_scheduler_class, nested_key, "optimizer")
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_made_later(self, cls: Any, key: str, given_later: str) -> None:
        common = {"instantiate": False, "fail_untyped": False, "skip": {given_later}}
        if isinstance(cls, tuple):
            self.add_subclass_arguments(cls, key, **common)
        else:
            self.add_class_arguments(cls, key, sub_configs=True, **common)

    def set_saved_defaults(self, key: str, saved: dict[str, Any], component: Any) -> bool:
        """Make hyper-parameters of a checkpoint the defaults under a key; return whether there are any that it has.

        Args:
            key: "model".
            saved: the hyper-parameters.
            component: the class or function whose arguments are under the key; None in subclass mode, where the checkpoint names the class.
        """
        path = saved.get(CLASS_PATH)
        saved = {name: value for name, value in saved.items() if name != CLASS_PATH}
        if component is None:
            cls = locate(path) if path else None
            defaults = {} if cls is None else {key: {"class_path": path, "init_args": {n: saved[n] for n in _arguments(cls) if n in saved}}}
        else:
            defaults = {f"{key}.{name}": saved[name] for name in _arguments(component) if name in saved}
        self.set_defaults(defaults)
        return bool(defaults)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program with one line and the exit code 2 (with `exit_on_error=False`: raise jsonargparse.ArgumentError)."""
        line = explain(message, self._flags(), _NAMED)
        if not self.exit_on_error:
            super().error(line, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        self.exit(2, f"error: {line} ({program} --help)\n")

    def _flags(self) -> Iterator[str]:
        """All options, those of subcommands included."""
        for action in self._actions:
            yield from (option for option in action.option_strings if option.startswith("--"))
        if self._subcommands_action is not None:
            for parser in self._subcommands_action._name_parser_map.values():
                yield from parser._flags()

    def _share_help(self, cls: type, key: str) -> None:
        """Give every argument its help, also where a line of the docstring describes several: "min_epochs, max_epochs: ..."."""
        for base in cls.__mro__:
            for param in docstring_parser.parse(inspect.cleandoc(base.__dict__.get("__doc__") or "")).params:
                for name in param.arg_name.split(","):
                    action = next((a for a in self._actions if a.dest == f"{key}.{name.strip()}" and a.option_strings), None)
                    if action is not None and not action.help:
                        action.help = param.description


def _arguments(component: Any) -> list[str]:
    """The names of the arguments of a class or function."""
    return [name for name, p in inspect.signature(component).parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
