"""A stand-in for Slurm's `srun` on this machine: starts the tasks of a step with the variables that srun sets.

    python srun.py --nodes 2 --ntasks-per-node 2 [--job-id N] program [arguments]

All "nodes" are this machine. Like srun it ends every task when one fails, and returns the highest exit code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time


def variables(task: int, nodes: int, per_node: int, job_id: int) -> dict[str, str]:
    """Return what srun puts into the environment of a task."""
    hosts = "localhost" if nodes == 1 else ",".join(["localhost"] * nodes)
    tasks_per_node = str(per_node) if nodes == 1 else f"{per_node}(x{nodes})"
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_TASKS_PER_NODE": tasks_per_node,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % per_node),
        "SLURM_NODEID": str(task // per_node),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ntasks-per-node", type=int, default=1)
    parser.add_argument("--job-id", type=int, default=os.getpid())
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    tasks = [
        subprocess.Popen(given.command, env={**os.environ, **variables(i, given.nodes, given.ntasks_per_node, given.job_id)})
        for i in range(given.nodes * given.ntasks_per_node)
    ]
    while any(task.poll() is None for task in tasks):
        if any(task.returncode for task in tasks):
            for task in tasks:
                task.terminate()
            deadline = time.monotonic() + 30
            while any(task.poll() is None for task in tasks) and time.monotonic() < deadline:
                time.sleep(0.05)
            for task in tasks:
                task.kill()
        time.sleep(0.05)
    return max(abs(task.returncode) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
