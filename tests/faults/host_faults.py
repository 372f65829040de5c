"""Break one host of the tests: its limits, cores, disks and files. Other hosts do not notice.

python tests/faults/host_faults.py hang FOLDER     mounts a file system there that never responds
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shlex
import struct
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.faults.packets import run
from tests.launch.launchers import ROOT
from utils.host import process


def processes_on(hosts: Hosts, host: str) -> list[int]:
    """Return the process ids of everything that runs on a host."""
    network, found = os.readlink(f"/proc/{hosts.pid(host)}/ns/net"), []
    for pid in process.process_ids():
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(f"/proc/{pid}/ns/net") == network:
                found.append(pid)
    return found


def replace_file(hosts: Hosts, host: str, path: Path, text: str) -> None:
    """Give a host another content of a file."""
    other = hosts.folder / f"{host}{str(path).replace('/', '-')}"
    other.write_text(text)
    run(hosts, host, shlex.join(["mount", "--bind", str(other), str(path)]))


def set_limits(hosts: Hosts, host: str, **limits: int) -> None:
    """Set resource limits of a host's daemons, such as nofile=256; what they start inherits them."""
    for pid in processes_on(hosts, host):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            for name, value in limits.items():
                resource.prlimit(pid, getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))


def set_cores(hosts: Hosts, host: str, cores: set[int]) -> None:
    """Leave a host's daemons, and what they start, these cores."""
    for pid in processes_on(hosts, host):
        os.sched_setaffinity(pid, cores)


def hang_folder(hosts: Hosts, host: str, folder: Path) -> None:
    """Mount a file system over a folder of a host that never responds, as NFS without its server."""
    started = hosts.popen(host, [sys.executable, __file__, "hang", str(folder)], env={"PYTHONPATH": str(ROOT)},
                          stdout=subprocess.PIPE)
    assert started.stdout
    if started.stdout.readline() != "ready\n":
        raise RuntimeError(f"no FUSE file system at {folder} of {host}")


def serve_nothing(folder: str) -> None:
    """Mount FUSE, answer its first request, and read the others without an answer."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"stopped", folder.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    request = os.read(device, 1 << 17)
    unique, major, minor = struct.unpack_from("=QII", request, 8)[0], *struct.unpack_from("=II", request, 40)
    # fuse_init_out: major, minor, max_readahead, flags, max_background, congestion, max_write, and zeros
    body = struct.pack("=IIIIHHI36x", major, min(minor, 31), 1 << 16, 0, 12, 9, 1 << 12)
    os.write(device, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)
    print("ready", flush=True)
    while True:
        os.read(device, 1 << 17)


if __name__ == "__main__":
    serve_nothing(sys.argv[2])
