"""Notices of the ranks to launch.py: all have saved; what failed first.

Exit statuses cannot report this. torchrun turns every failure into status 1. Launchers end the
other ranks, which may still be saving, as soon as one leaves with a status other than 0. And the
rank that fails first need not be the first that ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

VARIABLE = "DDPKIT_REPORT"  # "10.0.0.1,10.1.0.1/41667/<secret>": where launch.py listens
ROLE = "notice"
_SECONDS = 5.0  # for the connection, and until launch.py has the notice
_LONGEST_CAUSE = 2000


def parse_address(value: str) -> tuple[list[str], int, str]:
    """Split the value of VARIABLE into addresses, port and secret; [], 0, "" if it is malformed."""
    addresses, _, rest = value.partition("/")
    port, _, secret = rest.partition("/")
    if not port.isdecimal():
        return [], 0, ""
    return addresses.split(","), int(port), secret


def report_saved(environ: Mapping[str, str] = os.environ) -> bool:
    """Report to launch.py that all ranks have saved; return whether launch.py received it."""
    return _send("saved", environ)


def report_first_cause(
    text: str,
    rank: int | None = None,
    is_over: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Report to launch.py what failed first.

    rank: None where it is not one rank. is_over: all ranks end: a host is lost, or they hang.
    """
    return _send("failed", environ, " ".join(text.split())[:_LONGEST_CAUSE], rank, is_over)


def _send(
    what: str,
    environ: Mapping[str, str],
    text: str = "",
    rank: int | None = None,
    is_over: bool = False,
) -> bool:
    """Send a notice; return whether launch.py has it. This process may end in a moment."""
    from .. import channel  # most ranks send none

    addresses, port, secret = parse_address(environ.get(VARIABLE, ""))
    for address in addresses:
        with contextlib.suppress(OSError):
            key = channel.Secret(os.fsencode(secret))
            peer = channel.connect(address, port, key, ROLE, seconds=_SECONDS)
            with contextlib.closing(peer):
                peer.send(
                    {"kind": "notice", "what": what, "text": text, "rank": rank, "is_over": is_over}
                )
                return peer.receive_one(_SECONDS) is not None
    return False
