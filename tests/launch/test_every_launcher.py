"""01_ddp_minimal.py trains to the same loss under every real launcher, wherever the ranks are."""
from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, killed_at_end
from tests.launch.launchers import LAYOUTS, MINIMAL, MPIS, RANK_PROGRAM, Lab

SHOW = [sys.executable, str(RANK_PROGRAM), "--torch"]


@pytest.mark.parametrize(("mpi", "layout"), [
    ("mpich5", "2x2"), ("mpich5", "2+1"), ("mpich4", "round robin"), ("mpich4", "remote"), ("intel", "2+1"),
    ("intel", "remote"), ("openmpi5", "2x2"), ("openmpi5", "round robin"), ("openmpi4", "2+1"), ("openmpi4", "remote")])
def test_same_loss_under_mpiexec_without_mpi4py(lab: Lab, mpi: str, layout: str) -> None:
    done = lab.mpi(mpi, layout, MINIMAL)
    assert done.status == 0, done.output
    slots = LAYOUTS[layout][0]
    assert f"{sum(slots.values())} ranks on {len(slots)} host" in done.output
    assert f"by {MPIS[mpi][1]}," in done.output
    assert done.line("final loss:") == lab.minimal_loss(sum(slots.values()))


@pytest.mark.parametrize("mpi", ["intel", "openmpi4"])
def test_same_loss_under_mpiexec_with_mpi4py_installed(lab: Lab, mpi: str) -> None:
    done = lab.mpi(mpi, "remote", MINIMAL, env=lab.mpi4py(mpi))
    assert done.status == 0, done.output
    assert done.line("final loss:") == lab.minimal_loss(4)


@pytest.mark.parametrize(("mpi", "when"), [
    ("mpich5", "before"), ("mpich5", "after"), ("mpich4", "after"), ("intel", "before"), ("openmpi5", "before"),
    ("openmpi5", "after"), ("openmpi4", "before"), ("openmpi4", "after")])
def test_mpi4py_may_be_imported_before_or_after(lab: Lab, mpi: str, when: str) -> None:
    done = lab.mpi(mpi, "2x2", [*SHOW, "--mpi4py", when], env=lab.mpi4py(mpi))
    assert done.status == 0, done.output
    for rank in range(4):
        assert f"rank {rank} of 4, MPI says rank {rank} of 4, sum 4" in done.output


@pytest.mark.parametrize("launcher, library", [("mpich5", "openmpi4"), ("openmpi5", "mpich5"),
                                               ("intel", "openmpi4")])
def test_mpi4py_of_another_mpi_does_no_harm(lab: Lab, launcher: str, library: str) -> None:
    done = lab.mpi(launcher, "2x2", MINIMAL, env=lab.mpi4py(library))
    assert done.status == 0, done.output
    assert done.line("final loss:") == lab.minimal_loss(4)


def test_torchrun_on_two_hosts(lab: Lab) -> None:
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "7",
               "--rdzv-endpoint", f"{lab.hosts.address['h1']}:29400"]
    second = lab.hosts.popen("h2", lab.torchrun("h2", MINIMAL, *options))
    with killed_at_end(second):
        done = lab.run("h1", lab.torchrun("h1", MINIMAL, *options))
        assert done.status == 0, done.output
        assert second.wait(30) == 0
    assert "4 ranks on 2 hosts by torchrun" in done.output
    assert done.line("final loss:") == lab.minimal_loss(4)


def test_torchrun_with_a_fixed_master_address(lab: Lab) -> None:
    """The static rendezvous: MASTER_ADDR and MASTER_PORT by hand, node ranks given."""
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "h1", "--master-port", "29411"]
    second = lab.hosts.popen("h2", lab.torchrun("h2", MINIMAL, *options, "--node-rank", "1"))
    with killed_at_end(second):
        done = lab.run("h1", lab.torchrun("h1", MINIMAL, *options, "--node-rank", "0"))
        assert done.status == 0, done.output
        assert second.wait(30) == 0
    assert done.line("final loss:") == lab.minimal_loss(4)


def test_ranks_set_by_hand_on_two_hosts(lab: Lab) -> None:
    def env(rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "29422"}
    second = lab.hosts.popen("h2", MINIMAL, env=env(1))
    with killed_at_end(second):
        done = lab.run("h1", MINIMAL, env=env(0))
        assert done.status == 0, done.output
        assert second.wait(30) == 0
    assert "2 ranks on 2 hosts by env" in done.output
    assert done.line("final loss:") == lab.minimal_loss(2)


@pytest.mark.parametrize("mpi", ["mpich5", "openmpi5", "intel"])
def test_torchrun_inside_mpiexec(lab: Lab, mpi: str) -> None:
    inner = lab.torchrun("h1", SHOW, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id",
                         mpi, "--rdzv-endpoint", f"{lab.hosts.address['h2']}:29433")
    command = lab.mpiexec(mpi, "2x2", {})
    command[-1] = "2"
    if mpi == "openmpi5":
        command[-2:-2] = ["--map-by", "ppr:1:node"]
    else:
        command[-2:-2] = ["-ppn", "1"]
    done = lab.run("h1", [*command, *inner])
    assert done.status == 0, done.output
    assert "4 ranks on 2 hosts by torchrun" in done.output
    assert sorted(line for line in done.output.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} of 4" for rank in range(4)]
    assert "was ignored: torchrun started this process" in done.output


@pytest.mark.parametrize("mpi", ["openmpi5", "intel"])
def test_mpiexec_inside_a_torchrun_worker(lab: Lab, mpi: str) -> None:
    inner = [*lab.mpiexec(mpi, "one host", {}), *SHOW]
    script = lab.hosts.folder / f"{mpi}.sh"
    script.write_text("#!/bin/sh\nexec \"$@\"\n")
    script.chmod(0o755)
    outer = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python",
             str(script)]
    done = lab.run("h1", [*outer, *inner])
    assert done.status == 0, done.output
    assert f"2 ranks on 1 host by {MPIS[mpi][1]}" in done.output
    assert "rank 0 of 2" in done.output and "rank 1 of 2" in done.output
    assert "of torchrun was ignored" in done.output


@pytest.mark.parametrize("mpi", ["mpich5", "openmpi4"])
def test_stale_variables_are_ignored_with_a_note(lab: Lab, mpi: str) -> None:
    stale = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "nowhere", "SLURM_PROCID": "0"}
    command = lab.mpiexec(mpi, "2x2", {})  # Open MPI hands them to the ranks of its own host only
    done = lab.run("h1", [*command, *SHOW], env=stale)
    assert done.status == 0, done.output
    assert sorted(line for line in done.output.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} of 4" for rank in range(4)]
    assert "RANK=7 WORLD_SIZE=8 LOCAL_RANK=3 was ignored" in done.output
    assert "MASTER_ADDR=nowhere" in done.output


# Intel's mpiexec itself does not start ranks where its own host name does not resolve.
@pytest.mark.parametrize("odd_lab, mpi", [("debian", "mpich5"), ("debian", "openmpi5"), ("debian", "intel"),
                                          ("none", "openmpi4"), ("none", "openmpi5"), ("none", "mpich4")],
                         indirect=["odd_lab"])
def test_host_names_that_lie(odd_lab: Lab, mpi: str) -> None:
    """A name that resolves to 127.0.1.1 on its own host, or nowhere: mpiexec itself is given addresses."""
    command = odd_lab.mpiexec(mpi, "2x2", {})
    addressed = [_addresses(odd_lab, word) for word in command]
    done = odd_lab.run("h1", [*addressed, *MINIMAL])
    assert done.status == 0, done.output
    assert "final loss:" in done.output


# gloo lets the lower of two addresses connect to the higher: 10.x is below 127.0.1.1, 192.168.x above.
@pytest.mark.parametrize("subnet", ["10.79.3", "192.168.77"])
def test_a_host_of_rank_0_whose_name_means_itself_on_itself(need: Callable[[str], Path], subnet: str) -> None:
    need("hosts")
    with Hosts(2, subnet=subnet, names="debian") as hosts, contextlib.ExitStack() as at_end:
        ranks = []
        for rank in range(4):
            env = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "h1", "MASTER_PORT": "29555"}
            process = hosts.popen(f"h{1 + rank // 2}", SHOW, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            ranks.append(at_end.enter_context(killed_at_end(process)))
        for rank, process in enumerate(ranks):
            done = Lab.wait(process)
            assert done.status == 0 and done.line("rank") == f"rank {rank} of 4", done.output


def _addresses(lab: Lab, word: str) -> str:
    """The word with addresses for host names; a host file is rewritten."""
    if word.startswith(str(lab.hosts.folder)) and Path(word).name.startswith("hosts "):
        Path(word).write_text(_addresses(lab, Path(word).read_text()))
        return word
    if word.startswith(("h1:", "h2:")):
        for host, address in lab.hosts.address.items():
            word = word.replace(f"{host}:", f"{address}:")
    return word
