"""The head of a launch by agents: it has them started, tells them what to run, and hears how it went.

Not here: what an agent does on its host (agent.py), the commands that start agents (commands.py).
"""
from __future__ import annotations

import hmac
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress

from .. import network
from ..schedulers.pbs import short
from . import agent
from .commands import host_words, native_command, starter
from .files import checksum_of
from .gpus import MASKS
from .native import Native
from .outcome import Outcome, in_words
from .output import prefixed
from .plan import Plan
from .processes import Processes, Signals
from .wire import Message, Wire

START_SECONDS = 120.0  # until every agent has reported
END_SECONDS = 20.0  # an agent needs less to end everything


def run_agents(plan: Plan, launch_id: str, signals: Signals) -> int:
    """Run the plan by an agent on each host; returns the exit status of the launch."""
    with Processes(launch_id) as processes, Native(plan, processes) as native, \
            socket.create_server(("", 0), backlog=len(plan.hosts) + 16) as listener:
        head = Head(plan, processes, signals, native, listener, launch_id)
        status = head.run()
        head.wait_for_starters()
    return status


class Head:
    """One launch by agents, from starting them to the last one's goodbye."""

    def __init__(self, plan: Plan, processes: Processes, signals: Signals, native: Native, listener: socket.socket,
                 launch_id: str) -> None:
        self._plan, self._processes, self._signals, self._native = plan, processes, signals, native
        self._listener, self._id = listener, launch_id
        self._selector = selectors.DefaultSelector()
        for source in (signals, listener):
            self._selector.register(source, selectors.EVENT_READ)
        # PBS gives its cookie to every task of a job and to nobody else; a command line could be read by anybody.
        cookie = os.environ.get("PBS_JOBCOOKIE") if plan.means in ("pbs_tmrsh", "pbsdsh") else None
        self._token = cookie or os.urandom(16).hex()
        self._wires: dict[int, Wire] = {}  # host -> connection of its agent
        self._hosts: dict[int, str] = {}  # host -> what it calls itself
        self._strangers: list[Wire] = []  # connections that have not said who they are
        self._reached: Counter[str] = Counter()  # addresses of this host by which agents came
        self._checking = self._started = False
        self._ready: set[int] = set()  # hosts where the ranks can start
        self._port = ""  # free on the first host
        self._done: set[int] = set()  # hosts that are over, for better or worse
        self._running = plan.world_size
        self._outcome = Outcome()
        self._told_to_end_at: float | None = None

    def run(self) -> int:
        """Until every agent is done or lost."""
        self._start_agents()
        limit = time.monotonic() + START_SECONDS
        while len(self._done) < len(self._plan.hosts):
            self._wait()
            now = time.monotonic()
            for number in self._signals.take():
                self._stop(number, now)
            self._look_at_starters(now)
            if not self._started and now > limit:
                self._outcome.fail(f"no agent has reported from {self._missing()} within {START_SECONDS:.0f} s. "
                                   f"Expected {self._plan.means} to start one there: check these hosts, and that they "
                                   f"can reach {socket.gethostname()} by TCP", now)
            self._end_if_failed(now)
        self._selector.close()
        for wire in self._wires.values():
            wire.close()
        return self._outcome.status

    def wait_for_starters(self) -> None:
        """Let what started the agents end by itself: it may still have something to print.

        OpenPBS never tells a job's first host, where that has no slots (mpiprocs=0), that a task on the first host with
        slots has ended, and pbs_tmrsh and pbsdsh wait for it. Seen with OpenPBS 23.
        """
        limit = time.monotonic() + (3 if self._started else 0)
        while self._processes.running and time.monotonic() < limit:
            with selectors.DefaultSelector() as selector:
                selector.register(self._signals, selectors.EVENT_READ)
                selector.select(0.1)
            self._signals.take()
            self._processes.ended()
        if self._plan.means in ("pbs_tmrsh", "pbsdsh"):
            self._processes.signal(signal.SIGKILL)

    # Starting ---------------------------------------------------------------------------------------------------------

    def _start_agents(self) -> None:
        addresses = ",".join(network.own_addresses() or ["127.0.0.1"])
        port = str(self._listener.getsockname()[1])
        with_token = {**self._plan.environ, agent.SECRET: self._token}
        if self._plan.means in ("srun", "mpiexec"):
            words = agent.start_words(self._plan.python, "agent", [addresses, port, "rank"])
            plan = self._plan._replace(environ=with_token)  # the command may name what to pass on
            self._native.start(native_command(plan, words), with_token)
            return
        for index, host in enumerate(self._plan.hosts):
            words = agent.start_words(self._plan.python, "agent", [addresses, port, str(index)])
            here = self._plan.means == "ssh" and host == self._plan.host
            self._processes.start(starter(self._plan, host, words), with_token if here else self._plan.environ,
                                  stdin=b"" if here else f"{self._token}\n".encode())

    def _missing(self) -> str:
        names = [host for index, host in enumerate(self._plan.hosts) if index not in self._wires]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more hosts" if len(names) > 8 else "")

    def _look_at_starters(self, now: float) -> None:
        one_for_all = self._plan.means in ("srun", "mpiexec")
        for index, status in self._processes.ended():
            left = range(len(self._plan.hosts)) if one_for_all else [index]
            left = [host for host in left if host not in self._wires]
            if left:
                where = self._missing() if one_for_all else self._plan.hosts[index]
                self._outcome.fail(f"{os.path.basename(self._plan.path)} {in_words(status)} before an agent has "
                                   f"reported from {where}. See its message above, and check that host", now)
                self._done.update(left)

    # Conversation -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        patience = 0.2 if self._outcome.failed_at is not None or not self._started else 10.0
        for key, event in self._selector.select(patience):
            if key.fileobj is self._listener:
                with suppress(OSError):
                    wire = Wire(self._listener.accept()[0])
                    self._strangers.append(wire)
                    self._selector.register(wire, wire.events)
            elif isinstance(key.fileobj, Wire):
                if event & selectors.EVENT_WRITE:
                    key.fileobj.flush()
                self._read(key.fileobj)
                self._watch(key.fileobj)

    def _watch(self, wire: Wire) -> None:
        """Have the next _wait() look at what there is to be looked at; note it where there is nothing more."""
        if not wire.closed:
            self._selector.modify(wire, wire.events)
        elif wire.socket.fileno() >= 0:
            self._selector.unregister(wire)
            wire.close()
            for index, one in self._wires.items():
                if one is wire and index not in self._done:
                    self._done.add(index)
                    self._outcome.fail(f"the connection to {self._plan.hosts[index]} was lost: the host, its network "
                                       "or the agent there has failed", time.monotonic())

    def _tell(self, index: int, message: Message) -> None:
        self._wires[index].send(message)
        self._watch(self._wires[index])

    def _read(self, wire: Wire) -> None:
        now = time.monotonic()
        for message in wire.receive():
            if wire in self._strangers:
                self._welcome(wire, message)
            else:  # of one that was refused there is nothing to hear
                for index in [index for index, one in self._wires.items() if one is wire]:
                    self._hear(index, message, now)

    def _welcome(self, wire: Wire, message: Message) -> None:
        """The first message of a connection: an agent's, or of somebody who does not know the token."""
        index = message.get("hello")
        self._strangers.remove(wire)
        if (not hmac.compare_digest(str(message.get("token")), self._token) or not isinstance(index, int)
                or not 0 <= index < len(self._plan.hosts) or index in self._wires):
            wire.closed = True
            return
        self._wires[index] = wire
        self._hosts[index] = str(message["host"])
        self._reached[message["reached"]] += 1
        if len(self._wires) == len(self._plan.hosts) and not self._checking:
            self._checking = True
            self._order_by_host()
            script = self._plan.script
            for each in self._wires:
                self._tell(each, {"check": [os.getcwd(), script, checksum_of(script) if script else None]})

    def _hear(self, index: int, message: Message, now: float) -> None:
        if "ready" in message and not self._started and self._told_to_end_at is None:
            self._note_ready(index, message["ready"], now)
        if "out" in message:
            stream, text, local_rank = message["out"]
            written = text.encode(errors="surrogateescape")
            if self._plan.options.prefix_output and not self._plan.options.torchrun:
                written = prefixed(written, sum(self._plan.ranks[:index]) + local_rank)
            with suppress(OSError):  # whoever read it is gone
                target = (sys.stdout if stream == 1 else sys.stderr).buffer
                target.write(written)
                target.flush()
        if "exit" in message:
            local_rank, status = message["exit"]
            host = self._plan.hosts[index]
            if self._plan.options.torchrun:
                self._running -= self._plan.ranks[index]
                who = f"torchrun on {host}"
            else:
                self._running -= 1
                who = f"rank {sum(self._plan.ranks[:index]) + local_rank} on {host}"
            self._outcome.ended(who, status, now, others=self._running > 0)
        if "done" in message:
            self._done.add(index)

    def _order_by_host(self) -> None:
        """Put each agent that srun or an mpiexec has started at the place of its host in the plan, where the names of
        hosts are the scheduler's; several on one host are an error."""
        if self._plan.means not in ("srun", "mpiexec"):
            return
        found, planned = [short(self._hosts[index]) for index in self._wires], [*map(short, self._plan.hosts)]
        if set(found) < set(planned):
            twice = next(name for name in found if found.count(name) > 1)
            self._outcome.fail(f"{self._plan.means} has started {found.count(twice)} agents on {twice}. Expected one "
                               f"on each of {', '.join(self._plan.hosts[:8])}. Check what else tells it where to "
                               "start processes", time.monotonic())
        if sorted(found) == sorted(planned):
            self._wires = {planned.index(name): wire for name, wire in zip(found, self._wires.values(), strict=True)}

    def _note_ready(self, index: int, report: Message, now: float) -> None:
        if report["problem"]:
            self._outcome.fail(f"on {self._plan.hosts[index]} {report['problem']}. Expected the same folders and files "
                               "on every host: use a file system that all hosts share", now)
            return
        self._ready.add(index)
        if index == 0:
            self._port = str(report["port"])
        if len(self._ready) == len(self._plan.hosts) and self._outcome.failed_at is None:
            self._start_ranks(self._port)

    def _start_ranks(self, port: str) -> None:
        self._started = True
        peers = [str(self._wires[index].socket.getpeername()[0]) for index in range(len(self._plan.hosts))]
        address = peers[0]
        if address in network.own_addresses() and len(peers) > 1:  # rank 0 is here: as the others reach us
            address = self._reached.most_common(1)[0][0]
        environ = dict(self._plan.environ)
        if self._plan.means == "srun":  # each agent has the mask of its own host from Slurm, or none
            environ = {name: value for name, value in environ.items() if name not in MASKS}
        for index in self._wires:
            self._tell(index, {"start": {"environ": environ, "folder": os.getcwd(), "launch": f"{self._id}."
                                 f"{index}", "host": socket.gethostname(), "shield": self._plan.options.torchrun,
                                 "output_dir": "" if self._plan.options.torchrun else self._plan.options.output_dir,
                                 "processes": host_words(self._plan, index, address, port, peers[index])}})

    # Ending -----------------------------------------------------------------------------------------------------------

    def _stop(self, number: int, now: float) -> None:
        if self._outcome.is_last_stop(number, now) or not self._started:
            self._outcome.end_now(number, now)
            return
        # torchrun passes on neither SIGUSR1 nor SIGUSR2, and at SIGTERM it ends its workers after 30 s. Where it may
        # restart them it has to hear of a request to end, or it would start again who obeys it.
        ends = number in (signal.SIGTERM, signal.SIGINT)
        to_workers = self._plan.options.torchrun and not (ends and self._plan.options.restarts)
        for index in self._wires:
            self._tell(index, {"signal": number, "to_workers": to_workers})

    def _end_if_failed(self, now: float) -> None:
        due = self._outcome.end_at
        if due is not None and self._told_to_end_at is None and (now >= due or not self._started):
            self._told_to_end_at = now
            for index in self._wires:
                self._tell(index, {"end": True})
        if self._told_to_end_at is not None:
            if not self._started:  # those that have not reported are ended with what starts them
                self._done.update(range(len(self._plan.hosts)))
            if now > self._told_to_end_at + END_SECONDS:
                self._done.update(range(len(self._plan.hosts)))
