"""The arguments of setup_distributed(), its line about NCCL's network, and a mean on the device of a rank."""
from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.unit.programs import LAUNCH, ROOT, python
from utils.distributed import Distributed, setup_distributed
from utils.errors import LaunchError
from utils.host import device
from utils.startup.address import Rendezvous


@pytest.mark.parametrize(("argument", "values", "expected"), [
    ("backend", ["mpi", "NCCL", ""], "None or one of gloo, nccl, xccl"),
    ("bind", ["none", True, None], "'auto' or False"),
    ("timeout", [0, -1, float("nan"), 1e9], "seconds above 0"),
    ("collective_timeout", [0, -1, float("nan"), 1e9], "seconds above 0"),
    ("hang_timeout", [-1, float("nan"), 1e9, "soon"], "seconds, 'auto', or 0 for none")])
def test_bad_argument_is_a_value_error(argument: str, values: list[object], expected: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{argument} is .*; expected {expected}"):
            setup_distributed(**{argument: value})


def test_torch_that_is_too_old_and_a_second_initialisation_are_named(
        one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as initialized, pytest.raises(RuntimeError, match="Leave init_process_group.. out"):
        initialized.setattr(dist, "is_initialized", lambda: True)
        initialized.setattr("utils.distributed._jobs", 0)
        setup_distributed()
    with setup_distributed("gloo"), pytest.raises(RuntimeError, match="that job is open.* call its close.. first"):
        setup_distributed()
    for version in ("2.7.1+cu126", "1.13.1"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(LaunchError) as error:
            setup_distributed("gloo")
        assert str(error.value) == (f"torch {version} is too old; expected 2.8 or newer. Install one, for example with "
                                    "pip install 'torch>=2.8', or load a newer PyTorch module")
    for version in ("2.8.0a0+34c6371d24.nv25.08", "2.15.0"):
        monkeypatch.setattr(torch, "__version__", version)
        setup_distributed("gloo").close()


def test_cpu_tensor_is_reduced_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor) -> None:
        raise ArithmeticError(f"reduced on {tensor.device}")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    job = SimpleNamespace(device=torch.device("meta"), world_size=2)  # meta stands for a GPU
    with pytest.raises(ArithmeticError, match="^reduced on meta$"):
        Distributed.all_reduce_mean(job, torch.ones(2))


def test_network_of_nccl_is_printed(one_rank: None, monkeypatch: pytest.MonkeyPatch,
                                    capfd: pytest.CaptureFixture[str]) -> None:
    """A function that writes a log stands for NCCL, and two hosts are assigned."""
    def connect(*args: object, **options: object) -> None:
        with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
            log.write("n1:7:9 [0] NCCL INFO Using network Socket\n")

    for name, result in (("choose_backend", "nccl"), ("visible_devices", []), ("device_nodes", []),
                         ("device_at", torch.device("cpu"))):
        monkeypatch.setattr(device, name, lambda *args, result=result: result)
    met = Rendezvous({"node_rank": 0, "num_nodes": 2, "local_rank": 0, "local_world_size": 1,
                      "device_index": 0, "cpus": "", "threads": 1})
    monkeypatch.setattr("utils.distributed.find_rank_0", lambda *args: met)
    monkeypatch.setattr(dist, "init_process_group", connect)
    monkeypatch.setenv("DDPKIT_NETWORK", "AWS Libfabric")
    setup_distributed().close()
    assert "WARNING: NCCL uses TCP sockets over an unknown interface, although AWS Lib" in capfd.readouterr().err
    assert not [variable for variable in os.environ if variable.startswith("NCCL_DEBUG")]


HELLO = """
import sys, time
import torch.distributed as dist
from utils import setup_distributed

connect = dist.init_process_group
def slow(*args, **options):  # as where a rank connects later than the others: it needs rank 0's store for that
    connect(*args, **options)
    if options["rank"] == 1:
        time.sleep(3)
        options["store"].add("connected", 1)
dist.init_process_group = slow
sys.stdout.write(f"hello from rank {setup_distributed('gloo').rank}\\n")  # at once: the other rank prints, too
"""


def test_rank_that_leaves_at_once_is_no_error_of_another_that_still_connects() -> None:
    done = python("-c", HELLO, ranks=2, warm=True)
    assert done.returncode == 0 and all(f"hello from rank {rank}" in done.stdout for rank in range(2)), done.stderr


SWEEP = """
import os, sys, threading, torch
from torch.nn.parallel import DistributedDataParallel as DDP
from utils import setup_distributed

models = []  # of all starts: each holds the store of its start
for start in range(3):
    with setup_distributed("gloo") as job:
        models.append(DDP(torch.nn.Linear(2, 2)))
        models[-1](torch.ones(1, 2)).sum().backward()
        assert os.environ["MASTER_PORT"] == str(job.master_port)
        is_fast = sum(job.start_times) < 5 or not start
    others = [thread.name for thread in threading.enumerate()[1:]]  # they could abort the process when Python ends
    sys.stdout.write(f"start {start} of rank {job.rank} {is_fast} {others}\\n")
"""


def test_job_after_job_in_one_process() -> None:
    """As a search for parameters does: Hydra's --multirun, Optuna, cells of a notebook."""
    done = python("-c", SWEEP, ranks=2, warm=True)
    expected = [f"start {start} of rank {rank} True []" for start in range(3) for rank in range(2)]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("start ")) == expected, done.stderr


BELOW = """
import os, shlex, subprocess, sys
del os.environ["OMP_NUM_THREADS"]  # of the tests
from utils import setup_distributed
job = setup_distributed("gloo")
assert os.environ["OMP_NUM_THREADS"]
os.environ.update(changed for changed in [("OMP_NUM_THREADS", sys.argv[1])] if sys.argv[1])
subprocess.run([*shlex.split(sys.argv[2]), "2", "sh", "-c", "echo threads $OMP_NUM_THREADS"], check=True)
"""


@pytest.mark.parametrize("by_user", ["", "7"])
def test_number_of_threads_that_the_kit_has_set_is_not_the_users(by_user: str) -> None:
    """In a notebook with a job of one rank, a cell starts others."""
    done = python("-c", BELOW, by_user, shlex.join(LAUNCH), warm=True)
    share = by_user or str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert re.findall("^threads (.*)", done.stdout, re.MULTILINE) == [share] * 2, done.stdout + done.stderr


def test_first_line_says_what_whoever_reaches_the_port_can_do() -> None:
    done = python("-c", "from utils import setup_distributed as start; start('gloo').close()", ranks=2, warm=True)
    assert re.search(r"rank 0 at 127.0.0.1:\d+ \(whoever can connect there can run code as you\)\n", done.stdout), done


EFFECTS = """
import atexit, faulthandler, os, sys, threading
from utils import setup_distributed
import torch.distributed as dist
loaded = atexit._ncallbacks()
with setup_distributed("gloo", check_training=False) as job:
    dist.barrier()
    found = {"variables": "GROUP_RANK" in os.environ, "faulthandler": faulthandler.is_enabled(),
             "monitor": any(thread.name == "rank monitor" for thread in threading.enumerate()),
             "excepthook": sys.excepthook.__module__.startswith("utils."), "atexit": atexit._ncallbacks() > loaded}
    if job.rank == 0:
        print("effects:", *sorted(name for name, is_there in found.items() if is_there))
"""


@pytest.mark.parametrize("unwanted", ["", "variables", "monitor", "excepthook", "atexit", "monitor, faulthandler"])
def test_each_effect_can_be_switched_off(unwanted: str) -> None:
    """launch.py sets all variables of a rank but this one for its own program."""
    env = {"PYTHONFAULTHANDLER": "", "DDPKIT_WITHOUT": unwanted}
    done = python("-c", f"import os; os.environ.pop('GROUP_RANK'){EFFECTS}", ranks=2, env=env, warm=True)
    assert done.returncode == 0, done.stderr
    expected = {"atexit", "excepthook", "faulthandler", "monitor", "variables"} - set(unwanted.split(", "))
    expected -= {"faulthandler"} if "monitor" in unwanted else set()
    line = next(line for line in done.stdout.splitlines() if line.startswith("effects:"))
    assert line.split()[1:] == sorted(expected)


def test_unknown_effects_and_hangs_without_the_monitor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPKIT_WITHOUT", "monitor,hooks")
    with pytest.raises(LaunchError, match="DDPKIT_WITHOUT is monitor,hooks; expected some of .*Leave out hooks"):
        setup_distributed("gloo")
    monkeypatch.setenv("DDPKIT_WITHOUT", "monitor")
    with pytest.raises(LaunchError, match="hang_timeout is set, but DDPKIT_WITHOUT names the monitor"):
        setup_distributed("gloo", hang_timeout=9)


IF_IS_MAIN = """
from utils import setup_distributed
with setup_distributed("gloo", collective_timeout=40) as job:  # explained 4 s before torch ends it
    job.all_reduce_mean(1.0)
    if job.is_main:
        job.barrier()
    job.all_reduce_mean(2.0)
"""


def test_a_hang_is_explained_by_default_before_torch_ends_it(tmp_path: Path) -> None:
    done = python("-c", IF_IS_MAIN, ranks=2, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path, warm=True)
    assert done.returncode == 1 and re.search(
        r"rank 0 on .* entered a different collective 2: barrier at .*; rank 1 on .* all_reduce .*\. One of these is a "
        "collective that only some ranks call", done.stderr), done.stderr
    assert "The ranks hang: no progress for 3" in done.stderr and [*tmp_path.glob("hang-*/positions.json")]


SUSPENDED = """
import os, subprocess, time
from utils import setup_distributed
with setup_distributed("gloo", hang_timeout=1) as job:
    job.store.set(f"pid{job.rank}", str(os.getpid()))
    if job.is_main:  # longer than any limit of the kit: 3.3 times hang_timeout, and 5 s
        pids = " ".join(job.store.get(f"pid{rank}").decode() for rank in range(2))
        stop = f"sleep 1; kill -STOP {pids}; sleep 9; kill -CONT {pids}"
        subprocess.Popen(["sh", "-c", stop])
    start = time.monotonic()
    while job.all_reduce_mean(time.monotonic() - start) < 11:
        time.sleep(0.01)
    print("trained on")
"""


def test_ranks_go_on_when_their_job_was_suspended_for_longer_than_hang_timeout(tmp_path: Path) -> None:
    done = python("-c", SUSPENDED, ranks=2, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, warm=True)
    assert done.returncode == 0 and done.stdout.count("trained on") == 2, done.stderr
    assert "hang" not in done.stderr and "Timeout" not in done.stderr


def test_a_wrong_hang_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPKIT_HANG_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="DDPKIT_HANG_TIMEOUT is 'soon'; expected seconds, 'auto', or 0 for none"):
        setup_distributed()
