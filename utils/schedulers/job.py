"""A job as the user means it, whatever the scheduler: what to run, on how much, for how long.

Not here: how it is written for a scheduler (slurm_jobs.py, pbs_jobs.py) or into a script (script.py).
"""
from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@:+/=-]{0,200}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,63}")
_LAUNCHER = re.compile(r"[a-z][a-z0-9_-]{0,30}")
_VENDOR = re.compile("nvidia|amd|intel")
_MODULE = re.compile(r"[A-Za-z0-9_.~/][A-Za-z0-9_.~+@:=/-]{0,200}")
_MEMORY = re.compile(r"([0-9]+)([KMGT])B?", re.IGNORECASE)
_ARRAY = re.compile(r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?")
_DEPENDENCY = re.compile(r"[a-z]+(:[A-Za-z0-9_.+\[\]-]+)*([,?][a-z]+(:[A-Za-z0-9_.+\[\]-]+)*)*")
_CHUNK = re.compile(r"[A-Za-z][A-Za-z0-9_-]*=[A-Za-z0-9_.@-]+")
_WALLTIME = re.compile(
    r"(?P<days>[0-9]{1,4})-(?P<hours>[0-9]{1,2})(?::(?P<minutes>[0-9]{1,2})(?::(?P<seconds>[0-9]{1,2}))?)?"
    r"|(?P<h>[0-9]{1,5}):(?P<m>[0-9]{1,2}):(?P<s>[0-9]{1,2})"
    r"|(?P<mm>[0-9]{1,6})(?::(?P<ss>[0-9]{1,2}))?")
_NUMBER = r"([0-9]{1,8}(?:\.[0-9]{1,4})?)"
_UNITS = re.compile(  # "1h30m", "1.5 hours", "2d 12h"
    rf"(?:{_NUMBER} *d(?:ays?)?)? *(?:{_NUMBER} *h(?:(?:ou)?rs?)?)? *(?:{_NUMBER} *m(?:in(?:ute)?s?)?)? *"
    rf"(?:{_NUMBER} *s(?:ec(?:ond)?s?)?)?", re.IGNORECASE)
_UNIT_SECONDS = (86400, 3600, 60, 1)
_READ_ONLY = frozenset(("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID", "BASH_ENV"))
_LONGEST = 4000  # characters of one value in a directive; sbatch and qsub have buffers of a fixed size
_MOST = 1 << 20  # nodes, cores, seconds times a hundred: what no scheduler takes


class JobError(ValueError):
    """A value of a job that cannot be used. field: the name of the attribute of Job."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class Job:
    """What to submit. Every value is checked here; JobError names the one that cannot be used."""

    command: tuple[str, ...] = ()  # script or "-m", module; its arguments. Empty: those of the job script ("$@")
    nodes: int = 1
    gpus_per_node: int = 0
    ranks_per_node: int | None = None  # None: one for each GPU, or one
    cores_per_rank: int | None = None
    memory: str | None = None  # per node: "64G"
    walltime: int | None = None  # seconds
    queue: str | None = None  # Slurm: partition
    account: str | None = None
    name: str | None = None
    array: str | None = None  # "0-9%2"
    dependency: str | None = None  # "afterany:1234", several with a comma
    setup: tuple[str, ...] = ()  # lines of shell, run as they stand; each complete in itself
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "auto"  # or "torchrun", or what launch.py --by takes
    output: str | None = None  # file of standard output and error; PBS: "folder/" gives folder/ID.OU
    signal_seconds: int | None = None  # USR1 to the job script so many seconds before the walltime
    requeue: bool | None = None  # None: as the scheduler is set up
    directives: tuple[str, ...] = ()  # further options, one an entry: "--constraint=a100", "-l filesystems=home"
    components: tuple[str, ...] = ()  # Slurm, heterogeneous job: options of each further one that differ from the first
    chunk: tuple[str, ...] = ()  # PBS: added to every chunk of the select: "system=polaris"
    container: str | None = None  # image of Apptainer or Singularity
    gpu_vendor: str | None = None  # nvidia, amd or intel, for the container; None: whose GPUs the job finds

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cores_per_rank", "walltime", "signal_seconds", "gpus_per_node"):
            _check_number(name, getattr(self, name))
        for name in ("command", "setup", "modules", "directives", "components", "chunk"):
            _check_texts(name, getattr(self, name))
        for name, pattern, example in (
                ("queue", _WORD, "gpu"), ("account", _WORD, "abc@v100"), ("name", _NAME, "train-1"),
                ("memory", _MEMORY, "64G"), ("array", _ARRAY, "0-9%2"), ("dependency", _DEPENDENCY, "afterany:1234"),
                ("launcher", _LAUNCHER, "auto, torchrun, srun or mpiexec"),
                ("gpu_vendor", _VENDOR, "nvidia, amd or intel")):
            _check_form(name, getattr(self, name), pattern, example)
        for module in self.modules:
            _check_form("modules", module, _MODULE, "cuda/12.4")
        for resource in self.chunk:
            _check_form("chunk", resource, _CHUNK, "system=polaris")
        for name in ("output", "container"):
            _check_path(name, getattr(self, name))
        self._check_command()
        self._check_environment()
        for line in self.setup:
            if _CONTROL.search(line.replace("\t", " ")) or len(re.search(r"\\*$", line)[0]) % 2:  # type: ignore[index]
                raise JobError("setup", f"{line[:60]!r} is not one line of shell. Give each line as an entry of its "
                                        "own, without line breaks and without a backslash at its end.")
        for entry in self.directives:
            split_directive(entry)
        for entry in self.components:
            split_directive(entry, "components")
        if self.signal_seconds and self.walltime and self.signal_seconds >= self.walltime:
            raise JobError("signal_seconds", f"{self.signal_seconds} is not less than the walltime of {self.walltime} "
                                             "s. Give fewer seconds, or a longer walltime.")

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    def _check_command(self) -> None:
        is_module = self.command[:1] == ("-m",) and len(self.command) > 1
        if self.command and not is_module and (not self.command[0] or self.command[0].startswith("-")):
            raise JobError("command", f"the first word is {self.command[0]!r}, expected a script or a program. "
                                      "Put the script before its arguments.")
        if self.container and not self.command:
            raise JobError("container", "there is no command to run in it. Give the command, starting with python.")

    def _check_environment(self) -> None:
        for name, value in self.environment.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise JobError("environment", f"{name!r} is no name of a variable. Use letters, digits and _.")
            if name in _READ_ONLY:
                raise JobError("environment", f"{name} cannot be set in a job script; bash keeps it. Remove it.")
            if not _is_text(value):
                raise JobError("environment", f"the value of {name} is not a text without NUL. Give it as a text.")


def split_directive(entry: str, field: str = "directives") -> list[str]:
    """The words of an extra option: "-l select='1:a=b'" -> ["-l", "select=1:a=b"]. JobError when it is none."""
    try:
        words = shlex.split(entry)
    except ValueError as error:
        raise JobError(field, f"{entry[:60]!r} cannot be split into words: {error}. Close the quotes.") from None
    if not words or not re.match(r"-[A-Za-z]|--[A-Za-z]", words[0]) or _CONTROL.search(entry) or len(entry) > _LONGEST:
        raise JobError(field, f"{entry[:60]!r} is no option of a scheduler, expected one such as --constraint=a100 or "
                              "'-l filesystems=home'. Give one option an entry.")
    return words


def _check_number(name: str, value: object) -> None:
    least = 0 if name == "gpus_per_node" else 1
    most = 100 * _MOST if name in ("walltime", "signal_seconds") else _MOST
    if value is None and name not in ("nodes", "gpus_per_node"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise JobError(name, f"{str(value)[:60]!r} is not a whole number from {least} to {most}. Correct it.")


def _check_texts(name: str, values: object) -> None:
    if not isinstance(values, tuple) or not all(map(_is_text, values)):
        raise JobError(name, f"{ascii(values)[:60]} is not a tuple of texts without NUL. Give one entry for each.")


def _is_text(value: object) -> bool:
    """Whether bash can be given it: no NUL, and nothing that has no bytes."""
    try:
        return isinstance(value, str) and "\0" not in value and bool(value.encode("utf-8", "surrogateescape") or True)
    except UnicodeEncodeError:
        return False


def _check_form(name: str, value: object, pattern: re.Pattern[str], example: str) -> None:
    if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
        raise JobError(name, f"{str(value)[:60]!r} has not the expected form, which is one like {example}. Correct it.")


def _check_path(name: str, value: object) -> None:
    if value is None:
        return
    if (not isinstance(value, str) or not _is_text(value) or value.strip() != value or not 0 < len(value) <= _LONGEST
            or value.startswith("-") or _CONTROL.search(value)):
        raise JobError(name, f"{str(value)[:60]!r} is not the name of a file. Give a path without line breaks that "
                             "starts with neither a blank nor a dash (put ./ before a dash).")


def parse_walltime(text: str) -> int:
    """Seconds of "2:00:00", "30:00" (minutes:seconds), "1-12:00:00" or "1-12" (days-hours), and "90", which is minutes
    as in Slurm (to qsub it is seconds); also with units: "1h30m", "90 min", "1.5h", "2 days".

    JobError (field walltime) when it is none of these, or zero.
    """
    match, units = _WALLTIME.fullmatch(text.strip()), _UNITS.fullmatch(text.strip())
    if match is not None:
        part = {name: int(value or 0) for name, value in match.groupdict().items()}
        total = (((part["days"] * 24 + part["hours"] + part["h"]) * 60 + part["minutes"] + part["m"] + part["mm"]) * 60
                 + part["seconds"] + part["s"] + part["ss"])
    elif units is not None and text.strip():
        total = round(sum(float(number or 0) * unit for number, unit in zip(units.groups(), _UNIT_SECONDS,
                                                                            strict=True)))
    else:
        raise JobError("walltime", f"{text[:60]!r} is no time. Expected: 2:00:00, 1-12:00:00, 1h30m, 30m, or minutes "
                                   "such as 90. Correct it.")
    if total == 0:
        raise JobError("walltime", f"{text!r} is no time at all. Give a longer one.")
    return total


def format_walltime(seconds: int) -> str:
    """7200 -> "02:00:00", which both schedulers read."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def memory_bytes(text: str) -> int:
    """"64G" -> 64 * 1024**3."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise JobError("memory", f"{text[:60]!r} is no amount of memory, expected one like 64G. Correct it.")
    return int(match[1]) << (10 * (1 + "KMGT".index(match[2].upper())))
