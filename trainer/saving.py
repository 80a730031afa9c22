"""The checkpoints of a run: what is read at its start, what is written at a boundary."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainer.checkpoint import foreign, state
from trainer.entries import merge_states
from trainer.errors import CheckpointError
from trainer.metric_objects import is_metric
from trainer.seed import derive, rng_state, seed_rngs, set_rng_state
from trainer.writing import Writing

__all__ = ["Saving"]


class Saving(Writing):
    """The part of `Run` that knows checkpoints."""

    last_ranks: list[dict[str, Any]] | None = None  # the ranks' own states when the fit ended; set once it has

    def load_table(self) -> dict[str, Any] | None:
        """Read the checkpoint that the job names into module, data module and callbacks; return its table. Collective."""
        path = self.job.ckpt_path = self.dist.broadcast(self.job.ckpt_path)  # "last" may look different from another node
        if path is None:
            return None
        table = self.trainer.checkpoint_io.load_checkpoint(path, weights_only=self.job.weights_only)
        table = foreign.adopt(table)
        state.check_format(table, path)
        self.module.on_load_checkpoint(table)
        if self.fn == "fit":
            for part in self.module.modules():
                if is_metric(part):  # of a run that was interrupted: an epoch begins, or goes on, with what the file holds
                    part.reset()
        try:
            state.restore_module(self.module, table, strict=self.module.strict_loading, load=self.strategy.load_module)
        except RuntimeError as error:  # of load_state_dict, which knows no file
            raise CheckpointError(f"{path} is not of this module. {error}") from error
        if self.datamodule is not None and table.get(type(self.datamodule).__qualname__):
            self.datamodule.load_state_dict(table[type(self.datamodule).__qualname__])
        if self.fn == "fit":
            for callback in self.callbacks:
                callback.on_load_checkpoint(self.trainer, self.module, table)
            unknown = state.restore_callbacks(self.callbacks, table)
            if unknown and foreign.is_lightning(table):
                self.trainer.warn(f"The checkpoint holds states of callbacks that this trainer does not have, which are left out: {', '.join(unknown)}.")
        else:
            self.trainer.print(f"Weights of {path}.")
        return table

    def restore(self, table: dict[str, Any] | None) -> None:
        """Put back what a checkpoint holds besides weights; without one, what an earlier fit left in the middle of an epoch."""
        if table is None:
            self._place_sums(self.trainer.results.sums)
            return
        loads = [partial(self.strategy.load_optimizer, optimizer) for optimizer in self.optimizers]
        state.restore_training(table, loads, [c.scheduler for c in self.schedulers], self.precision)
        self.progress.load_state_dict(state.progress_of(table).state_dict())
        self.trainer.results.restore_metrics(table.get("metrics") or {}, table.get("metric_steps") or {})
        p = self.progress
        self.trainer.print(f"Going on from {self.job.ckpt_path}: epoch {p.epoch}, step {p.step}.")
        self.position = table.get("data")
        self.split = table.get("split", 1)
        if table.get("seed") is not None:
            if self.settings.seed not in (None, table["seed"]):
                self.trainer.warn(
                    f"The checkpoint was made with seed={table['seed']}, and the rest of the run follows from it; seed={self.settings.seed} is "
                    "not used."
                )
            self.seed = table["seed"]
            self.loaders.reseed(self.seed)
        self._place_rank_states(table.get("ranks") or [])

    def _place_rank_states(self, ranks: list[dict[str, Any]]) -> None:
        """Take the random state, epoch sums and position of this rank, or of its share of the data.

        With another number of shares the first takes the sums of all, and the other streams are derived.
        """
        shares = [state for state in ranks if state.get("records") is not False]
        rank, (share, count), same = self.world.rank, self.place, len(ranks) == self.world.world_size
        if len(shares) == count:
            own = same and ranks[rank].get("records") == self.records
            mine = ranks[rank] if own else shares[share]
            self.position, self.saved_sums = mine["data"], mine["metrics"]
            if mine.get("strategy") is not None:
                self.strategy.load_rank_state(mine["strategy"], self.optimizers)
            if own or self.stream == share:
                self.saved_rng = mine["rng"]
                return
        elif shares and share == 0:
            self.saved_sums = merge_states([state["metrics"] for state in shares])
        if shares and self.stream == 0:
            self.saved_rng = shares[0]["rng"]
        elif shares:
            seed_rngs(derive(self.seed, "rank", self.stream, "step", self.progress.step))

    def _place_sums(self, by_rank: list[dict[str, Any]]) -> None:
        """Take this rank's epoch sums; with another number of ranks the first share of the data takes all."""
        if len(by_rank) == self.world.world_size:
            self.saved_sums = by_rank[self.world.rank]
        elif by_rank and self.place[0] == 0:
            self.saved_sums = merge_states(by_rank)

    def leave(self) -> None:
        """Leave in the trainer's results what a further fit needs to go on in the middle of an epoch. Collective."""
        self.last_ranks = self.dist.gather(self._rank_state())
        inside = self.progress.batch and not self.progress.epoch_ended
        self.trainer.results.sums = [state["metrics"] for state in self.last_ranks] if inside else []

    def restore_streams(self) -> None:
        """Continue the random streams of the checkpoint; called just before the first batch."""
        if self.saved_rng is not None:
            set_rng_state(self.saved_rng)
            self.saved_rng = None

    def checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the table of a checkpoint of this moment. Collective."""
        self.strategy.sync_buffers()
        ranks = [] if weights_only else self.dist.gather(self._rank_state())
        s = self.strategy
        module_state, optimizer_state = (s.module_parts, s.optimizer_parts) if s.sharded else (s.module_state, s.optimizer_state)
        states = [] if weights_only else [optimizer_state(o) for o in self.optimizers]
        return self._table(module_state(), states, ranks, weights_only)

    def final_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the table of a fit that is over and closed. It needs no other rank."""
        self.module.trainer = self.trainer  # hooks may ask for it
        try:
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            return self._table(self.module.state_dict(), states, self.last_ranks or [], weights_only)
        finally:
            self.module.__dict__.pop("_trainer", None)

    def _table(
        self, module_state: dict[str, Any], optimizer_states: list[Any], ranks: list[dict[str, Any]], weights_only: bool
    ) -> dict[str, Any]:
        table = state.assemble(
            module_state=module_state,
            progress=self.progress,
            hparams=self.module.hparams,
            data_hparams=self.datamodule.hparams if self.datamodule is not None else {},
            optimizer_states=optimizer_states,
            schedulers=[config.scheduler for config in self.schedulers],
            callbacks=state.callback_keys(self.callbacks),
            precision=self.precision,
            data=self.position,
            ranks=ranks,
            seed=self.seed,
            weights_only=weights_only,
        )
        if self.split > 1:
            table["split"] = self.split
        if not weights_only:
            table["metrics"] = {name: float(v) for name, v in self.trainer.results.callback_metrics.items()}
            table["metric_steps"] = dict(self.trainer.results.metric_steps)
            if self.datamodule is not None and (data_state := self.datamodule.state_dict()):
                table[type(self.datamodule).__qualname__] = data_state
        for callback in self.callbacks:
            callback.on_save_checkpoint(self.trainer, self.module, table)
        self.module.on_save_checkpoint(table)
        return table

    def _rank_state(self) -> dict[str, Any]:
        """What differs from rank to rank: random streams, epoch sums, the place in data that shard themselves, and what the strategy adds.

        Until they are put in place, just before the first batch, those of the file that is resumed are still the true ones.
        """
        rng = rng_state() if self.saved_rng is None else self.saved_rng
        sums = self.collector.state_dict() if self.saved_sums is None else self.saved_sums
        state = {"rng": rng, "metrics": sums, "data": self.position}
        if self.records is not None:
            state["records"] = self.records
        own = self.strategy.rank_state(self.optimizers)
        return state if own is None else {**state, "strategy": own}
