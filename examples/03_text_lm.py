"""A small GPT trained on real text, byte by byte: the Python standard library's own sources, or any file of yours.

laptop, one process     python examples/03_text_lm.py
laptop, two processes   torchrun --standalone --nproc-per-node 2 examples/03_text_lm.py --text FILE
any MPI                 mpiexec -n 4 python examples/03_text_lm.py
Slurm, at once          srun --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 python examples/03_text_lm.py
Slurm, as a job         sbatch --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 \\
                            --wrap 'srun python examples/03_text_lm.py'
PBS, as a job           echo "cd '$PWD' && mpiexec -n 8 '$(command -v python)' examples/03_text_lm.py" |
                            qsub -l select=2:ncpus=4:mpiprocs=4:ngpus=4 -l place=scatter

On a machine whose GPUs are fewer than the ranks, or in use, add `--backend gloo`: the ranks then run on CPUs.
With `--checkpoints FOLDER` it may be killed at any moment and given again: it goes on where it was (see 05_survive.py).
The defaults suit two CPU cores. GPUs have room for more, say --layers 8 --heads 8 --width 512 --context 512 --lr 1e-3.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import socket
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer
from utils.logging import get_logger
from utils.preemption import StopSignal, requeue
from utils.training import prime_ddp_buckets

log = get_logger(__name__)  # log.info prints on rank 0 alone

LIBRARY_BYTES = 8_000_000  # of the standard library's sources that are read, held-out part included
HELD_OUT_WINDOWS = 256  # on which the held-out loss is measured


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with DDP.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: the standard library's sources")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="of the residual stream; a multiple of --heads")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees at once")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and micro-step")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-steps per optimizer step")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="stop training after so long")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=50, help="steps of linear warm-up, before the cosine decay")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--precision", choices=("float32", "bfloat16"),
                        help="of the matrix products (default: bfloat16 on GPUs that have it, else float32)")
    parser.add_argument("--compile", action="store_true", help="compile the model: a slow start, then faster on GPUs")
    parser.add_argument("--log-every", type=int, default=25, help="steps between progress lines")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from what is there")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the order of the data")
    parser.add_argument("--backend", help="gloo, nccl, xccl (default: whatever goes with the device that was found)")
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # python -m torch.distributed.launch adds it
    args = parser.parse_args()
    for option in ("layers", "heads", "width", "context", "batch_size", "accumulate", "steps", "log_every",
                   "save_every"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
    for option in ("lr", "clip", "max_seconds"):
        if not getattr(args, option) > 0:
            parser.error(f"--{option.replace('_', '-')} must be positive, got {getattr(args, option)}")
    for option in ("warmup", "seed"):
        if getattr(args, option) < 0:
            parser.error(f"--{option} must not be negative, got {getattr(args, option)}")
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads, got {args.width} and {args.heads}")
    return args


def standard_library() -> bytes:
    """Python's own sources, up to LIBRARY_BYTES: real text that every machine has, so nothing is downloaded."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not skipped.intersection(name.parts)]
    # Folders list their files in any order they like. A hash of the name gives an order that is the same on every
    # host, and mixes the packages, so that the end of the text, which is held out, is like the rest.
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    text = bytearray()
    for name in names:
        text += (root / name).read_bytes()
        if len(text) >= LIBRARY_BYTES:
            break
    return bytes(text[:LIBRARY_BYTES])


def read_text(args: argparse.Namespace, dist: Distributed) -> tuple[Tensor, Tensor]:
    """The training and the held-out part, 9 to 1, as bytes on the device. Raises RuntimeError on all ranks or on none.

    A rank that could not read its text and stopped alone would leave the others waiting at their first all-reduce. So
    all ranks tell each other how it went, and all of them go on or none.
    """
    text, problem = b"", ""
    try:
        text = args.text.read_bytes() if args.text else standard_library()
    except OSError as error:
        problem = f"cannot read the text: {error}"
    shortest = 20 * (args.context + 1)  # then the held-out part has two windows
    if not problem and len(text) < shortest:
        problem = (f"{args.text or sysconfig.get_path('stdlib')} has {len(text)} bytes of text; with "
                   f"--context {args.context} at least {shortest} are needed")
    mine = (f"rank {dist.rank} on {socket.gethostname()}", problem, hashlib.sha256(text).hexdigest())
    everyone = [mine] * dist.world_size
    torch.distributed.all_gather_object(everyone, mine)
    for who, problem, _ in everyone:
        if problem:
            raise RuntimeError(f"{who}: {problem}")
    for who, _, digest in everyone:
        if digest != everyone[0][2]:
            raise RuntimeError(f"{who} has read another text than {everyone[0][0]} (SHA-256 {digest[:12]} and "
                               f"{everyone[0][2][:12]}). Use one Python on all hosts, or --text with a file they share")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(dist.device)
    border = len(data) - len(data) // 10
    return data[:border], data[border:]


def unigram_entropy(data: Tensor) -> float:
    """The least loss, in nats per byte, of a model that knows how frequent each byte is, but sees no context."""
    frequencies = torch.bincount(data.long(), minlength=256).double() / len(data)
    return torch.special.entr(frequencies).sum().item()


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Bytes from each start on, and the byte that follows each of them; both (len(starts), context)."""
    spans = data[starts.to(data.device)[:, None] + torch.arange(context + 1, device=data.device)].long()
    return spans[:, :-1], spans[:, 1:]


class Block(nn.Module):
    """Causal self-attention, then two layers on each position; each behind a norm and around a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Bytes in, shape (batch, length); a score for each possible next byte out, shape (batch, length, 256)."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream starts small, or the stream would grow with each layer.
                into_stream = name.endswith(("attention_out.weight", "mlp.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_stream else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x)))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear up to --lr, then half a cosine down to a tenth of it."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def held_out_loss(model: nn.Module, data: Tensor, args: argparse.Namespace, dist: Distributed) -> float:
    """Mean loss in nats per byte over windows spread evenly over the held-out text; the ranks share the work.

    It takes the model without DDP's wrapper, as the ranks may have different numbers of batches.
    """
    count = min(HELD_OUT_WINDOWS, (len(data) - 1) // args.context)
    starts = torch.linspace(0, len(data) - args.context - 1, count, dtype=torch.float64).long()
    total = torch.zeros(2, device=data.device)  # loss, windows
    with torch.no_grad():
        for batch in starts[dist.rank :: dist.world_size].split(args.batch_size):
            inputs, targets = windows(data, batch, args.context)
            loss = cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            total += torch.stack([loss, torch.ones_like(loss)]) * len(batch)
    loss_sum, window_count = dist.all_reduce_mean(total).tolist()
    return loss_sum / window_count


def report_end(model: nn.Module, data: Tensor, args: argparse.Namespace, dist: Distributed, autocast: torch.autocast,
               seconds: float, tokens: int, entropy: float) -> None:
    with autocast:
        loss = held_out_loss(model, data, args, dist)
    log.info(f"{tokens:,} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):,.0f} tokens/s on "
             f"{dist.world_size} rank(s)")
    log.info(f"held-out loss {loss:.4f} nats per byte; unigram entropy {entropy:.4f}")


def main() -> int:
    args = parse_arguments()
    with setup_distributed(args.backend) as dist, contextlib.ExitStack() as at_end:
        train_data, held_out_data = read_text(args, dist)
        torch.manual_seed(args.seed)
        model = GPT(args.layers, args.heads, args.width, args.context).to(dist.device)
        if args.compile:
            model.compile()
        ddp = DDP(model, device_ids=dist.device_ids)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        has_bfloat16 = dist.device.type == "xpu" or (  # CPUs and older GPUs would only emulate it
            dist.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False))
        precision = args.precision or ("bfloat16" if has_bfloat16 else "float32")
        autocast = torch.autocast(dist.device.type, torch.bfloat16, enabled=precision == "bfloat16")

        global_batch = dist.world_size * args.accumulate * args.batch_size
        tokens_per_step = global_batch * args.context
        entropy = unigram_entropy(held_out_data)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        log.info(f"{len(train_data):,} bytes to train on, {len(held_out_data):,} held out; {parameters:,} parameters; "
                 f"{tokens_per_step:,} tokens per step, {precision}")

        generator = torch.Generator().manual_seed(args.seed)
        state = {"model": ddp, "optimizer": optimizer, "order": generator}
        stop = checkpoints = found = None
        if args.checkpoints:
            with autocast:
                prime_ddp_buckets(ddp, lambda: ddp(torch.zeros(
                    args.batch_size, args.context, dtype=torch.long, device=dist.device)).float().sum())
            stop = at_end.enter_context(StopSignal(dist))
            checkpoints = at_end.enter_context(Checkpointer(args.checkpoints))
            found = checkpoints.load_latest(state)
        first_step = last_step = found.step if found else 0
        if found:
            log.info(f"resuming after step {first_step}")

        start = last_time = time.perf_counter()
        loss_sum = torch.zeros((), device=dist.device)  # since the last progress line; read only there, as that waits
        for step in range(first_step, args.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            # Every rank draws the starts of the whole global batch from the same generator and takes its own share:
            # no two ranks have the same share, and no seed has to be made up for each rank.
            starts = torch.randint(len(train_data) - args.context, (global_batch,), generator=generator)
            micro_batches = starts[dist.rank :: dist.world_size].split(args.batch_size)
            for micro_step, batch in enumerate(micro_batches, start=1):
                # Gradients add up on each rank; only the last micro-step lets DDP average them over the ranks.
                last = micro_step == args.accumulate
                with contextlib.nullcontext() if last else ddp.no_sync():
                    inputs, targets = windows(train_data, batch, args.context)
                    with autocast:
                        scores = ddp(inputs)
                    loss = cross_entropy(scores.flatten(0, 1).float(), targets.flatten()) / args.accumulate
                    loss.backward()
                loss_sum += loss.detach()
            nn.utils.clip_grad_norm_(ddp.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()

            stopping = stop is not None and stop.should_stop()  # on all ranks at the same step
            if checkpoints and (stopping or step + 1 == args.steps):
                checkpoints.save_and_wait(step + 1, state)
            elif checkpoints and (step + 1) % args.save_every == 0:
                checkpoints.save(step + 1, state)  # if it fails, the training goes on and the next one is tried
            if stopping:
                log.info(f"stopped after step {step + 1}: {stop.reason}")
                break

            if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
                steps = step + 1 - last_step
                seconds = time.perf_counter() - start
                # Clocks differ: all ranks stop at the same step because all look at the same mean.
                report = torch.tensor([loss_sum.item() / steps, seconds], device=dist.device)
                mean_loss, mean_seconds = dist.all_reduce_mean(report).tolist()
                loss_sum.zero_()
                now = time.perf_counter()
                log.info(f"step {step + 1:5d}/{args.steps}  loss {mean_loss:.4f}  lr {learning_rate(step, args):.2e}  "
                         f"{steps * tokens_per_step / (now - last_time):,.0f} tokens/s")
                last_step, last_time = step + 1, now
                if mean_seconds >= args.max_seconds:
                    if checkpoints and (step + 1) % args.save_every and step + 1 < args.steps:
                        checkpoints.save_and_wait(step + 1, state)
                    log.info(f"stopped by --max-seconds {args.max_seconds:g}")
                    break
        if stop is None or not stop.stopped:
            report_end(model, held_out_data, args, dist, autocast, last_time - start,
                       (last_step - first_step) * tokens_per_step, entropy)
    if stop is None or not stop.stopped:
        return 0
    if dist.is_main:
        requeue()
    return stop.exit_status


if __name__ == "__main__":
    sys.exit(main())
