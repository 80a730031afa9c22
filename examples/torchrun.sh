#!/usr/bin/env bash
# Several machines with torchrun. Run this on each of them, with the name of the first one:
#
#     NODES=2 HEAD=first-machine bash examples/torchrun.sh
#
# torchrun starts the ranks, and starts them anew when one is lost (up to 3 times); they go on from the newest checkpoint, so
# the folder of the run has to be one that all machines see. Fewer machines may do: NODES=1:2 starts with what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:-2}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost:29400}" --rdzv-id "${JOB:-digits}" \
    examples/digits.py --devices "${RANKS:-2}" "$@"
