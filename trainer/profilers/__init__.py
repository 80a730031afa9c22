"""Profilers: what takes how long in a run."""

from trainer.profilers.advanced import AdvancedProfiler
from trainer.profilers.base import PassThroughProfiler, Profiler
from trainer.profilers.pytorch import PyTorchProfiler
from trainer.profilers.simple import SimpleProfiler

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]
