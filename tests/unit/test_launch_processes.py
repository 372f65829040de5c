"""Processes of one host: started, signalled and ended; messages between hosts; the result."""
from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cluster.hosts import wait_until
from tests.matrix import with_all
from tests.unit.launch_plans import PBS, SLURM, Programs, job, make
from tests.unit.programs import ROOT
from utils.errors import LaunchError
from utils.host import network, process
from utils.job import exclude_file
from utils.launch_protocol import REPORT, Failure
from utils.ranges import parse_ranges
from utils.tools.launch import native_launch, nested
from utils.tools.launch.child_processes import LAUNCH_VARIABLE, Processes, find_processes
from utils.tools.launch.coordinator import Coordinator
from utils.tools.launch.host_ranks import shares_of_ranks, start_on_host
from utils.tools.launch.host_readiness import ReservedPort
from utils.tools.launch.join import JoinServer
from utils.tools.launch.launch_connection import Launch, connect, secret_of_ranks
from utils.tools.launch.launch_plan import Mpiexec, Plan
from utils.tools.launch.launch_result import END_DELAY_AFTER_STOP, Ended, LaunchResult
from utils.tools.launch.methods import Mpich
from utils.tools.launch.run_plan import run


def test_nothing_is_left_of_a_process_and_its_children() -> None:
    with Processes("unit.1") as processes:
        around = {**os.environ, LAUNCH_VARIABLE: "outer"}
        words = ["sh", "-c", "setsid sleep 60 & echo $!; wait"]  # the child is in a session of its own
        child = processes.start(words, around, stdout=subprocess.PIPE)
        with child.stdout as output:
            grandchild = int(output.readline())
        # Between fork() and the end of exec(), a process has no environment.
        wait_until(lambda: all(grandchild in find_processes(launch, []) for launch in ("unit.1", "outer")), "both")
    assert not find_processes("unit.1", [])


CPUS = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(("binding", "given", "threads", "cpus"), [
    ("none", "", "1", [set(CPUS)] * (len(CPUS) + 1)),
    (f"list:{CPUS[0]}:{CPUS[-1]}", "3", "3", [{CPUS[0]}, {CPUS[-1]}])])
def test_ranks_without_the_kit_are_bound_and_do_not_use_all_cores_each(
        tmp_path: Path, binding: str, given: str, threads: str, cpus: list[set[int]]) -> None:
    show = ["sh", "-c", "grep ^Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS"]
    commands = [(show, {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(len(cpus))]
    with Processes("unit.cores") as processes:
        environ = {**os.environ, "DDPKIT_CPU_BIND": binding, "OMP_NUM_THREADS": given}
        start_on_host(commands, environ, processes, None, output_dir=str(tmp_path))
        wait_until(lambda: processes.ended() == [] and not processes.running, "the end of all ranks")
    for path, expected in zip(sorted(tmp_path.iterdir()), cpus, strict=True):
        _, allowed, found = path.read_text().split()
        assert parse_ranges(allowed) == expected and found == threads


@pytest.mark.parametrize(("gpus", "ranks", "expected"), [
    ([0, 0, 1, 1], 4, [{0, 1}, {0, 1}, {2, 3}, {2, 3}]), ([1, 0], 4, [{2, 3}, {2, 3}, {0, 1}, {0, 1}]),
    ([1, 1, 1], 2, [{2, 3}, {2, 3}]), ([1], 1, [set()]), ([0, 0, 1, 1], 2, [{0, 1}, {2, 3}]),
    ([], 2, [{0, 1}, {2, 3}])],
    ids=["a GPU each", "two ranks for each GPU", "near all GPUs", "alone, perhaps an agent", "two GPUs each", "none"])
def test_rank_runs_near_its_gpus(gpus: list[int | None], ranks: int, expected: list[set[int]], tmp_path: Path) -> None:
    for path, text in {"cpu/online": "0-3", "node/node0/cpulist": "0-1", "node/node1/cpulist": "2-3"}.items():
        (tmp_path / "sys/devices/system" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/devices/system" / path).write_text(text)
    shares = shares_of_ranks([{"mask": "f", "gpu_nodes": gpus}] * ranks, {}, tmp_path)
    assert [share.cpus for share in shares] == expected
    threads = {"OMP_NUM_THREADS": str(len(set().union(*expected)) // ranks)} if ranks > 1 else {}
    assert all(share.variables == threads for share in shares)


def test_process_that_ignores_sigterm_is_killed() -> None:
    with Processes("unit.3") as processes:
        words = ["sh", "-c", "trap '' TERM; echo; sleep 60 & wait; wait"]
        child = processes.start(words, os.environ, stdout=subprocess.PIPE)
        with child.stdout as output:
            output.readline()
        processes.end(0.0)
        processes.kill_late(time.monotonic())  # much later
        child.wait(20)
        assert processes.ended() == [(0, 128 + signal.SIGKILL)]
        assert processes.start(["/etc/passwd"], os.environ) is None  # no program: the status of a shell
        assert processes.ended() == [(1, 126)]


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def started_by_mpiexec(folder: Path, end: str, *command: str, in_background: bool = False, **options: Any) -> Plan:
    """Plans two ranks of a program that starts them, or has a process start them, and then runs this line of shell."""
    start = 'PMI_RANK=0 PMI_SIZE=2 "$@" & PMI_RANK=1 PMI_SIZE=2 "$@" &'
    start = f"( {start} wait ) &" if in_background else start
    mpiexec = program(folder / "mpiexec", f'while [ "$1" != -n ]; do shift; done; shift 2\n{start} {end}')
    return make(job("pbs", (2,)), {**PBS, "PATH": os.environ["PATH"]}, mpiexec=Mpiexec(mpiexec, Mpich, 5),
                command=command, python=sys.executable, **options)


def test_signal_of_an_mpiexec_waits_for_the_handlers_of_all_ranks(tmp_path: Path) -> None:
    rank = f"kill -USR1 {os.getpid()}; sleep 0.$((4 * RANK + 2)); trap 'exit 9' USR1; sleep 60 & wait"
    end = "trap 'trap \"\" USR1; kill -USR1 0' USR1; wait; wait $!"
    assert run(started_by_mpiexec(tmp_path, end, "bash", "-c", rank)).status == 9


COPY = (sys.executable, "-c", "import torch", "train.py")
EXCHANGE = """
import os, socket, sys, time
time.sleep(1.6)
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(place) as store:
        store.accept()[0].recv(1)
while os.environ["RANK"] == "1":
    try:
        sys.exit(socket.create_connection(place).close())
    except ConnectionRefusedError:
        time.sleep(0.01)
"""


@pytest.mark.parametrize(("by", "command", "options", "warned"), [
    ("local", COPY, {}, True), ("mpiexec", COPY, {}, True),
    ("local", (sys.executable, "-c", "import torch\n" + EXCHANGE), {}, False),
    ("local", ("sh", "-c", "sleep 2", "train.py"), {}, False),
    *with_all(("local", COPY, {"independent": True}, False), ("ssh", COPY, {}, True),
              ("local", (sys.executable, "-c", "import torch, sys; sys.exit(3)"), {}, False),
              ("local", COPY, {"ntasks": 1}, False), ("local", ("hostname",), {}, False),
              ("mpiexec", ("sh", "-c", "sleep 2"), {}, False))],
    ids=["local", "mpiexec", "store", "no torch", "independent", "agent", "failed", "alone", "hostname",
         "no torch, mpiexec"])
def test_ranks_that_never_form_a_group_are_named(
        by: str, command: tuple[str, ...], options: dict[str, Any], warned: bool, tmp_path: Path,
        capfd: pytest.CaptureFixture[str]) -> None:
    if by == "mpiexec":
        plan = started_by_mpiexec(tmp_path, "wait", *command)
    else:
        allocation = job("pbs", (2,)) if by == "ssh" else None
        environ = {**(PBS if allocation else {}), "PATH": os.environ["PATH"]}
        plan = make(allocation, environ, command=command, launcher=by, python=sys.executable,
                    **({"ntasks": 2} | options))
    assert run(plan).status == 3 * ("exit(3)" in command[-1])
    errors = capfd.readouterr().err
    found = "2 independent copies of train.py ran: no rank formed a process group of torch. Expected"
    assert errors.count(found) == errors.count("independent copies") == warned, errors


def test_ranks_without_a_group_are_named_while_they_run(
        monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(nested, "LATE_SECONDS", 0.2)
    copy = (sys.executable, "-c", "import time, torch; time.sleep(2)", "train.py")
    assert run(make(None, {"PATH": os.environ["PATH"]}, command=copy, ntasks=2)).complete
    errors = capfd.readouterr().err
    found = "2 independent copies of train.py are running: no rank has formed a process group of torch. Expected"
    assert errors.count(found) == errors.count("independent copies") == 1, errors


def test_launcher_that_does_not_return_after_all_ranks_is_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As srun, which waits for ever for a slurmstepd that was killed."""
    monkeypatch.setattr(native_launch, "RETURN_SECONDS", 0.5)
    started = time.monotonic()
    assert run(started_by_mpiexec(tmp_path, "exec sleep 600", "sleep", "1")).complete
    assert 1.5 < time.monotonic() - started < 60
    assert "all ranks have ended, but mpiexec has not within" in capfd.readouterr().err


def test_rank_that_ends_first_is_named_where_the_launcher_names_none(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As Hydra, which kills the other ranks at once."""
    rank = 'sleep $((1 + 60 * (1 - RANK))); kill -9 $$'
    assert run(started_by_mpiexec(tmp_path, "wait $!; kill -9 $(jobs -p); exit 255", "sh", "-c", rank)).status == 137
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.endswith(f"rank 1 on {socket.gethostname()} was ended by SIGKILL (exit status 137)"), last


def test_launcher_that_waits_for_a_lost_host_is_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    lost = JoinServer.client_lost

    def host_lost(server: JoinServer, index: int) -> None:
        server.clients[index].host_lost = True
        lost(server, index)

    monkeypatch.setattr(JoinServer, "client_lost", host_lost)
    monkeypatch.setattr(native_launch, "_RETURN_SECONDS_OF_LOST", 0.5)
    lost_with_its_parent = "sh", "-c", "sleep 1; kill -9 $PPID"
    assert run(started_by_mpiexec(tmp_path, "exec sleep 600", *lost_with_its_parent)).status == 1
    assert f"the connection to {socket.gethostname()} was lost" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("end", "spares"), [
    ("exec sleep 600", ()), ("exec sleep 600", ("n9",)),  # as srun
    ("exit 0", ()), ("sleep 0.2; exit 143", ())])  # as the mpirun of Open MPI 5, and others
def test_host_on_which_a_process_of_the_launcher_is_killed_is_named(
        tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, spares: tuple[str, ...]) -> None:
    """As slurmstepd or prted: its ranks go on, and nobody learns their exit status. With a spare, they are ended."""
    goes_on, rank = "exec" in end and not spares, tmp_path / "rank"
    kill = f"until [ -e {rank} ]; do sleep 0.1; done; sleep 2; kill -9 $!; {end}"
    words = "sh", "-c", f"echo >{rank}; exec sleep {10 if goes_on else 617}"
    plan = started_by_mpiexec(tmp_path, kill, *words, in_background=True)
    started = time.monotonic()
    assert run(plan._replace(spares=spares)).status == (not goes_on)  # the parents of the ranks know their end
    assert time.monotonic() - started < 40
    errors = capfd.readouterr().err
    lost = f"mpiexec on {socket.gethostname()} has ended before the ranks that it had started there: it was killed"
    assert lost in (errors if goes_on else errors.splitlines()[-1]) and errors.count("They go on") == goes_on, errors
    wait_until(lambda: "sleep 617" not in subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True,
                                                         check=True).stdout.splitlines(), "the end of the ranks")


@pytest.mark.parametrize("by", ["local", "agent"])
def test_ranks_that_ignore_a_request_to_end_are_named_and_killed(
        by: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("utils.tools.launch.ignored_stops.KILL_SECONDS", 3.0)  # of ranks of this process alone
    stop = f"[ $RANK = 1 ] || sleep 1; [ $RANK = 1 ] || kill -TERM {os.getpid()}"
    rank = "sh", "-c", f"trap '' TERM; {stop}; exec sleep 60"
    started, options = time.monotonic(), {"command": rank, "python": sys.executable}
    if by == "agent":
        plan = make(job("pbs", (2,)), {**PBS, "PATH": os.environ["PATH"]}, launcher="ssh", **options)
    else:
        plan = make(None, {"PATH": os.environ["PATH"]}, ntasks=2, **options)
    outcome = run(plan)
    errors = capfd.readouterr().err
    assert (outcome.status, outcome.kind) == (137, "stop") and time.monotonic() - started < 60, errors
    assert "SIGTERM was passed on, but rank" in errors and "will be killed in" in errors, errors
    assert errors.splitlines()[-1].startswith("ddpkit launch: error: SIGTERM: ddpkit launch has received it"), errors


def test_rank_that_ends_while_others_are_looked_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch waited for ever where a rank ended between two steps of its loop."""
    ended = Processes.ended

    def slowly(processes: Processes) -> list[tuple[int, int]]:
        found = ended(processes)
        if processes.running:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return found

    monkeypatch.setattr(Processes, "ended", slowly)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the launch did not end"))
    signal.alarm(20)
    try:
        assert run(make(None, dict(os.environ), command=("sh", "-c", "sleep 0.2; exit 3"))).status == 3
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_reservation_lasts_as_long_as_the_program_that_inherits_it() -> None:
    code = (f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); "
            "from utils.tools.launch.host_readiness import ReservedPort; "
            "ReservedPort([31000]).keep_over_exec(); os.execvp('cat', ['cat'])")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as holder:
        wait_until(lambda: process.name(holder.pid) == "cat", "cat")
        socket.create_server(("", 31000)).close()  # by the program itself
        with pytest.raises(LaunchError, match="no port of 31000 to 31000 is free"):
            ReservedPort([31000])
        holder.communicate()
    ReservedPort([31000]).close()


@pytest.mark.parametrize(("number", "status", "lines"), [
    (signal.SIGTERM, 143, 1), (signal.SIGTERM, 137, 1), (signal.SIGINT, 130, 1), (signal.SIGTERM, 1, 1)])
def test_a_stop_names_no_rank_and_leaves_time_to_save(
        number: int, status: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    result = LaunchResult()
    assert not result.is_last_stop(number, 1.0)
    result.process_ended("each of ranks 0-1 on n3", status, 2.0, others=True)
    assert result.end_at == 2.0 + END_DELAY_AFTER_STOP
    reported = Failure("rank 1 on n3 ended without a report. It was killed", "killed", 1)
    outcome = Ended(result.conclude(reported, 2.1)).report()
    printed = capsys.readouterr().err.splitlines()
    name = signal.Signals(number).name
    assert printed[-1].startswith(f"ddpkit launch: error: {name}: ddpkit launch has received it")
    assert len([line for line in printed if not line.startswith("ddpkit-failure ")]) == lines
    assert "rank" not in printed[-1] and outcome.status == status


def test_lost_agent_names_the_lost_host_but_not_one_whose_agent_was_killed() -> None:
    result = LaunchResult()
    coordinator = Coordinator(Launch(make(job("pbs", (1, 1, 1)), PBS), "id", *[Mock()] * 4, result))
    for index in (1, 2):
        coordinator.clients[index] = Mock(host_lost=index == 1)
        coordinator.client_lost(index)
    outcome = result.conclude()
    assert outcome.lost_hosts == ("n2",) and outcome.status == 1


def test_agents_are_sent_the_address_that_reaches_rank_0_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is on the host of launch.py, whose own agent may have reached it by another address."""
    monkeypatch.setattr(network, "local_addresses", lambda: ["10.0.0.1"])
    notices = Mock(launch_secret="cookie-1", addresses="10.0.0.1", port=1)
    environ = {**PBS, "PBS_JOBCOOKIE": "cookie-1", REPORT: f"10.0.0.1/1/{secret_of_ranks('cookie-1')}"}
    plan = make(job("pbs", (1, 1)), environ)
    coordinator = Coordinator(Launch(plan, "id", *[Mock()] * 3, notices, LaunchResult()))
    peers = [Mock(**{"socket.getpeername.return_value": (f"10.0.0.{number}", 1)}) for number in (1, 2)]
    for index, peer in enumerate(peers):
        hello = {"index": index, "reached": f"192.0.2.{index}", "host": f"n{index}"}
        coordinator.receive(peer, {"kind": "agent", **hello})
    for index in range(2):
        coordinator.handle(index, {"kind": "ready", "problem": "", "port": 29500})
    sent = str([peer.send.call_args for peer in peers])
    assert "10.0.0.1/1/'" in sent and "'MASTER_ADDR': '192.0.2.1'" in sent
    assert "cookie-1" not in sent and secret_of_ranks("cookie-1") not in sent


NODE_FAILURE = """srun: error: Node failure on n2
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-21T04:42:48 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***
srun: error: n1: tasks 0-1: Terminated"""
TIME_LIMIT = "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-21T04:04:15 DUE TO TIME LIMIT ***"
# Recorded with one task on each of two hosts of Slurm 26.05.3. slurmstepd no longer names its host.
CANCELLED_26 = "[2026-11-28T11:11:23.010] error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-28T11:11:23 DUE {} ***"
TIME_LIMIT_26 = f"""{CANCELLED_26.format("TO TIME LIMIT")}
[2026-11-28T11:11:23.010] error: *** JOB 3 ON n1 CANCELLED AT 2026-11-28T11:11:23 DUE TO TIME LIMIT ***
srun: Job step aborted: Waiting up to 17 seconds for job step to finish.
srun: error: n1: task 0: Terminated
srun: error: n2: task 1: Terminated"""
PREEMPTED_26 = f"""{CANCELLED_26.format("to SIGNAL Terminated")}
srun: error: n1: task 0: {{}}
srun: Terminating StepId=4.0
srun: error: n2: task 1: Terminated
srun: Force Terminated StepId=4.0"""
PREEMPTED = """slurmstepd-n1: error: *** STEP 6.0 ON n1 CANCELLED AT 2026-11-28T11:38:17 ***
srun: error: n2: task 1: Terminated
srun: error: n1: task 0: Terminated"""
TASK_FAILED_26 = """srun: error: n2: task 1: {}
srun: Terminating StepId=2.0
[2026-11-28T11:11:05.190] error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-28T11:11:05 DUE TO TASK FAILURE ***
srun: error: n1: task 0: Terminated"""
MEMORY = "StepId=1.0 exceeded memory limit (1581395968 > 629145600), being killed"
OVER_MEMORY = f"""slurmstepd-n2: error: {MEMORY}
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-28T11:10:55 ***
srun: Job step aborted: Waiting up to 17 seconds for job step to finish.
slurmstepd-n1: error: Exceeded job memory limit
srun: error: n1: task 0: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: n2: task 1: Killed"""
OVER_MEMORY_26 = f"""[2026-11-28T11:10:55.513] error: {MEMORY}
srun: Job step aborted: Waiting up to 17 seconds for job step to finish.
[2026-11-28T11:10:55.522] error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-28T11:10:55 DUE to SIGNAL Killed ***
[2026-11-28T11:10:55.524] error: Exceeded job memory limit
srun: error: n1: task 0: Killed
srun: error: n2: task 1: Killed"""
OOM_KILL = "Detected 1 oom_kill event in StepId=41.0. Some of the step tasks have been OOM Killed."
CGROUP = """slurmstepd{}: error: {}
srun: error: n2: task 1: Out Of Memory
srun: Terminating StepId=41.0
srun: error: n1: task 0: Terminated"""


@pytest.mark.parametrize(("text", "last", "lost", "host"), [
    (NODE_FAILURE, "Slurm has ended the ranks: srun: error: Node failure on n2", ["n2"], "n2"),
    (TIME_LIMIT, f"Slurm has ended the ranks: {TIME_LIMIT}", [], None),
    (TIME_LIMIT_26, f"Slurm has ended the ranks: {TIME_LIMIT_26.splitlines()[0]}", [], None),
    *((PREEMPTED_26.format(end), f"Slurm has ended the ranks: {PREEMPTED_26.splitlines()[0]}", [], None)
      for end in ("Terminated", "Exited with exit code 1")),
    (PREEMPTED, f"Slurm has ended the ranks: {PREEMPTED.splitlines()[0]}", [], None),
    (OVER_MEMORY, f"Slurm has ended the ranks: out of memory on n2: {MEMORY}", [], "n2"),
    (OVER_MEMORY_26, f"Slurm has ended the ranks: out of memory: {MEMORY}", [], None),
    (CGROUP.format("-n2", OOM_KILL), f"Slurm has ended the ranks: out of memory on n2: {OOM_KILL}", [], "n2"),
    (CGROUP.format("", OOM_KILL), f"Slurm has ended the ranks: out of memory on n2: {OOM_KILL}", [], "n2"),
    (TASK_FAILED_26.format("Exited with exit code 7"), "rank 1 on n2 ended with exit status 7", [], "n2"),
    (TASK_FAILED_26.format("Killed"), "rank 1 on n2 was ended by SIGKILL (exit status 137)", [], "n2"),
    ("srun: error: n1: tasks 0-1: Killed\nslurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-21T04:00:47 ***",
     "each of ranks 0-1 on n1 was ended by SIGKILL", [], "n1")])
def test_what_srun_prints_decides_the_last_line(
        text: str, last: str, lost: list[str], host: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DDPKIT_FAILURE_FILE", str(tmp_path / "failure"))
    srun, file = program(tmp_path / "srun", f"cat >&2 <<'E'\n{text}\nE\nexit 143"), tmp_path / "bad-hosts.txt"
    environ = {**SLURM, "PATH": os.environ["PATH"], exclude_file.VARIABLE: str(file)}
    plan = make(job("slurm", (1, 1)), environ, programs=Programs({"srun": srun}), python=sys.executable)
    assert run(plan).status in (137, 143, 7)
    printed = capfd.readouterr().err.splitlines()
    messages = [line for line in printed if line.startswith("ddpkit launch: error: ") and "did not join" not in line]
    assert len(messages) == 1 and messages[0].startswith(f"ddpkit launch: error: {last}")
    failure = json.loads((tmp_path / "failure").read_text().partition(" ")[2])
    assert (failure["cause"], failure["host"]) == (messages[0].removeprefix("ddpkit launch: error: "), host)
    assert [entry.host for entry in exclude_file.read(file)] == lost


@pytest.mark.parametrize(("reported", "exit_statuses", "status", "last"), [
    (Failure("rank 2 on h2 ended without a report", "killed", 2), {2: 0, 0: 1}, 1,
     "ddpkit launch: rank 2 ended with exit status 0 before the others: os._exit(0), or the end of its program"),
    (Failure("rank 2 on h2 ended without a report. See the output of the launcher", "killed", 2, "h2"), {2: 137, 0: 1},
     137, "ddpkit launch: rank 2 on h2 was ended by SIGKILL (exit status 137), perhaps because its host ran out of"),
    (Failure("rank 2 on h2 ended without a report", "killed", 2, "h2"), {2: 7, 0: 1}, 7,
     "ddpkit launch: rank 2 on h2 ended with exit status 7 and without an exception, as by os._exit(7)"),
    (Failure("rank 2 on h2 ended without a report", "killed", 2, "h2"), {0: 1}, 1,
     "ddpkit launch: rank 2 on h2 ended without a report"),
    (Failure("rank 2 on h2 failed: KeyError", "exception", 2), {0: 1, 2: 7}, 7,
     "KeyError. Rank 2 ended with exit status 7"),
    (Failure("a host is down", "lost"), {0: 1}, 1, "ddpkit launch: a host is down"),
    (None, {2: 0, 0: 1}, 1, "rank 2 had ended with exit status 0 before rank 0 ended with exit status 1"),
    (None, {0: 1, 2: 7}, 7, "ddpkit launch: error: rank 2 ended with exit status 7"),  # no exception has this status
    (None, {0: 1, 2: 1}, 1, "each of ranks 0,2 ended with exit status 1"),
    (None, {0: 3, 2: 7}, 3, "rank 2 failed, too, before the others were ended"),
    (None, {0: 1}, 1, "ddpkit launch: error: rank 0 ended with exit status 1")])
def test_last_line_is_about_the_first_failure(
        reported: Failure | None, exit_statuses: dict[int, int], status: int, last: str,
        capsys: pytest.CaptureFixture[str]) -> None:
    result = LaunchResult()
    for rank, ended in exit_statuses.items():
        result.process_ended(f"rank {rank}", ended, 1.0, others=True, rank=rank)
    result.process_ended("rank 1", 143, 9.0, others=False, rank=1)  # ddpkit launch has ended it
    outcome = Ended(result.conclude(reported, 1.0)).report()
    assert outcome.status == status and last in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("first", "expected"), [(TimeoutError, 60.0), (ConnectionRefusedError, 5.0)])
def test_refusal_at_one_address_does_not_shorten_the_wait_for_others(
        first: type[OSError], expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    errors = itertools.cycle([first, ConnectionRefusedError])
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=errors))
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now[-1] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    assert connect(["10.0.0.1", "172.17.0.1"], 1, "secret", "rank") is None
    assert expected <= now[-1] < expected + 1
