"""Find a launcher below a launcher: in the command before the start, then by what processes do.

A command may hide what it starts. So the process groups that ranks form are watched from outside:
torch names the threads of a group (2.8 not those of gloo), and /proc shows which processes are
connected.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import select
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from ...channel import Channel
from ...host import process
from ...launchers.rank_variables import LAUNCH_RANK
from . import proc_reader
from .child_processes import HANDLER_SECONDS, HELD, LAUNCH_VARIABLE
from .host_ranks import divides_cores
from .launch_connection import CONNECT_SECONDS, Message, send
from .launch_plan import Plan
from .launch_result import LaunchResult, print_status

# What starts ranks, by the name of a program or module, and the --launcher for the same.
_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "",
    "accelerate.commands.launch": "",
    "accelerate.commands.accelerate_cli": "",
    "deepspeed": "",
    "deepspeed.launcher.runner": "",
    "deepspeed.launcher.launch": "",
    "horovodrun": "",
    "srun": "srun",
    "pbs_tmrsh": "pbs_tmrsh",
    "pbsdsh": "pbsdsh",
    "aprun": "",
    "launch.py": "",
}
_MPIEXEC = re.compile(r"(mpi(exec|run)|orterun|prterun|prun)(\W|$)")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_WRAPPER = re.compile(r"-m|env|nice|(python|pypy)[\d.]*")
_BEFORE_COMMAND = re.compile(r"-.*|\d+|\w+=.*|exec|then|do", re.DOTALL)

_FIRST_SECONDS = 0.5  # between two looks, longer with time
_LONGEST_SECONDS = 10.0
LATE_SECONDS = 300.0
SHORT_SECONDS = 10.0  # a program that ends earlier
_NO_HOST = ("00000000", "0" * 32, "0100007F", "0" * 24 + "01000000")  # listening, loopback
_GROUP_THREADS = ("pt_gloo", "pt_nccl", "pt_xccl")


def launcher_in(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the launcher that a command runs, and the --launcher for it; None for none.

    It is found behind env, nice, python -m and the "--" of another program, and in `bash -c`.
    """
    name = os.path.basename(words[0]) if words else ""
    if name in _LAUNCHERS or _MPIEXEC.match(name):
        return name, _LAUNCHERS.get(name, "mpiexec")
    if name in _SHELLS:
        pairs = zip(words[1:], words[2:], strict=False)
        text = next((text for option, text in pairs if re.fullmatch("-[a-z]*c", option)), "")
        return next(filter(None, map(launcher_in, _shell_commands(text))), None)
    if _WRAPPER.fullmatch(name):
        return launcher_in(_without_options(words[1:]))
    before = list(itertools.takewhile(lambda word: word != "--", words))
    if any(word == "-m" or word.endswith(".py") for word in before):  # its own arguments follow
        return None
    return launcher_in(words[len(before) + 1 :]) if before else None


def _without_options(words: Iterable[str]) -> list[str]:
    return list(itertools.dropwhile(_BEFORE_COMMAND.fullmatch, words))


def _shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell's text."""
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # an open quotation mark: the shell reports it
        return
    for ends, command in itertools.groupby(words, lambda word: set(word) <= set("();<>|&")):
        if not ends:
            yield _without_options(command)


def refusal(words: Sequence[str], program: str, option: str) -> str:
    """Return why a command is no script or program of one rank; "" where it may be one.

    program: the command that the user has typed. option: how it is told that this is on purpose.
    """
    found = launcher_in(words)
    if found is None:
        return ""
    name, launcher = found
    instead = f"--launcher {launcher}" if launcher else ""
    if launcher == "torchrun" and program == "launch.py":
        instead = "--torchrun"
    example = " ".join(filter(None, [program, instead, "train.py"]))
    verb = "is" if os.path.basename(words[0]) == name else "runs"
    return (
        f"the command {verb} {name}, which starts ranks itself, as launch.py does. Expected "
        f"the script or program of one rank. Leave {name} and its options out, as in {example}; "
        f"or give {option} if each rank is a program of its own"
    )


class GroupWatch:
    """The process groups of torch that the ranks of this host form, seen from outside.

    groups: each rank whose processes have a group without another rank, and how many they are.
    next_look: the seconds until it is time to look again; None if there is nothing left to see.
    formed: whether a rank has had a group, or a socket has had the port that launch.py gave to
    rank 0; also where the ranks are not watched.
    """

    def __init__(self, launch_id: str, ranks: int) -> None:
        """launch_id: in the environment of the ranks. ranks: on this host; 0: do not watch."""
        self.groups: dict[int, int] = {}
        self.next_look: float | None = None
        self.formed = not ranks
        self._port = self._rank_0 = 0  # the port, and the process id
        self._late_at = time.monotonic() + LATE_SECONDS
        self._id, self._ranks = launch_id.encode(), ranks
        self._joined: set[int] = set()  # ranks that have a group with others
        self._found: set[int] = set()  # ranks without others at the last look
        self._start = time.monotonic()
        self._due = self._start + _FIRST_SECONDS

    def look(self, now: float) -> float | None:
        """Look if it is time; return the seconds until the next time, None if there is none."""
        if len(self._joined) >= self._ranks and not self._found:
            return None
        if now >= self._due:
            self._look()
            seconds = (now - self._start) / 20
            self._due = now + min(max(seconds, _FIRST_SECONDS), _LONGEST_SECONDS)
        return self._due - now

    def messages(self, now: float) -> Iterator[Message]:
        """Look if it is time; yield what launch.py is to know."""
        before = self.groups
        self.next_look = self.look(now)
        if self.groups != before:
            yield {"groups": list(self.groups.items())}
        if not self.formed and now >= self._late_at:
            self._late_at = math.inf
            yield {"copies": True}

    def ended_without_group(self, now: float) -> bool:
        """Return whether the ranks, which have all ended now, never had a group.

        A group that lived between two looks has left a connection to its store in TIME_WAIT. The
        trace of one at a port of the script's own choice may be missed, so nothing is claimed of a
        program that was short; most of those are no training.
        """
        self.formed = self.formed or proc_reader.uses_tcp_port(self._port)
        return not self.formed and now - self._start >= SHORT_SECONDS

    def _look(self) -> None:
        processes: dict[int, list[int]] = {}  # of each rank: it, and what it has started
        found: dict[int, int] = {}
        for pid in process.process_ids():
            environ = proc_reader.environment(pid)
            if environ.get(LAUNCH_VARIABLE.encode(), b"").split(b"/")[-1] != self._id:
                continue
            text, _, count = environ.get(LAUNCH_RANK.encode(), b"").partition(b"/")
            if not count:
                continue
            processes.setdefault(int(text), []).append(pid)
            port = environ.get(b"MASTER_PORT", b"")
            if text == b"0" and not self._port and port.isdigit():
                self._port, self._rank_0 = int(port), pid
            agents = environ.get(b"GROUP_WORLD_SIZE", count)  # of torchrun, below a rank
            nested = b"TORCHELASTIC_RUN_ID" in environ and int(agents) < int(count)
            if nested and int(text) not in self._joined:
                found[int(text)] = int(environ.get(b"WORLD_SIZE", b"1"))

        members = {
            rank: list(filter(_is_member, pids))
            for rank, pids in processes.items()
            if rank not in self._joined
        }
        has_port = proc_reader.uses_tcp_port(self._port, self._rank_0)
        self.formed = self.formed or has_port or any(members.values())
        if not any(members.values()):
            members.clear()
            processes.clear()
        own = {pid for pids in processes.values() for pid in pids}
        rank_of: dict[str, int] = {}
        for rank, pids in processes.items():
            for pid in pids:
                rank_of |= dict.fromkeys(proc_reader.sockets(pid), rank)
        # A rank may inherit the connections of the launcher that has started it.
        for parent in {process.parent(pid) for pid in own} - own - {None}:
            for inode in proc_reader.sockets(parent or 0):
                rank_of.pop(inode, None)
        for rank, pids in members.items():
            peers = {peer for pid in pids for peer in _peers(pid, rank_of)}
            if rank > 0 and any(map(_serves_rank_0, pids)) or peers == {rank}:
                found[rank] = len(pids)
            elif peers and rank not in found:
                self._joined.add(rank)
        # Twice: connections are made one after another, and closed so at the end.
        self.groups = {rank: size for rank, size in found.items() if rank in self._found}
        self._found = set(found)


def _is_member(pid: int) -> bool:
    return any(name.startswith(_GROUP_THREADS) for name in proc_reader.thread_names(pid))


def _serves_rank_0(pid: int) -> bool:
    """Whether a process has the store of its group at the port that launch.py gave to rank 0."""
    port = proc_reader.environment(pid).get(b"MASTER_PORT", b"")
    if not port.isdigit():
        return False
    ends = proc_reader.tcp_connections(pid)
    listens = (ends[inode] for inode in proc_reader.sockets(pid) & ends.keys())
    # The store listens on all addresses, gloo on that of one interface.
    return any(
        not local.partition(":")[0].strip("0")
        and local.endswith(f":{int(port):04X}")
        and remote.endswith(":0000")
        for local, remote in listens
    )


def _peers(pid: int, rank_of: Mapping[str, int]) -> Iterator[int | None]:
    """Yield the ranks that a process is connected to; None for a process of another host.

    rank_of: the rank whose processes have a socket, by inode. Other programs of this host, such as
    a logger, do not count.
    """
    ends = proc_reader.tcp_connections(pid)
    inodes = {pair: inode for inode, pair in ends.items()}
    for inode in proc_reader.sockets(pid) & ends.keys() & rank_of.keys():
        local, remote = ends[inode]
        peer = inodes.get((remote, local), "")
        here, there = local.partition(":")[0], remote.partition(":")[0]
        if peer in rank_of:
            yield rank_of[peer]
        # The table is not read at once: of a new connection within this host, it may have one end.
        elif not peer and there not in (here, *_NO_HOST):
            yield None


class GroupReports:
    """What the hosts of a launch report about their process groups."""

    def __init__(self, plan: Plan, result: LaunchResult) -> None:
        self._plan, self._result = plan, result
        self._of_hosts: dict[int, dict[int, int]] = {}

    def note(self, host: int, message: Message, *, of_rank_0: bool) -> str:
        """Note a message of a host; return what is wrong with the groups, or "".

        of_rank_0: whether rank 0 runs there. Rank 0 alone proves nothing: it is the last in its
        group while it saves, and the one that starts an evaluation.
        """
        if "copies" in message and of_rank_0:
            self._report_copies(running=message["copies"])
        if "groups" not in message:
            return ""
        self._of_hosts[host] = dict(message["groups"])
        sizes = {rank: size for one in self._of_hosts.values() for rank, size in one.items()}
        rank, world_size = max(sizes, default=0), self._plan.world_size
        if rank == 0:
            return ""
        size = sizes[rank]
        return (
            f"rank {rank} of {world_size} has formed a process group of {size} "
            f"process{'es' * (size > 1)} without the other ranks. Expected one group of all "
            f"{world_size} ranks. Leave out what starts ranks in the script or program, such as "
            "torchrun, or give --independent if each rank is a program of its own"
        )

    def _report_copies(self, *, running: bool) -> None:
        """Warn that no rank has formed a group: at once if they run, else if they succeed.

        Programs that use the kit check that themselves.
        """
        plan = self._plan
        if divides_cores(plan.program):
            return
        words = [word for word in plan.command if word != "-m"]
        name = next((word for word in words if word.endswith(".py")), words[0])
        verb, when = ("are running", " within 5 minutes") if running else ("ran", "")
        text = (
            f"{plan.world_size} independent copies of {os.path.basename(name)} {verb}: no rank "
            f"formed a process group{when}. Expected one group of all ranks. Call "
            "setup_distributed() or init_process_group() in the script, or give --independent if "
            "each rank is a program of its own"
        )
        if running:
            print_status(text)
        else:
            self._result.warning = text


def _all_await(pids: Iterable[int], number: int) -> bool:
    return all(proc_reader.awaits_signal(pid, number) for pid in pids)


def report_on_ranks(peer: Channel, launch_id: str, response: Message) -> None:
    """Start a process that reports to launch.py on the ranks of this host.

    It reports their groups, which signals of HELD all of them handle, and their end.

    It is no child of this process, which becomes the user's program, and holds nothing but the
    connection. It ends with it, or with the ranks. Return at once.
    """
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        for number in HELD:  # Slurm signals all processes of a step
            signal.signal(number, signal.SIG_IGN)
        if os.fork():
            return
        os.closerange(0, peer.fileno())
        os.closerange(peer.fileno() + 1, 65536)
        ranks, namespace = response["processes"], process.namespace("pid")
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(peer, select.POLLIN)
        for pid, _, _ in ranks:
            with suppress(OSError, AttributeError):  # Linux before 5.3, macOS
                poll.register(os.pidfd_open(pid), select.POLLIN)
        watch = GroupWatch(launch_id, response["watched_ranks"])
        started, handled = time.monotonic(), list[int]()
        # What is in another namespace is not seen from here.
        hidden = any(there != namespace for _, _, there in ranks)
        while (seen := [pid for pid, t, _ in ranks if process.start_time(pid) == t]) or hidden:
            for message in watch.messages(time.monotonic()):
                send(peer, message, CONNECT_SECONDS)
            seconds = watch.next_look or _LONGEST_SECONDS
            before, handled = handled, [int(one) for one in HELD if _all_await(seen, one)]
            if handled != before:
                send(peer, {"handled": handled}, CONNECT_SECONDS)
            if len(handled) < len(HELD):  # a program without handlers is looked at less and less
                seconds = min(seconds, max(HANDLER_SECONDS, (time.monotonic() - started) / 20))
            for ready, _ in poll.poll(1000 * seconds):
                if ready == peer.fileno():
                    return
                poll.unregister(ready)
        if watch.ended_without_group(time.monotonic()):
            send(peer, {"copies": False}, CONNECT_SECONDS)
        send(peer, {"ended": True}, CONNECT_SECONDS)
    finally:
        os._exit(0)
