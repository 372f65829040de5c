"""utils/preemption.py on real ranks: one signal to any of them, and all stop at the same boundary.

This file is also the program of the ranks: `python -m tests.faults.test_stop_signal ROUNDS` forks four.
"""
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
ROUNDS = 100


# The program of the ranks ---------------------------------------------------------------------------------------------

def one_round(number: int, dist: Any, all_ranks: random.Random, own: random.Random) -> dict[str, Any]:
    """A loop with steps of random length until all stop. The signals come at random moments on some of the ranks."""
    import torch.distributed

    from utils.preemption import SIGNALS, StopSignal

    signalled = all_ranks.sample(range(RANKS), all_ranks.choice([1, 1, 1, 2, RANKS]))
    moments = {rank: all_ranks.uniform(0, 0.2) for rank in signalled}
    longest = all_ranks.choice([0.0, 0.0002, 0.005, 0.02, 0.1])  # of a step, besides the collective
    coupled = all_ranks.random() < 0.7
    evaluates = coupled and all_ranks.random() < 0.5
    result: dict[str, Any] = {"round": number, "cut": False, "asked": 0.0}
    with StopSignal(dist) as stop:
        torch.distributed.barrier()
        start = time.monotonic()
        if dist.rank in moments:
            threading.Timer(moments[dist.rank], os.kill, (os.getpid(), own.choice(SIGNALS))).start()
        calls = 0
        while True:
            time.sleep(own.uniform(0, longest)) if longest else None
            if coupled:
                dist.all_reduce_mean(1.0)
            calls += 1
            if stop.should_stop():
                break
            if evaluates and calls % 4 == 0:
                cut = False
                for _ in range(own.randrange(1, 40)):  # another number of steps on each rank
                    if stop.requested:
                        cut = True
                        break
                    time.sleep(0.001)
                cut = dist.all_reduce_mean(float(cut)) > 0
                calls += 1
                if stop.should_stop():
                    result["cut"] = cut
                    break
                assert not cut, "a rank left the evaluation, but the stop did not come at the boundary after it"
        result.update(stopped_at=calls, seconds=time.monotonic() - start - min(moments.values()), reason=stop.reason,
                      again=stop.should_stop(), status=stop.exit_status)
        while time.monotonic() < start + max(moments.values()) + 0.02:
            time.sleep(0.005)  # no signal may come after the handlers are gone
    return result


def no_stop(dist: Any, calls: int) -> dict[str, Any]:
    from utils.preemption import StopSignal

    with StopSignal(dist) as stop:
        answers = [stop.should_stop() for _ in range(calls)]
    return {"any": any(answers), "status": stop.exit_status}


def one_rank_is_silent(dist: Any) -> dict[str, Any]:
    """Rank 2's process stands still; the error of rank 0 has to name it."""
    from utils import preemption

    preemption._PATIENCE_SECONDS = 1.0
    with preemption.StopSignal(dist) as stop:
        dist.barrier()
        if dist.rank == 2:
            stop._lock.acquire()  # its thread cannot answer, as if the interpreter were held for ever
            dist.barrier()
            stop._lock.release()
            return {}
        stop.request("a test")
        try:
            while not stop.should_stop():
                time.sleep(0.01)
        except RuntimeError as error:
            return {"error": str(error)}
        finally:
            dist.barrier()
    return {"error": ""}


def rank_0_dies(dist: Any) -> str:
    """Rank 0 serves the store. It ends without an answer after all others have forbidden themselves to go on."""
    from utils.preemption import StopSignal

    stop = StopSignal(dist)
    dist.barrier()
    if dist.is_main:
        stop._lock.acquire()  # its thread cannot answer
        while dist._store.add(stop._key("answers"), 0) < RANKS - 1:
            time.sleep(0.01)
        os._exit(0)
    stop.request("a test")
    try:
        while not stop.should_stop():
            time.sleep(0.01)
    except RuntimeError as error:
        return str(error)
    return "no error"


def run_rank(rounds: int) -> None:
    import torch.distributed

    from utils import setup_distributed

    with setup_distributed("gloo", launcher="env") as dist:
        all_ranks, own = random.Random(7), random.Random(dist.rank)
        results: dict[str, Any] = {
            "rounds": [one_round(number, dist, all_ranks, own) for number in range(rounds)],
            "finished": no_stop(dist, 1000),
            "uneven": no_stop(dist, 10 + (dist.rank == 1)),
            "silent": one_rank_is_silent(dist)}
        gathered: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(gathered, results)
        if dist.is_main:
            print("RESULTS " + json.dumps(gathered), flush=True)
        sys.stdout.write(f"LOST {rank_0_dies(dist)}\n")
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    """Import torch once, then fork the ranks."""
    import socket

    import torch  # noqa: F401

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            run_rank(int(sys.argv[1]))
        children.append(child)
    status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, status)))


# The tests ------------------------------------------------------------------------------------------------------------

class Ran(NamedTuple):
    ranks: list[dict[str, Any]]  # what each of them found
    output: list[str]
    errors: str


@pytest.fixture(scope="module")
def ran() -> Ran:
    """One launch for all tests, since it takes seconds."""
    process = subprocess.Popen([sys.executable, "-m", "tests.faults.test_stop_signal", str(ROUNDS)], cwd=ROOT,
                               env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, err
    line = next(line for line in out.splitlines() if line.startswith("RESULTS "))
    return Ran(json.loads(line.removeprefix("RESULTS ")), out.splitlines(), err)


def test_all_ranks_stop_at_the_same_boundary_wherever_and_whenever_the_signals_come(ran: Ran) -> None:
    ranks = ran.ranks
    for number in range(ROUNDS):
        rounds = [rank["rounds"][number] for rank in ranks]
        assert len({one["stopped_at"] for one in rounds}) == 1, rounds
        assert len({one["reason"] for one in rounds}) == 1, rounds
        assert rounds[0]["reason"].split(",")[0] in ("SIGUSR1", "SIGUSR2", "SIGTERM")
        assert all(one["again"] and one["status"] == 75 for one in rounds)


def test_all_ranks_stop_within_the_grace_time(ran: Ran) -> None:
    """Steps take up to 0.1 s here. Slurm's KillWait may be as short as 5 s, and the save needs its share of them."""
    ranks = ran.ranks
    late = sorted(one["seconds"] for rank in ranks for one in rank["rounds"])
    assert late[-1] < 2.5, late[-10:]
    assert late[len(late) // 2] < 0.5, late[len(late) // 2]


def test_a_stop_is_found_inside_of_an_evaluation_that_is_longer_on_some_ranks(ran: Ran) -> None:
    ranks = ran.ranks
    cut = [number for number in range(ROUNDS) if ranks[0]["rounds"][number]["cut"]]
    assert cut, "no round was stopped inside of an evaluation: the test proves nothing"
    for number in cut:
        assert all(rank["rounds"][number]["cut"] for rank in ranks)


def test_a_run_without_a_stop_ends_with_status_0_on_all_ranks(ran: Ran) -> None:
    ranks = ran.ranks
    assert [rank["finished"] for rank in ranks] == [{"any": False, "status": 0}] * RANKS


def test_loops_of_unequal_length_are_told(ran: Ran) -> None:
    assert "different numbers of times: rank 0 10 times, rank 1 11 times" in ran.errors


def test_a_rank_that_does_not_answer_is_named(ran: Ran) -> None:
    ranks = ran.ranks
    for rank in (0, 1, 3):
        assert "no answer within 1 s from rank 2. " in ranks[rank]["silent"]["error"]


def test_ranks_that_lose_rank_0_say_so_instead_of_waiting(ran: Ran) -> None:
    lost = [line for line in ran.output if line.startswith("LOST ")]
    assert len(lost) == RANKS - 1
    assert all("(a test, rank " in line and "Look for the message of rank 0" in line for line in lost), lost


if __name__ == "__main__":
    main()
