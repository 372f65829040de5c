"""What the end of a launch means: evidence as a table."""
from __future__ import annotations

from typing import Any

import pytest

from utils.launch_protocol import Failure, Unimported
from utils.tools.launch.outcome import Evidence, Loss, Outcome, OutOfMemory, RankEnd, decide

HOSTS = ("n1", "n2")
SIGTERM, SIGKILL, SIGSEGV, SIGABRT, SIGBUS = 143, 137, 139, 134, 135


def ends(*statuses: tuple[int, int | None, float] | tuple[int, int | None, float, bool]) -> tuple[RankEnd, ...]:
    """Ends of ranks: rank, status, time, and whether the launch had begun to end them. Rank N is on host N + 1."""
    return tuple(RankEnd(f"rank {rank} on n{rank + 1}", status, at, rank, f"n{rank + 1}", *by)
                 for rank, status, at, *by in statuses)


def found(**fields: Any) -> Outcome:
    return decide(Evidence(**{"expected": 2, "hosts": HOSTS, "own_host": "n1", **fields}))


RAISED = Failure("rank 1 on n2 failed: ValueError: bad batch 17", "exception", 1, "n2")
KILLED = Failure("rank 1 on n2 ended without a report. It was killed", "killed", 1, "n2")
ABORTED = KILLED._replace(waiting="rank 0 waits in all_reduce of [[5050]] at train.py, line 12, in <module>")
GPU = Failure("rank 1 on n2 failed: RuntimeError: CUDA error: uncorrectable ECC error", "exception", 1, "n2")
LEFT = Failure("rank 1 on n2 ended its program after 5 collectives", "uneven", 1, "n2")
LOST_AGENT = Loss("n2", "the connection to n2 was lost: the agent there has failed", 5.0)
CUT = Loss("n2", "the connection to n2 was lost: the host or its network has failed", 5.0)
ENDED = Failure("all ranks have ended, but srun has not", "launch")

Row = tuple[dict[str, Any], int, str, int | None, str | None, tuple[str, ...]]
ROWS: dict[str, Row] = {
    # Evidence; then status, kind, rank, host, and the hosts that are suspected.
    "all end well": ({"ends": ends((0, 0, 1), (1, 0, 2))}, 0, "complete", None, None, ()),
    "whatever the launcher says": (
        {"ends": ends((0, 0, 1), (1, 0, 2)), "launcher": "srun", "launcher_status": 1}, 0, "complete", None, None, ()),
    "an end is not known": (
        {"ends": ends((0, 0, 1)), "launcher": "mpiexec", "launcher_status": 0}, 1, "launch", None, None, ()),
    "no end is known": ({"launcher": "mpiexec", "launcher_status": 0}, 1, "launch", None, None, ()),
    "ended well, but by the launch": (
        {"ends": ends((0, 0, 1), (1, 0, 9, True)), "problem": ENDED, "problem_at": 8.0}, 1, "launch", None, None, ()),
    "two hosts at once": ({"expected": 3, "ends": ends((1, SIGKILL, 1), (2, SIGKILL, 1.05), (0, 1, 1.1))}, SIGKILL,
                          "status", 1, "n2", ("n2",)),
    "two segmentation faults at once": ({"ends": ends((0, SIGSEGV, 1), (1, SIGSEGV, 1.1))}, SIGSEGV, "status",
                                        None, None, ()),
    "left by sys.exit(1)": ({"ends": ends((1, 1, 1), (0, 1, 2)), "reported": LEFT, "reported_at": 1.2}, 1, "status", 1,
                            "n2", ()),
    "exit status": ({"ends": ends((1, 3, 1), (0, 1, 2))}, 3, "status", 1, "n2", ()),
    "killed": ({"ends": ends((1, SIGKILL, 1), (0, 1, 2))}, SIGKILL, "status", 1, "n2", ("n2",)),
    "bus error": ({"ends": ends((1, SIGBUS, 1))}, SIGBUS, "status", 1, "n2", ("n2",)),
    "segmentation fault": ({"ends": ends((1, SIGSEGV, 1), (0, 1, 2))}, SIGSEGV, "status", 1, "n2", ()),
    "aborted": ({"ends": ends((1, SIGABRT, 1), (0, 1, 2))}, SIGABRT, "status", 1, "n2", ()),
    "os._exit(7)": ({"ends": ends((1, 7, 1), (0, 1, 2)), "reported": KILLED, "reported_at": 1.5}, 7, "status", 1, "n2",
                    ()),
    "killed, and reported": ({"ends": ends((1, SIGKILL, 1), (0, 1, 2)), "reported": KILLED, "reported_at": 1.5},
                             SIGKILL, "status", 1, "n2", ("n2",)),
    "killed, its end not known": ({"ends": ends((0, 1, 2)), "reported": KILLED, "reported_at": 1.5}, 1, "killed", 1,
                                  "n2", ("n2",)),
    "killed after another ended well": ({"ends": ends((0, 0, 1), (1, SIGKILL, 2))}, SIGKILL, "status", 1, "n2",
                                        ("n2",)),
    "the victim ends first": ({"ends": ends((0, 1, 1), (1, SIGSEGV, 1.1))}, SIGSEGV, "status", 1, "n2", ()),
    "a status of its own": ({"ends": ends((0, 1, 1), (1, 3, 1.1))}, 3, "status", 1, "n2", ()),
    "two exceptions at once": ({"ends": ends((0, 1, 1), (1, 1, 1.1))}, 1, "status", None, None, ()),
    "two exceptions, one later": ({"ends": ends((1, 1, 1), (0, 1, 2))}, 1, "status", 1, "n2", ()),
    "ended by the launcher": ({"ends": ends((0, SIGTERM, 1), (1, 3, 1.1))}, 3, "status", 1, "n2", ()),
    "left early": ({"expected": 3, "ends": ends((1, 0, 1), (0, 1, 2))}, 1, "left", None, None, ()),
    "the last one fails": ({"ends": ends((1, 0, 1), (0, 1, 2))}, 1, "left", 0, "n1", ()),
    "exception": ({"ends": ends((0, 1, 1), (1, 1, 1.1)), "reported": RAISED, "reported_at": 0.5}, 1, "exception", 1,
                  "n2", ()),
    "exception, then ended by the launcher": (
        {"ends": ends((0, SIGTERM, 1), (1, SIGTERM, 1.1)), "reported": RAISED, "reported_at": 0.5}, 1, "exception", 1,
        "n2", ()),
    "GPU error": ({"ends": ends((1, 1, 1)), "reported": GPU, "reported_at": 0.5}, 1, "exception", 1, "n2", ("n2",)),
    "killed with its parent": ({"ends": ends((1, None, 1), (0, None, 3))}, 1, "killed", 1, "n2", ("n2",)),
    "all killed at once": ({"ends": ends((1, None, 1), (0, None, 1.1)), "launcher": "mpiexec", "launcher_status": 255},
                           255, "launch", None, None, ()),
    "saved after a stop": ({"ends": ends((0, 75, 9), (1, 75, 9)), "saved_at": 8.0, "stopped_by": 15, "stopped_at": 7.0},
                           75, "saved", None, None, ()),
    "saved, with a status of its own": ({"ends": ends((0, 5, 7), (1, 75, 9)), "saved_at": 8.0}, 75, "saved", None, None,
                                        ()),
    "saved because an agent was killed": ({"ends": ends((0, 75, 9)), "saved_at": 8.0, "gone": [LOST_AGENT]}, 1, "lost",
                                          None, "n2", ("n2",)),
    "an agent is killed": ({"gone": [LOST_AGENT], "ends": ends((0, SIGTERM, 9, True))}, 1, "lost", None, "n2", ("n2",)),
    "an agent ends after a failure": ({"gone": [LOST_AGENT], "reported": RAISED, "reported_at": 4.0,
                                       "ends": ends((1, 1, 4.5))}, 1, "exception", 1, "n2", ()),
    "a rank is killed because its agent was": ({"gone": [LOST_AGENT], "reported": KILLED, "reported_at": 4.9}, 1,
                                               "lost", 1, "n2", ("n2",)),
    "a daemon ends after a rank": ({"gone": [LOST_AGENT], "ends": ends((1, 3, 4.5))}, 3, "status", 1, "n2", ()),
    "a host is cut off": ({"hosts": ("n1", "n2", "n3"), "lost": [CUT], "ends": ends((0, 1, 9))}, 1, "lost", None, "n2",
                          ("n2",)),
    "an exception before the loss": ({"lost": [CUT], "reported": RAISED, "reported_at": 4.0}, 1, "exception", 1, "n2",
                                     ()),
    "all other hosts are lost": (
        {"hosts": ("n1", "n2", "n3.lab"), "lost": [CUT, CUT._replace(host="n3")]}, 1, "network", None, "n1", ()),
    "the only other host is lost": ({"lost": [CUT]}, 1, "lost", None, "n2", ("n2",)),
    "a host is lost after the end": ({"lost": [CUT], "ends": ends((0, 0, 1), (1, 0, 2))}, 0, "complete", None, None,
                                     ()),
    "a host is lost after a stop": ({"lost": [CUT], "stopped_by": 15, "stopped_at": 4.0, "ends": ends((0, SIGTERM, 9))},
                                    SIGTERM, "stop", None, None, ()),
    "aborted by gloo": ({"ends": ends((1, SIGABRT, 1)), "reported": ABORTED, "reported_at": 1.1}, SIGABRT, "killed", 1,
                        "n2", ()),  # the ranks know why
    "aborted by a library": ({"ends": ends((1, SIGABRT, 1)), "reported": KILLED, "reported_at": 1.1}, SIGABRT, "status",
                             1, "n2", ()),
    "killed while others waited": ({"ends": ends((1, SIGKILL, 1)), "reported": ABORTED, "reported_at": 1.1}, SIGKILL,
                                   "status", 1, "n2", ("n2",)),
    "a bus error at the limit of memory of the job": (
        {"ends": ends((1, SIGBUS, 1)), "out_of_memory": OutOfMemory("Detected 1 oom_kill event", "n2")}, SIGBUS,
        "status", 1, "n2", ()),
    "no agent connects": ({"problem": Failure("no agent has connected from n2", "launch", None, "n2"),
                           "problem_at": 1.0}, 1, "launch", None, "n2", ("n2",)),
    "stopped": ({"ends": ends((0, SIGTERM, 9), (1, SIGTERM, 9)), "stopped_by": 15, "stopped_at": 8.0}, SIGTERM, "stop",
                None, None, ()),
    "stopped after a failure": ({"ends": ends((1, 3, 7)), "stopped_by": 15, "stopped_at": 8.0}, 3, "status", 1, "n2",
                                ()),
    "interrupted twice": ({"problem": Failure("SIGINT: all will be ended", "stop"), "problem_at": 1.0, "at_once": True,
                           "problem_status": 130}, 130, "stop", None, None, ()),
    "out of memory": ({"ends": ends((1, SIGKILL, 1)), "reported": KILLED, "reported_at": 1.0, "launcher": "srun",
                       "launcher_status": SIGKILL, "out_of_memory": OutOfMemory("Detected 1 oom_kill event", "n2")},
                      SIGKILL, "stop", None, "n2", ()),
    "syntax error": ({"ends": ends((0, 1, 1), (1, 1, 1)), "syntax_error": "no rank can run x.py, line 1"}, 1,
                     "exception", None, None, ()),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_the_evidence_means(row: str) -> None:
    evidence, *expected = ROWS[row]
    outcome = found(**evidence)
    assert [outcome.status, outcome.kind, outcome.rank, outcome.host, outcome.suspects] == expected, outcome
    assert bool(outcome.failure) == (outcome.kind not in ("complete", "saved")) == bool(outcome.cause)
    assert outcome.complete == (outcome.status == 0)


@pytest.mark.parametrize(("evidence", "cause"), [
    ({"ends": ends((0, 1, 1), (1, 1, 1.1))}, "rank 0 on n1 ended with exit status 1. rank 1 on n2 failed, too"),
    ({"ends": ends((1, 1, 1)), "launcher": "srun", "launcher_late": 5.2},
     "rank 1 on n2 ended with exit status 1; srun did not end within 5 s"),
    ({"ends": ends((0, 0, 1)), "launcher": "mpiexec", "launcher_status": 0},
     "mpiexec ended with exit status 0, and how rank 1 ended is not known"),
    ({"hosts": ("n1", "n2", "n3"), "lost": [CUT, CUT._replace(host="n3")]},
     "the connections to all other hosts (n2, n3) were lost: the network of n1, where ddpkit launch runs, has failed"),
    ({"ends": ends((1, SIGABRT, 1), (0, 1, 2)), "reported": ABORTED, "reported_at": 1.1},
     "rank 1 on n2 was aborted by gloo (SIGABRT, exit status 134): rank 0 waits in all_reduce of [[5050]] at train.py, "
     "line 12, in <module>, and rank 1 entered another, smaller collective. Different numbers of batches on the ranks "
     "do this: use drop_last=True or DistributedDataParallel.join(). So do tensors of different sizes. The line of "
     "rank 1 follows \"Fatal Python error: Aborted\" in its output"),
    ({"ends": ends((1, SIGABRT, 1)), "reported": KILLED, "reported_at": 1.1},
     "rank 1 on n2 was ended by SIGABRT (exit status 134)"),
    ({"expected": 3, "ends": ends((1, 0, 1), (0, 1, 2))},
     "rank 1 on n2 had ended with exit status 0 before rank 0 on n1 ended with exit status 1")])
def test_the_words_of_an_outcome(evidence: dict[str, Any], cause: str) -> None:
    assert found(**evidence).cause.startswith(cause), found(**evidence).cause


UNIMPORTED = Unimported("heavy", "ImportError: libx.so", "/tmp/copy", "n2")


@pytest.mark.parametrize(("evidence", "expected"), [
    ({"ends": ends((1, 1, 1)), "reported": RAISED}, True),
    ({"ends": ends((1, 1, 1)), "reported": Failure("rank 1 died while torch was connecting", "start")}, True),
    ({"ends": ends((1, 1, 1)), "reported": RAISED, "syntax_error": "no rank can run x.py: No module named y"}, False),
    ({"ends": ends((1, SIGTERM, 9)), "reported": RAISED, "stopped_by": 15, "stopped_at": 8.0}, False),
    ({"lost": [CUT], "ends": ends((0, 1, 9)), "reported": RAISED, "reported_at": 6.0}, False),
    ({"ends": ends((0, 0, 1), (1, 0, 2))}, False)],
    ids=["import", "others lose that rank", "no rank can run it", "stopped", "lost", "complete"])
def test_an_import_that_a_copy_fails_may_work_from_the_shared_packages(
        evidence: dict[str, Any], expected: bool) -> None:
    assert (found(**evidence, unimported=UNIMPORTED).unimported == UNIMPORTED) == expected
