"""StopSignal in one process: what requests a stop, what happens to the signals, how a run ends."""
from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from utils.launch_report import VARIABLE, ReportListener
from utils.preemption import EXIT_REQUEUE, SIGNALS, StopSignal, shield_worker
from utils.preemption.agreement import StopAgreement

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as stop:
        yield stop


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


# Requests ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", SIGNALS)
def test_signals_stop_the_run_at_the_next_boundary(number: signal.Signals, stop: StopSignal) -> None:
    assert not any(stop.should_stop() for _ in range(1000))
    assert (stop.requested, stop.stopped, stop.exit_status) == (False, False, 0)
    for _ in range(50):
        os.kill(os.getpid(), number)
    assert stop.should_stop() and stop.should_stop()
    assert (stop.requested, stop.stopped, stop.exit_status) == (True, True, EXIT_REQUEUE)
    assert stop.reason.startswith(f"{number.name}, rank 0 on ")


def test_a_signal_is_seen_during_a_long_call_into_c(stop: StopSignal, tmp_path: Path) -> None:
    """The main thread runs no handler until system() returns, which it does on `seen` alone."""
    seen = tmp_path / "seen"
    watcher = threading.Thread(target=lambda: until(lambda: stop.requested) and seen.touch())
    watcher.start()
    command = f"kill -USR1 $PPID; for i in $(seq 1000); do [ -e {seen} ] && exit; sleep 0.02; done; exit 1"
    assert ctypes.CDLL(None).system(command.encode()) == 0
    watcher.join()
    assert stop.should_stop()


def test_any_thread_may_request_a_stop(stop: StopSignal) -> None:
    thread = threading.Thread(target=stop.request, args=("the loss is not a number",))
    thread.start()
    thread.join()
    assert stop.should_stop()
    assert stop.reason.startswith("the loss is not a number, rank 0 on ")


def test_time_limit_file_and_command_stop_the_run(tmp_path: Path) -> None:
    file = tmp_path / "STOP"
    command = ["test", "-e", str(file)]
    for options, reason, touch in (
            ({"time_left": lambda: 100.0, "save_seconds": 200}, "time limit in", False),
            ({"file": file}, f"file {file}", True),
            ({"command": command}, "command test", True)):
        file.unlink(missing_ok=True)
        with StopSignal(poll_seconds=0.01, **options) as stop:  # type: ignore[arg-type]
            if touch:
                assert not stop.should_stop()
                file.touch()
            assert until(stop.should_stop)
            assert stop.reason.startswith(reason)


def test_the_reserve_is_save_margin_and_longest_step_without_saves(stop: StopSignal) -> None:
    assert stop.reserve_seconds == 60 + 30
    start = time.monotonic()
    stop.should_stop()
    time.sleep(0.02)
    with stop.saving():
        time.sleep(0.1)
    stop.should_stop()
    whole_step = time.monotonic() - start
    for _ in range(10):
        stop.should_stop()
    longest_step = stop.reserve_seconds - stop.save_seconds - stop.margin
    assert 0.02 <= longest_step <= whole_step - stop.save_seconds


def test_save_seconds_is_the_longest_measured_save(stop: StopSignal) -> None:
    measured = []
    for seconds in (0.02, 0.1, 0.0):
        with stop.saving():
            time.sleep(seconds)
        measured.append(stop.save_seconds)
    assert 60 > measured[1] == measured[2] >= 0.1 and measured[1] > measured[0] >= 0.02
    with pytest.raises(OSError), stop.saving():
        time.sleep(2 * measured[1])
        raise OSError("disk full")
    assert stop.save_seconds == measured[1]


# Handlers -----------------------------------------------------------------------------------------

def test_a_previous_handler_is_called_and_restored() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    handler = signal.getsignal(signal.SIGUSR2)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.should_stop()
            assert called == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is handler
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_previous_wakeup_descriptor_still_receives_signals() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.should_stop()
            assert os.read(read_end, 10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(write_end) == write_end
    finally:
        signal.set_wakeup_fd(before)
        os.close(read_end)
        os.close(write_end)


def test_nothing_is_left_behind() -> None:
    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = resources()
    for _ in range(20):
        with StopSignal():
            pass
    assert until(lambda: resources() == before)


def test_only_the_main_thread_may_make_one() -> None:
    errors: list[str] = []

    def make() -> None:
        try:
            StopSignal()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make, name="loader")
    thread.start()
    thread.join()
    assert len(errors) == 1 and "in the thread 'loader'" in errors[0] and "main" in errors[0]


def test_a_second_one_is_refused_until_the_first_is_closed(stop: StopSignal) -> None:
    with pytest.raises(RuntimeError, match="Another StopSignal is open"):
        StopSignal()
    stop.close()
    with StopSignal():
        pass


@pytest.mark.parametrize(("argument", "value"), [
    ("save_seconds", -1), ("margin", float("nan")), ("rank_timeout", 1e9), ("command", "a b")])
def test_bad_arguments_are_refused(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=argument):
        StopSignal(**{argument: value})  # type: ignore[arg-type]


# Child processes ----------------------------------------------------------------------------------

def test_a_forked_child_ends_by_sigterm_and_does_not_stop_its_parent(stop: StopSignal) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)  # all processes of a job get it: it is ignored
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGUSR2)  # what the child wrote into the pipe would be read first
    assert until(stop.should_stop)
    assert stop.reason.startswith("SIGUSR2")


def test_a_forked_worker_is_shielded_before_its_init_function(stop: StopSignal) -> None:
    context = multiprocessing.get_context("fork")
    signalled = context.Event()

    def work() -> None:
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        while signal.sigpending():  # a second SIGTERM would be merged with a pending one
            time.sleep(0.001)
        signalled.set()
        time.sleep(60)

    worker = context.Process(target=work, daemon=True)
    worker.start()
    assert signalled.wait(20)
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0 and not stop.requested


def test_sigterm_right_after_the_fork_of_a_worker_does_not_end_it(stop: StopSignal) -> None:
    parent = os.getpid()

    def signal_the_worker() -> None:
        if workers and os.getppid() == parent:
            os.kill(os.getpid(), signal.SIGTERM)

    workers = ["signalled"]  # emptied: the hook cannot be removed
    os.register_at_fork(after_in_child=signal_the_worker)  # after the hook of the package
    try:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.1,))
        worker.start()
        worker.join(20)
    finally:
        workers.clear()
    assert worker.exitcode == 0 and not stop.requested


def test_dataloader_workers_outlive_the_signals_of_the_job(stop: StopSignal) -> None:
    from torch.utils.data import DataLoader

    samples: Any = range(10**6)
    batches = iter(DataLoader(samples, num_workers=2, worker_init_fn=shield_worker))
    next(batches), next(batches)
    workers = multiprocessing.active_children()
    pids = [str(worker.pid) for worker in workers]
    for name in ("-USR1", "-USR2", "-TERM"):
        subprocess.run(["kill", name, *pids], check=True)  # from outside, as a scheduler does
    for _ in range(50):
        next(batches)
    for worker in workers:
        assert worker.is_alive()
        worker.terminate()
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0]


# Several ranks, without a store -------------------------------------------------------------------

class Communicator:
    """Rank 1 of 3. Rank 2 does not report, or the store is lost at a call."""

    rank, world_size = 1, 3

    def __init__(self, lost_at: str = "") -> None:
        self._lost_at = lost_at
        self._cancelled = threading.Event()

    def _call(self, name: str) -> None:
        if name == self._lost_at:
            raise RuntimeError("Connection reset by peer")

    def is_proposed(self, topic: str) -> bool:
        self._call("is_proposed")
        return False

    def propose(self, topic: str, value: str) -> str:
        return value

    def report(self, topic: str, report: object, check: object) -> None:
        pass

    def receive(self, topic: str) -> int:
        self._call("receive")
        self._cancelled.wait(20)
        raise RuntimeError("cancelled")

    def missing(self, topic: str) -> list[int]:
        return [2]

    def cancel(self) -> None:
        self._cancelled.set()


def agreement(communicator: Communicator) -> StopAgreement:
    return StopAgreement(communicator, lambda: None, rank_timeout=0.05)  # type: ignore[arg-type]


def test_a_rank_that_does_not_report_is_named() -> None:
    one = agreement(Communicator())
    one.request("a test")
    thread = threading.Thread(target=one.advance)
    thread.start()
    assert until(lambda: bool(one.reason))
    with pytest.raises(RuntimeError, match="1 of 3 ranks did not report within 0.05 s: 2. Expected"):
        while not one.pass_boundary():
            pass
    one.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_store_lost_before_a_stop_lets_the_run_go_on() -> None:
    one = agreement(Communicator(lost_at="is_proposed"))
    with pytest.raises(RuntimeError) as lost:
        one.advance()
    one.fail(lost.value)
    one.request("a test")
    assert not one.pass_boundary()


def test_a_store_lost_during_the_agreement_is_an_error() -> None:
    one = agreement(Communicator(lost_at="receive"))
    one.request("a test")
    with pytest.raises(RuntimeError) as lost:
        one.advance()
    one.fail(lost.value)
    with pytest.raises(RuntimeError, match=r"\(a test, rank 1 on .* is no longer reachable.*message of rank 0"):
        one.pass_boundary()


# The end ------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
from utils.preemption import StopSignal
assert "torch" not in sys.modules
stop = StopSignal()
if sys.argv[1] == "stop":
    os.kill(os.getpid(), signal.SIGTERM)
stop.should_stop()
sys.exit(stop.exit_status)  # without close()
"""


@pytest.mark.parametrize(("what", "status"), [("stop", 75), ("finish", 0)])
def test_the_exit_status_says_whether_to_continue(what: str, status: int) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, what], cwd=ROOT, capture_output=True,
                           text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (status, "")


@pytest.mark.parametrize(("error", "listens", "status", "saved"), [
    (None, True, 0, True),  # what is between launch.py and the rank sees no failure
    (SystemExit(EXIT_REQUEUE), True, 0, True),
    (OSError("disk full"), True, 1, False),
    (None, False, EXIT_REQUEUE, False)])
def test_leaving_a_stop_reports_that_all_have_saved(
        error: BaseException | None, listens: bool, status: int, saved: bool,
        monkeypatch: pytest.MonkeyPatch) -> None:
    with ReportListener() as listener:
        monkeypatch.setenv(VARIABLE, listener.variables[VARIABLE])
        if not listens:
            listener.listener.close()
        with contextlib.suppress(SystemExit, OSError), StopSignal() as stop:
            stop.request("a test")
            assert until(stop.should_stop)
            assert stop.exit_status == EXIT_REQUEUE  # launch.py does not know yet
            if error is not None:
                raise error
        assert stop.exit_status == status
        assert not listens or listener.saved() == saved


def test_a_run_that_was_not_stopped_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ReportListener() as listener:
        monkeypatch.setenv(VARIABLE, listener.variables[VARIABLE])
        with StopSignal() as stop:
            assert not stop.should_stop()
        assert (stop.exit_status, listener.saved()) == (0, False)
