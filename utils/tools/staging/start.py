"""Prepare the copy of the packages on this node, then become the program of a rank."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from ...host.trust import make_folders, may_trust
from ...launch_protocol import STAGED, STAGED_COPY, read_restart_notice
from . import CACHES, IN_MEMORY, Archive, StagingError
from .marker import moved_folders
from .node_copy import candidates, prepare

# Variables of programs' caches, usually in a home folder, and the folder of each in the copy.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "MIOPEN_USER_DB_PATH": "miopen",
    "CUDA_CACHE_PATH": "cuda",
    "MPLCONFIGDIR": "matplotlib",
}
_SHEBANG_BYTES = 512


def main(order: Mapping[str, Any], words: list[str]) -> int:
    """Prepare the copy, then become the program; return a status if that is not possible.

    order: from distribute.stage(). words: command line of the program.
    """
    began = time.monotonic()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    archive, python = Archive(*order["archive"]), order["python"]
    folders = candidates(order["stage_dir"], os.environ)
    if order["stage_dir"]:
        with suppress(OSError):  # prepare() reports the reason
            make_folders(folders[0])
    notice = read_restart_notice()
    start = f"{order['launch']}-{notice.number if notice else 0}"

    os.environ.pop(STAGED_COPY, None)

    def check(copy: str) -> None:
        from .imports import check_imports  # the other ranks need not load it

        environ = dict(os.environ)
        use(copy, archive, python, words, environ)
        check_imports(copy, words, python, environ, os.environ)

    try:
        received = _received(order["received"], archive.size)
        copy = prepare(archive, received, folders, start, check)
        words = use(copy.path, archive, python, words, os.environ)
        os.environ[STAGED_COPY] = copy.path
        if os.environ.get("RANK", "0") == "0" and copy.made_in:
            _print(f"staging: {copy.path} made in {copy.made_in:.1f} s on {os.uname().nodename}")
    except (StagingError, OSError) as error:
        if first:
            _print(
                f"warning: on {os.uname().nodename} the packages are not staged ({error}). The "
                "ranks there use the shared ones. Make space, or name another local folder: "
                "--stage-dir"
            )
    if first and order["received"]:
        with suppress(OSError):
            os.unlink(order["received"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, unlike most programs
        signal.signal(number, signal.SIG_DFL)
    os.environ.pop(IN_MEMORY, None)
    os.environ[STAGED] = f"{order['seconds']:.1f}+{time.monotonic() - began:.1f}"
    try:
        os.execvp(words[0], words)
    except OSError as error:
        _print(
            f"error: {words[0]} could not be started: {error.strerror}. Expected a program, or a "
            "script whose name ends in .py"
        )
        return 127 if isinstance(error, FileNotFoundError) else 126  # as in a shell


def _received(path: str, size: int) -> str:
    """Return the archive that was sent to this node; "" if it must be read from its origin.

    size: size of a complete archive. Nobody else can replace the returned file.
    """
    if not path:
        return ""
    with suppress(OSError):
        opened = may_trust(path, "")
        try:
            status = os.fstat(opened)
        finally:
            os.close(opened)
        if status.st_uid == os.geteuid() and status.st_size == size:
            return path
    return ""


def use(
    copy: str,
    archive: Archive,
    python: str,
    words: Sequence[str],
    environ: MutableMapping[str, str],
) -> list[str]:
    """Return the program's command line with the copy's Python, and adapt its environment.

    python: the ranks' Python, the only word that is replaced.
    """
    staged, own = os.path.join(copy, "bin", "python"), os.path.dirname(python)
    path = environ.get("PATH", os.defpath).split(os.pathsep)
    found = shutil.which("python", path=os.pathsep.join(path))
    if found and os.path.realpath(os.path.dirname(found)) == os.path.realpath(own):
        index = path.index(os.path.dirname(found))
        path.insert(index, os.path.dirname(staged))
        environ["PATH"] = os.pathsep.join(path)
    for name, folder in _CACHES.items():
        if not environ.get(name):
            with suppress(OSError):  # the disk may be full
                os.makedirs(cache := os.path.join(copy, CACHES, folder), exist_ok=True)
                environ[name] = cache
    moved = moved_folders(copy, archive)
    if environ.get("PYTHONPATH") and moved:
        entries = environ["PYTHONPATH"].split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(
            moved.get(os.path.realpath(entry), entry) if entry else entry for entry in entries
        )
    words = [staged if word == python else word for word in words]
    if words[0] != staged and (script := _script_of(words[0], own, path)):
        words[:1] = [staged, script]
    return words


def _script_of(word: str, folder: str, path: Sequence[str]) -> str:
    """Return the path of a program that the Python in a folder runs ("accelerate"), or ""."""
    script = shutil.which(word, path=os.pathsep.join(path))
    if script is None:
        return ""
    with suppress(OSError), open(script, "rb") as file:
        line = file.read(_SHEBANG_BYTES).partition(b"\n")[0].decode(errors="replace")
        program = line.removeprefix("#!").strip()
        name = os.path.basename(program)
        if line.startswith("#!") and name.startswith("python"):
            return script if os.path.dirname(program) == folder else ""
    return ""


def _print(text: str) -> None:
    sys.stderr.write(f"ddpkit launch: {text}\n")  # one write: other ranks write, too
