"""ModelPruning: the masks of torch.nn.utils.prune called by hand, what checkpoints hold, and resumes that are exact to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientSync,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
)
from tests.helpers.modules import Net, assert_same, loader, quiet, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.resume import EveryStep, assert_equal
from trainer import MisconfigurationException, outcome
from trainer.job import Job

ROWS = Net.rows(16, torch.float64)


class Deep(Net):
    """With dropout and AdamW, whose decay moves what is behind the masks as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.Dropout(0.2))
        self.end: Any = None
        self.last: Any = None  # the parameters of the last step, also what the masks hide

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.last = {name: p.detach().clone() for name, p in self.named_parameters()}
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)

    def on_train_end(self) -> None:
        self.end = self.optimizers().state_dict()


def fit(callback: Any, module: Any = None, *, folder: Any = None, resume: Any = None, more: Any = (), validate: bool = False, **settings: Any) -> Any:
    module = module or Net()
    callbacks = [callback, *([EveryStep(folder)] if folder else []), *more]
    trainer = quiet(**{"accelerator": "cpu", "max_epochs": 3, "seed": 4, "precision": "64-true", **settings, "callbacks": callbacks})
    data = loader(ROWS, batch_size=8 // settings.get("devices", 1))
    trainer.fit(module, data, data if validate else None, ckpt_path=resume)
    return module


def by_hand(after_epoch: Any, epochs: int = 3) -> Net:
    """The same steps in a plain loop; `after_epoch(layers, epoch)` prunes."""
    module = Net().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for rows in ROWS.split(8):
            optimizer.zero_grad()
            module.loss(rows).backward()
            optimizer.step()
        module.loss(ROWS)  # torch sets a pruned `weight` when its layer is called; prune by the weights of now
        after_epoch([module.layers[0], module.layers[2]], epoch)
    for layer in (module.layers[0], module.layers[2]):
        for name in ("weight", "bias"):
            if hasattr(layer, f"{name}_mask"):
                prune.remove(layer, name)
    return module


def everything(layers: Any) -> Any:
    return [(layer, name) for name in ("weight", "bias") for layer in layers]


def seeded_random(layers: Any, epoch: int) -> None:
    torch.manual_seed(4 + epoch)
    prune.global_unstructured(everything(layers), prune.RandomUnstructured, amount=7)


class Smallest(prune.BasePruningMethod):
    """Prunes the one value that is nearest to zero."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        mask = default_mask.clone()
        mask[t.abs().argmin()] = 0
        return mask


def slices(layers: Any, epoch: int) -> None:
    for layer in layers:
        prune.ln_structured(layer, "weight", amount=0.3, n=1, dim=1)


DENSE = {"use_lottery_ticket_hypothesis": False}
CASES = {
    "l1": (ModelPruning("l1_unstructured", amount=0.4, **DENSE), lambda found, epoch: prune.global_unstructured(everything(found), prune.L1Unstructured, amount=0.4)),
    "one layer": (
        ModelPruning("L1_unstructured", amount=lambda epoch: 2 * epoch, parameter_names=["weight"], use_global_unstructured=False, **DENSE),
        lambda found, epoch: [prune.l1_unstructured(layer, "weight", 2 * epoch) for layer in found if epoch],
    ),
    "slices": (
        ModelPruning("ln_structured", None, ["weight"], False, 0.3, pruning_dim=1, pruning_norm=1, **DENSE), slices
    ),
    "random": (ModelPruning("random_unstructured", amount=7, **DENSE), seeded_random),
    "class": (ModelPruning(Smallest, **DENSE), lambda found, epoch: prune.global_unstructured(everything(found), Smallest)),
    "every other epoch": (
        ModelPruning("l1_unstructured", amount=5, apply_pruning=lambda epoch: epoch != 1, **DENSE),
        lambda found, epoch: epoch != 1 and prune.global_unstructured(everything(found), prune.L1Unstructured, amount=5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_masks_and_weights_are_those_of_torch_called_by_hand(case: str) -> None:
    callback, prune_by_hand = CASES[case]
    module, expected = fit(callback), by_hand(prune_by_hand)
    assert list(weights(module)) == list(weights(Net()))  # plain names, in their old order, in which optimizers know them
    assert_same(weights(module), weights(expected), atol=0)
    assert all(torch.equal(mine == 0, theirs == 0) for mine, theirs in zip(module.parameters(), (dict(expected.named_parameters())[n] for n in weights(module)), strict=True))


def test_the_amount_is_taken_of_what_is_left_and_the_optimizer_goes_on_with_the_same_parameters(capsys: Any) -> None:
    seen = []

    def look(trainer: Any, module: Any) -> None:
        layer, owned = module.layers[0], trainer.optimizers[0].param_groups[0]["params"]
        masks = [int((buffer == 0).sum()) for buffer in module.buffers()]
        seen.append((sum(masks), [id(p) for p in owned] == [id(p) for p in module.parameters()], prune.is_pruned(layer)))

    callback = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.5, verbose=2, **DENSE)
    module = fit(callback, more=[LambdaCallback(on_train_epoch_start=look)], enable_progress_bar=False)
    assert seen == [(0, True, False), (20, True, True), (30, True, True)]  # of 40
    assert sum(int((p == 0).sum()) for name, p in module.named_parameters() if "weight" in name) == 35 and not prune.is_pruned(module)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "ModelPruning, epoch 0: all: 0/40 (0.00%) -> 20/40 (50.00%)" and len(said) == 9
    assert said[6] == "ModelPruning, epoch 2: all: 30/40 (75.00%) -> 35/40 (87.50%)" and said[7].startswith("ModelPruning, epoch 2: layers.0.weight: ")


@pytest.mark.parametrize("named", [False, True])
def test_a_lottery_ticket_has_the_weights_of_the_beginning(named: bool) -> None:
    module = Net()
    first = weights(module.double())
    given = [(module.layers[0], "weight")] if named else ()
    fit(ModelPruning("l1_unstructured", given, amount=0.25), module)
    moved = {name for name, before in first.items() if not torch.equal(weights(module)[name], before * (weights(module)[name] != 0))}
    zeros = {name: int((tensor == 0).sum()) for name, tensor in weights(module).items()}
    if named:
        assert moved == {"layers.0.bias", "layers.2.weight", "layers.2.bias"} and zeros["layers.0.weight"] == 8 + 6 + 4  # quarters of 32, 24, 18
    else:
        assert moved == set() and sum(zeros.values()) == 12 + 9 + 7  # quarters of 49, 37, 28
    kept = fit(ModelPruning("l1_unstructured", amount=0.25, use_lottery_ticket_hypothesis=lambda epoch: epoch == 0))
    assert not torch.equal(weights(kept)["layers.0.weight"], first["layers.0.weight"] * (weights(kept)["layers.0.weight"] != 0))


def test_parameters_can_be_drawn_anew() -> None:
    module = fit(ModelPruning("l1_unstructured", amount=3, resample_parameters=True), max_epochs=1)
    torch.manual_seed(4)
    fresh = Net().double()
    for layer in (fresh.layers[0], fresh.layers[2]):
        layer.reset_parameters()
    found = weights(module)
    assert sum(int((tensor == 0).sum()) for tensor in found.values()) == 3
    assert_same(found, {name: tensor * (found[name] != 0) for name, tensor in weights(fresh).items()}, atol=0)


PLANS = {
    "random": lambda: ModelPruning("random_unstructured", amount=6, **DENSE),
    "ticket": lambda: ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lambda epoch: epoch == 1),
    "kept apart": lambda: ModelPruning("random_unstructured", amount=0.3, make_pruning_permanent=False),
    "after validation": lambda: ModelPruning("random_unstructured", amount=4, prune_on_train_epoch_end=False, resample_parameters=True),
}


@pytest.mark.filterwarnings("ignore:Nothing to do", "ignore:There is a validation_step")
@pytest.mark.parametrize("plan", PLANS)
def test_a_resume_is_exact_to_the_bit(plan: str, tmp_path: Path) -> None:
    settings = {"max_epochs": 4, "validate": plan == "after validation"}
    whole = fit(PLANS[plan](), Deep(), folder=tmp_path, **settings)
    for step in (1, 2, 3, 4, 6, 8):  # inside and at the end of epochs of 2 steps
        resumed = fit(PLANS[plan](), Deep(), resume=tmp_path / f"step={step}.ckpt", **settings)
        assert_equal(weights(resumed), weights(whole))
        if step < 8:
            assert_equal([resumed.end, resumed.last], [whole.end, whole.last])


def test_a_validated_checkpoint_holds_the_weights_that_were_validated(tmp_path: Path) -> None:
    def keeper() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{epoch}", monitor="val", save_top_k=-1)

    def plan() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=10)

    whole = fit(plan(), Deep(), more=[keeper()], validate=True)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    module = Deep().double()
    module.load_state_dict(saved["state_dict"])
    assert all((p != 0).all() for p in module.parameters())  # pruning, and going back to the first weights, came after
    trainer = quiet(accelerator="cpu", precision="64-true")
    (numbers,) = trainer.validate(module, loader(ROWS, batch_size=8), verbose=False)
    assert numbers["val"] == pytest.approx(saved["metrics"]["val"], abs=1e-6)
    resumed = fit(plan(), Deep(), resume=tmp_path / "epoch=0.ckpt", validate=True)
    assert_equal(weights(resumed), weights(whole))


def test_checkpoints_are_plain_or_hold_masks(tmp_path: Path) -> None:
    usual = ModelCheckpoint(tmp_path / "plain", "{epoch}", save_top_k=-1)
    module = fit(ModelPruning("l1_unstructured", amount=9, **DENSE), more=[usual])
    saved = torch.load(tmp_path / "plain" / "epoch=1.ckpt", weights_only=True)["state_dict"]
    assert list(saved) == list(weights(Net())) and sum(int((tensor == 0).sum()) for tensor in saved.values()) == 18
    assert sum(int((p == 0).sum()) for p in Net.load_from_checkpoint(tmp_path / "plain" / "epoch=1.ckpt").parameters()) == 18

    apart = fit(ModelPruning("l1_unstructured", amount=9, make_pruning_permanent=False, **DENSE), folder=tmp_path / "apart")
    saved = torch.load(tmp_path / "apart" / "step=5.ckpt", weights_only=True)["state_dict"]
    assert {"layers.0.weight_orig", "layers.0.weight_mask"} <= saved.keys() and "layers.0.weight" not in saved
    assert prune.is_pruned(apart.layers[0]) and torch.equal(apart.layers[0].weight, module.layers[0].weight)

    table = torch.load(tmp_path / "apart" / "step=5.ckpt", weights_only=True)
    table["callbacks"].clear()  # as in a file of Lightning, whose masks are those of the weights alone
    torch.save(table, tmp_path / "foreign.ckpt")
    resumed = fit(ModelPruning("l1_unstructured", amount=9, **DENSE), resume=tmp_path / "foreign.ckpt")
    assert_same(weights(resumed), weights(module), atol=0)

    class Shown(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("zeros", sum(float((p == 0).sum()) for p in self.parameters()))

    trainer = quiet(accelerator="cpu", callbacks=[ModelPruning("l1_unstructured")])
    assert trainer.validate(Shown(), loader(ROWS[:1]), ckpt_path=tmp_path / "apart" / "step=5.ckpt", verbose=False) == [{"zeros": 18.0}]

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stack = self.layers
            del self.layers

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {key.replace("layers", "stack"): value for key, value in checkpoint["state_dict"].items()}

    with pytest.raises(MisconfigurationException, match=r"of another module, which has 'layers.0.weight' with shape \(8, 4\)"):
        fit(ModelPruning("l1_unstructured"), Other(), resume=tmp_path / "plain" / "epoch=1.ckpt")


@pytest.mark.parametrize("permanent", [True, False])
def test_a_second_fit_goes_on_and_so_does_one_after_an_exception(permanent: bool) -> None:
    def plan() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=5, make_pruning_permanent=permanent, use_lottery_ticket_hypothesis=lambda epoch: epoch == 2)

    class Broken(Net):
        fails, refuses = True, False

        def configure_model(self) -> None:
            if self.refuses:
                raise KeyboardInterrupt

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2 and self.fails:
                raise KeyboardInterrupt

        def configure_optimizers(self) -> Any:  # it keeps nothing between fits
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Whole(Broken):
        fails = False

    whole, module, data = fit(plan(), Whole(), max_epochs=4), Broken(), loader(ROWS, batch_size=8)
    trainer = quiet(accelerator="cpu", max_epochs=1, seed=4, precision="64-true", callbacks=[plan()])
    trainer.fit(module, data)
    trainer.max_epochs = 4
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, data)
    assert prune.is_pruned(module.layers[0]) != permanent
    module.fails = False
    trainer.fit(module, data)
    assert_equal(weights(module), weights(whole))
    before, trainer.max_epochs, module.refuses = weights(module), 9, True
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, data)
    assert_equal(weights(module), before)
    other = Net()  # a new training
    fit(trainer.callbacks[0], other, max_epochs=1)
    assert sum(int((getattr(layer, name) == 0).sum()) for layer in (other.layers[0], other.layers[2]) for name in ("weight", "bias")) == 5


def _on_ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    sliced = {"strategy": "ddp", "devices": 2}
    whole = fit(ModelPruning("l1_unstructured", amount=8, **DENSE), folder=folder, **sliced)
    resumed = fit(ModelPruning("l1_unstructured", amount=8, **DENSE), resume=folder / "step=3.ckpt", **sliced)
    drawn = fit(ModelPruning("random_unstructured", amount=8, resample_parameters=True), **sliced)
    return [weights(whole), weights(resumed), weights(drawn)]


def test_two_ranks_prune_alike_and_as_one_process_does(tmp_path: Path) -> None:
    first, second = run_ranks(_on_ranks, folder=tmp_path)
    assert_equal(first, second)
    alone = weights(fit(ModelPruning("l1_unstructured", amount=8, **DENSE)))
    assert {name: (tensor == 0).tolist() for name, tensor in first[0].items()} == {name: (tensor == 0).tolist() for name, tensor in alone.items()}
    assert_same(first[0], alone)
    assert_equal(first[1], first[0])
    assert_same(first[2], weights(fit(ModelPruning("random_unstructured", amount=8, resample_parameters=True))), atol=0)


def test_what_comes_back_from_other_processes_is_pruned_as_it_was_there() -> None:
    theirs, mine = Net(), Net()
    callbacks = [ModelPruning("l1_unstructured", [(m.layers[0], "weight")], amount=9, make_pruning_permanent=False) for m in (theirs, mine)]
    trainers = [quiet(accelerator="cpu", max_epochs=1, callbacks=[callback]) for callback in callbacks]
    trainers[0].fit(theirs, loader(Net.rows(16), batch_size=8))
    jobs = [Job("fit", module, None, {}, None) for module in (theirs, mine)]
    outcome.apply(trainers[1], jobs[1], outcome.collect(trainers[0], jobs[0], None, trainers[0].callbacks))
    assert_equal(weights(mine), weights(theirs))
    assert int((mine.layers[0].weight_mask == 0).sum()) == 9
    trainers[1].max_epochs = 2
    trainers[1].fit(mine, loader(Net.rows(16), batch_size=8))  # its own layers, not copies of those of the ranks
    assert int((mine.layers[0].weight_mask == 0).sum()) == 18


def test_compiled_steps_and_finetuning_see_the_masks(tmp_path: Path) -> None:
    def plan() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=8, **DENSE)

    compiled = fit(plan(), compile={"backend": "eager"})
    assert_same(weights(compiled), weights(fit(plan())), atol=1e-12)

    class Later(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.layers[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.layers[0], optimizer)

    class Tuned(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)

    whole = fit(plan(), Tuned(), folder=tmp_path, more=[Later()])
    for step in (2, 3):
        assert_equal(weights(fit(plan(), Tuned(), resume=tmp_path / f"step={step}.ckpt", more=[Later()])), weights(whole))


class Attentive(Net):
    """Has an attention layer, which reads the weight of its out_proj without calling it, and so does a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.reader = nn.Linear(4, 4)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        rows = self.attention(batch[:, :4], batch[:, :4], batch[:, :4])[0]
        return super().loss(torch.cat([rows @ self.reader.weight.detach().to(rows.dtype), batch[:, 4:]], 1))


def test_layers_that_nobody_calls_are_left_out_or_named() -> None:
    module = Attentive()
    pairs = ModelPruning.sanitize_parameters_to_prune(module)
    assert {id(layer) for layer, _ in pairs} == {id(module.layers[0]), id(module.layers[2]), id(module.reader)}
    with pytest.warns(UserWarning, match="the layer of reader.weight was not called since it was pruned"):
        fit(ModelPruning("l1_unstructured", parameter_names=["weight"], amount=3, **DENSE), module)
    with pytest.raises(MisconfigurationException, match="'weight' of NonDynamicallyQuantizableLinear cannot be pruned"):
        fit(ModelPruning("l1_unstructured", [(module.attention.out_proj, "weight")]), module)


def test_the_choice_can_be_overridden() -> None:
    class LastOnly(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            return [(layer, name) for layer, name in parameters_to_prune if layer.out_features == 1]

    module = fit(LastOnly("l1_unstructured", amount=0.5, **DENSE), max_epochs=1)
    assert {name: int((tensor == 0).sum()) for name, tensor in weights(module).items() if (tensor == 0).any()} == {"layers.2.weight": 4}
    callback = ModelPruning("l1_unstructured", make_pruning_permanent=False, **DENSE)
    apart = fit(callback, max_epochs=1)
    callback.make_pruning_permanent(apart)
    assert list(weights(apart)) == list(weights(Net()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruning_fn": "l1_unstructerd"}, "expected one of .*Did you mean 'l1_unstructured'"),
        ({"pruning_fn": prune.L1Unstructured(3)}, "a class .no object of it."),
        ({"pruning_fn": prune.L1Unstructured, "use_global_unstructured": False}, "needs use_global_unstructured=True"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "set use_global_unstructured=False"),
        ({"pruning_fn": "random_structured", "use_global_unstructured": False}, "needs pruning_dim"),
        ({"pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 0}, "needs pruning_norm"),
        ({"parameter_names": ["kernel"]}, "expected 'weight', 'bias' or both"),
        ({"amount": "half"}, "expected a part from 0.0 to 1.0"),
        ({"amount": 1.5}, "expected a part from 0.0 to 1.0"),
        ({"amount": True}, "expected a part from 0.0 to 1.0"),
        ({"verbose": 3}, "expected 0, 1 or 2"),
    ],
)
def test_arguments_are_checked(arguments: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ModelPruning(**{"pruning_fn": "l1_unstructured", **arguments})


def test_what_cannot_be_pruned_is_named_before_the_first_step() -> None:
    module = Net()
    for pairs, message in (
        ([module.layers[0]], "is no pair .layer, name of its parameter."),
        ([(nn.Linear(2, 2), "weight")], "is no layer of the module"),
        ([(module.layers[0], "kernel")], "has no parameter 'kernel'"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            fit(ModelPruning("l1_unstructured", pairs), module)
    for averages in (EMAWeightAveraging(), GradientSync(average_every=2)):
        with pytest.raises(MisconfigurationException, match="averages of weights .* are not pruned"):
            fit(ModelPruning("l1_unstructured"), more=[averages])
    sharded = Net().to("meta")
    with pytest.raises(MisconfigurationException, match="strategy 'single_device' keeps parts of weights on other ranks"):
        ModelPruning("l1_unstructured").on_fit_start(quiet(accelerator="cpu"), sharded)
    with pytest.raises(MisconfigurationException, match="amount=25.* does not work after epoch 1: .*should be smaller"):
        fit(ModelPruning("l1_unstructured", amount=25, **DENSE), module)
    with pytest.raises(MisconfigurationException, match="amount=2.0.: expected a part"):
        fit(ModelPruning("l1_unstructured", amount=lambda epoch: 2.0), module)
