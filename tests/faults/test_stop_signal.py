"""StopSignal on four real ranks: one signal to any of them, and all stop at the same boundary.

This file is also the program of the ranks.
"""
from __future__ import annotations

import contextlib
import datetime
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.programs import run_ranks

RANKS, ROUNDS = 4, 15


def gather(value: object) -> list[Any]:
    import torch.distributed

    values: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(values, value)
    return values


def all_stop_at_one_boundary(dist: Any, common: random.Random, private: random.Random) -> bool:
    """Run steps of random length until all ranks stop; signal some at random moments. Return whether in an evaluation.

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
        assert len(set(gather((calls, stop.reason)))) == 1
        assert stop.reason.split(",")[0] in ("SIGUSR1", "SIGUSR2", "SIGTERM")
        assert stop.should_stop() and stop.exit_status == 75
        while time.monotonic() < start + max(moments.values()) + 0.02:
            time.sleep(0.005)  # no signal may arrive after the handlers are gone
    return left_evaluation


def one_calls_it_more_often(dist: Any) -> None:
    from utils.preemption import StopSignal

    with StopSignal(dist) as stop:
        assert not any(stop.should_stop() for _ in range(10 + (dist.rank == 1)))
    assert stop.exit_status == 0


def steps_with_collectives(dist: Any, steps: int) -> Iterator[None]:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(steps):
        dist.all_reduce_mean(1.0)
        parameter.grad = torch.ones(1)
        optimizer.step()
        yield


def rank_0_alone_calls_it(dist: Any) -> None:
    """As under `if job.is_main`: an error after some steps, and no stop that rank 0 makes alone."""
    from utils.preemption import StopSignal

    with StopSignal(dist) as stop:
        for _ in steps_with_collectives(dist, 5):
            assert not dist.is_main or not stop.should_stop()
        dist.barrier()
        if dist.is_main:
            stop.request("alone")
            with pytest.raises(RuntimeError, match=r"rank 0 calls should_stop\(\), ranks 1-3 do not; expected"):
                wait_for_stop(stop)
        dist.barrier()
    assert not stop.stopped


def ranks_without_batches_do_not_call_it(dist: Any) -> None:
    """As in the shorter loops of DistributedDataParallel.join(): no error, and rank 0 stops by itself."""
    from utils.preemption import StopSignal

    with StopSignal(dist) as stop:
        if dist.is_main:
            for _ in steps_with_collectives(dist, 5):
                assert not stop.should_stop()
            time.sleep(3)
            stop.request("rank 0 has batches")
            wait_for_stop(stop)
        else:
            for _ in range(5):
                dist.all_reduce_mean(1.0)
        dist.barrier()
        assert stop.stopped == dist.is_main


def one_calls_it_late(dist: Any) -> None:
    """Rank 0 has gone on, and the first call of rank 3 still comes."""
    from utils.preemption import StopSignal

    with StopSignal(dist) as stop:
        for step, _ in enumerate(steps_with_collectives(dist, 4)):
            if dist.rank == 3 and step == 3:
                time.sleep(1)
            assert (dist.rank == 3 and step < 3) or not stop.should_stop()
        stop.request("a test")
        wait_for_stop(stop)
        assert stop.stopped


def wait_in_the_store(dist: Any) -> None:
    with contextlib.suppress(RuntimeError):
        dist.store.wait(["never"], datetime.timedelta(seconds=4))


def one_waits_in_the_store(dist: Any) -> None:
    """A wait of a script in the store of the process group does not hold the request up."""
    from utils.preemption import StopSignal

    with StopSignal(dist) as stop:
        dist.barrier()
        if dist.is_main:
            stop.request("a test")
        if dist.rank == 1:
            threading.Thread(target=wait_in_the_store, args=(dist,)).start()
        start = time.monotonic()
        wait_for_stop(stop)
        assert stop.stopped and time.monotonic() - start < 3
    dist.barrier()


def one_rank_fails(dist: Any) -> None:
    """Rank 1 leaves with an error, and srun sends SIGTERM to the others at once: this is no preemption."""
    from utils.preemption import StopSignal

    with contextlib.suppress(OSError), StopSignal(dist) as stop:
        dist.barrier()
        if dist.rank == 1:
            raise OSError("disk full")
        dist.barrier()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RuntimeError, match="another rank has failed"):
            wait_for_stop(stop)
    if dist.rank == 1:
        dist.barrier()
    assert not stop.stopped and stop.exit_status == 0


def one_rank_hangs(dist: Any, pids: list[int]) -> None:
    """Rank 2 is suspended for a while; the errors of the others must name it."""
    from utils.preemption import StopSignal

    with StopSignal(dist, rank_timeout=1.0) as stop:
        dist.barrier()
        if dist.rank == 2:
            return os.kill(os.getpid(), signal.SIGSTOP)
        while dist.is_main and b"\nState:\tT" not in Path(f"/proc/{pids[2]}/status").read_bytes():
            time.sleep(0.01)
        stop.request("a test")
        with pytest.raises(RuntimeError, match=r"1 of 4 ranks did not report within 1 s: rank 2\. "):
            wait_for_stop(stop)
        time.sleep(1.0)  # the ranks call should_stop() at different moments
        if dist.is_main:
            os.kill(pids[2], signal.SIGCONT)


def rank_0_dies(dist: Any) -> None:
    """Rank 0, which serves the store, ends while the other ranks wait for its report."""
    from utils.preemption import StopSignal

    if dist.is_main:
        time.sleep(2.0)  # without a StopSignal: the others report, and wait
        os._exit(0)
    stop = StopSignal(dist)
    stop.request("a test")
    with pytest.raises(RuntimeError, match=r"\(a test, rank .*Look for the message of rank 0"):
        wait_for_stop(stop)


def wait_for_stop(stop: Any) -> None:
    for _ in range(2000):
        if stop.should_stop():
            break
        time.sleep(0.01)


def main() -> None:
    from utils import setup_distributed

    with setup_distributed("gloo", launcher="env") as dist:
        common, private = random.Random(7), random.Random(dist.rank)
        in_evaluation = [all_stop_at_one_boundary(dist, common, private) for _ in range(ROUNDS)]
        assert any(in_evaluation)
        one_calls_it_more_often(dist)
        rank_0_alone_calls_it(dist)
        ranks_without_batches_do_not_call_it(dist)
        one_calls_it_late(dist)
        one_waits_in_the_store(dist)
        one_rank_fails(dist)
        one_rank_hangs(dist, gather(os.getpid()))
        dist.barrier()
        rank_0_dies(dist)
        sys.stdout.write("as expected\n")
        sys.stdout.flush()
        os._exit(0)


def test_ranks_stop_together_or_name_the_rank_that_does_not(tmp_path: Path) -> None:
    output = run_ranks(tmp_path, __file__, (RANKS, []))
    assert output.count("as expected") == RANKS - 1, output
    assert "different numbers of times: rank 0 10 times, rank 1 11 times" in output
    assert output.count("ERROR: rank 0 calls should_stop(), ranks 1-3 do not") == 1, output
    assert "stop requested (alone" not in output
    assert "stop requested (rank 0 has batches" in output
    assert output.count("a stop can no longer be agreed on") == RANKS - 1, output


if __name__ == "__main__":
    main()
