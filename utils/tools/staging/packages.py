"""List the packages of an environment as members of an archive, which has the layout of a venv.

Python started from the copy finds its packages and handles their .pth files as in the environment
itself. The interpreter, the standard library and all else beside the packages are links into the
environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from . import ALSO, ORIGIN, PACKAGES, StagingError
from .kept import SYSTEM, names_beside

_PROBE_SECONDS = 120.0
_THREADS = 8  # a parallel file system answers many requests at once
_FORMAT = "3"
_NO_PACKAGES = "/nonexistent"  # replaces ~/.local, for packages that all users have
_PROBE = r"""
import importlib.util, json, os, site, sys
folders = site.getsitepackages()
if site.ENABLE_USER_SITE:
    folders.append(site.getusersitepackages())
try:
    torch = os.path.abspath(importlib.util.find_spec("torch").origin)
except Exception:
    torch = ""
found = {
    "version": sys.version, "short": "%d.%d" % sys.version_info[:2], "prefix": sys.prefix,
    "base": getattr(sys, "_base_executable", None) or sys.executable,
    "folders": [entry for entry in sys.path if entry in folders],
    "has_user_site": bool(site.ENABLE_USER_SITE),
    "torch": torch}
"""
_PRINT = r"""
print("\nddpkit-stage " + json.dumps(found))
"""


class Environment(NamedTuple):
    """A Python and its folders of packages, in search order."""

    version: str  # sys.version
    short: str  # "3.11"
    prefix: str
    base: str  # path of the interpreter
    folders: tuple[str, ...]
    also: tuple[str, ...] = ()  # other folders to stage
    has_user_site: bool = False  # whether it imports usercustomize
    torch: str = ""  # the first file of torch that it imports

    @property
    def shared_torch(self) -> str:
        """Return where torch is if it is not staged, and what to do; "" if it is staged."""
        real, folder = os.path.realpath(self.torch), os.path.dirname(os.path.dirname(self.torch))
        if not self.torch or any(_moved(real, source, name) for source, name in self.staged):
            return ""
        if any(_moved(self.torch, source, name) for source, name in self.staged):
            return (
                f"torch in {folder} is a link to {real}, which is not staged: install torch itself"
            )
        return f"torch is imported from {folder}, which is not staged: add --stage-also {folder}"

    @property
    def staged(self) -> list[tuple[str, str]]:
        """Return each staged folder with its name in the archive."""
        first = f"lib/python{self.short}/site-packages"
        names = [first, *(f"{PACKAGES}/{number}" for number in range(1, len(self.folders)))]
        also = [(folder, f"{ALSO}/{number}") for number, folder in enumerate(self.also)]
        return [*zip(self.folders, names, strict=True), *also]


class Member(NamedTuple):
    """A member of the archive. text: target of a link, or content that replaces the source's."""

    name: str
    kind: str  # "file", "link" or "folder"
    source: str = ""
    text: str = ""
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0o644


def find_environment(python: str, also: Sequence[str], *, for_all: bool = False) -> Environment:
    """Query a Python for its folders of packages. Raises StagingError.

    for_all: leave out packages that this user has installed with `pip install --user`.
    """
    also = tuple(os.path.realpath(os.path.expanduser(folder)) for folder in also)
    for folder in also:
        if not os.path.isdir(folder):
            raise StagingError(f"--stage-also {folder} is not a folder. Correct it")
    found = _describe(python, for_all)
    folders = tuple(filter(os.path.isdir, dict.fromkeys(found.pop("folders"))))
    if not folders:
        raise StagingError(f"{python} has no folder of packages. Use that of an environment")
    return Environment(**found, folders=folders, also=also)


def _describe(python: str, for_all: bool) -> dict[str, Any]:
    """Return an Environment's fields except `also`; from this process if it runs that Python."""
    isolated = sys.flags.no_site or sys.flags.no_user_site or sys.flags.ignore_environment
    if python == sys.executable and not isolated and not for_all:
        names: dict[str, Any] = {}
        exec(_PROBE, names)  # the same code as for another Python, without starting one
        return dict(names["found"])
    words = [python, "-c", _PROBE + _PRINT]
    environ = {**os.environ, **({"PYTHONUSERBASE": _NO_PACKAGES} if for_all else {})}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_PROBE_SECONDS, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StagingError(f"{python} does not start: {error}. Check it") from None
    line = next((line for line in done.stdout.split("\n") if line.startswith("ddpkit-stage ")), "")
    if not line:
        problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise StagingError(f"{python} does not list its packages ({problem}). Check it")
    return dict(json.loads(line.partition(" ")[2]))


def name_of(environment: Environment) -> str:
    """Return a hash over the names of the staged folders, not over their contents."""
    return _hash(environment).hexdigest()[:24]


def key_of(environment: Environment, visit: Callable[[Member], None]) -> str:
    """Return a hash over names, sizes and times of all that is staged.

    Compiled modules are left out, because the first program that imports a module writes them.

    visit: called with each member.
    """
    digest = _hash(environment)
    for folder, name in environment.staged:
        for member in _walk(folder, name, environment.staged, compiled=False):
            time = 0 if member.kind == "folder" else member.mtime_ns
            digest.update(repr((member.name, member.text, member.size, time)).encode())
            visit(member)
    return digest.hexdigest()[:24]


def _hash(environment: Environment) -> hashlib._Hash:
    # The base of some Pythons is the name they were started by: python or python3.
    folder, real = os.path.dirname(environment.base), os.path.realpath(environment.base)
    named = environment._replace(base=f"{folder}:{real}", torch="")
    return hashlib.sha256(json.dumps([_FORMAT, *named]).encode())


def members_of(environment: Environment) -> Iterator[Member]:
    """Yield all members of the archive, each folder before its contents."""
    yield from _surroundings(environment)
    for folder, name in environment.staged:
        yield from _walk(folder, name, environment.staged, compiled=True)
    others = [name for _, name in environment.staged[1 : len(environment.folders)]]
    add = "".join(
        f"import os, site, sys; site.addsitedir(os.path.join(sys.prefix, {name!r}))\n"
        for name in others
    )
    if environment.has_user_site:  # a venv has no user site, and the copy is one
        code = "importlib.util.find_spec('usercustomize') and __import__('usercustomize')"
        add += f"import importlib.util; {code}\n"
    if add:
        yield Member(f"{environment.staged[0][1]}/zzz-ddpkit-staged.pth", "file", text=add)


def _surroundings(environment: Environment) -> Iterator[Member]:
    """Yield the members that make the archive a venv, and links to entries beside the packages."""
    prefix, library = environment.prefix, f"python{environment.short}"
    home = os.path.dirname(environment.base)
    settings = f"home = {home}\ninclude-system-site-packages = false\n{ORIGIN} = {prefix}\n"
    yield Member("pyvenv.cfg", "file", text=settings)
    own = {"bin/python": environment.base, "bin/python3": "python", f"bin/{library}": "python"}
    for folder in ("bin", "lib", f"lib/{library}", PACKAGES, ALSO):
        yield Member(folder, "folder", mode=0o755)
    for name, target in own.items():
        yield Member(name, "link", text=target)
    yield Member("lib64", "link", text=_library_64(prefix, library))
    for name in names_beside(prefix):
        if name not in (f"lib/{library}", *own):
            yield Member(name, "link", text=os.path.join(prefix, name))


def _library_64(prefix: str, library: str) -> str:
    """Return the target of the archive's lib64. A separate lib64 may hold shared libraries.

    If lib64 has packages, Python would find the shared packages there, so it is not linked.
    """
    path = os.path.join(prefix, "lib64")
    is_own = prefix not in SYSTEM and os.path.isdir(path) and not os.path.islink(path)
    return path if is_own and not os.path.exists(os.path.join(path, library)) else "lib"


def _walk(
    folder: str, name: str, staged: Sequence[tuple[str, str]], *, compiled: bool
) -> Iterator[Member]:
    """Yield the members of a folder, in order, one entry's members after another."""
    yield Member(name, "folder", folder, mtime_ns=os.stat(folder).st_mtime_ns, mode=0o755)
    top = _entries(folder, name, folder, compiled)
    for member in top:
        if member.kind != "folder":
            is_pth = member.kind == "file" and member.name.endswith(".pth")
            yield _with_moved_lines(member, folder, staged) if is_pth else member
    folders = [member for member in top if member.kind == "folder"]

    from concurrent.futures import ThreadPoolExecutor  # slow to load, and seldom needed

    def below(member: Member) -> list[Member]:
        return list(_below(member, folder, compiled))

    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(below, folders):
            yield from found


def _with_moved_lines(member: Member, folder: str, staged: Sequence[tuple[str, str]]) -> Member:
    """Return a .pth file whose lines lead from the archive to the same folders, or to staged ones.

    folder: the folder of the file. A relative line that leads out of it becomes absolute.
    """
    with open(member.source, encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read().splitlines()
    here = os.path.dirname(member.name)
    for number, line in enumerate(lines):
        path = os.path.normpath(os.path.join(folder, line.rstrip()))
        if line.startswith(("#", "import ", "import\t")) or not line.strip():
            continue
        if not os.path.exists(path):
            continue
        moved = next(filter(None, (_moved(path, source, name) for source, name in staged)), path)
        lines[number] = moved if os.path.isabs(moved) else os.path.relpath(moved, here)
    return member._replace(text="".join(f"{line}\n" for line in lines))


def _moved(path: str, source: str, name: str) -> str:
    """Return the name in the archive for a path in a staged folder; "" for other paths."""
    for each, folder in ((path, source), (os.path.realpath(path), os.path.realpath(source))):
        if each == folder or each.startswith(f"{folder}/"):
            return os.path.normpath(os.path.join(name, os.path.relpath(each, folder)))
    return ""


def _below(folder: Member, root: str, compiled: bool) -> Iterable[Member]:
    yield folder
    for member in _entries(folder.source, folder.name, root, compiled):
        if member.kind == "folder":
            yield from _below(member, root, compiled)
        else:
            yield member


def _entries(folder: str, name: str, root: str, compiled: bool) -> list[Member]:
    """Return the members of a folder, without its subfolders' contents."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if compiled or entry.name != "__pycache__":
                    member = _member(entry, f"{name}/{entry.name}", root)
                    if member is not None:
                        found.append(member)
    except OSError as error:
        raise StagingError(
            f"{folder} cannot be read ({error.strerror}). Expected packages that this user may "
            "read, and that do not change meanwhile. Correct that"
        ) from None
    return found


def _member(entry: os.DirEntry[str], name: str, root: str) -> Member | None:
    if entry.is_symlink():
        target = os.readlink(entry.path)
        real = os.path.normpath(os.path.join(os.path.dirname(entry.path), target))
        inside = not os.path.isabs(target) and real.startswith(root + os.sep)
        return Member(name, "link", text=target if inside else real)
    status = entry.stat(follow_symlinks=False)
    if entry.is_dir():
        return Member(name, "folder", entry.path, mtime_ns=status.st_mtime_ns, mode=0o755)
    if not stat.S_ISREG(status.st_mode):
        return None
    mode = stat.S_IMODE(status.st_mode) & 0o777 | 0o600
    return Member(name, "file", entry.path, "", status.st_size, status.st_mtime_ns, mode)
