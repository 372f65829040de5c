"""Find out from its source whether a program imports this package, and so holds early signals."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(?=[.\w])(\.*)([\w.]*)", re.MULTILINE)
_MARK = os.path.join("preemption", "stop_signal.py")  # a file that no other package has
_MAXIMUM_SCRIPT_BYTES = 1 << 20


def imports_this_package(words: Sequence[str]) -> bool:
    """Return whether a command runs a script or module that imports this package.

    Only such a program unblocks the signals that were blocked before exec(). The handlers of other
    programs would never run.
    """
    for path, folder in _sources(words):
        try:
            with open(path, "rb") as file:
                text = file.read(_MAXIMUM_SCRIPT_BYTES)
        except OSError:
            continue
        return any(
            _is_this_package(dots.decode(), name.decode(), path, folder)
            for dots, name in _IMPORT.findall(text)
        )
    return False


def _is_this_package(dots: str, name: str, path: str, folder: str) -> bool:
    """Return whether an import in the file at `path` means this package, under any name.

    Its files decide, since "from utils import ..." is common in other code as well.
    """
    parts = name.split(".") if name else []
    if dots:
        parent = os.path.join(os.path.dirname(path), *[".."] * (len(dots) - 1))
        return _contains_package(parent, parts)

    # Scripts may add the folder of the kit to sys.path.
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for place in (folder, *_python_path(), os.path.dirname(package)):
        if _contains_package(place, parts):
            return True
        first = os.path.join(place, parts[0])
        if os.path.exists(first) or os.path.exists(f"{first}.py"):
            return False  # another module of that name comes first
    return False


def _contains_package(folder: str, parts: Sequence[str]) -> bool:
    return any(
        os.path.isfile(os.path.join(folder, *parts[:length], _MARK))
        for length in range(len(parts) + 1)
    )


def _sources(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield files that may be the program, with the first folder of its sys.path.

    "train.py"; for `-m pkg.train` pkg/train.py and pkg/train/__main__.py.
    """
    scripts = [word for word in words if word.endswith(".py")]
    if scripts:
        yield scripts[0], os.path.dirname(scripts[0]) or "."

    for option, name in zip(words, words[1:], strict=False):
        if option == "-m":
            for folder in (".", *_python_path()):
                path = os.path.join(folder, *name.split("."))
                yield f"{path}.py", "."
                yield os.path.join(path, "__main__.py"), "."


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
