"""utils/preemption.py in one process: what asks for a stop, what happens to the signals, how a run ends."""
from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch.utils.data import DataLoader

from utils import held_signals, stop_sources
from utils.preemption import EXIT_REQUEUE, SIGNALS, StopSignal, requeue, shield_worker


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)  # so that caplog hears it


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as stop:
        yield stop


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


# Signals -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_the_run_at_the_next_boundary_and_not_before(number: signal.Signals, stop: StopSignal) -> None:
    assert not any(stop.should_stop() for _ in range(1000))
    assert (stop.requested, stop.stopped, stop.exit_status) == (False, False, 0)
    os.kill(os.getpid(), number)
    assert stop.should_stop() and stop.should_stop()
    assert (stop.requested, stop.stopped, stop.exit_status) == (True, True, EXIT_REQUEUE)
    assert stop.reason.startswith(f"{number.name}, rank 0 on ")


def test_a_signal_is_seen_while_the_main_thread_runs_no_python(stop: StopSignal) -> None:
    """A step of a minute inside of one call of C: the ranks have agreed by its end."""
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    seen: list[float] = []
    watcher = threading.Thread(target=lambda: until(lambda: stop.requested) and seen.append(time.monotonic()))
    watcher.start()
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2_000_000)  # a second without the interpreter's lock
    end = time.monotonic()
    watcher.join()
    assert seen[0] < end - 0.05
    assert stop.should_stop()


def test_many_signals_are_one_stop(stop: StopSignal) -> None:
    for _ in range(50):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.should_stop()


def test_a_handler_that_was_there_is_called_too_and_put_back() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    mine = signal.getsignal(signal.SIGUSR2)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.should_stop()
            assert called == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is mine
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_another_reader_of_the_wakeup_descriptor_still_hears() -> None:
    ears, mouth = os.pipe()
    for end in (ears, mouth):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(mouth)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.should_stop()
            heard: list[bytes] = []

            def hears() -> bool:
                try:
                    heard.append(os.read(ears, 10))
                except BlockingIOError:
                    pass
                return bool(heard)

            assert until(hears) and heard[0] == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(mouth) == mouth
    finally:
        signal.set_wakeup_fd(before)
        os.close(ears)
        os.close(mouth)


def test_nothing_is_left_behind() -> None:
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(20):
        with StopSignal():
            pass
    assert until(lambda: (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before)


def test_it_is_refused_outside_of_the_main_thread() -> None:
    errors: list[BaseException] = []

    def make() -> None:
        try:
            StopSignal()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=make, name="loader")
    thread.start()
    thread.join()
    assert len(errors) == 1 and "in the thread 'loader'" in str(errors[0]) and "main" in str(errors[0])


def test_a_second_one_is_refused_until_the_first_is_closed(stop: StopSignal) -> None:
    with pytest.raises(RuntimeError, match="Another StopSignal is open"):
        StopSignal()
    stop.close()
    with StopSignal():
        pass


@pytest.mark.parametrize(("argument", "value"), [("save_seconds", -1), ("margin", float("nan")), ("command", "a b")])
def test_nonsense_is_refused(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=argument):
        StopSignal(**{argument: value})  # type: ignore[arg-type]


# Children ------------------------------------------------------------------------------------------------------------

def test_a_forked_child_does_not_stop_its_parent_and_dies_of_sigterm_as_usual(stop: StopSignal) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)  # the job's signal reaches its children too: it is ignored
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(0.05)
    assert not stop.should_stop()


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10**9)


class AtFork:
    """Something to be done in each child at its fork, while it is set: hooks cannot be taken away again."""

    do: Callable[[], None] | None = None

    @classmethod
    def run(cls) -> None:
        if cls.do is not None:
            cls.do()


os.register_at_fork(after_in_child=AtFork.run)


def test_a_worker_outlives_a_signal_that_comes_before_its_init_function(
        stop: StopSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtFork, "do", lambda: os.kill(os.getpid(), signal.SIGTERM))
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=lambda: None, daemon=True)
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0
    monkeypatch.setattr(AtFork, "do", None)
    begun = context.Event()
    sleeper = context.Process(target=lambda: (begun.set(), time.sleep(60)), daemon=True)
    sleeper.start()
    assert begun.wait(20)
    sleeper.terminate()
    sleeper.join(20)
    assert sleeper.exitcode == 0 and not stop.requested


def test_shielded_workers_outlive_the_signals_of_the_job_and_end_with_their_rank(stop: StopSignal) -> None:
    loader = DataLoader(Endless(), num_workers=2, worker_init_fn=shield_worker)
    batches = iter(loader)
    next(batches), next(batches)
    workers = batches._workers  # type: ignore[attr-defined]
    pids = [str(worker.pid) for worker in workers]
    for name in ("-USR1", "-USR2", "-TERM"):
        subprocess.run(["kill", name, *pids], check=True)  # from outside, as a scheduler does
    for _ in range(50):
        next(batches)
    assert all(worker.is_alive() for worker in workers)
    for worker in workers:
        worker.terminate()
        worker.join(5)
    assert [worker.exitcode for worker in workers] == [0, 0]


# What rank 0 looks at ------------------------------------------------------------------------------------------------

def test_the_time_limit_stops_the_run_early_enough_for_a_save() -> None:
    with StopSignal(time_left=lambda: 1000.0, save_seconds=600, margin=399.5) as stop:
        assert not stop.should_stop()
        assert until(stop.should_stop)
        assert "time limit in 999 s" in stop.reason


def test_a_limit_far_away_stops_nothing() -> None:
    with StopSignal(time_left=lambda: 1000.0, save_seconds=100, margin=100) as stop:
        assert not until(stop.should_stop, 1.2)


def test_a_limit_that_was_extended_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_sources, "_FRESH_SECONDS", 0.1)
    answers = [50.0, 5000.0]
    with StopSignal(time_left=lambda: answers.pop(0) if len(answers) > 1 else answers[0], save_seconds=40,
                    margin=9.8, poll_seconds=0.05) as stop:
        assert not until(stop.should_stop, 1.0)
        assert answers == [5000.0]


def test_a_scheduler_that_does_not_answer_is_told_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with StopSignal(time_left=lambda: None) as stop:
        assert until(lambda: "does not say how much time is left" in caplog.text)
        assert not stop.should_stop()


def test_the_longest_step_is_kept_free_too_but_not_the_saves_within_it(stop: StopSignal) -> None:
    stop.should_stop()
    time.sleep(0.1)
    with stop.saving():
        time.sleep(0.4)
    stop.should_stop()
    for _ in range(10):
        stop.should_stop()
    assert 0.1 <= stop._longest_step < 0.4
    assert stop._reserve() == pytest.approx(stop.save_seconds + 30 + stop._longest_step)


def test_a_measured_save_replaces_the_guess_and_a_longer_one_that(stop: StopSignal) -> None:
    assert stop.save_seconds == 60
    for seconds in (0.05, 0.15, 0.01):
        with stop.saving():
            time.sleep(seconds)
    assert 0.15 <= stop.save_seconds < 1
    with pytest.raises(OSError), stop.saving():
        time.sleep(0.3)
        raise OSError("disk full")
    assert stop.save_seconds < 0.3


def test_a_file_stops_the_run(tmp_path: Path) -> None:
    with StopSignal(file=tmp_path / "STOP", poll_seconds=0.05) as stop:
        assert not until(stop.should_stop, 0.3)
        (tmp_path / "STOP").touch()
        assert until(stop.should_stop)
        assert str(tmp_path / "STOP") in stop.reason


def test_a_file_of_an_earlier_run_has_to_be_touched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "STOP"
    path.touch()
    with StopSignal(file=path, poll_seconds=0.05) as stop:
        assert "is there already" in caplog.text
        assert not until(stop.should_stop, 0.3)
        os.utime(path, (1, 1))
        assert until(stop.should_stop)


def test_a_command_stops_the_run_when_it_succeeds(tmp_path: Path) -> None:
    with StopSignal(command=["test", "-e", str(tmp_path / "x")], poll_seconds=0.05) as stop:
        assert not until(stop.should_stop, 0.3)
        (tmp_path / "x").touch()
        assert until(stop.should_stop)
        assert stop.reason.startswith("command test,")


def test_a_command_that_does_not_exist_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with StopSignal(command=["/no/such/command"], poll_seconds=0.02) as stop:
        assert until(lambda: "not tried again" in caplog.text)
        assert not until(stop.should_stop, 0.2)
        assert caplog.text.count("not tried again") == 1


def fails() -> float:
    raise ZeroDivisionError("user's mistake")


def exits() -> float:
    sys.exit("user's mistake")


def hangs() -> float:
    threading.Event().wait()
    return 0.0


@pytest.mark.parametrize("time_left", [fails, exits, hangs, lambda: float("nan"), lambda: "12:00"])
def test_a_time_left_that_fails_or_hangs_keeps_nothing_from_being_watched(
        time_left: Callable[[], float], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StopSignal(time_left=time_left, file=tmp_path / "stop", poll_seconds=0.05) as stop:
        if time_left is not hangs:
            assert until(lambda: "'time limit' failed with" in caplog.text)
        assert not until(stop.should_stop, 0.2)
        (tmp_path / "stop").touch()
        assert until(stop.should_stop)
    assert caplog.text.count("failed with") == (time_left is not hangs)


def test_a_time_left_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_sources, "_FRESH_SECONDS", 0.1)
    answers: list[Callable[[], float]] = [fails, fails, lambda: 10.0]
    with StopSignal(time_left=lambda: answers.pop(0)(), save_seconds=60, poll_seconds=0.05) as stop:
        assert until(stop.should_stop)
        assert "time limit in 10 s" in stop.reason


def test_a_file_system_that_fails_for_a_while_stops_nothing_and_is_reported(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stop"
    path.touch()
    failing = threading.Event()
    failing.set()

    stat_before = os.stat

    def stat_of(name: Any, **options: Any) -> os.stat_result:
        if name == path and failing.is_set():
            raise OSError(116, "Stale file handle")
        return stat_before(name, **options)

    monkeypatch.setattr(stop_sources.os, "stat", stat_of)
    with StopSignal(file=path, poll_seconds=0.02) as stop:
        assert until(lambda: "Stale file handle" in caplog.text)
        failing.clear()  # the file is there already, and was not touched
        assert not until(stop.should_stop, 0.3)
        failing.set()
        assert not until(stop.should_stop, 0.2)
        failing.clear()
        assert not until(stop.should_stop, 0.2)
        os.utime(path, (1, 1))
        assert until(stop.should_stop)


def test_a_command_that_hangs_delays_no_other_source(tmp_path: Path) -> None:
    with StopSignal(command=["sleep", "20"], file=tmp_path / "stop", poll_seconds=0.05) as stop:
        assert not until(stop.should_stop, 0.3)
        (tmp_path / "stop").touch()
        assert until(stop.should_stop)


def test_any_thread_may_ask_for_a_stop(stop: StopSignal) -> None:
    thread = threading.Thread(target=stop.request, args=("the loss is not a number",))
    thread.start()
    thread.join()
    assert stop.should_stop()
    assert stop.reason.startswith("the loss is not a number, rank 0 on ")


# The store -----------------------------------------------------------------------------------------------------------

def test_without_the_store_of_rank_0_the_run_goes_on_and_says_that_it_cannot_be_stopped(
        caplog: pytest.LogCaptureFixture) -> None:
    told, tell = os.pipe()
    server = os.fork()
    if server == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(tell, str(store.port).encode())
        signal.pause()
    client = torch.distributed.TCPStore("127.0.0.1", int(os.read(told, 10)), wait_for_workers=False)
    rank_1 = SimpleNamespace(rank=1, world_size=2, _store=client)
    with StopSignal(rank_1) as stop:  # type: ignore[arg-type]
        assert not stop.should_stop()
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        assert until(lambda: "can no longer be agreed on" in caplog.text)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not stop.should_stop()
    os.close(told)
    os.close(tell)


# The end -------------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from utils.preemption import StopSignal
stop = StopSignal()
if sys.argv[2] == "stop":
    os.kill(os.getpid(), signal.SIGTERM)
stop.should_stop()
sys.exit(stop.exit_status)  # without close()
"""


@pytest.mark.parametrize(("what", "status"), [("stop", 75), ("finish", 0)])
def test_the_exit_status_tells_the_job_script_whether_to_go_on(what: str, status: int) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(root), what], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, "")


def test_the_module_needs_no_torch() -> None:
    root = Path(__file__).resolve().parents[2]
    check = "import sys, utils.preemption; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=root, check=True, timeout=60)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A scontrol that writes down its arguments and does what is given; returns the file of arguments."""
    def make(action: str) -> Path:
        program, log = tmp_path / "scontrol", tmp_path / "arguments"
        program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{action}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return log
    return make


SLURM = {"SLURM_JOB_ID": "21", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2",
         "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}


def test_a_slurm_job_is_put_back_into_the_queue(scontrol: Callable[[str], Path]) -> None:
    log = scontrol("exit 0")
    assert requeue(SLURM)
    assert log.read_text() == "show job 21\nrequeue 21\n"


def test_slurm_may_end_the_job_before_its_command_has_ended(scontrol: Callable[[str], Path]) -> None:
    log = scontrol("kill -TERM $$; exit 0")
    assert requeue(SLURM)
    assert log.read_text() == "show job 21\nrequeue 21\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_of_an_array_the_element_alone_is_put_back(scontrol: Callable[[str], Path]) -> None:
    """Of the last element SLURM_JOB_ID is the id of the whole array."""
    log = scontrol("exit 0")
    assert requeue({**SLURM, "SLURM_ARRAY_JOB_ID": "21", "SLURM_ARRAY_TASK_ID": "3"})
    assert log.read_text() == "show job 21_3\nrequeue 21_3\n"


# What scontrol shows half a second after the command, to a job that has caught its SIGTERM.
ENDINGS = {"scancel": "Reason=None Restarts=0 PreemptTime=None", "scontrol requeue": "Reason=None Restarts=1",
           "time limit": "Reason=TimeLimit Restarts=0 PreemptTime=None",
           "preempted, to be cancelled": "Reason=None Restarts=0 PreemptTime=2026-11-21T14:16:05"}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_job_that_was_cancelled_stays_so(how: str, scontrol: Callable[[str], Path]) -> None:
    log = scontrol(f"[ $1 = show ] && echo 'JobId=21 JobState=COMPLETING {ENDINGS[how]}'; exit 0")
    assert requeue(SLURM) == (how != "scancel")
    assert ("requeue" in log.read_text()) == (how not in ("scancel", "scontrol requeue"))


def test_a_refusal_of_slurm_is_told_with_its_words(scontrol: Callable[[str], Path],
                                                   caplog: pytest.LogCaptureFixture) -> None:
    scontrol("echo 'Requested operation is presently disabled for job 21' >&2; exit 1")
    assert not requeue(SLURM)
    assert "presently disabled" in caplog.text and "go" in caplog.text


def test_a_job_that_was_restarted_too_often_is_not_put_back(scontrol: Callable[[str], Path],
                                                            caplog: pytest.LogCaptureFixture) -> None:
    log = scontrol("exit 0")
    assert not requeue({**SLURM, "SLURM_RESTART_COUNT": "5"}, limit=5)
    assert "restarted 5 times" in caplog.text and not log.exists()


@pytest.mark.parametrize("environ", [{}, {"PBS_JOBID": "12.server"}])
def test_outside_of_slurm_the_chain_goes_on_by_itself(environ: dict[str, str], scontrol: Callable[[str], Path]) -> None:
    log = scontrol("exit 0")
    assert not requeue(environ)
    assert not log.exists()


# Signals that come early ---------------------------------------------------------------------------------------------

EARLY = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import utils
os.kill(os.getpid(), signal.SIGUSR1)  # while torch is imported
from utils.preemption import StopSignal
stop = StopSignal()
sys.exit(stop.exit_status if stop.should_stop() else 1)
"""


def test_a_signal_that_comes_while_torch_is_imported_stops_the_run_at_its_first_boundary() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", EARLY, str(root)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.parametrize(("handler", "expected"), [
    ("signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))", 3),
    ("import faulthandler; faulthandler.register(signal.SIGUSR1, chain=True)", -signal.SIGUSR1)])
def test_the_import_leaves_handlers_of_others_alone(handler: str, expected: int) -> None:
    root = Path(__file__).resolve().parents[2]
    program = (f"import os, signal, sys\n{handler}\nsys.path.insert(0, sys.argv[1])\nimport utils\n"
               "os.kill(os.getpid(), signal.SIGUSR1)")
    done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, timeout=60)
    assert done.returncode == expected, done.stderr


def test_a_program_that_a_rank_starts_gets_the_signals_as_ever() -> None:
    program = "import subprocess, sys, utils; print(subprocess.run(['sh', '-c', 'kill -USR1 $$']).returncode)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{-signal.SIGUSR1}\n", done.stderr


def test_a_signal_between_two_stop_signals_is_for_the_second(stop: StopSignal) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.should_stop()
    stop.close()
    with StopSignal() as second:
        assert not second.should_stop()  # the first one's signal was taken by it
    os.kill(os.getpid(), signal.SIGUSR1)
    with StopSignal() as third:
        assert third.should_stop()


BLOCKED = """
import os, signal, sys
from utils import held_signals
held_signals.block()
if held_signals.handles_stops(["python", sys.argv[1]]):
    os.environ[held_signals.VARIABLE] = "1"
os.kill(os.getpid(), signal.SIGUSR1)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_signal_blocked_by_the_starter_is_pending_until_the_program_takes_it(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = tmp_path / "train.py"
    script.write_text(EARLY.replace("os.kill(os.getpid(), signal.SIGUSR1)", ""))
    done = subprocess.run([sys.executable, "-c", BLOCKED, str(script), str(root)], cwd=root, capture_output=True,
                          text=True, timeout=60)
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.parametrize("options", [[], ["--torchrun"]])
def test_a_signal_that_comes_before_the_package_is_imported_is_honoured_under_launch_py(
        options: list[str], tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)  # while torch is imported\n" + EARLY)
    done = subprocess.run([sys.executable, "scripts/launch.py", *options, "-n", "1", str(script), str(root)], cwd=root,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 75, done.stderr


def test_a_stop_signal_unblocks_its_signals_where_a_wrapper_drops_the_environment(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = tmp_path / "train.py"
    script.write_text(EARLY.replace("os.kill(os.getpid(), signal.SIGUSR1)", ""))
    without = BLOCKED.replace("os.execv(", 'os.environ.pop(held_signals.VARIABLE)\nos.execv(')
    done = subprocess.run([sys.executable, "-c", without, str(script), str(root)], cwd=root, capture_output=True,
                          text=True, timeout=60)
    assert (done.returncode, done.stderr) == (75, "")


def test_modules_and_scripts_that_import_the_package_are_recognised(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("from utils import setup_distributed\n")
    (tmp_path / "mine" / "__main__.py").write_text("from utils.preemption import StopSignal\n")
    (tmp_path / "other.py").write_text("import signal\n")
    monkeypatch.chdir(tmp_path)
    torchrun = ["python", "-m", "torch.distributed.run", "--nnodes=2"]
    for words in (["python", "-u", "mine/train.py"], ["python", "-m", "mine.train"], ["python", "-m", "mine"],
                  [*torchrun, "mine/train.py"], [*torchrun, "-m", "mine.train"]):
        assert held_signals.handles_stops(words), words
    for words in (["python", "other.py"], ["python", "-m", "other"], torchrun, ["sh", "-c", "true"]):
        assert not held_signals.handles_stops(words), words


def test_the_package_is_recognised_by_its_files_and_not_by_names_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "held_signals.py").touch()
    script = tmp_path / "train.py"
    for line, expected in (("from kit import setup_distributed", True), ("import kit.preemption", True),
                           ("from .kit import setup_distributed", True), ("def setup_distributed(): ...", False),
                           ("from lib.utils import setup_distributed", False), ("# like StopSignal", False),
                           ("from 'here' on", False)):
        script.write_text(f"import os\n{line}\n")
        assert held_signals.handles_stops(["python", str(script)]) is expected, line
    script.write_text("from utils import setup_distributed\n")
    assert held_signals.handles_stops(["python", str(script)])
    (tmp_path / "utils.py").touch()
    assert not held_signals.handles_stops(["python", str(script)])


def test_a_program_without_a_stop_signal_gets_the_signals_as_ever_under_launch_py(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = tmp_path / "train.py"
    script.write_text("import os, signal\ndef setup_distributed(): ...  # its own\n"
                      "signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\nos.kill(os.getpid(), signal.SIGUSR1)\n")
    done = subprocess.run([sys.executable, "scripts/launch.py", "-n", "1", str(script)], cwd=root, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 7, done.stderr
