"""Which variables the ranks of a native launcher get, and which launches are refused because they are not the plan."""
from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_launch_plan import SLURM, job, make
from utils.launch.agent import start_words
from utils.launch.join import Joined, JoinServer, mismatch, rank_variables
from utils.launch.plan import Options, Plan
from utils.launch.report import VARIABLE, Report, parse


def joined(hosts: Sequence[str], local_ranks: Sequence[int | None] | None = None) -> dict[int, Joined]:
    """One rank on each of the hosts, "h1" at 10.0.0.1."""
    local = local_ranks or [None] * len(hosts)
    return {rank: Joined(rank, local[rank], (host, "boot"), f"10.0.0.{host[1:]}", "10.0.0.9", 25000 + rank)
            for rank, host in enumerate(hosts)}


def column(variables: dict[int, dict[str, str]], name: str) -> list[int]:
    return [int(variables[rank][name]) for rank in sorted(variables)]


# Variables ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("hosts", "local_ranks", "sizes", "nodes"), [
    (["h1", "h1", "h2", "h2"], [0, 1, 0, 1], [2, 2, 2, 2], [0, 0, 1, 1]),
    (["h2", "h2", "h1"], [0, 1, 0], [2, 2, 1], [0, 0, 1]),
    (["h1", "h2", "h1", "h2"], [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 0, 1]),
    (["h3", "h1", "h2"], [0, 0, 0], [1, 1, 1], [0, 1, 2])], ids=["block", "uneven", "round robin", "any order"])
def test_variables_follow_from_where_the_ranks_are(hosts: list[str], local_ranks: list[int], sizes: list[int],
                                                   nodes: list[int]) -> None:
    found = rank_variables(joined(hosts), set())
    assert column(found, "RANK") == list(range(len(hosts)))
    assert column(found, "WORLD_SIZE") == [len(hosts)] * len(hosts)
    assert column(found, "LOCAL_RANK") == local_ranks
    assert column(found, "LOCAL_WORLD_SIZE") == sizes
    assert column(found, "NODE_RANK") == column(found, "GROUP_RANK") == nodes
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found.values()} == {
        (f"10.0.0.{hosts[0][1:]}", "25000")}


def test_the_local_rank_of_the_launcher_counts() -> None:  # GPU masks and core bindings go by it
    assert column(rank_variables(joined(["h1", "h1", "h2"], [1, 0, 0]), set()), "LOCAL_RANK") == [1, 0, 0]


@pytest.mark.parametrize("local_ranks", [[0, 0, 0], [0, None, 0], [1, 2, 0]])
def test_local_ranks_that_are_none_are_counted(local_ranks: list[int | None]) -> None:
    assert column(rank_variables(joined(["h1", "h1", "h2"], local_ranks), set()), "LOCAL_RANK") == [0, 1, 0]


def test_hosts_of_one_name_are_told_apart() -> None:
    same = {rank: Joined(rank, 0, ("localhost", f"net:{rank}"), f"10.0.0.{rank}", "10.0.0.9") for rank in range(2)}
    assert column(rank_variables(same, set()), "NODE_RANK") == [0, 1]


def test_the_address_of_the_host_of_launch_py_is_the_one_by_which_others_reach_it() -> None:
    found = rank_variables(joined(["h1", "h2"]), {"10.0.0.1"})
    assert found[1]["MASTER_ADDR"] == "10.0.0.9"


def test_one_host_needs_no_network() -> None:
    assert rank_variables(joined(["h1", "h1"]), set())[1]["MASTER_ADDR"] == "127.0.0.1"


# Compared with the plan -----------------------------------------------------------------------------------------------

def planned(*, as_asked: bool = False, **options: str) -> Plan:
    environ = {**SLURM, "SLURM_NTASKS": "3"} if as_asked else SLURM
    return make(job(ranks=(2, 1)), environ, Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("hosts", "says"), [
    (["n1", "n1", "n2"], ""), (["n1.cluster", "n2.cluster", "n1.cluster"], ""), (["a", "b", "a"], ""),
    (["n1", "n1", "n1"], "sees all hosts of the job"), (["n1", "n2", "n3"], "sees all hosts of the job"),
    (["n1", "n2", "n2"], "how many ranks a host gets"), (["n1", "n1", "n3"], "Not expected: n3")])
def test_ranks_on_other_hosts_than_planned_are_told(hosts: list[str], says: str) -> None:
    ranks = [Joined(rank, None, (host,), "10.0.0.1", "10.0.0.9") for rank, host in enumerate(hosts)]
    found = mismatch(planned(), ranks)
    assert says in found and bool(says) == bool(found)


def test_where_slurm_puts_the_tasks_of_a_job_is_its_own_affair() -> None:
    ranks = [Joined(rank, None, (host,), "10.0.0.1", "10.0.0.9") for rank, host in enumerate(["n1", "n2", "n2"])]
    assert mismatch(planned(as_asked=True), ranks) == ""


# Joining --------------------------------------------------------------------------------------------------------------

class Rank:
    """A rank that joins by the report's address."""

    def __init__(self, report: Report, rank: int, *, world_size: int = 3, token: str = "", **more: object) -> None:
        addresses, port, secret = parse(report.variables[VARIABLE])
        self._connection = socket.create_connection((addresses[0], port), timeout=10)
        self.send({"join": {"token": token or secret, "rank": rank, "world_size": world_size, "local_rank": None,
                            "host": ["n2" if rank == 2 else "n1"], "reached": "10.0.0.9", "port": 25000, **more}})

    def send(self, message: object) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def answer(self) -> dict[str, object]:
        with self._connection.makefile("rb") as stream:
            return json.loads(stream.readline() or b"{}")  # type: ignore[no-any-return]

    def close(self) -> None:
        self._connection.close()


def serve(server: JoinServer, selector: selectors.BaseSelector) -> None:
    """Handle all that comes until nothing has come for a while."""
    while found := selector.select(0.3):
        for key, events in found:
            server.handle(key.fileobj, events)


def launch(*ranks: dict[str, object], leave: int | None = None) -> tuple[JoinServer, list[dict[str, object]]]:
    """A launch that these ranks join, one after the other; what each was answered."""
    with Report() as report, selectors.DefaultSelector() as selector:
        server = JoinServer(planned(), report, selector)
        clients = [Rank(report, **one) for one in ranks]  # type: ignore[arg-type]
        serve(server, selector)
        if leave is not None:
            clients[leave].close()
            serve(server, selector)
            clients.pop(leave)
        server.check_time(0.0)
        server.close()
        answers = [one.answer() for one in clients]
        for one in clients:
            one.close()
        return server, answers


def test_every_rank_is_answered_when_all_have_joined() -> None:
    server, answers = launch({"rank": 2}, {"rank": 0}, {"rank": 1})
    assert server.complete and not server.problem
    assert [answer["variables"]["RANK"] for answer in answers] == ["2", "0", "1"]  # type: ignore[index]


@pytest.mark.parametrize(("ranks", "says"), [
    (({"rank": 0, "world_size": 1},), "srun has started 1 ranks, one of them on n1. Expected 3 ranks (2 on n1, "
                                          "1 on n2)"),
    (({"rank": 0}, {"rank": 0}), "srun has started rank 0 twice"),
    (({"rank": 0}, {"rank": 1}, {"rank": 2, "host": ["n1"]}), "srun has started 3 ranks (3 on n1). Expected 3 ranks "
                                                              "(2 on n1, 1 on n2)"),
    (({"rank": 0}, {"rank": 1, "problem": "the working folder /a cannot be entered (No such file or directory)"}),
     "rank 1 on n1: the working folder /a cannot be entered (No such file or directory). Expected")])
def test_what_is_not_the_plan_fails_with_both_numbers(ranks: tuple[dict[str, object], ...], says: str) -> None:
    server, answers = launch(*ranks)
    assert says in server.problem and not server.complete
    assert not any("variables" in answer for answer in answers)


def test_a_rank_that_ends_before_all_have_joined_is_named() -> None:
    server, _ = launch({"rank": 0}, {"rank": 2}, leave=1)
    assert server.problem == "rank 2 on n2 ended before all ranks had joined"


def test_ranks_that_do_not_join_in_time_are_named() -> None:
    with Report() as report, selectors.DefaultSelector() as selector:
        server = JoinServer(planned(), report, selector)
        rank = Rank(report, 1)
        serve(server, selector)
        server.check_time(1e12)
        rank.close()
        server.close()
    assert server.problem.startswith("2 of 3 ranks did not join: 0, 2 within 120 s. Expected 3 ranks on n1, n2.")


def started(report: Report, *program: str, output_dir: str = "") -> tuple[subprocess.Popen[str], socket.socket, Any]:
    """rank_start.py as Slurm starts it, its connection, and its report."""
    environ = {"PATH": os.environ["PATH"], **report.variables, "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
               "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    words = start_words(sys.executable, "rank_start", [os.getcwd(), "", "", output_dir, *program])
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    connection = report.listener.accept()[0]
    with connection.makefile("rb") as stream:
        return process, connection, json.loads(stream.readline())["join"]


def test_a_signal_before_the_start_of_another_program_has_its_default_action() -> None:
    with Report() as report:
        process, connection, _ = started(report, "sh", "-c", "echo started")
        with connection:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
            connection.sendall(json.dumps({"variables": {"RANK": "0"}}).encode() + b"\n")
            assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGUSR1


def test_an_output_folder_that_cannot_be_written_is_reported_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "logs")
    with Report() as report:
        process, connection, said = started(report, "true", output_dir=folder)
        connection.close()
        process.communicate(timeout=30)
    assert f"the output folder {folder} cannot be written (Not a directory)" in said["problem"]


def test_a_limit_of_open_files_is_named() -> None:
    with Report() as report, selectors.DefaultSelector() as selector:
        server = JoinServer(planned(), report, selector)
        ranks = [Rank(report, rank) for rank in range(2)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            for _ in range(3):
                for key, events in selector.select(0.3):
                    server.handle(key.fileobj, events)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server.close()
        for rank in ranks:
            rank.close()
    assert "3 of 3 ranks did not join: 0, 1, 2, because launch.py may open no more files" in server.problem


def test_an_unknown_client_is_no_rank() -> None:
    server, answers = launch({"rank": 0, "token": "no"})
    assert (server.problem, server.missing(), answers) == ("", "3 of 3 ranks did not join: 0, 1, 2", [{}])


def test_that_all_have_saved_is_noted_among_the_ranks() -> None:
    with Report() as report, selectors.DefaultSelector() as selector:
        server = JoinServer(planned(), report, selector)
        rank = Rank(report, 0)
        rank.send({})
        for last in (False, True):  # read at once, or when the launch is over
            addresses, port, secret = parse(report.variables[VARIABLE])
            with socket.create_connection((addresses[0], port)) as connection:
                connection.sendall(json.dumps({"token": secret, "saved": True}).encode() + b"\n")
            if not last:
                serve(server, selector)
        server.close()
        rank.close()
        assert report.saved()
