"""DataModule: loaders and the preparation of data, apart from the model."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer.checkpoint.remade import DataFromCheckpoint
from trainer.hparams import HyperparametersMixin, accepted_arguments
from trainer.module_hooks import LoaderMethods, move_to

__all__ = ["DataModule"]


class DataModule(LoaderMethods, HyperparametersMixin, DataFromCheckpoint):
    """Gives the loaders of a run. `prepare_data` runs once a node, everything else on every rank."""

    trainer: Any = None
    name: str | None = None

    # fmt: off
    def prepare_data(self) -> None: """Download and write files, on one process a node while the others wait; set no state here."""
    def setup(self, stage: str) -> None: """Make data sets, on every rank; `stage` is "fit", "validate", "test" or "predict"."""
    def teardown(self, stage: str) -> None: """The last hook of a run."""
    def on_exception(self, exception: BaseException) -> None: """A run is about to end with `exception`."""
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any: """Change a batch before it goes to the device."""; return batch
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any: """Change a batch on the device."""; return batch
    def state_dict(self) -> dict[str, Any]: """Return what a checkpoint must keep: tensors and plain containers only."""; return {}
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: """Take back what `state_dict` returned."""
    # fmt: on

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch; override for batches that are not made of tensors and containers."""
        return move_to(batch, device)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> DataModule:
        """Return a data module over data sets (or lists of them); only training is shuffled.

        Args:
            batch_size: samples in a batch on each rank.
            num_workers: worker processes a loader.
            kwargs: arguments of `__init__`.
        """
        module = cls(**{**accepted_arguments(cls, {"batch_size": batch_size, "num_workers": num_workers}), **kwargs})

        def loaders(data: Any, shuffle: bool) -> Any:
            if isinstance(data, (list, tuple)) and not hasattr(data, "__getitems__"):
                return [loaders(d, shuffle) for d in data]
            shuffle = shuffle and not isinstance(data, IterableDataset)
            return DataLoader(data, batch_size, shuffle=shuffle, num_workers=num_workers)

        for name, data in (("train", train_dataset), ("val", val_dataset), ("test", test_dataset), ("predict", predict_dataset)):
            if data is not None:
                setattr(module, f"{name}_dataloader", lambda d=data, s=name == "train": loaders(d, s))
        return module

    def __str__(self) -> str:
        found = []
        for stage in ("train", "val", "test", "predict"):
            method = f"{stage}_dataloader"
            if method in vars(self) or getattr(type(self), method) is not getattr(DataModule, method):
                found.append(stage)
        return f"{self.name or type(self).__name__}({', '.join(found) or 'no loaders'})"

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles never carry the trainer."""
        return {k: v for k, v in self.__dict__.items() if k != "trainer"}
