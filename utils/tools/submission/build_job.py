"""Make a Job from the options of `submit run` and the profile of the site."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ...job.commands import SchedulerError
from ...launchers.rank_variables import INDEPENDENT
from ..cli import defaults, interpreter
from ..cli.launch_options import SHARED_OPTIONS, LaunchOptions
from ..launch.nested import refusal
from ..schedulers import get_scheduler
from ..schedulers.job_spec import OPTIONS, Job, option_name, parse_walltime, split_directive
from . import preflight, profiles
from .following import note
from .profiles import Profile

COMMANDS = {
    "run": "submit a script, a module or a program as a job",
    "status": "print the status of jobs",
    "list": "list the latest submissions",
    "logs": "print the output of jobs",
    "stop": "let running jobs save and stop, as at their time limit; StopSignal does it",
    "cancel": "cancel jobs, and what is left of their chains",
    "doctor": "submit a job that checks the cluster, as ddpkit doctor does",
}
# Options that people put after the script by mistake, where they are passed to it.
MISPLACED = (
    *("--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node", "--time"),
    *("--partition", "--account", "--follow", "--chain", "--dry-run", "--no-check"),
)


_WHOLE_NODES = "--exclusive"  # sbatch option
_QUEUES = ({"-p", "--partition"}, {"-q", "--qos"})  # sbatch options; [1]: a queue is a QOS


class UsageError(Exception):
    """A mistake that the user can correct; it is reported without a traceback."""


def choose_profile(name: str | None) -> Profile:
    """Load the named profile, or generic-slurm or generic-pbs for the scheduler of this host.

    Raises ProfileError, and UsageError where no single scheduler is found.
    """
    if name is not None:
        return profiles.load(name)
    try:
        scheduler = get_scheduler().name
    except SchedulerError as error:
        raise UsageError(
            f"{error} Or name the cluster, one of ddpkit sites list or a file of your own: "
            "--site NAME."
        ) from None
    return profiles.load(f"generic-{scheduler}")


def build_job(args: argparse.Namespace, profile: Profile) -> Job:
    """Make a job of the options; the profile fills in what they leave out.

    Raises JobError and UsageError for values that cannot be used.
    """
    if args.spare < 0:
        raise UsageError(f"--spare is {args.spare}. Expected 0 or more")
    command = _command(args)
    gpu_type, gpus = args.gpus_per_node or (None, profile.gpus_per_node)
    args.nodes = _nodes(args, gpus) if args.nodes is None else args.nodes
    requested_ranks = _ranks_per_node(args)
    _check_ranks(args, gpus, requested_ranks)
    ranks = requested_ranks or gpus or 1
    # Where nodes are exclusive and the scheduler knows no GPUs, the ranks are requested instead.
    request_gpus = profile.request_gpus or args.gpus_per_node is not None
    launch = _launch_options(args, profile)
    in_site_folder = args.stage_dir is None and launch.stage_dir is not None
    queue, directives = _queue_and_directives(args, profile, in_site_folder)
    plain = {name: getattr(args, name) for name in OPTIONS}
    if args.mail_user and not args.mail_type:  # without it, Slurm sends nothing
        plain["mail_type"] = "end,fail"
    return Job(
        **{**plain, "queue": queue, "name": args.name or _job_name(command)},
        command=command,
        nodes=args.nodes + args.spare,
        launch=launch._replace(ranks_per_node=requested_ranks if request_gpus else ranks),
        gpus_per_node=(gpus or 0) if request_gpus else 0,
        gpu_type=gpu_type,
        cores_per_rank=args.cores_per_rank or _share_of_cores(profile, ranks),
        memory=args.memory or profile.memory_per_node,
        walltime=parse_walltime(args.walltime) if args.walltime else None,
        setup=(*profile.setup, *args.setup),
        module_paths=profile.module_paths,
        modules=profile.modules,
        environment=_environment(args, profile, ranks),
        preflight=_preflight(args),
        directives=directives,
        chunk=profile.chunk,
    )


def _launch_options(args: argparse.Namespace, profile: Profile) -> LaunchOptions:
    """Return the options for ddpkit launch; the profile fills in what the command line leaves out.

    Without --stage-dir, the copies of --stage go into the folder of the profile.
    """
    values = {name: getattr(args, name) for name in SHARED_OPTIONS}
    for name, option in SHARED_OPTIONS.items():
        if option.in_profile and values[name] in (None, ""):
            values[name] = getattr(profile.launch, name)
    options = LaunchOptions(**values)
    if args.stage is None:  # never False, which would override variables and files
        options = options._replace(stage=args.stage_dir is not None or options.stage or None)
    return options if options.stage else options._replace(stage_dir=None)


def gpu_count(text: str) -> tuple[str | None, int]:
    """Return the type and number of GPUs per node: "a100:4" -> ("a100", 4), "4" -> (None, 4).

    Raises argparse.ArgumentTypeError.
    """
    found = re.fullmatch(r"(?:([A-Za-z0-9_][\w.-]*):)?([0-9]{1,6})", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of GPUs. Expected one such as 4 or, under Slurm, a100:4"
        )
    return found[1], int(found[2])


def _nodes(args: argparse.Namespace, gpus: int | None) -> int:
    """Return how many nodes --ntasks needs, with one rank for each GPU."""
    if args.ntasks is None or not gpus or args.oversubscribe or args.ntasks <= gpus:
        return 1
    if args.ntasks % gpus:
        raise UsageError(
            f"--ntasks {args.ntasks} is not a multiple of the {gpus} GPUs of a node, of which each "
            "gets a rank. Give a multiple, or --nodes."
        )
    return int(args.ntasks) // gpus


def _check_ranks(args: argparse.Namespace, gpus: int | None, ranks: int | None) -> None:
    """Raise UsageError if ranks would share GPUs. ranks: number of ranks on each node."""
    if gpus and ranks and ranks > gpus and not args.oversubscribe:
        nodes = -(-ranks * args.nodes // gpus)
        raise UsageError(
            f"{ranks} ranks on each node are more than its {gpus} GPU{'s' * (gpus > 1)}. Expected "
            f"one rank for each GPU. Give --nodes {nodes}, fewer ranks, or --oversubscribe if they "
            "are to share GPUs; --gpus-per-node 0 where they use none."
        )


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the words that each rank runs."""
    if args.module_command is not None:
        if not args.module_command or args.module_command[0].startswith("-"):
            raise UsageError(
                "-m has no module. Expected the name of a module, as in: "
                "ddpkit submit run -m package.train --epochs 3"
            )
        return ("-m", *args.module_command)
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise UsageError(
            "There is no training script. Expected a script and its arguments after the options, "
            "as in: ddpkit submit run --nodes 2 train.py --epochs 3"
        )
    if words[0] in COMMANDS and not os.path.exists(words[0]):
        raise UsageError(
            f"{words[0]!r} is a subcommand of ddpkit submit, and no file here. Leave `run` out: "
            f"ddpkit submit {shlex.join(words)}"
        )
    return tuple(words)


def _preflight(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the options of doctor for --preflight; none without it."""
    if args.preflight:
        return preflight.options(args.checkpoints)
    if args.checkpoints is not None:
        raise UsageError(
            "--checkpoints is given, which is for the check of the hosts, and --preflight is not. "
            "Add --preflight, or give the option to the script, behind its name."
        )
    return ()


def _ranks_per_node(args: argparse.Namespace) -> int | None:
    """Return the requested number of ranks per node."""
    if args.ntasks is None:
        per_node: int | None = args.ranks_per_node
        return per_node
    if args.ranks_per_node is not None:
        raise UsageError("Both --ntasks and --ntasks-per-node are given. Give one of them.")
    if args.ntasks < 1 or args.nodes < 1 or args.ntasks % args.nodes:
        raise UsageError(
            f"--ntasks {args.ntasks} is not a multiple of --nodes {args.nodes}. Every node gets "
            "the same number of ranks. Give a multiple."
        )
    ranks: int = args.ntasks // args.nodes
    return ranks


def _share_of_cores(profile: Profile, ranks: int) -> int | None:
    """Divide the cores of a node equally among its ranks."""
    cores = profile.cores_per_node
    if cores is None:
        return None
    if not 1 <= ranks <= cores:
        raise UsageError(
            f"{ranks} ranks per node are more than the {cores} cores per node of the profile "
            f"{profile.name} (cores_per_node). Give fewer --ntasks-per-node or --gpus-per-node, or "
            "the right number of cores with --cpus-per-task."
        )
    return cores // ranks


def _queue_and_directives(
    args: argparse.Namespace, profile: Profile, in_site_folder: bool
) -> tuple[str | None, tuple[str, ...]]:
    """Return the queue and directives. in_site_folder: copies are in the profile's stage_dir."""
    directives = [*profile.directives, *(profile.stage_directives if in_site_folder else ())]
    is_qos = profile.scheduler == "slurm" and profile.queue_option == "qos"
    queue = args.queue
    if args.qos and (is_qos or profile.scheduler == "pbs"):
        if args.queue:
            raise UsageError("Both -p and -q name a queue. Give one of them.")
        queue = args.qos
    elif args.qos:
        directives.append(f"--qos={shlex.quote(args.qos)}")
    options = {option_name(split_directive(directive)) for directive in args.directives}
    if not queue and not options & ({"-q"} if profile.scheduler == "pbs" else _QUEUES[is_qos]):
        queue = profile.queue_for(args.nodes + args.spare)
    if queue and is_qos:
        directives.append(f"--qos={queue}")
        queue = None
    own_options = {_option_name(directive) for directive in args.directives}
    if own_options & {"--oversubscribe", "-s"}:
        own_options.add(_WHOLE_NODES)
    if _WHOLE_NODES in {*directives} - own_options and args.cores_per_rank is not None:
        note(
            f"note: the profile {profile.name} adds {_WHOLE_NODES}: the job waits for whole nodes, "
            "whatever -c is. Where nodes are shared, add --directive=--oversubscribe"
        )
    kept = [directive for directive in directives if _option_name(directive) not in own_options]
    return queue, (*kept, *args.directives)


def _option_name(directive: str) -> str:
    """ "--constraint=gpu" -> "--constraint", "-l filesystems=home" -> "-l filesystems"."""
    return directive.strip().partition("=")[0]


def _job_name(command: Sequence[str]) -> str:
    """Return a job name that both schedulers accept."""
    name = command[1].rpartition(".")[2] if command[0] == "-m" else Path(command[0]).stem
    return re.sub("[^A-Za-z0-9_.-]", "_", name).lstrip("_.-0123456789")[:15] or "job"


def _environment(args: argparse.Namespace, profile: Profile, ranks: int) -> dict[str, str]:
    environment = profile.exports(args.nodes, ranks)
    if centre_file := os.environ.get(defaults.CENTRE_VARIABLE):  # the job reads it again
        environment[defaults.CENTRE_VARIABLE] = centre_file
    if args.python:
        environment["PYTHON"] = args.python
    for text in args.environment:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(
                f"--env {text}: {text} is not set here. Expected NAME=VALUE, or the name of a "
                f"variable to pass on. Write --env {text}=VALUE, or export it first."
            )
        environment[name] = value if equals else os.environ[name]
    return environment


# Checks -------------------------------------------------------------------------------------------


def with_python(job: Job, args: argparse.Namespace, profile: Profile) -> tuple[Job, list[str]]:
    """Return the job with PYTHON set to the Python for its ranks, and problems in finding one.

    Where the image, modules or set-up lines of the job may bring another Python, the job chooses.
    """
    is_script = not job.launch.container and interpreter.is_python(job.command)
    if job.launch.container or args.setup or profile.setup:
        return job, []
    named = {name: value for name, value in job.environment.items() if name == "PYTHON" and value}
    try:
        chosen = interpreter.choose(
            {**os.environ, **named},
            torch=is_script or job.launch.launcher == "torchrun",
            default=(default := defaults.python()),
        )
    except interpreter.InterpreterError as error:
        if profile.modules and not named:
            note(
                f"{error}. The modules of {profile.title} may bring it: the job checks this before "
                "it starts ranks"
            )
            return job, []
        return job, [str(error)]
    # The kit's Python may run this script only because the Python of the shell has no PyYAML.
    is_kits = chosen.path == interpreter.KIT_PYTHON and "VIRTUAL_ENV" not in os.environ
    meant = ("PYTHON", *interpreter.ACTIVE, default.origin if default else "PYTHON")
    if profile.modules and (is_kits or chosen.source not in meant):
        return job, []
    if is_script:
        note(str(chosen))
    environment = {**job.environment, "PYTHON": chosen.path}
    return dataclasses.replace(job, environment=environment), []


def missing_account(profile: Profile, job: Job) -> list[str]:
    """Return a problem if the site requires an account and the job has none."""
    by_directive = any(
        option_name(split_directive(directive)) in ("-A", "--account")
        for directive in job.directives
    )
    variable = get_scheduler(profile.scheduler).account_variable
    if not profile.account_example or job.account or by_directive or os.environ.get(variable):
        return []
    example = profile.account_example
    return [f"{profile.title} requires an account. Add --account: {example}."]


def nested_launcher(job: Job) -> list[str]:
    """Return why ddpkit launch would refuse a job's command when it starts; [] if it would not."""
    if job.environment.get(INDEPENDENT, os.environ.get(INDEPENDENT)):
        return []
    problem = refusal(job.command, "ddpkit submit run", f"--env {INDEPENDENT}=1")
    return [f"{problem}."] if problem else []


def note_misplaced_options(args: argparse.Namespace) -> None:
    """Point out options of `submit run` among the arguments of the script: `train.py --nodes 4`."""
    words = args.module_command or args.command
    for word in words[1:]:
        if word.partition("=")[0] in MISPLACED:
            note(
                f"note: {word} comes after the script and is passed to it; options of submit come "
                "before"
            )
