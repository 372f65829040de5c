"""Which failure starts the ranks again, and without which hosts."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch_plans import PBS, job, line, make, slurm
from tests.unit.programs import kept_warm
from tests.unit.test_launch_command import launch
from utils.job import exclude_file
from utils.tools.launch.launch_plan import Plan, PlanError
from utils.tools.launch.launch_result import Ended, LaunchResult
from utils.tools.launch.outcome import Outcome
from utils.tools.launch.planner import describe
from utils.tools.launch.restarts import Attempt, Restarts, decide


def attempt(kind: str, *, text: str = "rank 1 on n2 failed: ValueError: bad batch 17", rank: int | None = 1,
            host: str | None = "n2", status: int = 1, suspects: tuple[str, ...] = (), certain: bool = False,
            checkpoint: int | None = None, stopped: bool = False, seconds: float = 20.0) -> Attempt:
    outcome = Outcome(status, kind, text, rank, host, suspects, certain, stopped=stopped)
    return Attempt(outcome, checkpoint, seconds)


def lost(*hosts: str, **fields: Any) -> Attempt:
    return attempt("lost", host=hosts[0], suspects=hosts, certain=True, **fields)


LOST = lost("n2")
KILLED = attempt("status", text="rank 1 on n2 was ended by SIGKILL (exit status 137)", suspects=("n2",))
RAISED = attempt("exception")
XID = attempt("exception", text="rank 1 on n2 failed: RuntimeError: CUDA error: uncorrectable ECC error encountered",
              suspects=("n2",), certain=True)


@pytest.mark.parametrize(("attempts", "spares", "restarts", "without", "why_not"), [
    ([LOST], 1, 0, ("n2",), ""),
    ([lost("n2", "n3")], 2, 0, ("n2", "n3"), ""),
    ([lost("n2", "n3")], 1, 3, (), "no spare host is left in the place of n2, n3"),
    ([LOST, lost("n3")], 1, 0, ("n3",), ""),
    ([LOST, LOST], 1, 0, ("n2",), ""),  # a lost host is no failure of the program, however often
    ([LOST], 0, 5, (), "no spare host is left in the place of n2"),
    ([LOST], 0, 0, (), "no spare host is left in the place of n2"),
    ([attempt("stop", rank=None)], 1, 5, (), "end in the same way"),
    ([attempt("network", rank=None)], 1, 5, (), "end in the same way"),
    ([attempt("launch", rank=None, suspects=("n2",), certain=True)], 1, 0, ("n2",), ""),  # no agent there
    ([attempt("launch", rank=None, host=None)], 1, 0, (), "names no host"),
    ([attempt("command", rank=None, host=None)], 1, 5, (), "end in the same way"),
    ([XID], 1, 0, ("n2",), ""),
    ([attempt("hang", suspects=("n2",))], 1, 0, ("n2",), ""),
    ([attempt("hang", rank=None, host=None)], 1, 0, (), "names no host"),
    ([attempt("hang", rank=None, host=None)], 0, 1, (), ""),
    ([KILLED], 1, 0, ("n2",), ""),
    ([KILLED], 0, 1, (), ""), ([KILLED], 0, 0, (), "no spare host is left in the place of n2"),
    ([KILLED, attempt("status", text="rank 0 on n3 was ended by SIGKILL (exit status 137)", rank=0, host="n3",
                      suspects=("n3",))], 1, 9, (), "same failure twice"),
    ([RAISED], 1, 0, (), "names no host"),
    ([RAISED], 1, 1, (), ""),
    ([RAISED, RAISED], 1, 1, (), "same failure twice"),
    ([RAISED, attempt("exception", host="n3", rank=2, text="rank 2 on n3 failed: ValueError: bad batch 17")],
     1, 1, (), "same failure twice"),
    # A wrong argument: each time another rank is the first, whose exit status need not be known.
    ([attempt("exception", text="rank 0 on n1 failed: SystemExit: 2. Rank 0 ended with exit status 2", host="n1"),
      attempt("exception", text="rank 1 on n2 failed: SystemExit: 2. Rank 1 ended with exit status 2")],
     1, 9, (), "same failure twice"),
    ([attempt("exception", text="rank 0 on n1 failed: SystemExit: 2", host="n1"),
      attempt("exception", text="rank 1 on n2 failed: SystemExit: 2. Rank 1 ended with exit status 2")],
     1, 9, (), "same failure twice"),
    ([RAISED, attempt("exception", text="rank 1 on n2 failed: ValueError: bad batch 23")], 1, 1, (), ""),
    ([RAISED, attempt("exception", checkpoint=500)], 1, 1, (), ""),
    ([RAISED, attempt("exception", seconds=3600.0)], 1, 1, (), ""),
    ([attempt("exception", checkpoint=500), RAISED], 1, 1, (), "same failure twice"),
    ([RAISED, KILLED, LOST], 2, 5, (), "3 failures without a new checkpoint"),
    ([RAISED, KILLED, lost("n2", checkpoint=10)], 2, 5, ("n2",), ""),
    ([lost("n2", stopped=True)], 1, 5, (), "not failed"),
    # A checkpoint of the step that was loaded is no progress.
    ([attempt("exception", checkpoint=8), attempt("exception", checkpoint=8)], 1, 5, (), "same failure twice"),
    ([attempt("exception", checkpoint=8), attempt("exception", checkpoint=9)], 1, 5, (), ""),
    # The same exception, at another time and in another file.
    ([attempt("exception", text="rank 1 on n2 failed: OSError: /scratch/n2/a.bin is gone at 12:30:01, after 17.2 s"),
      attempt("exception", text="rank 0 on n2 failed: OSError: /scratch/n7/b.bin is gone at 13:02:47, after 3 s")],
     1, 5, (), "same failure twice"),
    ([attempt("exception", status=0)], 1, 5, (), "not failed"),
])
def test_what_follows_a_failure(attempts: list[Attempt], spares: int, restarts: int, without: tuple[str, ...],
                                why_not: str) -> None:
    found = decide(attempts, spares, restarts)
    assert found.without == without and bool(found.why_not) == bool(why_not) and why_not in found.why_not, found


def hosts_of(plan: Plan) -> tuple[str, str]:
    return " ".join(plan.hosts), " ".join(plan.spares)


def test_spare_hosts_take_the_places_of_failed_and_of_listed_ones(tmp_path: Path) -> None:
    ranks = (2, 2, 2, 2)
    assert hosts_of(slurm(ranks=ranks, spare=2)()) == ("n1 n2", "n3 n4")
    plan = slurm(ranks=ranks, spare=2, without=("n1.cluster",))()
    assert hosts_of(plan) == ("n2 n3", "n4") and "; spare: n4" in next(describe(plan))
    assert "--nodelist=n2,n3" in line(plan) and "--overlap" not in line(plan)
    assert "--overlap" in line(slurm(ranks=ranks, spare=2, without=("n1",), restarted=True)())
    assert hosts_of(slurm(ranks=ranks, spare=1, nodes=2)()) == ("n1 n2", "n3")  # as submit run
    assert hosts_of(slurm(ranks=ranks, spare=1, ntasks=3)())[0] == "n1 n2 n3"
    listed = tmp_path / "bad hosts"
    exclude_file.add(listed, {"n2": "", "n1": "", "n3": ""})
    known = {**PBS, exclude_file.VARIABLE: str(listed)}
    plan = make(job("pbs", ranks), known, spare=1)
    assert hosts_of(plan) == ("n2 n3 n4", "")  # one of them; no spare is left
    assert next(describe(plan)).endswith("; left out: n1")
    assert hosts_of(make(job("pbs", ranks), known)) == ("n1 n2 n3 n4", "")


@pytest.mark.parametrize(("ranks", "options", "message"), [
    ((2, 2), {"spare": 2}, "--spare is 2, but Slurm job 7 has only 2 hosts for ranks"),
    ((2, 2), {"spare": -1}, "--spare is -1"), ((2, 1), {"spare": 1}, "hosts that can replace each other"),
    ((2, 2), {"spare": 1, "without": ("n1", "n2")}, "n1, n2 must be left out, and only 0 of the 1 hosts"),
    ((2, 2), {"spare": 1, "nodes": 2}, "--nodes is 2. Expected 1 to 1 with --spare 1"),
    ((2, 2), {"spare": 1, "launcher": "local"}, "on this host alone")])
def test_spares_that_cannot_be(ranks: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        slurm(ranks=ranks, **options)()


@pytest.mark.parametrize(("outlives", "said"), [(True, False), (None, False), (False, True)])
def test_pbs_may_end_a_job_whose_host_fails(outlives: bool | None, said: bool) -> None:
    notes = make(job("pbs")._replace(outlives_host=outlives), PBS, spare=1).notes
    said_so = [note for note in notes if "tolerate_node_failures=all" in note]
    assert [note.partition(":")[0] for note in said_so] == ["PBS job 7 may end when one of its hosts fails"] * said


FAILS_ONCE = """\
import os, sys
from pathlib import Path
from ddpkit import setup_distributed
with setup_distributed("gloo") as dist:
    dist.barrier()
    once = Path("failed")
    if dist.rank == 1 and ("always" in sys.argv or not once.exists()):
        once.touch()
        raise ValueError("bad batch 17")
    dist.barrier()
    print("trained", os.environ["DDPKIT_RESTART"], flush=True)
"""


def test_a_failure_is_tried_again_on_the_same_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    done = launch("-n", "2", "--max-restarts", "3", "train.py", folder=tmp_path, PYTHON=kept_warm())
    assert done.returncode == 0 and "restart 1 on the same hosts; 2 more allowed" in done.stderr, done.stderr
    assert done.stdout.count('trained {"number": 1, "cause": "rank 1 on ') == 2


def test_a_programs_own_error_is_tried_again_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    done = launch("-n", "2", "--max-restarts", "3", "train.py", "always", folder=tmp_path, PYTHON=kept_warm())
    assert done.returncode == 1 and "restart 2" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("ddpkit-failure ")]
    assert "no restart: the same failure twice" in lines[-2], done.stderr
    assert re.fullmatch(r"ddpkit launch: rank 1 on \S+ failed: ValueError: bad batch 17", lines[-1]), done.stderr


def test_a_spare_needs_a_job_of_several_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = launch("--spare", "1", "train.py", folder=tmp_path)
    assert done.returncode == 2 and "--spare is 1, but the ranks run on this host alone" in done.stderr


def test_a_host_is_left_out_by_its_name_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    allocation = job("pbs", (1, 1, 1))._replace(hosts=("n1.lab", "n2.lab", "n3.lab"))
    plans: list[Plan] = []

    def replan(without: tuple[str, ...]) -> Plan:
        plans.append(make(allocation, PBS, spare=1, without=without))
        return plans[-1]

    def start(plan: Plan) -> Ended:
        result = LaunchResult()
        if len(plans) == 1:
            result.host_lost("n2", "the connection to n2 was lost", 1.0)
        else:
            result.process_ended("rank 0", 0, 1.0, others=False, rank=0)
        return Ended(result.conclude())

    assert Restarts(replan(()), replan, 0).run(start).complete
    assert plans[-1].hosts == ("n1.lab", "n3.lab")
    assert "restart 1 without n2.lab, with n3.lab instead" in capsys.readouterr().err


def test_a_spare_that_takes_a_place_does_not_count_as_a_restart_on_the_same_hosts(
        capsys: pytest.CaptureFixture[str]) -> None:
    def replan(without: tuple[str, ...]) -> Plan:
        return make(job("pbs", (1, 1, 1)), PBS, spare=1, without=without)

    results = [LaunchResult() for _ in range(3)]
    results[0].host_lost("n2", "the connection to n2 was lost", 1.0)
    results[1].process_ended("rank 0", 3, 1.0, others=False, rank=0)
    results[2].process_ended("rank 0", 0, 1.0, others=False, rank=0)
    remaining = iter(results)
    assert Restarts(replan(()), replan, 1).run(lambda plan: Ended(next(remaining).conclude())).complete
    assert "restart 2 on the same hosts; 0 more allowed" in capsys.readouterr().err
