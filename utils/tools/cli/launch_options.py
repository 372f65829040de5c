"""The options that `ddpkit launch` and `ddpkit submit run` share: each is a field of LaunchOptions.

A field is all that an option needs. From it come the arguments of both commands, the words that a
job passes to `ddpkit launch`, what its preflight leaves out, and the keys of the files of defaults
and of profiles. What the value means is decided where it is used.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

# Options of a topic stand together in the help of both commands.
Topic = Literal[
    "launcher",
    "ranks",
    "restarts",
    "hangs",
    "output",
    "container",
    "packages",
]


class Setting(NamedTuple):
    """A value that a file of defaults may hold."""

    meaning: str
    form: str  # pattern of the whole value
    example: str
    default: str  # shown to people
    variable: str = ""  # variable that the ranks or the command read; "" for none
    is_path: bool = False  # a value with a slash starts from the folder of the file
    for_ranks: bool = False  # the ranks read the variable
    needs_trust: bool = False  # leads to programs or files that the kit runs, or into job scripts


class SharedOption(NamedTuple):
    """What an option has besides the name, type and default of its field.

    A help may contain {launchers} and the like, which the command fills in.
    """

    flag: str
    topic: Topic
    help: str
    submit_help: str = ""  # help of `submit run`, if it differs
    metavar: str | None = None
    launch_flags: str = ""  # further flags, of ddpkit launch only
    least: int | None = None  # smallest value that a job accepts
    form: tuple[re.Pattern[str], str] | None = None  # pattern and example for a job
    is_path: bool = False
    in_preflight: bool = True  # whether it also applies to the ranks of doctor
    in_profile: bool = False  # a key of profiles, which fills in what `submit run` leaves out
    setting: Setting | None = None  # a key of files of defaults

    @property
    def key(self) -> str:
        """Key of the option in files of defaults."""
        return self.flag.removeprefix("--")


class LaunchOptions(NamedTuple):
    """Values of the shared options. bool: a flag; bool | None: also --no-FLAG."""

    launcher: Annotated[
        str,
        SharedOption(
            "--launcher",
            "launcher",
            "auto (default), {launchers}, torchrun, or the path of an mpiexec",
            "starts the ranks: {launchers}",
            metavar="NAME",
            form=(re.compile(r"[a-z][a-z0-9_-]{0,30}"), "auto, torchrun, srun or mpiexec"),
            in_profile=True,
        ),
    ] = "auto"
    ranks_per_node: Annotated[
        int | None,
        SharedOption(
            "--ntasks-per-node",
            "ranks",
            "ranks on each host",
            "ranks per node (default: one for each GPU)",
            metavar="N",
            least=1,
        ),
    ] = None
    oversubscribe: Annotated[
        bool,
        SharedOption(
            "--oversubscribe",
            "ranks",
            "allow more than {ranks_per_gpu} ranks a GPU, or {ranks_per_core} a core",
            "allow more ranks than GPUs on a node",
        ),
    ] = False
    spare: Annotated[
        int,
        SharedOption(
            "--spare",
            "restarts",
            "keep the last N hosts of the job for a restart in the place of one that fails",
            "more nodes, which get ranks only in the place of one that fails (default: 0)",
            metavar="N",
            in_preflight=False,
        ),
    ] = 0
    max_restarts: Annotated[
        int,
        SharedOption(
            "--max-restarts",
            "restarts",
            "restarts on the same hosts after a failure, unless it comes again (default 0)",
            "restarts on the same nodes after a failure, unless it comes again (default: 0)",
            metavar="N",
            in_preflight=False,
        ),
    ] = 0
    hang_timeout: Annotated[
        float | None,
        SharedOption(
            "--hang-timeout",
            "hangs",
            "end a job that makes no progress for so long, and say why; 0: leave it to torch",
            "explain and end a job without progress for so long; 0: never. Default: as the script "
            "says",
            metavar="SECONDS",
            least=0,
            setting=Setting(
                "seconds without progress until a hang is explained and ended",
                r"auto|\d+(\.\d+)?",
                "300",
                "as the script says",
                "DDPKIT_HANG_TIMEOUT",
                for_ranks=True,
            ),
        ),
    ] = None
    label: Annotated[
        bool,
        SharedOption(
            "--label",
            "output",
            "put the rank before each line of output",
            launch_flags="-l",
        ),
    ] = False
    output_dir: Annotated[
        str | None,
        SharedOption(
            "--output-dir",
            "output",
            "write the output of each rank to FOLDER/rank-N.log",
            metavar="FOLDER",
            is_path=True,
        ),
    ] = None
    container: Annotated[
        str | None,
        SharedOption(
            "--container",
            "container",
            "run in this image, with Apptainer or Singularity",
            metavar="IMAGE",
            is_path=True,
        ),
    ] = None
    stage: Annotated[
        bool | None,
        SharedOption(
            "--stage",
            "packages",
            "start from copies of the packages of the Python, which are kept for later launches",
            "start from copies of the packages on the disk of each node, as ddpkit launch does",
            in_profile=True,
            setting=Setting(
                "whether ranks start from copies of their packages on each node",
                r"true|false",
                "true",
                "false",
                "DDPKIT_STAGE",
            ),
        ),
    ] = None
    stage_dir: Annotated[
        str | None,
        SharedOption(
            "--stage-dir",
            "packages",
            "local folder for them; default: $TMPDIR or /tmp, else /dev/shm; implies --stage",
            "local folder of each node for them, which may hold variables of the job",
            metavar="FOLDER",
            in_profile=True,
            setting=Setting(
                "local folder of each node for these copies",
                r"[/~$]\S*",
                "/local/scratch",
                "$TMPDIR or /tmp, else /dev/shm",
                "DDPKIT_STAGE_DIR",
                needs_trust=True,
            ),
        ),
    ] = None

    def words(self) -> list[str]:
        """Return the words of the options that differ from their defaults."""
        return [word for name, value in self._asdict().items() for word in _words(name, value)]


_HINTS = get_type_hints(LaunchOptions, include_extras=True)
SHARED_OPTIONS: dict[str, SharedOption] = {
    name: hint.__metadata__[0] for name, hint in _HINTS.items()
}
DEFAULTS = LaunchOptions()
LAUNCH_SETTINGS = {
    option.key: option.setting for option in SHARED_OPTIONS.values() if option.setting
}


def type_of(name: str) -> tuple[type, bool]:
    """Return the type of an option's value, and whether it may be None."""
    hint = _HINTS[name].__origin__
    first, *others = get_args(hint) or (hint,)
    return first, bool(others)


def add_options(
    add: Callable[..., object], topic: Topic, *, for_submit: bool = False, **facts: object
) -> None:
    """Add the arguments of a topic to a command. facts: values for {names} in their help."""
    for name, option in SHARED_OPTIONS.items():
        if option.topic == topic:
            add_option(add, name, for_submit=for_submit, **facts)


def add_option(
    add: Callable[..., object], name: str, *, for_submit: bool = False, **facts: object
) -> None:
    """Add the argument of one option; see add_options()."""
    option = SHARED_OPTIONS[name]
    kind, may_be_none = type_of(name)
    text = (for_submit and option.submit_help) or option.help
    arguments: dict[str, Any] = {"type": kind, "metavar": option.metavar}
    if kind is bool:
        arguments = {"action": argparse.BooleanOptionalAction if may_be_none else "store_true"}
    flags = option.flag if for_submit else f"{option.launch_flags} {option.flag}"
    default = None if for_submit and option.in_profile else getattr(DEFAULTS, name)
    add(*flags.split(), dest=name, default=default, help=text.format_map(facts), **arguments)


def _words(name: str, value: Any) -> list[str]:
    flag = SHARED_OPTIONS[name].flag
    if value == getattr(DEFAULTS, name):
        return []
    if (name, value) == ("launcher", "torchrun"):
        return ["--torchrun"]
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, f"{value:g}" if isinstance(value, float) else str(value)]


def words_for_preflight(words: Sequence[str]) -> Iterator[str]:
    """Yield the options that also apply to a preflight. words: options of `ddpkit launch`."""
    names = {
        option.flag: name for name, option in SHARED_OPTIONS.items() if not option.in_preflight
    }
    rest = iter(words)
    for word in rest:
        if word not in names:
            yield word
        elif type_of(names[word])[0] is not bool:
            next(rest)


def from_text(name: str, text: str) -> Any:
    """Return the value of an option from the text in a file of defaults or a variable."""
    kind, _ = type_of(name)
    return text in ("true", "1") if kind is bool else kind(text)
