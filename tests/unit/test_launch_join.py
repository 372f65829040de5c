"""How ranks of a native launcher join, which variables they get, and rank 0's notice that all have saved."""
from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch_plans import SLURM, job, make
from utils.launch.bootstrap import module_command
from utils.launch.connection import JoinReport
from utils.launch.event_loop import CaughtSignals, EventLoop
from utils.launch.join import JoinedRank, JoinServer, mismatch, rank_variables
from utils.launch.plan import Plan
from utils.launch_report import VARIABLE, ReportListener, parse_address, report_saved

Joining = tuple[ReportListener, EventLoop, JoinServer]


def joined(hosts: Sequence[str], local_ranks: Sequence[int | None] = ()) -> dict[int, JoinedRank]:
    """One rank on each of the hosts, "h1" at 10.0.0.1."""
    local = local_ranks or [None] * len(hosts)
    return {rank: JoinedRank(rank, local[rank], (host, "boot"), f"10.0.0.{host[1:]}", "10.0.0.9", 25000)
            for rank, host in enumerate(hosts)}


def column(variables: dict[int, dict[str, str]], name: str) -> list[int]:
    return [int(variables[rank][name]) for rank in sorted(variables)]


@pytest.mark.parametrize(("hosts", "local_ranks", "sizes", "nodes"), [
    (["h1", "h1", "h2", "h2"], [0, 1, 0, 1], [2, 2, 2, 2], [0, 0, 1, 1]),
    (["h2", "h2", "h1"], [0, 1, 0], [2, 2, 1], [0, 0, 1]),
    (["h1", "h2", "h1", "h2"], [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 0, 1]),
    (["h3", "h1", "h2"], [0, 0, 0], [1, 1, 1], [0, 1, 2])],
    ids=["block", "uneven", "round robin", "any order"])
def test_variables_follow_from_where_the_ranks_are(
        hosts: list[str], local_ranks: list[int], sizes: list[int], nodes: list[int]) -> None:
    found = rank_variables(joined(hosts), set())
    assert column(found, "RANK") == list(range(len(hosts)))
    assert column(found, "WORLD_SIZE") == [len(hosts)] * len(hosts)
    assert column(found, "LOCAL_RANK") == local_ranks
    assert column(found, "LOCAL_WORLD_SIZE") == sizes
    assert column(found, "NODE_RANK") == column(found, "GROUP_RANK") == nodes
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found.values()} == {
        (f"10.0.0.{hosts[0][1:]}", "25000")}


@pytest.mark.parametrize(("of_launcher", "expected"), [
    ([1, 0, 0], [1, 0, 0]),  # GPU masks and core bindings follow it
    ([0, 0, 0], [0, 1, 0]), ([0, None, 0], [0, 1, 0]), ([1, 2, 0], [0, 1, 0])])
def test_local_rank_is_the_launchers_if_it_counts_from_0(of_launcher: list[int | None], expected: list[int]) -> None:
    assert column(rank_variables(joined(["h1", "h1", "h2"], of_launcher), set()), "LOCAL_RANK") == expected


def test_hosts_and_addresses_that_are_alike() -> None:
    same = {rank: JoinedRank(rank, 0, ("localhost", f"net:{rank}"), f"10.0.0.{rank}", "10.0.0.9") for rank in (0, 1)}
    assert column(rank_variables(same, set()), "NODE_RANK") == [0, 1]
    # Rank 0 runs on the host of launch.py: its address is the one by which other hosts reach launch.py.
    assert rank_variables(joined(["h1", "h2"]), {"10.0.0.1"})[1]["MASTER_ADDR"] == "10.0.0.9"
    assert rank_variables(joined(["h1", "h1"]), set())[1]["MASTER_ADDR"] == "127.0.0.1"


def planned(**environ: str) -> Plan:
    """Two ranks on n1, one on n2."""
    return make(job(ranks=(2, 1)), {**SLURM, **environ})


@pytest.mark.parametrize(("hosts", "hint"), [
    (["n1", "n1", "n2"], ""), (["n1.cluster", "n2.cluster", "n1.cluster"], ""), (["a", "b", "a"], ""),
    (["n1", "n1", "n1"], "sees all hosts of the job"), (["n1", "n2", "n3"], "sees all hosts of the job"),
    (["n1", "n2", "n2"], "how many ranks the launcher starts"), (["n1", "n1", "n3"], "Not expected: n3")])
def test_ranks_on_other_hosts_than_planned(hosts: list[str], hint: str) -> None:
    ranks = [JoinedRank(rank, None, (host,), "10.0.0.1", "10.0.0.9") for rank, host in enumerate(hosts)]
    found = mismatch(planned(), ranks)
    assert hint in found and bool(hint) == bool(found)
    if "how many" in hint:  # Slurm itself distributes the job's own tasks
        assert mismatch(planned(SLURM_NTASKS="3"), ranks) == ""


# Joining


@pytest.fixture
def joining() -> Iterator[Joining]:
    with ReportListener() as report, CaughtSignals() as signals, EventLoop(signals) as loop:
        yield report, loop, JoinServer(planned(), report, loop)


def join(report: ReportListener, **values: Any) -> socket.socket:
    """A rank that joins the launch."""
    addresses, port, token = parse_address(report.variables[VARIABLE])
    connection = socket.create_connection((addresses[0], port), timeout=10)
    host = "n2" if values["rank"] == 2 else "n1"
    message = {"token": token, "world_size": 3, "local_rank": None, "host": [host], "reached": "10.0.0.9",
               "port": 25000, **values}
    connection.sendall(json.dumps({"join": message}).encode() + b"\n")
    return connection


def response(rank: socket.socket) -> dict[str, dict[str, str]]:
    with rank, rank.makefile("rb") as stream:
        return json.loads(stream.readline() or b"{}")


def serve(loop: EventLoop) -> None:
    """Handle everything until nothing has happened for a while."""
    quiet_since = time.monotonic()
    while (elapsed := time.monotonic() - quiet_since) < 0.3:
        started = time.monotonic()
        loop.run_once(0.3 - elapsed)
        if time.monotonic() - started < 0.25:
            quiet_since = time.monotonic()


def test_every_rank_gets_its_variables_when_all_have_joined(joining: Joining) -> None:
    report, loop, server = joining
    ranks = [join(report, rank=rank) for rank in (2, 0, 1)]
    serve(loop)
    assert server.complete and not server.problem
    server.close()
    assert [response(rank)["variables"]["RANK"] for rank in ranks] == ["2", "0", "1"]


@pytest.mark.parametrize(("ranks", "message"), [
    ([{"rank": 0, "world_size": 1}],
     "srun has started 1 ranks, one of them on n1. Expected 3 ranks (2 on n1, 1 on n2)"),
    ([{"rank": 0}, {"rank": 0}], "srun has started rank 0 twice"),
    ([{"rank": 0}, {"rank": 1}, {"rank": 2, "host": ["n1"]}],
     "srun has started 3 ranks (3 on n1). Expected 3 ranks (2 on n1, 1 on n2)"),
    ([{"rank": 0}, {"rank": 1, "problem": "the working folder /a cannot be entered"}],
     "rank 1 on n1: the working folder /a cannot be entered. Expected"),
    ([{"rank": 0, "token": "no"}], "")])
def test_launch_that_is_not_the_plan_fails(joining: Joining, ranks: list[dict[str, object]], message: str) -> None:
    report, loop, server = joining
    clients = [join(report, **values) for values in ranks]
    serve(loop)
    server.close()
    assert message in server.problem and bool(message) == bool(server.problem) and not server.complete
    assert not any("variables" in response(client) for client in clients)


def test_rank_that_ends_before_all_have_joined_is_named(joining: Joining) -> None:
    report, loop, server = joining
    with join(report, rank=0), join(report, rank=2) as lost:
        serve(loop)
        lost.close()
        serve(loop)
        assert server.lost_rank and server.problem == "rank 2 on n2 ended before all ranks had joined"
        server.close()


def test_ranks_that_do_not_join_in_time_are_named(joining: Joining) -> None:
    report, loop, server = joining
    with join(report, rank=1):
        serve(loop)
        server.check_time(1e12)
        server.close()
    assert server.problem.startswith("2 of 3 ranks did not join: 0, 2 within 120 s. Expected 3 ranks on n1, n2.")


def test_limit_of_open_files_is_named(joining: Joining) -> None:
    report, loop, server = joining
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with join(report, rank=0), join(report, rank=1), open(os.devnull) as last:
        free = last.fileno()
        last.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            loop.run_once(1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server.close()
    assert "3 of 3 ranks did not join: 0, 1, 2, because launch.py may open no more" in server.problem


# The notice that all have saved


@pytest.mark.parametrize("served", [True, False])  # at once, or when the launch has ended
def test_notice_that_all_have_saved_arrives_among_the_ranks(joining: Joining, served: bool) -> None:
    report, loop, server = joining
    with join(report, rank=0):
        serve(loop)
        assert not report.saved() and report_saved(report.variables)
        if served:
            serve(loop)
        server.close()
    assert report.saved()


@pytest.mark.parametrize("wrong", ["0123456789abcdef", "\u00e9", "\udcff"])
def test_a_notice_with_another_secret_is_ignored(wrong: str) -> None:
    ports = range(31500, 31600)
    with ReportListener(ports=ports) as one, ReportListener(ports=ports) as other:
        addresses, port, _ = parse_address(one.variables[VARIABLE])
        assert report_saved({VARIABLE: f"{addresses[0]}/{port}/{wrong}"}) and not one.saved()
        assert port in ports and parse_address(other.variables[VARIABLE])[1] in {*ports} - {port}


@pytest.mark.parametrize("value", ["", "10.0.0.1", "127.0.0.1/1/secret", "127.0.0.1/port/secret"])
def test_without_a_listener_nothing_is_reported(value: str) -> None:
    assert not report_saved({VARIABLE: value})


# The other end: rank_start.py


def started(report: ReportListener, *program: str,
            output_dir: str = "") -> tuple[subprocess.Popen[str], socket.socket, JoinReport]:
    """rank_start.py as Slurm starts it, its connection, and its report."""
    environ = {"PATH": os.environ["PATH"], **report.variables, "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
               "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    words = module_command(sys.executable, "rank_start", [os.getcwd(), "", "", output_dir, *program])
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    connection = report.listener.accept()[0]
    with connection.makefile("rb") as stream:
        return process, connection, json.loads(stream.readline())["join"]


def test_early_signal_has_its_default_action_in_another_program() -> None:
    with ReportListener() as report:
        process, connection, _ = started(report, "sh", "-c", "echo started")
        with connection:
            process.send_signal(signal.SIGUSR1)
            connection.sendall(json.dumps({"variables": {"RANK": "0"}}).encode() + b"\n")
            assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGUSR1


def test_output_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "logs")
    with ReportListener() as report:
        process, connection, received = started(report, "true", output_dir=folder)
        connection.close()
        process.communicate(timeout=30)
    assert f"the output folder {folder} cannot be written (Not a directory)" in received["problem"]
