"""Start torch.distributed in this process, whatever launcher started it: setup_distributed().

Start reading here. No step reads ranks from the environment again after the first:

    find_launcher()     finds the launcher and this process's rank
    report_rank()       collects this host's devices and versions for rank 0
    find_rank_0()       sends the report; rank 0 checks all, and assigns devices and cores
    watch_ranks()       starts a thread that notices when another rank ends
    use_assignment()    makes the assigned GPU current, binds to the assigned cores
    connect_ranks()     opens the store of all ranks; torch connects them
    Distributed         object for the training script; closing it ends this rank's part
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from . import __version__
from .errors import LaunchError
from .host import device, process
from .host.cores import bind_process
from .host.masks import set_masks
from .launch_protocol import HANG_TIMEOUT, STAGED, check_effects, may_have, notice_after
from .launchers.detect import Detection, find_launcher
from .launchers.launcher import Launcher, Placement
from .launchers.rank_variables import (
    LAUNCH_RANK,
    set_threads,
    set_variables,
    without_set_threads,
)
from .log import get_logger, setup_logging
from .monitor.counts import entered_collectives, group_timeout, total_collectives
from .monitor.monitor import Monitor, OwnRank
from .monitor.shutdown import (
    Shutdown,
    connection_failure,
    print_without_traceback,
    start_up_time_out,
)
from .ranges import parse_ranges
from .startup.address import Rendezvous, agree
from .startup.exchange import host_and_pid
from .startup.reports import RankReport, make_report
from .startup.store import AgentStore, agent_store, open_store
from .training_hooks import TrainingHooks

if TYPE_CHECKING:
    from .monitor.hangs.hang_watch import HangWatch
    from .monitor.hangs.positions import Collective, Group

CHECK_TRAINING = "DDPKIT_CHECK_TRAINING"  # "0": off; "error": a problem ends the training
START_UP_SECONDS = 100.0
_LONG_START_SECONDS = 10.0  # seconds; a longer start is reported even on one host
_OLDEST_TORCH = (2, 8)  # older: the store cannot take over a listening socket
_log = get_logger(__name__)
_Number = TypeVar("_Number", float, torch.Tensor)
_jobs = 0  # number of jobs that this process has joined


class StartTimes(NamedTuple):
    """Seconds that the start of this process has taken, in consecutive parts.

    staging: `ddpkit launch --stage`, on this host and before. imports: Python, until
    setup_distributed() was called. exchange: until rank 0 had the reports of all ranks.
    process_group: until torch had connected them.
    """

    staging: float
    imports: float
    exchange: float
    process_group: float

    def __str__(self) -> str:
        parts = " ".join(
            f"{name.replace('_', ' ')} {seconds:.1f}," for name, seconds in self._asdict().items()
        )
        parts = parts if self.staging else parts.partition(", ")[2]
        return f"started in {sum(self):.1f} s: {parts.rstrip(',')}"


@dataclass
class Distributed:
    """This process in the running job.

    A context manager: leaving it destroys the process group, also after an error. Use
    torch.distributed for collectives; the fields tell a training script its place in the job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int  # index of this host; hosts are in the order of their lowest ranks
    num_nodes: int
    launcher: str
    backend: str
    device: torch.device
    master_addr: str
    master_port: int
    start_times: StartTimes = field(repr=False)
    _shutdown: Shutdown = field(repr=False)
    _reported_progress: int = field(default=0, init=False, repr=False)
    _hooks: TrainingHooks | None = field(default=None, init=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone prints and calls torch.save()."""
        return self.rank == 0

    @property
    def device_ids(self) -> list[int] | None:
        """Argument of DistributedDataParallel(device_ids=...): this rank's GPU; None on the CPU."""
        return None if self.device.index is None else [self.device.index]

    @property
    def store(self) -> Store:
        """The key-value store of all ranks, until this rank closes."""
        return self._shutdown.store

    def report_progress(self) -> None:
        """Show that this rank works while others wait for it, as in an evaluation on rank 0 only.

        Call it at least once every hang_timeout. It costs nothing. A rank that works without it is
        reported as busy, and the job ends after three times hang_timeout.
        """
        self._reported_progress += 1

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(device_ids=self.device_ids)

    def all_reduce_mean(self, value: _Number) -> _Number:
        """Return the mean over all ranks of a number, or of each element of a tensor.

        The tensor is not changed. The result is on its device.
        """
        if isinstance(value, torch.Tensor):
            total = value.detach().to(self.device, copy=True)
            dist.all_reduce(total)
            return (total / self.world_size).to(value.device)
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.world_size

    def close(self) -> None:
        """Destroy the process group; a second call does nothing.

        With GPUs this waits until all ranks close: NCCL's shutdown waits for the ranks of the same
        host, and one of them may still save. Otherwise, and if a rank has failed, it waits at most
        20 s.
        """
        if self._hooks is not None:
            self._hooks.close()
        self._shutdown.close()

    def __enter__(self) -> Distributed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hooks is not None:
            self._hooks.close(orderly=error is None or isinstance(error, SystemExit))
        self._shutdown.exit(error)


def setup_distributed(
    backend: str | None = None,
    *,
    timeout: float = START_UP_SECONDS,
    launcher: str | None = None,
    collective_timeout: float | None = None,
    hang_timeout: float | Literal["auto"] | None = "auto",
    bind: Literal["auto", False] = "auto",
    check_training: bool | Literal["error"] = True,
) -> Distributed:
    """Join this process to the launch that started it, pin its GPU, and bind it to nearby cores.

    Returns when torch has connected all ranks.

    backend: nccl, xccl or gloo. None: the backend of the accelerator that torch sees, or gloo for
        the CPU. gloo trains on the CPU even if there are GPUs.
    timeout: seconds until an unfinished start is an error.
    launcher: use this launcher and skip detection. `python -m utils.launchers` explains detection.
    collective_timeout: seconds for a collective; then the other ranks name the rank that did not
        enter it. None: torch's default, 30 minutes with gloo, 10 with NCCL.
    hang_timeout: seconds without progress until a job that hangs ends: every rank writes its
        stacks and last collectives to a file, and rank 0 names the ranks that the others wait
        for. Progress is a collective that any rank enters, or Distributed.report_progress(). A
        rank that works while the others wait is reported as busy, and the job ends after three
        times as long. "auto": ends the job shortly before torch's own time limit would, 30 s
        before it for limits from five minutes on; a pause in which no rank waits in a
        collective ends nothing. 0 or None: only torch ends such a job. Pass the same on all
        ranks. DDPKIT_HANG_TIMEOUT, which `ddpkit launch --hang-timeout` sets, replaces this.
    bind: "auto" binds this process to its share of the cores, near its GPU. False keeps the
        launcher's cores. Pass the same on all ranks.
    check_training: report a training that goes wrong without an error: ranks whose parameters
        differ, or that train on the same data. "error", or DDPKIT_CHECK_TRAINING=error, also
        ends the training, with TrainingError. Pass the same on all ranks.

    docs/launchers.md lists everything that this call changes in its process, and how to switch
    off each effect, for example with DDPKIT_WITHOUT.

    Raises LaunchError if the ranks cannot start together, on every rank and with the cause; also
    if torch is older than 2.8. Raises ValueError for a bad argument, and RuntimeError if
    torch.distributed is initialised already.
    """
    hang_seconds = hang_timeout_of(hang_timeout)
    _check_arguments(backend, timeout, collective_timeout, bind)
    began, imports = time.monotonic(), 0.0 if _jobs else process.age()
    deadline = began + timeout
    try:
        _check_process(hang_seconds)
        detection = find_launcher(launcher=launcher)
        placement = detection.placement
        setup_logging(placement.rank, placement.world_size)
        with start_up_time_out(placement.rank, placement.world_size, timeout):
            report = report_rank(placement, backend, bind == "auto")
            agent = agent_store(detection, deadline)
            rendezvous = find_rank_0(detection, report, agent, deadline)
            monitor = watch_ranks(placement, report, rendezvous)
            chosen = use_assignment(rendezvous, report["backend"])
            exchanged = time.monotonic()
            store = open_store(placement, rendezvous, agent, deadline)
            log = connect_ranks(placement, chosen, rendezvous, store, monitor, collective_timeout)
        times = start_times(imports, exchanged - began, time.monotonic() - exchanged)
        job = make_job(placement, chosen, rendezvous, store, monitor, times)
    except LaunchError as error:
        print_without_traceback(error)
        raise
    if job.is_main:
        _log_start(job, detection, rendezvous)
        _log_network(job, chosen, log)
        _log_times(job, rendezvous.slowest)
        if backend is None and job.backend == "gloo" and (warning := device.unused_gpus()):
            _log.warning("%s", warning)
    if monitor and may_have("monitor"):
        # If a rank fails, srun, Hydra and torchrun do not end a rank that does not respond.
        ends_itself = LAUNCH_RANK not in detection.environ
        place = Watched(job.rank, job.world_size, job.backend, lambda: job._reported_progress)
        watch_collectives(place, monitor, hang_seconds, ends_itself=ends_itself)
    if job.world_size > 1 and may_have("variables"):
        _set_rank_variables(job, detection.launcher)
    if check_training and os.environ.get(CHECK_TRAINING) != "0":
        raises = "error" in (check_training, os.environ.get(CHECK_TRAINING))
        job._hooks = TrainingHooks(job.rank, job.world_size, job.store, raises=raises)
    return job


def _check_arguments(
    backend: str | None,
    timeout: float,
    collective_timeout: float | None,
    bind: str | bool,
) -> None:
    for name, seconds in (
        ("timeout", timeout),
        ("collective_timeout", collective_timeout),
    ):
        if seconds is not None and not 0 < seconds < 1e6:
            raise ValueError(f"{name} is {seconds!r}; expected seconds above 0")
    if backend is not None and backend not in device.BACKENDS:
        raise ValueError(
            f"backend is {backend!r}; expected None or one of {', '.join(device.BACKENDS)}"
        )
    if bind not in ("auto", False):
        raise ValueError(f"bind is {bind!r}; expected 'auto' or False")
    if dist.is_initialized() and _jobs:
        raise RuntimeError(
            "setup_distributed() was called in this process before, and that job is open. Expected "
            "one at a time. Use that job, or call its close() first, as `with setup_distributed() "
            "as job:` does at its end"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already. Expected setup_distributed() to do it. "
            "Leave init_process_group() out"
        )


def hang_timeout_of(hang_timeout: float | str | None) -> float | str:
    """Return hang_timeout in seconds, "auto", or 0 for none."""
    name, value = "hang_timeout", hang_timeout
    if os.environ.get(HANG_TIMEOUT):
        name, value = HANG_TIMEOUT, os.environ[HANG_TIMEOUT]
    if value is None or value == "auto":
        return value or 0.0
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ValueError(f"{name} is {value!r}; expected seconds, 'auto', or 0 for none")
    return seconds


def _check_process(hang_timeout: float | str) -> None:
    """Raise LaunchError if this torch or DDPKIT_WITHOUT does not allow what is requested."""
    major, minor = str(torch.__version__).split(".")[:2]
    if (int(major), int(minor)) < _OLDEST_TORCH:
        raise LaunchError(
            f"torch {torch.__version__} is too old; expected 2.8 or newer. Install one, for "
            "example with pip install 'torch>=2.8', or load a newer PyTorch module"
        )
    check_effects()
    notice_after()
    if hang_timeout not in (0, "auto") and not may_have("monitor"):
        raise LaunchError(
            "hang_timeout is set, but DDPKIT_WITHOUT names the monitor, which finds hangs. "
            "Expected one of them. Leave out the other"
        )


# The steps ---------------------------------------------------------------------------------------


def report_rank(placement: Placement, backend: str | None, bind: bool) -> RankReport:
    """Return this rank's report. An error on this rank is part of it, so every rank shows it."""
    chosen, devices, problem = backend or "", [], ""
    device_nodes: list[int | None] = []
    try:
        chosen = device.choose_backend(backend)
        devices = device.visible_devices(chosen)
        device_nodes = device.device_nodes(chosen) if bind else []
    except (LaunchError, RuntimeError) as error:
        problem = str(error)
    if chosen == "gloo":
        from .host import gloo

        problem = problem or gloo.interface_problem()

    return make_report(
        placement,
        backend=chosen,
        devices=devices,
        device_nodes=device_nodes,
        bind=bind,
        device_masks=set_masks(),
        torch_version=str(torch.__version__),
        kit_version=__version__,
        gloo_interfaces=os.environ.get("GLOO_SOCKET_IFNAME", "") if chosen == "gloo" else "",
        error=problem,
    )


def find_rank_0(
    detection: Detection, report: RankReport, agent: AgentStore | None, deadline: float
) -> Rendezvous:
    """Find rank 0 and report to it; return what it has assigned to this rank.

    agent: torchrun's store, which then has rank 0's address. deadline: monotonic seconds.
    Raises LaunchError if the ranks cannot start together.
    """
    rendezvous = agree(
        detection.placement,
        report,
        launcher=detection.launcher,
        timeout=deadline - time.monotonic(),
        environ=detection.environ,
        name_service=agent,
        earlier_starts=_jobs,
    )
    if agent is not None:
        rendezvous.master_addr = os.environ["MASTER_ADDR"]
        rendezvous.master_port = int(os.environ["MASTER_PORT"])
    return rendezvous


def watch_ranks(placement: Placement, report: RankReport, rendezvous: Rendezvous) -> Monitor | None:
    """Start a thread that notices when another rank ends; None for a single rank."""
    if placement.world_size == 1:
        return None
    return Monitor(rendezvous.connections, rank=placement.rank, host=host_and_pid(report))


class Chosen(NamedTuple):
    """This rank's device and backend. interface: the interface gloo has to use, or ""."""

    backend: str
    device: torch.device
    interface: str = ""


def use_assignment(rendezvous: Rendezvous, backend: str) -> Chosen:
    """Pin the assigned GPU, and use the assigned cores and number of threads."""
    assignment = rendezvous.assignment
    chosen_device = device.device_at(backend, assignment["device_index"])
    device.pin(chosen_device)
    if assignment["cpus"]:  # "0-7,64-71"
        try:
            bind_process(frozenset(parse_ranges(assignment["cpus"])))
        except OSError as error:  # unbound training is slower, not wrong
            _log.warning("this rank could not be bound to CPUs %s: %s", assignment["cpus"], error)
    if "OMP_NUM_THREADS" not in without_set_threads(os.environ):
        torch.set_num_threads(assignment["threads"])
        set_threads(assignment["threads"])
    interface = ""
    if backend == "gloo" and assignment["num_nodes"] > 1:
        from .host import gloo

        interface = gloo.choose_interface(rendezvous.local_addr, rendezvous.master_addr)
    return Chosen(backend, chosen_device, interface)


def connect_ranks(
    placement: Placement,
    chosen: Chosen,
    rendezvous: Rendezvous,
    store: Store,
    monitor: Monitor | None,
    collective_timeout: float | None,
) -> list[str]:
    """Let torch connect the ranks, and wait until it has connected all.

    Returns NCCL's log on rank 0, if the ranks run on several hosts. Raises LaunchError if torch
    cannot connect them.
    """
    log: list[str] = []
    timeout = None if collective_timeout is None else timedelta(seconds=collective_timeout)
    has_network = rendezvous.assignment["num_nodes"] > 1
    with contextlib.ExitStack() as stack:
        if chosen.backend == "nccl" and has_network and placement.rank == 0:
            from .host.nccl_log import log_of_nccl

            log = stack.enter_context(log_of_nccl())
        try:
            start = dist.init_process_group
            start = getattr(start, "without_watch", start)  # set by tools/launch/rank_site
            start(
                chosen.backend,
                # Keeps the keys apart from a library's that initialises by env://.
                store=PrefixStore("ddpkit/group", store),
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=timeout,
                device_id=None if chosen.device.type == "cpu" else chosen.device,
            )
        except (RuntimeError, ValueError) as error:
            if monitor is None:
                raise LaunchError(
                    f"{chosen.backend} cannot start on {chosen.device}: {error}"
                ) from error
            raise connection_failure(placement, chosen.backend, error, monitor) from error
    if monitor:
        monitor.own.entered_collectives = entered_collectives
        if cause := monitor.connected():
            raise LaunchError(cause.text, rank=cause.rank)
    return log


def make_job(
    placement: Placement,
    chosen: Chosen,
    rendezvous: Rendezvous,
    store: Store,
    monitor: Monitor | None,
    times: StartTimes,
) -> Distributed:
    """Return the object for the training script, and register its end."""
    global _jobs
    if monitor and not may_have("monitor"):
        monitor.leave(None)
        monitor = None
    assignment, job_store = rendezvous.assignment, PrefixStore("job", store)
    shutdown = Shutdown(placement.rank, placement.world_size, chosen.backend, job_store, monitor)
    shutdown.register_hooks()
    _jobs += 1
    return Distributed(
        rank=placement.rank,
        world_size=placement.world_size,
        local_rank=assignment["local_rank"],
        local_world_size=assignment["local_world_size"],
        node_rank=assignment["node_rank"],
        num_nodes=assignment["num_nodes"],
        launcher=placement.launcher,
        backend=chosen.backend,
        device=chosen.device,
        master_addr=rendezvous.master_addr,
        master_port=rendezvous.master_port,
        start_times=times,
        _shutdown=shutdown,
    )


def start_times(imports: float, exchange: float, process_group: float) -> StartTimes:
    """Return the parts of the start. imports: seconds since this process started."""
    before, _, here = os.environ.get(STAGED, "").partition("+")
    try:
        staged = float(before), float(here)
    except ValueError:  # the packages were not staged
        staged = 0.0, 0.0
    return StartTimes(sum(staged), max(0.0, imports - staged[1]), exchange, process_group)


# What follows the start --------------------------------------------------------------------------


class Watched(NamedTuple):
    """A rank whose collectives are watched. reported: returns a number that grows with progress."""

    rank: int
    world_size: int
    backend: str
    reported: Callable[[], int] = lambda: 0


def watch_collectives(
    job: Watched, monitor: Monitor, hang_timeout: float | str, *, ends_itself: bool
) -> None:
    """Let the monitor see this rank's collectives, and end a job that hangs."""
    with contextlib.suppress(OSError, AttributeError, RuntimeError):  # sys.stderr is not a file
        if not faulthandler.is_enabled() and may_have("faulthandler"):
            faulthandler.enable()  # gloo aborts a rank that receives more than it expects

    def read_collectives(ends: bool) -> tuple[list[Collective], dict[str, Group]]:
        from .monitor.hangs import collectives

        return collectives.read_collectives(locations=ends)

    def write_report(folder: str, cause: str) -> None:
        from .monitor.hangs.hang_report import write_hang_report

        write_hang_report(job.rank, folder, cause)

    monitor.decisions.backend = job.backend
    monitor.own = OwnRank(
        entered_collectives,
        read_collectives,
        progress=lambda: total_collectives() + job.reported(),
        write_report=write_report,
    )

    def make_watch(seconds: float, **how: bool) -> HangWatch:
        from .monitor.hangs import hang_report  # not later: the file system may be what hangs

        monitor.own.write_report = functools.partial(hang_report.write_hang_report, job.rank)
        return hang_report.make_watch(job.rank, job.world_size, job.backend, seconds, **how)

    if hang_timeout:
        from .monitor import worker_stacks

        worker_stacks.register()
    if hang_timeout == "auto":
        torch_timeout = group_timeout(dist.group.WORLD)
        if torch_timeout is not None:
            later = functools.partial(make_watch, torch_timeout, before_torch=True)
            # Its modules are loaded a little later, so that they do not delay the start.
            monitor.watch(later, seconds=min(20.0, torch_timeout / 30))
    elif hang_timeout:
        now = make_watch(float(hang_timeout), ends_itself=ends_itself)
        monitor.watch(lambda: now)


def _log_start(job: Distributed, detection: Detection, rendezvous: Rendezvous) -> None:
    """Print on rank 0 how many ranks have started and where, and notes about the start."""
    ranks, hosts = job.world_size, job.num_nodes
    address = "" if rendezvous.is_authenticated else ", connections not authenticated"
    if ranks > 1:  # torch's store and gloo demand no proof, and carry pickles
        port = f"{job.master_addr}:{job.master_port}"
        address += f", rank 0 at {port} (whoever can connect there can run code as you)"
    start = detection.launcher.describe_start(detection.environ)
    _log.info(
        f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}, {start}, backend "
        f"{job.backend}{address}\n{rendezvous.table}"
    )
    for note in rendezvous.notes:
        _log.warning("%s", note)


def _log_times(job: Distributed, slowest: str) -> None:
    """Print on rank 0 how long each part of the start took, if it was long or on several hosts."""
    if job.num_nodes > 1 or sum(job.start_times) > _LONG_START_SECONDS:
        where = f" (slowest: {slowest})" if job.num_nodes > 1 else ""
        _log.info("%s%s", job.start_times, where)


def _log_network(job: Distributed, chosen: Chosen, log: list[str]) -> None:
    """Print on rank 0 which network carries data between hosts, if that is known."""
    if job.num_nodes == 1:
        return
    if chosen.interface:
        _log.info("network: TCP over %s (gloo)", chosen.interface)
    elif chosen.backend == "xccl":  # oneCCL logs to standard output only
        _log.info("network: unknown; CCL_LOG_LEVEL=info shows the log of oneCCL")
    elif log:
        from .host import nccl_log

        library = "RCCL" if torch.version.hip else "NCCL"
        used = nccl_log.classify(log)
        text, is_warning = nccl_log.describe(used, nccl_log.expected_network(), library)
        _log.log(logging.WARNING if is_warning else logging.INFO, "%s", text)


def _set_rank_variables(job: Distributed, launcher: Launcher) -> None:
    """Set torchrun's rank variables, for libraries that read them; keep those set by torchrun."""
    values = {
        "RANK": job.rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_RANK": job.local_rank,
        "LOCAL_WORLD_SIZE": job.local_world_size,
        "NODE_RANK": job.node_rank,
        "GROUP_RANK": job.node_rank,
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": job.master_port,
    }
    kept = os.environ if launcher.sets_rank_variables else {}
    set_variables({name: kept.get(name) or str(value) for name, value in values.items()})
