"""Read site profiles: the nodes of a cluster, and the options and variables that its jobs need.

The kit's profiles are jobs/sites/*.yaml. Each value may be written alone, or with its reason, its
source and the date when that was read: {value: 4, reason: ..., source: URL, read: 2026-11-22}.
A mistake is reported with file, line and key.
"""

from __future__ import annotations

import datetime
import difflib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...host.cores import CPU_BIND, parse_binding
from ...host.gpus import VENDORS
from ..launch.methods import NAMES
from ..schedulers.job_spec import parse_walltime
from ..schedulers.scheduler import Queue
from .paths import JOBS

FOLDER = JOBS / "sites"
SCHEDULERS = ("slurm", "pbs")
LAUNCHERS = ("auto", "torchrun", *(name for name in NAMES if name != "local"))


class ProfileError(ValueError):
    """A profile is missing or has a mistake; the message names file, line and key."""


@dataclass(frozen=True)
class Node:
    """A YAML node with its line: a text, a list of items, or pairs of key and value."""

    line: int  # from 1
    text: str | None = None
    items: list[Node] | None = None
    pairs: list[tuple[Node, Node]] | None = None

    @property
    def found(self) -> str:
        """The description of the node in an error message."""
        if self.text is not None:
            return repr(self.text)
        return "a list" if self.items is not None else "a set of keys"

    def get(self, key: str) -> Node | None:
        """Return the value of a key; None if this is no mapping, or has no such key."""
        return next((value for name, value in self.pairs or () if name.text == key), None)


def read_text(path: Path, name: str = "") -> str:
    """Read a YAML file. name: for messages. Raises ProfileError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(
            f"The site file {name or path} cannot be read: {error.strerror}. Expected the path of "
            "a YAML file. Check the path."
        ) from None
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"The site file {name or path} is not UTF-8 text: {error.reason} at byte "
            f"{error.start}. Save it as UTF-8."
        ) from None


def compose(text: str, path: Path) -> Node:
    """Read the nodes of a YAML text. path: for messages. Raises ProfileError.

    Scalars stay texts: YAML would read 6:00:00 as a number, and `on` as a truth value.
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
        if root is not None:
            return _converted(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ProfileError(f"{where}: this is not YAML: {error.problem}. Correct it.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ProfileError(f"{path}: this is not YAML: {error}. Correct the file.") from None
    raise ProfileError(f"{path}: the file is empty. Expected keys such as 'title' and 'scheduler'.")


def _converted(node: Any) -> Node:
    line = node.start_mark.line + 1
    if node.id == "sequence":
        return Node(line, items=[_converted(item) for item in node.value])
    if node.id == "mapping":
        pairs = [(_converted(key), _converted(value)) for key, value in node.value]
        return Node(line, pairs=pairs)
    return Node(line, text=str(node.value))


class Reader:
    """Convert YAML nodes to values, each with the function of its key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def error(self, node: Node, key: str, found: str, expected: str) -> ProfileError:
        return ProfileError(
            f"{self.path}, line {node.line}: {key} is {found}. Expected: {expected}."
        )

    def items(self, node: Node, key: str) -> Iterator[tuple[str, Node, Node]]:
        """Yield (name, node of the name, node of the value) of a mapping."""
        if node.pairs is None:
            raise self.error(node, key, node.found, "keys with values, one 'key: value' per line")
        seen: set[str] = set()
        for name_node, value_node in node.pairs:
            name = name_node.text
            if name is None:
                raise self.error(name_node, f"a key of {key}", name_node.found, "a word")
            if name in seen:
                raise self.error(name_node, f"key {name!r}", "given twice", "each key once")
            seen.add(name)
            yield name, name_node, value_node

    def mapping(self, node: Node, key: str, readers: dict[str, Read]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, name_node, value_node in self.items(node, key):
            if name not in readers:
                raise ProfileError(
                    f"{self.path}, line {name_node.line}: the key {name!r} is unknown."
                    f"{suggestion(name, list(readers))} Expected one of: {', '.join(readers)}."
                )
            values[name] = readers[name](self, value_node, repr(name))
        return values

    def text(self, node: Node, key: str) -> str:
        if node.text is None:
            raise self.error(node, key, node.found, "one value")
        if not node.text.strip():
            raise self.error(node, key, "empty", "a value; remove the line if there is none")
        return node.text

    def one_of(self, node: Node, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(node, key)
        if value not in choices:
            raise self.error(node, key, repr(value), f"one of {', '.join(choices)}")
        return value

    def matching(self, node: Node, key: str, pattern: str, expected: str) -> str:
        """Read a text that matches a regular expression. expected: the pattern in words."""
        value = self.text(node, key)
        if not re.fullmatch(pattern, value):
            raise self.error(node, key, repr(value), expected)
        return value

    def count(self, node: Node, key: str) -> int:
        return int(self.matching(node, key, "[1-9][0-9]{0,6}", "a whole number from 1 on"))

    def boolean(self, node: Node, key: str) -> bool:
        return self.one_of(node, key, ("true", "false")) == "true"

    def list_of(self, node: Node, key: str) -> list[Node]:
        if node.items is None:
            raise self.error(node, key, node.found, "a list, [a, b] or one '- value' per line")
        return node.items

    def texts(self, node: Node, key: str) -> tuple[str, ...]:
        return tuple(self.text(item, f"an entry of {key}") for item in self.list_of(node, key))


Read = Callable[[Any, Node, str], object]  # (reader, node, key for messages) -> value


def suggestion(word: str, known: list[str]) -> str:
    """Return " Did you mean ...?" if a known word is similar to this one, else ""."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class Origin:
    """Why a value is in a profile, and where it is documented; "" if the profile does not say so.

    source: a URL, or "$ " and the command that printed the value. read: the date, 2026-11-22.
    """

    reason: str = ""
    source: str = ""
    read: str = ""


@dataclass(frozen=True)
class Variable:
    """An environment variable that the jobs of a site need."""

    value: str
    from_nodes: int = 1  # set in jobs with at least this number of nodes


@dataclass(frozen=True)
class Profile:
    """One site. None or empty: left to the scheduler."""

    name: str
    path: Path
    title: str
    scheduler: str  # "slurm" or "pbs"
    account_example: str | None = None  # if it is given, a job needs an account
    queue: str | None = None  # the default
    queue_option: str = "partition"  # Slurm: a queue is a "partition" or a "qos"
    queues: dict[str, Queue] = field(default_factory=dict)  # published limits
    gpus_per_node: int | None = None
    cores_per_node: int | None = None  # available to jobs, counted as the scheduler counts
    memory_per_node: str | None = None  # "64G"
    gpu_vendor: str | None = None  # None: it is not known
    request_gpus: bool = True  # false where nodes are exclusive and the scheduler knows no GPUs
    launcher: str = "auto"
    network: str | None = None  # the network in NCCL's log: "AWS Libfabric", "IB"
    interface: str | None = None  # interfaces of the fabric, comma-separated: "hsn0,hsn1"
    host_suffix: str | None = None  # suffix of host names on the fabric: "i", ".hsn.example.org"
    binding: str | None = None  # cores of each rank: "list:4-7:8-11", "mask_cpu:0xfe,0xfe00"
    module_paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # lines of shell
    directives: tuple[str, ...] = ()  # "--constraint=gpu", "-l filesystems=home"
    chunk: tuple[str, ...] = ()  # PBS: "system=polaris"
    environment: dict[str, Variable] = field(default_factory=dict)
    # By "gpus_per_node", "queues.debug", "environment.NCCL_NET", "modules.cuda".
    origins: dict[str, Origin] = field(default_factory=dict)

    def exports(self, nodes: int, ranks_per_node: int) -> dict[str, str]:
        """Return the variables to set in a job with these numbers of nodes and ranks per node."""
        variables = {
            name: variable.value
            for name, variable in self.environment.items()
            if nodes >= variable.from_nodes
        }
        fabric: dict[str, str | None] = {}
        if nodes > 1:
            fabric["DDPKIT_NETWORK"] = self.network
            fabric["DDPKIT_HOST_SUFFIX"] = self.host_suffix
            if self.gpu_vendor != "intel":  # oneCCL communicates over MPI
                fabric["NCCL_SOCKET_IFNAME"] = self.interface
            fabric["GLOO_SOCKET_IFNAME"] = (self.interface or "").partition(",")[0] or None
        cores = parse_binding(self.binding) if self.binding is not None else []
        if len(cores) == ranks_per_node:
            fabric[CPU_BIND] = self.binding
            if self.scheduler == "pbs":  # otherwise PBS sets it to a rank's share of the node
                fabric["OMP_NUM_THREADS"] = str(min(map(len, cores)))
        return {name: value for name, value in fabric.items() if value is not None} | variables


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
            f"{suggestion(name, names())} For a profile of your own, give its path: "
            "--site path/to/site.yaml."
        )
    return parse(read_text(path, name), path)


def parse(text: str, path: Path) -> Profile:
    """Parse a profile. path: for messages; its stem becomes the profile's name."""
    root = compose(text, path)
    reader = _ProfileReader(path)
    sources = root.get("sources")
    if sources is not None:
        reader.sources = reader.read_sources(sources)
    values = reader.mapping(root, "the file", _PROFILE_KEYS)
    values.pop("sources", None)
    for key in ("title", "scheduler"):
        if key not in values:
            raise ProfileError(
                f"{path}: the key {key!r} is missing. Every site needs it. Add a line '{key}: ...'."
            )
    return Profile(name=path.stem, path=path, origins=reader.origins, **values)


class _ProfileReader(Reader):
    """A reader that keeps the origin of each value."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sources: dict[str, Origin] = {}
        self.origins: dict[str, Origin] = {}

    def read_sources(self, node: Node) -> dict[str, Origin]:
        """Read {NAME: {url: ..., read: DATE}}."""
        pages = {}
        for name, _, value in self.items(node, "'sources'"):
            parts = self.mapping(value, f"source {name!r}", {"url": _url, "read": _date})
            for part in ("url", "read"):
                if part not in parts:
                    raise self.error(
                        value, f"source {name!r}", f"without {part}", "{url: ..., read: 2026-11-22}"
                    )
            pages[name] = Origin(source=parts["url"], read=parts["read"])
        return pages

    def with_origin(self, node: Node, name: str, keys: dict[str, Read]) -> dict[str, Any]:
        """Read a mapping of these keys, reason, source and read, and keep the last three."""
        parts = self.mapping(node, repr(name), keys | _ORIGIN_KEYS)
        origin = parts.pop("source", Origin())
        reason, read = parts.pop("reason", ""), parts.pop("read", origin.read)
        self.origins[name] = replace(origin, reason=reason, read=read)
        return parts

    def sourced(self, node: Node, name: str, read: Read) -> Any:
        """Read a value that is alone, or in a mapping with its origin."""
        if node.get("value") is None:
            self.origins[name] = Origin()
            return read(self, node, repr(name))
        return self.with_origin(node, name, {"value": read})["value"]


def _url(reader: Reader, node: Node, key: str) -> str:
    expected = "an address that begins with https:// or http://, or '$ ' and a command"
    return reader.matching(node, key, r"(https?://|\$ )\S.*", expected)


def _date(reader: Reader, node: Node, key: str) -> str:
    value = reader.text(node, key)
    try:
        return datetime.date.fromisoformat(value).isoformat()
    except ValueError:
        raise reader.error(node, key, repr(value), "a date such as 2026-11-22") from None


def _source(reader: _ProfileReader, node: Node, key: str) -> Origin:
    """Read the name of one of the profile's sources, or a URL."""
    known = reader.sources
    if node.text in known:
        return known[node.text]
    if re.match(r"\$ |\w+://", reader.text(node, key)):
        return Origin(source=_url(reader, node, key))
    expected = f"a URL, or one of 'sources': {', '.join(known) or 'there are none'}"
    raise reader.error(node, key, repr(node.text), expected)


def _seconds(reader: Reader, node: Node, key: str) -> int:
    value = reader.text(node, key)
    try:
        return parse_walltime(value)
    except ValueError:
        raise reader.error(node, key, repr(value), "a time such as 12:00:00") from None


def _number(reader: Reader, node: Node, key: str) -> float:
    return float(reader.matching(node, key, r"[0-9]{1,6}(\.[0-9]+)?", "a number such as 1.5"))


def _max_time(reader: Reader, node: Node, key: str) -> tuple[tuple[int, int], ...]:
    """Read a time, or {up to so many nodes: a time} with ascending numbers."""
    if node.pairs is None:
        return ((sys.maxsize, _seconds(reader, node, key)),)
    tiers = []
    for _, nodes, value in reader.items(node, key):
        tiers.append((reader.count(nodes, f"a number of nodes in {key}"), value))
        if tiers != sorted(tiers, key=lambda tier: tier[0]):
            raise reader.error(nodes, key, "not ascending", "the smallest number of nodes first")
    return tuple((most, _seconds(reader, value, key)) for most, value in tiers)


def _name(key: str) -> str:
    """Return the name of a key: "'queues'" -> "queues"."""
    return key.strip("'")


def _value(read: Read) -> Read:
    return lambda reader, node, key: reader.sourced(node, _name(key), read)


def _choice(*choices: str) -> Read:
    return lambda reader, node, key: reader.one_of(node, key, choices)


def _entries(reader: _ProfileReader, node: Node, key: str) -> tuple[str, ...]:
    """Read a list of texts, each alone or with its origin."""
    texts = []
    for item in reader.list_of(node, key):
        text = reader.text(item.get("value") or item, f"an entry of {key}")
        reader.sourced(item, f"{_name(key)}.{text}", Reader.text)
        texts.append(text)
    return tuple(texts)


def _queues(reader: _ProfileReader, node: Node, key: str) -> dict[str, Queue]:
    queues = {}
    for queue, _, value in reader.items(node, key):
        limits = reader.with_origin(value, f"queues.{queue}", _QUEUE_KEYS)
        tiers = limits.get("max_time", ())
        queues[queue] = Queue(
            queue,
            min_walltime_seconds=limits.get("min_time", 0),
            max_walltime_seconds=max((seconds for _, seconds in tiers), default=None),
            max_walltime_by_nodes=tiers if len(tiers) > 1 else (),
            min_nodes=limits.get("min_nodes", 1),
            max_nodes=limits.get("max_nodes"),
            max_node_hours=limits.get("max_node_hours"),
            max_gpus=limits.get("max_gpus"),
        )
    return queues


def _variables(reader: _ProfileReader, node: Node, key: str) -> dict[str, Variable]:
    variables = {}
    for variable, name_node, value in reader.items(node, key):
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", variable):
            raise reader.error(
                name_node, f"a name in {key}", repr(variable), "letters, digits and _"
            )
        parts = reader.with_origin(value, f"environment.{variable}", _VARIABLE_KEYS)
        for part in ("value", "reason"):
            if value.get(part) is None:
                raise reader.error(
                    value,
                    f"variable {variable!r}",
                    f"without its {part}",
                    "'value: ...' and 'reason: ...'",
                )
        variables[variable] = Variable(**parts)
    return variables


def _binding(reader: _ProfileReader, node: Node, key: str) -> str:
    """Read {list: [4-7, 8-11]} or {masks: [0xfe, 0xfe00]}."""
    parts = reader.with_origin(node, _name(key), {"list": Reader.texts, "masks": Reader.texts})
    form = "'list: [\"0-7\", \"8-15\"]' or 'masks: [0xff, 0xff00]'"
    if len(parts) != 1:
        raise reader.error(node, key, "without cores, or with both", form)
    [(kind, entries)] = parts.items()
    binding = "list:" + ":".join(entries) if kind == "list" else "mask_cpu:" + ",".join(entries)
    try:
        parse_binding(binding)
    except ValueError:
        raise reader.error(node, key, repr(binding), form) from None
    return binding


_ORIGIN_KEYS: dict[str, Read] = {"reason": Reader.text, "source": _source, "read": _date}
_QUEUE_KEYS: dict[str, Read] = {
    "min_time": _seconds,
    "max_time": _max_time,
    "min_nodes": Reader.count,
    "max_nodes": Reader.count,
    "max_node_hours": _number,
    "max_gpus": Reader.count,
}
_VARIABLE_KEYS: dict[str, Read] = {"value": Reader.text, "from_nodes": Reader.count}
_PROFILE_KEYS: dict[str, Read] = {
    "title": Reader.text,
    "scheduler": _choice(*SCHEDULERS),
    "sources": lambda reader, node, key: None,  # read before the rest
    "account_example": Reader.text,
    "queue": Reader.text,
    "queue_option": _choice("partition", "qos"),
    "queues": _queues,
    "gpus_per_node": _value(Reader.count),
    "cores_per_node": _value(Reader.count),
    "memory_per_node": _value(Reader.text),
    "gpu_vendor": _value(_choice(*VENDORS)),
    "request_gpus": _value(Reader.boolean),
    "launcher": _value(_choice(*LAUNCHERS)),
    "network": _value(Reader.text),
    "interface": _value(Reader.text),
    "host_suffix": _value(Reader.text),
    "binding": _binding,
    "module_paths": _entries,
    "modules": _entries,
    "setup": _entries,
    "directives": _entries,
    "chunk": _entries,
    "environment": _variables,
}
