"""The plan of a launch: which processes start on which hosts, and by which method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from ...job.notation import short_name
from ..schedulers.allocation import Allocation
from .child_processes import Processes

HOST_FILE = "@hosts@"  # stands for the path of a file with Method.host_file()
REMOTE_SHELL = "@remote-shell@"  # stands for the path of a script with remote_shell.script()


class PlanError(RuntimeError):
    """The ranks cannot be started in this way; the message has what was found and what to do."""


class Options(NamedTuple):
    """The options of ddpkit launch that decide what is started where."""

    launcher: str = "auto"  # or one of methods.NAMES
    torchrun: bool = False  # one torchrun agent on each host starts the ranks
    max_restarts: int = 0  # restarts on the same hosts after a failure
    spare: int = 0  # hosts of the job that get no ranks until another one fails
    without: tuple[str, ...] = ()  # hosts of the job that have failed
    restarted: bool = False  # an earlier start has failed
    ranks_per_node: int | None = None
    nodes: int | None = None  # only the first hosts of the job
    nodelist: str | None = None  # only these hosts of the job, such as "n3,n4" or "n[3-4]"
    ntasks: int | None = None  # ranks in total, the same number on each host
    label: bool = False  # put the rank before each line of output
    output_dir: str = ""  # absolute path: one file per rank there, instead of our streams
    independent: bool = False  # ranks need not form one process group
    oversubscribe: bool = False  # allow any number of ranks on a host
    input: bool = False  # rank 0 reads our standard input, which is a file or pipe
    input_waits: bool = False  # our standard input has bytes to read
    watch: bool = False  # watch scripts that do not call setup_distributed(), too


class Mpiexec(NamedTuple):
    """An mpiexec whose MPI implementation is known."""

    path: str
    method: type[Method]
    major: int = 0  # main version of the MPI implementation; 0 where it does not matter
    other_srun: bool = False  # its folder has an srun, but PATH finds another one


class ProgramFinder(Protocol):
    """What the planner queries about installed programs; see programs.Programs."""

    def find(self, name: str) -> str | None: ...
    @property
    def mpiexec(self) -> Mpiexec | None: ...
    @property
    def pals(self) -> Mpiexec | None: ...


class HostInfo(NamedTuple):
    """The host and the process that ddpkit launch runs on."""

    name: str
    gpus: int
    python: str  # path of the Python that runs the ranks
    programs: ProgramFinder
    is_root: bool = False  # Open MPI refuses to run as root unless an option allows it
    cores: int | None = None  # cores that this process may use; None: unknown


class Hosts(NamedTuple):
    """The hosts that get ranks, in rank order; the tuples have one entry for each of them."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    cores: tuple[int | None, ...]
    gpus: tuple[int | None, ...]
    partial: bool  # other hosts of the job, which could have ranks, are left out
    notes: tuple[str, ...]  # messages for the user
    one_per_gpu: bool = False  # one rank per GPU, although the job requests one task per host
    spares: tuple[str, ...] = ()


class Request(NamedTuple):
    """What a method has to start."""

    options: Options
    allocation: Allocation | None
    host_info: HostInfo
    environ: Mapping[str, str]  # variables of ddpkit launch, adapted to a part of a job
    hosts: Hosts


class AgentStart(NamedTuple):
    """A command that starts the agents of some hosts."""

    words: list[str]
    hosts: tuple[int, ...]  # indices of the hosts in the plan
    environ: Mapping[str, str]
    stdin: bytes = b""


class Plan(NamedTuple):
    """What a launch starts. The tuples have one entry for each host that gets ranks."""

    method: Method
    hosts: tuple[str, ...]  # in rank order
    ranks: tuple[int, ...]
    cores: tuple[int | None, ...]
    threads: tuple[int | None, ...]  # OMP_NUM_THREADS on each host; None leaves it unchanged
    command: tuple[str, ...]  # the script or program of a rank, and its arguments
    environ: Mapping[str, str]  # variables of the ranks, without their rank variables
    options: Options
    python: str  # path of the Python that runs the ranks
    host: str  # name of the host of ddpkit launch
    notes: tuple[str, ...] = ()  # messages for the user
    one_per_gpu: bool = False  # same as Hosts.one_per_gpu
    starter: tuple[str, ...] = ()  # command line prefix of each process: --stage
    spares: tuple[str, ...] = ()  # hosts of the job that are kept for a restart

    @property
    def world_size(self) -> int:
        return sum(self.ranks)

    @property
    def processes(self) -> tuple[int, ...]:
        """Processes that a native launcher starts on each host: ranks or one torchrun agent."""
        return (1,) * len(self.hosts) if self.options.torchrun else self.ranks

    @property
    def is_watched(self) -> bool:
        """Whether the ranks must not form process groups without each other."""
        return self.world_size > 1 and not self.options.torchrun and not self.options.independent

    @property
    def native_launcher_starts_ranks(self) -> bool:
        """Whether one command, srun or an mpiexec, starts all ranks."""
        return self.method.is_native_launcher and not self.options.torchrun

    @property
    def launcher_labels_output(self) -> bool:
        """Whether the native launcher is to put the rank before each line of output."""
        return self.options.label and self.native_launcher_starts_ranks

    @property
    def uses_agents(self) -> bool:
        """Whether an agent of ddpkit launch on each host starts the ranks or torchrun there."""
        return not self.native_launcher_starts_ranks and not self.method.local

    @property
    def is_script(self) -> bool:
        """Whether Python runs it: "train.py" or "-m package.module" with arguments."""
        return self.command[0] == "-m" or self.command[0].endswith(".py")

    @property
    def script(self) -> str:
        """The path of the script, which every host must have; empty for a module or a program."""
        return self.command[0] if self.command[0].endswith(".py") else ""

    @property
    def program(self) -> tuple[str, ...]:
        """The command line of each rank's process."""
        if self.command[0] in ("python", "python3"):  # PATH may have none, or another one
            return (self.python, *self.command[1:])
        return (self.python, "-u", *self.command) if self.is_script else self.command

    def first_rank(self, host: int) -> int:
        """Return the lowest rank on the host with this index."""
        return sum(self.ranks[:host])


class Method:
    """One way to start processes on the hosts of a plan. methods/ has a subclass for each."""

    name: ClassVar[str]  # name for --launcher
    title: ClassVar[str]  # name in messages
    is_native_launcher: ClassVar[bool] = False  # one command starts the processes of all hosts
    local: ClassVar[bool] = False  # starts the ranks itself, on this host alone
    scheduler: ClassVar[str] = ""  # the only scheduler in whose jobs it works; empty for any
    version_pattern: ClassVar[str] = ""  # matches an mpiexec's --version output
    reports_errors: ClassVar[bool] = False  # LauncherErrors reads its standard error
    kill_when_done: ClassVar[bool] = False  # kills commands that start agents and may hang
    passes_secret: ClassVar[bool] = True  # gives agents the secret by environment or stdin

    def __init__(self, path: str) -> None:
        """path: path of srun, an mpiexec, ssh, ...; "" for none."""
        self.path = path

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        """Adapt this method to a job; return the environment of its command.

        environ: the environment of the ranks. PlanError where the method cannot start this.
        """
        return environ

    def describe(self) -> str:
        return f"by {self.title}"

    # Starting agents

    def reach(self, plan: Plan, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on one host of the plan."""
        return list(words)

    def agent_starts(
        self,
        plan: Plan,
        agent: Callable[[str], list[str]],
        secret: Mapping[str, str],
        environ: str = "",
    ) -> list[AgentStart]:
        """Return the commands that start an agent on each host.

        agent: returns the command of an agent, given the index of its host in the plan.
        secret: the environment variable with the secret of the launch.
        environ: the variables of the ranks in one line, for agents that read standard input.
        """
        starts = []
        for index, host in enumerate(plan.hosts):
            # PBS signals all processes of a job's first host. Agents get stops by connection
            # instead.
            script = "trap '' TERM INT USR1 USR2 HUP; exec \"$@\""
            own = agent(str(index))
            command = self.reach(plan, host, own)
            words = ["/bin/sh", "-c", script, "launch", *command]
            if command == own:  # a child of ddpkit launch, with its environment
                start = AgentStart(words, (index,), {**plan.environ, **secret})
            else:
                text = "".join(f"{value}\n" for value in [*secret.values(), environ] if value)
                start = AgentStart(words, (index,), plan.environ, text.encode())
            starts.append(start)
        return starts

    def agent_environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of the plan's environment that agents give to their ranks."""
        return environ

    # Native launchers only

    def command(self, plan: Plan, words: Sequence[str]) -> list[str]:
        """Return the one command that starts `words` as every rank, or as one agent per host."""
        raise NotImplementedError

    def host_file(self, plan: Plan) -> str:
        """Return the content of the file that HOST_FILE stands for."""
        return "".join(
            f"{host}:{count}\n" for host, count in zip(plan.hosts, plan.processes, strict=True)
        )

    def variables(self, plan: Plan) -> dict[str, str]:
        """Return the variables that the command needs besides plan.environ."""
        return {}

    def sets_variable(self, name: str) -> bool:
        """Return whether the command itself sets a variable for the processes that it starts."""
        return False

    def send_signal(self, number: int, pid: int, plan: Plan, processes: Processes) -> None:
        """Pass a stop signal on to the ranks. pid: process id of the command, in `processes`."""
        processes.signal(number)

    def listen_ports(self, plan: Plan) -> Sequence[int]:
        """Return the ports of this host that ranks can reach; empty where they can reach any."""
        return ()

    @property
    def keeps_job_layout(self) -> bool:
        """Whether the scheduler distributes the job's own tasks over its hosts in its own order."""
        return False


def index_of(host: str, hosts: Sequence[str]) -> int | None:
    """Return the index of a host among names with or without a domain; None where it is not."""
    return next(
        (index for index, name in enumerate(hosts) if short_name(name) == short_name(host)), None
    )


def job_name(allocation: Allocation) -> str:
    scheduler = "Slurm" if allocation.scheduler == "slurm" else "PBS"
    return f"{scheduler} job {allocation.job_id}"
