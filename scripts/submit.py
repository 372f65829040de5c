#!/usr/bin/env python3
"""Submit a training script as a Slurm or PBS job over many nodes, and query the jobs submitted.

submit.py run --site derecho --account UABC0001 --nodes 4 --time 2h train.py --epochs 3
submit.py run --nodes 2 --time 30m --follow train.py         print state and output until the job ends
submit.py run --nodes 2 --time 30m -m package.train --lr 1   run a module, as python -m does
submit.py run --site lumi --nodes 2 --dry-run train.py       print the job script; submit nothing
submit.py run --nodes 2 --time 12h --chain 5 train.py        five jobs; each continues the one before
submit.py list | status 1234 | logs 1234 | cancel 1234 | resubmit 1234

Each submission has a folder, jobs-out/NAME-DATE-TIME, with the script, the settings, the job ids and the output.
Exit status of `status` and --follow: 0 the job completed (status: or has not ended), 75 it stopped after saving and is
to be continued, otherwise it failed (--follow: the job's own status).
"""
import interpreter

if __name__ == "__main__":
    interpreter.restart_if_too_old(__file__)

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
import following
import job_scripts
import records
import submitted

from utils.schedulers import Job, JobError, Scheduler, SchedulerError, format_walltime, get_scheduler, parse_walltime

try:
    import sites
except ModuleNotFoundError as missing:
    if missing.name != "yaml":
        raise
    if os.path.exists(interpreter.KIT_PYTHON) and sys.executable != interpreter.KIT_PYTHON:
        interpreter.restart(interpreter.KIT_PYTHON, __file__)
    sys.exit("submit: error: PyYAML is not installed; site profiles are YAML files. Install it: "
             f"{Path(__file__).resolve().parents[0]}/setup_env.sh, or {sys.executable} -m pip install pyyaml")

COMMANDS = {
    "run": "submit a script, a module or a program as a job",
    "status": "print how jobs are or how they ended",
    "list": "list the latest submissions",
    "logs": "print the output of jobs",
    "cancel": "end jobs, and those that would continue them",
    "resubmit": "submit recorded jobs again, with the same options and a new folder",
}
LONGEST_CHAIN = 100
JOB_ID = re.compile(r"[0-9][A-Za-z0-9_.@\[\]+-]*")


class UserError(Exception):
    """A mistake that the user can correct, told without a traceback."""


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0 for success, 1 for what was refused or failed, 2 for wrong options; see __doc__ for jobs."""
    words = sys.argv[1:] if words is None else list(words)
    if not words or words[0] not in ("-h", "--help", *COMMANDS):
        print(f"submit.py: error: {_no_command(words)}", file=sys.stderr)
        return 2
    args = parser().parse_args(words)
    try:
        return int(args.function(args))
    except (UserError, SchedulerError, JobError, sites.SiteError) as error:
        return _fail(_told(error))
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a folder that may not be read
        return _fail(f"{error.filename or 'writing the output'}: {error.strerror or error}. Nothing more was done. "
                     "Check the free space and the permissions there.")
    except KeyboardInterrupt:
        print("\nsubmit: stopped watching; jobs that were submitted go on", file=sys.stderr)
        return 130


def _fail(text: str) -> int:
    with contextlib.suppress(OSError):  # of a full disk below standard error
        print(f"submit: error: {text}", file=sys.stderr)
    return 1


def _no_command(words: Sequence[str]) -> str:
    """What to say when the first word is no subcommand."""
    found = f"{words[0]!r} is not a subcommand" if words else "a subcommand is missing"
    near = difflib.get_close_matches(words[0].lower(), COMMANDS, 1, 0.5) if words else []
    looks_like_run = words and (words[0].startswith("-") or "/" in words[0] or words[0].endswith(".py")
                                or os.path.isfile(words[0]))
    better = ["run", *words] if looks_like_run else [*near, *words[1:]] if near else []
    return (f"{found}. Expected one of: {', '.join(COMMANDS)}. "
            + (f"Did you mean: submit.py {shlex.join(better)}" if better else "See: submit.py --help"))


def _told(error: Exception) -> str:
    if not isinstance(error, JobError):
        return str(error)
    option = OPTION_OF_FIELD.get(error.field)
    return str(error) + (f" (option {option}, or the site file)" if option else "")


OPTION_OF_FIELD = {
    "nodes": "--nodes", "gpus_per_node": "--gpus-per-node", "ranks_per_node": "--ranks-per-node",
    "cores_per_rank": "--cores-per-node", "memory": "--mem", "walltime": "--time", "queue": "--queue",
    "account": "--account", "name": "--job-name", "array": "--array", "dependency": "--dependency",
    "setup": "--set-up", "modules": "--module", "environment": "--env", "launcher": "--launcher",
    "output": "--folder", "signal_seconds": "--signal", "directives": "--directive", "components": "--component",
    "container": "--container",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="submit.py", description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(metavar="subcommand", required=True)
    made = {name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".",
                                      allow_abbrev=False) for name, text in COMMANDS.items()}
    for name in made:
        made[name].add_argument("--folder", type=Path, default=Path("jobs-out"),
                                help="the folder with the folders of submissions (default: jobs-out)")
    for name in ("status", "logs", "cancel", "resubmit"):
        made[name].add_argument("job_ids", nargs="+", metavar="job-id")
    for name in ("status", "logs", "cancel"):
        made[name].add_argument("--site", metavar="NAME|FILE", help="for a job without a record in --folder")
        made[name].set_defaults(function=lambda args, name=name: about_jobs(name, args))
    made["logs"].add_argument("--follow", action="store_true", help="print more until the job has ended")
    made["list"].add_argument("--all", action="store_true", help=f"not only the latest {submitted.LISTED}")
    made["list"].set_defaults(function=lambda args: submitted.print_list(args.folder, get_scheduler, args.all))
    made["resubmit"].add_argument("--follow", action="store_true", help="print state and output until the end")
    made["resubmit"].add_argument("--no-check", action="store_true", help="submit in spite of what the checks find")
    made["resubmit"].set_defaults(function=resubmit)
    _add_run_options(made["run"])
    made["run"].set_defaults(function=run)
    return top


def _add_run_options(run_parser: argparse.ArgumentParser) -> None:
    run_parser.usage = ("submit.py run [options] script.py [arguments]\n"
                        "       submit.py run [options] -m package.module [arguments]")
    run_parser.epilog = "Options come before the script; what follows the script is passed to it."
    add = run_parser.add_argument_group("resources").add_argument
    add("-N", "--nodes", type=int, default=1, metavar="N", help="default: 1")
    add("-t", "--time", metavar="TIME", help="run time limit: 2h, 1h30m, 30m, 2:00:00, 1-12:00:00; a plain number is "
                                             "minutes, 30:00 is 30 minutes. Default: the scheduler's")
    add("--gpus-per-node", type=int, metavar="N", help="0 for none")
    add("--cores-per-node", type=int, metavar="N", help="shared equally by the ranks")
    add("--ranks-per-node", type=int, metavar="N", help="default: one for each GPU")
    add("-n", "--ntasks", type=int, metavar="N", help="ranks on all nodes together; a multiple of --nodes")
    add("--mem", metavar="SIZE", help="per node, e.g. 64G")
    add = run_parser.add_argument_group("where and when").add_argument
    add("--site", metavar="NAME|FILE", help="cluster profile, or a YAML file of your own; default: the scheduler found "
                                            f"here. Known: {', '.join(sites.names())}")
    add("-A", "--account", help="project that pays")
    add("-p", "--partition", "--queue", dest="queue", metavar="NAME",
        help="partition (or QOS, where the site file says so) of Slurm, queue of PBS")
    add("-J", "--job-name", metavar="NAME", help="default: the name of the script")
    add("-a", "--array", metavar="0-9%2", help="job array: indices, and how many run at once")
    add("-d", "--dependency", metavar="afterok:ID", help="in the scheduler's words")
    add("--chain", type=int, default=1, metavar="N", help="submit N jobs. Each continues the one before when that has "
        "completed, stopped after saving (exit status 75) or reached its time limit; a failure ends the chain")
    add("--requeue", action=argparse.BooleanOptionalAction, help="whether the job may be started again after a failure")
    add("--signal", type=int, metavar="SECONDS", help="send USR1 to the ranks this long before the time limit")
    add("--directive", action="append", default=[], metavar="OPTION",
        help="further option of the scheduler, e.g. --directive=--constraint=a100")
    add("--component", action="append", default=[], metavar="OPTIONS",
        help="further component of a heterogeneous Slurm job: the options in which it differs from the first, e.g. "
             "--component='--nodes=1 --gpus-per-node=2'")
    add = run_parser.add_argument_group("what runs").add_argument
    add("--launcher", help=f"{', '.join(sites.LAUNCHERS)}: what starts the ranks")
    add("--module", action="append", default=[], metavar="NAME", help="module to load, after those of the site")
    add("--set-up", action="append", default=[], metavar="LINE", help="shell line to run before, e.g. "
                                                                      "'source venv/bin/activate'")
    add("--env", action="append", default=[], metavar="K=V", help="environment variable for the job")
    add("--container", metavar="IMAGE", help="run in this image, by apptainer or singularity")
    add("-m", dest="module_command", nargs=argparse.REMAINDER, metavar="MODULE",
        help="run a module instead of a script; last option")
    add("command", nargs=argparse.REMAINDER, metavar="script [arguments]")
    add = run_parser.add_argument_group("submission").add_argument
    add("--follow", action="store_true", help="print state, place in the queue and output until the job has ended")
    add("--no-check", action="store_true", help="submit in spite of what the checks find")
    add("--dry-run", action="store_true", help="print the job script and submit nothing; exit status 1 where the job "
                                               "would be refused: by the published limits of --site, without it by "
                                               "the scheduler of this host")


# --- from options and profile to a job

def choose_site(name: str | None) -> sites.Site:
    """The profile that was named, or generic-SCHEDULER for the scheduler that is here."""
    if name is not None:
        return sites.load(name)
    try:
        here = get_scheduler().name
    except SchedulerError as error:
        raise UserError(f"{error} Or say which cluster is meant: --site NAME, one of {', '.join(sites.names())}, or a "
                        "file of your own.") from None
    return sites.load(f"generic-{here}")


def build_job(args: argparse.Namespace, site: sites.Site) -> Job:
    """What the options say, and the site where they say nothing. JobError and UserError name what cannot be used."""
    command = _command(args)
    gpus = site.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node
    cores = site.cores_per_node if args.cores_per_node is None else args.cores_per_node
    own_ranks = _ranks_per_node(args)
    ranks = own_ranks or gpus or 1
    if cores is not None and not 1 <= ranks <= cores:
        raise UserError(f"{ranks} ranks per node are more than its {cores} cores. Every rank needs one. Give fewer "
                        "--ranks-per-node or --gpus-per-node, or the right --cores-per-node.")
    queue = args.queue or site.queue
    directives = list(site.directives)
    if queue and site.scheduler == "slurm" and site.queue_option == "qos":
        directives.append(f"--qos={queue}")
        queue = None
    own = {_option_name(words) for words in args.directive}
    directives = [words for words in directives if _option_name(words) not in own]  # --constraint replaces the site's
    ask_for_gpus = site.ask_for_gpus or args.gpus_per_node is not None
    return Job(
        command=command, nodes=args.nodes, gpus_per_node=(gpus or 0) if ask_for_gpus else 0,
        ranks_per_node=own_ranks if ask_for_gpus else ranks,
        cores_per_rank=cores // ranks if cores else None, memory=args.mem or site.memory_per_node,
        walltime=parse_walltime(args.time) if args.time else None, queue=queue, account=args.account,
        name=args.job_name or _name_of(command[1].rpartition(".")[2] if command[0] == "-m" else command[0]),
        array=args.array, dependency=args.dependency,
        setup=(*site.setup, *args.set_up), modules=(*site.modules, *args.module),
        environment=_environment(args, site), launcher=args.launcher or site.launcher, signal_seconds=args.signal,
        requeue=args.requeue, directives=(*directives, *args.directive), components=tuple(args.component),
        chunk=site.chunk, container=args.container,
        gpu_vendor=None if args.gpus_per_node == 0 else site.gpu_vendor)


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    """The words to run on each rank. UserError for none, and for a subcommand that was mistaken for a script."""
    if args.module_command is not None:
        if not args.module_command or args.module_command[0].startswith("-"):
            raise UserError("-m has no module. The name of a module was expected, such as: submit.py run -m "
                            "package.train --epochs 3")
        return ("-m", *args.module_command)
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise UserError("There is no training script. A script and its arguments were expected after the options. Add "
                        "them, for example: submit.py run --nodes 2 train.py --epochs 3")
    if words[0] in COMMANDS and not os.path.exists(words[0]):
        raise UserError(f"{words[0]!r} is a subcommand of submit.py, and no file here. Leave `run` out: submit.py "
                        f"{shlex.join(words)}")
    return tuple(words)


def _ranks_per_node(args: argparse.Namespace) -> int | None:
    if args.ntasks is None:
        return args.ranks_per_node  # type: ignore[no-any-return]
    if args.ranks_per_node is not None:
        raise UserError("--ntasks and --ranks-per-node say the same thing. Give one of them.")
    if args.ntasks < 1 or args.nodes < 1 or args.ntasks % args.nodes:
        raise UserError(f"--ntasks {args.ntasks} is not a multiple of --nodes {args.nodes}. Every node gets the same "
                        "number of ranks. Give a multiple.")
    return args.ntasks // args.nodes  # type: ignore[no-any-return]


def misplaced_options(args: argparse.Namespace) -> list[str]:
    """Options of submit.py among the arguments of the script, such as `train.py --nodes 4`."""
    known = {"--nodes", "--ntasks", "--time", "--gpus-per-node", "--ranks-per-node", "--cores-per-node", "--partition",
             "--account", "--follow", "--chain", "--dry-run", "--no-check"}
    words = args.module_command or args.command
    return [word for word in words[1:] if word.partition("=")[0] in known]


def _option_name(directive: str) -> str:
    """"--constraint=gpu" -> "--constraint", "-l filesystems=home" -> "-l filesystems"."""
    return re.split("=", directive.strip(), maxsplit=1)[0]


def _name_of(script: str) -> str:
    """A job name that every scheduler takes."""
    return re.sub("[^A-Za-z0-9_.-]", "_", Path(script).stem).lstrip("_.-0123456789")[:15] or "job"


def _environment(args: argparse.Namespace, site: sites.Site) -> dict[str, str]:
    environment = {name: variable.value for name, variable in site.environment.items()}
    for text in args.env:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--env {text} has no value. NAME=VALUE was expected. Write --env {text}=VALUE.")
        environment[name] = value
    return environment


def with_python(job: Job, args: argparse.Namespace, site: sites.Site) -> tuple[Job, list[str]]:
    """Return the job with PYTHON set to the Python for its ranks, and what is wrong where none here can be it.

    Where the image, modules or set-up lines of the job may bring another Python, launch.py chooses it in the job.
    """
    script = not job.container and interpreter.is_python(job.command)
    if job.container or args.set_up or args.module or site.setup:
        return job, []
    named = {"PYTHON": job.environment["PYTHON"]} if job.environment.get("PYTHON") else {}
    try:
        chosen = interpreter.choose({**os.environ, **named}, torch=script or job.launcher == "torchrun")
    except interpreter.InterpreterError as error:
        if site.modules and not named:
            print(f"submit: {error}. The modules of {site.title} may bring it: the job checks this before it starts "
                  "ranks", file=sys.stderr)
            return job, []
        return job, [str(error)]
    if site.modules and chosen.source not in ("PYTHON", *interpreter.ACTIVE):
        return job, []
    if script:
        print(f"submit: {chosen}", file=sys.stderr)
    return dataclasses.replace(job, environment={**job.environment, "PYTHON": chosen.path}), []


def site_problems(site: sites.Site, job: Job, queue: str | None) -> list[str]:
    """What the published facts of a site say against a job."""
    problems = []
    if site.account_example and not job.account:
        problems.append(f"{site.title} takes no job without an account. Add --account: {site.account_example}.")
    limits = site.queues.get(queue or "", sites.Queue())
    if job.walltime and limits.max_time and job.walltime > limits.max_time:
        problems.append(f"{format_walltime(job.walltime)} is over the limit of {queue}, "
                        f"{format_walltime(limits.max_time)}. Give a shorter --time or another --queue.")
    if limits.max_nodes and job.nodes > limits.max_nodes:
        problems.append(f"{job.nodes} nodes are more than the {limits.max_nodes} of {queue}. Give fewer --nodes or "
                        "another --queue.")
    if limits.min_nodes and job.nodes < limits.min_nodes:
        problems.append(f"{job.nodes} nodes are less than {queue} takes, {limits.min_nodes}. Give more --nodes or "
                        "another --queue.")
    return problems


# --- submitting

def run(args: argparse.Namespace) -> int:
    if not 1 <= args.chain <= LONGEST_CHAIN:
        raise UserError(f"--chain {args.chain} is not a number from 1 to {LONGEST_CHAIN}. Correct it.")
    if args.chain > 1 and args.array:
        raise UserError("--chain and --array together are not supported. Submit the array with --array ...%1, whose "
                        "elements run one after the other, or a chain without an array.")
    site = choose_site(args.site)
    job, problems = with_python(build_job(args, site), args, site)
    script = job_scripts.submitted_script(site.scheduler, job)
    problems += site_problems(site, job, args.queue or site.queue)
    if args.dry_run:
        if args.site is None:  # the scheduler of this host; a site that is named may be far away
            problems += get_scheduler(site.scheduler).check(job)
        print(script, end="")
        for problem in problems:
            what = "warning" if args.no_check else "would not be submitted"
            print(f"submit: {what}: {problem}", file=sys.stderr)
        return int(bool(problems) and not args.no_check)
    for word in misplaced_options(args):
        print(f"submit: note: {word} comes after the script and is passed to it; options of submit.py come before",
              file=sys.stderr)
    return submit(get_scheduler(site.scheduler), site.name, job, args, problems, args.chain)


def submit(scheduler: Scheduler, site: str, job: Job, args: argparse.Namespace, problems: Sequence[str],
           count: int) -> int:
    """Check the job, submit it `count` times as a chain, print the ids, and follow it where that was asked for."""
    problems = [*problems, *scheduler.check(job)]
    for problem in problems:
        print(f"submit: {'warning' if args.no_check else 'error'}: {problem}", file=sys.stderr)
    if problems and not args.no_check:
        print("submit: nothing was submitted. --no-check submits in spite of this.", file=sys.stderr)
        return 1
    record = submit_chain(scheduler, site, job, args.folder, count)
    limit = f"time limit {format_walltime(job.walltime)}; " if job.walltime else ""
    print(f"submit: submitted; {limit}script, settings and output: {record.folder}", file=sys.stderr)
    for job_id in record.job_ids:
        print(job_id, flush=True)
    if not args.follow:
        return 0
    return following.follow(partial(submitted.known_status, scheduler, record), record.logs, record.job_ids)


def resubmit(args: argparse.Namespace) -> int:
    """Submit recorded jobs again from where they were submitted, whole chains as chains."""
    _check_ids(args.job_ids)
    return submitted.worst([_resubmit(job_id, args) for job_id in args.job_ids])


def _resubmit(job_id: str, args: argparse.Namespace) -> int:
    record = records.find(args.folder, job_id)
    if record is None:
        raise UserError(f"There is no record of job {job_id} in {args.folder}. Name the folder of its submission's "
                        "folder by --folder, or submit it with `submit.py run`.")
    scheduler = get_scheduler(record.scheduler)
    try:
        job = record.job()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{record.folder / records.FILE} holds no job that can be submitted: {error}. Submit it with "
                        "`submit.py run`.") from None
    index = records.array_index(job_id)
    if index:
        if scheduler.name == "pbs":
            raise UserError(f"{job_id} is one element, and PBS takes no array of one. Resubmit the whole array, "
                            f"{record.job_ids[0]}.")
        job = dataclasses.replace(job, array=index)
    if job.dependency and submitted.dependency_is_over(scheduler, job.dependency):
        print(f"submit: note: {job.dependency} is left out; those jobs have ended", file=sys.stderr)
        job = dataclasses.replace(job, dependency=None)
    problems = [] if args.no_check else [
        f"job {one} of the same submission is {scheduler.status(one).state}, and both would train at once. Cancel it "
        "first, or wait until it has ended." for one in record.job_ids if not submitted.is_over(scheduler.status(one))]
    args.folder = record.folder.parent.absolute()
    try:
        os.chdir(record.submit_folder)
    except OSError as error:
        raise UserError(f"The folder {record.submit_folder}, from which job {job_id} was submitted, cannot be entered: "
                        f"{error.strerror}. Submit the job with `submit.py run` from another folder.") from None
    return submit(scheduler, record.site, job, args, problems, len(record.job_ids))


def submit_chain(scheduler: Scheduler, site: str, job: Job, parent: Path, count: int) -> records.Record:
    """Submit a job `count` times, each to continue the one before. All of them, or none.

    Each is queued with afterany, since no scheduler knows exit status 75; its script refuses to start when the one
    before has failed (launch_recorded.py).
    """
    try:
        folder = records.new_folder(parent.absolute(), job.name or "job")
    except OSError as error:
        raise UserError(f"The folder for this submission cannot be made in {parent}: {error.strerror}. Give another "
                        "one by --folder.") from None
    output = _output(scheduler, job, folder)
    job_ids: list[str] = []
    dependencies: list[str | None] = []
    try:
        for number in range(count):
            after = [job.dependency] if job.dependency and not job_ids else []
            after += [f"afterany:{job_ids[-1]}"] if job_ids else []
            one = dataclasses.replace(job, dependency=after[0] if after else None, output=output)
            script = folder / (records.SCRIPT if count == 1 else f"job-{number + 1}.sh")
            script.write_text(job_scripts.submitted_script(scheduler.name, one, folder,
                                                           job_ids[-1] if job_ids else ""),
                              encoding="utf-8", errors="surrogateescape")
            script.chmod(0o755)
            job_ids.append(scheduler.submit(script, options=_options(scheduler, one)))
            dependencies.append(one.dependency)
            records.write(folder, job, scheduler=scheduler.name, site=site, job_ids=job_ids,
                          dependencies=dependencies)
    except BaseException as error:
        left = [job_id for job_id in reversed(job_ids) if not _cancelled(scheduler, job_id)]  # the last first: none
        # may start because the one before it went
        unanswered = isinstance(error, SchedulerError) and error.command and error.exit_code is None
        if left or unanswered:
            what = (f"Still in the queue: {' '.join(left)}. Cancel with: submit.py cancel {' '.join(left)}" if left else
                    "The job may be in the queue all the same: look before submitting it again")
            raise UserError(f"{error} {what}. The scripts are kept in {folder}") from error
        if isinstance(error, OSError):
            error = UserError(f"{error.filename or folder}: {error.strerror or error}. Nothing is in the queue. Make "
                              "room there, or give another folder by --folder.")
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # unless it holds other submissions
        raise error from None
    return records.Record(folder, scheduler.name, tuple(job_ids), str(Path.cwd()))


def _cancelled(scheduler: Scheduler, job_id: str) -> bool:
    try:
        scheduler.cancel(job_id)
    except SchedulerError:
        return False
    return True


def _output(scheduler: Scheduler, job: Job, folder: Path) -> str:
    if scheduler.name == "pbs":
        return f"{folder}/"
    inside = str(folder).replace("%", "%%")  # a percent sign of the path itself
    return f"{inside}/{'%A_%a' if job.array else '%j'}.out"


def _options(scheduler: Scheduler, job: Job) -> list[str]:
    """PBS runs a command without a login shell around it, which would die of USR1 and TERM and take the job along."""
    if scheduler.name != "pbs":
        return []
    return [*(word for words in scheduler.directives(job) for word in words), "--", "/bin/bash", "-l"]


# --- jobs that were submitted before

def _check_ids(job_ids: Sequence[str]) -> None:
    for job_id in job_ids:
        if not JOB_ID.fullmatch(job_id):
            raise UserError(f"{job_id!r} is no job id. One such as 1234 or 1234.server was expected.")


def about_jobs(what: str, args: argparse.Namespace) -> int:
    _check_ids(args.job_ids)
    return submitted.worst([_about(what, job_id, args) for job_id in args.job_ids])


def _about(what: str, job_id: str, args: argparse.Namespace) -> int:
    record = records.find(args.folder, job_id)
    scheduler = get_scheduler(record.scheduler if record else choose_site(args.site).scheduler)
    if what == "status":
        return submitted.print_status(scheduler, record, job_id)
    if what == "logs":
        return submitted.print_logs(scheduler, record, job_id, args.follow)
    return submitted.cancel(scheduler, record, job_id)


if __name__ == "__main__":
    sys.exit(main())
