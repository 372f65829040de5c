"""A GPT trained on real text: Python's own sources, a file of yours, or tokens on disk.

one process     python examples/03_text_lm.py
two processes   torchrun --standalone --nproc-per-node 2 examples/03_text_lm.py --text FILE
any MPI         mpiexec -n 4 python examples/03_text_lm.py
Slurm job       sbatch -A ACCOUNT -N 2 jobs/slurm.sh examples/03_text_lm.py
PBS job         ARGS=examples/03_text_lm.py qsub -A ACCOUNT jobs/pbs.sh

The defaults suit two CPU cores. The options of GPT-2 (124M) on GPUs, with 0.5 million tokens in
each step of 8 ranks (TOKENS holds train.bin and val.bin: tokens as unsigned 16-bit numbers):

    --model gpt2 --tokens TOKENS --compile --lr 6e-4 --warmup 2000 --steps 600000
    --eval-every 2000 --save-every 1000 --checkpoints runs/gpt2

and with 80 GB of memory on each GPU --batch-size 64 --accumulate 1, with 40 GB --batch-size 32
--accumulate 2. `ddpkit plan` finds the largest batch size of other models and GPUs.

With `--checkpoints FOLDER` the same command resumes a run that was stopped or killed (see
05_survive.py), and `ddpkit plot FOLDER` draws its loss and speed. Add `--backend gloo`
to train on CPUs.
"""

import argparse
import contextlib
import hashlib
import math
import sys
import sysconfig
import time
import zlib
from pathlib import Path

# Before torch: a stop signal that arrives while torch loads is then held, not lost.
from ddpkit import Distributed, setup_distributed
from ddpkit.checkpoint import Checkpointer
from ddpkit.data import sample_seed
from ddpkit.log import get_logger
from ddpkit.metrics import Metrics
from ddpkit.preemption import StopSignal, requeue
from ddpkit.tools.plan.hardware import Hardware, PredictionError
from ddpkit.training import GradientNoiseScale, accumulate, prime_ddp_buckets

# isort: split
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

log = get_logger(__name__)  # log.info prints on rank 0 alone

# Layers, heads, width of the residual stream, and tokens that the model sees at once.
MODELS = {
    "tiny": (4, 4, 128, 64),  # learns in a minute on two CPU cores
    "small": (6, 6, 384, 256),  # 11 million parameters
    "gpt2": (12, 12, 768, 1024),  # 124 million
    "gpt2-medium": (24, 16, 1024, 1024),  # 350 million
    "gpt2-large": (36, 20, 1280, 1024),  # 774 million
    "gpt2-xl": (48, 25, 1600, 1024),  # 1,558 million
}
GPT2_VOCABULARY = 50304  # its 50,257 tokens, rounded up to a multiple of 64, which is faster
LIBRARY_BYTES = 8_000_000  # of Python's sources that are read
HELD_OUT_WINDOWS = 256  # on which the held-out loss is measured


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT with DDP.")
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="default: the sources of Python's library")
    add("--tokens", type=Path, metavar="FOLDER", help="train.bin and val.bin instead of a text")
    add("--model", choices=MODELS, default="tiny", help="default: %(default)s")
    add("--layers", type=int, help="default of this and the next three: as --model has it")
    add("--heads", type=int)
    add("--width", type=int, help="of the residual stream; a multiple of --heads")
    add("--context", type=int, help="tokens that the model sees at once")
    add("--batch-size", type=int, default=8, help="sequences per rank and micro-batch")
    add("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    add("--steps", type=int, default=600, help="optimizer steps")
    add("--max-seconds", type=float, default=math.inf, help="end the training after this time")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--warmup", type=int, default=50, help="steps of linear warm-up, before the cosine decay")
    add("--precision", choices=("float32", "bfloat16", "float16"), help="default: the fastest")
    add("--compile", action="store_true", help="compile the model")
    add("--seed", type=int, default=0, help="of the model and of the order of the data")
    add("--log-every", type=int, default=25, help="steps between progress lines")
    add("--eval-every", type=int, default=200, help="steps between evaluations")
    add("--sample", type=int, default=200, help="tokens of text to write at the end")
    add("--checkpoints", type=Path, metavar="FOLDER", help="save there and resume from there")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--tensorboard", action="store_true", help="also log to --checkpoints for TensorBoard")
    add("--wandb", metavar="PROJECT", help="also log to --checkpoints for Weights & Biases")
    add("--backend", help="gloo, nccl or xccl (default: the device's)")
    args = parser.parse_args()
    layers, heads, width, context = MODELS[args.model]
    args.layers, args.heads = args.layers or layers, args.heads or heads
    args.width, args.context = args.width or width, args.context or context
    return args


# The data -----------------------------------------------------------------------------------------


def standard_library(job: Distributed) -> Tensor:
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
    text = text[:LIBRARY_BYTES]
    checksum = zlib.crc32(text)
    if job.all_reduce_mean(checksum) != checksum:
        raise RuntimeError(
            "the hosts have different sources of Python. Expected the same ones on all. Use the "
            "same Python, or --text with a file that they share"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def memory_map(path: Path, dtype: torch.dtype) -> Tensor:
    """Return a file as a tensor. Its pages are read when they are used; a host keeps them once."""
    return torch.from_file(str(path), size=path.stat().st_size // dtype.itemsize, dtype=dtype)


def read_data(args: argparse.Namespace, job: Distributed) -> tuple[Tensor, Tensor]:
    """Return the tokens to train on and those held out. The tokens of a text are its bytes."""
    if args.tokens:  # int16: torch cannot index uint16; windows() corrects the sign
        data = memory_map(args.tokens / "train.bin", torch.int16)
        held_out = memory_map(args.tokens / "val.bin", torch.int16)
    else:
        text = memory_map(args.text, torch.uint8) if args.text else standard_library(job)
        data, held_out = text.tensor_split([len(text) - len(text) // 10])
    if min(len(data), len(held_out)) <= args.context:
        raise ValueError(
            f"{args.tokens or args.text} has {len(data)} tokens to train on and {len(held_out)} "
            f"held out. Expected more than --context {args.context} of each. Use a longer text"
        )
    return data, held_out


def windows(
    data: Tensor, starts: Tensor, context: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tokens from each start, and the token after each; both (len(starts), context)."""
    spans = data[starts[:, None] + torch.arange(context + 1)].long() & 0xFFFF
    if device.type == "cuda":  # pinned memory is copied while the GPU computes
        spans = spans.pin_memory()
    spans = spans.to(device, non_blocking=True)
    return spans[:, :-1], spans[:, 1:]


def unigram_entropy(data: Tensor) -> float:
    """Return the least loss, in nats per token, of a model that sees no context."""
    frequencies = torch.bincount(data.long() & 0xFFFF).double() / len(data)
    return torch.special.entr(frequencies).sum().item()


# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention, then two layers on each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.query_key_value(self.attention_norm(x)).split(width, dim=2)
        per_head = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in projected)
        attended = scaled_dot_product_attention(*per_head, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(nn.functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Map tokens (batch, length) to the mean loss, or to scores of the next token."""

    def __init__(self, vocabulary: int, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream starts small, or it grows with each layer.
                into_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if into_stream else 1))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss, or without targets scores (batch, vocabulary) after the tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        x = self.norm(self.blocks(x))
        if targets is None:
            return linear(x[:, -1], self.token_embedding.weight)
        scores = linear(x, self.token_embedding.weight)  # the weights are shared, as in GPT-2
        # Compiled, the float32 scores are never in memory: each is converted where it is used.
        return cross_entropy(scores.flatten(0, 1).float(), targets.flatten())

    def flops_per_token(self) -> float:
        """Return the operations of a forward and backward pass (PaLM, arXiv:2204.02311, app. B)."""
        context, width = self.position_embedding.weight.shape
        parameters = sum(p.numel() for p in self.parameters()) - context * width
        return 6 * parameters + 12 * len(self.blocks) * width * context

    @torch.no_grad()
    def sample(self, prompt: Tensor, count: int, temperature: float = 0.8) -> Tensor:
        """Return the prompt (length) and `count` random tokens after it."""
        generator = torch.Generator(prompt.device).manual_seed(0)
        for _ in range(count):
            seen = prompt[-self.position_embedding.num_embeddings :]
            scores = self.forward(seen[None])[0].float()  # not compiled: each length is another
            chances = torch.softmax(scores / temperature, dim=-1)
            prompt = torch.cat([prompt, torch.multinomial(chances, 1, generator=generator)])
        return prompt


# The training -------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW. Weight decay is for matrices; the weights of norms are left alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # Fused: one kernel for all parameters of a group instead of several for each.
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def fastest_precision(device: torch.device) -> str:
    """Return the data type in which the device multiplies matrices fastest."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"  # gradients need a GradScaler
    return "float32" if device.type == "cpu" else "bfloat16"


def peak_flops(device: torch.device) -> float:
    """Return the 16-bit operations per second of a GPU that `ddpkit plan` knows, 0 for others."""
    if device.type != "cuda":
        return 0.0
    try:
        return Hardware().peak_flops(torch.cuda.get_device_name(device))
    except PredictionError as error:  # PyYAML is not installed
        log.info("No share of the peak: %s", error)
        return 0.0


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of a step: linear up to --lr, then half a cosine down to a tenth of it."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def micro_batches(
    data: Tensor, step: int, args: argparse.Namespace, job: Distributed
) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's inputs and targets of a step: windows that start anywhere in the text.

    Seed and step determine the windows of all ranks, so a resumed run needs no other state.
    """
    generator = torch.Generator().manual_seed(sample_seed(args.seed, 0, step))
    count = job.world_size * args.accumulate * args.batch_size
    starts = torch.randint(len(data) - args.context, (count,), generator=generator)
    share = starts[job.rank :: job.world_size]
    return [
        windows(data, batch, args.context, job.device) for batch in share.split(args.batch_size)
    ]


def train_step(
    ddp: DDP,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    noise: GradientNoiseScale,
    autocast: torch.autocast,
) -> Tensor:
    """Make one optimizer step; return this rank's mean loss."""
    mean_loss = torch.zeros((), device=batches[0][0].device)
    # Gradients add up on each rank; DDP averages them over the ranks in the last micro-batch.
    for (inputs, targets), weight in accumulate(ddp, batches):
        with autocast:
            loss = weight * ddp(inputs, targets)
        scaler.scale(loss).backward()  # the scaler does something in float16 only
        mean_loss += loss.detach()
    noise.update()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return mean_loss


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, args: argparse.Namespace, job: Distributed) -> float:
    """Return the mean loss over windows spread over the held-out text; the ranks share the work.

    It takes the model without DDP, as the ranks may have different numbers of batches.
    """
    count = min(HELD_OUT_WINDOWS, (len(data) - 1) // args.context)
    starts = torch.linspace(0, len(data) - args.context - 1, count, dtype=torch.float64).long()
    total = torch.zeros(2, device=job.device)  # loss, windows
    for batch in starts[job.rank :: job.world_size].split(args.batch_size):
        loss = model(*windows(data, batch, args.context, job.device))
        total += torch.stack([loss, torch.ones_like(loss)]) * len(batch)
    loss_sum, window_count = job.all_reduce_mean(total).tolist()
    return loss_sum / window_count


def describe_sample(model: GPT, held_out: Tensor, args: argparse.Namespace) -> str:
    """Return what the model writes after the beginning of the held-out text."""
    device = model.position_embedding.weight.device
    prompt = held_out[: args.context // 2].long().to(device) & 0xFFFF
    tokens = model.sample(prompt, args.sample).tolist()
    if args.tokens:  # with the package tiktoken: tiktoken.get_encoding("gpt2").decode(tokens)
        return f"sample: {tokens}"
    text = bytes(tokens).decode(errors="replace")
    return "sample:\n" + "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def main() -> int:
    args = parse_arguments()
    with setup_distributed(args.backend) as job, contextlib.ExitStack() as at_end:
        data, held_out = read_data(args, job)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")  # TF32 where float32 is used on a GPU
        vocabulary = GPT2_VOCABULARY if args.tokens else 256
        model = GPT(vocabulary, args.layers, args.heads, args.width, args.context).to(job.device)
        bucket_megabytes = 25  # gradients that are exchanged at once; this is DDP's default
        if args.compile:
            model.compile()
            # Each bucket ends a compiled graph, so that its exchange overlaps with the next graph.
            # Larger buckets make fewer graphs; one rank exchanges nothing and needs one graph.
            bucket_megabytes = 100
            torch._dynamo.config.optimize_ddp = job.world_size > 1
        ddp = DDP(
            model,
            device_ids=job.device_ids,
            bucket_cap_mb=bucket_megabytes,
            gradient_as_bucket_view=True,
        )
        optimizer = make_optimizer(model, args.lr)
        precision = args.precision or fastest_precision(job.device)
        half = torch.float16 if precision == "float16" else torch.bfloat16
        autocast = torch.autocast(job.device.type, half, enabled=precision != "float32")
        scaler = torch.amp.GradScaler(job.device.type, enabled=precision == "float16")
        noise = GradientNoiseScale(ddp, args.batch_size)
        global_batch = job.world_size * args.accumulate * args.batch_size
        tokens_per_step = global_batch * args.context
        log.info(
            f"{len(data):,} tokens to train on, {len(held_out):,} held out; "
            f"{sum(p.numel() for p in model.parameters()):,} parameters; "
            f"{tokens_per_step:,} tokens per step; {precision}"
        )
        metrics = at_end.enter_context(
            Metrics(
                job,
                args.checkpoints,
                unit="tokens",
                per_step=tokens_per_step,
                flops=tokens_per_step * model.flops_per_token(),
                peak_flops=peak_flops(job.device),
                last_step=args.steps,
                every=args.log_every,  # reading a value waits for the GPU
                print_every=args.log_every,
                tensorboard=args.tensorboard,
                wandb=args.wandb,
            )
        )
        state = {"model": ddp, "optimizer": optimizer, "scaler": scaler, "noise": noise}
        state |= {"metrics": metrics, "held_out_loss": math.nan}
        stop = checkpoints = found = None
        if args.checkpoints:
            zeros = torch.zeros(args.batch_size, args.context, dtype=torch.long, device=job.device)
            with autocast:
                prime_ddp_buckets(ddp, lambda: ddp(zeros, zeros))
            stop = at_end.enter_context(StopSignal(job))
            checkpoints = at_end.enter_context(Checkpointer(args.checkpoints, keep=2, keep_best=1))
            if found := checkpoints.load_latest(state):
                log.info(f"resuming after step {found.step}")

        start = time.perf_counter()
        first_step = found.step + 1 if found else 1
        next_batches = micro_batches(data, first_step, args, job)
        for step in range(first_step, args.steps + 1):
            lr = learning_rate(step - 1, args)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with metrics.data_wait():
                batches = next_batches

            loss = train_step(ddp, batches, optimizer, scaler, noise, autocast)
            next_batches = micro_batches(data, step + 1, args, job)  # while the GPU computes
            metrics.log(step, loss=loss, lr=lr)  # reads the loss later: that waits for the GPU

            is_last = step == args.steps
            if step % args.log_every == 0 and args.max_seconds < math.inf:
                seconds = job.all_reduce_mean(time.perf_counter() - start)  # the same on all ranks
                is_last |= seconds >= args.max_seconds
            is_evaluated = is_last or step % args.eval_every == 0
            if is_evaluated:
                with autocast:
                    state["held_out_loss"] = evaluate(model, held_out, args, job)
                metrics.log(step, held_out_loss=state["held_out_loss"])
            is_stopping = stop is not None and stop.should_stop()  # the same on all ranks
            if checkpoints:
                metric = state["held_out_loss"] if is_evaluated else None  # the best one is kept
                if is_last or is_stopping:
                    checkpoints.save_and_wait(step, state, metric=metric)
                elif is_evaluated or step % args.save_every == 0:
                    checkpoints.save(step, state, metric=metric)  # in the background
            if is_stopping:
                log.info(f"stopped after step {step}: {stop.reason}")
            if is_last or is_stopping:
                break

        metrics.flush()
        if stop is None or not stop.stopped:
            log.info(metrics.summary())
            if job.is_main and args.sample:
                with autocast:
                    log.info(describe_sample(model, held_out, args))
            entropy, unit = unigram_entropy(held_out), "token" if args.tokens else "byte"
            loss = state["held_out_loss"]
            log.info(f"held-out loss {loss:.4f} nats per {unit}; unigram entropy {entropy:.4f}")
            if math.isfinite(noise.value):  # not after a few steps
                log.info(f"noise scale {noise.value:,.0f} sequences; {global_batch} per step")

    if stop is None:
        return 0
    if stop.stopped and job.is_main:
        requeue()
    return stop.exit_status


if __name__ == "__main__":
    sys.exit(main())
