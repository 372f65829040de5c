"""All ranks meet at rank 0, or all learn why not. The ranks are threads of this process; no torch."""
from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from utils import network, rendezvous
from utils.launchers import LaunchError, Placement, detect
from utils.monitor import encode
from utils.rendezvous import Rendezvous, agree
from utils.rollcall import Card
from utils.telephone import NoTelephone

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
LIMIT = 30.0  # until a test is given up


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_hand(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def slurm_job(number: int) -> dict[str, str]:
    return {"SLURM_CLUSTER_NAME": "test", "SLURM_JOB_ID": str(number), "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "n1"}


def placed(rank: int, size: int, launcher: str = "env") -> Placement:
    local = (rank, size) if launcher == "slurm" else (None, None)
    return Placement(launcher, rank, size, *local)


def name_all(cards: list[Card]) -> tuple[str | None, list[dict[str, Any]]]:
    """A judge that replies to each rank with its rank and the names on all cards."""
    return None, [{"rank": rank, "names": [card["name"] for card in cards]} for rank in range(len(cards))]


@dataclass
class Rank:
    """A rank in a thread: what agree() returned or raised, and after how long."""

    placement: Placement
    environ: Mapping[str, str]
    timeout: float = 10.0
    card: Card = field(default_factory=dict)
    judge: Any = name_all
    telephone: Any = None
    keep: bool = False  # keep the listener open
    met: Rendezvous | None = None
    error: BaseException | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.card = {"host": "here", "pid": self.placement.rank, "name": f"card {self.placement.rank}", **self.card}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self.met = agree(self.placement, self.card, self.judge, timeout=self.timeout, environ=self.environ,
                             telephone=self.telephone)
            if self.met.monitor is not None:
                self.met.monitor.started()
                self.met.monitor.leave("")
            if self.met.listener is not None and not self.keep:
                self.met.listener.close()
        except BaseException as error:  # noqa: B036 - the test looks at it
            self.error = error
        self.seconds = time.monotonic() - began

    def start(self) -> Rank:
        self._thread.start()
        return self

    def end(self) -> Rank:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), f"rank {self.placement.rank} did not end"
        return self

    @property
    def why(self) -> str:
        """The words of its LaunchError."""
        self.end()
        assert isinstance(self.error, LaunchError), repr(self.error or self.met)
        return str(self.error)

    @property
    def place(self) -> Rendezvous:
        self.end()
        assert self.met is not None, repr(self.error)
        return self.met


def start(*ranks: int, size: int, port: int, **more: Any) -> list[Rank]:
    """Start some ranks of a launch by hand on this host."""
    return [Rank(placed(rank, size), by_hand(port), **more).start() for rank in ranks]


def eventually(condition: Callable[[], bool], seconds: float = LIMIT) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.002)


def connect(port: int) -> socket.socket:
    """A connection to the reception, as soon as it listens."""
    connections: list[socket.socket] = []

    def try_once() -> bool:
        with contextlib.suppress(OSError):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=LIMIT))
        return bool(connections)

    eventually(try_once)
    return connections[0]


def hello(rank: int, size: int, port: int) -> bytes:
    """What a rank says first."""
    token = rendezvous._plan(placed(rank, size), by_hand(port), None).token
    return encode(token=token, rank=rank, world_size=size,
                            card={"host": "there", "pid": 77, "name": f"card {rank}"})


class Memory:
    """A telephone within this process."""

    def __init__(self) -> None:
        self.told, self._rings = "", threading.Event()

    def publish(self, text: str, seconds: float) -> None:
        self.told = text
        self._rings.set()

    def look_up(self, seconds: float) -> str | None:
        return self.told if self._rings.wait(seconds) else None


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes], int]]:
    """stranger(banner) -> the port of another program, which says `banner` to everybody; b"" says nothing."""
    listeners: list[socket.socket] = []

    def listen(banner: bytes) -> int:
        listener = socket.create_server(("", 0))
        listeners.append(listener)
        if banner:
            threading.Thread(target=greet, args=(listener, banner), daemon=True).start()
        return int(listener.getsockname()[1])

    def greet(listener: socket.socket, banner: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                with contextlib.suppress(OSError), line:
                    line.recv(1 << 20)
                    line.sendall(banner)

    yield listen
    for listener in listeners:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


# All come ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [2, 5, 40])
def test_all_ranks_learn_one_address_one_port_and_their_own_reply(size: int) -> None:
    port = free_port()
    launch = start(*reversed(range(size)), size=size, port=port)
    assert len({one.place.master_addr for one in launch}) == 1
    assert {one.place.master_port for one in launch} == {port}
    names = [f"card {rank}" for rank in range(size)]
    assert [one.place.reply for one in launch] == [{"rank": rank, "names": names} for rank in reversed(range(size))]


def test_all_ranks_meet_by_a_telephone_at_a_port_that_rank_0_found_free() -> None:
    telephone = Memory()
    launch = [Rank(Placement("mpich", rank, 4, None, None), {}, telephone=telephone).start() for rank in range(4)]
    assert len({(one.place.master_addr, one.place.master_port) for one in launch}) == 1
    assert [one.place.reply["rank"] for one in launch] == [0, 1, 2, 3]


def test_the_port_of_a_telephone_is_not_that_of_master_port() -> None:
    telephone, port = Memory(), free_port()
    launch = [Rank(Placement("torchrun", rank, 2, rank, 2), by_hand(port), telephone=telephone).start()
              for rank in range(2)]
    assert {one.place.master_port for one in launch} != {port}


def test_rank_0_keeps_listening_at_the_agreed_port() -> None:
    launch = start(0, 1, size=2, port=free_port(), keep=True)
    listener = launch[0].place.listener
    assert listener is not None and launch[1].place.listener is None
    with listener, socket.create_connection(("127.0.0.1", launch[1].place.master_port), timeout=5):
        assert listener.accept()


def test_ranks_that_come_before_rank_0_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    call = rendezvous.call
    monkeypatch.setattr(rendezvous, "call", lambda *words: (calls.append(words[0]), call(*words))[1])
    port = free_port()
    launch = start(1, 2, size=3, port=port)
    eventually(lambda: len(calls) > 6)
    launch += start(0, size=3, port=port)
    assert [one.place.reply["rank"] for one in launch] == [1, 2, 0]


def test_large_cards_and_replies_arrive_whole() -> None:
    launch = start(0, 1, 2, size=3, port=free_port(), card={"notes": ["x" * 100_000]})
    assert [one.place.reply["rank"] for one in launch] == [0, 1, 2]


# Some do not ---------------------------------------------------------------------------------------------------------

def test_a_rank_that_never_comes_is_named_by_all_others_in_time() -> None:
    for one in start(0, 1, 2, 4, size=6, port=free_port(), timeout=0.7):
        assert "2 of 6 ranks did not join: rank 3,5" in one.why
        assert one.seconds < 3


def test_the_shortest_time_out_ends_the_wait_of_all() -> None:
    port = free_port()
    launch = start(0, 1, size=4, port=port, timeout=3) + start(2, size=4, port=port, timeout=0.5)
    for one in launch:
        assert "1 of 4 ranks did not join: rank 3" in one.why
    assert launch[1].seconds < 2 and launch[2].seconds < 2


def test_without_rank_0_the_others_tell_what_they_tried() -> None:
    port = free_port()
    (one,) = start(1, size=2, port=port, timeout=0.4)
    for part in ("rank 1 of 2", "did not find rank 0", "MASTER_ADDR", f"127.0.0.1 port {port}: Connection refused"):
        assert part in one.why


def test_a_rank_that_ends_while_the_others_wait_is_named_at_once() -> None:
    port = free_port()
    launch = start(0, 1, 3, size=5, port=port, timeout=3)
    with connect(port) as line:
        line.sendall(hello(2, 5, port))
        line.recv(1 << 16)
    for one in launch:
        assert "rank 2 on there (pid 77) ended while the ranks were starting" in one.why
    assert launch[1].seconds < 2 and launch[2].seconds < 2


def test_a_rank_0_that_ends_while_the_others_wait_is_named_by_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        (one,) = start(1, size=2, port=port)
        line, _ = listener.accept()
        with line:
            token = json.loads(line.recv(1 << 16))["token"]
            line.sendall(encode(token=token, welcome=True))
        assert f"rank 0 at 127.0.0.1 port {port} ended while the ranks were starting (seen by rank 1" in one.why


def test_two_processes_with_one_rank_are_an_error_on_all() -> None:
    for one in start(0, 1, 1, size=3, port=free_port(), timeout=3):
        assert "two processes say that they are rank 1" in one.why


def test_ranks_with_different_world_sizes_are_an_error_that_names_both() -> None:
    port = free_port()
    for one in start(0, size=2, port=port) + start(1, size=3, port=port):
        assert "disagree on the world size" in one.why and "2, rank 1 on here (pid 1) was told 3" in one.why


def test_a_rank_that_cannot_start_ends_all_that_wait_at_once_with_its_words() -> None:
    port = free_port()
    launch = [*start(0, size=3, port=port)]
    with connect(port) as line:  # rank 1, which waits
        line.sendall(hello(1, 3, port))
        assert b"welcome" in line.recv(1 << 16)
        launch += start(2, size=3, port=port, card={"error": "it sees no GPU"})
        verdict = json.loads(line.makefile("rb").readline())
    assert verdict["error"] == "rank 2 on here (pid 2) cannot start: it sees no GPU"
    for one in launch:
        assert one.why == verdict["error"]
        assert one.seconds < 5


def test_a_rank_that_comes_just_after_the_failure_is_told_the_cause_too() -> None:
    port = free_port()
    first = start(0, size=3, port=port) + start(1, size=3, port=port, card={"error": "it sees no GPU"})
    assert "it sees no GPU" in first[1].why
    (late,) = start(2, size=3, port=port, timeout=2)
    assert "it sees no GPU" in late.why


def test_what_the_judge_refuses_is_told_to_all() -> None:
    def refuse(cards: list[Card]) -> tuple[str | None, list[dict[str, Any]]]:
        return "the versions differ", []

    for one in start(0, 1, 2, size=3, port=free_port(), judge=refuse):
        assert one.why == "the versions differ"


# Strangers -----------------------------------------------------------------------------------------------------------

GARBAGE = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
    "a port scanner": b"",
    "half a line": b'{"kit":"ddpkit-1","tok',
    "a line without end": b"x" * (3 << 20),
    "binary": bytes(range(256)) * 8 + b"\n",
    "a line of brackets": b"[" * 200_000 + b"\n",
    "another kit": b'{"kit":"other-9","token":"x","rank":1,"world_size":2}\n',
    "another launch": b'{"kit":"ddpkit-1","token":"x","rank":1,"world_size":2,"card":{}}\n',
    "no object": b"[1]\nnull\n7\n\"text\"\n\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_disturbs_no_launch(name: str) -> None:
    port = free_port()
    launch = start(0, 1, size=3, port=port)
    with contextlib.ExitStack() as open_lines:
        for _ in range(3):
            line = open_lines.enter_context(connect(port))
            with contextlib.suppress(OSError):  # it may hang up in the middle of a long line
                line.sendall(GARBAGE[name])
        launch += start(2, size=3, port=port)
        assert [one.place.reply["rank"] for one in launch] == [0, 1, 2]


def test_garbage_from_somebody_who_hangs_up_disturbs_no_launch() -> None:
    port = free_port()
    launch = start(0, size=2, port=port)
    for text in GARBAGE.values():
        if not text.startswith(b"[[["):
            with contextlib.suppress(OSError), connect(port) as line:
                line.sendall(text[:1000])
    launch += start(1, size=2, port=port)
    assert [one.place.reply["rank"] for one in launch] == [0, 1]


def test_a_rank_of_another_launch_is_told_so_and_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(rendezvous, "_ports", lambda identity: [port])
    first = Rank(placed(0, 2, "slurm"), slurm_job(1)).start()
    connect(port).close()
    other = Rank(placed(1, 2, "slurm"), slurm_job(2), timeout=0.5).start()
    assert "another launch of this kit listens there" in other.why
    second = Rank(placed(1, 2, "slurm"), slurm_job(1)).start()
    assert [first.place.reply["rank"], second.place.reply["rank"]] == [0, 1]


def test_a_silent_program_at_master_port_is_named_on_rank_0_and_on_the_others(
        stranger: Callable[[bytes], int]) -> None:
    port = stranger(b"")
    first, second = start(0, 1, size=2, port=port, timeout=0.6)
    assert f"rank 0 cannot listen on MASTER_PORT={port}" in first.why and "Address already in use" in first.why
    assert "accepted the connection and said nothing; another program listens there" in second.why
    assert second.seconds < 5


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\xff\n",
                                    b"[" * 200_000 + b"\n"])
def test_a_talking_program_at_master_port_is_told_from_rank_0(banner: bytes, stranger: Callable[[bytes], int]) -> None:
    (one,) = start(1, size=2, port=stranger(banner), timeout=0.4)
    assert "not this kit answered" in one.why


# MASTER_ADDR and MASTER_PORT -----------------------------------------------------------------------------------------

def test_an_unresolvable_master_addr_is_named() -> None:
    one = Rank(placed(1, 2), by_hand(free_port(), "no-such-host.invalid"), timeout=0.4).start()
    assert "no-such-host.invalid: the name does not resolve" in one.why


def test_an_unreachable_master_addr_is_named_in_time() -> None:
    port = free_port()
    one = Rank(placed(1, 2), by_hand(port, "192.0.2.1"), timeout=0.6).start()
    assert f"Tried 192.0.2.1 port {port}: " in one.why
    assert one.seconds < 3


@pytest.mark.parametrize("text", ["x", "0", "65536", "-1", "1.5", "29500x", "\u0663\u0663\u0663\u0663", "9" * 5000])
def test_a_bad_master_port_is_an_error_that_names_it(text: str) -> None:
    for rank in range(2):
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": text}
        with pytest.raises(LaunchError, match="MASTER_PORT is "):
            agree(placed(rank, 2), {}, name_all, timeout=1, environ=environ)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_set_by_hand_need_both_address_and_port(missing: str) -> None:
    environ = {**by_hand(29500), missing: " "}
    with pytest.raises(LaunchError, match=f"{missing}=''.*expected both"):
        agree(placed(1, 2), {}, name_all, timeout=1, environ=environ)


def test_a_master_addr_beside_a_stale_rank_is_ignored_with_a_note() -> None:
    environ = {**slurm_job(3), "RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere", "MASTER_PORT": "bad"}
    for one in [Rank(placed(rank, 2, "slurm"), environ).start() for rank in range(2)]:
        (note,) = one.place.notes
        assert "MASTER_ADDR=nowhere MASTER_PORT=bad was ignored" in note


def test_a_stale_rank_that_happens_to_fit_one_rank_keeps_nobody_from_meeting() -> None:
    environ = {**slurm_job(3), "SLURM_STEP_NODELIST": "127.0.0.1", "RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR":
               "no-such-host.invalid"}
    launch = [Rank(Placement("slurm", rank, 8, rank % 4, 4), environ).start() for rank in range(8)]
    assert len({one.place.master_port for one in launch}) == 1


def test_on_one_host_rank_0_listens_where_master_addr_says() -> None:
    outward = network.own_addresses()
    assert outward, "this host has no address but loopback"
    environ = by_hand(free_port(), outward[0])
    launch = [Rank(Placement("env", rank, 2, rank, 2), environ).start() for rank in range(2)]
    assert launch[1].place.reach_addr == outward[0]


def test_rank_0_says_that_master_addr_is_none_of_its_own_when_nobody_comes() -> None:
    one = Rank(placed(0, 2), by_hand(free_port(), "192.0.2.1"), timeout=0.5).start()
    assert "1 of 2 ranks did not join" in one.why and "MASTER_ADDR=192.0.2.1 is no address of rank 0's host" in one.why


def test_a_silent_stranger_on_the_likeliest_port_costs_seconds_only() -> None:
    environ = slurm_job(77)
    ports = rendezvous._ports(rendezvous._identity(placed(0, 2, "slurm"), environ))
    with socket.create_server(("127.0.0.1", ports[0])):
        launch = [Rank(placed(rank, 2, "slurm"), environ, timeout=20).start() for rank in range(2)]
        assert {one.place.master_port for one in launch} == {ports[1]}
        assert launch[1].seconds < 10


def test_a_master_port_under_a_launcher_is_where_the_ranks_meet() -> None:
    port = free_port()
    environ = {**slurm_job(4), "MASTER_PORT": str(port)}
    launch = [Rank(placed(rank, 2, "slurm"), environ).start() for rank in range(2)]
    assert {one.place.master_port for one in launch} == {port}


def test_a_master_addr_of_this_host_alone_is_refused_on_several_hosts() -> None:
    environ = {**slurm_job(5), **by_hand(29500)}
    with pytest.raises(LaunchError, match="MASTER_ADDR=127.0.0.1 is this host alone.*4 ranks run on several hosts"):
        agree(Placement("slurm", 3, 4, 1, 2), {}, name_all, timeout=1, environ=environ)


# Where rank 0 is -----------------------------------------------------------------------------------------------------

def test_the_host_of_rank_0_is_among_those_that_every_recorded_task_of_srun_tries() -> None:
    seen = 0
    for path in sorted(RECORDINGS.glob("*/*.json")):
        for process in json.loads(path.read_text())["processes"]:
            if process["expect"]["launcher"] == "slurm":
                hosts, _ = rendezvous._listed_hosts(detect(process["environ"]), process["environ"])
                assert process["expect"]["rank0_host"] in hosts, (path.name, process["expect"])
                seen += 1
    assert seen > 50


def test_all_ranks_of_a_recorded_launch_have_one_identity() -> None:
    for path in sorted(RECORDINGS.glob("mpi/*.json")):
        environs = [process["environ"] for process in json.loads(path.read_text())["processes"]]
        assert len({rendezvous._identity(detect(environ), environ) for environ in environs}) == 1, path.name


def test_the_ports_of_a_launch_are_the_same_for_all_and_those_of_another_differ() -> None:
    assert rendezvous._ports("slurm:1") == rendezvous._ports("slurm:1") != rendezvous._ports("slurm:2")
    assert all(20000 <= port < 32000 for number in range(500) for port in rendezvous._ports(f"slurm:{number}"))


def test_without_anything_that_tells_where_rank_0_is_the_error_says_what_to_export(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match="nothing tells where rank 0 is.*mpi4py.*Export MASTER_ADDR"):
        agree(Placement("mvapich", 1, 4, 1, 2), {}, name_all, timeout=1, environ={})


def test_a_broken_node_list_is_a_launch_error() -> None:
    environ = {**slurm_job(6), "SLURM_STEP_NODELIST": "n[1"}
    with pytest.raises(LaunchError, match=r"n\[1"):
        agree(Placement("slurm", 1, 4, 1, 2), {}, name_all, timeout=0.3, environ=environ)


class Dead:
    def publish(self, text: str, seconds: float) -> None:
        raise NoTelephone("mpiexec refused")

    def look_up(self, seconds: float) -> str | None:
        raise NoTelephone("mpiexec refused")


def test_a_telephone_that_fails_is_a_launch_error_on_both_ends() -> None:
    for rank, words in enumerate(["rank 0 cannot tell the others where it listens", "rank 1 on .* cannot ask where"]):
        with pytest.raises(LaunchError, match=f"{words}.*mpiexec refused"):
            agree(Placement("mpich", rank, 2, None, None), {}, name_all, timeout=1, environ={}, telephone=Dead())


def test_a_rank_0_that_never_tells_where_it_is_is_an_error_in_time() -> None:
    one = Rank(Placement("mpich", 1, 2, None, None), {}, telephone=Memory(), timeout=0.3).start()
    assert "rank 0 never told where it listens" in one.why
    assert one.seconds < 3


# Many launches on one host -------------------------------------------------------------------------------------------

def start_pairs(count: int) -> list[list[Rank]]:
    """Launches of two ranks that start at the same moment, each card with the number of its launch."""
    launches = [[Rank(placed(rank, 2, "slurm"), slurm_job(1000 + number), card={"name": f"launch {number}"},
                      timeout=LIMIT) for rank in range(2)] for number in range(count)]
    for pair in launches:
        for one in pair:
            one.start()
    return launches


def assert_each_met_its_own(launches: list[list[Rank]]) -> None:
    for number, pair in enumerate(launches):
        for one in pair:
            assert one.place.reply["names"] == [f"launch {number}"] * 2
        assert pair[0].place.master_port == pair[1].place.master_port


def test_of_200_pairs_that_start_at_once_each_meets_its_own() -> None:
    assert_each_met_its_own(start_pairs(200))


def test_of_60_pairs_with_one_first_port_each_meets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    port, ports = free_port(), rendezvous._ports
    monkeypatch.setattr(rendezvous, "_ports", lambda identity: [port, *ports(identity)[1:]])
    assert_each_met_its_own(start_pairs(60))


def test_a_launch_whose_ports_are_all_taken_says_so(monkeypatch: pytest.MonkeyPatch,
                                                    stranger: Callable[[bytes], int]) -> None:
    ports = [stranger(b""), stranger(b"")]
    monkeypatch.setattr(rendezvous, "_ports", lambda identity: ports)
    with pytest.raises(LaunchError, match=f"cannot listen on ports {ports[0]}, {ports[1]} of"):
        agree(placed(0, 2, "slurm"), {}, name_all, timeout=1, environ=slurm_job(7))


# Limits --------------------------------------------------------------------------------------------------------------

def in_process(limits: str, size: int) -> subprocess.CompletedProcess[str]:
    code = (f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
            "from utils.launchers import LaunchError, Placement\nfrom utils.rendezvous import agree\n"
            f"environ = {by_hand(free_port())!r}\n"
            f"try: agree(Placement('env', 0, {size}, None, None), dict(host='here'), None, timeout=0.2, "
            "environ=environ)\n"
            "except LaunchError as error: print(error, resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_too_low_a_hard_limit_of_open_files_is_an_error_that_names_both_numbers() -> None:
    done = in_process("(64, 64)", 100)
    assert "may open 64 files, but 100 ranks need 456" in done.stdout, done.stderr


def test_too_low_a_soft_limit_of_open_files_is_raised() -> None:
    done = in_process("(64, 1000)", 100)
    assert "99 of 100 ranks did not join" in done.stdout and "(456, 1000)" in done.stdout, done.stderr


def test_a_launch_leaves_no_connection_open() -> None:
    def sockets() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return [target for target in found if target.startswith("socket:")]

    before = set(sockets())
    for _ in range(3):
        for one in start(0, 1, 2, size=3, port=free_port()):
            assert one.place.reply
        for one in start(0, 1, size=3, port=free_port(), timeout=0.2):
            assert one.why
    eventually(lambda: set(sockets()) <= before, 5)
