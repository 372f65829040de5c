"""Read site profiles: the nodes of a cluster, and the options and variables that its jobs need.

The kit's profiles are jobs/sites/*.yaml. Each value may be written alone, or beside its reason and
source, which are for people: {value: 4, reason: ..., source: URL, read: 2026-11-22}.
A mistake is reported with file, line and key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...host.cores import CPU_BIND, parse_binding
from ...host.masks import VENDORS
from ..cli.launch_options import SHARED_OPTIONS, LaunchOptions, type_of
from ..cli.missing_files import closest, no_such_file, why_no_yaml
from ..launch.methods import NAMES
from .paths import JOBS

FOLDER = JOBS / "sites"
SCHEDULERS = ("slurm", "pbs")
LAUNCHERS = ("auto", "torchrun", *(name for name in NAMES if name != "local"))


class ProfileError(ValueError):
    """A profile is missing or has a mistake; the message names file, line and key."""


@dataclass(frozen=True)
class Variable:
    """An environment variable that the jobs of a site need."""

    value: str
    from_nodes: int = 1  # set in jobs with at least this number of nodes


@dataclass(frozen=True)
class QueueRange:
    """The queue of jobs with first to last nodes. last: None for no upper limit."""

    queue: str
    first: int
    last: int | None

    def __str__(self) -> str:
        numbers = str(self.first) if self.last == self.first else f"{self.first}-{self.last or ''}"
        return f"{self.queue} (nodes: {numbers})"


@dataclass(frozen=True)
class Profile:
    """One site. Values that are None or empty are left to the scheduler."""

    name: str
    path: Path
    title: str
    scheduler: str  # "slurm" or "pbs"
    origin: str | None = None  # where the values are from, and whether they were run there
    account_example: str | None = None  # if set, a job needs an account
    queue: str | None = None  # default for numbers of nodes that `queues` lacks
    queues: tuple[QueueRange, ...] = ()  # ascending numbers of nodes
    queue_option: str = "partition"  # Slurm: a queue is a "partition" or a "qos"
    gpus_per_node: int | None = None
    cores_per_node: int | None = None  # available to jobs, counted as the scheduler counts
    memory_per_node: str | None = None  # "64G"
    gpu_vendor: str | None = None  # None: it is not known
    request_gpus: bool = True  # false where nodes are exclusive and the scheduler knows no GPUs
    launch: LaunchOptions = LaunchOptions()  # options that a profile may set
    network: str | None = None  # the network in NCCL's log: "AWS Libfabric", "IB"
    interface: str | None = None  # interfaces of the fabric, comma-separated: "hsn0,hsn1"
    host_suffix: str | None = None  # suffix of host names on the fabric: "i", ".hsn.example.org"
    binding: str | None = None  # cores of each rank: "list:4-7:8-11"
    stage_directives: tuple[str, ...] = ()  # added for jobs that use stage_dir: "--constraint=nvme"
    proxy: dict[str, str] = field(default_factory=dict)  # variables: http_proxy, https_proxy, ...
    module_paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # shell lines
    directives: tuple[str, ...] = ()  # "--constraint=gpu", "-l filesystems=home"
    chunk: tuple[str, ...] = ()  # PBS: "system=polaris"
    environment: dict[str, Variable] = field(default_factory=dict)

    def queue_for(self, nodes: int) -> str | None:
        """Return the queue of a job with this number of nodes; None: the scheduler's default.

        Raises ProfileError where the profile has queues, and none for this number.
        """
        for entry in self.queues:
            if entry.first <= nodes and (entry.last is None or nodes <= entry.last):
                return entry.queue
        if self.queues and self.queue is None:
            raise ProfileError(
                f"The profile {self.name} has no queue for {nodes} node{'s' * (nodes > 1)}. "
                f"Expected a number of: {', '.join(map(str, self.queues))}. Give another --nodes, "
                "or name a queue with --partition."
            )
        return self.queue

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
        known = {name: value for name, value in fabric.items() if value is not None}
        return self.proxy | known | variables


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
        own = next(
            (f"./{name}{end}" for end in (".yaml", ".yml", "") if os.path.isfile(name + end)), ""
        )
        if own:
            raise ProfileError(
                f"{name!r} is not a site of the kit, but {own} exists. Write the path of a file "
                f"with a slash: --site {own}"
            )
        raise ProfileError(
            f"There is no site {name!r}. Expected one of {', '.join(names())}."
            f"{suggestion(name, names())} For a profile of your own, give its path: "
            "--site path/to/site.yaml."
        )
    return parse(read_text(path), path)


def parse(text: str, path: Path) -> Profile:
    """Parse a profile. path: shown in messages; its stem is the profile's name."""
    root = compose(text, path)
    values = mapping(root, "the file", _KEYS)
    for key in ("title", "scheduler"):
        if key not in values:
            raise ProfileError(
                f"{path}: the key {key!r} is missing. Every site needs it. Add a line '{key}: ...'."
            )
    values.pop("sources", None)
    launch = LaunchOptions(**{name: values.pop(name) for name in _OF_LAUNCH if name in values})
    return Profile(name=path.stem, path=path, launch=launch, **values)


# YAML with line numbers ---------------------------------------------------------------------------

_LONGEST = 1 << 20  # bytes that a site file may have
Node = Any  # a node of PyYAML: its id is "scalar", "sequence" or "mapping"
Read = Callable[[Node, str], Any]  # (node, key for messages) -> value
_T = TypeVar("_T")


def read_text(path: Path) -> str:
    """Read a YAML file. Raises ProfileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ProfileError(
                f"{path} has more than {_LONGEST} bytes. Expected a site file. Check the path."
            )
        return content.decode()
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}. Expected a YAML file. Check the path"
        if isinstance(error, FileNotFoundError):
            problem = no_such_file(str(path), "Check the path of the site file")
        raise ProfileError(f"{problem}.") from None
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"The site file {path} is not UTF-8 text: {error.reason} at byte {error.start}. Save "
            "it as UTF-8."
        ) from None


def compose(text: str, path: Path) -> Node:
    """Read the nodes of a YAML text. path: shown in messages. Raises ProfileError.

    Scalars stay texts: YAML would read 6:00:00 as a number, and `on` as a truth value.
    """
    try:
        import yaml
    except ImportError as error:
        raise ProfileError(why_no_yaml(error, "site profiles are YAML files")) from None
    try:
        loader = yaml.SafeLoader(text)
        loader.name = str(path)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ProfileError(f"{where}: this is not YAML: {error.problem}. Correct it.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ProfileError(f"{path}: this is not YAML: {error}. Correct the file.") from None
    if root is None:
        raise ProfileError(
            f"{path}: the file is empty. Expected keys such as 'title' and 'scheduler'."
        )
    return root


def mistake(node: Node, key: str, found: str, expected: str) -> ProfileError:
    """Return the error for a value that is not as expected. found: "" for the value itself."""
    mark = node.start_mark
    shown = {"scalar": repr(node.value), "sequence": "a list", "mapping": "a set of keys"}
    return ProfileError(
        f"{mark.name}, line {mark.line + 1}: {key} is {found or shown[node.id]}. "
        f"Expected: {expected}."
    )


def child(node: Node, key: str) -> Node | None:
    """Return the value of a key; None if this is no mapping, or has no such key."""
    pairs = node.value if node.id == "mapping" else ()
    return next((value for name, value in pairs if name.value == key), None)


def items(node: Node, key: str) -> Iterator[tuple[str, Node, Node]]:
    """Yield (name, node of the name, node of the value) of a mapping."""
    if node.id != "mapping":
        raise mistake(node, key, "", "keys with values, one 'key: value' per line")
    seen: set[str] = set()
    for name_node, value_node in node.value:
        name = name_node.value
        if name_node.id != "scalar":
            raise mistake(name_node, f"a key of {key}", "", "a word")
        if name in seen:
            raise mistake(name_node, f"key {name!r}", "given twice", "each key once")
        seen.add(name)
        yield name, name_node, value_node


def mapping(node: Node, key: str, readers: Mapping[str, Read]) -> dict[str, Any]:
    """Read a mapping, each value with the function of its key."""
    values: dict[str, Any] = {}
    for name, name_node, value_node in items(node, key):
        if name not in readers:
            mark = name_node.start_mark
            raise ProfileError(
                f"{mark.name}, line {mark.line + 1}: the key {name!r} is unknown."
                f"{suggestion(name, list(readers))} Expected one of: {', '.join(readers)}."
            )
        values[name] = readers[name](value_node, repr(name))
    return values


def list_of(node: Node, key: str) -> list[Node]:
    """Return the nodes of a list."""
    if node.id != "sequence":
        raise mistake(node, key, "", "a list, [a, b] or one '- value' per line")
    return list(node.value)


def text(node: Node, key: str) -> str:
    """Read one value, which is not empty."""
    if node.id != "scalar":
        raise mistake(node, key, "", "one value")
    if not node.value.strip():
        raise mistake(node, key, "empty", "a value; remove the line if there is none")
    return str(node.value)


def texts(node: Node, key: str) -> tuple[str, ...]:
    """Read a list of values."""
    return tuple(text(item, f"an entry of {key}") for item in list_of(node, key))


def suggestion(word: str, known: list[str]) -> str:
    """Return " Did you mean ...?" if a known word is similar to this one, else ""."""
    near = closest(word, known)
    return f" Did you mean {near!r}?" if near else ""


# The keys of a profile: what converts each value, and an example ----------------------------------


def _form(convert: Callable[[str], _T], expected: str) -> Callable[[Node, str], _T]:
    """Return a reader of one value. convert: raises ValueError for an unexpected text."""

    def read(node: Node, key: str) -> _T:
        value = text(node, key)
        try:
            return convert(value)
        except ValueError:
            raise mistake(node, key, "", expected) from None

    return read


def _matching(pattern: str, convert: Callable[[str], _T]) -> Callable[[str], _T]:
    def converted(value: str) -> _T:
        if not re.fullmatch(pattern, value):
            raise ValueError
        return convert(value)

    return converted


def _choice(*choices: str) -> Read:
    return _form(lambda value: choices[choices.index(value)], f"one of {', '.join(choices)}")


_count = _form(_matching("[1-9][0-9]{0,6}", int), "a whole number from 1 on")
_boolean = _form(lambda value: ("false", "true").index(value) == 1, "one of true, false")
_COMMENTS: dict[str, Read] = dict.fromkeys(("reason", "source", "read"), text)  # not used


def _value(read: Read) -> Read:
    """Return a reader of a value that is alone, or in a mapping beside its reason and source."""
    return lambda node, key: read(child(node, "value") or node, key)


def _entries(node: Node, key: str) -> tuple[str, ...]:
    return tuple(_value(text)(item, f"an entry of {key}") for item in list_of(node, key))


def _parts(node: Node, key: str, keys: Mapping[str, Read]) -> dict[str, Any]:
    """Read a mapping of these keys; drop reason, source and date, which are for people."""
    found = mapping(node, key, {**keys, **_COMMENTS})
    return {name: value for name, value in found.items() if name not in _COMMENTS}


def _queues(node: Node, key: str) -> tuple[QueueRange, ...]:
    """Read [{nodes: 1-2, queue: debug}, {nodes: 3-, queue: main}]."""
    found: list[QueueRange] = []
    for item in list_of(node, key):
        parts = _parts(item, f"an entry of {key}", {"nodes": _node_range, "queue": text})
        missing = [name for name in ("nodes", "queue") if name not in parts]
        if missing:
            raise mistake(
                item, f"an entry of {key}", f"without {missing[0]!r}", "{nodes: 1-2, queue: debug}"
            )
        entry = QueueRange(parts["queue"], *parts["nodes"])
        if found and (found[-1].last is None or entry.first <= found[-1].last):
            raise mistake(
                item, f"{entry} in {key}", f"after {found[-1]}", "ascending numbers, each once"
            )
        found.append(entry)
    return tuple(found)


def _range(value: str) -> tuple[int, int | None]:
    """ "1-2" -> (1, 2), "3" -> (3, 3), "10-" -> (10, None). Raises ValueError."""
    found = re.fullmatch("([1-9][0-9]{0,6})(-([1-9][0-9]{0,6})?)?", value)
    if found is None:
        raise ValueError
    first, last = int(found[1]), int(found[3]) if found[3] else None
    if found[2] is None:
        last = first
    if last is not None and last < first:
        raise ValueError
    return first, last


_node_range = _form(_range, "numbers of nodes, such as 4, 1-2, or 10- for 10 or more")
_url = _form(
    _matching(r"https?://[\w.-]+(:\d+)?/?", str), "a URL such as http://proxy.site.org:3128"
)


def _proxy(node: Node, key: str) -> dict[str, str]:
    """Read {value: URL, no_proxy: "localhost,.site.org"}, or the URL alone."""
    parts = {"value": node}
    if node.id == "mapping":
        parts = _parts(node, key, {"value": lambda value, _: value, "no_proxy": text})
    if "value" not in parts:
        raise mistake(node, key, "without its value", "'value: http://proxy.site.org:3128'")
    url, exceptions = _url(parts["value"], key), parts.get("no_proxy", "localhost,127.0.0.1")
    return {"http_proxy": url, "https_proxy": url, "no_proxy": exceptions}


def _text_or_empty(node: Node, key: str) -> str:
    """Read one value, which may be "", in quotation marks."""
    return "" if node.id == "scalar" and node.style and not node.value else text(node, key)


def _variables(node: Node, key: str) -> dict[str, Variable]:
    variables = {}
    for name, name_node, value in items(node, key):
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise mistake(name_node, f"a name in {key}", "", "letters, digits and _")
        readers = {"value": _text_or_empty, "from_nodes": _count}
        parts = _parts(value, f"environment.{name}", readers)
        if "value" not in parts:
            raise mistake(value, f"variable {name!r}", "without its value", "'value: ...'")
        variables[name] = Variable(**parts)
    return variables


def _binding(node: Node, key: str) -> str:
    """Read {list: [4-7, 8-11]}."""
    parts = _parts(node, key, {"list": texts})
    form = '\'list: ["0-7", "8-15"]\''
    if "list" not in parts:
        raise mistake(node, key, "without cores", form)
    binding = "list:" + ":".join(parts["list"])
    try:
        parse_binding(binding)
    except ValueError:
        raise mistake(node, key, repr(binding), form) from None
    return binding


_OF_TYPE: dict[type, Read] = {bool: _boolean, int: _count, str: text}
_OF_LAUNCH: dict[str, Read] = {
    name: _value(_choice(*LAUNCHERS) if name == "launcher" else _OF_TYPE[type_of(name)[0]])
    for name, option in SHARED_OPTIONS.items()
    if option.in_profile
}
_LISTS = ("module_paths", "modules", "setup", "directives", "stage_directives", "chunk")
_KEYS: dict[str, Read] = {
    "title": text,
    "scheduler": _choice(*SCHEDULERS),
    "sources": lambda node, key: None,  # not used, for people only
    "origin": text,
    "account_example": text,
    "queue": _value(text),
    "queues": _queues,
    "queue_option": _choice("partition", "qos"),
    "gpus_per_node": _value(_count),
    "cores_per_node": _value(_count),
    "memory_per_node": _value(text),
    "gpu_vendor": _value(_choice(*VENDORS)),
    "request_gpus": _value(_boolean),
    **_OF_LAUNCH,
    "network": _value(text),
    "interface": _value(text),
    "host_suffix": _value(text),
    "binding": _binding,
    "proxy": _proxy,
    **dict.fromkeys(_LISTS, _entries),
    "environment": _variables,
}
