"""How ranks of a native launcher join, which variables they get, and rank 0's notice that all have saved."""
from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.launch_plans import SLURM, job, make
from tests.unit.notices import served
from utils.channel import Channel, Loop, Message
from utils.host.cores import cpus_of_mask
from utils.launch_protocol import REPORT, parse_address, report_saved
from utils.tools.launch.bootstrap import module_command
from utils.tools.launch.child_processes import LAUNCH_VARIABLE
from utils.tools.launch.event_loop import EventLoop
from utils.tools.launch.join import JoinedRank, JoinServer, mismatch, rank_variables
from utils.tools.launch.launch_connection import LaunchServer, RankNotices, secret_of
from utils.tools.launch.launch_plan import Plan
from utils.tools.launch.launch_result import LaunchResult


def joined(rank: int, host: str, local_rank: int | None = None) -> JoinedRank:
    return JoinedRank(rank, local_rank, tuple(host.split()), "10.0.0.1", "10.0.0.9")


@pytest.mark.parametrize(("of_launcher", "expected"), [
    ((1, 0, 0), "100"),  # GPU masks and core bindings follow it
    ((0, 0, 0), "010"), ((0, None, 0), "010"), ((1, 2, 0), "010")])
def test_local_rank_is_the_launchers_if_it_counts_from_0(of_launcher: tuple[int | None, ...], expected: str) -> None:
    """Two hosts may have one name."""
    hosts = ["localhost net:1", "localhost net:1", "localhost net:2"]
    ranks = {rank: joined(rank, host, of_launcher[rank]) for rank, host in enumerate(hosts)}
    found = rank_variables(ranks, set()).values()
    assert [one["LOCAL_RANK"] for one in found] == [*expected] and [one["NODE_RANK"] for one in found] == [*"001"]


def planned(**environ: str) -> Plan:
    """Two ranks on n1, one on n2."""
    return make(job(ranks=(2, 1)), {**SLURM, **environ})


@pytest.mark.parametrize(("hosts", "hint"), [
    (["n1", "n1", "n2"], ""), (["n1.cluster", "n2.cluster", "n1.cluster"], ""), (["a", "b", "a"], ""),
    (["n1", "n1", "n1"], "sees all hosts of the job"), (["n1", "n2", "n3"], "sees all hosts of the job"),
    (["n1", "n2", "n2"], "how many ranks the launcher starts"), (["n1", "n1", "n3"], "Not expected: n3")])
def test_ranks_on_other_hosts_than_planned(hosts: list[str], hint: str) -> None:
    ranks = [joined(rank, host) for rank, host in enumerate(hosts)]
    found = mismatch(planned(), ranks)
    assert hint in found and bool(hint) == bool(found)
    if "how many" in hint:  # Slurm itself distributes the job's own tasks
        assert mismatch(planned(SLURM_NTASKS="3"), ranks) == ""


class Joining:
    """A server, the ranks that have connected to it, and what both do."""

    def __init__(self, notices: RankNotices, loop: EventLoop) -> None:
        self.notices, self.loop = notices, loop
        self.received: dict[Channel, list[Message]] = {}  # by each rank's end of its connection
        self.result = LaunchResult()
        self.server = JoinServer(planned(), "12-ab", notices, loop, self.result)

    def connect(self, *, secret: str = "", **values: Any) -> Channel:
        addresses, port, right = parse_address(self.notices.variables[REPORT])
        peer = Channel(socket.create_connection((addresses[0], port), timeout=10),
                       secret_of(secret or right), {"role": "rank", "index": 0, "size": 0, "instance": "0" * 16})
        self.received[peer] = []
        rank = values["rank"]
        peer.send({"kind": "join", "world_size": 3, "host": ["n2" if rank == 2 else "n1"], "reached": "10.0.0.9",
                   "local_rank": None, "port": 0, "cores": {"mask": f"{1 << rank:x}", "gpu_nodes": []},
                   "problem": "", **values})
        return peer

    def join(self, *ranks: dict[str, Any]) -> list[Channel]:
        peers = [self.connect(**values) for values in ranks]
        self.serve()
        return peers

    def serve(self) -> None:
        for _ in range(20):
            self.loop.run_once(0.02)
            for peer, messages in self.received.items():
                messages += peer.receive()


@pytest.fixture
def joining() -> Iterator[Joining]:
    with RankNotices(4) as notices, EventLoop() as loop:
        made = Joining(notices, loop)
        with closing(made.server):
            yield made
        for peer in made.received:
            peer.close()


ALL = [{"rank": rank} for rank in (0, 1, 2)]


@pytest.mark.parametrize(("ranks", "message"), [
    ([{"rank": 0, "world_size": 1}],
     "srun has started 1 ranks, one of them on n1. Expected 3 ranks (2 on n1, 1 on n2)"),
    ([{"rank": 0}, {"rank": 0}], "srun has started rank 0 twice"),
    ([{"rank": 0}, {"rank": 1}, {"rank": 2, "host": ["n1"]}],
     "srun has started 3 ranks (3 on n1). Expected 3 ranks (2 on n1, 1 on n2)"),
    ([{"rank": 0, "secret": "no"}], "")])
def test_launch_that_is_not_the_plan_fails(joining: Joining, ranks: list[dict[str, object]], message: str) -> None:
    joining.join(*ranks)
    server = joining.server
    assert message in server.problem and bool(message) == bool(server.problem) and not server.complete
    assert not any(one["kind"] == "variables" for messages in joining.received.values() for one in messages)


def test_parents_report_the_end_of_their_ranks(joining: Joining) -> None:
    """A launcher may kill the parent of a rank together with it."""
    ranks = joining.join(*ALL)
    for rank, masks in zip(ranks, (["1", "2"], ["1", "2"], ["4"]), strict=True):
        [found] = joining.received[rank]
        assert [one["mask"] for one in found["cores"]] == masks
    joining.server.clients[2].host_lost = True  # as the kernel reports it
    ranks[2].close()
    ranks[1].send({"kind": "exit", "status": 137, "at": 0.0})
    for closed in (1, 2):
        ranks[closed].close()
        joining.serve()
        assert joining.server.ended_at is None
    assert joining.result.lost_hosts == ["n2"]
    ranks[0].send({"kind": "exit", "status": 0, "at": 0.0})
    ranks[0].close()
    joining.serve()
    assert joining.server.ended_at is not None and not joining.server.running
    assert [(end.who, end.status) for end in joining.result.evidence().ends] == [
        ("rank 1 on n1", 137), ("rank 0 on n1", 0)]


@pytest.mark.parametrize("rank", [0, 2])
def test_host_of_rank_0_reports_a_missing_group(joining: Joining, rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = joining.join(*ALL)
    ranks[rank].send({"kind": "copies", "running": True})
    joining.serve()
    assert ("3 independent copies of train.py are running" in capfd.readouterr().err) == (rank == 0)


def test_rank_that_ends_before_all_have_joined_is_named(joining: Joining) -> None:
    _, lost = joining.join(ALL[0], ALL[2])
    lost.close()
    joining.serve()
    assert joining.server.problem == "rank 2 on n2 ended before all ranks had joined"


def test_ranks_that_do_not_join_in_time_are_named(joining: Joining) -> None:
    joining.join(ALL[1])
    joining.server.check_time(1e12)
    assert joining.server.problem.startswith(
        "2 of 3 ranks did not join: ranks 0,2 within 120 s. Expected 3 ranks on n1, n2.")


def test_limit_of_open_files_is_named(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(socket.socket, "accept", refused)
    joining.connect(rank=0)
    joining.loop.run_once(1.0)
    assert "3 of 3 ranks did not join: ranks 0-2, because ddpkit launch may open no more" in joining.server.problem


@pytest.mark.parametrize("wrong", ["0123456789abcdef", "\u00e9", "\udcff"])
def test_a_notice_with_another_secret_is_ignored(wrong: str) -> None:
    with served() as notices:
        addresses, port, _ = parse_address(notices.variables[REPORT])
        assert not report_saved({REPORT: f"{addresses[0]}/{port}/{wrong}"}) and notices.saved_at is None
        assert report_saved(notices.variables) and notices.saved_at


def test_the_listener_uses_the_ports_that_ranks_reach() -> None:
    ports = range(31500, 31600)
    with RankNotices(1, ports) as one, RankNotices(1, ports) as other:
        used = {parse_address(each.variables[REPORT])[1] for each in (one, other)}
        assert len(used) == 2 and used <= {*ports}


class OneRank(LaunchServer):
    """A launch of one rank, which it sends these variables."""

    report: dict[str, Any] = {}

    def identify(self, peer: Channel, message: Message) -> int:
        self.report = message
        return 0


@contextmanager
def started(*program: str, output_dir: str = "", binding: str = "") -> Iterator[
        tuple[subprocess.Popen[str], OneRank]]:
    """rank_start.py as an mpiexec starts it, once it has joined this launch."""
    with RankNotices(1) as notices, closing(Loop()) as loop:
        environ = {"PATH": os.environ["PATH"], **notices.variables, "PMI_RANK": "0", "PMI_SIZE": "1",
                   "DDPKIT_CPU_BIND": binding}
        words = module_command(sys.executable, "rank_start", [os.getcwd(), "", "", output_dir, *program])
        process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with closing(OneRank(notices, loop)) as server:
            while not server.clients:
                loop.run_once(10)
            yield process, server


def test_program_without_the_kit_is_bound_to_its_share_of_the_cores() -> None:
    last = max(os.sched_getaffinity(0))
    program = ["sh", "-c", "grep ^Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS"]
    with started(*program, binding=f"list:0:{last}") as (process, server):
        cores = server.report["cores"]
        variables = {"RANK": "0", "LOCAL_RANK": "1", LAUNCH_VARIABLE: "12-ab"}
        server.clients[0].send({"kind": "variables", "variables": variables, "num_hosts": 1,
                                "cores": [cores, cores], "watched_ranks": 0})
        output, errors = process.communicate(timeout=30)
    assert set(cpus_of_mask(cores["mask"])) == os.sched_getaffinity(0) and not errors
    assert output.split()[1:] == [str(last), "1"]


def test_output_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "logs")
    with started("true", output_dir=folder) as (process, server):
        server.close()
        process.communicate(timeout=30)
    assert f"the output folder {folder} cannot be written (Not a directory)" in server.report["problem"]
