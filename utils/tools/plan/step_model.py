"""Predict memory, a DDP step and its scaling from numbers: the model of `plan` and its page.

All-reduces overlap with the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from .hardware import Network, sent_bytes

MIB = 1 << 20
FIRST_BUCKET = 1 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
BUCKET = 25 * MIB  # default of DistributedDataParallel(bucket_cap_mb=)
LARGEST = 1024  # largest number of GPUs in curves

# Expected maxima of 2 ** i standard normal numbers, by Blom's approximation: Statistical Estimates
# and Transformed Beta-Variables, 1958.
EXPECTED_MAXIMA = [NormalDist().inv_cdf((2**i - 0.375) / (2**i + 0.25)) for i in range(18)]

# 20 of 132 streaming multiprocessors drive a GPU's links: DeepSeek-V3, arXiv 2412.19437. The
# computation lacks them while it overlaps with communication.
COMMUNICATION_SHARE = 20 / 132

# DDP's own cost for each gradient (seconds, lowest and highest), and the share of the computation
# that the fastest published trainings on several GPUs lose otherwise. Fitted (docs/performance.md).
DDP_SECONDS = (4e-6, 40e-6)
LOSS = 0.03
MEASURED_ERROR = 1.04  # error of a step with measured computation: the mean on shaped links


@dataclass(frozen=True)
class Gradient:
    """A gradient or a bucket of gradients: when it is ready to be sent, and its size."""

    ready: float  # seconds after the start of the step
    size: float  # bytes


@dataclass(frozen=True)
class Computation:
    """The computation of a step on one GPU, in seconds after its start."""

    gradients: tuple[Gradient, ...]  # in the order in which they become ready
    backward_end: float
    optimizer: float = 0.0  # seconds of the optimizer, after the communication
    busy: float = 1.0  # share of the time in which the GPU computes; the rest it waits for kernels

    @property
    def total(self) -> float:
        return self.backward_end + self.optimizer


@dataclass(frozen=True)
class Step:
    """The predicted times of a step, in seconds."""

    computation: float
    communication: float  # seconds of all buckets
    exposed: float  # seconds in which the GPU waits for communication
    transfers: tuple[tuple[float, float, float], ...]  # (start, end, bytes) of each bucket
    overhead: float = 0.0  # seconds of DDP itself
    delay: float = 0.0  # seconds that slower GPUs, communication kernels and DDP may add
    # (lowest, highest) efficiency, if the time of the computation is predicted and may be wrong.
    ends: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        return self.computation + self.exposed + self.overhead

    @property
    def efficiency(self) -> float:
        """The share of the step that is computation: the speed-up over one GPU, per GPU.

        It is the upper end of the prediction.
        """
        return self.ends[1] if self.ends else self.computation / self.total

    @property
    def low_efficiency(self) -> float:
        """The efficiency with the delay, the lower end of the prediction."""
        return self.ends[0] if self.ends else self.computation / (self.total + self.delay)

    def seconds_range(self, error: float) -> tuple[float, float]:
        """Return the step's range of seconds, if a computation may be wrong by this factor."""
        return self.total / error, (self.total + self.delay) * error


def fill_buckets(
    gradients: Sequence[Gradient], cap: float = BUCKET, first: float = FIRST_BUCKET
) -> tuple[Gradient, ...]:
    """Return the buckets of DDP after its first step, which sorts them by readiness.

    A bucket is closed by the gradient that fills it to its limit: `first` bytes for the first
    bucket, `cap` for the others.
    """
    buckets: list[Gradient] = []
    size = 0.0
    for gradient in gradients:
        size += gradient.size
        if size >= (cap if buckets else first):
            buckets.append(Gradient(gradient.ready, size))
            size = 0.0
    if size:
        buckets.append(Gradient(gradients[-1].ready, size))
    return tuple(buckets)


def simulate(
    computation: Computation,
    buckets: Sequence[Gradient],
    all_reduce_seconds: Callable[[float], float],
) -> Step:
    """Simulate a step: the buckets are reduced one after another, each when it is ready.

    all_reduce_seconds: returns the seconds for a number of bytes.
    """
    seconds = [all_reduce_seconds(bucket.size) for bucket in buckets]
    if sum(seconds) == 0:
        return Step(computation.total, 0.0, 0.0, ())
    transfers = []
    free = 0.0
    for bucket, duration in zip(buckets, seconds, strict=True):
        begin = max(free, bucket.ready)
        free = begin + duration
        transfers.append((begin, free, bucket.size))
    exposed = max(0.0, free - computation.backward_end)
    return Step(computation.total, sum(seconds), exposed, tuple(transfers))


def even_computation(
    gradient_bytes: float, micro_step: float, accumulate_steps: int = 1, optimizer: float = 0.0
) -> Computation:
    """Return the computation of a model that is known only by a few numbers.

    micro_step: seconds of a forward and backward pass. A third of it is the forward pass. The
    backward pass makes gradients at a constant rate, in units of 1 MiB.
    """
    begin = (accumulate_steps - 1) * micro_step + micro_step / 3
    end = accumulate_steps * micro_step
    pieces = max(1, int(gradient_bytes // MIB))
    size = gradient_bytes / pieces
    gradients = tuple(
        Gradient(begin + (end - begin) * (i + 1) / pieces, size) for i in range(pieces)
    )
    return Computation(gradients, end, optimizer)


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter in one kind of training."""

    parameter: int
    gradient: int
    master: int  # copy for mixed precision, which the optimizer updates
    state: int  # each moment of the optimizer


PRECISIONS = {
    "fp32": Precision(4, 4, 0, 4),
    "amp": Precision(4, 4, 0, 4),  # torch.autocast: only activations have 16 bits
    "bf16": Precision(2, 2, 4, 4),  # mixed precision: 2 + 2 + 4 + 4 + 4 bytes with AdamW
    "bf16-pure": Precision(2, 2, 0, 2),
}
OPTIMIZER_STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}


def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` standard normal numbers; 0 for one."""
    power = min(math.log2(count), len(EXPECTED_MAXIMA) - 1)
    low, high = math.floor(power), math.ceil(power)
    return EXPECTED_MAXIMA[low] + (power - low) * (EXPECTED_MAXIMA[high] - EXPECTED_MAXIMA[low])


# GPUs vary by 9 % at 64,000 GPUs: PRISM, arXiv 2510.15596. If that is the delay of the slowest GPU,
# this is the standard deviation.
SPREAD = 0.09 / expected_maximum(64_000)


@dataclass(frozen=True)
class Workload:
    """The computation of one GPU in a step, and the buckets of gradients that it communicates.

    spread: standard deviation of the computation between GPUs, relative to its mean. tensors:
    number of gradients, 0 if unknown. error: factor by which the time of a step may be wrong.
    predicted: the computation is not measured, so the efficiency may be wrong, too.
    """

    computation: Computation
    buckets: tuple[Gradient, ...]
    accumulate_steps: int = 1
    spread: float = SPREAD
    tensors: int = 0
    error: float = MEASURED_ERROR
    predicted: bool = False

    @property
    def gradient_bytes(self) -> float:
        return sum(bucket.size for bucket in self.buckets)

    @property
    def micro_step(self) -> float:
        return self.computation.backward_end / self.accumulate_steps

    def accumulated(self, factor: int) -> Workload:
        """Return the workload with `factor` times the micro-steps between two all-reduces."""
        delay = self.computation.backward_end * (factor - 1)

        def later(gradients: Iterable[Gradient]) -> tuple[Gradient, ...]:
            return tuple(Gradient(entry.ready + delay, entry.size) for entry in gradients)

        computation = Computation(
            later(self.computation.gradients),
            self.computation.backward_end + delay,
            self.computation.optimizer,
            self.computation.busy,
        )
        return replace(
            self,
            computation=computation,
            buckets=later(self.buckets),
            accumulate_steps=self.accumulate_steps * factor,
        )

    def enlarged(self, factor: float) -> Workload:
        """Return the workload with `factor` times the micro-batch.

        As long as the GPU waits for kernels to start, it takes no more time.
        """
        busy = self.computation.busy * factor
        longer = max(1.0, busy)

        def slower(gradients: Iterable[Gradient]) -> tuple[Gradient, ...]:
            return tuple(Gradient(entry.ready * longer, entry.size) for entry in gradients)

        computation = Computation(
            slower(self.computation.gradients),
            self.computation.backward_end * longer,
            self.computation.optimizer,
            min(1.0, busy),
        )
        return replace(self, computation=computation, buckets=slower(self.buckets))

    def compressed(self, factor: float) -> Workload:
        """Return the workload with gradients that a communication hook compresses."""
        return replace(
            self,
            buckets=tuple(Gradient(entry.ready, entry.size / factor) for entry in self.buckets),
        )

    def step(self, network: Network, gpus: int) -> Step:
        step = self._step(network, gpus)
        if gpus == 1 or not self.predicted:
            return step
        short, long = (self._timed(factor)._step(network, gpus) for factor in self._factors)
        return replace(step, ends=(short.low_efficiency, long.efficiency))

    @property
    def _factors(self) -> tuple[float, float]:
        return 1 / self.error, self.error

    def _timed(self, factor: float) -> Workload:
        """Return the workload with a computation that takes `factor` times as long."""

        def later(gradients: Iterable[Gradient]) -> tuple[Gradient, ...]:
            return tuple(Gradient(entry.ready * factor, entry.size) for entry in gradients)

        old = self.computation
        computation = replace(
            old,
            gradients=later(old.gradients),
            backward_end=old.backward_end * factor,
            optimizer=old.optimizer * factor,
        )
        return replace(self, computation=computation, buckets=later(self.buckets))

    def _step(self, network: Network, gpus: int) -> Step:
        step = simulate(
            self.computation,
            self.buckets,
            lambda size: network.all_reduce_seconds(size, gpus),
        )
        if gpus == 1:
            return step
        least, most = DDP_SECONDS
        delay = (self.spread * expected_maximum(gpus) + LOSS) * step.computation
        delay += (most - least) * self.tensors
        if network.tree:  # NCCL computes on the GPU, gloo does not
            delay += COMMUNICATION_SHARE * (step.communication - step.exposed)
        return replace(step, overhead=least * self.tensors, delay=delay)


def workload(
    computation: Computation,
    bucket_mb: float | None = None,
    accumulate_steps: int = 1,
    spread: float = SPREAD,
    *,
    traced: bool = True,
) -> Workload:
    """Return a workload with DDP's buckets. bucket_mb: DDP's bucket_cap_mb, None for its default.

    traced: whether each gradient of the computation is one tensor.
    """
    first, cap = FIRST_BUCKET, BUCKET
    if bucket_mb is not None:
        first = cap = int(bucket_mb * MIB)
    buckets = fill_buckets(computation.gradients, cap, first)
    tensors = len(computation.gradients) if traced else 0
    return Workload(computation, buckets, accumulate_steps, spread, tensors)


def even_workload(
    parameters: float,
    precision: str,
    compute_seconds: float,
    accumulate_steps: int = 1,
    bucket_mb: float | None = None,
    spread: float = SPREAD,
) -> Workload:
    """Return the workload of a model that is known only by a few numbers.

    compute_seconds: seconds of a forward and backward pass of one micro-batch.
    """
    size = parameters * PRECISIONS[precision].gradient
    computation = even_computation(size, compute_seconds, accumulate_steps)
    return workload(computation, bucket_mb, accumulate_steps, spread, traced=False)


def state_memory(parameters: float, precision: str, optimizer: str) -> dict[str, float]:
    """Return the bytes per GPU that do not depend on the batch."""
    kind = PRECISIONS[precision]
    return {
        "parameters": parameters * kind.parameter,
        "gradients": parameters * kind.gradient,
        "optimizer": parameters * (kind.master + kind.state * OPTIMIZER_STATES[optimizer]),
        "buckets": parameters * kind.gradient,
    }


def curve_sizes(gpus: int) -> list[int]:
    """Return the numbers of GPUs for a curve: powers of two, and the given number."""
    sizes = {gpus}
    size = 1
    while size <= max(gpus, LARGEST):
        sizes.add(size)
        size *= 2
    return sorted(sizes)


@dataclass(frozen=True)
class PredictedPoint:
    """A point of a scaling curve."""

    gpus: int
    step: Step
    sent: float  # bytes that each GPU sends per step
    error: float  # factor by which the time may be wrong

    def as_dict(self) -> dict[str, float]:
        low, high = self.step.seconds_range(self.error)
        return {
            "gpus": self.gpus,
            "step_seconds": self.step.total,
            "low_step_seconds": low,
            "high_step_seconds": high,
            "computation_seconds": self.step.computation,
            "communication_seconds": self.step.communication,
            "exposed_seconds": self.step.exposed,
            "ddp_seconds": self.step.overhead,
            "sent_bytes": self.sent,
            "efficiency": self.step.efficiency,
            "low_efficiency": self.step.low_efficiency,
        }


def scaling(work: Workload, network: Network, sizes: Sequence[int]) -> list[PredictedPoint]:
    """Predict the step on each number of GPUs, each with its own batch (weak scaling)."""
    return [
        PredictedPoint(
            size, work.step(network, size), sent_bytes(work.gradient_bytes, size), work.error
        )
        for size in sizes
    ]


def holds_up_to(curve: Sequence[PredictedPoint], efficiency: float) -> int | None:
    """Return the number of GPUs up to which a curve has at least this efficiency.

    The lower end of the prediction counts. None if all points reach it.
    """
    last = 1
    for point in curve:
        if point.step.low_efficiency < efficiency:
            return last
        last = point.gpus
    return None
