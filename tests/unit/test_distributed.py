"""How a rank leaves utils/distributed.py, without a launch: what the end of NCCL asks for, which no CPU has."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from utils import distributed
from utils.distributed import Distributed


@pytest.fixture
def ranks() -> Callable[[str], list[Distributed]]:
    """Two ranks of one job, as far as their store goes."""
    def make(backend: str) -> list[Distributed]:
        store = HashStore()
        return [Distributed(rank, 2, rank, 2, 0, 1, "env", backend, torch.device("cpu"), "127.0.0.1", 1,
                            PrefixStore("job", store)) for rank in range(2)]
    return make


def leaving(job: Distributed) -> threading.Thread:
    thread = threading.Thread(target=job.close, daemon=True)
    thread.start()
    thread.join(0.5)
    return thread


def test_a_rank_with_a_gpu_waits_for_one_that_still_saves(ranks: Callable[[str], list[Distributed]]) -> None:
    zero, one = ranks("nccl")
    thread = leaving(one)
    assert thread.is_alive()
    zero.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_rank_with_a_gpu_does_not_wait_after_a_failure(ranks: Callable[[str], list[Distributed]]) -> None:
    zero, one = ranks("nccl")
    thread = leaving(one)
    with pytest.raises(ValueError), zero:
        raise ValueError("it fails")
    thread.join(5)
    assert not thread.is_alive()


def test_a_rank_without_one_waits_for_nobody(ranks: Callable[[str], list[Distributed]]) -> None:
    assert not leaving(ranks("gloo")[1]).is_alive()


def test_a_tensor_of_the_cpu_is_reduced_on_the_device(ranks: Callable[[str], list[Distributed]],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        """The collective was asked for; nothing comes back from the meta device."""

    def all_reduce(tensor: torch.Tensor) -> None:
        raise Reached(str(tensor.device))

    job = ranks("nccl")[0]
    job.device = torch.device("meta")  # stands for a GPU
    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    with pytest.raises(Reached, match="^meta$"):
        job.all_reduce_mean(torch.ones(2))


@pytest.mark.parametrize("message", ["DataLoader timed out after 5 seconds", "the licence server: timeout"])
def test_a_timeout_of_a_lone_process_keeps_its_traceback(message: str) -> None:
    root = Path(__file__).resolve().parents[2]
    program = f"from utils import setup_distributed\nwith setup_distributed():\n    raise RuntimeError({message!r})"
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environ, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert f"rank 0 on {socket.gethostname()} failed: RuntimeError: {message}" in done.stderr


_TWO_RANKS = """
import sys, torch.distributed as dist
from utils import setup_distributed
with setup_distributed("gloo", timeout=60, collective_timeout=20) as job:
    dist.barrier()
    if job.rank == 1:
        raise RuntimeError(sys.argv[1])
    dist.barrier()
"""


@pytest.mark.parametrize("message", ["connection timeout to database", "the proxy: Connection closed"])
def test_an_own_error_about_a_connection_is_no_failed_collective(message: str) -> None:
    root = Path(__file__).resolve().parents[2]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = []
    for rank in "01":
        environ = {**os.environ, "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen([sys.executable, "-c", _TWO_RANKS, message], cwd=root, env=environ,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    zero, one = [process.communicate(timeout=100)[1] for process in started]
    failure = f"rank 1 on {socket.gethostname()} failed: RuntimeError: {message}"
    assert "Traceback" in one
    assert one.rstrip().endswith(failure)
    assert f"stops, because {failure}" in zero
    assert "Traceback" not in zero
