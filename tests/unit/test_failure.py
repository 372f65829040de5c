"""How a rank ends: waiting for the others where NCCL needs it, and the report of a failure."""
from __future__ import annotations

import json
import re
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from tests.unit.programs import python
from utils.checkpoint import CheckpointError, load
from utils.launchers.torchrun import write_error_file
from utils.monitor.shutdown import Shutdown, peer_failure

HOST = socket.gethostname()


def two_ranks(backend: str) -> list[Shutdown]:
    store = HashStore()
    return [Shutdown(rank, 2, backend, PrefixStore("job", store), None) for rank in range(2)]


@pytest.mark.parametrize(("backend", "failure", "waits"), [
    ("nccl", None, True), ("nccl", ValueError("it fails"), True), ("gloo", None, False)])
def test_rank_with_a_gpu_waits_for_the_other(backend: str, failure: Exception | None, waits: bool) -> None:
    """The other one may still save, and the end of NCCL would wait for it without a limit."""
    zero, one = two_ranks(backend)
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(0.5 if waits else 20)
    assert closing.is_alive() == waits

    zero.exit(failure)
    closing.join(20)
    assert not closing.is_alive()


@pytest.mark.parametrize(("error", "description"), [
    (SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt"),
    (ValueError("a\nb"), "ValueError: a"), *((SystemExit(status), "") for status in (None, 0, 75))])
def test_failure_is_reported_once_and_an_orderly_exit_is_none(
        capsys: pytest.CaptureFixture[str], error: BaseException, description: str) -> None:
    one = two_ranks("gloo")[1]
    one.report(error)
    one.report(error)
    text = capsys.readouterr().err
    assert text.endswith(f"rank 1 on {HOST} failed: {description}\n" if description else "")
    assert len(re.findall("^(?!ddpkit-failure).*failed", text, re.MULTILINE)) == bool(description)
    assert "ddpkit-failure" not in text  # for programs, in a file that they name
    assert ("a\nb" in text) == isinstance(error, ValueError)  # a traceback, where it explains something


@pytest.mark.parametrize("failed", [0, 1])
def test_error_that_the_kit_raises_on_all_ranks_is_that_of_the_rank_that_it_names(
        capsys: pytest.CaptureFixture[str], failed: int) -> None:
    text = f"cannot load /run/step-1 on rank {failed} on {HOST}: the state does not match"
    with pytest.raises(CheckpointError) as raised:
        exec(compile("raise CheckpointError(text)", load.__file__, "exec"), vars(load) | {"text": text})
    two_ranks("gloo")[1].report(raised.value)
    output = capsys.readouterr().err
    expected = f"rank {failed} on {HOST} failed: CheckpointError: {text}\n"
    assert output.endswith(expected) == (failed == 1)  # else that rank prints it
    assert ("Traceback" in output) == (failed == 1)


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(("error", "kind"), [
    (RuntimeError(GLOO + "Connection closed by peer [10.0.0.2]:57993"), "lost"),
    (RuntimeError(GLOO + "Timed out waiting 4000ms for recv operation to complete"), "timeout"),
    (RuntimeError("Rank 1 failed to pass monitoredBarrier in 2000 ms"), "timeout"),
    (dist.DistBackendError("Watchdog caught collective operation timeout"), "timeout"),
    (dist.DistNetworkError("Broken pipe"), "lost"),
    (RuntimeError("connection timeout to database"), ""),
    (RuntimeError("the proxy: Connection closed by peer"), ""),
    (ConnectionResetError("Connection reset by peer"), "")])
def test_errors_of_torch_because_of_another_rank(error: BaseException, kind: str) -> None:
    assert peer_failure(error) == kind


def test_torchrun_takes_the_rank_that_failed_first_for_the_root_cause(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares the times in the error files, and the time of a killed rank, which has no file."""
    times = []
    for is_root_cause in (True, False):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
        write_error_file("rank 1 on n2 failed", is_root_cause=is_root_cause)
        message = json.loads((tmp_path / "error").read_text())["message"]
        assert message["message"] == message["extraInfo"]["py_callstack"] == "rank 1 on n2 failed"
        times.append(int(message["extraInfo"]["timestamp"]))
    assert times[1] - times[0] >= 60


def test_start_that_hangs_is_ended_with_its_location() -> None:
    done = python("-c", "import time\nfrom utils.monitor.shutdown import start_up_time_out\n"
                  "with start_up_time_out(1, 2, 0.1):\n    time.sleep(60)")
    assert done.returncode == 1
    assert "[rank 1/2 " in done.stderr and "line 4, in <module>" in done.stderr


HELD = """
import hashlib, sys, threading, time
from pathlib import Path
from utils import setup_distributed

def work():  # as a thread of gloo
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
    running.set()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        if sys.argv[1] == "busy":
            hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 100_000)  # without Python's lock
        else:
            time.sleep(0.005)  # as a thread that waits for Python's lock
    ended.set()

running, ended = threading.Event(), threading.Event()
with setup_distributed("gloo"):
    threading.Thread(target=work).start()
    running.wait()
print("waited", ended.is_set())
"""


@pytest.mark.parametrize("state", ["busy", "locked"])
def test_end_waits_for_threads_of_gloo(state: str) -> None:
    """They may still hold tensors of the last collective, which would abort the process."""
    done = python("-c", HELD, state)
    assert done.returncode == 0 and "waited True" in done.stdout, done.stderr
