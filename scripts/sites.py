"""Site profiles (jobs/sites/*.yaml, or a file of your own): what a cluster has, wants to be asked for, and needs set.

Every key is checked, and a mistake is named with file, key and line. Not here: what is done with them (submit.py).
"""
from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from utils.launch.gpus import VENDORS
from utils.schedulers import parse_walltime

FOLDER = Path(__file__).resolve().parents[1] / "jobs" / "sites"
SCHEDULERS = ("slurm", "pbs")
LAUNCHERS = ("auto", "torchrun", "srun", "mpiexec", "pbs_tmrsh", "pbsdsh", "ssh")


class SiteError(ValueError):
    """A profile that is not there or has a mistake; the message names file, line and key."""


@dataclass(frozen=True)
class Queue:
    """The published limits of a queue; None where there is none."""

    max_time: int | None = None  # seconds
    min_nodes: int | None = None
    max_nodes: int | None = None


@dataclass(frozen=True)
class Variable:
    """A variable that the jobs of a site need, and why."""

    value: str
    reason: str


@dataclass(frozen=True)
class Site:
    """One profile. What it does not say is None or empty, and is then left to the scheduler."""

    name: str
    path: Path
    title: str
    scheduler: str
    account_example: str | None = None  # where it is given, a job needs an account
    queue: str | None = None  # the one that is taken when none is named
    queue_option: str = "partition"  # Slurm: what a queue is there, "partition" or "qos"
    queues: dict[str, Queue] = field(default_factory=dict)
    gpus_per_node: int | None = None
    cores_per_node: int | None = None  # those that a job may use, counted as the scheduler counts
    memory_per_node: str | None = None
    gpu_vendor: str | None = None  # None: each job looks for itself
    ask_for_gpus: bool = True  # false where nodes are given whole and the scheduler knows no GPUs
    launcher: str = "auto"
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    chunk: tuple[str, ...] = ()
    environment: dict[str, Variable] = field(default_factory=dict)


def names() -> list[str]:
    """The profiles that come with the kit."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Site:
    """The profile of that name, or in the file of that name (anything with a slash or ending in .yaml or .yml)."""
    is_file = "/" in name or name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else FOLDER / f"{name}.yaml"
    if not is_file and name not in names():
        raise SiteError(f"There is no site {name!r}. The kit knows {', '.join(names())}.{_nearest(name, names())} "
                        "For a profile of your own, give its path: --site path/to/site.yaml.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SiteError(f"The site file {name} cannot be read: {error.strerror}. A path to a YAML file was expected. "
                        "Check the path.") from None
    except UnicodeDecodeError as error:
        raise SiteError(f"The site file {name} is not UTF-8 text: {error.reason} at byte {error.start}. Save it as "
                        "UTF-8.") from None
    return parse(text, path)


def parse(text: str, path: Path) -> Site:
    """The profile in a YAML text. path: for messages; its stem is the profile's name."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)  # nodes, which know their lines, instead of values
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise SiteError(f"{path}{line}: this is not YAML: {error.problem}. Correct the line.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SiteError(f"{path}: this is not YAML: {error}. Correct the file.") from None
    reader = _Reader(path)
    if root is None:
        raise SiteError(f"{path}: the file is empty. Keys such as 'title' and 'scheduler' were expected.")
    values = reader.mapping(root, "the file", _SITE)
    for key in ("title", "scheduler"):
        if key not in values:
            raise SiteError(f"{path}: the key {key!r} is missing. Every site needs it. Add a line '{key}: ...'.")
    return Site(name=path.stem, path=path, **values)  # type: ignore[arg-type]


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


class _Reader:
    """Turns YAML nodes into values, each by the reader of its key.

    A scalar is taken as it was written, not as YAML would understand it: YAML makes a number of 6:00:00 and a truth
    value of on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, node: yaml.Node, key: str, found: str, expected: str) -> SiteError:
        return SiteError(f"{self.path}, line {node.start_mark.line + 1}: {key} is {found}. Expected: {expected}.")

    def items(self, node: yaml.Node, key: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self.wrong(node, key, _kind(node), "keys with values, one 'key: value' a line")
        seen: set[str] = set()
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                raise self.wrong(name_node, f"a key of {key}", _kind(name_node), "a word")
            if name_node.value in seen:
                raise self.wrong(name_node, f"key {name_node.value!r}", "there twice", "each key once")
            seen.add(name_node.value)
            yield name_node.value, name_node, value_node

    def mapping(self, node: yaml.Node, key: str, readers: dict[str, _Read]) -> dict[str, object]:
        values: dict[str, object] = {}
        for name, name_node, value_node in self.items(node, key):
            if name not in readers:
                raise SiteError(f"{self.path}, line {name_node.start_mark.line + 1}: the key {name!r} is not known."
                                f"{_nearest(name, list(readers))} Known keys: {', '.join(readers)}.")
            values[name] = readers[name](self, value_node, repr(name))
        return values

    def text(self, node: yaml.Node, key: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.wrong(node, key, _kind(node), "one value")
        if not node.value.strip():
            raise self.wrong(node, key, "empty", "a value; leave the line out where there is none")
        return str(node.value)

    def one_of(self, node: yaml.Node, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(node, key)
        if value not in choices:
            raise self.wrong(node, key, repr(value), f"one of {', '.join(choices)}")
        return value

    def count(self, node: yaml.Node, key: str) -> int:
        value = self.text(node, key)
        if not re.fullmatch("[1-9][0-9]{0,6}", value):
            raise self.wrong(node, key, repr(value), "a whole number from 1 on")
        return int(value)

    def truth(self, node: yaml.Node, key: str) -> bool:
        return self.one_of(node, key, ("true", "false")) == "true"

    def seconds(self, node: yaml.Node, key: str) -> int:
        value = self.text(node, key)
        try:
            return parse_walltime(value)
        except ValueError:
            raise self.wrong(node, key, repr(value), "a time such as 12:00:00") from None

    def texts(self, node: yaml.Node, key: str) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.wrong(node, key, _kind(node), "a list, [a, b] or one '- value' a line")
        return tuple(self.text(item, f"an entry of {key}") for item in node.value)

    def queues(self, node: yaml.Node, key: str) -> dict[str, Queue]:
        return {name: Queue(**self.mapping(value, f"queue {name!r}", _QUEUE))  # type: ignore[arg-type]
                for name, _, value in self.items(node, key)}

    def variables(self, node: yaml.Node, key: str) -> dict[str, Variable]:
        variables = {}
        for name, name_node, value in self.items(node, key):
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
                raise self.wrong(name_node, f"a name in {key}", repr(name), "letters, digits and _")
            values = self.mapping(value, f"variable {name!r}", _VARIABLE)
            for part in _VARIABLE:
                if part not in values:
                    raise self.wrong(value, f"variable {name!r}", f"without its {part}",
                                     "'value: ...' and 'reason: ...', so that everybody knows why it is set")
            variables[name] = Variable(**values)  # type: ignore[arg-type]
        return variables


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a set of keys"
    return "a list" if isinstance(node, yaml.SequenceNode) else repr(node.value)


def _choice(*choices: str) -> Callable[[_Reader, yaml.Node, str], str]:
    return lambda reader, node, key: reader.one_of(node, key, choices)


_Read = Callable[[_Reader, yaml.Node, str], object]
_SITE: dict[str, _Read] = {
    "title": _Reader.text, "scheduler": _choice(*SCHEDULERS), "account_example": _Reader.text, "queue": _Reader.text,
    "queue_option": _choice("partition", "qos"), "queues": _Reader.queues, "gpus_per_node": _Reader.count,
    "cores_per_node": _Reader.count, "memory_per_node": _Reader.text, "gpu_vendor": _choice(*VENDORS),
    "ask_for_gpus": _Reader.truth, "launcher": _choice(*LAUNCHERS), "modules": _Reader.texts, "setup": _Reader.texts,
    "directives": _Reader.texts, "chunk": _Reader.texts, "environment": _Reader.variables,
}
_QUEUE: dict[str, _Read] = {"max_time": _Reader.seconds, "min_nodes": _Reader.count, "max_nodes": _Reader.count}
_VARIABLE: dict[str, _Read] = {"value": _Reader.text, "reason": _Reader.text}
