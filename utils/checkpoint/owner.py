"""Name the process that writes a temporary folder, and find out whether it still runs."""

from __future__ import annotations

import os
import re
import socket

from ..host import process

_OWNER = re.compile(
    r"(?P<host>[\w-]{0,60})\.(?P<boot>[0-9a-f]*)\.(?P<namespace>\d*)\.(?P<pid>\d+)\.(?P<start>\d*)"
)


def owner() -> str:
    """Return host, boot, process namespace, process id and start time of this process.

    Example: node7.1b9d2c44.4026531836.81234.5550123. The text can be part of a file name.
    """
    start = process.start_time(os.getpid())
    return ".".join([*_this_host(), str(os.getpid()), "" if start is None else str(start)])


def is_running(name: str) -> bool | None:
    """Return whether the process whose owner() starts `name` still runs; None if unknown."""
    match = _OWNER.match(name)
    host, boot, namespace = _this_host()
    if not match or match["host"] != host or not boot:  # macOS has no boot id
        return None
    if match["boot"] != boot:
        return False  # this host has been restarted since
    if match["namespace"] != namespace:
        return None  # another container on this host

    pid = int(match["pid"])
    start = process.start_time(pid)
    if start is None and _is_hidden(pid):
        return None
    return start is not None and str(start) == match["start"]


def is_this_process(name: str) -> bool:
    """Return whether `name` starts with the owner() of this process."""
    return name.startswith(owner())


def _is_hidden(pid: int) -> bool:
    """Return whether the id is that of another user's process that /proc hides (hidepid=2)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _this_host() -> tuple[str, str, str]:
    host = re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())[:60]
    return host, process.boot_id()[:8], re.sub(r"\D", "", process.namespace("pid"))
