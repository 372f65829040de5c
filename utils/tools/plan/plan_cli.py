"""`plan`: predict memory, step time and scaling before a job is submitted."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...log import print_result
from ..cli.arguments import ArgumentParser
from ..submission import profiles
from . import advice, traced
from .figures import EXACT_DIGITS, gpus_text, percent, seconds_text, with_unit
from .hardware import (
    LAUNCH_SECONDS,
    Accelerator,
    Hardware,
    Link,
    Network,
    Node,
    PredictionError,
    read_links,
)
from .step_model import (
    MEASURED_ERROR,
    OPTIMIZER_STATES,
    PRECISIONS,
    SPREAD,
    Workload,
    curve_sizes,
    even_workload,
    holds_up_to,
    scaling,
    state_memory,
    workload,
)

if TYPE_CHECKING:
    from .trace import Trace

# Default, if no GPU is given.
_GPU = "a100-40"
_BATCH = "{batch}"  # placeholder in a script's arguments
DESCRIPTION = """\
Predict memory, step time and scaling of DDP training. Needs neither a GPU nor an allocation.

  ddpkit plan --site perlmutter --nodes 8 train.py --batch-size 32  an unchanged script
  ddpkit plan --gpu h100 --batch 32 train.py --batch-size {batch}   and its largest micro-batch
  ddpkit plan --model my_models:gpt --batch 8 --gpu a100-40         a factory function (see below)
  ddpkit plan --parameters 7e9 --precision bf16 --gpus 8 --bandwidth 50e9 --compute-seconds 0.2

A factory function receives the size of the micro-batch, and returns (model, inputs) or (model,
inputs, loss function). A script runs until its second optimizer step, with tensors that have shapes
but no data. Where values decide how the steps go on, or under FSDP2, measure a step instead.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Print a prediction; return 0, or 1 if something cannot be predicted."""
    args = _parse(sys.argv[1:] if words is None else words)
    try:
        plan, page = make_plan(args)
        if args.html:
            if page is None:
                raise PredictionError(
                    "A page needs the time of a step, which is unknown. Give --gpu TYPE or "
                    "--compute-seconds."
                )
            advice.write_page(page, args.html)
    except (PredictionError, profiles.ProfileError) as error:
        print(f"ddpkit plan: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}. Expected a file in a writable folder"
        print(f"ddpkit plan: error: {problem}. Correct --html.", file=sys.stderr)
        return 1
    print_result(json.dumps(plan, indent=1) if args.json else advice.as_text(plan))
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="ddpkit plan",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is trained (one of three)")
    what.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    what.add_argument("--model", metavar="MODULE:FUNCTION", help="a factory function")
    what.add_argument(
        "--parameters", type=_count, metavar="N", help="number of parameters: 7e9, 7B or 124M"
    )
    what.add_argument(
        "--trace-timeout",
        type=float,
        default=300,
        metavar="S",
        help="seconds for two steps of SCRIPT (300)",
    )
    how = parser.add_argument_group("how it is trained")
    how.add_argument("--batch", type=int, default=1, help="samples per micro-batch and GPU (1)")
    how.add_argument(
        "--optimizer", choices=OPTIMIZER_STATES, default="adamw", help="default: adamw"
    )
    how.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: fp32")
    how.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="STEPS",
        help="micro-batches per optimizer step (1)",
    )
    how.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="default: that of DDP")
    how.add_argument(
        "--compute-seconds",
        type=float,
        metavar="S",
        help="measured seconds of one forward and backward pass; default: from the GPU's peak",
    )
    how.add_argument(
        "--spread",
        type=float,
        default=SPREAD,
        metavar="R",
        help=f"standard deviation of computation time across GPUs / its mean ({SPREAD:.3f})",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument("--site", metavar="NAME|FILE", help="a profile (see ddpkit sites list)")
    where.add_argument("--gpu", metavar="TYPE", help="an accelerator of jobs/hardware.yaml")
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs on each node")
    where.add_argument("--nodes", type=int, metavar="N", help="nodes of the job")
    where.add_argument("--gpus", type=int, metavar="N", help="instead of --nodes")
    where.add_argument("--inside", metavar="LINK|B/S", help="link of each GPU within a node")
    where.add_argument("--between", metavar="LINK|B/S", help="links of a node: '4 slingshot-200'")
    where.add_argument("--bandwidth", metavar="B/S", help="of --inside and --between")
    where.add_argument("--links", type=Path, metavar="FILE", help="links measured by ddpkit bench")
    where.add_argument("--ring", action="store_true", help="rings only, as in gloo")
    out = parser.add_argument_group("what is printed")
    out.add_argument("--json", action="store_true", help="the prediction as JSON")
    out.add_argument("--html", type=Path, metavar="FILE", help="a page with sliders")
    args = parser.parse_args(words)
    if sum((bool(args.script), bool(args.model), args.parameters is not None)) != 1:
        parser.error("give exactly one of SCRIPT, --model and --parameters")
    for name in ("precision", "optimizer", "accumulate"):
        if args.script and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} is for --model and --parameters: a script itself decides that")
    counts = ("batch", "accumulate", "gpus", "nodes", "gpus_per_node")
    for name in counts:
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected a number above 0")
    if not 0 <= args.spread < 1:
        parser.error(f"--spread is {args.spread}; expected a number from 0 to below 1")
    return args


def _count(text: str) -> float:
    """Parse a number with a suffix used in papers: 124M, 7B, 1.5T."""
    factors = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    number, factor = text.strip(), factors.get(text.strip()[-1:].lower(), 1.0)
    try:
        count = float(number[:-1] if factor > 1 else number) * factor
    except ValueError:
        count = math.nan
    if not 0 < count < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters: 7e9, 7B or 124M")
    return count


def make_plan(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a prediction as a JSON object, and the data of its page.

    There is no page if the time of a step is unknown. Raises PredictionError.
    """
    hardware = Hardware()
    site = _site(args, hardware)
    network, links, assumed = _network(args, hardware, site)
    gpus = args.gpus or (args.nodes or 1) * network.gpus_per_node
    name = args.gpu or (site.gpu if site else None)
    gpu = hardware.accelerator(name) if name else None
    notes = [hardware.memory_note(gpu)] if gpu else []
    nodes = math.ceil(gpus / network.gpus_per_node)
    if nodes > 1:
        notes.append(hardware.start_note(nodes))

    trace = None if args.parameters else _trace(args, args.batch)
    largest: traced.LargestBatch | None = None
    if trace and gpu is None and args.compute_seconds is not None:
        assumed.append(f"operations take shares of the step as on {_GPU} (--gpu)")
    bucket_view = bool(trace and trace.ddp_options.get("gradient_as_bucket_view"))
    if trace is None:
        memory = state_memory(args.parameters, args.precision, args.optimizer)
        notes.append("The memory excludes activations. Give --model or a script to include them.")
    else:
        memory_of = functools.partial(traced.memory, bucket_view=bucket_view)
        memory = memory_of(trace)
        if gpu is not None:
            largest = _largest_batch(args, trace, gpu, memory_of, notes)
        notes += trace.notes

    work = _workload(args, trace, gpu)
    fit = advice.Fit()
    if gpu is not None:
        fit = advice.memory_advice(
            memory,
            gpu.memory,
            gpus,
            gpu.name,
            complete=trace is not None,
            largest=largest.samples if largest and not largest.unconfirmed else None,
            batch=args.batch if largest or not trace else None,
            passes=memory_of(trace, optimizer=False) if trace else None,
        )
    texts, points = list(fit.texts), []
    if work is None:
        gpu_option = "--gpu TYPE, a --site whose GPU is known, or " if trace else ""
        notes.append(f"No step time: give {gpu_option}--compute-seconds.")
    else:
        points = scaling(work, network, curve_sizes(gpus))
        gradient_bytes = float(PRECISIONS[args.precision].gradient)
        if args.script and trace:  # the script decides on the precision
            gradient_bytes = work.gradient_bytes / trace.num_parameters
        texts += advice.scaling_advice(work, network, gpus, gradient_bytes, fit)
        if args.compute_seconds is None and gpu is not None and trace is not None:
            notes.append(_estimate_note(gpu, work, trace))
        elif trace is not None:
            notes.append(
                "The computation is measured (--compute-seconds): the range of times is narrower, "
                f"a factor of {MEASURED_ERROR}."
            )
    plan = {
        "title": _title(args, name, gpus, network, links),
        "assumed": assumed,
        "inputs": _inputs(args, network, gpus, work, trace),
        "gpus": gpus,
        "memory": memory,
        "peak": trace.peak(without_gradients=bucket_view).where if trace else "",
        "largest_micro_batch": {"gpu": name, **vars(largest)} if largest else None,
        "scaling": [point.as_dict() for point in points],
        "holds_up_to": {
            str(level): holds_up_to(points, level)
            for level in (advice.GOOD, advice.LEAST)
            if points
        },
        "advice": texts,
        "notes": notes,
    }
    if work is None:
        return plan, None
    measured = args.compute_seconds is not None
    return plan, advice.page_data(plan, work, traced=trace is not None, measured=measured)


def _title(
    args: argparse.Namespace, gpu: str | None, gpus: int, network: Network, links: str
) -> str:
    """Return one line: the training, the site, and the hardware."""
    if args.script:
        training = shlex.join([Path(args.script[0]).name, *args.script[1:]])
        training = training.replace(shlex.quote(_BATCH), _BATCH).replace(_BATCH, str(args.batch))
    else:
        training = args.model or f"{with_unit(args.parameters, '', EXACT_DIGITS)} parameters"
    place = f" on {Path(args.site).stem}" if args.site else ""
    device = f" {gpu}" if gpu else ""
    return (
        f"{training}{place}: {gpus_text(gpus)}{device}, {network.gpus_per_node} per node, {links}"
    )


def _estimate_note(gpu: Accelerator, work: Workload, trace: Trace) -> str:
    """Return how the time of a step is estimated, and how to improve the estimate."""
    kind = traced.uncertainty(trace, gpu, LAUNCH_SECONDS)
    measure = (
        "A --compute-seconds that ddpkit bench ddp measured on one GPU narrows the range to a "
        f"factor of {MEASURED_ERROR}."
    )
    wide = (
        f"The computation is predicted from the peaks of {gpu.name} ({gpu.source}). Published "
        f"speeds of steps with mostly {kind.kind} are within a factor of {kind.factor} of such "
        "predictions in 9 of 10 cases (docs/performance.md); the range has it. "
    )
    if kind is traced.OTHER:
        wide = (
            f"The computation is predicted from the peaks of {gpu.name} ({gpu.source}). Its range "
            f"is a factor of {kind.factor}, because no published speed is known of such a step. "
        )
    busy = work.computation.busy
    if busy == 1:
        return wide + measure
    return (
        f"The CPU limits the step: it starts {len(trace.operations)} operations, each in "
        f"{seconds_text(LAUNCH_SECONDS)} (measured on one host with an H100), and the GPU computes "
        f"for {percent(busy)} of that time. A larger micro-batch or torch.compile uses the rest. "
        + wide
        + measure
    )


def _site(args: argparse.Namespace, hardware: Hardware) -> Node | None:
    if args.site is None:
        return None
    profile = profiles.load(args.site)
    if hardware.has_site(profile.name):
        return hardware.node(profile.name)
    if args.gpus_per_node is None:
        args.gpus_per_node = profile.gpus_per_node
    missing = [f"--{key}" for key in ("gpu", "inside", "between") if getattr(args, key) is None]
    if missing and not (args.links or args.bandwidth):
        raise PredictionError(
            f"The hardware of {profile.name} is not in jobs/hardware.yaml. Give "
            f"{', '.join(missing)}, or measured links with --links."
        )
    return None


def _network(
    args: argparse.Namespace, hardware: Hardware, site: Node | None
) -> tuple[Network, str, list[str]]:
    """Return the network, its links in words, and assumptions for values that were not given."""
    assumed = []

    def link(text: str | None, default: Link) -> Link:
        text = text or args.bandwidth
        if text is None:
            return default
        if not any(digit in text for digit in "0123456789") or " " in text.strip():
            return hardware.link(text)  # Python accepts "infinity" and "nan" as numbers
        try:
            bandwidth = float(text)
        except ValueError:
            return hardware.link(text)
        if not 0 < bandwidth < math.inf:
            raise PredictionError(
                f"The bandwidth of a link is {text}. Expected a number of bytes per second above "
                "0, such as 25e9, or a link of jobs/hardware.yaml."
            )
        return Link(bandwidth, default.latency)

    node = site or hardware.accelerator(args.gpu or _GPU).node
    per_node = args.gpus_per_node or node.gpus_per_node
    usual = "" if args.gpu else f", as with {_GPU}"
    if not args.gpus_per_node and not site:
        assumed.append(f"{per_node} GPUs per node{usual} (--gpus-per-node)")
    inside, between = hardware.link(node.inside), hardware.link(node.between)
    if args.links:
        inside, between = read_links(args.links, per_node)
    elif not site and not args.bandwidth:
        if args.inside is None:
            assumed.append(f"{node.inside} within a node (--inside)")
        if args.between is None:
            assumed.append(f"{node.between} between nodes (--between)")
    inside, between = link(args.inside, inside), link(args.between, between)
    links = (
        f"{with_unit(inside.bandwidth, 'B/s', EXACT_DIGITS)} within a node and "
        f"{with_unit(between.bandwidth, 'B/s', EXACT_DIGITS)} between nodes"
    )
    return Network(inside, between, per_node, tree=not args.ring), links, assumed


def _trace(args: argparse.Namespace, batch: int) -> Trace:
    if importlib.util.find_spec("torch") is None:
        raise PredictionError(
            f"{sys.executable} has no torch. Expected torch for --model and for a script. Activate "
            "an environment with torch, or use --parameters."
        )
    _import_torch()
    if args.model:
        return traced.trace_factory(
            args.model,
            batch,
            args.optimizer,
            args.precision,
            args.accumulate,
        )
    from .script import trace_script

    words = [word.replace(_BATCH, str(batch)) for word in args.script[1:]]
    return trace_script(args.script[0], words, timeout=args.trace_timeout)


def _import_torch() -> None:
    """Import a trace's modules without garbage collection, a quarter of a short command's time."""
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")  # the first optimizer would import it
        gc.freeze()  # garbage is not searched at the end of the process either
    finally:
        gc.enable()


def _largest_batch(
    args: argparse.Namespace,
    trace: Trace,
    gpu: Accelerator,
    memory_of: Callable[[Trace], dict[str, float]],
    notes: list[str],
) -> traced.LargestBatch | None:
    if args.script and _BATCH not in " ".join(args.script[1:]):
        notes.append(
            "The largest micro-batch is unknown, because the script is traced at one size. Write "
            f"{_BATCH} for the micro-batch in its arguments, and its size as --batch."
        )
        return None

    def total(samples: int) -> float | None:
        # Data that a script loads is real.
        loaded = trace.peak().bytes["inputs"] * samples / args.batch if args.script else 0
        if loaded > host_memory() / 4:
            return None
        other = trace if samples == args.batch else _trace(args, samples)
        return sum(memory_of(other).values())

    from .trace import host_memory

    return traced.largest_batch(total, args.batch, gpu.memory)


def _workload(
    args: argparse.Namespace, trace: Trace | None, gpu: Accelerator | None
) -> Workload | None:
    bucket_mb = args.bucket_cap_mb
    if trace is None:
        if args.compute_seconds is None:
            return None
        return even_workload(
            args.parameters,
            args.precision,
            args.compute_seconds,
            args.accumulate,
            bucket_mb,
            args.spread,
        )
    if gpu is None and args.compute_seconds is None:
        return None
    measured = args.compute_seconds is not None
    accelerator = gpu or Hardware().accelerator(_GPU)
    shape = traced.computation(trace, accelerator, 0.0 if measured else LAUNCH_SECONDS)
    if args.compute_seconds is not None:
        shape = traced.scaled_to(shape, args.compute_seconds, trace.micro_steps)
    bucket_mb = bucket_mb or trace.ddp_options.get("bucket_cap_mb")
    work = workload(shape, bucket_mb, trace.micro_steps, args.spread)
    if measured:
        return work
    error = traced.uncertainty(trace, accelerator, LAUNCH_SECONDS).factor
    return replace(work, error=error, predicted=True)


def _inputs(
    args: argparse.Namespace,
    network: Network,
    gpus: int,
    work: Workload | None,
    trace: Trace | None,
) -> dict[str, Any]:
    """Return the initial values of the page's fields."""
    bucket_mb = args.bucket_cap_mb or (trace.ddp_options.get("bucket_cap_mb") if trace else None)
    return {
        "parameters": args.parameters or (trace.num_parameters if trace else 0),
        "precision": args.precision,
        "optimizer": args.optimizer,
        "gpus": gpus,
        "gpus_per_node": network.gpus_per_node,
        "inside_bandwidth": network.inside.bandwidth,
        "inside_latency": network.inside.latency,
        "between_bandwidth": network.between.bandwidth,
        "between_latency": network.between.latency,
        "compute_seconds": work.micro_step if work else None,
        "bucket_mb": bucket_mb or 25,
        "default_buckets": not bucket_mb,
        "accumulate": trace.micro_steps if trace else args.accumulate,
        "spread": args.spread,
        "tree": network.tree,
    }
