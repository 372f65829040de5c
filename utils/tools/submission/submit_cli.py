"""`submit`: submit training scripts as Slurm or PBS jobs, and query the jobs submitted."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...job.commands import SchedulerError
from ...visible_text import visible
from ..cli import defaults
from ..cli.arguments import ArgumentParser
from ..cli.defaults import DefaultsError
from ..cli.launch_options import add_options
from ..cli.missing_files import closest
from ..schedulers import get_scheduler
from ..schedulers.job_spec import OPTIONS, JobError
from . import profiles, queries
from . import submissions as records
from .build_job import COMMANDS, UsageError, choose_profile, gpu_count
from .following import note
from .paths import doctor_words
from .profiles import ProfileError
from .submit import run

DESCRIPTION = """\
Submit a training script as a Slurm or PBS job, and query submitted jobs.

ddpkit submit run --site derecho --account UABC0001 --nodes 4 --time 2h train.py --epochs 3
ddpkit submit run --nodes 2 --time 30m --follow train.py    print state and output until the end
ddpkit submit run --nodes 2 --time 30m -m package.train     run a module, as python -m does
ddpkit submit run --site lumi --nodes 2 --dry-run train.py  print the script; submit nothing
ddpkit submit run --nodes 2 --time 12h --chain 5 train.py   five jobs; each continues the last
ddpkit submit doctor --nodes 2 --follow                     check two nodes: network, GPUs, storage
ddpkit submit list | status 1234 | logs 1234 | stop 1234 | cancel 1234

Each submission has a folder, jobs-out/NAME-DATE-TIME, with its scripts, settings and output.
Exit status: 0: completed (`status`: or not finished yet). 75: saved, to be continued. Otherwise the
job failed; with --follow, the job's own exit status.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0 for success, 1 for an error, or the exit status of a job.

    words: arguments after the name of the command; None: sys.argv[1:].
    """
    args = parse(sys.argv[1:] if words is None else words)
    try:
        _set_defaults(args)
        return _run(args)
    except JobError as error:
        names = {action.dest: action.option_strings[-1:] for action in _parser("run")._actions}
        option = "".join(names.get("folder" if error.field == "output" else error.field, []))
        return _error(f"{error}" + (f" (option {option}, or the site file)" if option else ""))
    except (UsageError, SchedulerError, ProfileError, DefaultsError) as error:
        return _error(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a folder that may not be read
        return _error(
            f"{error.filename or 'writing the output'}: {error.strerror or error}. Nothing more "
            "was done. Check the free space and the permissions there."
        )
    except KeyboardInterrupt:
        print("\nddpkit submit: stopped watching; submitted jobs go on", file=sys.stderr)
        return 130


def _error(text: str) -> int:
    with contextlib.suppress(OSError):  # standard error may be on the full disk
        print(f"ddpkit submit: error: {visible(text)}", file=sys.stderr)
    return 1


def _set_defaults(args: argparse.Namespace) -> None:
    """Fill in what the command line leaves out, from variables and files."""
    found = defaults.load()
    if "site" in found and getattr(args, "site", "") is None:
        args.site = found["site"].value
    if not hasattr(args, "queue"):
        return
    profile = choose_profile(args.site)
    unread = {"SBATCH_ACCOUNT", "SBATCH_PARTITION"} if profile.scheduler != "slurm" else set()
    if profile.queue_option != "partition":
        unread.add("SBATCH_PARTITION")
    found = defaults.load({name: os.environ[name] for name in os.environ.keys() - unread})
    for attribute, name in (("account", "account"), ("queue", "partition")):
        if name in found and getattr(args, attribute) is None:
            setattr(args, attribute, found[name].value)


def _run(args: argparse.Namespace) -> int:
    if args.subcommand in ("run", "doctor"):
        return run(args)
    if args.subcommand == "list":
        return queries.print_list(args.folder, get_scheduler, args.json)
    return queries.combined_exit_status([_query(args, job_id) for job_id in args.job_ids])


def _query(args: argparse.Namespace, job_id: str) -> int:
    submission = records.find(args.folder, job_id)
    if args.subcommand == "stop" and submission is None:
        note(
            f"error: There is no record of job {job_id}. Give --folder, or touch the file that the "
            "training gave to StopSignal."
        )
        return 1
    scheduler = get_scheduler(
        submission.scheduler if submission else choose_profile(args.site).scheduler
    )
    if args.subcommand == "stop" and submission is not None:
        return queries.stop(scheduler, submission, job_id)
    if args.subcommand == "status":
        return queries.print_status(scheduler, submission, job_id, args.json)
    if args.subcommand == "logs":
        return queries.print_logs(scheduler, submission, job_id, args.follow)
    return queries.cancel(scheduler, submission, job_id)


# Options ------------------------------------------------------------------------------------------


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `command` of the result is the subcommand.

    Exits with status 2 for unknown subcommands and options, and with 0 for --help.
    """
    if words and words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(f"usage: ddpkit submit SUBCOMMAND ...\n\n{DESCRIPTION}\nsubcommands:")
        for name, text in COMMANDS.items():
            print(f"  {name:<{width}}  {text}")
        print("\nOptions of each: ddpkit submit SUBCOMMAND --help")
        raise SystemExit(0)
    if not words or words[0] not in COMMANDS:
        ArgumentParser(prog="ddpkit submit", usage="ddpkit submit SUBCOMMAND ...").error(
            _no_subcommand(words)
        )
    name = words[0]
    args = _parser(name).parse_args(words[1:])
    args.subcommand = name
    if name == "doctor":
        options = args.command[1:] if args.command[:1] == ["--"] else args.command
        args.command = [*doctor_words(), *options]
    return args


def _no_subcommand(words: Sequence[str]) -> str:
    found = f"{words[0]!r} is not a subcommand" if words else "a subcommand is missing"
    expected = f"Expected one of: {', '.join(COMMANDS)}"
    if not words:
        return f"{found}. {expected}. See: ddpkit submit --help"
    looks_like_script = words[0].endswith(".py") or "/" in words[0] or os.path.isfile(words[0])
    near = closest(words[0].lower(), list(COMMANDS))
    if looks_like_script or words[0].startswith("-"):
        meant = ["run", *words]
    elif near:
        meant = [near, *words[1:]]
    else:
        return f"{found}. {expected}. See: ddpkit submit --help"
    return f"{found}. {expected}. Did you mean: ddpkit submit {shlex.join(meant)}"


def _parser(name: str) -> ArgumentParser:
    text = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"ddpkit submit {name}",
        description=f"{text[0].upper()}{text[1:]}.",
        allow_abbrev=False,
    )
    if name in ("run", "doctor"):
        _add_run_options(parser)
        parser.for_others = "Another option of sbatch or qsub: --directive='OPTION VALUE'"
    if name == "doctor":
        parser.for_others += ". One of ddpkit doctor follows --, as in: -- --quick"
        parser.usage = "ddpkit submit doctor [OPTION ...] [-- OPTION OF ddpkit doctor ...]"
        parser.epilog = "The options are those of `run`; --time is 10m by default."
        parser.set_defaults(name="doctor", walltime="10m")
    if name in ("run", "doctor"):
        return parser
    if name != "list":
        printed = "as printed by submit or the scheduler"
        parser.add_argument("job_ids", nargs="+", metavar="JOB_ID", help=printed)
    if name in ("status", "logs", "cancel"):
        parser.add_argument(
            "--site",
            metavar="NAME|FILE",
            help="for a job that has no record in --folder",
        )
    if name in ("status", "list"):
        parser.add_argument("--json", action="store_true", help="print a line of JSON for each job")
    if name == "logs":
        parser.add_argument(
            "--follow", action="store_true", help="print state and output until the job ends"
        )
    _add_folder(parser.add_argument)
    return parser


def _add_folder(add: Callable[..., object]) -> None:
    add(
        "--folder",
        type=Path,
        default=Path("jobs-out"),
        help="where the folders of submissions are (default: jobs-out)",
    )


def _add_submission_options(add: Callable[..., object]) -> None:
    add("--follow", action="store_true", help="print state and output until the job ends")
    add("--no-check", action="store_true", help="submit despite problems that the checks find")


def _add_run_options(parser: ArgumentParser) -> None:
    parser.usage = (
        "ddpkit submit run [OPTION ...] SCRIPT [ARGUMENT ...]\n"
        "       ddpkit submit run [OPTION ...] -m MODULE [ARGUMENT ...]"
    )
    parser.epilog = "Options come before the script. What follows the script is passed to it."
    _add_resource_options(parser.add_argument_group("resources").add_argument)
    _add_job_options(parser.add_argument_group("job and queue").add_argument)
    _add_environment_options(parser.add_argument_group("environment").add_argument)

    add = parser.add_argument_group("submission").add_argument
    _add_submission_options(add)
    add(
        "--dry-run",
        action="store_true",
        help="print the job script and submit nothing; exit status 1 if the job would be refused",
    )
    _add_folder(add)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_resource_options(add: Callable[..., object]) -> None:
    nodes = "nodes (default: as many as --ntasks needs with one rank for each GPU, or 1)"
    add("-N", "--nodes", type=int, metavar="N", help=nodes)
    add_options(add, "restarts", for_submit=True)
    add("-n", "--ntasks", type=int, metavar="N", help="ranks in all, a multiple of --nodes")
    add_options(add, "ranks", for_submit=True)
    add(
        "-c",
        "--cpus-per-task",
        dest="cores_per_rank",
        type=int,
        metavar="N",
        help="cores of each rank",
    )
    gpus = "GPUs per node; 0 for none. Slurm: with a type, as in a100:4"
    add("--gpus-per-node", type=gpu_count, metavar="[TYPE:]N", help=gpus)
    memory = "memory per node, for example 64G; Slurm: 0 for all of it"
    add("--mem", dest="memory", metavar="SIZE", help=memory)
    add(
        "-t",
        "--time",
        dest="walltime",
        metavar="TIME",
        help="time limit: 2h, 1h30m, 2:00:00, 1-12:00:00; a plain number is minutes",
    )


def _add_job_options(add: Callable[..., object]) -> None:
    add(
        "--site",
        metavar="NAME|FILE",
        help=f"profile of the cluster: {', '.join(profiles.names())}, or a YAML file "
        "(default: that of ddpkit sites config)",
    )
    for name, option in OPTIONS.items():
        add(*option.flags.split(), dest=name, **option.argparse)
    add("-q", dest="qos", metavar="NAME", help="as in sbatch, the QOS; as in qsub, the queue")
    add(
        "--chain",
        type=int,
        default=1,
        metavar="N",
        help="submit N jobs, each of which continues the one before if that completed, stopped "
        "after saving (exit status 75) or reached its time limit",
    )
    add(
        "--preflight",
        action="store_true",
        help="check the hosts before the training starts (doctor --quick). If one is bad, the "
        "job is requeued, or the next one of its chain runs, without that host",
    )
    add("--checkpoints", metavar="FOLDER", help="all hosts have to write this, for --preflight")
    add(
        "--directive",
        dest="directives",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of the scheduler, for example --directive=--constraint=a100",
    )


def _add_environment_options(add: Callable[..., object]) -> None:
    add_options(add, "launcher", for_submit=True, launchers=", ".join(profiles.LAUNCHERS))
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="shell line to run before the ranks, for example 'source venv/bin/activate'",
    )
    add(
        "--env",
        dest="environment",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable; NAME alone takes its value from this shell, unseen by ps",
    )
    add("--python", metavar="PATH", help="of the ranks; default: that of the active environment")
    add_options(add, "output", for_submit=True)
    add_options(add, "hangs", for_submit=True)
    add_options(add, "container", for_submit=True)
    add_options(add, "packages", for_submit=True)
    add(
        "-m",
        dest="module_command",
        nargs=argparse.REMAINDER,
        help="MODULE [ARGUMENT ...]: run a module instead of a script, as python -m does",
    )
