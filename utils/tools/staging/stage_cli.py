"""Pack an environment once for all its users; list archives and copies; remove unused ones.

The archive lies in the environment's folder .ddpkit-stage, where all launches look first.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...log import print_result
from ...visible_text import visible
from ..cli import defaults, interpreter
from ..cli.arguments import ArgumentParser
from . import ORIGIN, StagingError
from .archive import cache_folders, fits, get_archive, owners_of, records_in, remove_archives
from .kept import locked
from .marker import MARKER
from .node_copy import candidates, open_root, root_of
from .packages import Environment, find_environment
from .room import copies_in, is_in_memory, remove_copy

DESCRIPTION = """\
Pack an environment once for all its users; list and remove archives and copies of --stage.

ddpkit stage pack       pack the packages of a Python: who owns the environment, or root, does so
                        once, and the launches of all users read that archive
ddpkit stage list       archives of this Python and of this user, copies on this node
ddpkit stage clean      remove archives of this user that no longer fit their environment, and
                        copies of this user on this node that no rank uses

The environment is that of the Python which ddpkit launch would choose.
Exit status: 0; 1 where something is wrong; 2 for a command line that is wrong.
"""
_HOUR = 3600.0


class _Row(NamedTuple):
    """A line of the list. size: bytes; None if only its owner may see it. used: since 1970."""

    kind: str
    size: int | None
    owner: int
    used: float
    purpose: str
    path: str


def main(words: Sequence[str]) -> int:
    """Run a subcommand; return its exit status."""
    parser = ArgumentParser(
        prog="ddpkit stage",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("pack", "list", "clean"))
    parser.add_argument("--python", metavar="PATH", help="of the environment")
    also = "pack: as in the launches that are to use it; repeatable"
    parser.add_argument("--stage-also", action="append", default=[], metavar="FOLDER", help=also)
    stage_dir = "list, clean: look for copies here, too"
    parser.add_argument("--stage-dir", metavar="FOLDER", help=stage_dir)
    args = parser.parse_args(words)
    try:
        if args.action == "pack":
            return _pack(_python(args.python), args.stage_also)
        environment = _environment(args.python)
        if args.stage_dir is None and (folder := defaults.load().get("stage-dir")):
            args.stage_dir = folder.value
        named = candidates(args.stage_dir, os.environ) if args.stage_dir else []
        folders = list(dict.fromkeys([*named, *candidates("", os.environ), "/tmp"]))
        action = _list if args.action == "list" else _clean
        return action(environment, folders)
    except (StagingError, OSError, interpreter.InterpreterError, defaults.DefaultsError) as error:
        print(f"ddpkit stage: error: {visible(str(error))}", file=sys.stderr)
        return 1


def _python(option: str | None) -> str:
    """Return the Python that ddpkit launch would choose. Raises InterpreterError."""
    return interpreter.choose(os.environ, default=defaults.python(), option=option or "").path


def _environment(option: str | None) -> Environment | None:
    """Return the environment whose archives are wanted; None if there is no such Python."""
    if option:
        return find_environment(_python(option), [])
    with suppress(interpreter.InterpreterError, StagingError):
        return find_environment(_python(None), [])
    return None


def _pack(python: str, also: Sequence[str]) -> int:
    environment = find_environment(python, also, for_all=True)
    if problem := environment.shared_torch:
        print_result(problem)
    archive = get_archive(environment, print_result, for_all=True)
    print_result(f"{archive.path}: launches of all users with --stage and {python} read it")
    return 0


def _list(environment: Environment | None, folders: Sequence[str]) -> int:
    rows = [*_archives(environment), *_copies(folders)]
    for row in rows:
        size = "?" if row.size is None else f"{row.size / 1e6:.0f}"
        age = f"{max(0.0, time.time() - row.used) / _HOUR:.1f} h" if row.used else "?"
        print_result(
            f"{row.kind:<9} {size:>7} MB  {_user(row.owner):<12} {age:>9}  "
            f"{visible(f'{row.purpose}  {row.path}')}"
        )
    if not rows:
        print_result("no archives, and no copies on this node")
    return 0


def _archives(environment: Environment | None) -> Iterator[_Row]:
    prefix = environment.prefix if environment else ""
    owners = owners_of(prefix) if environment else owners_of("/")
    for folder in cache_folders(prefix):
        for record in records_in(folder, owners):
            archive = record.archive
            state = "" if fits(record, environment) else ", which has changed since"
            state += ", for all users" if record.for_all else ""
            purpose = f"of {archive.prefix}{state}"
            yield _Row("archive", archive.size, record.owner, record.used, purpose, archive.path)


def _copies(folders: Sequence[str]) -> Iterator[_Row]:
    """Yield the copies on this node; other users' copies as far as they can be seen."""
    for folder in folders:
        kind = "in memory" if _is_in_memory(folder) else "copy"
        for root in sorted(glob.glob(f"{glob.escape(folder)}/ddpkit-stage-*[0-9]")):
            owner = os.lstat(root).st_uid
            try:
                keys = copies_in(root)
            except OSError:
                yield _Row(kind, None, owner, 0.0, "of another user", root)
                continue
            for used, key in keys:
                path = os.path.join(root, key)
                state = ", in use" if owner == os.geteuid() and _is_used(root, key) else ""
                yield _Row(kind, _size(path), owner, used, f"of {_origin(path)}{state}", path)


def _clean(environment: Environment | None, folders: Sequence[str]) -> int:
    lines = 0

    def note(text: str) -> None:
        nonlocal lines
        lines += 1
        print_result(visible(text))

    status = 0
    for folder in cache_folders(environment.prefix if environment else ""):
        try:
            remove_archives(folder, note, environment)
        except OSError as error:
            note(f"{error.filename or folder}: {error.strerror or error}. Its archive is kept")
            status = 1
    for folder in folders:
        if os.path.lexists(root_of(folder)):
            try:
                _clean_root(open_root(folder, make=False), note)
            except (OSError, StagingError) as error:
                note(f"{folder}: {error}")
                status = 1
    if not lines:
        print_result("nothing to remove")
    return status


def _clean_root(root: str, note: Callable[[str], None]) -> None:
    for _, key in copies_in(root):
        path = os.path.join(root, key)
        size, origin = _size(path) / 1e6, _origin(path)
        if remove_copy(root, key):
            note(f"removed {path}, {size:.0f} MB: a copy of {origin}")
        else:
            note(f"kept {path}: a rank uses it")


def _is_in_memory(folder: str) -> bool:
    with suppress(OSError):
        return is_in_memory(folder)
    return False


def _is_used(root: str, key: str) -> bool:
    """Whether a rank uses a copy."""
    if not os.path.exists(os.path.join(root, f"{key}.used")):
        return False
    try:
        with locked(root, key, kind="used", wait=False):
            return False
    except OSError:
        return True


def _size(folder: str) -> int:
    """Return the bytes that a copy takes on the disk."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_blocks * 512
    return size


def _origin(copy: str) -> str:
    """Return the environment that a folder is a copy of."""
    with suppress(OSError), open(os.path.join(copy, "pyvenv.cfg"), encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition("=")
            if name.strip() == ORIGIN and os.path.exists(os.path.join(copy, MARKER)):
                return value.strip()
    return "an unknown environment"


def _user(number: int) -> str:
    import pwd  # Unix only

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
