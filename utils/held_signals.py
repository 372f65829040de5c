"""Hold SIGUSR1 and SIGUSR2 from the start of a rank until its StopSignal exists; they would kill it meanwhile.

Importing the package installs a handler that only remembers them. Before that, from exec() on, the starter of a rank
has them blocked, so that they stay pending. No torch is imported here.
"""
from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

HELD = (signal.SIGUSR1, signal.SIGUSR2)
VARIABLE = "DDPKIT_SIGNALS_BLOCKED"  # tells the rank that its starter blocked them, and nobody else

_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(?=[.\w])(\.*)([\w.]*)", re.MULTILINE)

_received: list[signal.Signals] = []


def remember(number: int, frame: FrameType | None) -> None:
    """The handler: note the signal for the next StopSignal of this process."""
    if signal.Signals(number) not in _received:
        _received.append(signal.Signals(number))


def take() -> list[signal.Signals]:
    """The signals held so far, each returned once."""
    taken, _received[:] = _received[:], []
    return taken


def hold() -> None:
    """Remember HELD from now on, and let pending ones in. Handlers of others are left as they are."""
    if threading.current_thread() is not threading.main_thread():  # no other thread may set handlers
        return
    for number in HELD:
        if signal.getsignal(number) == signal.SIG_DFL and not _caught(number):
            signal.signal(number, remember)
    if os.environ.pop(VARIABLE, None):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def release() -> None:
    """Give HELD their default action again, also for those received so far: they end this process by default."""
    for number in HELD:
        if signal.getsignal(number) == remember:
            signal.signal(number, signal.SIG_DFL)
    for number in take():
        os.kill(os.getpid(), number)


def _caught(number: int) -> bool:
    """Whether a handler is installed that Python does not know of, such as that of faulthandler.register()."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            masks = dict(line.split(":\t", 1) for line in status if line.startswith("SigCgt"))
    except OSError:
        return False
    return bool(int(masks.get("SigCgt", "0"), 16) >> (number - 1) & 1)


def handles_stops(words: Sequence[str]) -> bool:
    """Whether the program is a script or a module that imports this package, as far as its text shows.

    Other programs get the signals as ever: blocked for good, their own handlers would never run.
    """
    for path, folder in _sources(words):
        try:
            with open(path, "rb") as file:
                text = file.read(1 << 20)
        except OSError:
            continue
        return any(_is_this_package(dots.decode(), name.decode(), path, folder)
                   for dots, name in _IMPORT.findall(text))
    return False


def _is_this_package(dots: str, name: str, path: str, folder: str) -> bool:
    """Whether an import in the file at `path` means this package, under whatever name it was copied.

    The text alone does not tell: "from utils import setup_distributed" is common in other code as well.
    """
    parts = name.split(".") if name else []
    if dots:
        return _is_here(os.path.join(os.path.dirname(path), *[".."] * (len(dots) - 1)), parts)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # which scripts may add to sys.path
    for place in (folder, *_python_path(), root):
        if _is_here(place, parts):
            return True
        if any(os.path.exists(os.path.join(place, f"{parts[0]}{end}")) for end in ("", ".py")):
            return False  # another module of that name comes first
    return False


def _is_here(folder: str, parts: Sequence[str]) -> bool:
    return any(os.path.isfile(os.path.join(folder, *parts[:length], os.path.basename(__file__)))
               for length in range(len(parts) + 1))


def _sources(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Files that may be the program, and the first folder of its sys.path.

    "train.py"; for `-m pkg.train` pkg/train.py and pkg/train/__main__.py.
    """
    yield from [(word, os.path.dirname(word) or ".") for word in words if word.endswith(".py")][:1]
    for option, name in zip(words, words[1:], strict=False):
        if option == "-m":
            for folder in (".", *_python_path()):
                path = os.path.join(folder, *name.split("."))
                yield from ((f"{path}.py", "."), (os.path.join(path, "__main__.py"), "."))


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def block() -> None:
    """In the starter, right before exec(): the blocked signals stay pending until hold() lets them in."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
