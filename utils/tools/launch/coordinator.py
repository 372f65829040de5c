"""Start agents, send them work, collect exit statuses: the coordinator of a launch by agents."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from contextlib import ExitStack

from ...channel import Channel, Message
from ...host import network
from ...host.trust import NotTrusted, may_trust
from ...job.notation import same_host
from ...launch_protocol import REPORT
from . import agent
from .bootstrap import module_command
from .host_ranks import host_processes
from .host_readiness import checksum_of
from .launch_connection import Launch, LaunchServer, address_of_rank_0, peer_address
from .launch_plan import index_of
from .native_launch import more_open_files, start_command
from .nested import note_groups
from .outcome import describe_status
from .rank_output import labelled, write_output
from .stopped_ranks import hang_limit

START_SECONDS = 120.0  # time limit for all agents to connect
END_SECONDS = 20.0  # time limit for agents to end everything; they need less
_STARTER_SECONDS = 3.0  # limit for commands that started agents to end by themselves
_LOST_SECONDS = 2.0  # seconds without TCP acknowledgement: the host at fault counts as lost
_SHOWN = 8  # hosts in a message


class Coordinator(LaunchServer):
    """One launch by agents, from the start of the agents to the shutdown of the last one.

    A client has the index of its host in the plan.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch, self._plan, self._result = launch, launch.plan, launch.result
        self._processes = launch.processes
        super().__init__(launch.notices, launch.loop)
        self._starters: list[tuple[int, ...]] = []  # hosts of each command that starts agents
        self._hellos: dict[Channel, Message] = {}  # first message of each agent
        self._ready: dict[int, int] = {}  # host that can start its ranks -> port reserved there
        self._ranks_started = False
        self._running = launch.plan.world_size
        self._done: set[int] = set()  # hosts whose agent is done or lost
        self._end_sent_at: float | None = None

    def run(self) -> None:
        """Start the agents, and run until every one is done or lost."""
        self._start_agents()
        with more_open_files(2 * len(self._plan.hosts) + 64):
            self._serve()
        self.close()
        self._wait_for_starters()

    def _serve(self) -> None:
        """Handle what happens until every agent is done or lost."""
        limit = time.monotonic() + START_SECONDS
        while len(self._done) < len(self._plan.hosts):
            # Before all ranks run, and once something has failed, deadlines are near.
            calm = self._ranks_started and self._result.failed_at is None
            self._loop.run_once(10.0 if calm else 0.2)
            now = time.monotonic()
            for number in self._launch.loop.take_signals():
                self._stop(number, now)
            self._check_starters(now)
            if not self._ranks_started and now > limit:
                missing = [
                    host for host in range(len(self._plan.hosts)) if host not in self.clients
                ]
                self._result.fail(
                    f"no agent has connected from {self._missing_hosts()} within "
                    f"{START_SECONDS:.0f} s. Expected {self._plan.method.name} to start one there. "
                    f"Check these hosts, and that they can reach {socket.gethostname()} by TCP",
                    now,
                    host=self._plan.hosts[missing[0]] if len(missing) == 1 else None,
                )
            self._end_if_failed(now)

    def _wait_for_starters(self) -> None:
        """Let the commands that started agents end by themselves: they may have output left."""
        waits = (
            self._ranks_started and not self._result.lost_hosts
        )  # the command for a lost host would not end
        limit = time.monotonic() + (_STARTER_SECONDS if waits else 0)
        while self._processes.running and time.monotonic() < limit:
            self._loop.run_once(0.1)
            self._launch.loop.take_signals()
            self._processes.ended()
        if self._plan.method.kill_when_done:
            self._processes.signal(signal.SIGKILL)

    # Starting

    def _start_agents(self) -> None:
        notices, path = self._notices, ""
        if not self._plan.method.passes_secret:
            path, problems = _write_secret(notices.launch_secret, self._launch.files)
            if not path:
                self._result.fail(
                    "no file with the secret of this launch for its agents can be made: "
                    f"{'; '.join(problems)}. Expected your home folder, or the working folder, to "
                    f"be one that all hosts share; {agent.REMEDY}",
                    time.monotonic(),
                )
                self._done.update(range(len(self._plan.hosts)))
                return

        def agent_words(index: str) -> list[str]:
            arguments = [notices.addresses, str(notices.port), index, path]
            return module_command(self._plan.python, "agent", arguments)

        secret = {agent.SECRET_VARIABLE: notices.launch_secret}
        # Sent through ssh, which encrypts it. Others can read what the connection to an agent
        # carries.
        environ = json.dumps(self._agent_environment()) if self._plan.method.passes_secret else ""
        for start in self._plan.method.agent_starts(self._plan, agent_words, secret, environ):
            self._starters.append(start.hosts)
            if self._plan.method.is_native_launcher:
                start_command(self._launch, start.words, start.environ)
            else:
                self._processes.start(start.words, start.environ, stdin=start.stdin)

    def _agent_environment(self) -> dict[str, str]:
        """Return the variables that agents give to their ranks."""
        environ = dict(self._plan.method.agent_environment(self._plan.environ))
        # Others may read what is sent: agents know the cookie, and derive the secret of the ranks.
        environ.pop("PBS_JOBCOOKIE", None)
        environ[REPORT] = f"{self._notices.addresses}/{self._notices.port}/"
        return environ

    def _missing_hosts(self, hosts: tuple[int, ...] | None = None) -> str:
        """Name hosts without a connected agent. hosts: indices to check; None for all."""
        indices = range(len(self._plan.hosts)) if hosts is None else hosts
        names = [self._plan.hosts[index] for index in indices if index not in self.clients]
        more = f" and {len(names) - _SHOWN} more hosts" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more

    def _check_starters(self, now: float) -> None:
        """Fail if a command has ended before its agents have connected."""
        for index, status in self._processes.ended():
            hosts = self._starters[index]
            if missing := self._missing_hosts(hosts):
                program = os.path.basename(self._plan.method.path)
                host = self._plan.hosts[hosts[0]] if len(hosts) == 1 else None
                self._result.fail(
                    f"{program} {describe_status(status)} before an agent has connected from "
                    f"{missing}. See its message above, and check that host",
                    now,
                    host=host,
                )
                self._done.update(host for host in hosts if host not in self.clients)

    def identify(self, peer: Channel, message: Message) -> int | None:
        if message["kind"] != "agent":
            return None
        index = message["index"]
        if index >= len(self._plan.hosts) or index in self.clients:
            return None
        self._hellos[peer] = message
        return int(index)

    def identified(self, index: int) -> None:
        if len(self.clients) < len(self._plan.hosts):
            return
        if len(self._starters) < len(self._plan.hosts):  # a native launcher has numbered the agents
            self._order_by_host()
        script = self._plan.script
        checksum = checksum_of(script) if script else None
        ports = network.listen_ports()
        at_ends = [ports[0], ports[-1]]
        check = {"folder": os.getcwd(), "script": script, "checksum": checksum, "ports": at_ends}
        self.send_to_all({"kind": "check", **check})

    def _order_by_host(self) -> None:
        """Give each agent the index of its host, if all hosts have names of the plan."""
        planned = self._plan.hosts
        indices = {peer: index_of(hello["host"], planned) for peer, hello in self._hellos.items()}
        if None in indices.values():
            return
        found = Counter(indices.values())
        twice = next((host for host, count in found.items() if count > 1), None)
        if twice is not None:
            self._result.fail(
                f"{self._plan.method.name} has started {found[twice]} agents on "
                f"{planned[twice]}. Expected one on each of {', '.join(planned[:_SHOWN])}. Check "
                "what else decides where it starts processes",
                time.monotonic(),
            )
            return
        self.renumber({index: peer for peer, index in indices.items() if index is not None})

    def _note_ready(self, index: int, problem: str, port: int) -> None:
        if self._ranks_started or self._end_sent_at is not None:
            return
        if problem:
            self._result.fail(
                f"on {self._plan.hosts[index]} {problem}. Expected the same folders and "
                "files on every host. Use a file system that all hosts share",
                time.monotonic(),
                host=self._plan.hosts[index],
            )
            return
        self._ready[index] = port
        if len(self._ready) == len(self._plan.hosts) and self._result.failed_at is None:
            self._start_ranks()

    def _start_ranks(self) -> None:
        self._ranks_started = True
        plan = self._plan
        peers = [self.clients[index] for index in range(len(plan.hosts))]
        addresses = [peer_address(peer) for peer in peers]
        own = network.local_addresses()
        others = zip(peers, addresses, strict=True)
        reached = [self._hellos[peer]["reached"] for peer, address in others if address not in own]
        address = address_of_rank_0(addresses[0], reached, own)

        environ = self._agent_environment()
        torchrun = plan.options.torchrun
        for index, peer in enumerate(peers):
            order = {
                "launch_id": f"{self._launch.id}.{index}",
                "host": socket.gethostname(),
                "environ": None if self._hellos[peer].get("has_environ") else environ,
                "output_dir": "" if torchrun else plan.options.output_dir,
                "watched_ranks": plan.ranks[index] if plan.is_watched else 0,
                "hang_limit": 0.0 if torchrun else hang_limit(os.environ),
                "processes": host_processes(
                    plan, index, address, str(self._ready[0]), addresses[index]
                ),
            }
            peer.send({"kind": "start", **order})

    # Running

    def handle(self, index: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "ready":
            self._note_ready(index, message["problem"], message["port"])
        elif kind == "output":
            written = message["text"].encode(errors="surrogateescape")
            if self._plan.options.label and not self._plan.options.torchrun:
                written = labelled(written, self._plan.first_rank(index) + message["process"])
            write_output(message["stream"], written)
        elif kind == "exit":
            self._note_exit(index, message["process"], message["status"])
        elif kind == "done":
            self._done.add(index)
        elif kind == "stopped":
            rank, host = self._plan.first_rank(index) + message["process"], self._plan.hosts[index]
            self._result.rank_stopped(
                rank, host, message["pid"], message["why"], message["seconds"], time.monotonic()
            )
        elif kind == "ignored":
            first = self._plan.first_rank(index)
            self.note_ignored([first + process for process in message["processes"]])
        elif text := note_groups(message, self._plan, self._result, of_rank_0=index == 0):
            self._result.fail(text, time.monotonic())

    def _note_exit(self, index: int, local_rank: int, status: int) -> None:
        host, rank = self._plan.hosts[index], None
        if self._plan.options.torchrun:
            self._running -= self._plan.ranks[index]
            who = f"torchrun on {host}"
        else:
            self._running -= 1
            rank = self._plan.first_rank(index) + local_rank
            who = f"rank {rank} on {host}"
        others = self._running > 0
        self._result.process_ended(
            who, status, time.monotonic(), others=others, rank=rank, host=host
        )

    def client_lost(self, index: int) -> None:
        self._note_lost(index, self.clients[index].host_lost)

    def _note_lost(self, index: int, host_lost: bool) -> None:
        """Note that an agent is lost. host_lost: whether its host is lost, too."""
        if index not in self._done:
            self._done.add(index)
            host, now = self._plan.hosts[index], time.monotonic()
            what = "the host or its network" if host_lost else "the agent there"
            text = f"the connection to {host} was lost: {what} has failed"
            note = self._result.host_lost if host_lost else self._result.launcher_gone
            note(host, text, now)
            self._result.failed_at = self._result.failed_at or now

    # Ending

    def _stop(self, number: int, now: float) -> None:
        """Pass a stop signal on to the ranks, or end everything."""
        if self._result.is_last_stop(number, now) or not self._ranks_started:
            self._result.end_now(number, now)
            return
        to_workers = self._plan.options.torchrun
        self.send_to_all({"kind": "signal", "number": number, "to_workers": to_workers})

    def _end_if_failed(self, now: float) -> None:
        due = self._result.end_at
        if due is not None and self._end_sent_at is None:
            if now >= due or not self._ranks_started:
                self._end_sent_at = now
                self.send_to_all({"kind": "end"})
        if self._end_sent_at is None:
            return
        first = self._notices.first_cause
        if first is not None and now > self._end_sent_at + _LOST_SECONDS:
            for index, peer in self.clients.items():
                of_first = first.host and same_host(self._plan.hosts[index], first.host)
                if of_first and peer.is_unacknowledged():
                    self._note_lost(index, host_lost=True)
        # Agents that have not connected are ended together with the command that starts them.
        late = now > self._end_sent_at + END_SECONDS
        if late or not self._ranks_started:
            for host, peer in self.clients.items():
                if host not in self._done and peer.is_unacknowledged():
                    self._note_lost(host, host_lost=True)
            self._done.update(range(len(self._plan.hosts)))


def _write_secret(secret: str, files: ExitStack) -> tuple[str, list[str]]:
    """Write a secret to a private file; return its path, or "" and why each folder failed.

    The file is removed when the launch ends. The home folder comes first: all hosts share it, while
    the working folder may be /tmp.
    """
    problems: list[str] = []
    for folder in (os.path.expanduser("~"), os.getcwd()):
        name = f".ddpkit-{os.urandom(6).hex()}"
        try:
            above = may_trust(folder, "it has to be yours alone", is_parent=True)
            files.callback(os.close, above)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(name, flags, 0o600, dir_fd=above)
            files.callback(os.unlink, name, dir_fd=above)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secret)
            return os.path.join(folder, name), problems
        except NotTrusted as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    return "", problems
