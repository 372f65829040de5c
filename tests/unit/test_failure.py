"""How a rank ends: waiting for the others where NCCL needs it, and the report of a failure."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from utils.failure import Shutdown, peer_failure

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()
Make = Callable[[str], list[Shutdown]]


@pytest.fixture
def ranks() -> Make:
    """Make the ends of two ranks with one store."""
    def make(backend: str) -> list[Shutdown]:
        store = HashStore()
        return [Shutdown(rank, 2, backend, PrefixStore("job", store), None) for rank in range(2)]
    return make


def closing(rank: Shutdown) -> threading.Thread:
    thread = threading.Thread(target=rank.close, daemon=True)
    thread.start()
    thread.join(0.5)
    return thread


def test_rank_with_a_gpu_waits_for_one_that_saves(ranks: Make) -> None:
    zero, one = ranks("nccl")
    thread = closing(one)
    assert thread.is_alive()
    zero.close()
    thread.join(5)
    assert not thread.is_alive()


def test_rank_with_a_gpu_does_not_wait_after_a_failure(ranks: Make) -> None:
    zero, one = ranks("nccl")
    thread = closing(one)
    zero.exit(ValueError("it fails"))
    thread.join(5)
    assert not thread.is_alive()


def test_rank_without_a_gpu_waits_for_nobody(ranks: Make) -> None:
    assert not closing(ranks("gloo")[1]).is_alive()


@pytest.mark.parametrize(("error", "description"), [
    (SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt:"),
    (ValueError("a\nb"), "ValueError: a")])
def test_failure_is_reported_once(capsys: pytest.CaptureFixture[str], ranks: Make,
                                  error: BaseException, description: str) -> None:
    one = ranks("gloo")[1]
    one.report(error)
    one.report(error)
    text = capsys.readouterr().err
    assert text.endswith(f"rank 1 on {HOST} failed: {description}\n")
    assert text.count("failed") == 1 and ("a\nb" in text) == isinstance(error, ValueError)


@pytest.mark.parametrize("status", [None, 0, 75])
def test_orderly_exit_is_no_failure(capsys: pytest.CaptureFixture[str], ranks: Make,
                                    status: int | None) -> None:
    ranks("gloo")[1].report(SystemExit(status))
    assert capsys.readouterr().err == ""


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(("error", "kind"), [
    (RuntimeError(GLOO + "Connection closed by peer [10.0.0.2]:57993"), "lost"),
    (RuntimeError(GLOO + "Read error [10.0.0.2]:5: Connection reset by peer"), "lost"),
    (RuntimeError(GLOO + "Timed out waiting 4000ms for recv operation to complete"), "timeout"),
    (RuntimeError("Rank 1 failed to pass monitoredBarrier in 2000 ms"), "timeout"),
    (dist.DistBackendError("Watchdog caught collective operation timeout"), "timeout"),
    (dist.DistNetworkError("Broken pipe"), "lost"),
    (RuntimeError("connection timeout to database"), ""),
    (RuntimeError("the proxy: Connection closed by peer"), ""),
    (RuntimeError("DataLoader timed out after 5 seconds"), ""),
    (ConnectionResetError("Connection reset by peer"), "")])
def test_errors_of_torch_because_of_another_rank(error: BaseException, kind: str) -> None:
    assert peer_failure(error) == kind


def test_start_that_hangs_is_ended_with_its_location() -> None:
    program = ("import time\nfrom utils.failure import start_up_time_out\n"
               "with start_up_time_out(1, 2, 0.1):\n    time.sleep(60)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                          timeout=50)
    assert done.returncode == 1
    assert "[rank 1/2 " in done.stderr and 'line 4, in <module>' in done.stderr


TWO_RANKS = """
import sys, torch.distributed as dist
from utils import setup_distributed
with setup_distributed("gloo", timeout=60, collective_timeout=20) as job:
    dist.barrier()
    if job.rank == 1:
        raise RuntimeError("connection timeout to database")
    dist.barrier()
"""


def test_user_error_about_a_connection_is_no_failed_collective() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in "01":
        environ = {**os.environ, "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank,
                   "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([sys.executable, "-c", TWO_RANKS], cwd=ROOT, env=environ,
                                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                          text=True))
    zero, one = [process.communicate(timeout=100)[1] for process in processes]
    failure = f"rank 1 on {HOST} failed: RuntimeError: connection timeout to database"
    assert "Traceback" in one and one.rstrip().endswith(failure)
    assert f"stops, because {failure}" in zero and "Traceback" not in zero
