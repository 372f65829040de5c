"""Predict the time of a DDP step: the backward pass, and the all-reduces that overlap with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 1 << 20
FIRST_BUCKET = 1 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
BUCKET = 25 * MIB  # the default of DistributedDataParallel(bucket_cap_mb=)


@dataclass(frozen=True)
class Gradient:
    """A gradient, or a bucket of gradients: its size, and the time when it is ready to be sent."""

    ready: float  # seconds after the begin of the step
    size: float  # bytes


@dataclass(frozen=True)
class Computation:
    """The computation of a step on one GPU, in seconds after its begin."""

    gradients: tuple[Gradient, ...]  # in the order in which they are ready
    backward_end: float
    optimizer: float = 0.0  # seconds, after the communication

    @property
    def total(self) -> float:
        return self.backward_end + self.optimizer


@dataclass(frozen=True)
class Step:
    """The predicted times of a step, in seconds."""

    computation: float
    communication: float  # of all buckets
    exposed: float  # the part of it during which the GPU waits
    transfers: tuple[tuple[float, float, float], ...]  # begin, end and bytes of each bucket
    delay: float = 0.0  # that slower GPUs and the communication kernels may add

    @property
    def total(self) -> float:
        return self.computation + self.exposed

    @property
    def efficiency(self) -> float:
        """The share of the step that is computation: the speed-up over one GPU, per GPU."""
        return self.computation / self.total

    @property
    def low_efficiency(self) -> float:
        """The efficiency with the delay, the lower end of the prediction."""
        return self.computation / (self.total + self.delay)


def fill_buckets(
    gradients: Sequence[Gradient], cap: float = BUCKET, first: float = FIRST_BUCKET
) -> tuple[Gradient, ...]:
    """Return the buckets of DDP after its first step, which sorts them by readiness.

    A bucket is closed by the gradient with which it reaches its limit: `first` bytes for the first
    one, `cap` for the others.
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
    """Run through a step: the buckets are reduced one after another, each when it is ready.

    all_reduce_seconds: the time for so many bytes.
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
    """Return the computation of a model of which only numbers are known.

    micro_step: seconds of a forward and backward pass. A third of them is the forward pass, and
    the backward pass makes gradients at a constant rate: 1 MiB is the unit.
    """
    begin = (accumulate_steps - 1) * micro_step + micro_step / 3
    end = accumulate_steps * micro_step
    pieces = max(1, int(gradient_bytes // MIB))
    size = gradient_bytes / pieces
    gradients = tuple(
        Gradient(begin + (end - begin) * (i + 1) / pieces, size) for i in range(pieces)
    )
    return Computation(gradients, end, optimizer)
