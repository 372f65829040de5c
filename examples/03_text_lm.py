"""A small GPT trained on real text, byte by byte: Python's own sources, or any file of yours.

one process     python examples/03_text_lm.py
two processes   torchrun --standalone --nproc-per-node 2 examples/03_text_lm.py --text FILE
any MPI         mpiexec -n 4 python examples/03_text_lm.py
Slurm job       sbatch -A ACCOUNT -N 2 jobs/slurm.sh examples/03_text_lm.py
PBS job         ARGS=examples/03_text_lm.py qsub -V -A ACCOUNT jobs/pbs.sh

The defaults suit two CPU cores. For GPUs try --layers 8 --heads 8 --width 512 --context 512 and
--lr 1e-3. With `--checkpoints FOLDER` the same command resumes a run that was stopped or killed
(see 05_survive.py). Add `--backend gloo` to train on CPUs.
"""

import argparse
import contextlib
import hashlib
import math
import socket
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds the kit from any directory
# Before torch: a stop signal that arrives while torch loads is then held, not lost.
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer
from utils.log import get_logger
from utils.preemption import StopSignal, requeue
from utils.training import GradientNoiseScale, accumulate, prime_ddp_buckets

# isort: split
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

log = get_logger(__name__)  # log.info prints on rank 0 alone

LIBRARY_BYTES = 8_000_000  # of Python's sources that are read
HELD_OUT_WINDOWS = 256  # on which the held-out loss is measured


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with DDP.")
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="default: the sources of Python's library")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128, help="of the residual stream; a multiple of --heads")
    add("--context", type=int, default=64, help="bytes that the model sees at once")
    add("--batch-size", type=int, default=8, help="sequences per rank and micro-batch")
    add("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    add("--steps", type=int, default=600, help="optimizer steps")
    add("--max-seconds", type=float, default=math.inf, help="end the training after this time")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--warmup", type=int, default=50, help="steps of linear warm-up, before the cosine decay")
    add("--precision", choices=("float32", "bfloat16"), help="default: bfloat16 where it is fast")
    add("--compile", action="store_true", help="compile the model")
    add("--log-every", type=int, default=25, help="steps between progress lines")
    add("--checkpoints", type=Path, metavar="FOLDER", help="save there and resume from there")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--backend", help="gloo, nccl or xccl (default: the device's)")
    return parser.parse_args()


# The data -----------------------------------------------------------------------------------------


def standard_library() -> bytes:
    """Return Python's own sources: real text that every host has, so nothing is downloaded."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not skipped.intersection(name.parts)]

    # Folders list their files in any order. A hash of the name gives the same order on every host
    # and mixes the packages, so that the held-out end of the text is like the rest.
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    text = bytearray()
    for name in names:
        text += (root / name).read_bytes()
        if len(text) >= LIBRARY_BYTES:
            break
    return bytes(text[:LIBRARY_BYTES])


def read_text(args: argparse.Namespace, dist: Distributed) -> tuple[Tensor, Tensor]:
    """Return the training and the held-out part, 9 to 1, as bytes on the device.

    A rank that failed alone would leave the others waiting in their first all-reduce. So all ranks
    exchange what they read, and all of them raise RuntimeError if one could not read the text.
    """
    text, problem = b"", ""
    try:
        text = args.text.read_bytes() if args.text else standard_library()
    except OSError as error:
        problem = f"cannot read the text: {error}"
    shortest = 20 * (args.context + 1)  # then the held-out part has two windows
    if not problem and len(text) < shortest:
        problem = f"{args.text} has {len(text)} bytes; expected {shortest} or more"

    where = f"rank {dist.rank} on {socket.gethostname()}"
    mine = (where, problem, hashlib.sha256(text).hexdigest())
    reports = [mine] * dist.world_size
    torch.distributed.all_gather_object(reports, mine)
    for where, problem, digest in reports:
        if problem:
            raise RuntimeError(f"{where}: {problem}")
        if digest != reports[0][2]:
            raise RuntimeError(
                f"{where} has read another text than {reports[0][0]}. Use the same Python on all "
                "hosts, or --text with a file that they share"
            )

    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(dist.device)
    border = len(data) - len(data) // 10
    return data[:border], data[border:]


def unigram_entropy(data: Tensor) -> float:
    """Return the least loss, in nats per byte, of a model that sees no context."""
    frequencies = torch.bincount(data.long(), minlength=256).double() / len(data)
    return torch.special.entr(frequencies).sum().item()


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the bytes from each start, and the byte after each; both (len(starts), context)."""
    offsets = torch.arange(context + 1, device=data.device)
    spans = data[starts.to(data.device)[:, None] + offsets].long()
    return spans[:, :-1], spans[:, 1:]


# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention, then two layers on each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

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
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream starts small, or it grows with each layer.
                into_stream = name.endswith(("attention_out.weight", "mlp.3.weight"))
                std = 0.02 / math.sqrt(2 * layers) if into_stream else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        return self.scores(self.norm(self.blocks(x)))


# The training -------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, lr: float, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW. Weight decay is for matrices; norms and biases are left alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # Fused: one kernel for all parameters of a group instead of several for each.
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device.type != "cpu")


def make_autocast(precision: str | None, device: torch.device) -> torch.autocast:
    """Return autocast to bfloat16 if it is chosen, or by default if the GPU computes in it."""
    if precision is None:  # CPUs and older GPUs would only emulate it
        has_bfloat16 = device.type == "xpu" or (
            device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        )
        precision = "bfloat16" if has_bfloat16 else "float32"
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of a step: linear up to --lr, then half a cosine down to a tenth of it."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def next_byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def train_step(
    ddp: DDP,
    optimizer: torch.optim.Optimizer,
    noise: GradientNoiseScale,
    data: Tensor,
    starts: Tensor,
    args: argparse.Namespace,
    autocast: torch.autocast,
) -> Tensor:
    """Make one optimizer step on this rank's windows; return their mean loss."""
    mean_loss = torch.zeros((), device=data.device)
    # Gradients add up on each rank; DDP averages them over the ranks in the last micro-batch.
    for batch, weight in accumulate(ddp, starts.split(args.batch_size)):
        inputs, targets = windows(data, batch, args.context)
        with autocast:
            scores = ddp(inputs)
        loss = weight * next_byte_loss(scores, targets)
        loss.backward()
        mean_loss += loss.detach()
    noise.update()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss


def held_out_loss(
    model: nn.Module, data: Tensor, args: argparse.Namespace, dist: Distributed
) -> float:
    """Return the mean loss over windows spread over the held-out text; the ranks share the work.

    It takes the model without DDP, as the ranks may have different numbers of batches.
    """
    count = min(HELD_OUT_WINDOWS, (len(data) - 1) // args.context)
    starts = torch.linspace(0, len(data) - args.context - 1, count, dtype=torch.float64).long()
    total = torch.zeros(2, device=data.device)  # loss, windows
    with torch.no_grad():
        for batch in starts[dist.rank :: dist.world_size].split(args.batch_size):
            inputs, targets = windows(data, batch, args.context)
            loss = next_byte_loss(model(inputs), targets)
            total += torch.stack([loss, torch.ones_like(loss)]) * len(batch)
    loss_sum, window_count = dist.all_reduce_mean(total).tolist()
    return loss_sum / window_count


class Progress:
    """Prints the mean loss and the speed, and measures the time of the training."""

    def __init__(self, step: int, tokens_per_step: int, dist: Distributed) -> None:
        self.first_step = self.last_step = step
        self.start = self.last_time = time.perf_counter()
        self.tokens_per_step, self.dist = tokens_per_step, dist
        self.loss_sum = torch.zeros((), device=dist.device)  # read when printed, as that waits

    def report(self, step: int, args: argparse.Namespace) -> float:
        """Print a line; return the seconds since the start, the same on every rank."""
        steps, now = step - self.last_step, time.perf_counter()
        values = torch.tensor([self.loss_sum.item() / steps, now - self.start])
        loss, seconds = self.dist.all_reduce_mean(values.to(self.dist.device)).tolist()
        speed = steps * self.tokens_per_step / (now - self.last_time)
        log.info(
            f"step {step:5d}/{args.steps}  loss {loss:.4f}  "
            f"lr {learning_rate(step - 1, args):.2e}  {speed:,.0f} tokens/s"
        )
        self.loss_sum.zero_()
        self.last_step, self.last_time = step, now
        return seconds

    def report_end(self) -> None:
        seconds = self.last_time - self.start
        tokens = (self.last_step - self.first_step) * self.tokens_per_step
        log.info(
            f"{tokens:,} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):,.0f} tokens/s"
        )


def main() -> int:
    args = parse_arguments()
    with setup_distributed(args.backend) as dist, contextlib.ExitStack() as at_end:
        data, held_out_data = read_text(args, dist)
        torch.manual_seed(0)
        model = GPT(args.layers, args.heads, args.width, args.context).to(dist.device)
        if args.compile:
            model.compile()
        ddp = DDP(model, device_ids=dist.device_ids)
        optimizer = make_optimizer(model, args.lr, dist.device)
        autocast = make_autocast(args.precision, dist.device)
        global_batch = dist.world_size * args.accumulate * args.batch_size
        log.info(
            f"{len(data):,} bytes to train on, {len(held_out_data):,} held out; "
            f"{sum(p.numel() for p in model.parameters()):,} parameters; "
            f"{global_batch * args.context:,} tokens per step"
        )

        order = torch.Generator().manual_seed(0)
        noise = GradientNoiseScale(ddp, args.batch_size)
        state = {"model": ddp, "optimizer": optimizer, "order": order, "noise": noise}
        stop = checkpoints = found = None
        if args.checkpoints:
            zeros = torch.zeros(args.batch_size, args.context, dtype=torch.long, device=dist.device)
            with autocast:
                prime_ddp_buckets(ddp, lambda: ddp(zeros).float().sum())
            stop = at_end.enter_context(StopSignal(dist))
            checkpoints = at_end.enter_context(Checkpointer(args.checkpoints))
            found = checkpoints.load_latest(state)
        first_step = found.step if found else 0
        if found:
            log.info(f"resuming after step {first_step}")

        progress = Progress(first_step, global_batch * args.context, dist)
        for step in range(first_step + 1, args.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, args)
            # Every rank draws the whole global batch and takes its share: no two are the same.
            starts = torch.randint(len(data) - args.context, (global_batch,), generator=order)
            share = starts[dist.rank :: dist.world_size]
            progress.loss_sum += train_step(ddp, optimizer, noise, data, share, args, autocast)

            is_last = step == args.steps
            if step % args.log_every == 0 or is_last:
                is_last |= progress.report(step, args) >= args.max_seconds
            stopping = stop is not None and stop.should_stop()  # the same result on every rank
            if checkpoints and (stopping or is_last):
                checkpoints.save_and_wait(step, state)
            elif checkpoints and step % args.save_every == 0:
                checkpoints.save(step, state)  # in the background; a failure is only logged
            if stopping:
                log.info(f"stopped after step {step}: {stop.reason}")
            if stopping or is_last:
                break

        if stop is None or not stop.stopped:
            progress.report_end()
            with autocast:
                loss = held_out_loss(model, held_out_data, args, dist)
            entropy = unigram_entropy(held_out_data)
            log.info(f"held-out loss {loss:.4f} nats per byte; unigram entropy {entropy:.4f}")
            log.info(f"gradient noise scale {noise.value:,.0f} sequences; {global_batch} per step")

    if stop is None:
        return 0
    if stop.stopped and dist.is_main:
        requeue()
    return stop.exit_status


if __name__ == "__main__":
    sys.exit(main())
