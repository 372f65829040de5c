"""Read site profiles: what a cluster has, which options its jobs need, and which variables to set.

The kit's profiles are jobs/sites/*.yaml. A mistake is reported with file, line and key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..gpus import VENDORS
from ..launch.methods import NAMES
from ..schedulers import Queue, parse_walltime
from .files import JOBS

FOLDER = JOBS / "sites"
SCHEDULERS = ("slurm", "pbs")
LAUNCHERS = ("auto", "torchrun", *(name for name in NAMES if name != "local"))


class ProfileError(ValueError):
    """A profile is missing or has a mistake; the message names file, line and key."""


@dataclass(frozen=True)
class Variable:
    """An environment variable that the jobs of a site need, and why."""

    value: str
    reason: str


@dataclass(frozen=True)
class Profile:
    """One site. None or empty: left to the scheduler."""

    name: str
    path: Path
    title: str
    scheduler: str  # "slurm" or "pbs"
    account_example: str | None = None  # where it is given, a job needs an account
    queue: str | None = None  # the default
    queue_option: str = "partition"  # Slurm: a queue is a "partition" or a "qos"
    queues: dict[str, Queue] = field(default_factory=dict)  # published limits
    gpus_per_node: int | None = None
    cores_per_node: int | None = None  # available to jobs, counted as the scheduler counts
    memory_per_node: str | None = None  # "64G"
    gpu_vendor: str | None = None  # None: each job detects it
    request_gpus: bool = True  # false where nodes are exclusive and the scheduler knows no GPUs
    launcher: str = "auto"
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # lines of shell
    directives: tuple[str, ...] = ()  # "--constraint=gpu", "-l filesystems=home"
    chunk: tuple[str, ...] = ()  # PBS: "system=polaris"
    environment: dict[str, Variable] = field(default_factory=dict)


def names() -> list[str]:
    """List the profiles that come with the kit."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Profile:
    """Load a profile of the kit by its name, or from a file.

    A name with a slash, or one that ends in .yaml or .yml, is the path of a file.
    Raises ProfileError.
    """
    is_file = "/" in name or name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else FOLDER / f"{name}.yaml"
    if not is_file and name not in names():
        raise ProfileError(
            f"There is no site {name!r}. Expected one of {', '.join(names())}."
            f"{_suggestion(name, names())} For a profile of your own, give its path: "
            "--site path/to/site.yaml."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(
            f"The site file {name} cannot be read: {error.strerror}. Expected the path of a YAML "
            "file. Check the path."
        ) from None
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"The site file {name} is not UTF-8 text: {error.reason} at byte {error.start}. Save "
            "it as UTF-8."
        ) from None
    return parse(text, path)


def parse(text: str, path: Path) -> Profile:
    """Parse a profile. path: for messages; its stem becomes the profile's name."""
    root = _compose(text, path)
    if root is None:
        raise ProfileError(
            f"{path}: the file is empty. Expected keys such as 'title' and 'scheduler'."
        )
    values = _Reader(path).mapping(root, "the file", _PROFILE_KEYS)
    for key in ("title", "scheduler"):
        if key not in values:
            raise ProfileError(
                f"{path}: the key {key!r} is missing. Every site needs it. Add a line '{key}: ...'."
            )
    return Profile(name=path.stem, path=path, **values)


def _suggestion(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


# YAML nodes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """A YAML node, which knows its line: a text, a list of items, or pairs of key and value."""

    line: int  # from 1
    text: str | None = None
    items: list[_Node] | None = None
    pairs: list[tuple[_Node, _Node]] | None = None

    @property
    def found(self) -> str:
        """What an error message calls it."""
        if self.text is not None:
            return repr(self.text)
        return "a list" if self.items is not None else "a set of keys"


def _compose(text: str, path: Path) -> _Node | None:
    """Read the nodes of a YAML text. Raises ProfileError.

    Scalars stay as they are written: YAML would make a number of 6:00:00 and a truth value of on.
    """
    try:
        import yaml
    except ImportError:
        raise ProfileError(
            "PyYAML is not installed, and site profiles are YAML files. Install it with "
            "`python -m pip install pyyaml`, or run scripts/setup_env.sh."
        ) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if root is None else _converted(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ProfileError(f"{where}: this is not YAML: {error.problem}. Correct it.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ProfileError(f"{path}: this is not YAML: {error}. Correct the file.") from None


def _converted(node: Any) -> _Node:
    line = node.start_mark.line + 1
    if node.id == "sequence":
        return _Node(line, items=[_converted(item) for item in node.value])
    if node.id == "mapping":
        pairs = [(_converted(key), _converted(value)) for key, value in node.value]
        return _Node(line, pairs=pairs)
    return _Node(line, text=str(node.value))


class _Reader:
    """Convert YAML nodes to values, each with the function of its key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def error(self, node: _Node, key: str, found: str, expected: str) -> ProfileError:
        return ProfileError(
            f"{self.path}, line {node.line}: {key} is {found}. Expected: {expected}."
        )

    def items(self, node: _Node, key: str) -> Iterator[tuple[str, _Node, _Node]]:
        """Yield (name, node of the name, node of the value) of a mapping."""
        if node.pairs is None:
            raise self.error(node, key, node.found, "keys with values, one 'key: value' a line")
        seen: set[str] = set()
        for name_node, value_node in node.pairs:
            name = name_node.text
            if name is None:
                raise self.error(name_node, f"a key of {key}", name_node.found, "a word")
            if name in seen:
                raise self.error(name_node, f"key {name!r}", "given twice", "each key once")
            seen.add(name)
            yield name, name_node, value_node

    def mapping(self, node: _Node, key: str, readers: dict[str, _Read]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, name_node, value_node in self.items(node, key):
            if name not in readers:
                raise ProfileError(
                    f"{self.path}, line {name_node.line}: the key {name!r} is unknown."
                    f"{_suggestion(name, list(readers))} Expected one of: {', '.join(readers)}."
                )
            values[name] = readers[name](self, value_node, repr(name))
        return values

    def text(self, node: _Node, key: str) -> str:
        if node.text is None:
            raise self.error(node, key, node.found, "one value")
        if not node.text.strip():
            raise self.error(node, key, "empty", "a value; leave the line out where there is none")
        return node.text

    def one_of(self, node: _Node, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(node, key)
        if value not in choices:
            raise self.error(node, key, repr(value), f"one of {', '.join(choices)}")
        return value

    def count(self, node: _Node, key: str) -> int:
        value = self.text(node, key)
        if not re.fullmatch("[1-9][0-9]{0,6}", value):
            raise self.error(node, key, repr(value), "a whole number from 1 on")
        return int(value)

    def boolean(self, node: _Node, key: str) -> bool:
        return self.one_of(node, key, ("true", "false")) == "true"

    def seconds(self, node: _Node, key: str) -> int:
        value = self.text(node, key)
        try:
            return parse_walltime(value)
        except ValueError:
            raise self.error(node, key, repr(value), "a time such as 12:00:00") from None

    def texts(self, node: _Node, key: str) -> tuple[str, ...]:
        if node.items is None:
            raise self.error(node, key, node.found, "a list, [a, b] or one '- value' a line")
        return tuple(self.text(item, f"an entry of {key}") for item in node.items)

    def queues(self, node: _Node, key: str) -> dict[str, Queue]:
        queues = {}
        for name, _, value in self.items(node, key):
            limits = self.mapping(value, f"queue {name!r}", _QUEUE_KEYS)
            queues[name] = Queue(
                name,
                max_walltime_seconds=limits.get("max_time"),
                min_nodes=limits.get("min_nodes", 1),
                max_nodes=limits.get("max_nodes"),
            )
        return queues

    def variables(self, node: _Node, key: str) -> dict[str, Variable]:
        variables = {}
        for name, name_node, value in self.items(node, key):
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
                raise self.error(name_node, f"a name in {key}", repr(name), "letters, digits and _")
            parts = self.mapping(value, f"variable {name!r}", _VARIABLE_KEYS)
            for part in _VARIABLE_KEYS:
                if part not in parts:
                    raise self.error(
                        value,
                        f"variable {name!r}",
                        f"without its {part}",
                        "'value: ...' and 'reason: ...', so that everybody knows why it is set",
                    )
            variables[name] = Variable(**parts)
        return variables


def _choice(*choices: str) -> _Read:
    return lambda reader, node, key: reader.one_of(node, key, choices)


_Read = Callable[[_Reader, _Node, str], object]
_PROFILE_KEYS: dict[str, _Read] = {
    "title": _Reader.text,
    "scheduler": _choice(*SCHEDULERS),
    "account_example": _Reader.text,
    "queue": _Reader.text,
    "queue_option": _choice("partition", "qos"),
    "queues": _Reader.queues,
    "gpus_per_node": _Reader.count,
    "cores_per_node": _Reader.count,
    "memory_per_node": _Reader.text,
    "gpu_vendor": _choice(*VENDORS),
    "request_gpus": _Reader.boolean,
    "launcher": _choice(*LAUNCHERS),
    "modules": _Reader.texts,
    "setup": _Reader.texts,
    "directives": _Reader.texts,
    "chunk": _Reader.texts,
    "environment": _Reader.variables,
}
_QUEUE_KEYS: dict[str, _Read] = {
    "max_time": _Reader.seconds,
    "min_nodes": _Reader.count,
    "max_nodes": _Reader.count,
}
_VARIABLE_KEYS: dict[str, _Read] = {"value": _Reader.text, "reason": _Reader.text}
