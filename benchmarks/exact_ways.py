"""How each trainer runs the cases of benchmarks/exact.py: the programs that its own documentation would have one write."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

STOP, STEPS_AN_EPOCH, SAMPLES = 9, 6, [i / 12 for i in range(12)]  # of (c), in batches of 2


class Scalar(nn.Module):
    """w, from 0, as Hugging Face's Trainer and accelerate take it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.w * x).mean(), "product": self.w * x}


class Level(Scalar):
    """Its loss is the mean of the samples, whatever w is."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (x + 0 * self.w).mean(), "value": x}


class Noisy(nn.Module):
    """A network with dropout that notes the samples it sees."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += x.tolist()
        return {"loss": (self.layers(x[:, None])[:, 0] - x.square()).square().mean()}

    def result(self) -> tuple[list[float], list[float]]:
        return torch.cat([p.detach().flatten() for p in self.parameters()]).tolist(), self.seen


def module_of(base: type, net: nn.Module, counts: bool = False) -> nn.Module:
    """The same module for every trainer of Lightning's style."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = self.net(batch)["loss"]
            self.log("mean", batch.mean(), on_step=False, on_epoch=True)
            return {"loss": loss, "count": len(batch)} if counts else loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("mean", batch.mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    return Module()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1.0 if any(isinstance(m, Scalar) for m in net.modules()) else 0.1)


def short_window() -> DataLoader:
    return DataLoader(torch.ones(5), batch_size=1)


def uneven_window() -> DataLoader:
    return DataLoader(torch.tensor([1.0, 5.0, 5.0, 5.0]), batch_sampler=[[0], [1, 2, 3]])


# Ours and PyTorch Lightning: the same program, but for the imports.


def styled(peer: str) -> tuple[Any, ...]:
    """Return its Trainer, module class, ModelCheckpoint and seed_everything."""
    if peer == "ours":
        from callbacks import ModelCheckpoint
        from trainer import Trainer, TrainModule, seed_everything

        return Trainer, TrainModule, ModelCheckpoint, seed_everything
    import pytorch_lightning as pl

    return pl.Trainer, pl.LightningModule, pl.callbacks.ModelCheckpoint, pl.seed_everything


def trainer_of(cls: Any, **settings: Any) -> Any:
    off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return cls(**{"accelerator": "cpu", "devices": 1, "enable_checkpointing": "callbacks" in settings, **off, **settings})


def styled_weight(peer: str, data: Callable[[], DataLoader], counts: bool = False) -> float:
    cls, base, *_ = styled(peer)
    module = module_of(base, Scalar(), counts)
    trainer_of(cls, max_epochs=1, accumulate_grad_batches=2).fit(module, data())
    return module.net.w.item()


def styled_resume(peer: str, folder: str, resume: bool, dropout: float, stateful: bool = False) -> Any:
    cls, base, checkpoint, seed = styled(peer)
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        Loader = DataLoader
    seed(0)
    net = Noisy(dropout)
    saving = checkpoint(folder, "{step}", every_n_train_steps=STOP, save_top_k=-1)
    data = Loader(torch.tensor(SAMPLES), batch_size=2, shuffle=True)
    trainer = trainer_of(cls, max_epochs=2, callbacks=[saving])
    trainer.fit(module_of(base, net), data, ckpt_path=f"{folder}/step={STOP}.ckpt" if resume else None)
    return net.result()


def styled_validation(peer: str) -> float:
    cls, base, *_ = styled(peer)
    trainer = trainer_of(cls, strategy="ddp", devices=2)
    return trainer.validate(module_of(base, Scalar()), DataLoader(torch.arange(1.0, 6.0), batch_size=2), verbose=False)[0]["mean"]


def styled_epoch_mean(peer: str) -> float:
    cls, base, *_ = styled(peer)
    trainer = trainer_of(cls, max_epochs=1)
    trainer.fit(module_of(base, Scalar()), DataLoader(torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0]), batch_size=4))
    return trainer.callback_metrics["mean"].item()


# accelerate.


def accelerate_weight(data: Callable[[], DataLoader]) -> float:
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=2), Scalar()
    net, optimizer, loader = accelerator.prepare(net, optimizer_of(net), data())
    for x in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(x)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return net.w.item()


def accelerate_counted_weight(data: Callable[[], DataLoader]) -> float:
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=2), Scalar()
    net, optimizer, loader = accelerator.prepare(net, optimizer_of(net), data())
    batches = iter(loader)
    for _ in range(math.ceil(len(loader) / 2)):
        window = list(itertools.islice(batches, 2))
        count = accelerator.gather(torch.tensor(sum(len(x) for x in window))).sum().item()
        for x in window:
            loss = net(x)["product"].sum()
            accelerator.backward(loss * 2 * accelerator.num_processes / count)
        optimizer.step()
        optimizer.zero_grad()
    return net.w.item()


def accelerate_resume(folder: str, resume: bool, dropout: float, stateful: bool = False) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    config = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    net = Noisy(dropout)
    loader = DataLoader(torch.tensor(SAMPLES), batch_size=2, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer_of(net), loader)
    first, step = 0, 0
    if resume:
        accelerator.load_state(folder)
        first, step = STOP // STEPS_AN_EPOCH, STOP
    for epoch in range(first, 2):
        loader.set_epoch(epoch)
        skips = resume and epoch == first and not stateful  # a stateful loader was put where it was by load_state
        for x in accelerator.skip_first_batches(loader, STOP % STEPS_AN_EPOCH) if skips else loader:
            accelerator.backward(net(x)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == STOP:
                accelerator.save_state(folder)
    return net.result()


def accelerate_validation() -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(1.0, 6.0), batch_size=2))
    return torch.cat([accelerator.gather_for_metrics(x) for x in loader]).mean().item()


# Hugging Face's Trainer.


def hugging_face(model: nn.Module, rows: list[dict[str, Any]], folder: str = "", more: Any = (), **settings: Any) -> Any:
    """Return their Trainer for rows of named numbers; what is not part of the case is switched off."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as scratch:
        given = {"num_train_epochs": 1, "save_strategy": "no", "use_cpu": True, "report_to": [], "disable_tqdm": True, **settings}
        args = TrainingArguments(folder or scratch, max_grad_norm=0, lr_scheduler_type="constant", dataloader_pin_memory=False, **given)
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer_of(model), None), **dict(more))


def transformers_weight(values: list[Any], counts: bool = False) -> float:
    model = Scalar()

    def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs["product"].sum() / num_items_in_batch

    rows = [{"x": value, "labels": value} for value in values]
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    hugging_face(model, rows, more={"compute_loss_func": loss} if counts else {}, **settings).train()
    return model.w.item()


def transformers_resume(folder: str, resume: bool, dropout: float) -> Any:
    from transformers import set_seed

    set_seed(0)
    model = Noisy(dropout)
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": STOP, "per_device_train_batch_size": 2, "seed": 0}
    theirs = hugging_face(model, [{"x": value} for value in SAMPLES], folder, **settings)
    theirs.train(resume_from_checkpoint=f"{folder}/checkpoint-{STOP}" if resume else None)
    return model.result()


def transformers_validation(metric: str) -> float:
    rows = [{"x": float(value), "labels": float(value)} for value in range(1, 6)]
    more = {"compute_metrics": lambda found: {"mean": float(found.predictions.mean())}}
    return hugging_face(Level(), rows, more=more, per_device_eval_batch_size=2).evaluate()[metric]


def transformers_epoch_mean() -> float:
    rows = [{"x": value} for value in (1.0, 1.0, 1.0, 1.0, 6.0)]
    settings = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "logging_strategy": "epoch"}
    theirs = hugging_face(Level(), rows, **settings)
    theirs.train()
    return next(entry["loss"] for entry in theirs.state.log_history if "loss" in entry)
