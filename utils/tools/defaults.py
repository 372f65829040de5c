"""Defaults of options in files: of a project, of a user, and of a centre.

The command line wins, then variables, then [tool.ddpkit] of the nearest pyproject.toml, then
~/.config/ddpkit.yaml, then jobs/ddpkit.yaml beside the installation.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from ..launch_error import LaunchError
from .interpreter import KIT

PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
CENTRE_FILE = next(  # pip puts jobs/ into the package
    os.path.join(folder, "jobs", "ddpkit.yaml")
    for folder in (PACKAGE, KIT)
    if folder == KIT or os.path.isdir(os.path.join(folder, "jobs"))
)


class Setting(NamedTuple):
    """A value that a file may hold. variable: read by the ranks or the command; "" for none."""

    meaning: str
    form: str  # pattern of the whole value
    example: str
    default: str
    variable: str = ""
    is_path: bool = False  # with a slash, it starts from the folder of the file


_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.,@:+/=-]*"
SETTINGS = {
    "site": Setting(
        "profile of the cluster, a name or a file",
        r"\S.*",
        "derecho",
        "generic-slurm or generic-pbs",
        "DDPKIT_SITE",
        is_path=True,
    ),
    "account": Setting("account to charge", _WORD, "abc@v100", "none"),
    "partition": Setting("partition of Slurm, queue of PBS", _WORD, "gpu", "that of the site"),
    "python": Setting(
        "Python of the ranks where no environment is active",
        r"\S.*",
        "/opt/env/bin/python",
        "see docs/launchers.md",
        "PYTHON",
        is_path=True,
    ),
    "hang-timeout": Setting(
        "seconds without progress until a hang is explained and ended",
        r"auto|\d+(\.\d+)?",
        "300",
        "as the script says",
        "DDPKIT_HANG_TIMEOUT",
    ),
    "port-range": Setting(
        "ports on which the kit listens",
        r"\d{1,5}-\d{1,5}",
        "20000-20999",
        "any",
        "DDPKIT_PORT_RANGE",
    ),
    "check-training": Setting(
        "whether the ranks are compared while they train",
        r"true|false",
        "false",
        "as the script says",
        "DDPKIT_CHECK_TRAINING",
    ),
    "stage": Setting(
        "whether ranks start from copies of their packages on each node",
        r"true|false",
        "true",
        "false",
        "DDPKIT_STAGE",
    ),
    "stage-dir": Setting(
        "local folder of each node for these copies",
        r"[/~$]\S*",
        "/local/scratch",
        "$TMPDIR or /tmp, else /dev/shm",
        "DDPKIT_STAGE_DIR",
    ),
}
_OF_RANKS = ("hang-timeout", "port-range", "check-training")


class DefaultsError(LaunchError):
    """A file of defaults cannot be used; the message names file and key."""


class Default(NamedTuple):
    """A value, and the file or variable that it is from."""

    value: str
    origin: str


def files(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the paths of the files, the first of which wins; they need not exist."""
    folder = os.getcwd()
    while not os.path.isfile(os.path.join(folder, "pyproject.toml")):
        if folder == os.path.dirname(folder):
            folder = os.getcwd()
            break
        folder = os.path.dirname(folder)
    config = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [
        os.path.join(folder, "pyproject.toml"),
        os.path.join(config, "ddpkit.yaml"),
        CENTRE_FILE,
    ]


def load(environ: Mapping[str, str] = os.environ) -> dict[str, Default]:
    """Return the values that variables and files set. Raises DefaultsError."""
    found: dict[str, Default] = {}
    for name, setting in SETTINGS.items():
        if setting.variable and environ.get(setting.variable):
            found[name] = Default(environ[setting.variable], f"${setting.variable}")
    for path in files(environ):
        for name, value in _read(path):
            found.setdefault(name, Default(_checked(path, name, value), path))
    return found


def set_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables that ranks read, where they are not set. Raises DefaultsError."""
    for name, found in load(environ).items():
        variable = SETTINGS[name].variable
        if name in _OF_RANKS and not environ.get(variable):
            environ[variable] = {"true": "1", "false": "0"}.get(found.value, found.value)


def python(environ: Mapping[str, str] = os.environ) -> Default | None:
    """Return the Python that a file names; None where none does. Raises DefaultsError."""
    return load({**environ, "PYTHON": ""}).get("python")


def _read(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a file."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise DefaultsError(f"{path} cannot be read: {error}. Expected a text file") from None
    if path.endswith(".toml"):
        yield from _toml_table(path, text)
        return
    for number, line in enumerate(text.splitlines(), 1):  # PyYAML may be missing where ranks start
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line or line == "---":
            continue
        match = re.fullmatch(r"""([\w-]+):\s+(["']?)(.*)\2""", line)
        if match is None:
            raise DefaultsError(f"{path}, line {number}: {line!r} is not 'key: value'. Correct it")
        yield match[1], match[3]


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


def _checked(path: str, name: str, value: object) -> str:
    """Return a value as text. Raises DefaultsError for one that is not as expected."""
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise DefaultsError(
            f"{path}: the key {name!r} is unknown. {hint}Expected one of: {', '.join(SETTINGS)}"
        )
    setting = SETTINGS[name]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not re.fullmatch(setting.form, text):
        raise DefaultsError(
            f"{path}: {name} is {text!r}. Expected a value such as {setting.example}"
        )
    text = os.path.expanduser(text)
    if setting.is_path and "/" in text:
        return os.path.join(os.path.dirname(path), text)
    return text
