"""Keep DataLoader workers alive when a scheduler signals all processes of a job."""

from __future__ import annotations

import os
import signal
import threading

_shielded_process = 0  # process id; a worker may call shield_worker() twice


def shield_worker(worker_id: int = 0) -> None:
    """Let a DataLoader worker outlive a stop of its rank; for DataLoader(worker_init_fn=...).

    Schedulers send SIGTERM and SIGUSR1 to all processes of a job. An unprotected worker is
    terminated by them, and its rank fails before it reaches a step boundary. A shielded worker is
    terminated only by SIGTERM from its own rank. Workers forked while a StopSignal is open are
    shielded without this call; spawned workers need it.
    """
    global _shielded_process
    if _shielded_process == os.getpid():
        return
    _shielded_process = os.getpid()

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    # SIGTERM is blocked and not handled, since torch installs its own handler in the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(
        target=_exit_on_sigterm_from, args=(os.getppid(),), name="wait for SIGTERM", daemon=True
    ).start()


def _exit_on_sigterm_from(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
