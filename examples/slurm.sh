#!/usr/bin/env bash
# A Slurm job: one task a device. Trainer(devices=2, num_nodes=2) is checked against what srun started, ahead of any rendezvous.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#
# 90 seconds ahead of its end the job gets SIGUSR1: all ranks save at one step and leave. With Trainer(auto_requeue=True) the job is then
# put back into the queue, and goes on where it stopped. --resv-ports has Slurm keep a port free for the rendezvous.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
exec srun --resv-ports "${PYTHON:-python}" examples/digits.py --devices "${SLURM_NTASKS_PER_NODE:-2}" "$@"
