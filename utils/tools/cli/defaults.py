"""Read defaults of options from the files of a project, a user and a centre.

The command line wins, then variables, then [tool.ddpkit] of the project's pyproject.toml, then
~/.config/ddpkit.yaml, then the centre's file (centre_file()). A file that another user may change
is not read. In a project's file, settings that run programs or write into job scripts count only
once the user trusts the file (trust()).
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
import stat
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple

from ...errors import LaunchError
from ...host.trust import NotTrusted, make_folder, may_trust
from ...visible_text import visible
from .interpreter import KIT
from .launch_options import LAUNCH_SETTINGS, SHARED_OPTIONS, Setting, from_text

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
CENTRE_VARIABLE = "DDPKIT_CENTRE_FILE"
SYSTEM_FILE = "/etc/ddpkit.yaml"
KIT_FILE = next(  # pip puts jobs/ into the package
    os.path.join(folder, "jobs", "ddpkit.yaml")
    for folder in (PACKAGE, KIT)
    if folder == KIT or os.path.isdir(os.path.join(folder, "jobs"))
)


_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.,@:+/=-]*"
SETTINGS = {
    "site": Setting(
        "profile of the cluster, a name or a file",
        r"\S.*",
        "derecho",
        "generic-slurm or generic-pbs",
        "DDPKIT_SITE",
        is_path=True,
        needs_trust=True,
    ),
    "account": Setting("account to charge", _WORD, "abc@v100", "none", "SBATCH_ACCOUNT"),
    "partition": Setting(
        "partition of Slurm, queue of PBS", _WORD, "gpu", "that of the site", "SBATCH_PARTITION"
    ),
    "python": Setting(
        "Python of the ranks where no environment is active",
        r"\S.*",
        "/opt/env/bin/python",
        "see docs/launchers.md",
        "PYTHON",
        is_path=True,
        needs_trust=True,
    ),
    **LAUNCH_SETTINGS,
    "port-range": Setting(
        "ports on which the kit listens",
        r"\d{1,5}-\d{1,5}",
        "20000-20999",
        "any",
        "DDPKIT_PORT_RANGE",
        for_ranks=True,
    ),
    "check-training": Setting(
        "whether the ranks are compared while they train",
        r"true|false",
        "false",
        "as the script says",
        "DDPKIT_CHECK_TRAINING",
        for_ranks=True,
    ),
    "follow-seconds": Setting(
        "seconds between two queries of --follow while the job prints",
        r"[1-9]\d*",
        "60",
        "30",
    ),
}
_PROJECT_FILE = "pyproject.toml"
_LONGEST = 1 << 20  # bytes read from a file
_warned: set[str] = set()  # a command loads the files several times


class DefaultsError(LaunchError):
    """A file of defaults cannot be used; the message names file and key."""


class Default(NamedTuple):
    """A value, and the file or variable that sets it."""

    value: str
    origin: str


class _Entry(NamedTuple):
    """A key of a file and its value. where: "FILE, line 3"."""

    where: str
    name: str
    value: Any


def files(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the paths of the files, the first of which wins; they need not exist."""
    user_file = os.path.join(_config_folder(environ), "ddpkit.yaml")
    return [project_file(), user_file, centre_file(environ)]


def centre_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the centre's file, which need not exist.

    CENTRE_VARIABLE, which a module file may set, names it. Otherwise it is SYSTEM_FILE if that
    exists, else KIT_FILE beside the installation.
    """
    named = environ.get(CENTRE_VARIABLE)
    return named or (SYSTEM_FILE if os.path.lexists(SYSTEM_FILE) else KIT_FILE)


def project_file() -> str:
    """Return the path of the project's file, which need not exist.

    It is the nearest one in this folder and the folders above it, up to the root of the repository
    or the home folder. Outside of a repository and of the home folder, only this folder counts.
    """
    folders = [os.getcwd()]
    home = os.path.realpath(os.path.expanduser("~"))
    while not os.path.exists(os.path.join(folders[-1], ".git")) and folders[-1] != home:
        above = os.path.dirname(folders[-1])
        if above == folders[-1]:
            del folders[1:]
            break
        folders.append(above)
    paths = [os.path.join(folder, _PROJECT_FILE) for folder in folders]
    return next(filter(os.path.lexists, paths), paths[0])


def load(environ: Mapping[str, str] = os.environ) -> dict[str, Default]:
    """Return the values that variables and files set. Raises DefaultsError.

    Files that another user may change, unknown keys, and keys of a project's file that need trust()
    are left out. A warning says so, once in a process.
    """
    found: dict[str, Default] = {}
    for name, setting in SETTINGS.items():
        if setting.variable and environ.get(setting.variable):
            found[name] = Default(environ[setting.variable], f"${setting.variable}")
    for path in files(environ):
        try:
            content = _content(path, is_named=path == environ.get(CENTRE_VARIABLE))
        except NotTrusted as error:
            if not path.endswith(_PROJECT_FILE) or _names_kit(path):
                _warn(str(error))
            continue
        values = _values(path, content)
        needing = [name for name in SETTINGS if SETTINGS[name].needs_trust and name in values]
        if needing and path.endswith(_PROJECT_FILE) and not _is_trusted(path, content, environ):
            _warn(
                f"{path} sets {' and '.join(needing)}, which is ignored until you trust this file. "
                f"Read it, then run: ddpkit sites trust {shlex.quote(path)}"
            )
            for name in needing:
                del values[name]
        for name, value in values.items():
            found.setdefault(name, value)
    return found


def trust(path: str, environ: Mapping[str, str] = os.environ) -> dict[str, Default]:
    """Let all values of a project's file count while its content stays as it is; return them.

    Raises DefaultsError where there is nothing to trust, or another user may change the file.
    """
    path = os.path.abspath(path)
    try:
        content = _content(path)
        values = _values(path, content)
        if not values:
            raise DefaultsError(f"{path} has no [tool.ddpkit]. Expected the file of a project")
        if not _is_trusted(path, content, environ):
            _add_trusted(f"{_digest(path, content)} {path}\n", environ)
    except OSError as error:
        raise DefaultsError(f"{error}. The file is not trusted") from None
    return values


def mistakes_in(path: str) -> tuple[dict[str, Default], list[str]]:
    """Return what a file sets, and a sentence for each mistake in it, before anybody relies on it.

    Raises DefaultsError where it cannot be read.
    """
    path = os.path.abspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        problem = error.strerror or error
        raise DefaultsError(f"{path} cannot be read: {problem}. Expected a text file") from None
    if len(content) > _LONGEST:
        raise DefaultsError(f"{path} has more than {_LONGEST} bytes. Expected lines 'key: value'")
    values: dict[str, Default] = {}
    mistakes: list[str] = []
    for entry in _read(path, content, mistakes):
        if entry.name not in SETTINGS:
            mistakes.append(_unknown(entry, "is unknown"))
            continue
        if entry.name in values:
            mistakes.append(f"{entry.where}: {entry.name} is set a second time. Remove one of both")
        try:
            values[entry.name] = Default(_checked(path, entry), entry.where)
        except DefaultsError as error:
            mistakes.append(str(error))
    return values, mistakes


def set_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables that ranks read, where they are not set. Raises DefaultsError."""
    for name, found in load(environ).items():
        setting = SETTINGS[name]
        if setting.for_ranks and not environ.get(setting.variable):
            environ[setting.variable] = {"true": "1", "false": "0"}.get(found.value, found.value)


def fill_in(args: Namespace) -> None:
    """Set options of ddpkit launch that are None, except options that the ranks read themselves.

    Raises DefaultsError.
    """
    found = load()
    for name, option in SHARED_OPTIONS.items():
        for_command = option.setting is not None and not option.setting.for_ranks
        if for_command and getattr(args, name) is None and option.key in found:
            setattr(args, name, from_text(name, found[option.key].value))


def python(environ: Mapping[str, str] = os.environ) -> Default | None:
    """Return the Python that a file names; None where none does. Raises DefaultsError."""
    return load({**environ, "PYTHON": ""}).get("python")


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        print(f"ddpkit: warning: {visible(text)}", file=sys.stderr)


def _config_folder(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")


def _content(path: str, *, is_named: bool = False) -> bytes:
    """Return what a file holds, b"" where there is none. Raises NotTrusted, DefaultsError.

    is_named: whether a variable names the file. Whoever sets a user's variables may run programs as
    well.
    """
    remedy = (
        "make it yours and closed to writing by others (chmod go-w), or use variables and options"
    )
    try:
        # Whoever may write a file beside the installation may write the kit itself.
        is_free = is_named or path == KIT_FILE
        opened = os.open(path, os.O_RDONLY) if is_free else may_trust(path, remedy)
        with open(opened, "rb") as file:
            return file.read(_LONGEST)
    except (FileNotFoundError, NotADirectoryError):
        if is_named:
            _warn(f"{CENTRE_VARIABLE} is {path}, which does not exist. Correct or unset it")
        return b""
    except NotTrusted:
        raise
    except OSError as error:
        problem = error.strerror or error
        raise DefaultsError(f"{path} cannot be read: {problem}. Expected a text file") from None


def _names_kit(path: str) -> bool:
    """Whether a file that is not used has something for the kit: most pyproject.toml do not."""
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        return b"ddpkit" in (file.read(_LONGEST) or b"")
    return False


# Trusted files: lines of "DIGEST PATH" in a private file ------------------------------------------


def _digest(path: str, content: bytes) -> str:
    """Return the digest of a file's path and content: relative paths in it start at its folder."""
    return hashlib.sha256(os.fsencode(os.path.realpath(path)) + b"\0" + content).hexdigest()


def _trusted_file(environ: Mapping[str, str]) -> str:
    return os.path.join(_config_folder(environ), "ddpkit", "trusted")


def _is_trusted(path: str, content: bytes, environ: Mapping[str, str]) -> bool:
    try:
        with open(may_trust(_trusted_file(environ), "make it yours alone"), "rb") as file:
            lines = file.read(_LONGEST).splitlines()
    except FileNotFoundError:
        return False
    except OSError as error:
        _warn(str(error))
        return False
    return any(line.startswith(_digest(path, content).encode()) for line in lines)


def _add_trusted(line: str, environ: Mapping[str, str]) -> None:
    """Append a line to the file, which this user alone can read. Raises OSError."""
    file = _trusted_file(environ)
    os.makedirs(_config_folder(environ), mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        make_folder(os.path.dirname(file), 0o700)
    folder = may_trust(os.path.dirname(file), "make it yours alone, or set XDG_CONFIG_HOME")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        descriptor = os.open(os.path.basename(file), flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    with open(descriptor, "wb") as opened:
        os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
        opened.write(os.fsencode(line))


# What a file holds --------------------------------------------------------------------------------


def _values(path: str, content: bytes) -> dict[str, Default]:
    """Return what a file sets; a warning names unknown keys. Raises DefaultsError."""
    values = {}
    for entry in _read(path, content):
        if entry.name in SETTINGS:
            values[entry.name] = Default(_checked(path, entry), path)
        else:
            _warn(_unknown(entry, "is unknown and ignored"))
    return values


def _read(path: str, content: bytes, mistakes: list[str] | None = None) -> Iterator[_Entry]:
    """Yield the keys and values of a file.

    mistakes: receives a message for each wrong line; None: such a line raises DefaultsError.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DefaultsError(f"{path} cannot be read: {error}. Expected a text file") from None
    if path.endswith(".toml"):
        yield from (_Entry(path, *item) for item in _toml_table(path, text))
        return
    for number, line in enumerate(text.splitlines(), 1):  # PyYAML may be missing where ranks start
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line or line == "---":
            continue
        where = f"{path}, line {number}"
        match = re.fullmatch(r"""([\w-]+):\s+(["']?)(.*)\2""", line)
        if match is not None:
            yield _Entry(where, match[1], match[3])
            continue
        mistake = f"{where}: {line!r} is not 'key: value'. Correct it"
        if mistakes is None:
            raise DefaultsError(mistake)
        mistakes.append(mistake)


def _toml_table(path: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield what [tool.ddpkit] holds."""
    if "ddpkit" not in text:
        return
    try:
        import tomllib
    except ImportError:
        if re.search(r"^\s*\[tool\.ddpkit\]", text, re.MULTILINE):
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise DefaultsError(
                f"{path} has [tool.ddpkit], and Python {version} cannot read TOML. Expected Python "
                "3.11 or newer. Write these lines into ~/.config/ddpkit.yaml, as 'key: value'"
            ) from None
        return
    try:
        table = tomllib.loads(text).get("tool", {}).get("ddpkit", {})
    except tomllib.TOMLDecodeError as error:
        raise DefaultsError(f"{path} is not TOML: {error}. Correct it") from None
    yield from table.items()


def _unknown(entry: _Entry, problem: str) -> str:
    near = difflib.get_close_matches(entry.name, SETTINGS, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"{entry.where}: the key {entry.name!r} {problem}. {hint}Expected one of: "
        f"{', '.join(SETTINGS)}"
    )


def _checked(path: str, entry: _Entry) -> str:
    """Return a value as text. Raises DefaultsError for an unexpected value."""
    setting, value = SETTINGS[entry.name], entry.value
    text = str(value).lower() if isinstance(value, bool) else str(value)
    expected = f"a value such as {setting.example}"
    is_right = re.fullmatch(setting.form, text) is not None
    if is_right and entry.name == "port-range":
        first, last = map(int, text.split("-"))
        is_right, expected = 0 < first <= last < 1 << 16, "two ports such as 20000-20999"
    if not is_right:
        raise DefaultsError(f"{entry.where}: {entry.name} is {text!r}. Expected {expected}")
    text = os.path.expanduser(text)
    if setting.is_path and "/" in text:
        return os.path.join(os.path.dirname(path), text)
    return text
