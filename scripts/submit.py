#!/usr/bin/env python3
"""Submit a training script as a Slurm or PBS job over many nodes, and watch it.

submit.py --site derecho --account UABC0001 --nodes 4 --time 2:00:00 train.py --epochs 3
submit.py --nodes 2 --time 30:00 --follow train.py    the scheduler that is here; shows state and output until the end
submit.py --site lumi --nodes 2 --dry-run train.py    prints the job script and submits nothing
submit.py --nodes 2 --time 12:00:00 --chain 5 train.py     five jobs, each starts when the one before has ended
submit.py status 1234 | logs 1234 | cancel 1234

Each submission has a folder of its own, jobs-out/NAME-DATE-TIME, with the script (job.sh), every setting, the git
commit and the job id (submission.json), and the job's output. The exit status of --follow is the job's; that of
`status` is 0 as long as the job has not ended badly.

Options come before the script; what follows the script is its own. Not here: profiles (sites.py), the script's text
(job_scripts.py), records (records.py), watching (following.py).
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
import following
import job_scripts
import records

from utils.schedulers import Job, JobError, Scheduler, SchedulerError, format_walltime, get_scheduler, parse_walltime

try:
    import sites
except ModuleNotFoundError as missing:
    if missing.name != "yaml":
        raise
    own = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"  # made by setup_env.sh, and has it
    if own.exists() and own.absolute() != Path(sys.executable).absolute():
        os.execv(own, [str(own), *sys.argv])
    sys.exit("submit: error: PyYAML is not installed; site profiles are YAML files. Install it: "
             f"{Path(__file__).resolve().parents[0]}/setup_env.sh, or {sys.executable} -m pip install pyyaml")

COMMANDS = ("status", "logs", "cancel")
LONGEST_CHAIN = 100


class UserError(Exception):
    """A mistake that the user can correct, told without a traceback."""


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0 for success, 1 for what was refused or failed, 2 for wrong options."""
    words = sys.argv[1:] if words is None else list(words)
    try:
        if words and words[0] in COMMANDS:
            return about_jobs(words)
        return submit(submit_parser().parse_args(words))
    except (UserError, SchedulerError, JobError, sites.SiteError) as error:
        print(f"submit: error: {_told(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("\nsubmit: stopped watching; jobs that were submitted go on", file=sys.stderr)
        return 130


def _told(error: Exception) -> str:
    if not isinstance(error, JobError):
        return str(error)
    option = OPTION_OF_FIELD.get(error.field)
    return str(error) + (f" (option {option}, or the site file)" if option else "")


OPTION_OF_FIELD = {
    "nodes": "--nodes", "gpus_per_node": "--gpus-per-node", "ranks_per_node": "--ranks-per-node",
    "cores_per_rank": "--cores-per-node", "memory": "--memory", "walltime": "--time", "queue": "--queue",
    "account": "--account", "name": "--name", "array": "--array", "dependency": "--after", "setup": "--set-up",
    "modules": "--module", "environment": "--env", "launcher": "--launcher", "output": "--folder",
    "signal_seconds": "--signal", "directives": "--directive", "components": "--component",
    "container": "--container",
}


def submit_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="submit.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--site", metavar="NAME|FILE", help="profile of the cluster, or a YAML file of your own; without it the "
                                            f"scheduler that is here. Known: {', '.join(sites.names())}")
    add("--nodes", type=int, default=1, metavar="N")
    add("--time", metavar="H:M:S", help="limit of the run time; without it the scheduler's default")
    add("--account", help="project that pays")
    add("--queue", help="queue of PBS, partition (or QOS, where the site says so) of Slurm")
    add("--gpus-per-node", type=int, metavar="N", help="0 for none")
    add("--cores-per-node", type=int, metavar="N", help="shared equally by the ranks")
    add("--ranks-per-node", type=int, metavar="N", help="default: one for each GPU")
    add("--memory", metavar="SIZE", help="per node, e.g. 64G")
    add("--name", help="default: that of the script")
    add("--launcher", help=f"{', '.join(sites.LAUNCHERS)}: what starts the ranks")
    add("--array", metavar="0-9%2", help="job array: indices, and how many at once")
    add("--after", metavar="afterok:ID", help="dependency, in the scheduler's words")
    add("--chain", type=int, default=1, metavar="N", help="submit N jobs, each to start when the one before has ended")
    add("--module", action="append", default=[], metavar="NAME", help="module to load, after those of the site")
    add("--env", action="append", default=[], metavar="K=V", help="variable for the job")
    add("--set-up", action="append", default=[], metavar="LINE", help="line of shell to run before, e.g. "
                                                                      "'source venv/bin/activate'")
    add("--container", metavar="IMAGE", help="run in this image, by apptainer or singularity, whichever the nodes have")
    add("--directive", action="append", default=[], metavar="OPTION", help="further option of the scheduler, e.g. "
                                                                           "--directive=--constraint=a100")
    add("--component", action="append", default=[], metavar="OPTIONS",
        help="heterogeneous job of Slurm: a further component, by the options in which it differs from the first, e.g. "
             "--component='--nodes=1 --gpus-per-node=2'")
    add("--signal", type=int, metavar="SECONDS", help="send USR1 to the ranks so long before the end")
    add("--requeue", action=argparse.BooleanOptionalAction, help="whether the job may be started again after a failure")
    add("--folder", type=Path, default=Path("jobs-out"), help="where the folders of submissions are (jobs-out)")
    add("--follow", action="store_true", help="show state, place in the queue and output until the end")
    add("--no-check", action="store_true", help="submit in spite of what the checks find")
    add("--dry-run", action="store_true", help="print the job script; asks the scheduler nothing. Exit status 1 where "
                                              "the site would refuse the job")
    add("command", nargs=argparse.REMAINDER, metavar="script [arguments]")
    return parser


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
    if not args.command:
        raise UserError("There is no training script. A script and its arguments were expected after the options. Add "
                        "them, for example: submit.py --nodes 2 train.py --epochs 3")
    gpus = site.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node
    cores = site.cores_per_node if args.cores_per_node is None else args.cores_per_node
    ranks = args.ranks_per_node or gpus or 1
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
        command=tuple(args.command), nodes=args.nodes, gpus_per_node=(gpus or 0) if ask_for_gpus else 0,
        ranks_per_node=args.ranks_per_node if ask_for_gpus else ranks,
        cores_per_rank=cores // ranks if cores else None, memory=args.memory or site.memory_per_node,
        walltime=parse_walltime(args.time) if args.time else None, queue=queue, account=args.account,
        name=args.name or _name_of(args.command[0]), array=args.array, dependency=args.after,
        setup=(*site.setup, *args.set_up), modules=(*site.modules, *args.module),
        environment=_environment(args, site), launcher=args.launcher or site.launcher, signal_seconds=args.signal,
        requeue=args.requeue, directives=(*directives, *args.directive), components=tuple(args.component),
        chunk=site.chunk, container=args.container,
        gpu_vendor=None if args.gpus_per_node == 0 else site.gpu_vendor)


def _option_name(directive: str) -> str:
    """"--constraint=gpu" -> "--constraint", "-l filesystems=home" -> "-l filesystems"."""
    return re.split("=", directive.strip(), maxsplit=1)[0]


def _name_of(script: str) -> str:
    """A job name that every scheduler takes."""
    return re.sub("[^A-Za-z0-9_.-]", "_", Path(script).stem).lstrip("_.-0123456789")[:15] or "job"


def _environment(args: argparse.Namespace, site: sites.Site) -> dict[str, str]:
    environment = {name: variable.value for name, variable in site.environment.items()}
    brought = args.set_up or args.module or site.setup or args.container
    if sys.prefix != sys.base_prefix and not brought:
        environment["PYTHON"] = sys.executable  # of the virtual environment that runs this
    for text in args.env:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--env {text} has no value. NAME=VALUE was expected. Write --env {text}=VALUE.")
        environment[name] = value
    return environment


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

def submit(args: argparse.Namespace) -> int:
    if not 1 <= args.chain <= LONGEST_CHAIN:
        raise UserError(f"--chain {args.chain} is not a number from 1 to {LONGEST_CHAIN}. Correct it.")
    if args.chain > 1 and args.array:
        raise UserError("--chain and --array together are not supported. Submit the array with --array ...%1, whose "
                        "elements run one after the other, or a chain without an array.")
    site = choose_site(args.site)
    job = build_job(args, site)
    script = job_scripts.submitted_script(site.scheduler, job)
    problems = site_problems(site, job, args.queue or site.queue)
    if args.dry_run:
        print(script, end="")
        for problem in problems:
            what = "warning" if args.no_check else "would not be submitted"
            print(f"submit: {what}: {problem}", file=sys.stderr)
        return int(bool(problems) and not args.no_check)
    scheduler = get_scheduler(site.scheduler)
    problems += scheduler.check(job)
    for problem in problems:
        print(f"submit: {'warning' if args.no_check else 'error'}: {problem}", file=sys.stderr)
    if problems and not args.no_check:
        print("submit: nothing was submitted. --no-check submits in spite of this.", file=sys.stderr)
        return 1
    record = submit_chain(scheduler, site, job, args.folder, args.chain)
    for job_id in record.job_ids:
        print(job_id, flush=True)
    print(f"submit: submitted; script, settings and output: {record.folder}", file=sys.stderr)
    return following.follow(scheduler, record.logs, record.job_ids) if args.follow else 0


def submit_chain(scheduler: Scheduler, site: sites.Site, job: Job, parent: Path, count: int) -> records.Record:
    """Submit a job `count` times, each to start when the one before has ended. All of them, or none."""
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
            script.write_text(job_scripts.submitted_script(scheduler.name, one), encoding="utf-8",
                              errors="surrogateescape")
            script.chmod(0o755)
            job_ids.append(scheduler.submit(script, options=_options(scheduler, one)))
            dependencies.append(one.dependency)
            records.write(folder, job, scheduler=scheduler.name, site=site.name, job_ids=job_ids,
                          dependencies=dependencies)
    except BaseException as error:
        left = [job_id for job_id in reversed(job_ids) if not _cancelled(scheduler, job_id)]  # the last first: none
        # may start because the one before it went
        unanswered = isinstance(error, SchedulerError) and error.command and error.exit_code is None
        if left or unanswered:
            what = (f"Still in the queue: {' '.join(left)}. Cancel with: submit.py cancel {' '.join(left)}" if left else
                    "The job may be in the queue all the same: look before submitting it again")
            raise UserError(f"{error} {what}. The scripts are kept in {folder}") from error
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # unless it holds other submissions
        raise
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

def about_jobs(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"submit.py {words[0]}", allow_abbrev=False)
    parser.add_argument("job_ids", nargs="+", metavar="job-id")
    parser.add_argument("--folder", type=Path, default=Path("jobs-out"), help="where the folders of submissions are")
    parser.add_argument("--site", metavar="NAME|FILE", help="for a job that was not submitted from here")
    if words[0] == "logs":
        parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    args = parser.parse_args(words[1:])
    for job_id in args.job_ids:
        if not re.fullmatch(r"[0-9][A-Za-z0-9_.@\[\]-]*", job_id):
            raise UserError(f"{job_id!r} is no job id. One such as 1234 or 1234.server was expected.")
    return max([_about(words[0], job_id, args) for job_id in args.job_ids])


def _about(what: str, job_id: str, args: argparse.Namespace) -> int:
    record = records.find(args.folder, job_id)
    scheduler = get_scheduler(record.scheduler if record else choose_site(args.site).scheduler)
    if what == "status":
        return _status(scheduler, record, job_id)
    if what == "cancel":
        status = scheduler.status(job_id)
        if status.ended:
            print(f"job {job_id} had ended already: {status.state.replace('_', ' ')}")
            return 0
        if status.state == "unknown":
            raise UserError(f"There is no job {job_id}, or no longer. Nothing was cancelled. The ids are in "
                            f"{args.folder}/*/{records.FILE}.")
        scheduler.cancel(job_id)
        print(f"job {job_id}: cancelled")
        _tell_followers(record, job_id)
        return 0
    return _logs(scheduler, record, job_id, args.follow)


def _status(scheduler: Scheduler, record: records.Record | None, job_id: str) -> int:
    """Print how a job is, and those before it in its chain that did not end well: it is no success after them."""
    status = scheduler.status(job_id)
    print(following.describe(status))
    spoilt = False
    if record is not None:
        for earlier in record.before(job_id):
            before = scheduler.status(earlier)
            if following.spoils_the_chain(before):
                print(f"  earlier in its chain, {following.describe(before)}")
                spoilt = True
        print(f"  record: {record.folder}")
    return int(spoilt or status.state == "unknown" or status.ended and status.state != "completed")


def _tell_followers(record: records.Record | None, job_id: str) -> None:
    later = record.after(job_id) if record is not None else ()
    if later:
        print(f"submit: the rest of the chain goes on. To end it too: submit.py cancel {' '.join(reversed(later))}",
              file=sys.stderr)


def _logs(scheduler: Scheduler, record: records.Record | None, job_id: str, follow: bool) -> int:
    def files(job_id: str) -> list[Path]:
        if record is not None:
            return record.logs(job_id)
        path = scheduler.status(job_id).output  # of a job that was not submitted from here
        return [Path(path)] if path and Path(path).is_file() else []

    if follow:
        return following.follow(scheduler, files, [job_id])
    found = files(job_id)
    if not found:
        raise UserError(f"No output was found of {following.describe(scheduler.status(job_id))}. Try again later, or "
                        "wait with --follow; for a job of another folder run this there, or name it by --folder.")
    following.Log(lambda: found, sys.stdout.buffer).print_new()
    return 0


if __name__ == "__main__":
    sys.exit(main())
