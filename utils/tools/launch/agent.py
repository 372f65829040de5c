"""The agent of a host: start the ranks there when the coordinator orders it, and report on them.

It ends them when the coordinator requests that or is gone.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from .agent_connection import Check, LaunchConnection, Message, Ready, StartOrder, connect
from .child_processes import Processes
from .event_loop import CaughtSignals, EventLoop
from .files import problem_with
from .host_ranks import start_on_host
from .nested import GroupWatch
from .rank_environment import rank_environment
from .rank_output import Outputs
from .reserved_port import ReservedPort

SECRET_VARIABLE = "DDPKIT_LAUNCH_SECRET"
_DRAIN_SECONDS = 1.0
_SHUTDOWN_SECONDS = 10.0
_MAXIMUM_UNSENT_BYTES = 1 << 22  # more output is left in the pipes of the ranks


class Agent:
    """The ranks of this host, led by the coordinator at the other end of the connection."""

    def __init__(self, connection: LaunchConnection, signals: CaughtSignals) -> None:
        self._connection = connection
        self._loop = EventLoop(signals)
        self._outputs = Outputs(self._loop, self._send_output)
        self._port: ReservedPort | None = None
        self._order: StartOrder | None = None
        self._input: int | None = None  # the pipe that the first process reads
        self._unwritten = b""
        self._end_requested = False
        self._stops: list[tuple[int, bool]] = []  # signal, whether to workers

    def run(self) -> int:
        """Serve the coordinator until all is done; return 0 where it knows the result."""
        with self._loop, closing(self._connection):
            self._connection.attach(self._loop, self._receive, lambda connection: None)
            while self._order is None:
                self._wait()
                self._loop.signals.take()
                if self._end_requested:
                    return 0
                if self._connection.closed and self._order is None:
                    return 1

            with Processes(self._order["launch_id"]) as processes:
                self._start(processes, self._order)
                watch = GroupWatch(self._order["launch_id"], self._order["watched_ranks"])
                while processes.running:
                    self._step(processes, watch)
                if watch.ended_without_group(time.monotonic()):
                    self._connection.send({"copies": False})
                lost = self._connection.closed
                self._outputs.drain(_DRAIN_SECONDS, self._wait)
            self._outputs.drain(0.0, self._wait)
            self._connection.send({"done": True})
            self._wait_for_coordinator()
            return int(lost)

    def _receive(self, connection: LaunchConnection, message: Message) -> None:
        if "check" in message:
            self._check(message["check"])
        if "start" in message:
            self._order = message["start"]
        if "signal" in message:
            self._stops.append(message["signal"])
        if "end" in message:
            self._end_requested = True
        if "input" in message and self._input is not None:
            self._unwritten = message["input"].encode(errors="surrogateescape")
            if self._unwritten:
                self._loop.add(self._input, self._write_input)
                self._loop.set_events(self._input, selectors.EVENT_WRITE)
            else:
                self._close_input()

    def _check(self, check: Check) -> None:
        """Report whether the ranks can start here, and a port that rank 0 or torchrun may use."""
        problem = problem_with(check["folder"], check["script"], check["checksum"])
        self._port = ReservedPort()  # for as long as this process lives
        self._connection.send({"ready": Ready(problem=problem, port=self._port.port)})

    def _start(self, processes: Processes, order: StartOrder) -> None:
        same_host = order["host"] == socket.gethostname()
        stdin: bytes | int = b""
        if order["input"]:
            stdin, self._input = os.pipe()
            os.set_blocking(self._input, False)
            self._connection.send({"wants_input": True})
        start_on_host(
            order["processes"],
            rank_environment(order["environ"], os.environ, same_host=same_host),
            processes,
            self._outputs,
            output_dir=order["output_dir"],
            stdin=stdin,
        )
        if isinstance(stdin, int):
            os.close(stdin)

    def _write_input(self, events: int) -> None:
        """Write what the pipe takes; request more when it has taken everything."""
        assert self._input is not None
        try:
            self._unwritten = self._unwritten[os.write(self._input, self._unwritten) :]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more
            self._unwritten = b""
            self._loop.remove(self._input)
            self._close_input()
            return
        if not self._unwritten:
            self._loop.remove(self._input)
            self._connection.send({"wants_input": True})

    def _close_input(self) -> None:
        assert self._input is not None
        os.close(self._input)
        self._input = None

    def _step(self, processes: Processes, watch: GroupWatch) -> None:
        """Wait for something to happen and handle it."""
        now, reported = time.monotonic(), watch.groups
        next_look = watch.look(now)
        if watch.groups != reported:
            self._connection.send({"groups": list(watch.groups.items())})
        if watch.is_late(now):
            self._connection.send({"copies": True})
        self._wait(next_look, processes.kill_late(now), processes.pass_on_held())
        self._loop.signals.take()  # launch.py passes each stop on
        if self._end_requested or self._connection.closed:
            processes.end(time.monotonic())
        for number, to_workers in self._stops:
            processes.stop(number, to_workers=to_workers)
        self._stops.clear()
        for index, status in processes.ended():
            self._connection.send({"exit": (index, status)})

    def _wait(self, *timeouts: float | None) -> None:
        """Run the loop once, at most for the shortest timeout (seconds), and pass output on."""
        self._outputs.pause(self._connection.unsent_bytes >= _MAXIMUM_UNSENT_BYTES)
        self._loop.run_once(*timeouts, self._outputs.flush_partial_lines())

    def _send_output(self, stream: int, text: bytes, index: int) -> None:
        decoded = text.decode(errors="surrogateescape")
        self._connection.send({"output": (stream, decoded, index)})

    def _wait_for_coordinator(self) -> None:
        """Wait until the coordinator has everything: it closes the connection then."""
        limit = time.monotonic() + _SHUTDOWN_SECONDS
        while not self._connection.closed and (left := limit - time.monotonic()) > 0:
            self._loop.run_once(left)
            self._loop.signals.take()


def _secret() -> str:
    """Return what only processes of this job know.

    From the environment or the standard input that the coordinator has given, or PBS's own cookie.
    """
    for name in (SECRET_VARIABLE, "PBS_JOBCOOKIE"):
        if os.environ.get(name):
            return os.environ[name]
    return sys.stdin.readline().strip()


def main(arguments: Sequence[str]) -> int:
    """Run an agent. arguments: the coordinator's addresses, joined by commas; its port; the index
    of this host in the plan, or "rank" where a native launcher has numbered the agents.
    """
    addresses, port, index = arguments
    if index == "rank":
        from ...launchers.detect import detect

        index = str(detect().rank)
    secret = _secret()
    with CaughtSignals() as signals:
        reached = connect(addresses.split(","), int(port))
        if reached is None:
            print(
                f"launch.py: error: on {socket.gethostname()} launch.py cannot be reached at "
                f"{addresses} port {port}. Expected a network between the hosts of a job. Have "
                "the site open it",
                file=sys.stderr,
            )
            return 1
        connection, address = reached
        host = socket.gethostname()
        connection.send(
            {"hello": {"index": int(index), "token": secret, "reached": address, "host": host}}
        )
        return Agent(connection, signals).run()
