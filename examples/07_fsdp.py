"""The GPT of 03_text_lm.py under FSDP2: every rank keeps a part of each parameter.

one process     python examples/07_fsdp.py
four processes  torchrun --standalone --nproc-per-node 4 examples/07_fsdp.py
HSDP            torchrun --standalone --nproc-per-node 4 examples/07_fsdp.py --replicate 2
any MPI         mpiexec -n 4 python examples/07_fsdp.py
Slurm job       sbatch -A ACCOUNT -N 2 jobs/slurm.sh examples/07_fsdp.py --replicate 2
PBS job         ARGS=examples/07_fsdp.py qsub -A ACCOUNT jobs/pbs.sh
memory          ./scripts/plan.py --gpus 4 --gpu a100-40 examples/07_fsdp.py --width 1024

DDP keeps parameters, gradients and the optimizer's state whole on every rank. Use FSDP where they
do not fit: N ranks keep 1/N each. Before a block computes, its parameters are gathered; then they
are freed. That sends 1.5 times the bytes of DDP. What differs from 03:

    -     ddp = DDP(model, device_ids=job.device_ids)
    +     mesh = init_device_mesh(job.device.type, (job.world_size,))
    +     for block in model.blocks:
    +         fully_shard(block, mesh=mesh)   # gathered and freed together
    +     fully_shard(model, mesh=mesh)       # what is in no block: embeddings, last norm, scores
    -     with autocast: ...
    +     fully_shard(..., mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    -     Checkpointer(folder).save(step, {"model": ddp, "optimizer": optimizer})
    +     dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)

- The optimizer is made after fully_shard(): its parameters are then this rank's shards.
- Every forward pass gathers, so all ranks make the same number of passes, in evaluations too.
- Instead of no_sync(), accumulation calls model.set_requires_gradient_sync(False).
- HSDP (--replicate) shards within groups of neighbouring ranks and averages gradients between the
  groups. With one group per node, the blocks are gathered over the links inside the nodes only.
- With `--checkpoints FOLDER` the same command resumes, also on another number of ranks and with
  another --replicate: torch.distributed.checkpoint (DCP) distributes the shards again.
  `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER/step-N FILE`
  makes one file of a checkpoint.
"""

import argparse
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds the kit from any directory
from utils import Distributed, setup_distributed
from utils.log import get_logger

log = get_logger(__name__)  # log.info prints on rank 0 alone


# The model, as in 03 ------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention, then two layers on each position."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for linear in (self.query_key_value, self.mlp[1]):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.attention_out, self.mlp[3]):  # what is added to the stream starts small
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        per_head = projected.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = per_head.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Map bytes (batch, length) to a score for each possible next byte (batch, length, 256)."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, layers) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 256, bias=False)
        for module in (self.byte_embedding, self.position_embedding, self.scores):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        return self.scores(self.norm(self.blocks(x)))


# What FSDP changes --------------------------------------------------------------------------------


def make_mesh(job: Distributed, replicate: int) -> DeviceMesh:
    """Return the ranks as a mesh: a row for FSDP, or a table with `replicate` rows for HSDP."""
    if job.world_size % replicate:
        sys.exit(f"--replicate is {replicate}; expected a divisor of the {job.world_size} ranks")
    shape = (replicate, job.world_size // replicate)
    mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return mesh if replicate > 1 else mesh["shard"]


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Leave this rank its part of each parameter, on the device of the mesh."""
    policy = MixedPrecisionPolicy()
    if mesh.device_type != "cpu":  # compute in bfloat16; the shards and the sums are float32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        # FSDP lets the backend average the gradients. NCCL can. The gloo of some versions returns
        # the sum (https://github.com/pytorch/pytorch/issues/162338). Let FSDP itself divide there.
        if isinstance(module, FSDPModule) and mesh.device_type != "cuda":
            module.set_force_sum_reduction_for_comms(True)


class TrainingState:
    """What DCP saves and loads: names of parameters instead of numbers, so that it can reshard."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def load_latest(folder: Path, state: TrainingState) -> None:
    """Load the newest complete checkpoint, if there is one."""
    complete = sorted(folder.glob("step-*/.metadata"))  # DCP writes this file last
    newest = [str(complete[-1].parent) if complete else ""]
    torch.distributed.broadcast_object_list(newest)  # what rank 0 has found
    if newest[0]:
        dcp.load({"training": state}, checkpoint_id=newest[0])


# The training -------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, lr: float, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW. Weight decay is for matrices; norms and biases are left alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device.type != "cpu")


def read_text(file: Path | None) -> Tensor:
    """Return a text as bytes: by default Python's own sources, which every host has."""
    files = [file] if file else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batch(text: Tensor, step: int, args: argparse.Namespace, job: Distributed) -> Tensor:
    """Return this rank's share of a step's windows. The step alone determines the whole batch."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.context, (args.batch_size,), generator=generator)
    share = starts[job.rank :: job.world_size]
    return text[share[:, None] + torch.arange(args.context + 1)].long().to(job.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with FSDP2.")
    add = parser.add_argument
    add("--replicate", type=int, default=1, metavar="GROUPS", help="HSDP: groups that shard")
    add("--text", type=Path, metavar="FILE", help="default: the sources of Python's library")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128)
    add("--context", type=int, default=64, help="bytes that the model sees at once")
    add("--batch-size", type=int, default=32, help="sequences per step, over all ranks")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=3e-3)
    add("--checkpoints", type=Path, metavar="FOLDER", help="save there and resume from there")
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    add("--backend", help="gloo, nccl or xccl (default: the device's)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    with setup_distributed(args.backend) as job:
        if args.batch_size % job.world_size:
            sys.exit(f"--batch-size is {args.batch_size}; expected a multiple of {job.world_size}")
        torch.manual_seed(0)  # the same model on every rank, in host memory; then its shards
        model = GPT(args.layers, args.heads, args.width, args.context)
        total = sum(parameter.numel() for parameter in model.parameters())
        shard(model, make_mesh(job, args.replicate))
        log.info(f"{total:,} parameters on {job.world_size // args.replicate} shards")

        optimizer = make_optimizer(model, args.lr, job.device)
        state = TrainingState(model, optimizer)
        if args.checkpoints:
            load_latest(args.checkpoints, state)
        if state.step:
            log.info(f"resuming after step {state.step}")

        text = read_text(args.text)
        for step in range(state.step + 1, args.steps + 1):
            tokens = draw_batch(text, step, args, job)
            scores = model(tokens[:, :-1])
            loss = cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()  # FSDP averages each gradient and leaves this rank its shard
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all shards
            optimizer.step()
            optimizer.zero_grad()

            if step % 25 == 0 or step == args.steps:
                log.info(f"step {step}/{args.steps}: loss {job.all_reduce_mean(loss).item():.4f}")
            if args.checkpoints and (step % args.save_every == 0 or step == args.steps):
                state.step = step
                folder = args.checkpoints / f"step-{step:09d}"
                dcp.save({"training": state}, checkpoint_id=folder)


if __name__ == "__main__":
    main()
