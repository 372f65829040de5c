"""Processes of one host: started, signalled and ended; messages between hosts; the result."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.launch_plans import make
from utils import process
from utils.launch.connection import connect
from utils.launch.processes import LAUNCH_VARIABLE, Processes, find_processes
from utils.launch.reserved_port import ReservedPort
from utils.launch.result import END_DELAY, END_DELAY_AFTER_STOP, LaunchResult, describe_status
from utils.launch.run import run

ROOT = Path(__file__).resolve().parents[2]
# Starts a child in a session of its own, prints its process id, and waits.
WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)


def start(processes: Processes, *words: str, **environ: str) -> subprocess.Popen[bytes]:
    child = processes.start(list(words), {**os.environ, **environ}, stdout=subprocess.PIPE)
    assert child is not None and child.stdout is not None
    return child


def wait_for_end(processes: Processes) -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []

    def all_ended() -> bool:
        processes.kill_late(time.monotonic())
        ended.extend(processes.ended())
        return not processes.running

    wait_for(all_ended)
    return ended


def test_nothing_is_left_of_a_process_and_its_children() -> None:
    with Processes("unit.1") as processes, start(processes, sys.executable, "-c", WITH_CHILD).stdout as output:
        grandchild = int(output.readline())
        assert process.start_time(grandchild)
    assert not process.start_time(grandchild) and not find_processes("unit.1", [])


def test_reaper_ends_everything_when_its_parent_is_killed() -> None:
    program = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils.launch.processes import Processes
with Processes("unit.2") as processes:
    processes.start([sys.executable, "-c", {WITH_CHILD!r}], os.environ)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        grandchild = int(parent.stdout.readline())
        parent.kill()
    wait_for(lambda: not process.start_time(grandchild) and not find_processes("unit.2", []))


def test_process_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.launch.processes.TERMINATE_SECONDS", 0.2)
    program = "trap '' TERM; echo; sleep 60 & wait; wait"
    with Processes("unit.3") as processes, start(processes, "sh", "-c", program).stdout as output:
        output.readline()
        processes.end(time.monotonic())
        assert wait_for_end(processes) == [(0, 128 + signal.SIGKILL)]


@pytest.mark.parametrize(("words", "status"), [
    (["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137), (["/no/such/program"], 127),
    (["/etc/passwd"], 126)])
def test_exit_status_is_that_of_a_shell(words: list[str], status: int) -> None:
    with Processes("unit.4") as processes:
        processes.start(words, os.environ)
        assert wait_for_end(processes) == [(0, status)]


def test_signal_reaches_workers_of_torchrun_and_not_torchrun() -> None:
    worker = 'trap "echo worker; exit 0" USR1; echo ready; while :; do sleep .05; done'
    program = f"trap 'echo parent' USR1; echo ${LAUNCH_VARIABLE}; sh -c '{worker}'"
    with Processes("unit.5") as processes, start(
            processes, "sh", "-c", program, **{LAUNCH_VARIABLE: "outer"}).stdout as output:
        assert output.readline() == b"outer/unit.5\n"  # the ids of the launches around it
        assert output.readline() == b"ready\n"
        processes.signal(signal.SIGUSR1, to_workers=True)
        assert output.read() == b"worker\n"


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
        assert run(make(None, dict(os.environ), command=("sh", "-c", "sleep 0.2; exit 3"))) == 3
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Ports


def test_reserved_port_can_be_bound_and_is_given_to_nobody_else() -> None:
    reserved = [ReservedPort() for _ in range(300)]
    assert len({one.port for one in reserved}) == 300
    with socket.create_server(("", reserved[0].port)):
        pass
    for one in reserved:
        one.close()


def test_reservation_lasts_as_long_as_the_program_that_inherits_it() -> None:
    code = (f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); "
            "from utils.launch.reserved_port import ReservedPort; "
            "ReservedPort([31000]).keep_over_exec(); os.execvp('cat', ['cat'])")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as holder:
        wait_for(lambda: process.name(holder.pid) == "cat")
        with pytest.raises(OSError, match="no port of 31000 to 31000 is free"):
            ReservedPort([31000])
        holder.communicate()
    ReservedPort([31000]).close()


# The result of a launch


def test_first_failure_gives_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    result = LaunchResult()
    result.process_ended("rank 0", 0, 1.0, others=True)
    assert (result.status, result.end_at) == (0, None)
    result.process_ended("rank 2 on n2", 137, 2.0, others=True)
    result.process_ended("rank 1 on n1", 143, 2.1, others=False)
    assert (result.status, result.end_at) == (137, 2.0 + END_DELAY)
    assert capsys.readouterr().err == (
        "launch.py: rank 2 on n2 was ended by SIGKILL (exit status 137), the others will be ended\n")
    assert describe_status(255) == "ended with exit status 255"  # no signal


def test_after_a_stop_the_others_have_time_to_save() -> None:
    result = LaunchResult()
    assert not result.is_last_stop(signal.SIGTERM, 1.0)
    result.process_ended("rank 0", 5, 3.0, others=True)
    assert (result.status, result.end_at) == (5, 3.0 + END_DELAY_AFTER_STOP)


def test_second_interrupt_ends_everything() -> None:
    result = LaunchResult()
    assert [result.is_last_stop(signal.SIGINT, now) for now in (1.0, 2.0)] == [False, True]
    result.end_now(signal.SIGINT, 2.0)
    assert (result.status, result.end_at) == (130, 2.0)


@pytest.mark.parametrize(("first", "expected"), [(TimeoutError, 60.0), (ConnectionRefusedError, 5.0)])
def test_refusal_at_one_address_does_not_shorten_the_wait_for_others(
        first: type[OSError], expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        raise {"10.0.0.1": first, "172.17.0.1": ConnectionRefusedError}[address[0]]

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now[-1] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    assert connect(["10.0.0.1", "172.17.0.1"], 1) is None
    assert expected <= now[-1] < expected + 1
