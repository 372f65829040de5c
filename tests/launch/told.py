"""A rank that says who it is and does what it is told by its arguments, without torch. For the tests of launch.py.

told.py FOLDER [wait] [exit RANK STATUS] [kill RANK]: writes its process id to FOLDER/RANK; `wait`: until SIGTERM, which
makes it end with status 5, noting every signal in FOLDER/RANK.signals; `exit`, `kill`: that rank fails, when all run.
"""
from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.launchers import detect

folder, *what = sys.argv[1:]
place = detect()
if "wait" in what:
    notes = open(Path(folder) / f"{place.rank}.signals", "a", buffering=1)  # noqa: SIM115
    ended = []

    def note(number: int, _: object) -> None:
        notes.write(f"{signal.Signals(number).name}\n")
        if number == signal.SIGTERM:
            ended.append(number)

    for caught in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(caught, note)
partial = Path(folder) / f"{place.rank}.partial"
partial.write_text(str(os.getpid()))
partial.rename(Path(folder) / str(place.rank))
sys.stdout.write(f"rank {place.rank} of {place.world_size}, {place.local_rank} of {place.local_world_size} on "
                 f"{socket.gethostname()} by {place.launcher}, notes {place.notes}, value {os.environ.get('VALUE')!r}, "
                 f"threads {os.environ.get('OMP_NUM_THREADS')}, folder {os.getcwd()}, arguments {what}\n")
sys.stdout.flush()
if "wait" in what:
    limit = time.monotonic() + 60
    while not all((Path(folder) / str(rank)).exists() for rank in range(place.world_size)):
        time.sleep(0.02)
    for word, rank, *status in zip(what, what[1:], what[2:] + [""], strict=False):
        if word == "kill" and int(rank) == place.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "exit" and int(rank) == place.rank:
            sys.exit(int(status[0]))
    while not ended and time.monotonic() < limit:
        time.sleep(0.02)
    sys.exit(5)
