"""What this process and its descendants have done: a rank that only waits does nothing."""

from __future__ import annotations

import os
import threading

from . import process


def work_done() -> tuple[float, float, bool]:
    """Return CPU seconds, megabytes of I/O, and whether a thread of this process waits for a disk.

    The first two include all descendants. CPU seconds include the time in which
    other Python threads of this process waited for a core. They decrease when a thread or a child
    ends. Zeros without /proc.
    """
    # Not the threads of gloo: they look for work a hundred times a second.
    main = threading.main_thread()  # its native_id is that of the parent after a fork
    own = {os.getpid() if thread is main else thread.native_id for thread in threading.enumerate()}
    own.discard(threading.get_native_id())
    seconds = megabytes = 0.0
    for pid in process.with_descendants([os.getpid()]):
        ticks = map(int, process.stat(f"/proc/{pid}")[1][11:15])  # with children that ended
        seconds += sum(ticks) / os.sysconf("SC_CLK_TCK")
        threads = own if pid == os.getpid() else {pid}
        seconds += sum(process.schedule(thread, pid).ready_seconds for thread in threads if thread)
        amounts = (line.partition(b": ") for line in process.read(f"/proc/{pid}/io").splitlines())
        megabytes += sum(int(n) for key, _, n in amounts if key in (b"rchar", b"wchar")) / 1e6
    states = (process.stat(f"/proc/self/task/{thread}")[1][:1] for thread in process.thread_ids())
    return seconds, megabytes, ["D"] in states
