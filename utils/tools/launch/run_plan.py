"""Run a plan: by a native launcher, by agents, or on this host alone."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

from ...job import exclude_file
from ...launch_protocol import RESTART
from ...ranges import name_ranks
from ..cli.interpreter import KIT
from ..staging import IN_MEMORY
from .child_processes import Processes
from .event_loop import EventLoop
from .host_ranks import host_processes, start_on_host
from .host_readiness import ReservedPort
from .ignored_stops import IgnoredStops, describe
from .launch_connection import Launch, LaunchServer, RankNotices
from .launch_plan import Plan, PlanError, index_of
from .launch_result import Ended, LaunchResult, print_status
from .nested import GroupWatch, note_groups
from .outcome import Outcome
from .rank_output import Outputs, labelled, write_output
from .stopped_ranks import StoppedRanks, hang_limit

_DRAIN_SECONDS = 1.0  # limit for the last output: a child of a rank may hold the pipe
_BACKLOG = 16
_SECONDS_TO_FIND = 10.0  # time limit for finding why the script cannot run


def run(plan: Plan, replan: Callable[[tuple[str, ...]], Plan] | None = None) -> Outcome:
    """Start the ranks and wait for them; return how the launch has ended. Print its last line.

    The exit status is the status of the first rank that failed, or EXIT_REQUEUE when all ranks have
    saved after a stop, whatever the launcher in between returns.

    replan: returns the plan without some hosts, for a restart; PlanError where they are needed.
    """
    restarts = plan.options.max_restarts
    start = _Starts(replan or (lambda without: plan))
    if replan is not None and (plan.options.spare or restarts):
        from .restarts import Restarts

        return Restarts(plan, replan, restarts).run(start)
    return start(plan).report()


class _Starts:
    """The starts of one launch: from copies of the packages, until the ranks cannot import these.

    Then the ranks start again at once from the shared packages. This is no restart.
    """

    def __init__(self, replan: Callable[[tuple[str, ...]], Plan]) -> None:
        """replan: see run()."""
        self._replan = replan
        self._uses_copies = True

    def __call__(self, plan: Plan) -> Ended:
        ended = _run_once(plan if self._uses_copies else _without_copies(plan))
        found = ended.outcome.unimported
        if found is None or not self._uses_copies:
            return ended
        from .restarts import PROGRESS_SECONDS, rewind_input

        is_progress = ended.checkpoint is not None or ended.seconds >= PROGRESS_SECONDS
        if is_progress:  # the import did not fail at the start
            return ended
        # A launcher may already have read rank 0's input from a pipe.
        if plan.options.input and plan.native_launcher_starts_ranks and not rewind_input():
            return ended
        try:
            again = self._replan(plan.options.without)
        except PlanError:
            return ended
        self._uses_copies = False
        package = found.module.partition(".")[0]
        print_status(
            f"warning: {found.module} cannot be imported from the copy on {found.host} "
            f"({found.error}; the copy is {found.copy}). The ranks start again with the shared "
            f"packages. Leave out --stage, or install {package} so that it works in any folder"
        )
        notice = {name: plan.environ[name] for name in (RESTART,) if name in plan.environ}
        again = again._replace(environ={**again.environ, **notice})
        return _run_once(_without_copies(again))


def _without_copies(plan: Plan) -> Plan:
    environ = {name: value for name, value in plan.environ.items() if name != IN_MEMORY}
    return plan._replace(starter=(), environ=environ)


def _run_once(plan: Plan) -> Ended:
    """Start the ranks once, and wait for them."""
    launch_id = f"{os.getpid()}-{os.urandom(6).hex()}"
    starts = len(plan.hosts) if plan.options.torchrun else plan.world_size
    result = LaunchResult(starts, plan.hosts, socket.gethostname())
    began = time.monotonic()
    ports = plan.method.listen_ports(plan) if plan.native_launcher_starts_ranks else ()
    others = [host for host in plan.hosts if index_of(host, (plan.host,)) is None]
    with (
        RankNotices(_BACKLOG + plan.world_size, ports, others) as notices,
        EventLoop() as loop,
    ):
        plan = plan._replace(environ={**plan.environ, **notices.variables})
        notices.tracebacks.is_shared = not plan.options.output_dir
        with Processes(launch_id) as processes, ExitStack() as files:
            _run(Launch(plan, launch_id, processes, files, loop, notices, result))
    first_cause, result.unimported = notices.first_cause, notices.unimported
    if result.failed_at is not None and (first_cause is None or notices.is_early):
        ends = result.evidence().ends
        is_exception = all(end.status == 1 for end in ends if end.status and not end.by_launch)
        result.syntax_error = _script_error(plan, imports=is_exception)
        first_cause = None if result.syntax_error else first_cause  # every rank has failed with it
    for line in () if result.syntax_error else notices.tracebacks.lines():
        print_status(line)
    outcome = result.conclude(first_cause, notices.failed_at, notices.saved_at)
    _list_lost_hosts(plan, outcome)
    now = time.monotonic()
    noticed = min(filter(None, (result.failed_at, notices.failed_at)), default=now)
    return Ended(
        outcome,
        result.warning,
        tuple(notices.problems),
        notices.checkpoint,
        seconds=now - began,
        failed_at=time.time() - (now - noticed),
    )


def _run(launch: Launch) -> None:
    """Run the plan, and note the result. To save time, load only the modules that it needs."""
    if launch.plan.native_launcher_starts_ranks:
        from .native_launch import NativeLaunch

        NativeLaunch(launch).run()
    elif launch.plan.uses_agents:
        from .coordinator import Coordinator

        Coordinator(launch).run()
    else:
        _run_local(launch)


# Looks at the imports before the script's first call, which could change sys.path.
_FIND_ERROR = """
import ast, importlib.util, os, shlex, sys, sysconfig
script, imports = sys.argv[1], sys.argv[2] == "True"
try:
    tree = compile(open(script, "rb").read(), script, "exec", ast.PyCF_ONLY_AST)
    compile(tree, script, "exec")
except SyntaxError as error:
    print(f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}")
    sys.exit()
sys.path[0] = os.path.dirname(os.path.abspath(script))
for statement in tree.body if imports else []:
    names = [name.name for name in getattr(statement, "names", [])]
    if isinstance(statement, ast.ImportFrom):
        names = [statement.module] if not statement.level else []
    elif not isinstance(statement, ast.Import):
        if any(isinstance(node, ast.Call) for node in ast.walk(statement)):
            break
        continue
    for name in (name.partition(".")[0] for name in names):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            remedy = ("Install it there, for example with pip install, or activate the environment "
                      "that has it")
            if name == "ddpkit" and sys.argv[3] == "clone":
                remedy = f"Install it there: {sys.executable} -m pip install {sys.argv[4]}"
            elif name == "ddpkit":
                folder = sysconfig.get_path("purelib")
                remedy = f"Copy it there: cp -r {sys.argv[4]} {shlex.quote(folder)}"
            print(f"{script}: ModuleNotFoundError: No module named {name!r} (line "
                  f"{statement.lineno}) in {sys.executable}. {remedy}")
            sys.exit()
"""


def _script_error(plan: Plan, *, imports: bool) -> str:
    """Return why the Python of the ranks cannot run the script at all, or "".

    imports: whether a module that does not exist may have ended the ranks.
    """
    if not plan.script:
        return ""
    words = [plan.python, "-c", _FIND_ERROR, plan.script, str(imports), *_kit_source()]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_SECONDS_TO_FIND, env=dict(plan.environ)
        )
        if found := done.stdout.strip():
            return f"no rank can run {found}"
    return ""


def _kit_source() -> tuple[str, str]:
    """Return ("clone", its folder), from which pip installs the kit, or ("package", its folder).

    An installed package has no project file; its folder is complete.
    """
    if os.path.isfile(os.path.join(KIT, "pyproject.toml")):
        return "clone", shlex.quote(KIT)
    return "package", shlex.quote(os.path.join(KIT, "ddpkit"))


def _list_lost_hosts(plan: Plan, outcome: Outcome) -> None:
    """Add hosts that do not respond to the list of hosts that later jobs avoid, if there is one.

    If this host has lost most of several others, it may itself be cut off.
    """
    file, lost = plan.environ.get(exclude_file.VARIABLE), outcome.lost_hosts
    if file and lost and (len(lost) == 1 or 2 * len(lost) < len(plan.hosts)):
        with suppress(OSError):
            exclude_file.add(file, dict.fromkeys(lost, "launch: the host failed, or was cut off"))


def _run_local(launch: Launch) -> None:
    """Run the ranks of this host as children of this process."""
    plan, processes, loop, result = launch.plan, launch.processes, launch.loop, launch.result
    torchrun = plan.options.torchrun
    port = ReservedPort()  # reserved until this process ends

    def write(stream: int, text: bytes, rank: int) -> None:
        write_output(stream, labelled(text, rank))

    with closing(LaunchServer(launch.notices, loop)):
        # Without labels the ranks share our streams.
        outputs = Outputs(loop, write) if plan.options.label and not torchrun else None
        start_on_host(
            host_processes(plan, 0, "127.0.0.1", str(port.port), "127.0.0.1"),
            plan.environ,
            processes,
            outputs,
            output_dir="" if torchrun else plan.options.output_dir,
            stdin=0 if plan.options.input else b"",
        )
        watch = GroupWatch(launch.id, plan.ranks[0] if plan.is_watched else 0)
        ignored = IgnoredStops(
            lambda pids: print_status(
                describe(name_ranks([processes.indices[pid] for pid in pids]))
            ),
            lambda pids: processes.end(time.monotonic(), 0.0),
        )
        here = socket.gethostname()
        stopped = StoppedRanks(
            0.0 if torchrun else hang_limit(os.environ),
            lambda pid, why, seconds: result.rank_stopped(
                processes.indices[pid], here, pid, why, seconds, time.monotonic()
            ),
        )
        while processes.running:
            now = time.monotonic()
            # Comes first: every signal or end after this wakes up the loop.
            stops = loop.take_signals()
            for index, status in processes.ended():
                who, rank = ("torchrun", None) if torchrun else (f"rank {index}", index)
                running = processes.running
                result.process_ended(who, status, now, others=running, rank=rank, host=here)
            for number in stops:
                if result.is_last_stop(number, now):
                    result.end_now(number, now)
                else:
                    processes.stop(number, to_workers=torchrun)
                    ignored.signalled(number, now)
            for message in watch.messages(now):
                if text := note_groups(message, plan, result, of_rank_0=True):
                    result.fail(text, now)
            due = None if result.end_at is None else max(0.0, result.end_at - now)
            if due == 0.0:
                processes.end(now)
            stop = ignored.check(processes.indices, now)
            held = stopped.check(processes.indices, now)
            late = processes.kill_late(now)
            if late is not None:
                due = late
            if processes.running:
                partial = outputs.flush_partial_lines() if outputs else None
                loop.run_once(due, watch.next_look, processes.pass_on_held(), partial, stop, held)
        if watch.ended_without_group():
            note_groups({"kind": "copies", "running": False}, plan, result, of_rank_0=True)
        if outputs is not None:
            outputs.drain(_DRAIN_SECONDS, loop.run_once)
