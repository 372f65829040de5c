"""Whether a launch that has failed starts again: with a spare host, on the same hosts, or not.

Rules, first match wins:

1. A stop by a signal or the user, a wrong command, or a failed network: no restart.
2. Three failures in a row without a newer checkpoint than before: no restart.
3. A host is suspected, by outcome.py: it is left out, and a spare takes its place. This is certain
   where the host is lost, no rank could start there, or its GPU has reported an error. A rank that
   was killed or hangs is only a hint: the same failure twice is no restart.
4. Anything else, or no spare is left and the hosts still exist: a restart on the same hosts, as
   often as --max-restarts allows, unless the same failure comes twice without a new checkpoint in
   between. That is the program's own error.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...launch_protocol import RestartNotice
from .launch_plan import Plan, PlanError, index_of
from .launch_result import Ended, print_status
from .outcome import Outcome

MOST_WITHOUT_PROGRESS = 3
# A script without the kit's Checkpointer reports no steps: a run of this length is progress.
PROGRESS_SECONDS = 600.0

_NEVER = ("stop", "command", "network")
_OF_LAUNCHER = r"\. (?:Rank \d+ (?:was )?ended |Slurm reports: ).*"
_REFUSED_SECONDS = 30.0  # gives up a step that Slurm still refuses this long after the failure
_REFUSED_PAUSE_SECONDS = 2.0  # waits before it requests the step again
# Parts of an exception's text that differ when it comes again.
_DIFFERS = (
    r"\branks? [\d,-]+|\b0x[0-9a-f]+"
    r"|\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?|\b\d\d?:\d\d:\d\d(?:[.,]\d+)?"
    r"|\b\d+(?:\.\d+)? ?(?:s|ms|us|seconds?|minutes?)\b|(?<![\w.])~?(?:/[\w.+@=-]+)+/?"
)


class Attempt(NamedTuple):
    """How one start of the ranks has ended.

    checkpoint: newest step that a Checkpointer has reported as safe in this attempt; None for none.
    seconds: run time.
    """

    outcome: Outcome
    checkpoint: int | None = None
    seconds: float = 0.0


class Restart(NamedTuple):
    """without: hosts to leave out from now on. why_not: empty where the launch starts again."""

    without: tuple[str, ...] = ()
    why_not: str = ""


def decide(attempts: Sequence[Attempt], spares: int, max_restarts: int) -> Restart:
    """Return what follows the last attempt.

    spares: number of unused spare hosts. max_restarts: remaining restarts on the same hosts.
    """
    last = attempts[-1].outcome
    if not last.status or last.stopped or last.failure is None:
        return Restart(why_not="the ranks have not failed")
    if last.kind in _NEVER and not last.suspects:
        return Restart(why_not="it would end in the same way")
    recent = _without_progress(attempts)
    if len(recent) >= MOST_WITHOUT_PROGRESS:
        return Restart(why_not=f"{len(recent)} failures without a new checkpoint in between")
    if not last.certain and len(recent) > 1 and _is_same(recent[-2].outcome, last):
        return Restart(why_not="the same failure twice, without a new checkpoint in between")
    if last.suspects and len(last.suspects) <= spares:
        return Restart(last.suspects)
    if max_restarts and not last.certain:
        return Restart()
    if last.suspects:
        names = ", ".join(last.suspects)
        return Restart(why_not=f"no spare host is left in the place of {names}")
    return Restart(why_not="the failure names no host, and --max-restarts allows no other restart")


def _without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the last attempts, from the latest one that has made progress."""
    newest, progress = -1, []
    for attempt in attempts:
        step = -1 if attempt.checkpoint is None else attempt.checkpoint
        progress.append(step > newest or attempt.seconds >= PROGRESS_SECONDS)
        newest = max(newest, step)
    since = max((index for index, new in enumerate(progress) if new), default=0)
    return list(attempts[since:])


def _is_same(first: Outcome, second: Outcome) -> bool:
    """Whether two attempts failed in the same way, on whichever rank and host."""
    return _plain(first) == _plain(second)


def _plain(outcome: Outcome) -> str:
    """Return the failure without details that differ when it comes again.

    These are rank, host, addresses, paths, times, and how the rank has ended, which the launcher
    does not always know.

    The numbers of an exception stay: "bad batch 17" and "bad batch 23" are not the same.
    """
    text = re.sub(_OF_LAUNCHER, "", outcome.cause, flags=re.DOTALL)
    numbers = _DIFFERS if outcome.kind == "exception" else r"\d+"
    text = re.sub(numbers, "#", text)
    text = text.replace(outcome.host, "#") if outcome.host else text
    return f"{outcome.kind}: {text}"


class Restarts:
    """A launch that starts again after a failure, as decide() says.

    plan: the first plan. replan: returns a plan without some hosts; PlanError if they are needed.
    max_restarts: restarts on the same hosts.
    """

    def __init__(
        self, plan: Plan, replan: Callable[[tuple[str, ...]], Plan], max_restarts: int
    ) -> None:
        self._plan, self._replan, self._left = plan, replan, max_restarts
        self._attempts: list[Attempt] = []
        self._without = plan.options.without
        self._notice = RestartNotice()

    def run(self, start: Callable[[Plan], Ended]) -> Outcome:
        """Start the ranks as often as it takes; return how the last time has ended.

        start: starts the ranks of a plan once, and waits for them.
        """
        while True:
            environ = {**self._plan.environ, **self._notice.variables()}
            ended = start(self._plan._replace(environ=environ))
            if self._is_refused(ended):
                time.sleep(_REFUSED_PAUSE_SECONDS)
                continue
            plan = self._next(ended)
            if plan is None:
                return self._with_first_cause(ended).report()
            self._plan = plan

    def _is_refused(self, ended: Ended) -> bool:
        """Whether Slurm has refused a restart, which it may accept in a moment.

        Slurm keeps the previous step and its resources until a lost host has responded.
        """
        if ended.outcome.kind != "refused" or not self._notice.number:
            return False
        waited = time.time() - self._notice.failed_at
        if waited < _REFUSED_SECONDS:
            print_status("Slurm has refused the step. It is tried again")
            return True
        return False

    def _with_first_cause(self, ended: Ended) -> Ended:
        """Repeat the cause of the restart where the restart itself could not start."""
        outcome, cause = ended.outcome, self._notice.cause
        if not cause or outcome.kind not in ("refused", "launch", "command"):
            return ended
        text = f"{outcome.cause}. Restart {self._notice.number} was due to this: {cause}"
        return ended._replace(outcome=outcome._replace(cause=text))

    def _next(self, ended: Ended) -> Plan | None:
        """Return the plan of the next start; None where there is none. Print which or why."""
        outcome, failure = ended.outcome, ended.outcome.failure
        self._attempts.append(Attempt(outcome, ended.checkpoint, ended.seconds))
        restart = decide(self._attempts, len(self._plan.spares), self._left)
        if restart.why_not or failure is None:
            if outcome.status and not outcome.stopped and failure is not None:
                print_status(f"no restart: {restart.why_not}")
            return None
        if self._plan.options.input and not rewind_input():
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


def rewind_input() -> bool:
    """Let the ranks read our standard input once more; return whether that is possible."""
    try:
        os.lseek(0, 0, os.SEEK_SET)
    except OSError:
        return False
    return True
