#!/usr/bin/env bash
# Trains a small GPT on the sources of Python's standard library, on two CPU processes of this machine.
# Creates .venv first (see setup_env.sh). After that it takes under two minutes on two cores.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"

echo "== 1/2 the Python environment .venv"
bash scripts/setup_env.sh

echo "== 2/2 examples/03_text_lm.py on two gloo ranks, started by torchrun"
# One thread for each rank, as there may be two cores only.
OMP_NUM_THREADS=1 .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
    examples/03_text_lm.py --backend gloo --max-seconds 90

kit=$(printf '%q' "$root")
cat <<TEXT

The gap between the unigram entropy and the held-out loss shows what the model learned from context.

The same script runs unchanged on a cluster, one rank for each GPU. On a login node, with this folder on a file system
that the nodes see:

  cd $kit

  Slurm
    sbatch -A ACCOUNT -N 2 --gpus-per-node=4 jobs/slurm.sh examples/03_text_lm.py
  PBS
    ARGS=examples/03_text_lm.py qsub -A ACCOUNT jobs/pbs.sh
  Inside a job
    .venv/bin/ddpkit launch examples/03_text_lm.py
    mpiexec -n 8 .venv/bin/python examples/03_text_lm.py

The lines that your training script needs are in examples/01_ddp_minimal.py.
TEXT
