"""A process does not end while gloo's threads still hold tensors of the last collective: that would abort it."""
from __future__ import annotations

import subprocess
import sys

from tests.faults.programs import ENVIRONMENT, ROOT

PROGRAM = """
import hashlib, threading, time
from pathlib import Path
from utils import setup_distributed

def work():  # as a thread of gloo
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
    running.set()
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 100_000)  # without Python's lock
    ended.set()

running, ended = threading.Event(), threading.Event()
with setup_distributed("gloo"):
    threading.Thread(target=work).start()
    running.wait()
    start = time.monotonic()
print("waited", ended.is_set() or time.monotonic() - start >= 0.5)  # it waits half a second at most
"""


def test_the_end_waits_for_threads_of_gloo() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
                           timeout=200)
    assert ended.returncode == 0 and "waited True" in ended.stdout, ended.stdout + ended.stderr
