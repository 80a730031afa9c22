"""TrainerCLI: a program with the subcommands fit, validate, test and predict."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pydoc import locate
from typing import Any

from jsonargparse import ActionConfigFile, Namespace
from torch.optim import Optimizer

from trainer.cli.checkpoints import remember, saved_arguments
from trainer.cli.optimizers import configure_by
from trainer.cli.parser import TrainerArgumentParser
from trainer.cli.saving import SaveConfigCallback
from trainer.datamodule import DataModule
from trainer.earlier import checkpoint_for
from trainer.errors import MisconfigurationException, TrainerError
from trainer.hooks import overrides
from trainer.module import TrainModule
from trainer.seed import seed_everything
from trainer.trainer import Trainer

__all__ = ["TrainerCLI"]


class TrainerCLI:
    """Make a program of a model, a data module and the trainer: `program.py fit --trainer.max_epochs 3 --model.lr 0.1`.

    Arguments come from the command line, from files (`--config a.yaml --config b.yaml`, later ones win) and, with `parser_kwargs={"default_env":
    True}`, from environment variables. What is wrong in them is told in one line, with the exit code 2. Subclass it to add arguments
    (`add_arguments_to_parser`) or to act between the steps (`before_instantiate_classes`, `before_fit`, `after_fit`, ...).

    Args:
        model_class: The TrainModule class, or a function that returns one (with a return annotation). None: `--model` names it.
        datamodule_class: The same of a DataModule. None: `--data` may name one.
        save_config_callback: Writes the configuration to the logger's folder; None for none.
        save_config_kwargs: Its arguments.
        trainer_class: Trainer, a subclass, or a function that returns one.
        trainer_defaults: Other defaults of the trainer's arguments. "callbacks" in it are added in any case.
        seed_everything_default: The seed; True draws one, False sets none.
        parser_kwargs: Arguments of the parser; under "fit", "validate", ... those of the subcommand's.
        parser_class: The class of the parsers.
        subclass_mode_model: `--model` may name any subclass of `model_class`.
        subclass_mode_data: The same of `--data`.
        args: A list in the place of the program's own arguments, or a dict or Namespace of configuration.
        run: False makes the objects (`model`, `datamodule`, `trainer`) and runs nothing; there are no subcommands then.
        auto_configure_optimizers: Add `--optimizer` and `--lr_scheduler`, which take the place of `configure_optimizers` where they are given.
        load_from_checkpoint_support: Arguments that no checkpoint can hold are remembered as their configuration where the model calls
            `save_hyperparameters`, so that `load_from_checkpoint` makes them again.

    Attributes:
        config: The configuration, as read; `config_init`, with objects in the place of their class paths.
        model, datamodule, trainer: The objects; `datamodule` is None where there is none.
        subcommand: "fit", "validate", "test" or "predict"; None with run=False.

    Raises:
        SystemExit: with code 2, for a configuration that cannot work; with code 0 after `--help` and `--print_config`.
        MisconfigurationException: two optimizers are "AUTOMATIC".
    """

    def __init__(
        self,
        model_class: type[TrainModule] | Callable[..., TrainModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[TrainerArgumentParser] = TrainerArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: list[str] | dict[str, Any] | Namespace | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.subclass_mode_model = subclass_mode_model or model_class is None
        self.subclass_mode_data = subclass_mode_data or datamodule_class is None
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs, self.parser_class = parser_kwargs or {}, parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support

        self.subcommand: str | None = None
        self._subcommand_parsers: dict[str, TrainerArgumentParser] = {}
        self._subcommand_arguments: dict[str, list[str]] = {}
        self.setup_parser(run, self._asked_for(args))
        self.config = self.parse_arguments(self.parser, args)
        self.subcommand = self.config.get("subcommand") if run else None
        if self._take_saved_arguments():
            self.config = self.parse_arguments(self.parser, args)
        if self.subclass_mode_model and self._get(self.config, "model") is None:  # not earlier: the checkpoint may name it
            self._subparser().error("--model is required: a class, by its name, or as package.module.Class.")
        self._set_seed()
        self.before_instantiate_classes()
        try:
            self.instantiate_classes()
        except MisconfigurationException as error:
            self._subparser().error(str(error), error)
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- to override ---------------------------------------------------------------------------------------------------

    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add arguments, set defaults, or link arguments (`parser.link_arguments("data.batch_size", "model.batch_size")`)."""

    def before_instantiate_classes(self) -> None:
        """Called ahead of making the objects; `self.config` may be changed."""

    def after_instantiate_classes(self) -> None:
        """Called when `self.model`, `self.datamodule` and `self.trainer` are there."""

    @staticmethod
    def configure_optimizers(module: TrainModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return what the module's `configure_optimizers` is to return. It runs in the processes that train."""
        if lr_scheduler is None:
            return optimizer
        monitor = getattr(lr_scheduler, "monitor", None)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, **({} if monitor is None else {"monitor": monitor})}}

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the trainer's functions that are subcommands, and which of their arguments are not for the command line."""
        evaluate = {"model", "dataloaders", "datamodule"}
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}, "validate": evaluate, "test": evaluate, "predict": evaluate}

    # -- parsers ---------------------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> TrainerArgumentParser:
        """Return a parser with nothing but `--config`."""
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A YAML or JSON file of arguments. May be given several times.")
        return parser

    def _asked_for(self, args: Any) -> str | None:
        """Return the subcommand, where it is the first of the arguments and nothing else can name one: only its parser is needed then."""
        words = sys.argv[1:2] if args is None else args[:1] if isinstance(args, list) else []
        certain = words and words[0] in self.subcommands() and self.parser_kwargs.keys() <= self.subcommands().keys()
        return words[0] if certain else None

    def setup_parser(self, add_subcommands: bool, only: str | None = None) -> None:
        """Make `self.parser`, with its subcommands; but for `only`, where it is given, they get no arguments, which takes long."""
        self.parser = self.init_parser(**{name: value for name, value in self.parser_kwargs.items() if name not in self.subcommands()})
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        commands = self.parser.add_subcommands()
        for name, skip in self.subcommands().items():
            function = getattr(self._class_of(self.trainer_class), name)
            summary = (inspect.getdoc(function) or "").partition("\n")[0]
            parser = self.init_parser(**{"description": summary, "usage": "%(prog)s [options]", **self.parser_kwargs.get(name, {})})
            self._subcommand_parsers[name] = parser
            if only in (None, name):
                self._add_arguments(parser)
                self._subcommand_arguments[name] = parser.add_method_arguments(self._class_of(self.trainer_class), name, skip=set(skip))
            commands.add_subcommand(name, parser, help=summary)

    @staticmethod
    def _class_of(component: Any) -> Any:
        """The class that a component is, or that a function returns."""
        return component if isinstance(component, type) else inspect.signature(component, eval_str=True).return_annotation

    def add_default_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add `--seed_everything`."""
        parser.add_argument(
            "--seed_everything", type=bool | int, default=self.seed_everything_default, help="The seed; true draws one, false sets none."
        )

    def add_core_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add the arguments of the trainer, the model and the data module."""
        parser.add_component_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"})
        parser.add_component_args(self.model_class or TrainModule, "model", subclass_mode=self.subclass_mode_model, required=False)
        given = self.datamodule_class is not None  # else the loaders may be the model's
        parser.add_component_args(self.datamodule_class or DataModule, "data", subclass_mode=self.subclass_mode_data, required=given)

    def _add_arguments(self, parser: TrainerArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args()
        for added in (parser.optimizers, parser.lr_schedulers):
            automatic = [key for key, (_, link_to) in added.items() if link_to == "AUTOMATIC"]
            if len(automatic) > 1:
                raise MisconfigurationException(
                    f"Only one of {automatic} can take the place of configure_optimizers. Give the others link_to='model.<argument>', and write "
                    "configure_optimizers yourself."
                )
        for key, (cls, link_to) in {**parser.optimizers, **parser.lr_schedulers}.items():
            if link_to != "AUTOMATIC":
                parser.link_arguments(key, link_to, **({} if isinstance(cls, tuple) else {"compute_fn": partial(_with_class_path, cls)}))

    def parse_arguments(self, parser: TrainerArgumentParser, args: Any) -> Namespace:
        """Read the program's arguments, or `args`."""
        return parser.parse_object(args) if isinstance(args, (dict, Namespace)) else parser.parse_args(args)

    def _subparser(self) -> TrainerArgumentParser:
        return self.parser if self.subcommand is None else self._subcommand_parsers[self.subcommand]

    def _own(self, config: Namespace) -> Namespace:
        """Return the part of a configuration that belongs to the subcommand."""
        return config if self.subcommand is None else config[self.subcommand]

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        return self._own(config).get(key, default)

    # -- from configuration to objects -----------------------------------------------------------------------------------------

    def _take_saved_arguments(self) -> bool:
        """Make the model's arguments in the checkpoint of `--ckpt_path` (or `--trainer.resume`) the defaults; return whether there are any."""
        settings = self._get(self.config, "trainer")
        path = self._get(self.config, "ckpt_path") or (settings.get("resume") if self.subcommand == "fit" else None)
        if path is None or settings.get("plugins"):  # a plug-in may keep checkpoints elsewhere
            return False
        try:
            saved = saved_arguments(self._named_checkpoint(path, settings), self._get(self.config, "weights_only", True))
        except TrainerError as error:
            self._subparser().error(str(error), error)
        return self._subparser().set_saved_defaults("model", saved, None if self.subclass_mode_model else self.model_class)

    def _named_checkpoint(self, path: str, settings: Namespace) -> str | None:
        """Return the path that "best", "last" and "auto" stand for: a trainer knows, where earlier runs of its settings left theirs."""
        if path not in ("best", "last", "auto"):
            return path
        parser = self.init_parser()
        parser.add_component_args(self.trainer_class, "trainer")
        arguments = vars(parser.instantiate(Namespace(trainer=settings.clone())).trainer)
        found = _list(arguments.get("callbacks")) + _list(self.trainer_defaults.get("callbacks"))
        return checkpoint_for(self.trainer_class(**{**arguments, "callbacks": found}), path)

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is not False:
            self._own(self.config)["seed_everything"] = seed_everything(None if seed is True else seed)

    def instantiate_classes(self) -> None:
        """Make the objects."""
        self.config_init = self.parser.instantiate(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        if self.load_from_checkpoint_support:
            plain = json.loads(self._subparser().dump(self._own(self.config), format="json", skip_unset=False, skip_link_targets=False))
            for key, owner in (("model", self.model), ("data", self.datamodule)):
                if owner is not None:
                    remember(owner, plain.get(key) or {})
        self._take_over_optimizers()
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer; `kwargs` are arguments that replace configured ones."""
        arguments = {**self._get(self.config_init, "trainer", {}), **kwargs}
        found = _list(arguments.get("callbacks")) + [self._get(self.config_init, key) for key in self._subparser().callback_keys]
        found += _list(self.trainer_defaults.get("callbacks"))
        if self.save_config_callback is not None and not arguments.get("fast_dev_run"):
            found.append(self.save_config_callback(self._subparser(), self._own(self.config), **self.save_config_kwargs))
        return self.trainer_class(**{**arguments, "callbacks": found})

    def _take_over_optimizers(self) -> None:
        """Let the model's `configure_optimizers` make what the command line names, where it names an optimizer."""
        parser = self._subparser()
        optimizer, scheduler = self._maker(parser.optimizers), self._maker(parser.lr_schedulers)
        if optimizer is None:
            if scheduler is not None:
                raise MisconfigurationException("--lr_scheduler is given without --optimizer: name the optimizer too, for example --optimizer SGD.")
            return
        if overrides(self.model, TrainModule, "configure_optimizers"):
            warnings.warn(f"The command line's optimizer is used, and not {type(self.model).__qualname__}.configure_optimizers.", stacklevel=4)
        self.model.configure_optimizers = partial(configure_by, self.model, self.configure_optimizers, optimizer, scheduler)

    def _maker(self, added: dict[str, tuple[Any, str]]) -> Callable[[Any], Any] | None:
        """The function that makes the one optimizer (or scheduler) that is nobody's argument; None where there is none."""
        for key, (cls, link_to) in added.items():
            value = self._get(self.config_init, key)
            if link_to == "AUTOMATIC" and value:
                value = value.as_dict()
                return partial(cls, **value) if isinstance(cls, type) else partial(locate(value["class_path"]), **(value.get("init_args") or {}))
        return None

    # -- running -----------------------------------------------------------------------------------------------------------

    def _run_subcommand(self, name: str) -> None:
        """Call `before_<name>`, the trainer's function (or the method of that name, where a subclass has one), and `after_<name>`."""
        given = {argument: self.config_init[name][argument] for argument in self._subcommand_arguments[name]}
        given["model"] = self.model
        if self.datamodule is not None:
            given["datamodule"] = self.datamodule
        getattr(self, f"before_{name}", _nothing)()
        getattr(self, name, getattr(self.trainer, name))(**given)
        getattr(self, f"after_{name}", _nothing)()


def _nothing() -> None:
    pass


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _with_class_path(cls: type, arguments: Namespace) -> Namespace:
    return Namespace(class_path=f"{cls.__module__}.{cls.__qualname__}", init_args=arguments)
