"""Let each rank's GPU compute in a separate process: a wedged driver cannot be interrupted."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....host import gpus
from ..check import Check, Finding, Level, Ranks, Reported

_COMPUTE_SECONDS = 15.0
_READY = b"ready"
_PROGRAM = """\
import sys, torch
print("ready", flush=True)
number = torch.cuda.device_count()
if number:
    ones = torch.ones(256, 256, device=f"cuda:{int(sys.argv[1]) % number}")
    assert float((ones @ ones).sum()) == 256**3, "a product of matrices is wrong"
"""


@dataclass(frozen=True)
class GpuComputeFacts:
    """The result of one rank. problem: why its GPU did not compute; "": it did; None: no GPU."""

    problem: str | None


class GpuCompute(Check[GpuComputeFacts]):
    """Whether each GPU computes."""

    name = "GPU"
    per = "rank"
    quick = True
    seconds = 90.0  # 15 s of these to compute; another check measures torch's import
    facts = GpuComputeFacts

    def __init__(
        self, program: Sequence[str] = (sys.executable, "-c", _PROGRAM), limit: float = 0.0
    ) -> None:
        """program: prints "ready", then computes; its argument is the rank's number on its host."""
        self._program, self._limit = program, limit or _COMPUTE_SECONDS

    def collect(self, ranks: Ranks) -> GpuComputeFacts:
        if gpus.gpu_vendor() not in ("nvidia", "amd") or not gpus.count_gpus():
            return GpuComputeFacts(None)
        return GpuComputeFacts(self._compute(ranks.me.local_rank))

    def _compute(self, local_rank: int) -> str:
        began = time.monotonic()
        process = subprocess.Popen(
            [*self._program, str(local_rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",  # no folder of the user, which may have modules of these names
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        assert process.stdout is not None
        limit = self.seconds - 2 * self._limit
        is_ready = bool(select.select([process.stdout], [], [], limit)[0])
        if is_ready and process.stdout.readline().strip() != _READY:
            is_ready = False
        if not is_ready and time.monotonic() - began >= limit:
            process.kill()
            return ""  # torch is not loaded yet; another check reports that
        try:
            _, errors = process.communicate(timeout=self._limit)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # the driver may hold the process
            return f"it did not compute within {self._limit:.0f} s"
        if not process.returncode or not is_ready:  # without torch, another check reports it
            return ""
        lines = errors.decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else f"exit status {process.returncode}")[:300]

    def conclude(self, reported: Sequence[Reported[GpuComputeFacts]]) -> Iterator[Finding]:
        tried = [report for report in reported if report.facts.problem is not None]
        failed = [report for report in tried if report.facts.problem]
        for report in failed:
            host = report.place.host
            yield Finding(
                Level.BAD,
                f"the GPU of rank {report.place.rank} on {host} does not compute: "
                f"{str(report.facts.problem).rstrip('.')}. Expected a product of two matrices",
                f"Exclude {host}, and report it. See there: nvidia-smi, dmesg | grep Xid",
                (report.place.rank,),
                (host,),
                exclude=True,
            )
        if tried and not failed:
            yield Finding(Level.GOOD, f"{len(tried)} GPU{'s' * (len(tried) > 1)} computed")
