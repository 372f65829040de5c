"""A batch job independent of the scheduler: what to run, on which resources, for how long."""

from __future__ import annotations

import re
import shlex
from argparse import BooleanOptionalAction
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...job.notation import parse_duration
from ..cli.launch_options import SHARED_OPTIONS, LaunchOptions, SharedOption

_MAX_LENGTH = 4000  # characters of a value in a directive; sbatch and qsub have fixed-size buffers

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LEAST = {  # field -> smallest value, unless it is None
    "nodes": 1,
    "gpus_per_node": 0,
    "cores_per_rank": 1,
    "walltime": 1,
}
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@:+/=-]{0,200}")
_CONDITION = r"[a-z]+(:[A-Za-z0-9_.+\[\]-]+)*"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,63}")
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,100}(@[A-Za-z0-9.-]{1,100})?")
_MAIL_TYPES = re.compile(r"(begin|end|fail)(,(begin|end|fail)){0,2}")
_DEPENDENCY = re.compile(rf"{_CONDITION}([,?]{_CONDITION})*")


class Option(NamedTuple):
    """An option of `submit run`. sbatch, qsub: flag there; "": their modules write the value."""

    flags: str
    argparse: Mapping[str, Any]
    form: tuple[re.Pattern[str], str] | None = None  # pattern, example
    sbatch: str = ""
    qsub: str = ""


OPTIONS = {  # field of Job -> option
    "name": Option(
        "-J --job-name",
        {"metavar": "NAME", "help": "default: the name of the script"},
        *((_NAME, "train-1"), "--job-name", "-N"),
    ),
    "queue": Option(
        "-p --queue --partition",
        {"metavar": "NAME", "help": "partition or QOS of Slurm, queue of PBS"},
        *((_WORD, "gpu"), "--partition", "-q"),
    ),
    "account": Option(
        "-A --account",
        {"metavar": "NAME", "help": "account to charge"},
        *((_WORD, "abc@v100"), "--account", "-A"),
    ),
    "dependency": Option(
        "-d --dependency",
        {"metavar": "afterok:ID", "help": "as for sbatch and qsub -W depend"},
        *((_DEPENDENCY, "afterany:1234"), "--dependency", "-W depend="),
    ),
    "requeue": Option(
        "--requeue",
        {
            "action": BooleanOptionalAction,
            "help": "whether the job may be restarted after a node failure or preemption",
        },
    ),
    "mail_user": Option(
        "--mail-user",
        {"metavar": "ADDRESS", "help": "who gets mail of the scheduler about the job"},
        *((_ADDRESS, "ada@example.org"), "--mail-user", "-M"),
    ),
    "mail_type": Option(
        "--mail-type",
        {
            "metavar": "begin,end,fail",
            "type": str.lower,
            "help": "when to send mail (default with --mail-user: end,fail). For PBS a script that "
            "fails is an end",
        },
        (_MAIL_TYPES, "begin,end,fail"),
    ),
}
_FORMS = {  # field: pattern, example
    **{name: option.form for name, option in OPTIONS.items() if option.form},
    "memory": (re.compile(r"0|[0-9]{1,15}[KMGT]B?", re.IGNORECASE), "64G"),
    "gpu_type": (_NAME, "a100"),
}
_ENTRY_FORMS = {  # field with several entries -> pattern, example of an entry
    "module_paths": (re.compile(r"/[A-Za-z0-9_.~+@:=/-]{1,200}"), "/soft/modulefiles"),
    "modules": (re.compile(r"[A-Za-z0-9_.~/][A-Za-z0-9_.~+@:=/-]{0,200}"), "cuda/12.4"),
    "chunk": (re.compile(r"[A-Za-z][A-Za-z0-9_-]*=[A-Za-z0-9_.@-]+"), "system=polaris"),
}


class JobError(ValueError):
    """A value of a job that cannot be used. field: the name of the attribute of Job."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class Job:
    """What to submit. Raises JobError, which names the field, for a value that cannot be used."""

    # A script or "-m" and a module, then its arguments.
    command: tuple[str, ...]
    nodes: int = 1  # number of nodes, including spare ones
    gpus_per_node: int = 0
    gpu_type: str | None = None  # Slurm only: "a100"
    cores_per_rank: int | None = None
    memory: str | None = None  # memory per node: "64G"; Slurm only: "0" for all of it
    walltime: int | None = None  # seconds
    queue: str | None = None  # Slurm: partition
    account: str | None = None
    name: str | None = None
    dependency: str | None = None  # "afterany:1234"; commas separate several
    setup: tuple[str, ...] = ()  # shell lines, each complete in itself
    module_paths: tuple[str, ...] = ()  # arguments of `module use`
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    launch: LaunchOptions = LaunchOptions()  # passed on to ddpkit launch
    mail_user: str | None = None
    mail_type: str | None = None  # "begin,end,fail"
    output: str | None = None  # the log. PBS: "folder/" gives folder/JOB_ID.OU
    requeue: bool | None = None  # None: the scheduler's default
    directives: tuple[str, ...] = ()  # further options: "--constraint=a100", "-l filesystems=home"
    chunk: tuple[str, ...] = ()  # PBS: added to every chunk of the select: "system=polaris"
    preflight: tuple[str, ...] = ()  # options of doctor, which checks the hosts first; (): no check

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check_least(name, getattr(self, name), least)
        for name, option in SHARED_OPTIONS.items():
            _check_option(name, getattr(self.launch, name), option)
        for name, (pattern, example) in _FORMS.items():
            if getattr(self, name) is not None:
                _check_form(name, getattr(self, name), pattern, example)
        for name, (pattern, example) in _ENTRY_FORMS.items():
            for entry in getattr(self, name):
                _check_form(name, entry, pattern, example)
        if self.output is not None:
            _check_path("output", self.output)
        for entry in self.directives:
            split_directive(entry)
        for line in self.setup:
            _check_single_line(line)
        self._check_command()
        self._check_environment()

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        return self.launch.ranks_per_node or self.gpus_per_node or 1

    def setup_lines(self) -> list[str]:
        """Return module paths, modules, exports and set-up lines, in this order.

        Exports follow modules, which may set the same variables. Set-up lines may use both.
        """
        paths = [f"module use {quote(path)}" for path in self.module_paths]
        modules = [f"module load {quote(module)}" for module in self.modules]
        if paths or modules:  # csh passes no functions to a job
            unset = "${MODULESHOME:?is not set, and there is no command module}"
            paths.insert(0, f'type module >/dev/null 2>&1 || . "{unset}/init/bash"')
        exports = [f"export {name}={quote(value)}" for name, value in self.environment.items()]
        return [*paths, *modules, *exports, *self.setup]

    def launch_words(self) -> str:
        """Return the quoted arguments of ddpkit launch: its options, "--", the command."""
        return " ".join(map(quote, [*self.launch.words(), "--", *self.command]))

    def plain_options(self) -> Iterator[tuple[Option, str]]:
        """Yield the options whose values the schedulers take as they are, with these values."""
        for name, option in OPTIONS.items():
            if option.sbatch and getattr(self, name) is not None:
                yield option, getattr(self, name)

    def _check_command(self) -> None:
        is_module = self.command[0] == "-m" and len(self.command) > 1
        if not is_module and (not self.command[0] or self.command[0].startswith("-")):
            raise JobError(
                "command",
                f"the first word is {self.command[0]!r}, expected a script or a program. "
                "Put the script before its arguments.",
            )

    def _check_environment(self) -> None:
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise JobError(
                    "environment",
                    f"{name!r} is not the name of a variable. Use letters, digits and _.",
                )


def quote(text: str) -> str:
    """Quote a text as one word of bash.

    Control characters and bytes that are not UTF-8 (surrogates of os.fsdecode) become escapes:
    sbatch and qsub refuse a script with a carriage return.
    """
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escape, text)) + "'"


def _escape(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def split_directive(entry: str) -> list[str]:
    """Split an option into words: "-l select='1:a=b'" -> ["-l", "select=1:a=b"].

    Raises JobError (field directives) for a text that is not an option.
    """
    try:
        words = shlex.split(entry)
    except ValueError as error:
        raise JobError(
            "directives", f"{entry[:60]!r} cannot be split into words: {error}. Close the quotes."
        ) from None
    is_option = words and re.match(r"-[A-Za-z]|--[A-Za-z]", words[0])
    if not is_option or _CONTROL.search(entry) or len(entry) > _MAX_LENGTH:
        raise JobError(
            "directives",
            f"{entry[:60]!r} is not an option of a scheduler, expected one such as "
            "--constraint=a100 or '-l filesystems=home'. Give one option per entry.",
        )
    return words


def option_name(words: Sequence[str]) -> str:
    """Return an option's name: ["--gres=gpu:2"] -> "--gres", ["-A", "x"] and ["-Ax"] -> "-A"."""
    if words[0].startswith("--"):
        return words[0].partition("=")[0]
    return words[0][:2]


def option_value(words: Sequence[str]) -> str:
    """Return an option's value: ["--gres=gpu:2"] -> "gpu:2", ["-A", "x"] and ["-Ax"] -> "x"."""
    joined = " ".join(words)
    return joined[len(option_name(words)) :].lstrip("= ")


def parse_walltime(text: str) -> int:
    """Return the seconds of a time limit; see parse_duration() for the forms. "90" is minutes.

    Raises JobError (field walltime) for any other text, and for zero.
    """
    seconds = parse_duration(text)
    if seconds is None:
        raise JobError(
            "walltime",
            f"{text[:60]!r} is not a time. Expected a form like 2:00:00, 1-12:00:00, 1h30m, 30m, "
            "or minutes such as 90. Correct it.",
        )
    if seconds == 0:
        raise JobError("walltime", f"{text[:60]!r} is zero. Give a longer time.")
    return seconds


def _check_least(name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise JobError(name, f"{value} is less than {least}. Correct it.")


def _check_option(name: str, value: Any, option: SharedOption) -> None:
    if value is None:
        return
    if option.least is not None:
        _check_least(name, value, option.least)
    if option.form is not None:
        _check_form(name, value, *option.form)
    if option.is_path:
        _check_path(name, value)


def _check_form(name: str, value: str, pattern: re.Pattern[str], example: str) -> None:
    if not pattern.fullmatch(value):
        raise JobError(
            name, f"{value[:60]!r} does not have the expected form, {example}. Correct it."
        )


def _check_path(name: str, value: str) -> None:
    accepted = (
        value == value.strip()
        and 0 < len(value) <= _MAX_LENGTH
        and not value.startswith("-")
        and not _CONTROL.search(value)
    )
    if not accepted:
        raise JobError(
            name,
            f"{value[:60]!r} cannot be used as a path. Expected no line break, and no blank "
            "or dash at the start. Put ./ before a dash.",
        )


def _check_single_line(line: str) -> None:
    backslashes = len(line) - len(line.rstrip("\\"))
    if _CONTROL.search(line.replace("\t", " ")) or backslashes % 2:
        raise JobError(
            "setup",
            f"{line[:60]!r} is not one line of shell. Give one entry per line, without a line "
            "break or a backslash at the end.",
        )
