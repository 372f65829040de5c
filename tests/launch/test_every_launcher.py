"""Every real launcher, wherever its ranks are: they meet, and train to the same loss."""
from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.launch.launchers import MEET, MPIS, SHOW, STARTED, TORCHRUN, TRAIN, Lab, Result, assert_met, final_loss
from tests.matrix import with_all
from utils.host.cores import read_topology
from utils.ranges import parse_ranges

LIBRARIES = [sys.executable, str(Path(__file__).with_name("libraries.py"))]
ON_TWO_HOSTS = "h1 h1 h2 h2"


def assert_trained(done: Result, hosts: int, launcher: str) -> None:
    assert done.status == 0, done.output
    assert f"3 ranks on {hosts} hosts, {STARTED[launcher]}," in done.output, done.output
    assert done.line("network: TCP over ").endswith(" (gloo)")
    assert re.fullmatch(r"started in [\d.]+ s: imports [\d.]+, exchange [\d.]+, process group [\d.]+ "
                        r"\(slowest: h[123]\)", done.line("started in ")), done.output
    assert done.line("final loss:") == final_loss()
    # Every host has the CPUs of this machine. Its ranks divide them if there are two cores for each of them.
    shared = [parse_ranges(text) for text in done.line("  CPUs of rank").split(": ")[1].split(":")]
    topology, allowed = read_topology(), os.sched_getaffinity(0)
    assert topology is not None and set().union(*shared) == allowed
    cores = sum(not allowed.isdisjoint(core.cpus) for core in topology.cores)
    divided = 2 * len(shared) <= cores or launcher == "intel-mpi"  # Intel's mpiexec divides them itself
    assert sum(map(len, shared)) == len(allowed) if divided else all(cpus == allowed for cpus in shared)


@pytest.mark.parametrize(("mpi", "hosts"), [
    ("mpich5", "h1 h1 h2"), ("openmpi5", "h1 h2 h1"), *with_all(("intel", "h2 h2 h3"))])
def test_same_loss_under_mpiexec(lab: Lab, mpi: str, hosts: str) -> None:
    env = lab.mpi4py(mpi) if mpi == "openmpi5" else None  # by which rank 0 broadcasts its address
    assert_trained(lab.mpi(mpi, hosts, TRAIN, env=env), 2, MPIS[mpi][1])


def test_same_loss_with_ranks_set_by_hand(lab: Lab) -> None:
    done = lab.together([(f"h{rank + 1}", TRAIN, {
        "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "h1", "MASTER_PORT": "29422"}) for rank in range(3)])
    assert_trained(done, 3, "env")


@pytest.mark.parametrize(("mpi", "hosts", "when"), [
    ("mpich5", "h1 h1 h2", "after"), ("openmpi5", ON_TWO_HOSTS, "before"), *with_all(
        ("mpich4", "h2 h2 h3", "before"), ("intel", ON_TWO_HOSTS, "before"), ("openmpi4", "h1 h2 h1 h2", "after"))])
def test_mpi4py_may_be_imported_before_or_after(lab: Lab, mpi: str, hosts: str, when: str) -> None:
    done = lab.mpi(mpi, hosts, [*MEET, "--mpi4py", when], env=lab.mpi4py(mpi))
    assert_met(done, hosts, MPIS[mpi][1])
    size = len(hosts.split())
    for rank in range(size):
        assert f"MPI says rank {rank} of {size}, sum {size}" in done.line(f"rank {rank} of")


@pytest.mark.parametrize(("mpi", "library"), [("openmpi4", "mpich5"), *with_all(("mpich5", "openmpi4"))])
def test_stale_variables_and_mpi4py_of_another_mpi_do_no_harm(lab: Lab, mpi: str, library: str) -> None:
    stale = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "nowhere", "SLURM_PROCID": "0"}
    node_file = lab.hosts.folder / "nodes"
    node_file.write_text("h1\nh2\n")
    job = {"PBS_NODEFILE": str(node_file)}
    command = lab.mpiexec(mpi, ON_TWO_HOSTS, job)  # Open MPI hands the others to the ranks of its own host only
    done = lab.run("h1", [*command, *MEET], env={**stale, **job, **lab.mpi4py(library)})
    assert_met(done, ON_TWO_HOSTS, MPIS[mpi][1])
    assert "RANK=7 WORLD_SIZE=8 LOCAL_RANK=3 was ignored" in done.output
    assert "MASTER_ADDR=nowhere" in done.output


@pytest.mark.parametrize("mpi", ["openmpi5", *with_all("openmpi4")])
def test_open_mpi_on_several_hosts_outside_a_job_needs_an_address(lab: Lab, mpi: str) -> None:
    """Without mpi4py there. On one host, nothing has to be exported."""
    assert_met(lab.run("h1", [*lab.mpiexec(mpi, "h1 h1"), *MEET]), "h1 h1", "openmpi")
    done = lab.run("h1", [*lab.mpiexec(mpi, "h1 h2"), *MEET])
    assert done.status != 0 and re.search(
        "rank 0's address is unknown .*mpi4py cannot be imported.*Export MASTER_ADDR=.* MASTER_PORT=.*to all ranks "
        r"\(mpiexec -x MASTER_ADDR -x MASTER_PORT\), or install mpi4py", done.output), done.output


# Intel's mpiexec itself does not start ranks where its own host name does not resolve.
@pytest.mark.parametrize(("odd_lab", "mpi"), [
    ("debian", "openmpi5"), ("none", "mpich4"), *with_all(
        ("debian", "mpich5"), ("debian", "intel"), ("none", "openmpi4"), ("none", "openmpi5"))], indirect=["odd_lab"])
def test_host_names_that_lie(odd_lab: Lab, mpi: str) -> None:
    """A name that resolves to 127.0.1.1 on its own host, or nowhere: mpiexec itself is given addresses."""
    assert_met(odd_lab.mpi(mpi, ON_TWO_HOSTS, MEET), ON_TWO_HOSTS, MPIS[mpi][1])


# gloo lets the lower of two addresses connect to the higher: 10.x is below 127.0.1.1, 192.168.x above.
@pytest.mark.parametrize("subnet", ["10.79.3", *with_all("192.168.77")])
def test_a_host_of_rank_0_whose_name_means_itself_on_itself(need: Callable[[str], Path], subnet: str) -> None:
    need("hosts")
    with Hosts(2, subnet=subnet, names="debian") as hosts:
        done = Lab(hosts, Path(), need).together([(host, SHOW, {
            "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": str(2 - rank // 2),
            "MASTER_ADDR": "h1", "MASTER_PORT": "29555"}) for rank, host in enumerate(("h1", "h1", "h2"))])
    assert done.status == 0, done.output
    assert [done.line(f"rank {rank}") for rank in range(3)] == [f"rank {rank} of 3" for rank in range(3)]


def test_rank_0_is_found_by_its_name_on_the_fabric(need: Callable[[str], Path]) -> None:
    """h1 is an address that the other host does not reach, as across the cells of JUWELS; h1i is the right one."""
    need("hosts")
    with Hosts(2, subnet="10.79.4") as hosts:
        names = [f"198.51.100.{i} {host}\n{hosts.address[host]} {host}i\n" for i, host in enumerate(hosts.hosts, 1)]
        for host in hosts.hosts:
            (hosts.folder / f"hosts.{host}").write_text("127.0.0.1 localhost\n" + "".join(names))
        done = Lab(hosts, Path(), need).together([(host, MEET, {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "FAULT_TIMEOUT": "20",
            "MASTER_ADDR": "h1", "MASTER_PORT": "29556", "DDPKIT_HOST_SUFFIX": "i"})
            for rank, host in enumerate(hosts.hosts)])
    assert_met(done, "h1 h2", "env")


@pytest.mark.parametrize("launcher", ["torchrun", *with_all("openmpi5")])
def test_libraries_see_the_launch_and_programs_of_a_rank_do_not(lab: Lab, launcher: str) -> None:
    if launcher == "torchrun":
        done = lab.run("h1", [*TORCHRUN, "--standalone", "--nproc-per-node=2", *LIBRARIES[1:]], seconds=250)
    else:
        done = lab.mpi(launcher, "h1 h2", LIBRARIES, seconds=250)
    assert done.status == 0, done.output
    for rank in range(2):  # by env://
        assert done.line(f"public rank {rank} of 2, ").endswith(f", node {0 if launcher == 'torchrun' else rank}")
    assert done.line("programs of rank 0: ").endswith(": single 0 of 1, torchrun 0 of 2, torchrun 1 of 2, spawned")
    assert done.line("programs of rank 1: ").endswith(": single 0 of 1")
