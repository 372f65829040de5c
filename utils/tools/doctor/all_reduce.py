"""Start torch.distributed as one rank, check all-reduces, and multiply matrices on the GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...distributed import setup_distributed

START_SECONDS = 20.0
COLLECTIVE_SECONDS = 15.0
_SIZES = (1, 1 << 14, 1 << 18, 1 << 22)  # elements of four bytes
_LONG_SECONDS = 0.5  # of an all-reduce
_PERIOD = 97  # a block that arrives in the wrong place shows
_ITERATIONS = 4
_MATRIX = 8192  # rows of a square matrix in bfloat16


@dataclass
class AllReduceTrial:
    """What a rank has measured. wrong: wrong elements by the bytes of an all-reduce.

    bus_bandwidth: bytes per second at the largest size, as nccl-tests counts it.
    flops: of a matrix product on this rank's GPU; None on the CPU.
    """

    backend: str
    wrong: dict[str, int]
    bus_bandwidth: float
    flops: float | None


def try_all_reduces() -> AllReduceTrial:
    """Run this rank. RANK and the other variables of torchrun's workers are set."""
    with setup_distributed(
        timeout=START_SECONDS, collective_timeout=COLLECTIVE_SECONDS, bind=False
    ) as job:
        wrong: dict[str, int] = {}
        seconds = 0.0
        for count in _SIZES:
            if seconds > _LONG_SECONDS:  # a slow link
                break
            values = (torch.arange(count, device=job.device) % _PERIOD).float()
            result = values + job.rank
            dist.all_reduce(result)
            expected = values * job.world_size + job.world_size * (job.world_size - 1) / 2
            wrong[str(4 * count)] = int((result != expected).sum())
            seconds = job.all_reduce_mean(_time(result, job.device))
        if seconds <= _LONG_SECONDS:
            seconds = min(_time(result, job.device) for _ in range(_ITERATIONS))
        factor = 2 * (job.world_size - 1) / job.world_size
        bandwidth = factor * result.nbytes / seconds
        flops = _multiply(job.device) if job.device.type != "cpu" else None
        return AllReduceTrial(job.backend, wrong, bandwidth, flops)


def _time(tensor: torch.Tensor, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    dist.all_reduce(tensor)
    _wait(device)
    return time.perf_counter() - start


def _multiply(device: torch.device) -> float:
    """Return the floating-point operations per second of a matrix product."""
    matrix = torch.ones(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    best = float("inf")
    for _ in range(_ITERATIONS):
        _wait(device)
        start = time.perf_counter()
        for _ in range(_ITERATIONS):
            torch.mm(matrix, matrix)
        _wait(device)
        best = min(best, (time.perf_counter() - start) / _ITERATIONS)
    return 2 * _MATRIX**3 / best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
