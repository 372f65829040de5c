"""Start torch.distributed in other processes, and check all-reduces, the network that NCCL
uses, and a matrix product on each GPU.

gloo and NCCL connect every pair of ranks, and hang if one link is broken. Therefore this check
first connects the hosts by plain TCP, and does not start if that fails.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ....host import gpus
from ...launch.child_ranks import environment, free_port, words
from ..check import Check, Exchange, Finding, Level, Ranks, Reported
from ..networking import connect_hosts, data_address, interface_problem, names_of, partners
from .torch_import import import_torch

SLOW_SHARE = 0.9  # a GPU below this share of the median is slow
_SECONDS = 50.0  # seconds for a process, which imports torch
_LATE = "did not end within"
START_FAILED = "the ranks do not start: "
RESULT = "RESULT "  # prefix of the last output line


@dataclass
class CollectiveFacts:
    """The result of one rank: an AllReduceTrial, or the error.

    ranks: number of ranks that took part; 0 if this rank did not. network: the line about it;
    warning: what is wrong with it. unreachable: numbers of hosts that this host cannot reach.
    """

    ranks: int
    trial: dict[str, Any] | None = None
    error: str = ""
    network: str = ""
    warning: str = ""
    unreachable: list[int] | None = None


class Collectives(Check[CollectiveFacts]):
    """All-reduces over gloo or NCCL, and the network that they use."""

    name = "collectives"
    per = "rank"
    seconds = 60.0
    facts = CollectiveFacts

    def collect(self, ranks: Ranks) -> Exchange[CollectiveFacts]:
        """Run this rank's process: one per rank with GPUs, otherwise one per host.

        Without a launcher, run two gloo ranks here.
        """
        if len(ranks.everyone) == 1:
            return _run_two_ranks() if not import_torch().error else CollectiveFacts(0)
        unreachable, address = yield from self._try_links(ranks)
        status = {
            "bad": unreachable,
            "address": address,
            "gpus": gpus.count_gpus(),
            "can_start": not interface_problem(hosts=len(ranks.hosts))
            and (ranks.me.local_rank > 0 or not import_torch().error),
        }
        gathered = yield status
        known = [status for status in gathered if status is not None]
        bad = [status["bad"] or not status["can_start"] for status in known]
        has_gpus = all(status["gpus"] for status in known)
        members = [place for place in ranks.everyone if has_gpus or place.local_rank == 0]
        own = CollectiveFacts(0, unreachable=unreachable)
        if any(bad) or len(known) < len(gathered) or len(members) < 2 or ranks.me not in members:
            return own
        first, nodes = members[0].rank, [place.node for place in members]
        port = (yield free_port())[first]
        address = gathered[first]["address"]
        return _run(environment(nodes, members.index(ranks.me), address, port), len(members))

    def conclude(self, reported: Sequence[Reported[CollectiveFacts]]) -> Iterator[Finding]:
        """Report wrong sums, failures, a slow network and slow GPUs."""
        broken = [report for report in reported if report.facts.unreachable]
        if broken:
            yield Finding(
                Level.GOOD,
                "not run: see what the check of connections has found",
            )
            return
        members = [report for report in reported if report.facts.ranks]
        failed = [report for report in members if report.facts.error]
        if failed:
            yield _failure(failed, members)
            return
        trials = [report for report in members if report.facts.trial]
        if not trials:
            several = len({report.place.node for report in reported}) > 1
            why = "see the other checks" if several else "the ranks are on one host without GPUs"
            yield Finding(Level.GOOD, f"not run: {why}")
            return
        bandwidth = min(_trial(report)["bus_bandwidth"] for report in trials)
        findings = [*_wrong_sums(trials), *_networks(trials), *_slow_gpus(trials)]
        yield from findings
        if not findings:
            first = trials[0].facts
            assert first.trial is not None
            size = max(map(int, first.trial["wrong"]))
            network = f"; {first.network}" if first.network else ""
            yield Finding(
                Level.GOOD,
                f"all-reduces of {first.ranks} ranks over {first.trial['backend']} are right, bus "
                f"bandwidth {bandwidth / 1e9:.3g} GB/s at {size / 1e6:.3g} MB{network}",
            )

    def _try_links(self, ranks: Ranks) -> Exchange[tuple[list[int], str]]:
        """Return the hosts on which collectives would hang, and this host's address."""
        address = data_address(ranks.address)
        found = yield from connect_hosts(ranks, address)
        others = partners(len(ranks.hosts), ranks.me.node) if ranks.me.local_rank == 0 else []
        return [node for node in others if found.get(node) != ""], address


def _run_two_ranks() -> CollectiveFacts:
    """Try all-reduces between two processes on this host's CPUs."""
    no_gpus = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    port = free_port()
    environs = [{**environment([0, 0], rank, "127.0.0.1", port), **no_gpus} for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda environ: _run(environ, 2), environs))
    return next((report for report in done if report.error), done[0])


def _run(environ: dict[str, str], ranks: int) -> CollectiveFacts:
    """Try all-reduces in a process with a time limit."""
    program = words(f"{__package__.rpartition('.')[0]}.all_reduce")
    output, pipe = subprocess.STDOUT, subprocess.PIPE
    try:
        done = subprocess.run(program, env=environ, stdout=pipe, stderr=output, timeout=_SECONDS)
        printed, problem = done.stdout, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, problem = error.stdout or b"", f"{_LATE} {_SECONDS:.0f} s"
    text = printed.decode(errors="replace")
    # Indented lines are parts of tables, or a traceback's frames.
    lines = [line for line in text.splitlines() if line.strip() and line[0] != " "]
    warning = re.search(r"\w+ uses .*, although .* is expected.*", text)
    network = re.search(r"network: .*", text)
    facts = CollectiveFacts(
        ranks, network=network[0] if network else "", warning=warning[0] if warning else ""
    )
    if lines and lines[-1].startswith(RESULT):
        facts.trial = json.loads(lines[-1].removeprefix(RESULT))
    elif lines and lines[-1].startswith(START_FAILED):
        facts.error = lines[-1]
    else:
        facts.error = ": ".join([problem, *lines[-1:]])
    return facts


# Findings ----------------------------------------------------------------------------------------


def _trial(report: Reported[CollectiveFacts]) -> dict[str, Any]:
    return report.facts.trial or {}


def _failure(
    failed: Sequence[Reported[CollectiveFacts]], members: Sequence[Reported[CollectiveFacts]]
) -> Finding:
    common = [
        report.facts.error for report in failed if report.facts.error.startswith(START_FAILED)
    ]
    if common:  # all ranks report a problem that concerns all of them
        return Finding(
            Level.BAD,
            f"all-reduces of {len(members)} ranks: {common[0]}",
            "Correct what the message names, and what the other checks have found",
        )
    # Other ranks only waited for the first rank that failed.
    first = next((report for report in failed if _LATE not in report.facts.error), None)
    if first is None:
        return Finding(
            Level.WARNING,
            f"all-reduces of {len(members)} ranks {_LATE} {_SECONDS:.0f} s on "
            f"{names_of([report.place.host for report in failed])}",
            "Look at what the check of connections has found, and at other programs on these "
            "hosts; `ddpkit bench collectives --pairs` finds a slow link",
        )
    return Finding(
        Level.BAD,
        f"an all-reduce of {len(members)} ranks failed on rank {first.place.rank} on "
        f"{first.place.host}: {first.facts.error}",
        "Correct what the message names. TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO show "
        "more",
        ranks=(first.place.rank,),
        hosts=(first.place.host,),
    )


def _wrong_sums(trials: Sequence[Reported[CollectiveFacts]]) -> Iterator[Finding]:
    for report in trials:
        wrong = {size: count for size, count in _trial(report)["wrong"].items() if count}
        if wrong:
            size, count = next(iter(wrong.items()))
            yield Finding(
                Level.BAD,
                f"rank {report.place.rank} on {report.place.host} received {count} wrong elements "
                f"in an all-reduce of {size} bytes; expected none",
                f"Exclude {report.place.host}: its memory, GPU or network adapter corrupts data",
                ranks=(report.place.rank,),
                hosts=(report.place.host,),
                exclude=True,
            )


def _networks(trials: Sequence[Reported[CollectiveFacts]]) -> Iterator[Finding]:
    for report in trials[:1]:  # rank 0 reads NCCL's log
        if report.facts.warning:
            yield Finding(
                Level.WARNING,
                report.facts.warning,
                "See docs/when-it-fails.md, and check again with --only collectives",
                hosts=(report.place.host,),
            )


def _slow_gpus(trials: Sequence[Reported[CollectiveFacts]]) -> Iterator[Finding]:
    known = [
        (report.place, _trial(report)["flops"]) for report in trials if _trial(report)["flops"]
    ]
    if len(known) < 3:
        return
    median = statistics.median(flops for _, flops in known)
    for place, flops in known:
        if flops < SLOW_SHARE * median:
            yield Finding(
                Level.WARNING,
                f"the GPU of rank {place.rank} on {place.host} computes {flops / 1e12:.0f} "
                f"TFLOP/s, the median of {len(known)} GPUs {median / 1e12:.0f}",
                f"Check its clock, power limit and temperature (`nvidia-smi -q -d PERFORMANCE`), "
                f"and exclude {place.host}",
                ranks=(place.rank,),
                hosts=(place.host,),
                exclude=True,
            )
