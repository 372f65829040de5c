"""The arguments of setup_distributed(), its line about NCCL's network, and a mean on the device of a rank."""
from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.unit.programs import python
from tests.unit.test_rendezvous import port as port
from utils.distributed import Distributed, setup_distributed
from utils.host import device
from utils.startup.address import Rendezvous


@pytest.mark.parametrize(("argument", "values", "expected"), [
    ("backend", ["mpi", "NCCL", ""], "None or one of gloo, nccl, xccl"),
    ("bind", ["none", True, None], "'auto' or False"),
    ("timeout", [0, -1, float("nan"), 1e9], "seconds above 0"),
    ("collective_timeout", [0, -1, float("nan"), 1e9], "seconds above 0"),
    ("hang_timeout", [0, -1, float("nan"), 1e9], "seconds above 0")])
def test_bad_argument_is_a_value_error(argument: str, values: list[object], expected: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{argument} is .*; expected {expected}"):
            setup_distributed(**{argument: value})


def test_second_initialisation_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="initialised already"):
        setup_distributed()


@pytest.mark.parametrize(("version", "starts"), [
    ("2.7.1+cu126", False), ("1.13.1", False), ("2.8.0a0+34c6371d24.nv25.08", True), ("2.15.0", True)])
def test_torch_that_is_too_old_is_named(version: str, starts: bool) -> None:
    done = python("-c", f"import torch; torch.__version__ = {version!r}\nfrom utils import setup_distributed\n"
                  "setup_distributed('gloo').close()")
    expected = "" if starts else (
        f"LaunchError: torch {version} is too old; expected 2.8 or newer. Install one, for example with pip install "
        "'torch>=2.8', or load a newer PyTorch module\n")
    assert (done.stderr, done.returncode) == (expected, not starts)


def test_cpu_tensor_is_reduced_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor) -> None:
        raise ArithmeticError(f"reduced on {tensor.device}")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    job = SimpleNamespace(device=torch.device("meta"), world_size=2)  # meta stands for a GPU
    with pytest.raises(ArithmeticError, match="^reduced on meta$"):
        Distributed.all_reduce_mean(job, torch.ones(2))


def test_network_of_nccl_is_printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A function that writes a log stands for NCCL, and two hosts are assigned."""
    def connect(*args: object, **options: object) -> None:
        with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
            log.write("n1:7:9 [0] NCCL INFO Using network Socket\n")

    for name, result in (("choose_backend", "nccl"), ("visible_devices", []), ("device_nodes", []),
                         ("device_at", torch.device("cpu"))):
        monkeypatch.setattr(device, name, lambda *args, result=result: result)
    met = Rendezvous("127.0.0.1", 0, {"node_rank": 0, "num_nodes": 2, "local_rank": 0, "local_world_size": 1,
                                      "device_index": 0, "cpus": "", "threads": 1}, "127.0.0.1", "127.0.0.1")
    monkeypatch.setattr("utils.distributed.rendezvous", lambda *args: (met, dist.HashStore()))
    monkeypatch.setattr(dist, "init_process_group", connect)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored afterwards
    for variable, value in (("OMP_NUM_THREADS", "1"), ("DDPKIT_NETWORK", "AWS Libfabric")):
        monkeypatch.setenv(variable, value)
    setup_distributed().close()
    assert "WARNING: NCCL uses TCP sockets over an unknown interface, although AWS Lib" in capfd.readouterr().err
    assert not [variable for variable in os.environ if variable.startswith("NCCL_DEBUG")]


HELLO = """
import time
import torch.distributed as dist
from utils import setup_distributed

connect = dist.init_process_group
def slow(*args, **options):  # as where a rank connects later than the others: it needs rank 0's store for that
    connect(*args, **options)
    if options["rank"] == 1:
        time.sleep(3)
        options["store"].add("connected", 1)
dist.init_process_group = slow
print("hello from rank", setup_distributed("gloo").rank)
"""


def test_rank_that_leaves_at_once_is_no_error_of_another_that_still_connects(port: int) -> None:
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda rank: python("-c", HELLO, env={**ranks, "RANK": str(rank)}), range(2)))
    for rank, one in enumerate(done):
        assert one.returncode == 0 and f"hello from rank {rank}" in one.stdout, one.stderr
