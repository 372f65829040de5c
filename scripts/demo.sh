#!/usr/bin/env bash
# Trains a small GPT on the text of Python's own standard library, on two CPU processes of this machine.
# Makes .venv first (see setup_env.sh). After that it takes under two minutes on two cores.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"

echo "== 1/2 the Python environment .venv"
bash scripts/setup_env.sh

echo "== 2/2 examples/03_text_lm.py on two gloo ranks, started by torchrun"
.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
    examples/03_text_lm.py --backend gloo --max-seconds 90

cat <<'TEXT'

The same script runs on a cluster, unchanged. With this environment on a file system that the nodes see:

  Slurm, 2 nodes, 4 GPUs each
    srun --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 .venv/bin/python examples/03_text_lm.py
  PBS, in a job of select=2:ncpus=32:mpiprocs=4:ngpus=4, place=scatter
    mpiexec -n 8 .venv/bin/python examples/03_text_lm.py

Your own training script needs three lines: see examples/01_ddp_minimal.py.
TEXT
