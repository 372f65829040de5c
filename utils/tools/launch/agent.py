"""Start the ranks of a host when the coordinator orders it, and report on them: the agent.

The agent ends the ranks when the coordinator requests that or is gone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from ...channel import Channel, Message
from ...errors import LaunchError
from ...host.network import INTERFACE
from ...host.trust import NotTrusted, may_trust
from ...launch_protocol import REPORT
from ..staging import IN_MEMORY
from .child_processes import Processes
from .event_loop import EventLoop
from .host_ranks import start_on_host
from .host_readiness import ReservedPort, problem_with
from .ignored_stops import IgnoredStops
from .launch_connection import connect, secret_of_ranks
from .nested import GroupWatch
from .rank_environment import rank_environment
from .rank_output import Outputs
from .stopped_ranks import StoppedRanks

SECRET_VARIABLE = "DDPKIT_LAUNCH_SECRET"
REMEDY = "start the job in a folder that all hosts share and that only you may write"
_DRAIN_SECONDS = 1.0  # limit for the last output: a child of a rank may hold the pipe
_SHUTDOWN_SECONDS = 10.0  # limit for the coordinator to close the connection
_MAXIMUM_UNSENT_BYTES = 1 << 22  # beyond this, output stays in the ranks' pipes


class Agent:
    """The ranks of this host, led by the coordinator at the other end of the connection."""

    def __init__(
        self, connection: Channel, secret: str, loop: EventLoop, environ: dict[str, str] | None
    ) -> None:
        """environ: variables for the ranks; None: the coordinator sends them."""
        self._connection, self._secret, self._environ = connection, secret, environ
        self._send = connection.send
        self._loop = loop
        self._outputs = Outputs(loop, self._send_output)
        self._port: ReservedPort | None = None
        self._order: Message | None = None
        self._end_requested = False
        self._stops: list[tuple[int, bool]] = []  # signal; whether it is for workers

    def run(self) -> int:
        """Run the ranks as the coordinator orders; return 1 if the connection was lost."""
        with closing(self._connection):
            self._connection.attach(self._loop, self._receive, lambda connection: None)
            while self._order is None:
                self._wait()
                self._loop.take_signals()
                if self._end_requested:
                    return 0
                if self._connection.closed and self._order is None:
                    return 1

            with Processes(self._order["launch_id"]) as processes:
                self._start(processes, self._order)
                watch = GroupWatch(self._order["launch_id"], self._order["watched_ranks"])
                self._ignored = IgnoredStops(
                    lambda pids: self._send(
                        {"kind": "ignored", "processes": [processes.indices[pid] for pid in pids]}
                    ),
                    lambda pids: processes.end(time.monotonic(), 0.0),
                )
                self._stopped = StoppedRanks(
                    self._order["hang_limit"],
                    lambda pid, why, seconds: self._send(
                        {"kind": "stopped", "process": processes.indices[pid]}
                        | {"pid": pid, "why": why, "seconds": seconds}
                    ),
                )
                while processes.running:
                    self._step(processes, watch)
                if watch.ended_without_group():
                    self._send({"kind": "copies", "running": False})
                lost = self._connection.closed
                self._outputs.drain(_DRAIN_SECONDS, self._wait)
            self._outputs.drain(0.0, self._wait)
            if self._environ_of_ranks.get(IN_MEMORY):
                from ..staging.node_copy import (
                    remove_from_memory,  # slow to load, and seldom needed
                )

                remove_from_memory(self._environ_of_ranks)
            self._send({"kind": "done"})
            self._wait_for_coordinator()
            return int(lost)

    def _receive(self, _: Channel, message: Message) -> None:
        kind = message["kind"]
        if kind == "check":
            problem = problem_with(message["folder"], message["script"], message["checksum"])
            first, last = message["ports"]
            try:
                self._port = ReservedPort(range(first, last + 1))  # held until this process ends
            except LaunchError as error:
                problem = problem or str(error)
            port = self._port.port if self._port else 0
            self._send({"kind": "ready", "problem": problem, "port": port})
        elif kind == "start":
            self._order = message
        elif kind == "signal":
            self._stops.append((message["number"], message["to_workers"]))
        elif kind == "end":
            self._end_requested = True

    def _start(self, processes: Processes, order: Message) -> None:
        same_host = order["host"] == socket.gethostname()
        environ = order["environ"] if self._environ is None else self._environ
        environ[REPORT] += self._secret
        self._environ_of_ranks = rank_environment(environ, os.environ, same_host=same_host)
        start_on_host(
            order["processes"],
            self._environ_of_ranks,
            processes,
            self._outputs,
            output_dir=order["output_dir"],
        )

    def _step(self, processes: Processes, watch: GroupWatch) -> None:
        """Wait for something to happen and handle it."""
        now = time.monotonic()
        for message in watch.messages(now):
            self._send(message)
        stop = self._ignored.check(processes.indices, now)
        held = self._stopped.check(processes.indices, now)
        self._wait(watch.next_look, processes.kill_late(now), processes.pass_on_held(), stop, held)
        self._loop.take_signals()  # dropped: stops come over the connection
        if self._end_requested or self._connection.closed:
            processes.end(time.monotonic())
        for number, to_workers in self._stops:
            processes.stop(number, to_workers=to_workers)
            self._ignored.signalled(number, time.monotonic())
        self._stops.clear()
        for index, status in processes.ended():
            self._send({"kind": "exit", "process": index, "status": status})

    def _wait(self, *timeouts: float | None) -> None:
        """Run the loop once, for at most the shortest timeout (seconds), and pass on output."""
        self._outputs.pause(self._connection.unsent_bytes >= _MAXIMUM_UNSENT_BYTES)
        self._loop.run_once(*timeouts, self._outputs.flush_partial_lines())

    def _send_output(self, stream: int, text: bytes, index: int) -> None:
        decoded = text.decode(errors="surrogateescape")
        self._send({"kind": "output", "stream": stream, "text": decoded, "process": index})

    def _wait_for_coordinator(self) -> None:
        """Wait until the coordinator has received everything and closes the connection."""
        limit = time.monotonic() + _SHUTDOWN_SECONDS
        while not self._connection.closed and (left := limit - time.monotonic()) > 0:
            self._loop.run_once(left)
            self._loop.take_signals()


def _given(path: str) -> tuple[str, dict[str, str] | None]:
    """Return the secret of the launch, and the variables for the ranks or None.

    The secret is in a file, in the environment or on standard input. It is not on the command line,
    which every user of a host can read. Variables come on standard input only.
    """
    if path:
        with open(may_trust(path, REMEDY), encoding="ascii") as file:
            return file.read(), None
    if secret := os.environ.get(SECRET_VARIABLE):
        return secret, None
    return sys.stdin.readline().strip(), json.loads(sys.stdin.readline() or "null")


def main(arguments: Sequence[str]) -> int:
    """Run an agent. arguments: the coordinator's addresses, joined by commas; its port; the index
    of this host in the plan, or "rank" where a native launcher has numbered the agents; the file
    with the secret, or "".
    """
    addresses, port, index, path = arguments
    if index == "rank":
        from ...launchers.detect import detect

        index = str(detect().rank)
    try:
        text, environ = _given(path)
        secret = secret_of_ranks(text)
    except OSError as error:
        problem = str(error)
        if not isinstance(error, NotTrusted):
            problem = (
                f"{path} cannot be read: {error.strerror}. Expected a file that all hosts share. "
                "Have the site mount that file system there"
            )
        print(f"ddpkit launch: error: on {socket.gethostname()} {problem}", file=sys.stderr)
        return 1
    with EventLoop() as loop:
        reached = connect(addresses.split(","), int(port), secret, "agent")
        if reached is None:
            print(
                f"ddpkit launch: error: on {socket.gethostname()} the launch cannot be reached at "
                f"{addresses} port {port}. Expected a network between the hosts of a job. Export "
                f"{INTERFACE}=<an interface that all hosts reach>, or have the site open it",
                file=sys.stderr,
            )
            return 1
        connection, address = reached
        host = socket.gethostname()
        hello = {"index": int(index), "reached": address, "host": host}
        connection.send({"kind": "agent", **hello, "has_environ": environ is not None})
        return Agent(connection, secret, loop, environ).run()
