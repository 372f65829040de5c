"""Whether a launch that has failed starts again: with a spare host, on the same hosts, or not.

What speaks for what, in this order:

1. A stop, the user, a script that all ranks have saved, a wrong command: no restart.
2. Three failures in a row without a new checkpoint: no restart.
3. A host is to blame: it is left out, and a spare takes its place. This is certain where the host
   is lost, no rank could start there, or its GPU has reported an error. A rank that was killed or
   hangs only suggests it: the program may be the cause, so the same a second time is no restart.
4. Anything else, or no spare is left and the hosts still exist: a restart on the same hosts, as
   often as --max-restarts allows, unless the same failure comes twice without a new checkpoint in
   between. That is the program's own error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...launch_report import Failure
from ...restart_notice import RestartNotice
from ..gpu_errors import GPU_ERRORS
from .launch_plan import Plan, PlanError, index_of
from .launch_result import Ended, print_status

MOST_WITHOUT_PROGRESS = 3
# A script without the kit's Checkpointer reports none: then so long a run counts as progress.
PROGRESS_SECONDS = 600.0

_NEVER = ("stop", "command")
_CERTAIN = ("lost", "bad host")
_SUSPECTED = ("killed", "hang")
_OF_LAUNCHER = r"\. (?:Rank \d+ (?:was )?ended |Slurm reports: ).*"
_KILLED = re.compile(r"SIGKILL|SIGBUS|exit status (?:137|135)")


class Attempt(NamedTuple):
    """How one start of the ranks has ended.

    failure: what failed first. lost_hosts: hosts that are certainly bad. stopped: by a signal, the
    user, or after all ranks had saved. checkpoint: the newest step that a Checkpointer has reported
    as safe in this attempt; None for none. seconds: from the start to the end.
    """

    status: int
    failure: Failure | None
    lost_hosts: tuple[str, ...] = ()
    stopped: bool = False
    checkpoint: int | None = None
    seconds: float = 0.0


class Restart(NamedTuple):
    """without: hosts to leave out from now on. why_not: empty where the launch starts again."""

    without: tuple[str, ...] = ()
    why_not: str = ""


class HostBlame(NamedTuple):
    hosts: tuple[str, ...]
    certain: bool


def decide(attempts: Sequence[Attempt], spares: int, max_restarts: int) -> Restart:
    """Return what follows the last attempt.

    spares: hosts that are still unused. max_restarts: restarts on the same hosts that are left.
    """
    last = attempts[-1]
    failure = last.failure
    if not last.status or last.stopped or failure is None:
        return Restart(why_not="the ranks have not failed")
    if failure.kind in _NEVER and not last.lost_hosts:
        return Restart(why_not="it would end in the same way")
    recent = _without_progress(attempts)
    if len(recent) >= MOST_WITHOUT_PROGRESS:
        return Restart(why_not=f"{len(recent)} failures without a new checkpoint in between")
    blame = blamed_hosts(last)
    if not blame.certain and len(recent) > 1 and _same(recent[-2], last):
        return Restart(why_not="the same failure twice, without a new checkpoint in between")
    if blame.hosts and len(blame.hosts) <= spares:
        return Restart(blame.hosts)
    if max_restarts and not blame.certain:
        return Restart()
    if blame.hosts:
        names = ", ".join(blame.hosts)
        return Restart(why_not=f"no spare host is left in the place of {names}")
    return Restart(why_not="the failure names no host, and --max-restarts allows no other restart")


def blamed_hosts(attempt: Attempt) -> HostBlame:
    """Return the hosts that have caused a failure, and whether that is certain."""
    if attempt.lost_hosts:
        return HostBlame(attempt.lost_hosts, True)
    failure = attempt.failure
    if failure is None or failure.host is None:
        return HostBlame((), False)
    host = (failure.host,)
    if failure.kind in _CERTAIN or failure.rank is None and failure.kind == "launch":
        return HostBlame(host, True)
    if any(text in failure.text for text in GPU_ERRORS):
        return HostBlame(host, True)
    killed = failure.kind == "status" and _KILLED.search(failure.text)
    if failure.kind in _SUSPECTED or killed:
        return HostBlame(host, False)
    return HostBlame((), False)


def _without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the last attempts, from the first one that has saved nothing after it began."""
    recent: list[Attempt] = []
    for attempt in reversed(attempts):
        recent.insert(0, attempt)
        if _has_progress(attempt):
            break
    return recent


def _has_progress(attempt: Attempt) -> bool:
    return attempt.checkpoint is not None or attempt.seconds >= PROGRESS_SECONDS


def _same(first: Attempt, second: Attempt) -> bool:
    """Whether two attempts failed in the same way, on whichever rank and host."""
    if first.failure is None or second.failure is None:
        return False
    return _plain(first.failure) == _plain(second.failure)


def _plain(failure: Failure) -> str:
    """Return the failure without what differs where it comes again: rank, host, addresses, and
    what the launcher adds of its end, which it need not know each time.

    The numbers of an exception stay: "bad batch 17" and "bad batch 23" are not the same.
    """
    text = re.sub(_OF_LAUNCHER, "", failure.text, flags=re.DOTALL)
    text = text.replace(failure.host, "#") if failure.host else text
    numbers = r"\branks? [\d,-]+|\b0x[0-9a-f]+" if failure.kind == "exception" else r"\d+"
    return f"{failure.kind}: {re.sub(numbers, '#', text)}"


class Restarts:
    """A launch that starts again after a failure, as decide() says.

    plan: the first one. replan: returns a plan without some hosts; PlanError where they are needed.
    max_restarts: on the same hosts.
    """

    def __init__(
        self, plan: Plan, replan: Callable[[tuple[str, ...]], Plan], max_restarts: int
    ) -> None:
        self._plan, self._replan, self._left = plan, replan, max_restarts
        self._attempts: list[Attempt] = []
        self._without = plan.options.without
        self._notice = RestartNotice()

    def run(self, start: Callable[[Plan], Ended]) -> int:
        """Start the ranks as often as it takes; return the exit status of the last time.

        start: starts the ranks of a plan once, and waits for them.
        """
        while True:
            environ = {**self._plan.environ, **self._notice.variables()}
            ended = start(self._plan._replace(environ=environ))
            plan = self._next(ended)
            if plan is None:
                return ended.report()
            self._plan = plan

    def _next(self, ended: Ended) -> Plan | None:
        """Return the plan of the next start; None where there is none. Print which or why."""
        result, failure = ended.result, ended.failure
        attempt = Attempt(
            result.status,
            failure,
            tuple(sorted(result.lost_hosts)),
            ended.saved or result.was_stopped or result.at_once,
            ended.checkpoint,
            ended.seconds,
        )
        self._attempts.append(attempt)
        restart = decide(self._attempts, len(self._plan.spares), self._left)
        if restart.why_not or failure is None:
            if result.status and not attempt.stopped and failure is not None:
                print_status(f"no restart: {restart.why_not}")
            return None
        if self._plan.options.input and not _rewind_input():
            print_status("no restart: rank 0 has read standard input, a pipe")
            return None
        restart = restart._replace(without=self._plan_names(restart.without))
        self._without += restart.without
        try:
            plan = self._replan(self._without)
        except PlanError as error:
            print_status(f"no restart: {error}")
            return None
        self._left -= not restart.without
        number = self._notice.number + 1
        self._notice = RestartNotice(number, failure.text, self._without, ended.failed_at)
        failure.write(restart=number, without=restart.without)
        print_status(failure.text, is_error=True)
        print_status(f"restart {number}{_describe(restart, self._plan, plan, self._left)}")
        return plan

    def _plan_names(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return hosts by their names in the plan: ranks know theirs without a domain."""
        planned = self._plan.hosts
        indices = [index_of(host, planned) for host in hosts]
        return tuple(
            host if index is None else planned[index]
            for host, index in zip(hosts, indices, strict=True)
        )


def _describe(restart: Restart, before: Plan, after: Plan, left: int) -> str:
    if not restart.without:
        return f" on the same hosts; {left} more allowed"
    new = [host for host in after.hosts if host not in before.hosts]
    spares = f"{len(after.spares)} spare host{'s' * (len(after.spares) != 1)} left"
    return f" without {', '.join(restart.without)}, with {', '.join(new)} instead; {spares}"


def _rewind_input() -> bool:
    """Let the ranks read our standard input once more; return whether that is possible."""
    try:
        os.lseek(0, 0, os.SEEK_SET)
    except OSError:
        return False
    return True
