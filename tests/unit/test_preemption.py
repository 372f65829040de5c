"""StopSignal in one process: what requests a stop, what happens to the signals, how a run ends."""
from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import operator
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cluster.hosts import wait_until
from tests.unit.notices import served
from utils.launch_protocol import REPORT
from utils.preemption import EXIT_REQUEUE, StopSignal, shield_worker, stop_signal
from utils.preemption.agreement import StopAgreement
from utils.preemption.sources import TimeLimit


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", REPORT):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as stop:
        yield stop


def test_a_signal_is_seen_during_a_long_call_into_c(stop: StopSignal, tmp_path: Path) -> None:
    """The main thread runs no handler until system() returns, which it does on `seen` alone."""
    seen = tmp_path / "seen"
    os.mkfifo(seen)

    def respond() -> None:
        wait_until(lambda: stop.requested, "the request")
        seen.write_text("")

    threading.Thread(target=respond).start()
    assert ctypes.CDLL(None).system(f"kill -USR1 $PPID; timeout 60 cat {seen}".encode()) == 0
    assert stop.should_stop()
    assert (stop.requested, stop.stopped, stop.exit_status) == (True, True, EXIT_REQUEUE)


@pytest.mark.parametrize(("options", "reason", "warnings"), [
    ({"time_left": lambda: 100.0, "save_seconds": 200}, "time limit in", 1),
    ({"time_left": lambda: 1.5, "save_seconds": 0.05, "margin": 0}, "time limit in", 0),  # after many steps
    ({"file": "STOP"}, "file STOP", 0)])
def test_time_limit_and_file_stop_the_run(options: dict[str, Any], reason: str, warnings: int, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    with StopSignal(poll_seconds=0.01, **options) as stop:
        assert warnings or not stop.should_stop()
        Path("STOP").touch()
        wait_until(stop.should_stop, reason)
        assert stop.should_stop()
    assert stop.reason.startswith(reason)
    warning = r"this job makes \d+ steps?: the start and the 230 s .* Request more time, or lower save_seconds=200 and"
    assert len(re.findall(warning, caplog.text)) == caplog.text.count("WARNING") == warnings


def test_the_reserve_is_margin_longest_save_and_longest_step(stop: StopSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def reserve_after(step: float, save: float) -> float:
        clock.now += step
        with stop.saving():
            clock.now += save
        stop.should_stop()
        return stop.reserve_seconds

    assert stop.reserve_seconds == 60 + 30
    stop.should_stop()
    assert [reserve_after(2, 10), reserve_after(3, 20), reserve_after(1, 5)] == [30 + 10 + 2, 30 + 20 + 3, 30 + 20 + 3]

    with pytest.raises(OSError), stop.saving():
        clock.now += 100
        raise OSError("disk full")
    assert stop.save_seconds == 20


def test_previous_handlers_get_the_signals_and_come_back() -> None:
    called: list[int] = []
    previous = signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    handler = signal.getsignal(signal.SIGUSR2)
    read_end, write_end = socket.socketpair()
    with read_end, write_end:
        write_end.setblocking(False)
        previous_wakeup = signal.set_wakeup_fd(write_end.fileno())
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.should_stop()
            assert called == [signal.SIGUSR2] and read_end.recv(10) == bytes([signal.SIGUSR2])
        assert signal.set_wakeup_fd(previous_wakeup) == write_end.fileno()

    assert signal.signal(signal.SIGUSR2, previous) is handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_nothing_is_left_behind() -> None:
    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = resources()
    for _ in range(20):
        with StopSignal():
            pass
    # Those of an earlier test may end, too.
    wait_until(lambda: all(map(operator.le, resources(), before)), "threads and descriptors to end")


def test_only_one_is_open_in_the_main_thread_and_bad_arguments_are_refused(stop: StopSignal) -> None:
    in_a_thread = pytest.raises(RuntimeError, match="in the thread 'loader_0'.* main")
    with ThreadPoolExecutor(1, "loader") as threads, in_a_thread:
        threads.submit(StopSignal).result()
    with pytest.raises(RuntimeError, match="Another StopSignal is open"):
        StopSignal()
    stop.close()
    StopSignal().close()
    for argument, value in (("save_seconds", -1), ("margin", float("nan")), ("rank_timeout", 1e9)):
        with pytest.raises(ValueError, match=argument):
            StopSignal(**{argument: value})


def test_a_forked_child_does_not_stop_its_parent(stop: StopSignal) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)  # all processes of a job get it: it is ignored
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGUSR2)  # what the child wrote into the pipe would be read first
    wait_until(stop.should_stop, "the stop")
    assert stop.reason.startswith("SIGUSR2")


def work(started: Any) -> None:
    started.set()
    time.sleep(60)


def work_that_started_early(started: Any) -> None:
    """A worker that started before the StopSignal. The signal reaches a thread older than its worker_init_fn."""
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    shield_worker()
    signal.pthread_kill(thread.ident or 0, signal.SIGTERM)
    work(started)


def signal_child() -> None:
    """Right after a fork, but after the hook of the package, which was installed earlier."""
    if os.environ.get("TEST_SIGTERM_AFTER_FORK_OF") == str(os.getppid()):
        os.kill(os.getpid(), signal.SIGTERM)


os.register_at_fork(after_in_child=signal_child)


@pytest.mark.parametrize("starts_early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_only_its_rank_ends_a_worker(method: str, starts_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context(method)
    started = context.Event()
    with contextlib.ExitStack() as later:
        if starts_early:
            worker = context.Process(target=work_that_started_early, args=(started,), daemon=True)
        else:
            stop = later.enter_context(StopSignal())
            worker = context.Process(target=work, args=(started,), daemon=True)
            monkeypatch.setenv("TEST_SIGTERM_AFTER_FORK_OF", str(os.getpid()))
        worker.start()
        if starts_early:
            stop = later.enter_context(StopSignal())
        assert started.wait(60)
        for name in ("-USR1", "-USR2", "-TERM")[:2 if starts_early else 3]:  # from outside, as a scheduler does
            subprocess.run(["kill", name, str(worker.pid)], check=True)
        status = Path(f"/proc/{worker.pid}/status")
        wait_until(lambda: "ShdPnd:\t0000000000000000" in status.read_text(), "signals to be handled")
        assert worker.is_alive()
        wait_until(lambda: worker.terminate() or not worker.is_alive(), "the end")  # a rank repeats it as it exits
        assert worker.exitcode == 0 and not stop.requested


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_no_thread_of_a_worker_or_of_the_fork_server_handles_sigterm(method: str, stop: StopSignal) -> None:
    """From the start on: numpy and torch start threads while the worker imports the script."""
    context = multiprocessing.get_context(method)
    started = context.Event()
    before = children()
    worker = context.Process(target=work, args=(started,), daemon=True)
    worker.start()
    for pid in {worker.pid or 0, *children() - before}:
        subprocess.run(["kill", "-TERM", str(pid)], check=True)  # before it has imported this file
    assert started.wait(60)
    threads = [path.read_text() for path in Path(f"/proc/{worker.pid}/task").glob("*/status")]
    handles = [text for text in threads if not int(text.partition("SigBlk:\t")[2].split()[0], 16) >> 14 & 1]
    assert len(threads) > 1 and len(handles) <= 1, "only the thread that waits for SIGTERM"
    # Repeated: one SIGTERM is lost while that from outside is pending.
    wait_until(lambda: worker.terminate() or not worker.is_alive(), "the end")
    assert worker.exitcode == 0


FIRST_WORKER = """\
import multiprocessing, os, sys, time
from pathlib import Path
from utils.preemption import StopSignal
with StopSignal():
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    status = Path(f"/proc/{worker.pid}/status").read_text()
    parent = int(status.partition("PPid:")[2].split()[0])  # the fork server, or this process
    if parent != os.getpid():
        status += Path(f"/proc/{parent}/status").read_text()
    masks = [int(text.split()[0], 16) for text in status.split("SigBlk:")[1:]]
    assert all(mask >> 14 & 1 for mask in masks), masks
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_first_process_of_multiprocessing_is_shielded(method: str) -> None:
    """Its start would start the resource tracker, too, which unblocks SIGTERM."""
    done = subprocess.run([sys.executable, "-c", FIRST_WORKER, method], stderr=subprocess.PIPE, text=True, timeout=100,
                          cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_started_after_the_stop_signal_was_closed_is_not_shielded(method: str) -> None:
    """The fork server goes on from the time when a StopSignal was open."""
    context = multiprocessing.get_context(method)
    with StopSignal():
        context.Process(target=time.time).start()
    started = context.Event()
    child = context.Process(target=work, args=(started,), daemon=True)
    child.start()
    assert started.wait(60)
    subprocess.run(["kill", str(child.pid)], check=True)
    child.join(20)
    assert child.exitcode == -signal.SIGTERM


def children() -> set[int]:
    paths = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in paths for pid in path.read_text().split()}


def test_a_store_lost_before_a_stop_lets_the_run_go_on() -> None:
    communicator = Mock(rank=1, world_size=3)
    communicator.is_proposed.side_effect = RuntimeError("Connection reset by peer")
    one = StopAgreement(communicator, lambda: None, rank_timeout=0.05)
    with pytest.raises(RuntimeError) as lost:
        one.advance()
    one.fail(lost.value)
    one.request("a test")
    assert not one.pass_boundary()


@pytest.mark.parametrize(("requests", "error", "listens", "status", "saved"), [
    (True, SystemExit(EXIT_REQUEUE), True, 0, True),  # what is between launch.py and the rank sees no failure
    (True, OSError("disk full"), True, 1, False),
    (True, None, False, EXIT_REQUEUE, False),
    (False, None, True, 0, False)])
def test_leaving_a_stop_reports_that_all_have_saved(
        requests: bool, error: BaseException | None, listens: bool, status: int, saved: bool,
        monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as notices:
        monkeypatch.setenv(REPORT, notices.variables[REPORT] if listens else "127.0.0.1/1/secret")
        with contextlib.suppress(SystemExit, OSError), StopSignal() as stop:
            if requests:
                stop.request("a test")
                wait_until(stop.should_stop, "the stop")
                assert stop.exit_status == EXIT_REQUEUE  # launch.py does not know yet
            if error is not None:
                raise error
        assert stop.exit_status == status
        if listens:
            assert (notices.saved_at is not None) == saved


FAILED = ValueError("the scheduler does not respond")
STOP = "time limit in {} s, of which 100 s are kept for the save"


@pytest.mark.parametrize(("responses", "seconds", "results", "queries"), [
    ([1000, 700, 400, 100], [0, 100, 300, 600, 899, 900], [*[None] * 5, STOP.format(100)], 4),
    ([1000, 700, 400, 5000], [0, 300, 600, 900, 1000], [None] * 5, 4),
    ([1000], range(300), [None] * 300, 1),
    ([None], [0, 400, 800], [None] * 3, 3),
    ([FAILED, FAILED, 100], [0, 30, 31, 60], ["error", "error", None, STOP.format(100)], 3),
    ([1000, FAILED], [0, 900, 901], [None, "error", STOP.format(99)], 2)],
    ids=["in time", "extended", "rarely queried", "unknown", "query fails", "query fails at the end"])
def test_time_limit(responses: list[float | Exception | None], seconds: Iterable[int], results: list[str | None],
                    queries: int, caplog: pytest.LogCaptureFixture) -> None:
    """responses: of the scheduler, the last one for ever. seconds: of the checks, which have these results."""
    scheduler = Mock(side_effect=[*responses, *[responses[-1]] * queries])
    clock = Mock()
    limit = TimeLimit(scheduler, lambda: 100.0, clock=clock)

    def check(second: int) -> str | None:
        clock.return_value = second
        try:
            return limit.check()
        except ValueError:
            return "error"

    assert [check(second) for second in seconds] == results
    assert scheduler.call_count == queries
    assert caplog.text.count("does not report how much time is left") == (responses == [None])


@pytest.mark.parametrize(("options", "failures"), [
    ({"time_left": lambda: 1 / 0}, 1), ({"time_left": lambda: sys.exit("user's mistake")}, 1),
    ({"time_left": lambda: time.sleep(20)}, 0)], ids=["error", "exit", "hangs"])
def test_failing_and_hanging_sources_disturb_no_other(
        options: dict[str, Any], failures: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other one is a file that exists, and stops the run when it is touched."""
    path = tmp_path / "STOP"
    path.touch()
    began = time.monotonic()
    with StopSignal(poll_seconds=0.01, file=path, **options) as stop:
        wait_until(lambda: "failed with" in caplog.text or not failures, "the failure")
        time.sleep(0.1)  # for later failures, which are not reported
        assert "exists already" in caplog.text and not stop.should_stop()
        os.utime(path, (1, 1))
        wait_until(stop.should_stop, "the file")
    assert stop.reason.startswith(f"file {path}") and time.monotonic() - began < 10
    assert caplog.text.count("failed with") == failures
