"""Start torch.distributed as one rank, check all-reduces, and multiply matrices on the GPU."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass

import torch

from ...distributed import setup_distributed
from ...errors import LaunchError
from ..bench.collective_operations import AllReduce, Participants, time_iterations
from .checks.collective_calls import RESULT, START_FAILED

_START_SECONDS = 20.0
_COLLECTIVE_SECONDS = 15.0
_SIZES = (4, 1 << 16, 1 << 20, 1 << 24)  # bytes of the tested all-reduces
_LONG_SECONDS = 0.5  # seconds; a slower all-reduce shows a slow link
_ITERATIONS = 4
_MATRIX = 8192  # rows of a square matrix in bfloat16


@dataclass
class AllReduceTrial:
    """The measurements of a rank. wrong: bytes of an all-reduce -> number of wrong elements.

    bus_bandwidth: bytes per second at the largest size, as in nccl-tests.
    flops: operations per second of a matrix product on this rank's GPU; None on the CPU.
    """

    backend: str
    wrong: dict[str, int]
    bus_bandwidth: float
    flops: float | None


def try_all_reduces() -> AllReduceTrial:
    """Run this rank. RANK and torchrun's other rank variables must be set."""
    with setup_distributed(
        timeout=_START_SECONDS, collective_timeout=_COLLECTIVE_SECONDS, bind=False
    ) as job:
        device, ranks = job.device, Participants(job.rank, job.world_size, job.device)
        wrong: dict[str, int] = {}
        for size in _SIZES:
            operation = AllReduce(ranks, size)
            wrong[str(size)] = operation.count_wrong()
            seconds = job.all_reduce_mean(time_iterations(operation.run, 1, device)[0])
            if seconds > _LONG_SECONDS:  # the link is slow
                break
        else:
            seconds = min(time_iterations(operation.run, _ITERATIONS, device))
        bandwidth = operation.factor * operation.size / seconds
        flops = _multiply(device) if device.type != "cpu" else None
        return AllReduceTrial(job.backend, wrong, bandwidth, flops)


def _multiply(device: torch.device) -> float:
    """Return the floating-point operations per second of a matrix product."""
    matrix = torch.ones(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    seconds = time_iterations(lambda: torch.mm(matrix, matrix), _ITERATIONS**2, device)
    return 2 * _MATRIX**3 / min(seconds)


def main() -> None:
    """Run this rank. The last output line is the result, or the reason why the start failed."""
    status = 1
    try:
        print(RESULT + json.dumps(asdict(try_all_reduces())), flush=True)
        status = 0
    except LaunchError as error:
        print(START_FAILED + str(error).splitlines()[0], flush=True)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # gloo may abort while the interpreter ends
