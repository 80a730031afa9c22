"""Searches for a learning rate and a batch size: short runs of the user's own steps, after which everything is as it was."""

from __future__ import annotations

from trainer.tuner.tuner import Tuner

__all__ = ["Tuner"]
