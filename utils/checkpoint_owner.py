"""Tell which process writes a temporary folder of a checkpoint, and whether that process still runs."""
from __future__ import annotations

import os
import re
import socket
from pathlib import Path

_OWNER = re.compile(r"(?P<host>[\w-]{0,60})\.(?P<boot>[0-9a-f]*)\.(?P<namespace>\d*)\.(?P<pid>\d+)\.(?P<start>\d*)")


def owner() -> str:
    """Return host, boot, process namespace, process id and start time of this process, to be part of a file name.

    Example: node7.1b9d2c44.4026531836.81234.5550123.
    """
    return ".".join([*_here(), str(os.getpid()), _start_time(os.getpid()) or ""])


def is_running(name: str) -> bool | None:
    """Whether the process whose owner() begins `name` still runs; None if that cannot be known from here."""
    match = _OWNER.match(name)
    host, boot, namespace = _here()
    if not match or match["host"] != host or not boot:  # without /proc (macOS) no process can be told from a later one
        return None
    if match["boot"] != boot:
        return False  # this host was started again since
    if match["namespace"] != namespace:
        return None  # another container on this host
    start = _start_time(int(match["pid"]))
    if start is None and _is_hidden(int(match["pid"])):
        return None
    return start is not None and start == match["start"]


def _is_hidden(pid: int) -> bool:
    """Whether another user's process has this id, and /proc does not show it: the mount option hidepid=2."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def is_own(name: str) -> bool:
    return name.startswith(owner())


def _here() -> tuple[str, str, str]:
    host = re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())[:60]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return host, "", ""
    return host, boot, namespace


def _start_time(pid: int) -> str | None:
    """Clock ticks since the boot; None if there is no such process or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
