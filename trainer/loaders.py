"""From what the user gave as data to the prepared sources of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.data import Source, loaders_of, prepare
from trainer.datamodule import DataModule
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.hooks import overrides
from trainer.module import TrainModule

__all__ = ["Loaders"]

_HOOK = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


class Loaders:
    """Finds, prepares and closes the loaders of a run; each stage's are made when first needed.

    Args:
        module, datamodule: asked for loaders where none were given.
        given: stage -> what the caller passed to `fit` and friends, or nothing.
        limits: stage -> limit_*_batches.
        place: which of how many shares of the data this process takes.
        shard: False leaves samplers alone (`use_distributed_sampler=False`).
        join: True lets ranks whose data end at different times go on until the last has none.
        overfit: True takes training data in order and uses it for validation too.
    """

    def __init__(
        self,
        module: TrainModule,
        datamodule: DataModule | None,
        given: dict[str, Any],
        limits: dict[str, Any],
        dist: Dist,
        place: tuple[int, int],
        seed: int,
        shard: bool = True,
        overfit: bool = False,
        join: bool = False,
    ) -> None:
        self.module, self.datamodule, self.given, self.limits = module, datamodule, given, limits
        self.dist, self.place, self.seed, self.shard, self.overfit = dist, place, seed, shard, overfit
        self.join = join
        self.draining: Callable[[int, int], None] | None = None
        self.raw: dict[str, Any] = {}
        self._sources: dict[str, list[Source]] = {}

    def has(self, stage: str) -> bool:
        """True when there is a loader for `stage`, without making it."""
        return self.given.get(stage) is not None or self._owner(stage) is not None

    def _owner(self, stage: str) -> Any:
        hook = _HOOK[stage]
        if self.datamodule is not None and overrides(self.datamodule, DataModule, hook):
            return self.datamodule
        return self.module if overrides(self.module, TrainModule, hook) else None

    def sources(self, stage: str) -> list[Source]:
        """Return the prepared loaders of `stage` (one for training), making them on first use. Collective.

        Raises:
            MisconfigurationException: when there is none, or a loader hook returned None; see `prepare` for loaders that cannot work.
        """
        if stage not in self._sources:
            self._sources[stage] = self._prepare(stage)
        return self._sources[stage]

    def _prepare(self, stage: str) -> list[Source]:
        source_stage = "train" if stage == "validate" and self.overfit and not self.has("validate") else stage
        raw = self.raw.get(stage, self.given.get(source_stage))
        if raw is None:
            owner = self._owner(source_stage)
            if owner is None:
                argument = "train_dataloaders" if stage == "train" else "val_dataloaders" if stage == "validate" else "dataloaders"
                raise MisconfigurationException(
                    f"There is no {stage} loader: define {_HOOK[stage]} in {type(self.module).__name__} or in a DataModule, or "
                    f"pass {argument}=."
                )
            raw = getattr(owner, _HOOK[source_stage])()
            if raw is None:
                raise MisconfigurationException(f"{type(owner).__name__}.{_HOOK[source_stage]} returned None, not a loader.")
        self.raw[stage] = raw
        train = stage == "train"
        many = [raw] if train else loaders_of(raw)
        if self.place[1] < self.dist.world.world_size:
            for loader in many:
                self._check_sampler(loader)
        return [
            prepare(
                loader,
                train=train,
                seed=self.seed,
                rank=self.place[0],
                world_size=self.place[1],
                shard=self.shard,
                limit=self.limits.get(stage),
                shuffle=False if self.overfit else None,
                agree=self.dist.agree,
                index=i,
                join=self._sum_over_shares if self.join else None,
                drain_progress=self.draining,
            )
            for i, loader in enumerate(many)
        ]

    def _check_sampler(self, loader: Any) -> None:
        """Refuse a sampler that gives ranks of one model different samples."""
        sampler, (share, count) = getattr(loader, "sampler", None), self.place
        cut = getattr(sampler, "rank", share), getattr(sampler, "num_replicas", count)
        if cut != self.place:
            raise MisconfigurationException(
                f"The loader's {type(sampler).__name__} gives this rank part {cut[0]} of {cut[1]}, but ranks that hold parts of one model need the "
                f"same samples: part {share} of {count}. Leave the sampler out, or give it num_replicas={count}, rank={share}."
            )

    def _sum_over_shares(self, numbers: list[int]) -> list[int]:
        """Add numbers over the shares of the data, each of which may be read by several ranks. Collective."""
        readers = self.dist.world.world_size // self.place[1]
        return [number // readers for number in self.dist.sum_numbers(numbers)]

    def reseed(self, seed: int) -> None:
        """Let the order and the draws of the data follow from `seed`, also those of loaders that were made before it was known."""
        if seed != self.seed:
            self.seed = seed
            for sources in self._sources.values():
                for source in sources:
                    source.close()
            self._sources.clear()  # the next use prepares the same loaders again

    def reload(self, stage: str) -> None:
        """Forget the loaders of `stage`: the next use asks for them again."""
        for source in self._sources.pop(stage, []):
            source.close()
        self.raw.pop(stage, None)

    def close(self) -> None:
        """End all worker processes."""
        for stage in list(self._sources):
            self.reload(stage)
