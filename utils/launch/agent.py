"""The process on each host that starts the ranks there, as the head of the launch tells it by a connection.

It ends them when the head says so or is gone. Not here: the head (control.py), what is started (plan.py).
"""
from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from .files import problem_with
from .gpus import MASKS
from .output import Output, open_file
from .ports import ReservedPort
from .processes import Processes, Signals
from .wire import Message, Wire, connect

SECRET = "DDPKIT_LAUNCH_SECRET"
_DRAIN_SECONDS = 1.0
_CAUGHT_TOO_SECONDS = 0.2  # in which a signal to all processes of a host comes after the head's word of it
_PARTIAL_LINE_SECONDS = 0.2
_MUCH = 1 << 22  # bytes that wait for the head: more output is left in the ranks' pipes
# Of these the host's own value counts, and none comes from another host.
_OWN = {"HOSTNAME", "HOST", "TMPDIR", "CUDA_DEVICE_ORDER", "PBS_NODENUM", "PBS_TASKNUM", "PBS_VNODENUM", "PBS_MOMPORT",
        "SLURMD_NODENAME", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_GTIDS", "SLURM_TASK_PID",
        "SLURM_TOPOLOGY_ADDR", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "XDG_RUNTIME_DIR", "XDG_SESSION_ID"}
_OWN_PREFIXES = ("SLINGSHOT_",)  # the network keys that PALS gives to what it starts
_OURS_IF_MISSING = {"TMPDIR", "CUDA_DEVICE_ORDER", "PBS_MOMPORT"}


def rank_environment(sent: Mapping[str, str], own: Mapping[str, str], *, same_host: bool) -> dict[str, str]:
    """The environment of this host's ranks: the head's, but for what the scheduler has set for this host."""
    environ = {name: value for name, value in sent.items()
               if name in _OURS_IF_MISSING or name not in _OWN and not name.startswith(_OWN_PREFIXES)}
    environ.update({name: value for name, value in own.items()
                    if name in _OWN or name in MASKS or name.startswith(_OWN_PREFIXES)})
    for name in MASKS:  # "0,1" may be right on every host, a list of GPU-<uuid> only on its own
        if not same_host and name not in own and environ.get(name, "").startswith(("GPU-", "MIG-")):
            del environ[name]
    return environ


class Agent:
    """The ranks of this host, led by the head at the other end of the wire."""

    def __init__(self, wire: Wire, signals: Signals) -> None:
        self._wire, self._signals = wire, signals
        self._port: ReservedPort | None = None
        self._outputs: list[Output] = []
        self._caught: dict[int, float] = {}  # signals that came to this process itself, and when
        self._to_pass: list[tuple[float, int, bool]] = []  # when to pass on which signal, and whether to the workers
        self._shielded = False  # whether the ranks are out of reach of what signals this whole host
        self._lost = False

    def run(self) -> int:
        """Serve the head until all is over. 0 when the head knows how it ended."""
        order: Message | None = None
        while order is None:
            self._wait(None)
            self._signals.take()
            for message in self._wire.receive():
                if "check" in message:
                    self._check(*message["check"])
                order = message.get("start", order)
                if "end" in message:
                    return 0
            if self._wire.closed and order is None:
                return 1
        self._shielded = bool(order["shield"])
        with Processes(order["launch"]) as processes:
            self._start(processes, order)
            while processes.running:
                self._step(processes)
            self._drain(_DRAIN_SECONDS)
        self._drain(0.0)
        self._wire.send({"done": True})
        return self._say_goodbye()

    def _check(self, folder: str, script: str, checksum: int | None) -> None:
        """Say whether the ranks can start here, and which port rank 0 or torchrun may use."""
        problem = problem_with(folder, script, checksum)
        self._port = ReservedPort()  # for as long as this process lives
        self._wire.send({"ready": {"problem": problem, "port": self._port.port}})

    def _start(self, processes: Processes, order: Message) -> None:
        environ = rank_environment(order["environ"], os.environ, same_host=order["host"] == socket.gethostname())
        for index, (words, variables) in enumerate(order["processes"]):
            file = open_file(order["output_dir"], variables["RANK"]) if order["output_dir"] else None
            streams = subprocess.PIPE if file is None else file
            child = processes.start(words, {**environ, **variables}, stdout=streams, stderr=streams, hold_signals=True,
                                    new_session=bool(order["shield"]))
            if file is not None:
                os.close(file)
            for stream, pipe in ((1, child.stdout), (2, child.stderr)) if child else ():
                if pipe is not None:
                    self._outputs.append(Output(pipe, stream, index))

    def _step(self, processes: Processes) -> None:
        late = [processes.kill_late(time.monotonic()), *(at - time.monotonic() for at, _, _ in self._to_pass)]
        self._wait(min((max(0.0, one) for one in late if one is not None), default=None))
        now = time.monotonic()
        for number in self._signals.take():
            self._caught[number] = now
        for message in self._wire.receive():
            if "signal" in message:
                self._to_pass.append((now + _CAUGHT_TOO_SECONDS, message["signal"], bool(message["to_workers"])))
            if "end" in message:
                processes.end(time.monotonic())
        if self._wire.closed and not self._lost:
            self._lost = True
            processes.end(time.monotonic())
        self._pass_stops(processes)
        for index, status in processes.ended():
            self._wire.send({"exit": [index, status]})

    def _pass_stops(self, processes: Processes) -> None:
        """Signal the ranks as the head said, unless whoever told the head has signalled all of this host's processes:
        PBS does so on a job's first host, Slurm with a step."""
        now = time.monotonic()
        due = [one for one in self._to_pass if one[0] <= now]
        self._to_pass = [one for one in self._to_pass if one[0] > now]
        for _, number, to_workers in due:
            if self._shielded or now - self._caught.get(number, -1e9) > 2.0:
                processes.signal(number, to_their_children=to_workers)

    def _wait(self, seconds: float | None) -> None:
        """Sleep until something happens, for at most so long, and pass output on."""
        if any(output.waits for output in self._outputs):
            seconds = min(_PARTIAL_LINE_SECONDS, seconds if seconds is not None else 1.0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            if not self._wire.closed:
                selector.register(self._wire, self._wire.events)
            if self._wire.unsent < _MUCH:
                for output in self._outputs:
                    selector.register(output, selectors.EVENT_READ)
            for key, events in selector.select(seconds):
                if key.fileobj is self._wire and events & selectors.EVENT_WRITE:
                    self._wire.flush()
                elif isinstance(key.fileobj, Output):
                    self._pass_on(key.fileobj)
        for output in self._outputs:
            self._send(output, output.rest(_PARTIAL_LINE_SECONDS))

    def _pass_on(self, output: Output) -> bool:
        """Send what a rank has written; False at its end."""
        text = output.read()
        if text is None:
            self._send(output, output.rest())
            self._outputs.remove(output)
            output.close()
            return False
        self._send(output, text)
        return True

    def _send(self, output: Output, text: bytes) -> None:
        if text:
            self._wire.send({"out": [output.stream, text.decode(errors="surrogateescape"), output.index]})

    def _drain(self, seconds: float) -> None:
        """Pass on what the ranks wrote last; what they left behind may hold their streams open."""
        limit = time.monotonic() + seconds
        while self._outputs and not self._wire.closed:
            self._wait(max(0.0, min(0.05, limit - time.monotonic())))
            if time.monotonic() >= limit:
                for output in list(self._outputs):
                    self._pass_on(output)
                break

    def _say_goodbye(self) -> int:
        """Wait until the head has everything; it closes the connection then."""
        limit = time.monotonic() + 10
        while not self._wire.closed and time.monotonic() < limit:
            self._wait(0.5)
            self._wire.receive()
        return int(self._lost)


def _secret() -> str:
    """What only processes of this job know: from the starter's environment or standard input, or PBS's own cookie."""
    if os.environ.get(SECRET):
        return os.environ[SECRET]
    if os.environ.get("PBS_JOBCOOKIE"):
        return os.environ["PBS_JOBCOOKIE"]
    return sys.stdin.readline().strip()


def main(arguments: Sequence[str]) -> int:
    """arguments: the head's addresses joined by commas, its port, the index of this host or "rank"."""
    addresses, port, index = arguments
    if index == "rank":  # one program has started the agents of all hosts and gave each a number
        from ..launchers import detect
        index = str(detect().rank)
    secret = _secret()
    with Signals() as signals:
        reached = connect(addresses.split(","), int(port))
        if reached is None:
            print(f"launch.py: {socket.gethostname()} cannot reach the head of the launch at {addresses} port {port}. "
                  "Expected a network between the hosts of a job: ask for it to be opened", file=sys.stderr)
            return 1
        wire, address = reached
        wire.send({"hello": int(index), "token": secret, "reached": address, "host": socket.gethostname()})
        try:
            return Agent(wire, signals).run()
        finally:
            wire.close()


def start_words(python: str, module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs main() of a module of this package with this Python: without site-packages, and wherever
    the package lies."""
    return [python, "-I", "-S", "-c", start_code(f"{module} import main; sys.exit(main(sys.argv[1:]))"), *arguments]


def start_code(what: str) -> str:
    """Code that imports from a module of this package, under whatever name and wherever the package lies."""
    root = os.path.abspath(__file__)
    for _ in range(__package__.count(".") + 2):
        root = os.path.dirname(root)
    return f"import sys; sys.path.insert(0, {root!r}); from {__package__}.{what}"
