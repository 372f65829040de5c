"""Messages and variables between `ddpkit launch` and its ranks.

The launch sets environment variables: its own address (REPORT), the restart (RESTART), and the
effects that setup_distributed() may have on the process (docs/launchers.md has a table of all). The
ranks report what failed first, that all have saved, and each checkpoint that is safe on disk. From
the checkpoints the launch sees whether the training makes progress from one failure to the next. If
no launch listens, a failure is a line of the output.

Exit statuses cannot report this. torchrun turns every failure into status 1. As soon as one rank
leaves with a status other than 0, launchers end the other ranks, which may still be saving. And the
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

REPORT = "DDPKIT_REPORT"  # address of ddpkit launch: "10.0.0.1,10.1.0.1/41667/<secret>"
ROLE = "notice"
_SECONDS = 5.0  # seconds to connect, and seconds until ddpkit launch has confirmed
_LONGEST_CAUSE = 2000
_LONGEST_DESCRIPTION = 300  # characters
FAILURE_FILE = "DDPKIT_FAILURE_FILE"  # file for a line about the first failure, read by programs
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: all ranks have saved, the next job continues
FAILURE = "ddpkit-failure "  # prefix of the line about the first failure; JSON follows


Kind = Literal[
    "start",  # a rank cannot start, or started with other settings
    "exception",  # a rank raised an exception
    "killed",  # a signal ended a rank
    "uneven",  # ranks run different numbers of steps
    "lost",  # a host does not respond
    "hang",  # ranks wait for another rank in vain
    "training",  # check_training="error" found ranks that train differently
    "command",  # a command of the launch failed, such as srun
    "launch",  # the launch itself failed
    "refused",  # the launcher refused to start the ranks
    "status",  # a rank ended with an exit status that is not 0
    "network",  # the ranks could not reach the launch
    "left",  # a rank ended with status 0, and others still needed it
    "stop",  # a stop was requested
    "preflight",  # a check before the job failed
    "bad host",  # a check before the job found a bad host
    "",  # unknown
]


class Failure(NamedTuple):
    """The first failure of a launch.

    rank, host: at fault; None if unknown, or if more than one is at fault. kind: see Kind.
    is_over: whether all ranks end, because a host is lost or they hang. waiting: where another rank
    waits with gloo for a rank that was killed: "rank 0 waits in all_reduce of [[5050]] at
    train.py, line 20".
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
        """Append a line for programs to the file that FAILURE_FILE names, if it is set.

        more: fields besides kind, rank, host and cause. After a failure that was followed by a
        restart, "restart" is its number, and "without" lists the hosts that are left out.
        If the file cannot be written, the line goes to standard error. Otherwise people read the
        same facts there in one sentence, which `ddpkit doctor logs` reads as well.
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

    An error passed on by another process has a text that ends with that process's traceback. Its
    first line says little: "Caught ValueError in DataLoader worker process 0.", or from
    mp.spawn(): "-- Process 1 terminated with the following error:". The result has both.
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
PROBLEM = "problem"  # a training problem; the training goes on
EARLY = "failed early"  # a rank failed before it had a group; other ranks may know more
TRACEBACK = "traceback"  # asks whether another rank has printed the same traceback


def parse_address(value: str) -> tuple[list[str], int, str]:
    """Split the value of REPORT into addresses, port and secret; [], 0, "" if it is malformed."""
    addresses, _, rest = value.partition("/")
    port, _, secret = rest.partition("/")
    if not port.isdecimal():
        return [], 0, ""
    return addresses.split(","), int(port), secret


def report_saved(environ: Mapping[str, str] = os.environ) -> bool:
    """Report to ddpkit launch that all ranks have saved; return whether it has confirmed that."""
    return send("saved", environ)


def report_first_cause(
    failure: Failure, environ: Mapping[str, str] = os.environ, *, prints: bool = True
) -> bool:
    """Report the first failure to ddpkit launch; return whether ddpkit launch has confirmed it.

    prints: if no launch listens, print it here; no other rank does.
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
    """Send "saved", "failed", EARLY, PROBLEM or "checkpoint"; return whether it was confirmed.

    more: additional fields of the message. This process may end in a moment.
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
    """Send a message like send(), and return the answer; None if there is none.

    seconds: limit for each connection to an address of ddpkit launch, and for its answer.
    """
    from . import channel  # most ranks send no message

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


RESTART = "DDPKIT_RESTART"  # a RestartNotice as JSON


class RestartNotice(NamedTuple):
    """The reason for the restart of the ranks.

    number: number of restarts so far; 0 at the first start. cause: what failed. without: hosts
    that are left out. failed_at: when the launch noticed the failure, in seconds since 1970.
    """

    number: int = 0
    cause: str = ""
    without: tuple[str, ...] = ()
    failed_at: float = 0.0

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the ranks."""
        return {RESTART: json.dumps(self._asdict())}


def read_restart_notice(environ: Mapping[str, str] = os.environ) -> RestartNotice | None:
    """Return the launch's notice; None if the launch cannot restart, or there is no launch."""
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
    except (ValueError, KeyError, TypeError):  # from a launch of another version
        return None


def report_checkpoint(step: int, environ: Mapping[str, str] = os.environ) -> None:
    """Report to the launch that a step's checkpoint is safe, if the launch asks for that."""
    if environ.get(RESTART):
        send("checkpoint", environ, Failure(str(step), ""))


HANG_TIMEOUT = "DDPKIT_HANG_TIMEOUT"  # seconds, "auto", or "0" for none
NOTICE_AFTER = "DDPKIT_NOTICE_AFTER"  # seconds without progress until a line says so; "0": never
STAGED_COPY = "DDPKIT_STAGED_COPY"  # path of the copy of --stage that this process uses
STAGED = "DDPKIT_STAGED"  # "2.1+0.8": seconds that --stage took before this process and in it
_WITHOUT = "DDPKIT_WITHOUT"
_EFFECTS = ("variables", "monitor", "excepthook", "atexit", "faulthandler", "filter", "workers")


def may_have(effect: str) -> bool:
    """Whether setup_distributed() may have an effect on this process, one of _EFFECTS.

    DDPKIT_WITHOUT lists effects that the user does not want.
    """
    return effect not in _unwanted()


def check_effects() -> None:
    """Raise LaunchError if DDPKIT_WITHOUT lists an unknown effect."""
    if unknown := set(_unwanted()).difference(_EFFECTS):
        raise LaunchError(
            f"{_WITHOUT} is {os.environ[_WITHOUT]}; expected some of {', '.join(_EFFECTS)}. "
            f"Leave out {', '.join(sorted(unknown))}"
        )


def notice_after() -> float:
    """Return the seconds without progress until a line says where ranks wait; 0: never.

    Raises LaunchError if the value is not a number.
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
