"""Planning a run on one CPU, with fake tensors and torch's fake process group: memory, communication and arithmetic of a rank."""

from trainer.planning.compare import Choice, Comparison, compare_plans
from trainer.planning.planner import plan
from trainer.planning.report import Memory, Plan, Transfer

__all__ = ["Choice", "Comparison", "Memory", "Plan", "Transfer", "compare_plans", "plan"]
