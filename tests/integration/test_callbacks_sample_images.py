"""SampleImages: which images are shown, when, and what is said where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from callbacks import Logger, SampleImages
from tests.helpers.modules import Scalar, loader, quiet
from trainer import MisconfigurationException


class Kept(Logger):
    """Keeps (key, optimizer step, first pixel of each image)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, list[float]]] = []
        self.trainer: Any = None

    def resolve(self, trainer: Any) -> None:
        self.trainer = trainer

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_image(self, key: str, images: Any, step: int | None = None) -> None:
        self.found.append((key, self.trainer.logging_step, images[:, 0, 0, 0].tolist()))


class Pictures(Scalar):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return {"loss": self.w * batch["x"].mean(), "made": 10 * batch["x"]}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return {"made": 10 * batch["x"]}


def batches(*firsts: float) -> list[Any]:
    """Batches of two: (labels, {"x": pictures}), with their numbers as pixels."""
    return [{"y": torch.zeros(2), "x": torch.tensor([v, v + 0.5]).view(2, 1, 1, 1).expand(2, 3, 4, 5)} for v in firsts]


def fit(*arguments: Any, train: Any = None, **more: Any) -> list[tuple[str, int, list[float]]]:
    logger = Kept()
    trainer = quiet(accelerator="cpu", max_epochs=2, logger=logger, callbacks=[SampleImages(*arguments, **more)], accumulate_grad_batches=2,
                    num_sanity_val_steps=1)  # fmt: skip
    trainer.fit(Pictures(), batches(1, 2, 3) if train is None else train, batches(7, 8))
    return logger.found


def test_the_first_batch_of_each_epoch_and_validation_at_its_step() -> None:
    train, val = [1.0, 1.5], [7.0, 7.5]
    # steps 1, 2 | 3, 4; the first batch of an epoch belongs to steps 1 and 3
    assert fit() == [("samples/train", 1, train), ("samples/val", 2, val), ("samples/train", 3, train), ("samples/val", 4, val)]


def test_fewer_images_epochs_and_stages_and_a_function_of_the_outputs() -> None:
    assert fit(1, 2, "validate") == [("samples/val", 2, [7.0])]
    found = fit(stages=["train"], images=lambda batch, outputs: outputs["made"])
    assert found == [("samples/train", 1, [10.0, 15.0]), ("samples/train", 3, [10.0, 15.0])]


def test_without_images_it_says_so_at_the_first_batch() -> None:
    with pytest.raises(MisconfigurationException, match="there is none in the batch. Give images="):
        quiet(accelerator="cpu", max_epochs=1, callbacks=[SampleImages()]).fit(Scalar(), loader([1.0]))
    with pytest.raises(MisconfigurationException, match=r"images= gave \(2, 4, 5\)"):
        fit(images=lambda batch, outputs: batch["x"][:, 0])


@pytest.mark.parametrize(("arguments", "message"), [({"num_images": 0}, "num_images=0"), ({"every_n_epochs": True}, "every_n_epochs=True"),
                                                   ({"stages": "val"}, "stages='val'"), ({"stages": ()}, r"stages=\(\)")])  # fmt: skip
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        SampleImages(**arguments)
