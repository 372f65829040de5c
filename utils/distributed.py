"""setup_distributed(): launcher, rendezvous and device, then torch.distributed; returns Distributed.

environ -> Placement -> Rendezvous -> Distributed. After it nothing reads the environment for ranks.
"""
from __future__ import annotations

import atexit
import contextlib
import datetime
import glob
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from . import __version__, device, network, rollcall
from .launchers import LaunchError, Placement, detect
from .logging import get_logger, setup_logging
from .monitor import Monitor
from .rank_variables import set_variables, without_inherited
from .rendezvous import Rendezvous, agree
from .telephone import poll

_log = get_logger(__name__)
_Number = TypeVar("_Number", float, torch.Tensor)
START_UP_SECONDS = 100.0
_CLOSE_SECONDS = 20.0
_SLOWEST_SECONDS = 1800.0  # that the other ranks of an orderly end may take, for a last evaluation or save


@dataclass
class Distributed:
    """This process in the running job. A context manager: leaving it destroys the process group, also after an error.

    Collectives are torch.distributed's; the fields are what a training script needs to know.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int  # index of this host, in the order of the hosts' lowest ranks
    num_nodes: int
    launcher: str
    backend: str
    device: torch.device
    master_addr: str
    master_port: int
    _store: Store = field(repr=False)
    _monitor: Monitor | None = field(default=None, repr=False)
    _closed: bool = field(default=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone prints and saves."""
        return self.rank == 0

    @property
    def device_ids(self) -> list[int] | None:
        """For DistributedDataParallel(device_ids=...): this rank's GPU, None on CPU."""
        return None if self.device.index is None else [self.device.index]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(device_ids=self.device_ids)

    def all_reduce_mean(self, value: _Number) -> _Number:
        """The mean over all ranks of a number, or of each element of a tensor (which is not changed)."""
        if isinstance(value, torch.Tensor):
            total = value.detach().to(self.device, copy=True)
            dist.all_reduce(total)
            return (total / self.world_size).to(value.device)
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.world_size

    def close(self) -> None:
        """Destroy the process group; a second call does nothing.

        With GPUs this waits for all ranks to come here, as the end of NCCL waits for those of the same host, and one of
        them may still save. Else, and when a rank has failed, it never waits longer than 20 s.
        """
        self._close(orderly=True)

    def _close(self, orderly: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._leave(self._left("left normally"))
        if orderly and self.backend != "gloo" and self.world_size > 1:
            self._wait_for_all()
        self._store = HashStore()  # rank 0's store, and its port, end with the last reference to it
        if dist.is_initialized() and not _within(_CLOSE_SECONDS, dist.destroy_process_group):
            _log.error("the process group could not be destroyed within %.0f s: a collective is still waiting for "
                       "another rank. Ending this process", _CLOSE_SECONDS)
            _exit_now()
        _let_gloo_drop_tensors()

    def _wait_for_all(self) -> None:
        limit, pause = time.monotonic() + _SLOWEST_SECONDS, max(0.05, self.world_size / 5000)
        with contextlib.suppress(RuntimeError):  # the store ends with rank 0
            closing = self._store.add(_CLOSING, 1)
            while closing < self.world_size and time.monotonic() < limit and not self._store.check([_FAILED]):
                time.sleep(pause)
                closing = self._store.add(_CLOSING, 0)

    def __enter__(self) -> Distributed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is not None:
            self._report(error)
        self._close(orderly=error is None or isinstance(error, SystemExit) and error.code in _ORDERLY)

    def _report(self, error: BaseException) -> None:
        """Report on this rank why it stops: the first to fail shows its traceback, the others name the first.

        The connections are still open here, so that no other rank has noticed yet and this traceback comes first.
        """
        if isinstance(error, SystemExit) and error.code in _ORDERLY or getattr(error, _REPORTED, False):
            return
        with contextlib.suppress(AttributeError):  # an exception class with __slots__
            setattr(error, _REPORTED, True)
        what = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        me = f"rank {self.rank} on {socket.gethostname()}"
        kind = _peer_failure(error) if self.world_size > 1 else ""
        failure = f"{me} failed: {what}"
        first = "" if kind else failure
        if self._monitor is not None:
            first = self._monitor.query(kind) if kind else self._monitor.report(failure)
        with contextlib.suppress(RuntimeError):  # the store ends with rank 0
            self._store.set_timeout(datetime.timedelta(seconds=3))
            self._store.set(_FAILED, "")  # ranks that close wait for no other any more
        stops = f"{me} stops, because {first}" if first else (
            f"{me} stops: {what}. No rank reported a cause: look for the first message of the others")
        meant = isinstance(error, SystemExit | KeyboardInterrupt)  # its place in the code tells nothing
        known = what in first if not kind else first and _raised_by_torch(error)  # another rank shows the cause
        trace = "" if meant or first != failure and known else "".join(traceback.format_exception(error))
        sys.stderr.write(f"{trace}{failure if first == failure else stops}\n")
        sys.stderr.flush()
        _write_error_file(failure if first == failure else stops, root=first == failure)
        self._leave(failure if first == failure else "")

    def _leave(self, cause: str) -> None:
        if self._monitor is not None:
            self._monitor.leave(cause)

    def _left(self, how: str) -> str:
        """What the other ranks report if they still need this one, which has not failed."""
        entered = _entered_collectives()
        after = "" if entered is None else f" after {entered} collectives"
        return (f"rank {self.rank} on {socket.gethostname()} {how}{after}, and other ranks need it for more. The ranks "
                "have uneven work: give each the same number of steps (DistributedSampler, drop_last=True), or train "
                "under DistributedDataParallel.join()")


_ORDERLY = (None, 0, 75)  # 75 is EXIT_REQUEUE of preemption.py: saved, to go on later
_REPORTED, _FAILED, _CLOSING = "_ddpkit_reported", "ddpkit/failed", "ddpkit/closing"
# The messages of torch 2.13. gloo raises a plain RuntimeError: "[.../gloo/transport/tcp/pair.cc:553] Connection closed
# by peer [10.0.0.2]:57993". NCCL and the store raise DistError: "... Watchdog caught collective operation timeout".
_OF_TORCH = (r"gloo/[\w./-]+:\d+\] |\AOperation timed out!\Z|monitoredBarrier (after|in) \d+ ?ms"
             r"|lost the connection to rank 0's store|the store that rank 0 or torchrun serves is gone")
_PEER_FAILURES = {
    "lost": r"(closed|reset) by (remote )?peer|Broken pipe|Connection (was likely )?closed|remote process exited"
            r"|ncclRemoteError|lost the connection|store that rank 0 or torchrun serves is gone",
    "timeout": r"[Tt]im(e|ed|ing) ?out|monitoredBarrier"}
_TORCH_AND_KIT = tuple(os.path.join(os.path.dirname(os.path.abspath(path)), "") for path in (torch.__file__, __file__))


def _peer_failure(error: BaseException) -> str:
    """Return "lost" or "timeout" for an error that torch raises because of another rank, "" for any other error."""
    text = str(error)
    if not (isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and re.search(_OF_TORCH, text)):
        return ""
    return next((kind for kind, pattern in _PEER_FAILURES.items() if re.search(pattern, text)), "")


def _raised_by_torch(error: BaseException) -> bool:
    """Whether the innermost frame is in torch or in this package, as for a collective."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.abspath(frames[-1].filename).startswith(_TORCH_AND_KIT)


def setup_distributed(backend: str | None = None, *, timeout: float = START_UP_SECONDS, launcher: str | None = None,
                      collective_timeout: float | None = None) -> Distributed:
    """Join this process to the launch that started it, whatever launcher that was, and pin its GPU.

    backend: nccl, xccl or gloo; None takes the one of the accelerator that torch sees, gloo on CPU (gloo trains on the
    CPU also where there are GPUs). timeout: seconds that starting may take. launcher: a name to believe instead of
    finding out (see utils/launchers.py). collective_timeout: seconds for a collective, None for torch's default:
    30 minutes with gloo, 10 with NCCL. A rank that does not enter it by then is named on the others.

    With more than one rank it sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR
    and MASTER_PORT in this process, for libraries that read them. A program that this rank starts is no rank by them.

    Raises LaunchError when the ranks cannot start together: on every rank, with the cause. ValueError for a bad
    argument, RuntimeError when torch.distributed is initialised already.
    """
    for name, seconds in (("timeout", timeout), ("collective_timeout", collective_timeout)):
        if seconds is not None and not 0 < seconds < 1e6:
            raise ValueError(f"{name} is {seconds!r}; expected seconds above 0")
    if backend is not None and backend not in device.BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected None or one of {', '.join(device.BACKENDS)}")
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already: call setup_distributed() once, and not after "
                           "init_process_group()")
    deadline = time.monotonic() + timeout
    try:
        placement = detect(launcher=launcher)
        setup_logging(placement.rank, placement.world_size)
        with _watchdog(placement, timeout):
            job = _start(placement, backend, deadline, collective_timeout)
    except LaunchError as error:
        _print_without_traceback(error)
        raise
    if job.world_size > 1:
        _set_variables(job)
    atexit.register(_close_at_exit, job)
    _report_uncaught(job)
    return job


def _start(placement: Placement, backend: str | None, deadline: float, collective_timeout: float | None) -> Distributed:
    asked, card = backend, _introduce(placement, backend)
    met, store = _meet(placement, card, deadline)
    reply, backend = met.reply, str(card["backend"])
    own = device.numbered(backend, reply["device"])
    device.pin(own)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(reply["threads"])
        os.environ["OMP_NUM_THREADS"] = str(reply["threads"])  # for what this process starts
    if backend == "gloo":
        _choose_gloo_interface(reply["num_nodes"], met)
    timeout = None if collective_timeout is None else datetime.timedelta(seconds=collective_timeout)
    try:
        # The prefix keeps the keys apart from those of a library that calls init_process_group() by env:// later.
        dist.init_process_group(backend, store=PrefixStore("ddpkit/group", store), rank=placement.rank,
                                world_size=placement.world_size, timeout=timeout,
                                device_id=None if own.type == "cpu" else own)
    except (RuntimeError, ValueError) as error:
        if placement.world_size == 1:
            raise LaunchError(f"{backend} cannot start on {own}: {error}") from error
        cause = met.monitor.cause(2) if met.monitor else ""
        raise LaunchError(cause or
            f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}: all ranks met, but "
            f"{backend} could not connect them: {' '.join(str(error).split())[:600]}. Another rank may have died since "
            f"(look for its message); else check GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')!r} "
            f"NCCL_SOCKET_IFNAME={os.environ.get('NCCL_SOCKET_IFNAME', '')!r} and firewalls between hosts") from error
    if met.monitor:
        met.monitor.position = _entered_collectives
        met.monitor.started()
    if placement.rank == 0:
        ranks, hosts = placement.world_size, reply["num_nodes"]
        _log.info("%d rank%s on %d host%s by %s, backend %s%s\n%s", ranks, "s" * (ranks > 1), hosts, "s" * (hosts > 1),
                  placement.launcher, backend,
                  f", rank 0 at {met.master_addr}:{met.master_port}" if ranks > 1 else "", reply["table"])
        idle = device.unused() if asked is None and backend == "gloo" else ""
        for note in [*reply["notes"], *met.notes, *filter(None, [idle])]:
            _log.warning("%s", note)
    return Distributed(placement.rank, placement.world_size, reply["local_rank"], reply["local_world_size"],
                       reply["node_rank"], reply["num_nodes"], placement.launcher, backend, own,
                       met.master_addr, met.master_port, PrefixStore("job", store), met.monitor)


def _set_variables(job: Distributed) -> None:
    """Set the variables of torchrun's workers for the libraries that read them; torchrun's own stay as they are."""
    values = {"RANK": job.rank, "WORLD_SIZE": job.world_size, "LOCAL_RANK": job.local_rank,
              "LOCAL_WORLD_SIZE": job.local_world_size, "NODE_RANK": job.node_rank, "GROUP_RANK": job.node_rank,
              "MASTER_ADDR": job.master_addr, "MASTER_PORT": job.master_port}
    set_variables({name: os.environ[name] if job.launcher == "torchrun" and os.environ.get(name) else str(value)
                   for name, value in values.items()})


def _introduce(placement: Placement, backend: str | None) -> rollcall.Card:
    """This rank's card. What fails here goes on it, so that every rank hears of it."""
    wanted, devices, error = backend or "", [], ""
    try:
        wanted = device.choose_backend(backend)
        devices = device.visible(wanted)
    except (LaunchError, RuntimeError) as problem:
        error = str(problem)
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "") if wanted == "gloo" else ""
    missing = network.missing_interfaces(interfaces.split(",")) if interfaces else []
    if missing:
        present = ", ".join(name for _, name in socket.if_nameindex())
        error = (f"GLOO_SOCKET_IFNAME={interfaces}, but {socket.gethostname()} has no interface {missing[0]}; it has "
                 f"{present}. Unset it, or name one of these")
    card = rollcall.card(placement, backend=wanted, devices=devices, mask=device.masks(), torch=str(torch.__version__),
                         kit=__version__, gloo=interfaces, gloo_loopback="lo" in interfaces.split(","))
    return {**card, "error": error} if error else card


def _meet(placement: Placement, card: rollcall.Card, deadline: float) -> tuple[Rendezvous, Store]:
    """The roll call of all ranks, and the key-value store that they share after it."""
    left = deadline - time.monotonic()
    if placement.world_size == 1:
        error, replies = rollcall.judge([card])
        if error or "error" in card:
            raise LaunchError(error or card["error"])
        return Rendezvous("127.0.0.1", 0, replies[0], "127.0.0.1", "127.0.0.1"), HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and placement.launcher == "torchrun":
        agent = _agent_store(left)
        met = agree(placement, card, rollcall.judge, timeout=deadline - time.monotonic(),
                    telephone=_AgentStore(agent, placement.world_size),
                    environ=without_inherited(os.environ))
        if met.listener is not None:
            met.listener.close()
        place = replace(met, master_addr=os.environ["MASTER_ADDR"], master_port=int(os.environ["MASTER_PORT"]))
        return place, PrefixStore(f"ddpkit/{met.token}", agent)
    met = agree(placement, card, rollcall.judge, timeout=left, environ=without_inherited(os.environ))
    limit = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        # multi_tenant: init_process_group() by env:// in this process shares rank 0's store instead of EADDRINUSE.
        store = TCPStore(met.reach_addr, met.master_port, placement.world_size, is_master=placement.rank == 0,
                              timeout=limit, wait_for_workers=False, multi_tenant=True,
                              master_listen_fd=None if met.listener is None else met.listener.detach())
    except RuntimeError as error:
        raise LaunchError(f"rank {placement.rank} on {socket.gethostname()}: the key-value store of rank 0 at "
                          f"{met.reach_addr}:{met.master_port} is gone: {str(error).splitlines()[0]}. "
                          "Look for rank 0's own message") from error
    return met, store


def _agent_store(seconds: float) -> Store:
    """A client of the store that torchrun's agent runs at MASTER_ADDR, MASTER_PORT."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    why, limit = "", time.monotonic() + seconds

    def reached() -> str | None:
        nonlocal why
        try:
            socket.create_connection((address, int(port)), timeout=3).close()
        except (OSError, ValueError) as error:
            why = str(error)
            return None
        return "yes"

    if not poll(reached, seconds):
        raise LaunchError(f"torchrun's store at MASTER_ADDR={address!r} MASTER_PORT={port!r} cannot be reached from "
                          f"{socket.gethostname()} for {seconds:.0f} s: {why}. Give torchrun a --rdzv-endpoint that "
                          "all hosts can reach")
    return TCPStore(address, int(port), is_master=False, wait_for_workers=False,
                    timeout=datetime.timedelta(seconds=max(1.0, limit - time.monotonic())))


class _AgentStore:
    """torchrun's store as the name service of utils/telephone.py.

    The store outlives the workers, and nothing in a worker's environment identifies the attempt: each agent counts
    TORCHELASTIC_RESTART_COUNT for itself. So rank 0 of each attempt overwrites the address. A rank that reads the
    address of an earlier attempt finds nobody there who knows the token, and reads again.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store, self._key = store, f"ddpkit/address/{world_size}"

    def publish(self, text: str, seconds: float) -> None:
        self._store.set(self._key, text)

    def look_up(self, seconds: float) -> str | None:
        def published() -> str | None:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None

        return poll(published, seconds)


def _choose_gloo_interface(num_nodes: int, met: Rendezvous) -> None:
    """Name the interface for gloo where it would take a wrong one: it uses what the host name resolves to."""
    if num_nodes == 1 or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    address = met.own_addr
    if network.is_loopback(address):  # this is rank 0's host, reached by a name that means the host itself
        outward = network.own_addresses()
        address = met.master_addr if met.master_addr in outward else (outward or [address])[0]
    if network.default_gloo_address() != address:
        interface = network.interface_of(address)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


@contextlib.contextmanager
def _watchdog(placement: Placement, timeout: float) -> Iterator[None]:
    """End this process when starting takes longer than `timeout` plus a tenth: native code may wait for ever."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(timeout * 1.1 + 1):
            sys.stderr.write(f"[rank {placement.rank}/{placement.world_size} {socket.gethostname()}] starting did not "
                             f"end within {timeout:.0f} s. The main thread is here:\n")
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            sys.stderr.write("".join(traceback.format_stack(main)) if main else "")
            sys.stderr.write("Another rank died or hangs (look for its message), or the hosts cannot reach each other "
                             "on the chosen network interface\n")
            _exit_now()

    threading.Thread(target=watch, daemon=True, name="start-up watchdog").start()
    try:
        yield
    finally:
        done.set()


def _within(seconds: float, action: Callable[[], None]) -> bool:
    """Run `action` in a thread; whether it ended in time. Its exception is logged, not raised."""
    def run() -> None:
        try:
            action()
        except (RuntimeError, ValueError) as error:
            _log.warning("destroying the process group: %s", error)

    thread = threading.Thread(target=run, daemon=True, name="close")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _let_gloo_drop_tensors() -> None:
    """Wait until no thread of gloo is at work any more: some milliseconds, half a second at most. Linux only.

    When a collective has ended, a thread of gloo drops the tensor, and needs Python's lock if it is the last to hold
    it. Where the interpreter is ending by then, the process is aborted ("terminate called without an active
    exception"). That thread lives as long as a DistributedDataParallel holds the process group.
    """
    limit, quiet = time.monotonic() + 0.5, 0
    while quiet < 3 and time.monotonic() < limit:
        time.sleep(0.002)  # without Python's lock
        quiet = 0 if "R" in _gloo_threads() else quiet + 1


def _gloo_threads() -> list[str]:
    """The states of the threads that make gloo's collectives: R runs, S sleeps (proc_pid_stat(5))."""
    states = []
    for path in glob.iglob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().rpartition(")")
            if name.endswith("gloo_runloop"):
                states.append(rest.split()[0])
    return states


def _print_without_traceback(failure: LaunchError) -> None:
    """If nobody catches this error, its message alone is printed, and on one rank only where all ranks have it."""
    message = f"LaunchError: {failure}"
    if failure.reported_by_rank_0:
        message = f"{socket.gethostname()} (pid {os.getpid()}): this rank does not start. Rank 0 reports the cause"
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is failure:
            _write_error_file(str(failure), root=not failure.reported_by_rank_0)
            sys.stderr.write(f"{message}\n")
        else:
            usual(kind, error, trace)

    sys.excepthook = hook


def _write_error_file(cause: str, *, root: bool) -> None:
    """Give torchrun's agent the cause: it takes the earliest of its workers for the root cause.

    A worker that was killed has no file, and the time at which the agent saw it: a victim's time is later than that.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = {"message": cause, "extraInfo": {"py_callstack": cause,
                                               "timestamp": str(int(time.time()) + (0 if root else 60))}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def _entered_collectives() -> int | None:
    """How many collectives of the default group this rank has entered; None where torch does not count them.

    Not public, but the only count that the backends keep themselves, also of what DistributedDataParallel reduces.
    """
    try:
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, ValueError):
        return None


def _exit_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _close_at_exit(job: Distributed) -> None:
    """Without a with statement sys.exit() ends this rank unseen: leave word for those who still wait for it."""
    if not job._closed:
        job._leave(job._left("ended its program (its last line, or sys.exit())"))
    if job.backend == "gloo":
        job._close(orderly=False)  # NCCL's end might wait for ranks that are still at work; the process's own does not


def _report_uncaught(job: Distributed) -> None:
    """Without a with statement an uncaught exception is reported the same way; a reported one is not printed twice."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not job._closed:
            job._report(error)
        if not getattr(error, _REPORTED, False):
            usual(kind, error, trace)

    sys.excepthook = hook
