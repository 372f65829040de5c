"""What the end of a launch means: evidence goes in, one outcome comes out.

Nothing here waits, prints or reads a clock, so a table of evidence tests it. The closing line, the
exit status, the failure file, a restart, the hosts to leave out, and the record of a job all follow
from the outcome; nobody decides again.

The evidence, from the strongest on:

1. A second interrupt: everything was ended at once.
2. All ranks have saved after a stop, and nothing had failed before: the run can be continued.
3. Every rank has ended by itself with status 0: the run is complete, whatever its launcher says.
4. Slurm says why it has ended the ranks, or a stop came before the first failure.
5. A host is lost, or the process that started the ranks there. If all other hosts are lost, the
network of this host has failed. An earlier report of a rank comes first.
6. What the ranks report: monitor/decisions.py has found which of them failed first.
7. What `ddpkit launch` has noticed itself, and how each rank has ended, in order.
8. The exit status of the launcher, where nothing else is known.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from ...host.gpus import GPU_ERRORS
from ...job.notation import same_host
from ...launch_protocol import EXIT_REQUEUE, Failure, Kind, Unimported
from ...phrases import ABORTED, ENDED_BY, ENDED_WITH, HAD_ENDED
from ...ranges import name_ranks

# If two ranks of a script fail within this time, either of them may be the cause.
_SAME_MOMENT_SECONDS = 0.25
_SHOWN = 8  # ranks in a message
_CONSEQUENCES = (1, 128 + signal.SIGABRT)  # exit statuses of a rank that has lost another one
_BY_LAUNCHER = 128 + signal.SIGTERM
_OF_HOST = (128 + signal.SIGKILL, 128 + signal.SIGBUS)  # memory or a broken host is the cause
_BEFORE_LOSS = ("exception", "start", "uneven")  # kinds that a lost host does not explain
_STOPS: dict[int, str] = {
    signal.SIGTERM: "the job was cancelled, or has reached its time limit",
    signal.SIGINT: "the launch was interrupted",
}


class RankEnd(NamedTuple):
    """How a rank has ended; or a torchrun agent, which has no rank.

    status: as a shell reports it, 139 for a segmentation fault; None if unknown. at:
    time.monotonic() when this process learnt it. by_launch: the launch had begun to end the ranks.
    """

    who: str  # "rank 1 on n2"
    status: int | None
    at: float
    rank: int | None = None
    host: str | None = None
    by_launch: bool = False


class OutOfMemory(NamedTuple):
    """What a scheduler has printed about a process that it ended for its memory."""

    text: str
    host: str | None = None  # None: the line does not name it

    def __str__(self) -> str:
        return "out of memory" + (f" on {self.host}" if self.host else "") + f": {self.text}"


class Loss(NamedTuple):
    """A host that does not respond, or has lost a process of the launcher. at: time.monotonic()."""

    host: str
    text: str
    at: float


class Evidence(NamedTuple):
    """What is known when all processes of a launch have ended. Times: time.monotonic().

    expected: processes that should have ended by themselves: the ranks, or torchrun's agents.
    """

    expected: int
    ends: Sequence[RankEnd] = ()  # in order
    reported: Failure | None = None  # what failed first, as the ranks report it
    reported_at: float | None = None
    saved_at: float | None = None  # when all ranks had saved after a stop
    problem: Failure | None = None  # what this process has noticed first
    problem_at: float | None = None
    problem_status: int = 1
    lost: Sequence[Loss] = ()  # hosts that do not respond
    gone: Sequence[Loss] = ()  # hosts whose agent, or process of the launcher, is gone
    hosts: Sequence[str] = ()  # hosts of the plan
    own_host: str = ""
    stopped_by: int = 0  # a stop signal soon before or after the first failure
    stopped_at: float = 0.0
    at_once: bool = False  # a stop signal ended everything at once
    slurm_reason: str = ""  # Slurm's line about why it has ended the step
    slurm_signalled: bool = False  # a signal from outside came before the first failure
    out_of_memory: OutOfMemory | None = None
    launcher: str = ""  # "srun"; "" where this process starts the ranks
    launcher_status: int | None = None
    launcher_killed: bool = False  # a signal ended the launcher
    launcher_late: float | None = None  # seconds from the first failure until it was ended
    syntax_error: str = ""  # syntax error or missing module: no rank can run the script
    unimported: Unimported | None = None  # what the first failed rank cannot import from a copy


class Outcome(NamedTuple):
    """How a launch has ended.

    status: exit status of ddpkit launch. kind: kind of Failure, or "complete" or "saved". suspects:
    hosts that should get no more ranks. certain: the program cannot be at fault.
    """

    status: int
    kind: Kind | Literal["complete", "saved"]
    cause: str = ""
    rank: int | None = None
    host: str | None = None
    suspects: tuple[str, ...] = ()
    certain: bool = False
    lost_hosts: tuple[str, ...] = ()  # suspects that do not respond at all
    by_launch: bool = True  # the cause was found by this process, not by the ranks
    stopped: bool = False  # a signal or the user has ended it: no restart
    unimported: Unimported | None = None  # failed import from a copy; shared packages may work

    @property
    def complete(self) -> bool:
        return self.kind == "complete"

    @property
    def saved(self) -> bool:
        """Whether all ranks have saved after a stop: a later job can continue."""
        return self.kind == "saved"

    @property
    def failure(self) -> Failure | None:
        """The failure for programs to read; None if nothing has failed."""
        if not self.status or self.kind == "complete" or self.kind == "saved":
            return None
        return Failure(self.cause, self.kind, self.rank, self.host)


def decide(evidence: Evidence) -> Outcome:
    """Return what the evidence means. See above for the order."""
    ends = [end for end in evidence.ends if not end.by_launch]
    if evidence.at_once:
        cause = evidence.problem.text if evidence.problem else "all were ended"
        return Outcome(evidence.problem_status, "stop", cause, stopped=True)
    if evidence.saved_at is not None and not _failed_before(evidence, evidence.saved_at):
        return Outcome(EXIT_REQUEUE, "saved", stopped=True)
    if len(ends) >= evidence.expected and not any(end.status != 0 for end in ends):
        return Outcome(0, "complete")

    outcome = (
        _lost(evidence)
        or _ended_by_slurm(evidence, ends)
        or _stopped(evidence, ends)
        or _reported(evidence, ends)
        or _noticed(evidence, ends)
    )
    memory = evidence.out_of_memory
    if memory is not None and outcome.rank is not None and not outcome.by_launch:
        outcome = outcome._replace(cause=f"{outcome.cause}. Slurm reports: {memory}")
    if evidence.unimported is not None and _may_start_from_shared(outcome, evidence):
        return outcome._replace(unimported=evidence.unimported)
    return _with_suspects(outcome, evidence)


def _may_start_from_shared(outcome: Outcome, evidence: Evidence) -> bool:
    """Whether a launch whose first failure is an import from a copy may start without copies."""
    is_of_launch = outcome.stopped or outcome.kind in ("lost", "network")
    return not is_of_launch and not evidence.syntax_error


def _failed_before(evidence: Evidence, saved_at: float) -> bool:
    """Whether something had failed before all ranks saved: then the save is not due to a stop.

    A rank that has ended cannot save, so only failures that the ranks do not see count here.
    """
    known = [loss.at for loss in (*evidence.lost, *evidence.gone)]
    known += [evidence.problem_at] if evidence.problem_at is not None else []
    return min(known, default=saved_at) < saved_at


def _lost(evidence: Evidence) -> Outcome | None:
    """Return the loss of a host, or of the launcher's process there, if it is the cause."""
    losses = evidence.lost or evidence.gone
    if not losses:
        return None
    reported = evidence.reported
    before = reported is not None and (evidence.reported_at or 0.0) < losses[0].at
    if before and reported is not None and reported.kind in _BEFORE_LOSS:
        return None
    if evidence.stopped_by and evidence.stopped_at < losses[0].at:
        return None
    if not evidence.lost and _is_explained(evidence, losses[0]):
        return None
    names = list(dict.fromkeys(loss.host for loss in losses))
    status = evidence.problem_status or 1
    text = losses[0].text
    others = [host for host in evidence.hosts if not same_host(host, evidence.own_host)]
    if evidence.lost and len(others) > 1 and all(_is_in(host, names) for host in others):
        text = (
            f"the connections to all other hosts ({', '.join(names)}) were lost: the network of "
            f"{evidence.own_host}, where ddpkit launch runs, has failed"
        )
        return Outcome(status, "network", text, host=evidence.own_host or None)
    is_of_host = reported is not None and _is_in(reported.host or "", names)
    by_ranks = is_of_host and before  # they know more about it
    if reported is not None and by_ranks:
        text = reported.text.rstrip(".")
    elif len(names) > 1:
        text += f". The same on {', '.join(names[1:])}"
    rank = reported.rank if reported is not None and is_of_host else None
    lost = tuple(names) if evidence.lost else ()
    return Outcome(
        status, "lost", text, rank, names[0], tuple(names), True, lost, by_launch=not by_ranks
    )


def _is_explained(evidence: Evidence, loss: Loss) -> bool:
    """Whether a rank had failed before the launcher lost a process: then the loss is no cause.

    The lost process may be the cause if ranks report that a rank was killed or lost.
    """
    reported = evidence.reported
    if reported is not None and reported.kind not in ("killed", "lost", "stop"):
        return (evidence.reported_at or 0.0) < loss.at
    return any(
        end.status not in (0, None, _BY_LAUNCHER) and end.at < loss.at for end in evidence.ends
    )


def _ended_by_slurm(evidence: Evidence, ends: Sequence[RankEnd]) -> Outcome | None:
    """Return Slurm's reason for ending the ranks, if no rank had failed by itself before."""
    first = next((end for end in ends if end.status), None)
    by_itself = first is not None and first.status not in (_BY_LAUNCHER, 128 + signal.SIGKILL)
    if evidence.slurm_signalled and not evidence.stopped_by:
        by_itself = False
    memory, reason, host = evidence.out_of_memory, evidence.slurm_reason, None
    if by_itself:
        return None
    if memory is not None:
        reason, host = str(memory), memory.host
    if not reason:
        return None
    status = evidence.launcher_status or 1
    text = f"Slurm has ended the ranks: {reason}"
    return Outcome(status, "stop", text, None, host, stopped=memory is None)


def _stopped(evidence: Evidence, ends: Sequence[RankEnd]) -> Outcome | None:
    """Return the stop if it came before the first failure."""
    times = [end.at for end in ends if end.status] + [evidence.problem_at or math.inf]
    if evidence.stopped_by not in _STOPS or evidence.stopped_at > min(times):
        return None
    name = signal.Signals(evidence.stopped_by).name
    text = f"{name}: ddpkit launch has received it: {_STOPS[evidence.stopped_by]}"
    failed = next((end.status for end in ends if end.status), None)
    status = failed or evidence.problem_status
    return Outcome(status or 128 + evidence.stopped_by, "stop", text, stopped=True)


def _reported(evidence: Evidence, ends: Sequence[RankEnd]) -> Outcome | None:
    """Return the first failure that the ranks report, with the end of the rank at fault."""
    reported = evidence.reported
    if reported is None:
        return None
    if reported.kind == "uneven" and (outcome := _left_by_failing(evidence, ends)):
        return outcome
    # A reported exception is the cause even if the launcher has ended its rank meanwhile.
    if reported.kind == "exception":
        ends = [end for end in ends if end.status != _BY_LAUNCHER]
    first_status = next((end.status for end in ends if end.status), None)
    text, kind, rank, host, _, waiting = reported
    text, status = text.rstrip("."), first_status or evidence.problem_status or 1
    end = next((end for end in ends if end.rank is not None and end.rank == rank), None)
    if end is not None and end.status is not None:
        host, status = host or end.host, end.status or status
        if kind == "killed" and waiting and end.status == 128 + signal.SIGABRT:
            text = (
                f"rank {rank} on {host} {ABORTED} (SIGABRT, exit status {end.status}): "
                f'{reported.why_aborted}. The line of rank {rank} follows "Fatal Python error: '
                'Aborted" in its output'
            )
        elif kind == "killed":
            text, kind = _describe_end(rank or 0, host, end.status)
        elif end.status > 1:  # 1 is the status of every exception
            text += f". Rank {rank} {describe_status(end.status)}"
    return Outcome(status, kind, text, rank, host, by_launch=False)


def _left_by_failing(evidence: Evidence, ends: Sequence[RankEnd]) -> Outcome | None:
    """Return the failure of a rank that has left the others by sys.exit(3); None for another end.

    A rank that runs fewer steps than the others ends with status 0.
    """
    failed = [end for end in ends if end.status]
    if len(failed) < len(evidence.ends) or _first_of(failed) is None:
        return None
    return _of_ends(failed, ends, evidence)


def _noticed(evidence: Evidence, ends: Sequence[RankEnd]) -> Outcome:
    """Return the cause from what this process has noticed, the ranks' ends and the launcher."""
    failed = [end for end in ends if end.status]
    problem, status = evidence.problem, evidence.problem_status or 1
    if evidence.syntax_error and (failed or problem):
        return Outcome(status, "exception", evidence.syntax_error)
    first_at = failed[0].at if failed else None
    if problem is not None and (first_at is None or (evidence.problem_at or 0.0) < first_at):
        return Outcome(status, problem.kind, problem.text, problem.rank, problem.host)
    if failed:
        return _of_ends(failed, ends, evidence)

    killed = [end for end in ends if end.status is None]
    if killed and (len(killed) == 1 or killed[1].at - killed[0].at >= _SAME_MOMENT_SECONDS):
        text = f"{killed[0].who} was killed, together with the process that had started it"
        return Outcome(1, "killed", text, killed[0].rank, killed[0].host)

    launcher_status = evidence.launcher_status or 0
    missing = _without_end(evidence)
    if not missing and evidence.ends:  # all ended, some of them by this launch
        missing = [end.who for end in evidence.ends if end.status != 0][:_SHOWN]
    is_of_rank = launcher_status > 128 and not evidence.launcher_killed
    text = f"{evidence.launcher or 'the launch'} {'reports that a rank ' * is_of_rank}"
    text += describe_status(launcher_status)
    if missing:
        text += f", and how {_some(missing)} ended is not known"
    return Outcome(launcher_status or 1, "launch", text)


def _without_end(evidence: Evidence) -> list[str]:
    known = {end.rank for end in evidence.ends if end.status is not None}
    if len(known) >= evidence.expected or not (known or evidence.launcher):
        return []
    missing = [rank for rank in range(evidence.expected) if rank not in known]
    return [name_ranks(missing)]


def _of_ends(failed: list[RankEnd], ends: Sequence[RankEnd], evidence: Evidence) -> Outcome:
    """Return the failure of the rank that failed first, if the ranks' ends show which one."""
    first = _first_of(failed)
    is_one_host = len({(end.status, end.host) for end in failed}) == 1 < len(failed)
    if is_one_host and failed[-1].at - failed[0].at < _SAME_MOMENT_SECONDS:
        host, ranks = failed[0].host, [end.rank for end in failed if end.rank is not None]
        who = f"each of {name_ranks(ranks)}" + (f" on {host}" if host else "")
        status = failed[0].status or 1
        return Outcome(status, "status", f"{who} {describe_status(status)}", None, host)
    left = [end for end in ends if end.status == 0 and end.at <= failed[0].at]
    if first is None:
        text = (
            f"{failed[0].who} {describe_status(failed[0].status or 1)}. "
            f"{_some([end.who for end in failed[1:]])} failed, too, before the others were ended. "
            "The first to end need not be the first that failed: see the tracebacks"
        )
        return Outcome(failed[0].status or 1, "status", text)
    status = first.status or 1
    text = f"{first.who} {describe_status(status)}"
    if evidence.launcher_late is not None:
        text += f"; {evidence.launcher} did not end within {evidence.launcher_late:.0f} s"
    if left and status in _CONSEQUENCES:
        text = f"{_some([end.who for end in left])} {HAD_ENDED} before {text}"
        if len(left) + 1 < evidence.expected:
            return Outcome(status, "left", text)
        return Outcome(status, "left", text, first.rank, first.host)
    return Outcome(status, "status", text, first.rank, first.host)


def _first_of(failed: list[RankEnd]) -> RankEnd | None:
    """Return the rank that failed first; None where that cannot be known.

    A rank that loses another one ends with an exception, gloo's abort, or SIGTERM of its launcher.
    """
    others = [end for end in failed if end.status != _BY_LAUNCHER]
    candidates = others or failed
    by_signal = [
        end for end in candidates if (end.status or 0) > 128 and end.status not in _CONSEQUENCES
    ]
    killed = [end for end in by_signal if end.status in _OF_HOST]  # no other rank can cause this
    if len(by_signal) == 1 or killed and killed == by_signal:
        return by_signal[0]
    first, *more = candidates
    if not more or more[0].at - first.at >= _SAME_MOMENT_SECONDS:
        return first
    chosen = [end for end in candidates if end.status not in _CONSEQUENCES]
    return chosen[0] if len(chosen) == 1 else None


def _with_suspects(outcome: Outcome, evidence: Evidence) -> Outcome:
    """Add the hosts that are to blame, alike under every launcher."""
    if outcome.suspects or outcome.host is None or outcome.kind in ("network", "stop"):
        return outcome
    if outcome.kind == "lost" or any(text in outcome.cause for text in GPU_ERRORS):
        return outcome._replace(suspects=(outcome.host,), certain=True)
    if outcome.rank is None and outcome.kind == "launch":  # no rank could start there
        return outcome._replace(suspects=(outcome.host,), certain=True)
    by_itself = [end for end in evidence.ends if end.rank == outcome.rank and not end.by_launch]
    end = by_itself[0].status if by_itself and outcome.rank is not None else None
    if outcome.rank is None and outcome.kind == "status":  # all ranks of a host, at the same moment
        end = outcome.status
    is_unexplained = outcome.kind == "hang" or outcome.kind == "killed" and end is None
    if is_unexplained or outcome.kind in ("killed", "status") and end in _OF_HOST:
        if evidence.out_of_memory is None:  # otherwise the job exceeded its own limit
            return outcome._replace(suspects=(outcome.host,))
    return outcome


def _is_in(host: str, names: Iterable[str]) -> bool:
    return any(same_host(host, name) for name in names)


def _describe_end(rank: int, host: str | None, status: int) -> tuple[str, Kind]:
    """Return what the end of a rank without a report means, and the kind of that failure."""
    who = f"rank {rank}" + (f" on {host}" if host else "")
    if not status:
        text = f"{ENDED_WITH} 0 before the others: os._exit(0), or the end of its program"
        return f"{who} {text}", "left"
    if status > 128:
        memory = ", perhaps because its host ran out of memory" * (status == 128 + signal.SIGKILL)
        return f"{who} {describe_status(status)}{memory}", "status"
    text = f"{ENDED_WITH} {status} and without an exception, as by os._exit({status})"
    return f"{who} {text}", "status"


def describe_status(status: int) -> str:
    """Convert 139 to "was ended by SIGSEGV (exit status 139)"."""
    if status > 128:
        try:
            return f"{ENDED_BY} {signal.Signals(status - 128).name} (exit status {status})"
        except ValueError:
            pass
    return f"{ENDED_WITH} {status}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
