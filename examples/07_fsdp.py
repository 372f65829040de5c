"""A GPT under FSDP2: every rank keeps a part of each parameter.

one process     python examples/07_fsdp.py
four processes  torchrun --standalone --nproc-per-node 4 examples/07_fsdp.py
HSDP            torchrun --standalone --nproc-per-node 4 examples/07_fsdp.py --replicate 2
Slurm job       sbatch -A ACCOUNT -N 2 jobs/slurm.sh examples/07_fsdp.py --replicate 2
PBS job         ARGS=examples/07_fsdp.py qsub -A ACCOUNT jobs/pbs.sh

DDP keeps parameters, gradients and the optimizer's state whole on every rank. Use FSDP where they
do not fit: N ranks keep 1/N each. Before a block computes, its parameters are gathered; then they
are freed. That sends 1.5 times the bytes of DDP.

- The optimizer is made after fully_shard(): its parameters are then this rank's shards.
- Every forward pass gathers, so all ranks make the same number of passes, in evaluations too.
- Instead of no_sync(), accumulation calls model.set_requires_gradient_sync(False).
- HSDP (--replicate) shards within groups of neighbouring ranks and averages gradients between the
  groups. With one group per node, the blocks are gathered over the links inside the nodes only.
- The same command resumes, also on another number of ranks and with another --replicate.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from ddpkit import Distributed, setup_distributed
from ddpkit.checkpoint import Checkpointer
from ddpkit.log import get_logger
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

log = get_logger(__name__)  # log.info prints on rank 0 alone


class GPT(nn.Module):
    """Map bytes (batch, length) to a score for each possible next byte (batch, length, 256)."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(context, width)
        settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **settings) for _ in range(layers)
        )
        self.scores = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        later = positions > positions[:, None]  # no position sees those after it
        for block in self.blocks:
            x = block(x, src_mask=later, is_causal=True)
        return self.scores(x)


def shard(model: GPT, job: Distributed, replicate: int) -> None:
    """Leave this rank its part of each parameter. replicate: groups of ranks that shard (HSDP)."""
    if job.world_size % replicate:
        sys.exit(f"--replicate is {replicate}; expected a divisor of the {job.world_size} ranks")
    shape = (replicate, job.world_size // replicate)
    mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicate > 1 else mesh["shard"]
    on_cpu = job.device.type == "cpu"  # elsewhere compute in bfloat16; shards and sums are float32
    policy = MixedPrecisionPolicy(*(() if on_cpu else (torch.bfloat16, torch.float32)))
    for module in [*model.blocks, model]:  # a block is gathered and freed; then what is in none
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in filter(lambda one: isinstance(one, FSDPModule), model.modules()):
        # The gloo of some versions returns the sum for an average: pytorch issue 162338.
        module.set_force_sum_reduction_for_comms(job.device.type != "cuda")


def draw_batch(text: Tensor, step: int, args: argparse.Namespace, job: Distributed) -> Tensor:
    """Return this rank's share of a step's windows. The step alone determines the whole batch."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.context, (args.batch_size,), generator=generator)
    share = starts[job.rank :: job.world_size]
    return text[share[:, None] + torch.arange(args.context + 1)].long().to(job.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with FSDP2.")
    parser.add_argument("--checkpoints", type=Path, default="checkpoints-fsdp", metavar="FOLDER")
    sizes = {"layers": 4, "heads": 4, "width": 128, "context": 64, "batch-size": 32}
    for name, default in {"replicate": 1, **sizes, "steps": 200, "save-every": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    with setup_distributed() as job, Checkpointer(args.checkpoints) as checkpoints:
        if args.batch_size % job.world_size:
            sys.exit(f"--batch-size is {args.batch_size}; expected a multiple of {job.world_size}")
        torch.manual_seed(0)  # the same model on every rank, in host memory; then its shards
        model = GPT(args.layers, args.heads, args.width, args.context)
        shard(model, job, args.replicate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        state = {"model": model, "optimizer": optimizer}
        if found := checkpoints.load_latest(state):
            log.info(f"resuming after step {found.step}")

        # Python's own sources: a text that every host has
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
        for step in range(found.step + 1 if found else 1, args.steps + 1):
            tokens = draw_batch(text, step, args, job)
            scores = model(tokens[:, :-1])
            loss = cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()  # FSDP averages each gradient and leaves this rank its shard
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all shards
            optimizer.step()
            optimizer.zero_grad()

            if step % args.save_every == 0 or step == args.steps:
                log.info(f"step {step}/{args.steps}: loss {job.all_reduce_mean(loss).item():.4f}")
                checkpoints.save(step, state)


if __name__ == "__main__":
    main()
