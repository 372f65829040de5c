"""Notices of the ranks to launch.py: all have saved; what failed first, else a line about that.

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
from typing import NamedTuple

VARIABLE = "DDPKIT_REPORT"  # "10.0.0.1,10.1.0.1/41667/<secret>": where launch.py listens
ROLE = "notice"
_SECONDS = 5.0  # for the connection, and until launch.py has the notice
_LONGEST_CAUSE = 2000
_LONGEST_DESCRIPTION = 300  # characters
FAILURE_FILE = "DDPKIT_FAILURE_FILE"  # where a line about what failed first goes, for programs
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: all have saved, another job is to continue
FAILURE = "ddpkit-failure "  # the beginning of the line about what failed first; JSON follows


class Failure(NamedTuple):
    """What failed first.

    rank, host: at fault; None where it is not one, or unknown. kind: "start", "exception",
    "killed", "uneven" work, host "lost", "hang"; of launch.py also "command", "launch", exit
    "status", "left" with status 0, "stop"; of a check before the job "preflight", "bad host".
    is_over: all ranks end: a host is lost, or they hang.
    """

    text: str
    kind: str
    rank: int | None = None
    host: str | None = None
    is_over: bool = False

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


def parse_address(value: str) -> tuple[list[str], int, str]:
    """Split the value of VARIABLE into addresses, port and secret; [], 0, "" if it is malformed."""
    addresses, _, rest = value.partition("/")
    port, _, secret = rest.partition("/")
    if not port.isdecimal():
        return [], 0, ""
    return addresses.split(","), int(port), secret


def report_saved(environ: Mapping[str, str] = os.environ) -> bool:
    """Report to launch.py that all ranks have saved; return whether launch.py received it."""
    return send("saved", environ)


def report_first_cause(
    failure: Failure, environ: Mapping[str, str] = os.environ, *, prints: bool = True
) -> bool:
    """Report to launch.py what failed first; return whether launch.py has it.

    prints: print it where there is no launch.py; no other rank does.
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


def send(what: str, environ: Mapping[str, str] = os.environ, failure: Failure = _NONE) -> bool:
    """Send "saved", "failed", EARLY, PROBLEM or "checkpoint"; return whether launch.py has it.

    This process may end in a moment.
    """
    from . import channel  # most ranks send none

    addresses, port, secret = parse_address(environ.get(VARIABLE, ""))
    for address in addresses:
        with contextlib.suppress(OSError):
            key = channel.Secret(os.fsencode(secret))
            peer = channel.connect(address, port, key, ROLE, seconds=_SECONDS)
            with contextlib.closing(peer):
                fields = failure._asdict()
                fields["about"] = fields.pop("kind")
                peer.send({"kind": "notice", "what": what, **fields})
                return peer.receive_one(_SECONDS) is not None
    return False
