"""StopSignal on four real ranks: one signal to any of them, and all stop at the same boundary.

This file is also the program of the ranks.
"""
from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.programs import run_ranks

RANKS, ROUNDS = 4, 25


def one_round(dist: Any, common: random.Random, private: random.Random) -> dict[str, Any]:
    """Run steps of random length until all ranks stop; signal some ranks at random moments.

    common: the same numbers on all ranks. private: others on each rank.
    """
    from utils.preemption import SIGNALS, StopSignal

    signalled = common.sample(range(RANKS), common.choice([1, 1, 1, 2, RANKS]))
    moments = {rank: common.uniform(0, 0.2) for rank in signalled}
    longest_step = common.choice([0.0, 0.0002, 0.005, 0.02, 0.1])  # without the collective
    coupled = common.random() < 0.7
    evaluates = coupled and common.random() < 0.5
    left_evaluation = False
    with StopSignal(dist) as stop:
        dist.barrier()
        start = time.monotonic()
        if dist.rank in moments:
            arguments = os.getpid(), private.choice(SIGNALS)
            threading.Timer(moments[dist.rank], os.kill, arguments).start()
        calls, stops = 0, False
        while not stops:
            time.sleep(private.uniform(0, longest_step)) if longest_step else None
            if coupled:
                dist.all_reduce_mean(1.0)
            calls += 1
            stops = stop.should_stop()
            if evaluates and calls % 2 == 0 and not stops:
                for _ in range(private.randrange(1, 80)):  # another number of steps on each rank
                    left_evaluation = left_evaluation or stop.requested
                    time.sleep(0.0 if left_evaluation else 0.001)
                left_evaluation = dist.all_reduce_mean(float(left_evaluation)) > 0
                calls += 1
                stops = stop.should_stop()
                assert stops or not left_evaluation, "no stop at the boundary after the evaluation"
        seconds = time.monotonic() - start - min(moments.values())
        result = {"stopped_at": calls, "reason": stop.reason, "again": stop.should_stop(),
                  "status": stop.exit_status, "left_evaluation": left_evaluation}
        while time.monotonic() < start + max(moments.values()) + 0.02:
            time.sleep(0.005)  # no signal may arrive after the handlers are gone
    return {**result, "seconds": seconds}


def no_stop(dist: Any, calls: int) -> list[Any]:
    from utils.preemption import StopSignal

    with StopSignal(dist) as stop:
        stops = [stop.should_stop() for _ in range(calls)]
    return [any(stops), stop.exit_status]


def error_of_stop(stop: Any) -> str:
    try:
        for _ in range(2000):
            if stop.should_stop():
                break
            time.sleep(0.01)
    except RuntimeError as error:
        return str(error)
    return "no error"


def one_rank_hangs(dist: Any, pids: list[int]) -> str:
    """Rank 2 is suspended for a while; the errors of the others must name it."""
    from utils.preemption import StopSignal

    with StopSignal(dist, rank_timeout=1.0) as stop:
        dist.barrier()
        if dist.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        while dist.is_main and b"\nState:\tT" not in Path(f"/proc/{pids[2]}/status").read_bytes():
            time.sleep(0.01)
        stop.request("a test")
        error = error_of_stop(stop)
        time.sleep(1.0)  # the ranks call should_stop() at different moments
        if dist.is_main:
            os.kill(pids[2], signal.SIGCONT)
    return error


def rank_0_dies(dist: Any) -> str:
    """Rank 0, which serves the store, ends while the other ranks wait for its report."""
    from utils.preemption import StopSignal

    if dist.is_main:
        time.sleep(2.0)  # without a StopSignal: the others report, and wait
        os._exit(0)
    stop = StopSignal(dist)
    stop.request("a test")
    return error_of_stop(stop)


def main(results_file: Path) -> None:
    import torch.distributed

    from utils import setup_distributed

    def gather(value: object) -> list[Any]:
        values: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(values, value)
        return values

    with setup_distributed("gloo", launcher="env") as dist:
        common, private = random.Random(7), random.Random(dist.rank)
        results = gather({
            "rounds": [one_round(dist, common, private) for _ in range(ROUNDS)],
            "finished": no_stop(dist, 1000),
            "unequal": no_stop(dist, 10 + (dist.rank == 1)),
            "hangs": one_rank_hangs(dist, gather(os.getpid()))})
        if dist.is_main:
            results_file.write_text(json.dumps(results))
        print(f"LOST {rank_0_dies(dist)}", flush=True)
        os._exit(0)


class Ran(NamedTuple):
    ranks: list[dict[str, Any]]  # the results of each rank
    output: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("stops")
    output = run_ranks(folder, __file__, (RANKS, [str(folder / "results")]))
    return Ran(json.loads((folder / "results").read_text()), output)


def test_all_ranks_stop_at_the_same_boundary_within_the_grace_time(ran: Ran) -> None:
    for rounds in zip(*(rank["rounds"] for rank in ran.ranks), strict=True):
        for key in ("stopped_at", "reason", "left_evaluation"):
            assert len({one[key] for one in rounds}) == 1, rounds
        assert rounds[0]["reason"].split(",")[0] in ("SIGUSR1", "SIGUSR2", "SIGTERM")
        assert all(one["again"] and one["status"] == 75 for one in rounds)
        # Steps take up to 0.1 s. Slurm's KillWait may be as short as 5 s, which the save shares.
        assert max(one["seconds"] for one in rounds) < 2.5
    assert any(one["left_evaluation"] for one in ran.ranks[0]["rounds"]), "no stop in an evaluation"


def test_a_run_without_a_stop_ends_with_status_0(ran: Ran) -> None:
    assert [rank["finished"] for rank in ran.ranks] == [[False, 0]] * RANKS


def test_ranks_that_do_not_take_part_are_named(ran: Ran) -> None:
    assert "different numbers of times: rank 0 10 times, rank 1 11 times" in ran.output
    for rank in (0, 1, 3):
        assert "1 of 4 ranks did not report within 1 s: 2. " in ran.ranks[rank]["hangs"]


def test_ranks_that_lose_rank_0_report_it_instead_of_waiting(ran: Ran) -> None:
    lost = re.findall("^LOST (.*)", ran.output, re.MULTILINE)
    assert len(lost) == RANKS - 1
    for line in lost:
        assert "(a test, rank " in line and "Look for the message of rank 0" in line, lost
    assert ran.output.count("a stop can no longer be agreed on") == RANKS - 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
