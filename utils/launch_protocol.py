"""What `ddpkit launch` and its ranks tell each other.

The launch sets variables of the environment: where it listens (REPORT), what it knows of a restart
(RESTART), and which effects setup_distributed() may have on the process (the table of all effects
is in docs/launchers.md). The ranks report what failed first, that all have saved, and each
checkpoint that is safe, from which the launch sees whether the training makes progress from one
failure to the next. Where no launch listens, a failure is a line of the output.

Exit statuses cannot report this. torchrun turns every failure into status 1. Launchers end the
other ranks, which may still be saving, as soon as one leaves with a status other than 0. And the
rank that fails first need not be the first that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .errors import LaunchError

REPORT = "DDPKIT_REPORT"  # "10.0.0.1,10.1.0.1/41667/<secret>": where ddpkit launch listens
ROLE = "notice"
_SECONDS = 5.0  # for the connection, and until ddpkit launch has the notice
_LONGEST_CAUSE = 2000
_LONGEST_DESCRIPTION = 300  # characters
FAILURE_FILE = "DDPKIT_FAILURE_FILE"  # where a line about what failed first goes, for programs
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: all have saved, another job is to continue
FAILURE = "ddpkit-failure "  # the beginning of the line about what failed first; JSON follows


Kind = Literal[
    "start",  # a rank cannot start, or started with other settings
    "exception",  # a rank raised one
    "killed",  # a signal ended a rank
    "uneven",  # ranks run different numbers of steps
    "lost",  # a host does not respond
    "hang",  # ranks wait for one that does not come
    "training",  # check_training="error" found ranks that train differently
    "command",  # a command of the launch failed, such as srun
    "launch",  # the launch itself failed
    "refused",  # the launcher refused to start the ranks
    "status",  # a rank ended with an exit status that is not 0
    "network",  # the ranks could not reach the launch
    "left",  # a rank ended with status 0, and others still needed it
    "stop",  # a stop was requested
    "preflight",  # a check before the job failed
    "bad host",  # a check before the job found one
    "",  # unknown
]


class Failure(NamedTuple):
    """What failed first.

    rank, host: at fault; None where it is not one, or unknown. kind: see Kind. is_over: all
    ranks end, because a host is lost or they hang. waiting: where another rank waits with gloo for
    a rank that was killed: "rank 0 waits in all_reduce of [[5050]] at train.py, line 20".
    """

    text: str
    kind: Kind
    rank: int | None = None
    host: str | None = None
    is_over: bool = False
    waiting: str = ""

    @property
    def why_aborted(self) -> str:
        """Why gloo has aborted the rank, if it has: the others do not see that."""
        return (
            f"{self.waiting}, and rank {self.rank} entered another, smaller collective. Different "
            "numbers of batches on the ranks do this: use drop_last=True or "
            "DistributedDataParallel.join(). So do tensors of different sizes"
        )

    def write(self, environ: Mapping[str, str] = os.environ, **more: object) -> None:
        """Append the line that programs read to the file that FAILURE_FILE names, if it does.

        more: fields besides kind, rank, host and cause: of a failure after which the ranks were
        started again, "restart", its number, and "without", the hosts that are left out.
        It goes to standard error only where the file cannot be written: what people read has the
        same in one sentence, which `ddpkit doctor logs` reads as well.
        """
        path = environ.get(FAILURE_FILE)
        if not path:
            return
        fields: dict[str, object] = {
            "kind": self.kind,
            "rank": self.rank,
            "host": self.host,
            "cause": self.text,
        }
        fields |= more
        line = f"{FAILURE}{json.dumps(fields)}\n"
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(line)
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error
            sys.stderr.write(line)
            sys.stderr.flush()


class Unimported(NamedTuple):
    """What a rank cannot import from a copy of --stage. error: in one line. copy: its folder."""

    module: str
    error: str
    copy: str
    host: str


def describe(error: BaseException) -> str:
    """Return an error in one line: "ValueError: bad sample 17".

    The text of an error that another process has passed on ends with the traceback there, and
    begins with what everybody knows: "Caught ValueError in DataLoader worker process 0.", or of
    mp.spawn(), "-- Process 1 terminated with the following error:". The line then has both.
    """
    name, text = type(error).__name__, str(error).strip()
    first = (f"{name}: {text}" if text else name).splitlines()[0]
    _, found, trace = text.rpartition("Traceback (most recent call last):")
    causes = re.findall(r"^[A-Za-z_][\w.]*(?:: .+)?$", trace, re.MULTILINE) if found else []
    if causes:
        cause = re.sub(r"\A(\w+\.)+(?=\w+(:|\Z))", "", causes[0])
        first = f"{first.replace(': -- ', ': ').rstrip(' .:')}: {cause}"
    return first[:_LONGEST_DESCRIPTION]


_NONE = Failure("", "")
PROBLEM = "problem"  # of the training, which goes on
EARLY = "failed early"  # before the group: reports of other ranks may know more
TRACEBACK = "traceback"  # of such a rank: whether another one has printed the same


def parse_address(value: str) -> tuple[list[str], int, str]:
    """Split the value of REPORT into addresses, port and secret; [], 0, "" if it is malformed."""
    addresses, _, rest = value.partition("/")
    port, _, secret = rest.partition("/")
    if not port.isdecimal():
        return [], 0, ""
    return addresses.split(","), int(port), secret


def report_saved(environ: Mapping[str, str] = os.environ) -> bool:
    """Report to ddpkit launch that all ranks have saved; return whether it has received that."""
    return send("saved", environ)


def report_first_cause(
    failure: Failure, environ: Mapping[str, str] = os.environ, *, prints: bool = True
) -> bool:
    """Report to ddpkit launch what failed first; return whether ddpkit launch has it.

    prints: print it where no launch listens; no other rank does.
    """
    failure = failure._replace(text=" ".join(failure.text.split())[:_LONGEST_CAUSE])
    received = send("failed", environ, failure)
    if not received and prints:
        failure.write(environ)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error
            name = "LaunchError: " if failure.kind == "start" else ""
            sys.stderr.write(f"{name}{failure.text}\n")
            sys.stderr.flush()
    return received


def send(
    what: str,
    environ: Mapping[str, str] = os.environ,
    failure: Failure = _NONE,
    **more: Any,
) -> bool:
    """Send "saved", "failed", EARLY, PROBLEM or "checkpoint"; return whether ddpkit launch has it.

    more: fields beside those of the failure. This process may end in a moment.
    """
    return query(what, environ, failure, **more) is not None


def query(
    what: str,
    environ: Mapping[str, str] = os.environ,
    failure: Failure = _NONE,
    *,
    seconds: float = _SECONDS,
    **more: Any,
) -> dict[str, Any] | None:
    """Send as send(), and return the answer; None where none comes.

    seconds: for each connection to an address of ddpkit launch, and until it answers.
    """
    from . import channel  # most ranks send none

    addresses, port, secret = parse_address(environ.get(REPORT, ""))
    for address in addresses:
        with contextlib.suppress(OSError):
            key = channel.Secret(os.fsencode(secret))
            peer = channel.connect(address, port, key, ROLE, seconds=seconds)
            with contextlib.closing(peer):
                fields = failure._asdict()
                fields["about"] = fields.pop("kind")
                peer.send({"kind": "notice", "what": what, **fields, **more})
                return peer.receive_one(seconds)
    return None


RESTART = "DDPKIT_RESTART"  # JSON, see RestartNotice


class RestartNotice(NamedTuple):
    """Why the ranks were started again.

    number: of restarts so far; 0 in the first start. cause: what failed. without: hosts that are
    left out. failed_at: when the launch noticed the failure, in seconds since 1970.
    """

    number: int = 0
    cause: str = ""
    without: tuple[str, ...] = ()
    failed_at: float = 0.0

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the ranks."""
        return {RESTART: json.dumps(self._asdict())}


def read_restart_notice(environ: Mapping[str, str] = os.environ) -> RestartNotice | None:
    """Return what the launch says; None where it cannot start again, or there is none."""
    text = environ.get(RESTART)
    if not text:
        return None
    try:
        fields = json.loads(text)
        return RestartNotice(
            int(fields["number"]),
            str(fields["cause"]),
            tuple(map(str, fields["without"])),
            float(fields["failed_at"]),
        )
    except (ValueError, KeyError, TypeError):  # not of a launch of this version
        return None


def report_checkpoint(step: int, environ: Mapping[str, str] = os.environ) -> None:
    """Report to the launch that the checkpoint of a step is safe, where it asks for that."""
    if environ.get(RESTART):
        send("checkpoint", environ, Failure(str(step), ""))


HANG_TIMEOUT = "DDPKIT_HANG_TIMEOUT"  # seconds, "auto", or "0" for none
NOTICE_AFTER = "DDPKIT_NOTICE_AFTER"  # seconds without progress until a line says so; "0": never
STAGED_COPY = "DDPKIT_STAGED_COPY"  # the copy of --stage that this process uses
STAGED = "DDPKIT_STAGED"  # "2.1+0.8": seconds of --stage, before this process and in it
_WITHOUT = "DDPKIT_WITHOUT"
_EFFECTS = ("variables", "monitor", "excepthook", "atexit", "faulthandler", "filter", "workers")


def may_have(effect: str) -> bool:
    """Return whether setup_distributed() may have an effect on this process, one of _EFFECTS.

    DDPKIT_WITHOUT lists those that the user does not want.
    """
    return effect not in _unwanted()


def check_effects() -> None:
    """Raise LaunchError where DDPKIT_WITHOUT lists anything else."""
    if unknown := set(_unwanted()).difference(_EFFECTS):
        raise LaunchError(
            f"{_WITHOUT} is {os.environ[_WITHOUT]}; expected some of {', '.join(_EFFECTS)}. "
            f"Leave out {', '.join(sorted(unknown))}"
        )


def notice_after() -> float:
    """Return the seconds without progress after which a line says where the ranks wait; 0: never.

    Raises LaunchError for a value that is no number.
    """
    text = os.environ.get(NOTICE_AFTER, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise LaunchError(f"{NOTICE_AFTER} is {text!r}; expected seconds, or 0 for never")
    return seconds


def _unwanted() -> list[str]:
    return os.environ.get(_WITHOUT, "").replace(",", " ").split()
