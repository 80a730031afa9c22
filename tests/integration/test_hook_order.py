"""docs/loop.md is code: run with stand-ins, it must call the hooks that real runs call, in the same order.

A transcript is a list of "party.hook" lines. The real one comes from classes that override every hook; the page's from its own
functions, to which a `Plan` says how many epochs, batches and loaders there are.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from callbacks import Callback, ModelCheckpoint
from callbacks.callback import HOOKS as CALLBACK_HOOKS
from tests.helpers.modules import quiet
from trainer import DataModule, TrainModule
from trainer.module_hooks import MODULE_HOOKS

PAGE = Path(__file__).parents[2] / "docs" / "loop.md"
TRANSFER = {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
LOADERS = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
CONFIGURE = {"configure_callbacks", "configure_model", "configure_optimizers"}
STEPS = {"training_step", "validation_step", "test_step", "predict_step"}
SLOW = {"optimizer_step"}
TAKEN_OVER = {"backward", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"}
OF_DATA = {"prepare_data", "setup", "teardown", "on_exception", "state_dict", "load_state_dict"}


@dataclass
class Plan:
    """One program: what the real run is made of, and what the page is told."""

    fn: str = "fit"
    epochs: int = 2
    batches: int = 3
    accumulate: int = 2
    manual: bool = False
    slow: bool = False
    data: bool = True  # a DataModule; else the module gives the loaders
    val_loaders: int = 1
    val_every: int = 0  # optimizer steps; 0: once an epoch
    save: str = ""  # "epoch" or "step"
    resume: bool = False
    scheduler: str = "epoch"
    reload: int = 0
    max_steps: int = -1
    stop_in: int = -1  # the step in which a hook sets should_stop
    raise_in: int = -1  # the batch whose training_step raises
    bad_in: int = -1  # the batch whose loss is NaN, under bad_loss="skip"
    skip_in: int = -1  # the batch ahead of which on_train_batch_start returns -1
    log: list[str] = field(default_factory=list)

    @property
    def own(self) -> dict[str, set[str]]:
        """Which names each party overrides."""
        moved = TRANSFER | LOADERS
        module = (set(MODULE_HOOKS) - TRANSFER) | CONFIGURE | STEPS | TAKEN_OVER | (SLOW if self.slow else set())
        callback = set(CALLBACK_HOOKS) | {"state_dict", "load_state_dict"}
        return {"callback": callback, "module": module | (set() if self.data else moved), "data": OF_DATA | moved if self.data else set()}


# -- the page --------------------------------------------------------------------------------------------------------------


class Party:
    """Stands for module, callbacks or data on the page: whatever is called is noted, if the real party overrides it."""

    def __init__(self, plan: Plan, *names: str, then: Any = None) -> None:
        self.plan, self.names, self.then = plan, names, then

    def __getattr__(self, hook: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            names = self.names
            if names == ("data",) and not self.plan.data and hook in TRANSFER | LOADERS:
                names = ("module",)  # as the page says: the DataModule, else the module
            self.plan.log.extend(f"{name}.{hook}" for name in names if hook in self.plan.own[name])
            return self.then(hook, *args) if self.then is not None else None

        return call


def source() -> str:
    return "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))


def expected(plan: Plan) -> list[str]:
    """Run the page's code for `plan` and return what it called."""
    plan.log, code = [], source()
    if plan.fn == "test":
        head, body = code.split("def evaluate():")
        evaluate, end, rest = body.partition("def predict():")
        code = head + "def evaluate():" + evaluate.replace("validation", "test").replace("val_data", "test_data") + end + rest
    page: dict[str, Any] = {}
    now = {"epoch": 0 if plan.resume else -1, "step": 0, "last": False, "stop": False}

    def groups() -> Any:
        now["epoch"] += 1
        batches = [(object(), i) for i in range(plan.batches)]
        chunks = [batches[i : i + plan.accumulate] for i in range(0, plan.batches, plan.accumulate)]
        for n, chunk in enumerate(chunks):
            now.update(step=now["step"] + 1, last=n == len(chunks) - 1, in_epoch=n + 1)
            now["stop"] |= now["step"] == plan.stop_in
            yield chunk
        now["epoch_over"] = True

    def limit() -> bool:
        over = now["last"] and now["epoch"] + 1 >= plan.epochs
        return over or plan.epochs == 0 or now["step"] == plan.max_steps

    def answer(hook: str, *args: Any) -> Any:
        if hook == "on_train_batch_start" and args[1] == plan.skip_in:
            now["last"] = True
            return -1
        if hook == "training_step" and args[1] == plan.raise_in:
            raise ValueError
        if hook == "training_step" and plan.manual:
            page["manual_backward"](None)
            page["step"](None)
        if hook == "optimizer_step":
            args[-1]()
        return None

    def evaluation(loaders: int) -> list[tuple[Any, int, int]]:
        return [(object(), i, loader) for loader in range(loaders) for i in range(1 if now["step"] == 0 and plan.fn == "fit" else 2)]

    def reload() -> bool:
        due = bool(plan.reload) and now["epoch"] >= 0
        page["first_time"].asked *= not due
        return due

    scheduled = [] if plan.manual else ["scheduler"]
    exec(code, page)  # only definitions: the page's functions
    page |= {
        "module": Party(plan, "module", then=answer), "data": Party(plan, "data"), "callbacks": Party(plan, "callback"),
        "hooks": Party(plan, "callback", "module", then=answer), "first_process_of_node": True,
        "checkpoint": {"epoch": 0} if plan.resume else None, "limit_reached": limit, "stopping": lambda: now["stop"],
        "sanity_check_due": not plan.resume, "groups_of_batches": groups, "is_last": lambda group: now["last"],
        "validation_due": lambda: now["in_epoch"] % plan.val_every == 0 if plan.val_every else now["last"],
        "requested_saves": lambda: [1] if plan.save == "step" or (plan.save and now["last"]) else [],
        "evaluation_batches": lambda: evaluation(plan.val_loaders if plan.fn in ("fit", "validate") else 1),
        "epoch_schedulers": scheduled if plan.scheduler == "epoch" else [], "step_schedulers": scheduled if plan.scheduler == "step" else [],
        "optimizers": [Party(plan)], "metric": None, "epoch": 0, "device": "cpu", "first_time": _Once(), "reload_due": reload,
        "gradient_clip_val": None, "gradient_clip_algorithm": "norm",
        "loss_is_bad": lambda group: any(batch_idx == plan.bad_in for _, batch_idx in group), "bad_loss": "skip",
    }  # fmt: skip
    step = "manual_train_step" if plan.manual else "slow_train_step" if plan.slow else "train_step"
    step = "watched_train_step" if plan.bad_in >= 0 else step
    page["train_step"] = page[step]
    loop = {"fit": "fit", "validate": "evaluate", "test": "evaluate", "predict": "predict"}[plan.fn]
    try:
        page["run"](plan.fn, page[loop])
    except ValueError:
        plan.log.append("raised")
    return plan.log


class _Once:
    """True the first time it is asked."""

    asked = 0

    def __bool__(self) -> bool:
        self.asked += 1
        return self.asked == 1


# -- the real run ----------------------------------------------------------------------------------------------------------


def note(plan: Plan, party: str, cls: type) -> None:
    """Let `cls` override every hook of `party`, noting each call; signatures stay, since the loop looks at those of steps."""
    for name in plan.own[party]:
        original = getattr(cls, name)

        def method(self: Any, *args: Any, _original: Any = original, _line: str = f"{party}.{name}", **kwargs: Any) -> Any:
            plan.log.append(_line)
            return _original(self, *args, **kwargs)

        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        setattr(cls, name, method)


def parts(plan: Plan) -> tuple[Any, Any, Any]:
    """Return fresh (module, data module, callback) of a program."""

    def loader() -> DataLoader:
        return DataLoader(torch.arange(8.0).view(8, 1), batch_size=1)

    class Loaders:
        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            return [loader() for _ in range(plan.val_loaders)]

        test_dataloader = predict_dataloader = train_dataloader

    class Module(*(() if plan.data else (Loaders,)), TrainModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.automatic_optimization = not plan.manual

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == plan.skip_in else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == plan.raise_in:
                raise ValueError("on purpose")
            if self.global_step + 1 == plan.stop_in:
                self.trainer.should_stop = True
            loss = self.layer(batch).mean() * (float("nan") if batch_idx == plan.bad_in else 1.0)
            if plan.manual:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", self.layer(batch).mean())

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": plan.scheduler}}

    class Data(Loaders, DataModule):
        def state_dict(self) -> dict[str, Any]:
            return {"position": 1}

    class Noting(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"calls": 1}

    for party, cls in (("module", Module), ("data", Data), ("callback", Noting)):
        note(plan, party, cls)
    return Module(), Data() if plan.data else None, Noting()


def recorded(plan: Plan, folder: Path) -> list[str]:
    """Run the program and return what was called."""

    def make(**changes: Any) -> Any:
        module, data, callback = parts(plan)
        saver = [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1 if plan.save == "step" else None)] if plan.save else []
        trainer = quiet(
            callbacks=[callback, *saver], enable_checkpointing=bool(saver), accelerator="cpu", accumulate_grad_batches=plan.accumulate,
            limit_train_batches=plan.batches, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2, max_steps=plan.max_steps,
            reload_dataloaders_every_n_epochs=plan.reload, bad_loss="skip" if plan.bad_in >= 0 else None,
            num_sanity_val_steps=1, val_check_interval=plan.val_every or None, **{"max_epochs": plan.epochs, **changes},
        )  # fmt: skip
        return trainer, module, data

    path = None
    if plan.resume:
        trainer, module, data = make(max_epochs=1)
        trainer.fit(module, datamodule=data)
        path = next(folder.glob("*.ckpt"))
    plan.log.clear()
    trainer, module, data = make()
    try:
        getattr(trainer, plan.fn)(module, datamodule=data, ckpt_path=path)
    except ValueError:
        plan.log.append("raised")
    return list(plan.log)


PROGRAMS = {
    "fit": Plan(save="epoch"),
    "module_gives_loaders": Plan(data=False, epochs=1),
    "step_schedulers_and_saves": Plan(scheduler="step", save="step"),
    "validation_interval": Plan(val_every=1, batches=5),
    "loaders_asked_for_again": Plan(reload=1),
    "several_loaders": Plan(val_loaders=2),
    "resume": Plan(resume=True, save="epoch"),
    "slow": Plan(slow=True, batches=5),
    "manual": Plan(manual=True, accumulate=1),
    "stop_in_mid_epoch": Plan(stop_in=1, batches=5),
    "max_steps": Plan(max_steps=3, batches=3),
    "rest_of_epoch_skipped": Plan(skip_in=2, batches=5),
    "bad_loss_last_in_its_step": Plan(bad_in=1, batches=4, scheduler="step", save="step"),
    "bad_loss_first_in_its_step": Plan(bad_in=2, batches=5),
    "error": Plan(raise_in=1),
    "nothing_to_do": Plan(epochs=0),
    "validate": Plan("validate"),
    "test": Plan("test"),
    "predict": Plan("predict"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Nothing to do", "ignore:ModelCheckpoint", "ignore:Bad loss")
def test_the_page_calls_what_a_run_calls(name: str, tmp_path: Path) -> None:
    plan = PROGRAMS[name]
    real = recorded(plan, tmp_path / "saved")
    page = expected(plan)
    assert real == page
    assert len(real) > 10


def test_every_hook_is_on_the_page() -> None:
    called = set(re.findall(r"\b(?:module|hooks|callbacks|data)\.(\w+)\(", source()))
    test_hooks = {name for name in MODULE_HOOKS if "_test_" in name}
    assert all(name in PAGE.read_text() for name in test_hooks)
    wanted = MODULE_HOOKS | CALLBACK_HOOKS | OF_DATA | CONFIGURE | STEPS | TAKEN_OVER | SLOW | LOADERS | TRANSFER
    assert wanted - called - test_hooks - {"test_step", "test_dataloader"} == set()
