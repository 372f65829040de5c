"""Define Placement and Launcher, the base class of every launcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ..errors import LaunchError
from .rank_variables import LAUNCH_RANK

_T = TypeVar("_T")
SERVICE = "ddpkit"  # name or key under which rank 0 publishes


class NameServiceUnavailable(RuntimeError):
    """This process cannot use the launcher's name service. The message gives the reason.

    affects_mpi: whether the MPI library would fail for the same reason, and must not be started.
    """

    def __init__(self, message: str, *, affects_mpi: bool = False) -> None:
        super().__init__(message)
        self.affects_mpi = affects_mpi


class NameService:
    """Passes a text from rank 0 to all other ranks of a launch. All times are in seconds.

    is_private: whether other users cannot read the text.
    """

    is_private = True

    def publish(self, text: str, timeout: float) -> None:
        """Publish `text` on rank 0; it has less than 200 bytes and no white space."""
        raise NotImplementedError

    def look_up(self, timeout: float) -> str | None:
        """Return the published text on another rank; None if there is none within `timeout`."""
        raise NotImplementedError


def poll(query: Callable[[], _T | None], timeout: float, longest_pause: float = 0.25) -> _T | None:
    """Call `query` with growing pauses until it returns a value or `timeout` seconds are over."""
    deadline, pause = time.monotonic() + timeout, 0.005
    while True:
        found = query()
        if found or time.monotonic() + pause > deadline:
            return found or None
        time.sleep(pause)
        pause = min(pause * 1.5, longest_pause)


class Placement(NamedTuple):
    """The place of this process among the processes of its launch, read from one launcher.

    launcher: its name. rank, world_size: among all processes of the launch.
    local_rank, local_world_size: among the processes of this host; None if the launcher does not
    report them, so that the start-up exchange determines them. notes: messages for the user.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    notes: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> Placement:
        """Return a copy with the named fields replaced."""
        return self._replace(**changes)

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_world_size == self.world_size

    def check(self) -> None:
        """Raise LaunchError if the numbers contradict each other."""
        world, local_rank = self.world_size, self.local_rank or 0
        local = world if self.local_world_size is None else self.local_world_size
        for name, value, is_right, expected in (
            ("world size", world, world > 0, "at least 1"),
            ("rank", self.rank, self.rank < world, f"less than {world}"),
            ("local world size", local, 0 < local <= world, f"at most {world}, the world size"),
            ("local rank", local_rank, local_rank < local, f"less than {local}"),
        ):
            if not is_right:
                raise LaunchError(
                    f"{self.launcher}: the {name} is {value}; expected {expected}. The variables "
                    "contradict each other: unset those that were set by hand"
                )


class Launcher:
    """One launcher: how to recognise its ranks, and how they find each other.

    A subclass sets the names of variables and programs below, and overrides methods for its
    launcher's peculiarities. A new launcher is one such class and its entry in detect.LAUNCHERS.
    """

    name = ""  # name in options and messages: "openmpi"
    command = ""  # starts the ranks, for messages: "mpirun (Open MPI)"; default: the name

    # Names of the variables that hold the numbers of Placement; "" if there is no such variable.
    rank_variable = ""
    world_size_variable = ""
    local_rank_variable = ""
    local_world_size_variable = ""

    # More variables that only a rank has.
    marker_variables: tuple[str, ...] = ()
    # Variables of the job, or of other launchers, that read() uses. They do not identify a rank.
    job_variables: tuple[str, ...] = ()
    # Variables with the same values on all ranks of a launch, and other values in another launch.
    identity_variables: tuple[str, ...] = ()

    # Programs whose child processes are ranks. "mpiexec*" stands for any name with this prefix.
    parent_programs: tuple[str, ...] = ()
    # Launchers whose variables this launcher sets as well.
    also_sets: tuple[str, ...] = ()
    # Possible beginnings of the version text of this launcher's MPI library. Empty if the ranks are
    # not MPI processes.
    mpi_libraries: tuple[str, ...] = ()

    # Whether the launcher starts the ranks; a person or a script does not count.
    starts_processes = True
    # Whether MASTER_ADDR and MASTER_PORT are part of the launch, and must be set.
    requires_master_address = False
    # Whether this launcher itself sets RANK and the variables like it.
    sets_rank_variables = False
    # Variable with the number of agents. Each agent counts only its own ranks as local, even if two
    # agents share a host. "" for a launcher without agents.
    num_agents_variable = ""
    # How to pass exported variables to all ranks, as the end of a sentence; "" if that is
    # automatic.
    export_hint = ""
    # Whether this launcher's variables are worth a note if another one has started the process.
    is_noted_when_ignored = True

    # Recognising a rank

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher's variables are set, completely or not."""
        return bool(is_set(environ, *self.number_variables))

    def is_undecided(self, environ: Mapping[str, str]) -> bool:
        """Whether variables that is_present() rejects may still belong to a rank.

        Then the parent processes decide, and read() reports what is wrong with the variables.
        """
        return False

    def is_parent(self, command: str) -> bool:
        """Whether a command line belongs to a program whose child processes are ranks."""
        program = command.split(maxsplit=1)[0] if command.strip() else ""
        program = program.rpartition("/")[2]
        return any(
            program.startswith(name[:-1]) if name.endswith("*") else program == name
            for name in self.parent_programs
        )

    def is_named(self, command: str) -> bool:
        """Whether the command line itself names this launcher."""
        return self.is_parent(command)

    def starts_shell(self, command: str, environ: Mapping[str, str]) -> bool:
        """Whether a command line belongs to a program that starts a job's script or a shell.

        Below it, variables of outer launchers are inherited and do not identify a rank.
        """
        return False

    def read(self, environ: Mapping[str, str]) -> Placement:
        """Return the placement that the variables describe.

        Raises LaunchError if they are incomplete, malformed or contradictory.
        """
        required = (self.rank_variable, self.world_size_variable)
        rank, world_size = (number(environ, name) for name in required)
        local_rank = number(environ, self.local_rank_variable)
        local_world_size = number(environ, self.local_world_size_variable)
        if rank is None or world_size is None:
            missing = " and ".join(name for name in required if not is_set(environ, name))
            present = (name for name in self.variables if name in environ)
            found = ", ".join(f"{name}={environ[name]!r}" for name in present)
            raise LaunchError(
                f"{self.name}: {missing} not set, but {found}. Expected both or none: start the "
                "script by a launcher, or unset what was set by hand"
            )
        return Placement(self.name, rank, world_size, local_rank, local_world_size)

    def describe_start(self, environ: Mapping[str, str]) -> str:
        """Return how the ranks were started, for messages: "started by srun (Slurm)"."""
        command = self.command or self.name
        if environ.get(LAUNCH_RANK):
            return f"started by ddpkit launch with {command}"
        return f"started by {command}"

    def notes(self, environ: Mapping[str, str], placement: Placement) -> Iterator[str]:
        """Yield messages for the user about a detected placement, not a requested one."""
        yield from ()

    # Finding rank 0

    def identity(self, environ: Mapping[str, str], placement: Placement) -> str:
        """Return a text that all ranks of this launch share and no other launch has, or ""."""
        values = [environ.get(name, "") for name in self.identity_variables]
        return ":".join([self.name, *values]) if any(values) else ""

    def candidate_hosts(self, environ: Mapping[str, str]) -> tuple[list[str], str]:
        """Return hosts where rank 0 may be, the likeliest first, and the variable that lists them.

        Default: the hosts of a PBS job. Raises LaunchError if the list is malformed.
        """
        return list(dict.fromkeys(node_file(environ).split())), "PBS_NODEFILE"

    def all_have_hosts(self, environ: Mapping[str, str]) -> bool:
        """Whether the ranks on every host have the list of candidate_hosts()."""
        return True

    def resolve(self, host: str) -> list[str]:
        """Return the IP addresses of a host name that the system does not resolve."""
        return []

    def name_service(self, environ: Mapping[str, str]) -> NameService | None:
        """Return the launcher's name service; None if it has none.

        Raises NameServiceUnavailable if this process cannot use it.
        """
        return None

    def has_store(self, environ: Mapping[str, str]) -> bool:
        """Whether the launcher runs a torch store at MASTER_ADDR and MASTER_PORT."""
        return False

    # Names of variables

    @property
    def number_variables(self) -> tuple[str, ...]:
        """The variables that hold the numbers of Placement."""
        of_launch = (self.rank_variable, self.world_size_variable)
        of_host = (self.local_rank_variable, self.local_world_size_variable)
        return tuple(dict.fromkeys(filter(None, (*of_launch, *of_host))))

    @property
    def rank_variables(self) -> tuple[str, ...]:
        """Variables that only a rank has. A program that starts a new launch removes them."""
        return (*self.number_variables, *self.marker_variables)

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that detection looks at."""
        return tuple(dict.fromkeys((*self.rank_variables, *self.job_variables)))


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable's value as a whole number; None if it is unset or empty."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise LaunchError(
            f"{name} is {text!r}; expected a whole number of zero or more. "
            "Unset it if it was set by hand"
        )
    return int(text)


def is_set(environ: Mapping[str, str], *names: str) -> list[str]:
    """Return the variables that contain more than white space."""
    return [name for name in names if environ.get(name, "").strip()]


def shown(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the variables that are set, for messages: "RANK=3 WORLD_SIZE=4"."""
    return " ".join(f"{name}={environ[name]}" for name in is_set(environ, *names))


def node_file(environ: Mapping[str, str]) -> str:
    """Return the text of PBS_NODEFILE, one host name per slot; empty if it cannot be read."""
    try:
        with open(environ.get("PBS_NODEFILE", ""), encoding="utf-8", errors="replace") as file:
            return file.read()
    except (OSError, ValueError):  # ValueError: the name contains a null byte
        return ""
