"""Whatever goes wrong at the start or in the loop ends every rank, soon, with a non-zero status and the cause."""
from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.cluster.hosts import killed_at_end
from tests.launch.launchers import RANK_PROGRAM, ROOT, Lab, Result

FAULTY = [sys.executable, str(RANK_PROGRAM), "--torch"]
TIMEOUT = 8.0  # seconds that the ranks are given to start
LATE = 8.0  # seconds that a busy machine may add to a limit
START = 40.0  # more that interpreters and launchers may need on a busy machine


def by_hand(ranks: int, fault: str, *, env: dict[str, str] | None = None,
            per_rank: dict[int, dict[str, str]] | None = None, timeout: float = TIMEOUT,
            absent: int | None = None) -> list[Result]:
    """Start the ranks as processes of this host, without a launcher that could end the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    for rank in range(ranks):
        if rank == absent:
            continue
        variables = {"PATH": "/usr/bin:/bin", "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(port), "FAULT": fault, "FAULT_TIMEOUT": str(timeout),
                     **(env or {}), **(per_rank or {}).get(rank, {})}
        processes.append(subprocess.Popen(FAULTY, env=variables, text=True, start_new_session=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        return [Lab.wait(process, timeout * 1.1 + 1 + START) for process in processes]
    finally:
        for process in processes:
            process.kill()


def seconds_to_give_up(result: Result) -> float:
    found = re.search(r"gave up after ([0-9.]+) s", result.output)
    assert found, result.output
    return float(found[1])


def all_report(results: list[Result], *words: str) -> None:
    for result in results:
        assert result.status != 0, result.output
        for word in words:
            assert word in result.output, result.output


def test_a_rank_that_never_starts_is_named_on_all_others() -> None:
    results = by_hand(4, "none", absent=2)
    all_report(results, "1 of 4 ranks did not join: rank 2")
    assert all(seconds_to_give_up(result) <= TIMEOUT + LATE for result in results)


def test_rank_0_that_never_starts_is_named_on_all_others() -> None:
    results = by_hand(3, "none", absent=0)
    all_report(results, "did not find rank 0", "127.0.0.1 port", "Connection refused")
    assert all(seconds_to_give_up(result) <= TIMEOUT + LATE for result in results)


def test_a_rank_that_dies_while_starting_ends_the_others_at_once() -> None:
    dead, *others = sorted(by_hand(3, "kill-during:1"), key=lambda result: result.status)
    assert dead.status == -9
    all_report(others, "rank 1 on")
    assert all(re.search("ended while the ranks were starting|died while torch was connecting", other.output)
               for other in others)


def test_a_rank_that_dies_after_the_exchange_ends_the_others() -> None:
    dead, *others = sorted(by_hand(3, "kill-after-exchange:2"), key=lambda result: result.status)
    assert dead.status == -9
    all_report(others, "rank 2 on", "died while torch was connecting the ranks")


def test_an_unresolvable_master_addr_is_named() -> None:
    results = by_hand(2, "none", env={"MASTER_ADDR": "no-such-host.invalid"}, timeout=4)
    all_report(results[1:], "no-such-host.invalid: the name does not resolve")
    all_report(results[:1], "1 of 2 ranks did not join: rank 1")


def test_an_unreachable_master_addr_is_named(lab: Lab) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.79.1.77", "MASTER_PORT": "29500", "FAULT": "none",
           "FAULT_TIMEOUT": "5"}
    done = lab.run("h1", FAULTY, env=env)
    assert done.status == 1
    assert "10.79.1.77 port 29500" in done.output
    assert seconds_to_give_up(done) <= 9


def test_a_master_port_that_another_program_holds_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        results = by_hand(2, "none", env={"MASTER_PORT": port}, timeout=6)
    all_report(results[:1], f"MASTER_PORT={port}", "Address already in use")
    all_report(results[1:], "another program runs there")


def test_a_port_of_a_program_that_responds_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        def respond() -> None:
            while True:
                try:
                    peer, _ = other.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        threading.Thread(target=respond, daemon=True).start()
        port = str(other.getsockname()[1])
        results = by_hand(2, "none", env={"MASTER_PORT": port}, timeout=5)
        other.shutdown(socket.SHUT_RDWR)
    all_report(results[:1], f"MASTER_PORT={port}")
    all_report(results[1:], "another program runs there")


def test_a_wrong_gloo_interface_is_named_on_all_ranks() -> None:
    results = by_hand(3, "none", per_rank={1: {"GLOO_SOCKET_IFNAME": "ib7"}})
    all_report(results, "rank 1", "GLOO_SOCKET_IFNAME=ib7", "has no interface ib7")
    assert not any("Traceback" in result.output for result in results)
    assert [result.output.count("LaunchError:") for result in results] == [1, 0, 0]  # in order of the ranks
    assert all("this rank does not start. Rank 0 reports the cause" in result.output for result in results[1:])


def test_the_loopback_interface_for_gloo_is_refused_on_two_hosts(lab: Lab) -> None:
    env = {"GLOO_SOCKET_IFNAME": "lo", "FAULT": "none"}
    done = lab.mpi("mpich5", "2x2", FAULTY, env=env)
    assert done.status != 0
    assert done.output.count("GLOO_SOCKET_IFNAME=lo, the loopback interface") >= 4


def test_different_world_sizes_are_named_on_all_ranks() -> None:
    results = by_hand(3, "none", per_rank={2: {"WORLD_SIZE": "4"}})
    all_report(results, "disagree on the world size", "has 3", "rank 2")


def test_different_versions_are_shown_as_a_table_on_all_ranks() -> None:
    all_report(by_hand(3, "version:1"), "differ in kit", "0.0.9: 1 ranks, the first is rank 1")


def test_two_ranks_on_one_gpu_are_shown_as_a_table_on_all_ranks() -> None:
    env = {rank: {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)}
    all_report(by_hand(2, "shared-gpu", per_rank=env), "use the same GPU", "GPU-5f3c", "rank 1 (local rank 1)")


def test_nccl_without_a_gpu_is_refused_on_all_ranks() -> None:
    all_report(by_hand(2, "nccl"), "backend nccl was requested", "sees no cuda device")


@pytest.mark.parametrize(("mpi", "fault"), [
    ("mpich5", "late:2"), ("openmpi5", "late:2"), ("intel", "exit-before:3"), ("openmpi4", "exit-before:3"),
    ("mpich4", "kill-during:1"), ("openmpi5", "kill-during:1")])
def test_a_lost_rank_ends_the_start_under_every_mpiexec(lab: Lab, mpi: str, fault: str) -> None:
    done = lab.mpi(mpi, "2x2", FAULTY, env={"FAULT": fault, "FAULT_TIMEOUT": "8"}, seconds=75)
    assert done.status != 0
    gave_up = [float(text) for text in re.findall(r"gave up after ([0-9.]+) s", done.output)]
    assert all(seconds <= 8 * 1.1 + 1 for seconds in gave_up), done.output
    # Some launchers kill the other ranks of a killed one before these can say anything, and report it themselves.
    cause = {"late": "1 of 4 ranks did not join: rank 2", "exit-before": "this rank ends before it starts",
             "kill-during": r"rank 1 on h1|signal:? 9|exit code: 9|killed"}[fault.split(":")[0]]
    assert re.search(cause, done.output, re.IGNORECASE) or done.status == 128 + 9, done.output


@pytest.mark.parametrize(("mpi", "rank"), [
    ("mpich5", 0), ("mpich4", 3), ("intel", 3), ("openmpi5", 3), ("openmpi5", 0), ("openmpi4", 0)])
def test_an_exception_ends_the_launch_with_its_traceback_first(lab: Lab, mpi: str, rank: int) -> None:
    start = time.monotonic()
    done = lab.mpi(mpi, "2x2", FAULTY, env={"FAULT": f"raise:{rank}", "FAULT_TIMEOUT": "100"})
    assert done.status != 0
    assert time.monotonic() - start < 90  # nobody waits for a limit
    first = done.output.index("Traceback (most recent call last)")
    assert "ValueError: the loss is not a number" in done.output[first:].split("Traceback", 2)[1], done.output


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_ends_torchrun_with_its_traceback_first(rank: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *FAULTY[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env={"PATH": "/usr/bin:/bin", "FAULT": f"raise:{rank}", "FAULT_TIMEOUT": "30"})
    assert done.returncode != 0
    first = done.stderr.index("Traceback (most recent call last)")
    assert "ValueError: the loss is not a number" in done.stderr[first:].split("Traceback", 2)[1], done.stderr
    root_cause = done.stderr.partition("Root Cause (first observed failure)")[2]
    assert re.search(rf"traceback : rank {rank} on \S+ failed: ValueError: the loss is not a number", root_cause)


def test_a_killed_rank_ends_the_others() -> None:
    dead, *others = sorted(by_hand(3, "kill-training:1", timeout=20), key=lambda result: result.status)
    assert dead.status == -9
    all_report(others, f"rank 1 on {socket.gethostname()} (pid ", "died without a message")


def test_the_survivors_name_the_rank_that_failed() -> None:
    results = by_hand(3, "raise:1", timeout=20)
    all_report(results, "rank 1 on", "ValueError: the loss is not a number")


# Causes on two hosts: a rank that leaves early, and one that hangs ----------------------------------------------------

def launch_two_hosts(lab: Lab, launcher: str, fault: str, env: dict[str, str]) -> str:
    """Run 2 x 2 ranks on h1 and h2; return the output of all ranks. The launch must fail."""
    env = {"FAULT": fault, "FAULT_TIMEOUT": "60", **env}
    if launcher != "torchrun":
        done = lab.mpi(launcher, "2x2", FAULTY, env=env, seconds=150)
        assert done.status != 0, done.output
        return done.output
    agents = [lab.hosts.popen(host, lab.torchrun(
        host, FAULTY, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", "--master-addr=h1",
        "--master-port=29511"), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for node, host in enumerate(("h1", "h2"))]
    results = [lab.wait(agent, 150) for agent in agents]
    assert any(result.status for result in results)
    return "".join(result.output for result in results)


@pytest.mark.parametrize(("launcher", "leaving", "without"), [
    ("mpich5", "return:3", ""), ("mpich5", "close:0", "1"), ("openmpi5", "exit:1", "1"), ("torchrun", "return:1", "1")])
def test_a_rank_that_leaves_early_is_named_with_its_host(lab: Lab, launcher: str, leaving: str, without: str) -> None:
    rank = int(leaving[-1])
    output = launch_two_hosts(lab, launcher, leaving, {"FAULT_WITHOUT_WITH": without} if without else {})
    assert re.search(rf"stops, because rank {rank} on h{1 + rank // 2} (left normally|ended its program .*) after \d+ "
                     "collectives, and other ranks need it for more. The ranks have uneven work", output), output
    assert "without a message" not in output and "Traceback" not in output.split("elastic", 1)[0], output


@pytest.mark.parametrize(("launcher", "rank"), [("mpich5", 0), ("openmpi5", 3), ("torchrun", 2)])
def test_a_rank_that_hangs_is_named_with_its_host_and_place(lab: Lab, launcher: str, rank: int) -> None:
    output = launch_two_hosts(lab, launcher, f"hang:{rank}", {})
    assert re.search(rf"stops, because rank {rank} on h{1 + rank // 2} \(pid \d+\) did not enter collective \d+, in "
                     r"which the other ranks wait. It is at \S+rank_program.py, line \d+, in go_wrong", output), output
    assert not re.search(r"rank \d on h\d failed", output), output


def test_five_pairs_of_launches_at_the_same_moment_on_one_host(lab: Lab) -> None:
    show = [sys.executable, str(RANK_PROGRAM), "--torch"]
    commands = [lab.mpiexec("mpich5", "one host", {}), lab.mpiexec("openmpi5", "one host", {}),
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
    started = []
    for pair in range(5):
        for command in (commands[pair % 3], commands[(pair + 1) % 3]):
            words = show[1:] if command is commands[2] else show
            started.append(lab.hosts.popen("h1", [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process in started:
        with killed_at_end(process):
            done = lab.wait(process, 90)
            assert done.status == 0, done.output
            assert "rank 0 of 2" in done.output and "rank 1 of 2" in done.output
