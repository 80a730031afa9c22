"""ModelPruning: set weights to zero while a module is trained, with torch.nn.utils.prune."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

from callbacks import pruning_choice
from callbacks import pruning_masks as masked
from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["ModelPruning"]


class ModelPruning(Callback):
    """Prunes parameters after each epoch; what is pruned stays so, and the next time `amount` is taken of what is left.

    It happens at the boundary after the epoch. A save that was asked for ahead of it, as those of a validation are, still gets the weights that
    were validated. All ranks use rank 0's masks. A resume goes on to the bit: checkpoints keep masks, what is behind them and, where weights are
    to be put back, those of the beginning.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured", "random_structured", or a class of the kind
            `torch.nn.utils.prune.BasePruningMethod` (which needs `use_global_unstructured`).
        parameters_to_prune: pairs (layer, name of its parameter); empty for all of `parameter_names`, but those of the module itself
            and of `MultiheadAttention.out_proj`, whose `forward` nobody calls.
        parameter_names: "weight", "bias" or both; None for both.
        use_global_unstructured: compare all the parameters with each other, not each with itself.
        amount: a part (float, 0 to 1) or a number (int) of the values, or a function of the epoch that returns one; 0 prunes nothing.
        apply_pruning: whether to prune, or a function of the epoch that says so.
        make_pruning_permanent: at the end of the fit, and in checkpoints, parameters are plain ones with zeros in them. Otherwise they stay
            torch's `weight_orig` and `weight_mask`.
        use_lottery_ticket_hypothesis: after pruning put the other values back to those at the start of the fit; or a function of the
            epoch that says so. Optimizers keep their state.
        resample_parameters: put them to new values of the layer's `reset_parameters()` in the place of those.
        pruning_dim: the dimension that is pruned by slices ("..._structured").
        pruning_norm: the norm of a slice ("ln_structured").
        verbose: rank 0 prints how much is pruned (1), for each parameter as well (2).
        prune_on_train_epoch_end: False prunes after each validation instead.

    Raises:
        MisconfigurationException: an unknown function, name or amount, a structured one without dimension or norm or with
            `use_global_unstructured`; when a fit starts, for parameters that the module does not have, a strategy that shards them, a callback
            that averages weights and a checkpoint of another module; for an amount beyond what is left.
    """

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Sequence[tuple[Module, str]] = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: float | Callable[[int], float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self.pruning_fn, self._prune_layers = pruning_choice.method(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self._parameter_names = pruning_choice.check_names(parameter_names or self.PARAMETER_NAMES)
        self.amount = amount if callable(amount) else pruning_choice.check_amount(amount)
        if verbose not in (0, 1, 2):
            raise MisconfigurationException(f"ModelPruning(verbose={verbose!r}): expected 0, 1 or 2.")
        self._verbose = verbose
        self._parameters_to_prune: Any = parameters_to_prune
        self._apply_pruning, self._make_pruning_permanent = apply_pruning, make_pruning_permanent
        self._use_lottery_ticket_hypothesis, self._resample_parameters = use_lottery_ticket_hypothesis, resample_parameters
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._due: int | None = None  # the epoch after which pruning is asked for, and still to come
        self._kept: dict[str, Any] = {}  # masks, values behind them and first values, of a checkpoint or of the fit before
        self._forget()

    def _forget(self) -> None:
        """What belongs to one run in one process."""
        self._module: Any = None
        self._layers: list[tuple[Module, str]] = []
        self._paths: dict[int, str] = {}
        self._copies: dict[int, Module] = {}  # layers to draw new values from
        self._set: dict[str, torch.Tensor] = {}  # pruned weights as pruning left them; the next forward makes new ones
        self._adopted: dict[str, torch.Tensor] = {}  # masks that came with the weights of a checkpoint
        self._bare = False  # masks were taken off, to be put back when the fit starts
        self._hook: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": None, "_layers": [], "_paths": {}, "_copies": {}, "_set": {}, "_adopted": {}, "_hook": None}

    # -- what is pruned ----------------------------------------------------------------------------------------------------

    def filter_parameters_to_prune(self, parameters_to_prune: Sequence[tuple[Module, str]] = ()) -> Sequence[tuple[Module, str]]:
        """Return those of the pairs (layer, name) that are pruned; override it to choose."""
        return parameters_to_prune

    sanitize_parameters_to_prune = staticmethod(pruning_choice.pairs)

    def _settle(self, module: Module) -> None:
        """Find the layers. Those that were given are known by their names from now on: a run in other processes has copies of them."""
        named = self._parameters_to_prune is not None and all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in self._parameters_to_prune)
        given = [(module.get_submodule(pair[0]), pair[1]) for pair in self._parameters_to_prune] if named else self._parameters_to_prune or []
        self._layers = list(self.filter_parameters_to_prune(self.sanitize_parameters_to_prune(module, given, self._parameter_names)))
        self._paths = {id(layer): path for path, layer in module.named_modules()}
        self._parameters_to_prune = [(self._paths[id(layer)], name) for layer, name in given]

    def _path(self, layer: Module, name: str) -> str:
        return f"{self._paths[id(layer)]}.{name}"

    # -- when --------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._forget()
        if trainer.ckpt_path is not None:
            self._hook = module.register_load_state_dict_pre_hook(lambda own, state, *_: self._adopt(own, state, stage == "fit"))
        if stage != "fit":
            return
        if any(hasattr(callback, "n_averaged") or getattr(callback, "average_every", None) is not None for callback in trainer.callbacks):
            raise MisconfigurationException("ModelPruning: averages of weights (over steps or ranks) are not pruned. Leave the callback that averages out.")
        if trainer.global_step == 0:  # a new training; a checkpoint is read after this
            self._kept, self._due = {}, None
        self._note(module)
        self._bare = any(masked.pruned(module))
        masked.take_off(module, permanent=False)

    def _adopt(self, module: Module, state: dict[str, Any], trains: bool) -> None:
        """Take masks out of weights that are loaded, where the module has plain parameters."""
        own = dict(module.named_parameters())
        for key in [key for key in state if key.endswith("_mask")]:
            name = key.removesuffix("_mask")
            if name in own and f"{name}_orig" in state:
                mask, values = state.pop(key), state.pop(f"{name}_orig")
                state[name] = values if trains else mask.to(values.dtype) * values
                self._adopted[name] = mask.bool().cpu()

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self._kept, self._due = {"masks": self._adopted}, None  # all that a file of others can have; `load_state_dict` follows for one of ours

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if any(hasattr(p, "to_local") or p.is_meta for p in module.parameters()):
            raise MisconfigurationException(f"ModelPruning: strategy {trainer.strategy.name!r} keeps parts of weights on other ranks. Use 'ddp'.")
        self._settle(module)
        self._kept.setdefault("seed", trainer.broadcast(torch.initial_seed()))
        self._kept.setdefault("draws", 0)
        if self._resample_parameters:
            self._copies = {id(layer): copy.deepcopy(layer) for layer, _ in self._layers if hasattr(layer, "reset_parameters")}
        if self._use_lottery_ticket_hypothesis:
            first = self._kept.setdefault("first", {})
            for layer, name in self._layers:
                first.setdefault(self._path(layer, name), getattr(layer, name).detach().cpu().clone())
        self._module = module
        self._put_back(module)

    def _put_back(self, module: Any) -> None:
        """Put the masks that there were on again."""
        own, hidden = dict(module.named_parameters()), self._kept.get("hidden", {})
        for path, mask in self._kept.get("masks", {}).items():
            if path not in own or own[path].shape != mask.shape:
                raise MisconfigurationException(f"ModelPruning: the masks are of another module, which has {path!r} with shape {tuple(mask.shape)}.")
            if path in hidden:
                with torch.no_grad():
                    own[path][~mask.to(own[path].device)] = hidden[path].to(own[path].device)
            layer, _, name = path.rpartition(".")
            masked.put_on(module.get_submodule(layer), name, mask)
        masked.freshen(module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self._due is not None:  # the checkpoint was saved ahead of it
            self._prune(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._prune_on_train_epoch_end:
            self._ask(trainer)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not self._prune_on_train_epoch_end and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._ask(trainer)

    def _ask(self, trainer: Any) -> None:
        self._due = trainer.current_epoch
        trainer.at_boundary(self._prune)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self._make_pruning_permanent:
            self._note(module)
            masked.take_off(module, permanent=True)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """A resumed fit with nothing left to do still owes the pruning after its last epoch."""
        if self._due is not None:
            self._prune(trainer)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """After an exception as well: the module is left as `make_pruning_permanent` says."""
        if self._hook is not None:
            self._hook.remove()
        if self._module is not None:
            self.on_train_end(trainer, module)
            masked.freshen(module)
        elif self._bare:  # the fit did not get that far
            self._put_back(module)
        self._forget()

    # -- pruning -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _prune(self, trainer: Any) -> None:
        """Prune as is due. Collective."""
        epoch, self._due = self._due, None
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not _decide(self._apply_pruning, epoch) or not amount:
            return
        self._check_read(trainer)
        before = _count(self._layers) if self._verbose else []
        with self._own_draws():
            try:
                self.apply_pruning(pruning_choice.check_amount(amount))
            except (ValueError, IndexError, TypeError) as error:  # of torch, which knows no epoch
                raise MisconfigurationException(f"ModelPruning(amount={amount!r}) does not work after epoch {epoch}: {error}") from error
            trainer.strategy.sync_buffers()  # of equal values another device may choose another
            if _decide(self._use_lottery_ticket_hypothesis, epoch):
                self.apply_lottery_ticket_hypothesis()
        self._set = masked.freshen(self._module)
        if self._verbose:
            self._tell(trainer, epoch, before)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Draw at random the same on all ranks, and as if the checkpoint had been saved at another point; the run's own streams stay."""
        devices = {p.device for p in self._module.parameters()}
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            torch.manual_seed(self._kept["seed"] + self._kept["draws"])
            self._kept["draws"] += 1
            yield

    def apply_pruning(self, amount: float) -> None:
        """Prune `amount` of what is left of the parameters, by their values of now."""
        masked.freshen(self._module)
        with masked.order_kept(*dict.fromkeys(layer for layer, _ in self._layers)), torch.no_grad():
            self._prune_layers(self._layers, amount)

    @torch.no_grad()
    def apply_lottery_ticket_hypothesis(self) -> None:
        """Put the parameters back to their values at the start of the fit, or (`resample_parameters`) to new ones; the masks stay."""
        drawn = {key: copy.deepcopy(layer) for key, layer in self._copies.items()}
        for layer in drawn.values():
            layer.reset_parameters()
        for layer, name in self._layers:
            values = getattr(drawn[id(layer)], name) if id(layer) in drawn else self._kept["first"][self._path(layer, name)]
            getattr(layer, f"{name}_orig").copy_(values)

    def _check_read(self, trainer: Any) -> None:
        """Say so where nobody called a layer since it was pruned: then its mask did nothing, and it did not learn."""
        idle = [path for path, layer, name in masked.pruned(self._module) if getattr(layer, name) is self._set.get(path)]
        if idle:
            trainer.warn(
                f"ModelPruning: the layer of {idle[0]} was not called since it was pruned, so it is not trained. If another layer reads its "
                "weight, leave it out of parameters_to_prune."
            )

    def make_pruning_permanent(self, module: Module) -> None:
        """Make the pruned parameters of a module plain ones with zeros in them."""
        masked.take_off(module, permanent=True)

    def _tell(self, trainer: Any, epoch: int, before: list[tuple[int, int]]) -> None:
        after = _count(self._layers)
        lines = [("all", *(tuple(map(sum, zip(*counts, strict=True))) for counts in (before, after)))]
        if self._verbose == 2:
            lines += [(self._path(layer, name), old, new) for (layer, name), old, new in zip(self._layers, before, after, strict=True)]
        for what, (old, total), (new, _) in lines:
            trainer.print(f"ModelPruning, epoch {epoch}: {what}: {old}/{total} ({old / total:.2%}) -> {new}/{total} ({new / total:.2%})")

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _note(self, module: Module) -> None:
        """Remember the masks that are on, and where a checkpoint does not hold it what is behind them."""
        if found := masked.masks(module):
            self._kept.update(masks=found, hidden=masked.values_behind(module) if self._make_pruning_permanent else {})

    def state_dict(self) -> dict[str, Any]:
        if self._module is not None:
            self._note(self._module)
        return {"due": self._due, **self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = {**self._kept, **{key: value for key, value in state_dict.items() if key != "due"}}
        self._due = state_dict["due"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self._make_pruning_permanent:
            checkpoint["state_dict"] = masked.plain_state(checkpoint["state_dict"])

    def reshape(self, module: Module, weights: dict[str, torch.Tensor]) -> None:
        """Prune the caller's module as that of the ranks is whose weights come back."""
        own = dict(module.named_parameters())
        for key, mask in weights.items():
            path = key.removesuffix("_mask")
            if path != key and path in own and f"{path}_orig" in weights:
                layer, _, name = path.rpartition(".")
                masked.put_on(module.get_submodule(layer), name, mask)


def _decide(choice: bool | Callable[[int], bool], epoch: int) -> bool:
    return bool(choice(epoch)) if callable(choice) else bool(choice)


def _count(layers: Sequence[tuple[Module, str]]) -> list[tuple[int, int]]:
    """Return (values pruned, values) of each parameter."""
    found = []
    for layer, name in layers:
        mask = getattr(layer, f"{name}_mask", None)
        found.append((0 if mask is None else int((mask == 0).sum()), getattr(layer, name).numel()))
    return found
