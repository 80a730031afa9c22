"""The boundary between two steps: where wishes are fulfilled, the ranks agree, and a fit ends."""

from __future__ import annotations

import time

from trainer.hooks import overrides
from trainer.module import TrainModule
from trainer.signals import SIGNALS, STOP
from trainer.writing import LOST

__all__ = ["Boundary"]


class Boundary:
    """The part of `Run` that saves, publishes and stops, on all ranks at the same step."""

    def boundary(self) -> None:
        """Fulfil the wishes that hooks left, and agree with the other ranks on whether to stop. Collective."""
        asked, self.asked = self.asked, None
        wishes = 0 if asked is None else asked()
        if asked is None or self.wished_late:
            wishes |= self.dist.union(self.wishes())
        self.wished_late, self.whole = False, True
        if wishes & LOST:
            self.finish_saves()  # it raises what the writing ended with
        if self.requests:
            self.publish_step()
            requests, self.requests = self.requests, []
            for fulfil in requests:
                fulfil(self.trainer)
        self.done = self.limit_reached() is not None or (wishes & STOP != 0 and self.may_stop())
        if self.done and self.settings.log_every_n_steps:
            self.publish_step()  # the last step of a fit is never lost
        if wishes & SIGNALS:
            self.heed(wishes & SIGNALS)

    def wishes(self) -> int:
        """Return what this rank wishes for the coming boundary, as bits."""
        if self.settings.max_time is not None:
            self.should_stop |= time.monotonic() - self.started >= self.settings.max_time.total_seconds()
        lost = LOST if self.background is not None and self.background.failed else 0
        return self.should_stop | self.notice.bits | lost

    def limit_reached(self) -> str | None:
        """Return which limit forbids another step ("max_steps" or "max_epochs"), or None."""
        s, p = self.settings, self.progress
        if s.max_steps != -1 and p.step >= s.max_steps:
            return "max_steps"
        if s.max_epochs not in (None, -1) and p.epoch + p.epoch_ended >= s.max_epochs:
            return "max_epochs"
        return None

    def may_stop(self) -> bool:
        """True when min_steps and min_epochs are reached."""
        s, p = self.settings, self.progress
        return p.step >= (s.min_steps or 0) and p.epoch + p.epoch_ended >= (s.min_epochs or 0)

    def can_validate(self) -> bool:
        """True when this fit has validation: a step, a loader, and a limit that lets batches through."""
        has_step = overrides(self.module, TrainModule, "validation_step")
        return has_step and self.settings.limits["validate"] != 0 and (self.loaders.has("validate") or self.loaders.overfit)
