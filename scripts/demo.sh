#!/usr/bin/env bash
# Trains a small GPT on the text of Python's own standard library, on two CPU processes of this machine.
# Makes .venv first (see setup_env.sh). After that it takes under two minutes on two cores.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"

echo "== 1/2 the Python environment .venv"
bash scripts/setup_env.sh

echo "== 2/2 examples/03_text_lm.py on two gloo ranks, started by torchrun"
# One thread for each rank: what two cores have, and what keeps the figures comparable.
OMP_NUM_THREADS=1 .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
    examples/03_text_lm.py --backend gloo --max-seconds 90

there=$(printf '%q' "$root")
cat <<TEXT

By as much as the held-out loss is below the unigram entropy, the model has learnt from context.

The same script runs on a cluster, unchanged, one rank for each GPU. On a login node, with this folder on a file system
that the nodes see; your site may want an account and a queue as well:

  cd $there

  Slurm, at once
    srun --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 .venv/bin/python examples/03_text_lm.py
  Slurm, as a job
    sbatch --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 --wrap 'srun .venv/bin/python examples/03_text_lm.py'
  PBS, as a job
    echo "cd $there && mpiexec -n 8 .venv/bin/python examples/03_text_lm.py" |
        qsub -l select=2:ncpus=4:mpiprocs=4:ngpus=4 -l place=scatter

What your own training script needs is in examples/01_ddp_minimal.py.
TEXT
