"""Compare examples/03_text_lm.py with nanoGPT's train.py: same model, same data, same machine.

    python tests/bench/nanogpt.py FOLDER_OF_NANOGPT [--device cuda --compile] [--model gpt2] [--turns 8] [--seeds 8]

Speed: both train 6 layers of width 384 with a context of 256, or GPT-2, with 12 sequences per step; on a GPU, both as
the single rank of DDP. They take turns of some steps; the other one waits meanwhile. Prints tokens per second of each
turn, and the median of the ratios of two successive turns. A turn lasts from the end of one optimizer step to that of
another; neither evaluates or saves in it.

Loss: both train a smaller model several times, each time with another seed for model and data. Prints the mean loss
over each tenth of the steps. Within noise means: in each tenth, the means over the seeds of both differ by less than 4
standard errors of that difference, and over all tenths but the first by less than 3. Of two programs that are the same,
1 or 2 in 100 comparisons of 8 seeds are found to differ.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "03_text_lm.py"
SPEED = {"small": {"layers": 6, "heads": 6, "width": 384, "context": 256, "batch": 12},
         "gpt2": {"layers": 12, "heads": 12, "width": 768, "context": 1024, "batch": 12}}
LOSS_SIZE = {"layers": 4, "heads": 4, "width": 128, "context": 64, "batch": 16}
LOSS = re.compile(r"^(?:step +\d+/\d+|iter \d+:) +loss ([\d.]+)", re.MULTILINE)


class Side:
    """One of the two trainings, in a process that waits between turns."""

    def __init__(self, folder: Path, script: Path, options: list[str], name: str, threads: int, seed: int = 0,
                 port: int = 0) -> None:
        self.output, self.peak_bytes = folder / name, 0
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
                   "PYTHONPATH": f"{script.parent}:{os.environ.get('PYTHONPATH', '')}"}
        if port:  # nanoGPT uses DDP with these variables
            environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [sys.executable, __file__, "--run", str(seed), str(script), *options]
        with self.output.open("w") as file:
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                                             text=True, env=environ, cwd=folder)

    def turn(self, steps: int) -> float:
        """Make steps, and return their seconds."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self.output.name} ended:\n{self.output.read_text()[-3000:]}")
        seconds, self.peak_bytes = json.loads(answer)
        return float(seconds)

    def losses(self) -> list[float]:
        return [float(loss) for loss in LOSS.findall(self.output.read_text())]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def run(seed: int, script: str, options: list[str]) -> None:
    """Be one side: make as many steps as the parent process requests, and report their time."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the script go to the file
    remaining, start = int(requests.readline()), time.perf_counter()

    def after_step(*_: object) -> None:
        nonlocal remaining, start
        remaining -= 1
        if remaining == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            print(json.dumps([time.perf_counter() - start, peak]), file=answers, flush=True)
            remaining = int(requests.readline() or os._exit(0))
            start = time.perf_counter()

    register_optimizer_step_post_hook(after_step)
    set_seed = torch.manual_seed
    torch.manual_seed = lambda number: set_seed(number + 1000 * seed)  # nanoGPT has no option for it
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def write_data(folder: Path) -> None:
    """Write the sources of Python's library as a text, and in nanoGPT's format: a token is a byte."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    text = example["standard_library"](SimpleNamespace(all_reduce_mean=lambda value: value)).numpy()
    text.tofile(folder / "text")
    tokens = text.astype(numpy.uint16)
    border = len(tokens) - len(tokens) // 10
    for dataset in ("text", "tokens"):
        data = folder / "data" / dataset
        data.mkdir(parents=True)
        tokens[:border].tofile(data / "train.bin")
        tokens[border:].tofile(data / "val.bin")
    # The other data set has none: nanoGPT then takes the vocabulary of GPT-2, as 03 does for --tokens.
    (folder / "data" / "text" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def start(nanogpt: Path | None, folder: Path, size: dict[str, int], steps: int, args: argparse.Namespace,
          seed: int = 0, threads: int = 1, log_every: int = 1, is_text: bool = True) -> list[Side]:
    """Start both sides with the same settings, or 03 alone. is_text: a vocabulary of 256, otherwise that of GPT-2."""
    warmup, is_gpu = steps // 10, args.device == "cuda"
    data = ["--text", str(folder / "text")] if is_text else ["--tokens", str(folder / "data" / "tokens")]
    ours = [*data, "--batch-size", str(size["batch"]), "--accumulate", str(size.get("accumulate", 1)), "--lr", "1e-3",
            "--steps", str(steps), "--warmup", str(warmup), "--log-every", str(log_every),
            "--eval-every", str(10 * steps), "--seed", str(seed), "--precision", "bfloat16" if is_gpu else "float32",
            *(["--compile"] if args.compile else []), *([] if is_gpu else ["--backend", "gloo"])]
    for name in ("layers", "heads", "width", "context"):
        ours += [f"--{name}", str(size[name])]
    theirs = {
        "dataset": "text" if is_text else "tokens", "device": args.device, "compile": args.compile,
        "dtype": "bfloat16" if is_gpu else "float32", "n_layer": size["layers"], "n_head": size["heads"],
        "n_embd": size["width"], "block_size": size["context"], "batch_size": size["batch"],
        "gradient_accumulation_steps": size.get("accumulate", 1), "dropout": 0.0, "bias": False,
        "learning_rate": 1e-3, "min_lr": 1e-4,
        "max_iters": steps, "lr_decay_iters": steps, "warmup_iters": warmup, "log_interval": log_every,
        "eval_interval": 10 * steps, "eval_iters": 1}
    options = [f"--{name}={value}" for name, value in theirs.items()]
    ports = [0, 0]
    if is_gpu:
        with socket.socket() as one, socket.socket() as other:  # both open: two ports
            for listener in (one, other):
                listener.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1], other.getsockname()[1]]
    sides = [Side(folder, EXAMPLE, ours, f"03-{seed}", threads, port=ports[0])]
    if nanogpt:
        sides.append(Side(folder, nanogpt / "train.py", options, f"nanoGPT-{seed}", threads, seed, ports[1]))
    return sides


def compare_speed(nanogpt: Path, folder: Path, args: argparse.Namespace) -> float:
    size, threads = SPEED[args.model], len(os.sched_getaffinity(0))
    sides = start(nanogpt, folder, size, 10_000, args, threads=threads, log_every=10, is_text=args.model == "small")
    tokens = size["batch"] * size["context"] * args.steps
    for side in sides:
        side.turn(args.warm_up)
    ratios = []
    print("turn   03 tokens/s   nanoGPT tokens/s   ratio")
    for number in range(args.turns):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):  # neither is always the first
            seconds[which] = sides[which].turn(args.steps)
        ratios.append(seconds[1] / seconds[0])
        ours, theirs = (tokens / time for time in seconds)
        print(f"{number + 1:4d} {ours:13,.0f} {theirs:18,.0f} {ratios[-1]:7.3f}", flush=True)
    for side in sides:
        side.end()
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return ratio


def compare_losses(nanogpt: Path, folder: Path, args: argparse.Namespace) -> bool:
    curves: list[list[list[float]]] = [[], []]  # of each side and seed: the mean loss of each tenth
    tenth = args.loss_steps // 10
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        sides = start(nanogpt, folder, LOSS_SIZE, args.loss_steps, args, seed)
        with ThreadPoolExecutor() as pool:  # no time is measured: both at once
            list(pool.map(lambda side: side.turn(args.loss_steps), sides))
        for side, means in zip(sides, curves, strict=True):
            losses = side.losses()
            side.end()
            means.append([statistics.fmean(losses[i * tenth:(i + 1) * tenth]) for i in range(10)])

    print(f"mean loss over {tenth} steps each, {args.seeds} seeds\n"
          "steps          03   nanoGPT   difference   standard error")
    is_same = True
    for i in range(11):
        ours, theirs = ([curve[i] if i < 10 else statistics.fmean(curve[1:]) for curve in side] for side in curves)
        a, b = statistics.fmean(ours), statistics.fmean(theirs)
        error = math.sqrt((statistics.variance(ours) + statistics.variance(theirs)) / args.seeds)
        is_same = is_same and abs(a - b) < (4 if i < 10 else 3) * error
        name = f"to {(i + 1) * tenth}" if i < 10 else f"from {tenth + 1}"
        print(f"{name:9} {a:.4f} {b:9.4f} {a - b:+12.4f} {error:16.4f}")
    print(f"loss curves: {'within noise' if is_same else 'DIFFERENT'}")
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanogpt", type=Path, metavar="FOLDER_OF_NANOGPT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--model", choices=SPEED, default="small", help="for the speed")
    parser.add_argument("--turns", type=int, default=8, help="of each side; 0: no comparison of the speed")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the first turn")
    parser.add_argument("--seeds", type=int, default=8, help="at least 2; 0: no comparison of the losses")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--loss-steps", type=int, default=300)
    args = parser.parse_args()
    nanogpt, is_good = args.nanogpt.resolve(), True
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as name:
        folder = Path(name)
        write_data(folder)
        (folder / "configurator.py").symlink_to(nanogpt / "configurator.py")
        if args.turns:
            is_good = compare_speed(nanogpt, folder, args) >= 1
        if args.seeds:
            is_good = compare_losses(nanogpt, folder, args) and is_good
    return int(not is_good)


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
