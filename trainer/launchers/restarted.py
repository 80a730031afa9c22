"""Whether this job was started before: by Slurm, in whose queue it can put itself back, or by torchelastic (torchrun)."""

from __future__ import annotations

import os
import subprocess

__all__ = ["elastic_restarts", "job_id", "requeue", "requeued"]


def job_id() -> str | None:
    """Return the number of the Slurm job that this process belongs to, in the form that `scontrol` takes; None outside Slurm."""
    env = os.environ
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


def requeue() -> str | None:
    """Put this job back into the queue; return why that was not possible, or None."""
    job = job_id()
    if job is None:
        return "this process belongs to no Slurm job (SLURM_JOB_ID is not set)"
    try:
        answer = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol requeue {job}: {error}"
    return f"scontrol requeue {job}: {answer.stderr.strip() or f'exit code {answer.returncode}'}" if answer.returncode else None


def requeued() -> bool:
    """True in a job that Slurm has started again."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def elastic_restarts() -> tuple[int, bool]:
    """Return how often the agent of this process has restarted it after a failure, and whether the agent has a store for its ranks.

    Agents count for themselves, and a change of the number of nodes is no failure: 0 does not mean that this is the first start.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
