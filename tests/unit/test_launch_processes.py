"""Processes of one host, their environment, and what srun says about them."""
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

from utils.launch.agent import rank_environment
from utils.launch.native import Failure, SrunErrors, srun_ports, step_of
from utils.launch.outcome import LINGER, LINGER_AFTER_STOP, Outcome, in_words
from utils.launch.ports import ReservedPort
from utils.launch.processes import MARK, Processes, survivors
from utils.launch.wire import Wire, connect

ROOT = Path(__file__).resolve().parents[2]
# Starts a child in a session of its own, tells its process id, and waits.
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


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_nothing_is_left_of_a_process_and_of_what_it_has_started() -> None:
    with Processes("unit.1") as processes:
        child = processes.start([sys.executable, "-c", WITH_CHILD], os.environ, stdout=subprocess.PIPE)
        assert child is not None and child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert is_running(grandchild)
        child.stdout.close()
    assert not is_running(child.pid) and not is_running(grandchild)


def test_a_keeper_ends_everything_when_its_own_process_is_killed() -> None:
    program = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils.launch.processes import Processes
with Processes("unit.2") as processes:
    processes.start([sys.executable, "-c", {WITH_CHILD!r}], os.environ)
    time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    grandchild = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    wait_for(lambda: not is_running(grandchild))
    wait_for(lambda: not survivors("unit.2", {}))
    owner.stdout.close()


def test_a_process_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.launch.processes.PATIENCE", 0.2)
    with Processes("unit.3") as processes:
        child = processes.start(["sh", "-c", "trap '' TERM; echo; sleep 60 & wait; wait"], os.environ,
                                stdout=subprocess.PIPE)
        assert child is not None and child.stdout is not None
        child.stdout.readline()
        processes.end(time.monotonic())

        def killed() -> bool:
            processes.kill_late(time.monotonic())
            return bool(ended.extend(processes.ended()) or ended)

        ended: list[tuple[int, int]] = []
        wait_for(killed)
        child.stdout.close()
    assert ended == [(0, 128 + signal.SIGKILL)]


@pytest.mark.parametrize(("words", "status"), [(["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137),
                                               (["/no/such/program"], 127), (["/etc/passwd"], 126)])
def test_the_exit_status_is_that_of_a_shell(words: list[str], status: int) -> None:
    with Processes("unit.4") as processes:
        processes.start(words, os.environ)
        ended: list[tuple[int, int]] = []
        wait_for(lambda: ended.extend(processes.ended()) or ended)
    assert ended == [(0, status)]


def test_a_signal_reaches_the_workers_of_torchrun_and_not_torchrun() -> None:
    worker = 'trap "echo worker; exit 0" USR1; echo ready; while :; do sleep .05; done'
    program = f"trap 'echo parent' USR1; sh -c '{worker}'"
    with Processes("unit.5") as processes:
        child = processes.start(["sh", "-c", program], os.environ, stdout=subprocess.PIPE)
        assert child is not None and child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        processes.signal(signal.SIGUSR1, to_their_children=True)
        assert child.stdout.read() == b"worker\n"
        child.stdout.close()


def test_a_process_carries_the_marks_of_the_launches_around_it() -> None:
    with Processes("inner") as processes:
        child = processes.start(["sh", "-c", f"echo ${MARK}"], {**os.environ, MARK: "outer"}, stdout=subprocess.PIPE)
        assert child is not None and child.stdout is not None
        assert child.stdout.read() == b"outer/inner\n"
        child.stdout.close()


# The environment of an agent's ranks ----------------------------------------------------------------------------------

def test_ranks_have_the_environment_of_the_head_with_this_hosts_own_values() -> None:
    sent = {"FOO": "a\nb", "HOSTNAME": "n1", "PBS_NODENUM": "0", "PBS_NODEFILE": "/aux/7", "TMPDIR": "/tmp/7"}
    own = {"FOO": "other", "HOSTNAME": "n2", "PBS_NODENUM": "1", "PATH": "/bin"}
    assert rank_environment(sent, own, same_host=False) == {
        "FOO": "a\nb", "HOSTNAME": "n2", "PBS_NODENUM": "1", "PBS_NODEFILE": "/aux/7", "TMPDIR": "/tmp/7"}


def test_the_mask_that_the_scheduler_sets_for_this_host_stays() -> None:
    masked = rank_environment({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}, same_host=False)
    assert masked == {"CUDA_VISIBLE_DEVICES": "GPU-b"}


@pytest.mark.parametrize(("mask", "same_host", "kept"), [("0,1", False, True), ("GPU-a", False, False),
                                                         ("GPU-a", True, True), ("MIG-a", False, False)])
def test_a_mask_by_name_is_not_carried_to_another_host(mask: str, same_host: bool, kept: bool) -> None:
    environ = rank_environment({"CUDA_VISIBLE_DEVICES": mask}, {}, same_host=same_host)
    assert environ == ({"CUDA_VISIBLE_DEVICES": mask} if kept else {})


def test_a_reserved_port_can_be_bound_and_is_given_to_nobody_else() -> None:
    reserved = [ReservedPort() for _ in range(300)]
    assert len({one.port for one in reserved}) == 300
    with socket.create_server(("", reserved[0].port)):
        pass
    for one in reserved:
        one.close()


def test_a_reservation_lasts_as_long_as_the_program_that_inherits_it() -> None:
    code = (f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); from utils.launch.ports import ReservedPort; "
            "ReservedPort([31000]).keep_over_exec(); os.execvp('cat', ['cat'])")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as holder:
        wait_for(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "cat\n")
        with pytest.raises(OSError, match="no port of 31000 to 31000 is free"):
            ReservedPort([31000])
    ReservedPort([31000]).close()


# What ends a launch ---------------------------------------------------------------------------------------------------

def test_the_first_failure_gives_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome()
    outcome.ended("rank 0", 0, 1.0, others=True)
    outcome.ended("rank 2 on n2", 137, 2.0, others=True)
    outcome.ended("rank 1", 1, 2.1, others=False)
    assert (outcome.status, outcome.end_at) == (137, 2.0 + LINGER)
    assert capsys.readouterr().err == (
        "launch.py: rank 2 on n2 was ended by SIGKILL (exit status 137), the others will be ended\n")


def test_after_a_stop_a_rank_that_leaves_early_does_not_end_one_that_still_saves() -> None:
    outcome = Outcome()
    assert not outcome.is_last_stop(signal.SIGUSR1, 1.0)
    outcome.ended("rank 0", 85, 5.0, others=True)
    assert outcome.end_at == 5.0 + LINGER_AFTER_STOP


def test_a_second_interrupt_ends_everything_at_once() -> None:
    outcome = Outcome()
    assert not outcome.is_last_stop(signal.SIGINT, 1.0)
    assert outcome.is_last_stop(signal.SIGINT, 2.0)
    outcome.end_now(signal.SIGINT, 2.0)
    assert (outcome.status, outcome.end_at) == (130, 2.0)


def test_an_unknown_signal_is_told_by_its_number() -> None:
    assert in_words(255) == "ended with exit status 255"


@pytest.mark.parametrize(("said", "first"), [
    ("srun: error: node2: task 2: Exited with exit code 7\nsrun: error: node1: tasks 0-1: Killed\n",
     Failure(7, "node2", "2")),
    ("srun: error: node2: task 2: Killed\nsrun: error: node1: tasks 0-1: Terminated\n", Failure(137, "node2", "2")),
    ("srun: error: node2: tasks 2-3: Segmentation fault (core dumped)\n", Failure(139, "node2", "2-3")),
    ("srun: error: Unable to create step for job 7: More processors requested than permitted\n", None)])
def test_srun_tells_which_task_failed_first(said: str, first: Failure | None,
                                              capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, said.encode())
    os.close(writer)
    with open(reader, "rb") as pipe:
        errors = SrunErrors(pipe)
        errors.drain()
    assert errors.first == first
    assert capfd.readouterr().err == said


def test_the_step_of_an_srun_is_found_by_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'StepId=7.0 UserId=0 State=RUNNING SrunHost:Pid=node1:100 CPUFreqReq=x'\n"
                        "echo 'StepId=7.1 UserId=0 State=RUNNING SrunHost:Pid=node1:10 CPUFreqReq=x'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert step_of("7", 10) == "7.1"
    assert step_of("7", 11) == "7"


@pytest.mark.parametrize(("said", "ports"), [("60001-60010", range(60001, 60011)), ("0-0", range(0))])
def test_ports_that_compute_nodes_reach_are_those_of_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str,
                                                          ports: range) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'SlurmctldPort = 6817'\necho 'SrunPortRange           = {said}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert srun_ports() == ports


# The wire -------------------------------------------------------------------------------------------------------------

def test_messages_arrive_whole_and_in_order_however_long_they_are() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Wire(socket.create_connection(listener.getsockname()))
        other = Wire(listener.accept()[0])
    one.send({"a": "x" * 3_000_000})
    one.send({"b": "\udcff\n"})
    found: list[dict[str, str]] = []

    def arrived() -> bool:
        one.flush()
        found.extend(other.receive())
        return len(found) == 2

    wait_for(arrived)
    assert found == [{"a": "x" * 3_000_000}, {"b": "\udcff\n"}]
    one.close()
    other.receive()
    assert other.closed
    other.close()


@pytest.mark.parametrize(("answers", "expected"), [
    ({"10.0.0.1": TimeoutError, "172.17.0.1": ConnectionRefusedError}, 60.0),
    ({"10.0.0.1": ConnectionRefusedError, "172.17.0.1": ConnectionRefusedError}, 5.0)])
def test_a_refusal_at_one_address_does_not_shorten_the_wait_for_the_others(
        answers: dict[str, type[OSError]], expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        raise answers[address[0]]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert connect(list(answers), 1) is None
    assert expected <= now < expected + 1


def test_what_is_no_message_closes_the_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stranger = socket.create_connection(listener.getsockname())
    wire = Wire(listener.accept()[0])
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_for(lambda: wire.receive() == [] and wire.closed)
    for end in (wire, stranger, listener):
        end.close()
