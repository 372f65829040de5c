"""Workers of a DataLoader write where they are when their rank asks, and go on as if nothing had happened."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.programs import ROOT, python
from utils.monitor.hangs.worker_lines import read_stack, waits_for_work

PROGRAM = """
import ctypes, multiprocessing, os, signal, sys, threading, time
import torch.utils.data as data
from utils.monitor import worker_stacks
from utils.monitor.hangs.worker_lines import worker_lines

how, method = sys.argv[1:]
fork = multiprocessing.get_context("fork")
lock, (read_end, write_end) = fork.Lock(), os.pipe()
received = []

def sleep():
    end = time.monotonic() + 2
    time.sleep(2)  # sleep
    return time.monotonic() >= end

def read_of_c():
    got = ctypes.create_string_buffer(1)
    return ctypes.CDLL(None).read(read_end, got, 1) == 1  # c

def work_of_child(connection):
    connection.send(sum(name.startswith("/memfd:ddpkit") for name in map(link, os.listdir("/proc/self/fd"))))

def link(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""

def start_child():
    receiver, sender = fork.Pipe(False)
    child = fork.Process(target=work_of_child, args=(sender,))
    multiprocessing.current_process()._config["daemon"] = False  # a worker of a DataLoader may start none
    child.start()
    own = receiver.recv() == 1
    return os.read(read_end, 1) == b"x" and own  # nested

class Data(data.Dataset):
    def __init__(self, work): self.work = work
    def __len__(self): return 1
    def __getitem__(self, index): return self.work()  # spawned

WORK = {
    "sleep": sleep, "c": read_of_c, "nested": start_child,
    "pipe": lambda: os.read(read_end, 1) == b"x",  # pipe
    "lock": lambda: lock.acquire(),  # lock
    "timeout": lambda: lock.acquire(timeout=60),  # timeout
    "handler": lambda: (os.kill(os.getpid(), signal.SIGRTMAX - 7), time.sleep(2), received == [1])[2],  # handler
}

def ask():
    end, found = time.monotonic() + 20, []
    while time.monotonic() < end and (len(found) < 3 or found[-3:] != 3 * [found[-1]]):
        if lines := worker_lines():
            found.append(lines)
        time.sleep(0.1)  # it may still be on its way to that line
    print(found[-1], flush=True)
    os.write(write_end, b"x")
    how in ("lock", "timeout") and lock.release()

if __name__ == "__main__":
    if how == "handler":
        signal.signal(signal.SIGRTMAX - 7, lambda number, frame: received.append(1))
    worker_stacks.register()
    how in ("lock", "timeout") and lock.acquire()
    work = WORK[how] if method == "fork" else sleep
    thread = threading.Thread(target=ask)
    thread.start()
    loader = data.DataLoader(Data(work), num_workers=2, multiprocessing_context=method)
    print("went on:", bool(next(iter(loader))), flush=True)
    thread.join()
"""


def ask(folder: Path, how: str, method: str = "fork", without: str = "") -> tuple[str, str]:
    """Return the output of PROGRAM, and the line of its worker as a pattern."""
    script = folder / "load.py"
    script.write_text(PROGRAM)
    env = {"DDPKIT_WITHOUT": without, "PYTHONPATH": str(ROOT)}
    done = python(str(script), how, method, warm=method == "fork", env=env)
    assert done.returncode == 0 and "went on: True" in done.stdout, done
    number = next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith(f"# {how}"))
    return done.stdout, rf"^\('{re.escape(str(script))}, line {number}, in [\w<>]+',\)$"


@pytest.mark.parametrize("how", ["sleep", "pipe", "c", "lock", "timeout", "handler", "nested"])
def test_a_worker_says_where_it_is_and_goes_on(how: str, tmp_path: Path) -> None:
    """Neither Python's system calls nor those of C libraries fail, and another handler is not called."""
    output, line = ask(tmp_path, how)
    assert re.search(line, output, re.MULTILINE), output


@pytest.mark.parametrize(("method", "without"), [("spawn", ""), ("fork", "workers")])
def test_the_lines_of_other_workers_are_not_known(method: str, without: str, tmp_path: Path) -> None:
    output, _ = ask(tmp_path, "sleep", method, without)
    assert output.splitlines()[0] == "('',)", output


QUEUE = '  File "/dist-packages/multiprocessing/queues.py", line 103 in get\n'
STACK = ('Stack (most recent call first):\n{}'
         '  File "/dist-packages/torch/utils/data/_utils/worker.py", line 349 in _worker_loop\n')
FORKED = ('  File "/lib/multiprocessing/process.py", line 314 in _bootstrap\n'
          '  File "/home/me/train.py", line 40 in main\n')


@pytest.mark.parametrize(("text", "count", "is_whole", "waits"), [
    (STACK.format(QUEUE) + FORKED, 2, True, True),
    (STACK.format(QUEUE + '  File "/home/me/data.py", line 9 in __getitem__\n') + FORKED, 3, True, False),
    (STACK.format('  File "/home/me/data.py", line 9 in __getitem__\n'), 2, False, False),
    (STACK.format("") + "  ...\n", 1, True, False), ("", 0, False, False)])
def test_a_stack_ends_where_the_rank_has_forked_the_worker(text: str, count: int, is_whole: bool, waits: bool) -> None:
    frames, found_whole = read_stack(text.encode())
    assert (len(frames), found_whole, waits_for_work(frames)) == (count, is_whole, waits)
    assert not any("train.py" in file for file, _, _ in frames)
