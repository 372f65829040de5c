"""Let two gloo ranks communicate on a login node or laptop, where no launcher runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...rank_variables import RANK_VARIABLES
from ..check import Check, Finding, Level, Ranks, Reported
from .torch_import import import_torch

_SECONDS = 80.0  # a first import of torch from a parallel file system may take half of that
_PROGRAM = """\
import os, torch, torch.distributed as dist
from datetime import timedelta
rank, port = int(os.environ["DOCTOR_RANK"]), int(os.environ["DOCTOR_PORT"])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=40))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
total = torch.ones(1000) * (rank + 1)
dist.all_reduce(total)
assert total.tolist() == [3.0] * 1000, "the sum is wrong"
dist.barrier()
print("done", flush=True)
"""


@dataclass(frozen=True)
class Facts:
    """problem: what went wrong; "" if nothing did, None if the ranks were not started."""

    problem: str | None


class Gloo(Check[Facts]):
    """Two gloo ranks on this host."""

    name = "gloo"
    per = "host"
    seconds = 2 * _SECONDS + 10
    facts = Facts

    def collect(self, ranks: Ranks) -> Facts:
        alone = len(ranks.everyone) == 1 and not import_torch().error
        return Facts(_try_two_ranks() if alone else None)

    def conclude(self, reported: Sequence[Reported[Facts]]) -> Iterator[Finding]:
        for one in reported:
            if one.facts.problem:
                yield Finding(
                    Level.BAD,
                    f"two gloo ranks on {one.place.host} cannot communicate: {one.facts.problem}",
                    "Check that the host name resolves, the loopback interface is up, and "
                    "GLOO_SOCKET_IFNAME names an interface of this host or is unset",
                    hosts=(one.place.host,),
                )
            elif one.facts.problem == "":
                yield Finding(Level.GOOD, "two gloo ranks communicate on this host")


def _try_two_ranks() -> str:
    """Let two gloo ranks on this host communicate; return what went wrong."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Nothing of a launch, and not the kit's folder in front of other packages.
    dropped = {*RANK_VARIABLES, "PYTHONSAFEPATH"}
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**environ, "DOCTOR_RANK": str(rank), "DOCTOR_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
        )
        for rank in range(2)
    ]
    problems = []
    for process in ranks:
        try:
            output, error = process.communicate(timeout=_SECONDS)
            errors = error.decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = b"", f"no result within {_SECONDS:.0f} s"
        # Not the exit status: threads of gloo may abort a process that ends, after all its work.
        # https://github.com/pytorch/pytorch/issues/190489
        if b"done" not in output:
            lines = [line.strip() for line in errors.splitlines() if line.strip()]
            problems.append(lines[-1][:300] if lines else f"exit status {process.returncode}")
    return problems[0] if problems else ""
