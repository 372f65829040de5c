"""A job's options for sbatch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...job import slurm_exclusion
from ...job.slurm_output import gpu_count
from ...job.units import format_walltime
from .directives import group_options, last_value, option_name, option_value
from .job_spec import Job, JobError, split_directive

Options = list[list[str]]  # one list of words per option, unquoted

_LONG_NAMES = {
    "-J": "--job-name",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-t": "--time",
    "-p": "--partition",
    "-A": "--account",
    "-a": "--array",
    "-d": "--dependency",
    "-o": "--output",
    "-G": "--gpus",
    "-q": "--qos",
    "-x": "--exclude",
}
_SAME_SETTING = {  # an option of the kit: what replaces it in job.directives
    "--gpus-per-node": "--gres --gpus --gpus-per-task",
    "--ntasks-per-node": "--ntasks --ntasks-per-gpu",
    "--cpus-per-task": "--cpus-per-gpu",
    "--mem": "--mem-per-cpu --mem-per-gpu",
    "--requeue": "--no-requeue",
}
_SETTINGS = {other: name for name, others in _SAME_SETTING.items() for other in others.split()}
_OF_WHOLE_JOB = set(  # never repeated for a further component
    "--job-name --output --open-mode --array --dependency --kill-on-invalid-dep --signal "
    "--requeue".split()
)
_UNQUOTED = re.compile(r"[A-Za-z0-9_=.,:@%+/\[\]&|^*()?~-]+")  # sbatch reads these as they are


def setting(words: Sequence[str]) -> str:
    """Return the setting that an option decides: "--gres=gpu:2" and "-G 2" -> "--gpus-per-node"."""
    name = option_name(words)
    name = _LONG_NAMES.get(name, name)
    return _SETTINGS.get(name, name)


def directives(job: Job) -> Options:
    """Return the options of all components, those of a further one after ["hetjob"].

    An option in job.directives replaces the kit's option for the same setting.
    """
    _refuse(job)
    extra = [split_directive(entry) for entry in job.directives]
    replaced = {setting(words) for words in extra}
    first = [words for words in _field_options(job) if setting(words) not in replaced] + extra
    options = [*first]
    for component in job.components:
        options += [["hetjob"], *_component_options(job, first, component)]
    return options


def _refuse(job: Job) -> None:
    """Raise JobError for what PBS supports and Slurm does not."""
    if job.chunk:
        raise JobError(
            "chunk", "this is for PBS only; Slurm has --constraint. Give directives instead."
        )
    if job.output and job.output.endswith("/"):
        raise JobError(
            "output", f"{job.output!r} is a folder, expected a file. Add a name such as %x-%j.out."
        )
    if job.output and "\\" in job.output:
        raise JobError(
            "output", f"{job.output!r} has a backslash, which Slurm drops. Give another name."
        )
    if job.dependency and "[" in job.dependency:
        raise JobError(
            "dependency", f"{job.dependency!r} has brackets, which no job id of Slurm has."
        )


def _field_options(job: Job) -> Iterator[list[str]]:
    """The options that the fields of a job stand for."""
    # With torchrun one task per node has the cores of all ranks.
    one_agent = job.launcher == "torchrun"
    tasks = 1 if one_agent else job.ranks
    # A job without ranks and GPUs leaves the tasks to `sbatch -n 3`, or launch.py counts the GPUs.
    counts_tasks = bool(job.ranks_per_node or job.gpus_per_node)
    cores = job.cores_per_rank and job.cores_per_rank * (job.ranks if one_agent else 1)
    values: dict[str, str | int | None] = {
        "--job-name": job.name,
        "--nodes": job.nodes,
        "--ntasks-per-node": tasks if counts_tasks else None,
        "--cpus-per-task": cores,
        "--gpus-per-node": job.gpus_per_node or None,
        "--mem": job.memory and job.memory.upper().removesuffix("B"),
        "--time": job.walltime and format_walltime(job.walltime),
        "--partition": job.queue,
        "--account": job.account,
        "--array": job.array,
        "--dependency": job.dependency,
        # Without this a job whose dependency cannot be met stays queued.
        "--kill-on-invalid-dep": "yes" if job.dependency else None,
        "--output": job.output,
        "--open-mode": "append",  # a requeued job continues its log
        "--signal": job.signal_seconds and f"B:USR1@{job.signal_seconds}",
    }
    for name, value in values.items():
        if value is not None:
            yield [f"{name}={value}"]
    if job.requeue is not None:
        yield ["--requeue" if job.requeue else "--no-requeue"]


def _component_options(job: Job, first: Options, component: str) -> Options:
    """The options that a further component names, and the first one's for other settings."""
    options = group_options(split_directive(component, "components"))
    decided = {setting(words) for words in options}

    # One rank for each GPU, as in the first component. Where that has no number of tasks,
    # launch.py counts the GPUs.
    first_counts_tasks = any(setting(words) == "--ntasks-per-node" for words in first)
    rank_per_gpu = job.ranks_per_node is None and job.launcher != "torchrun"
    if first_counts_tasks and rank_per_gpu and "--ntasks-per-node" not in decided:
        gpus = gpu_count(last_value(options, "--gres")) or _typed_count(
            last_value(options, "--gpus-per-node")
        )
        if gpus:
            options.append([f"--ntasks-per-node={gpus}"])
            decided.add("--ntasks-per-node")

    shared = [words for words in first if setting(words) not in decided | _OF_WHOLE_JOB]
    return shared + options


def _typed_count(text: str) -> int:
    """The GPUs of "2" or "a100:4"."""
    return gpu_count(",".join(f"gpu:{part}" for part in text.split(","))) if text else 0


def chosen_partition(options: Options) -> str:
    """Return the partition that the options name; "" where they leave it to Slurm."""
    named = [option_value(words) for words in options if setting(words) == "--partition"]
    return named[-1] if named else ""


_MAX_LENGTH = 3000  # of the list of excluded hosts in a directive


def without_hosts(job: Job, hosts: Sequence[str]) -> tuple[Job, str]:
    """Return a job that avoids hosts in addition to those it excludes, and why it cannot; or ""."""
    first = directives(replace(job, components=()))
    partition = os.environ.get("SBATCH_PARTITION") or chosen_partition(first)
    names, total = slurm_exclusion.nodes_of(hosts, partition)
    given = [option_value(words) for words in first if setting(words) == "--exclude"][-1:]
    if not names:
        return job, ""
    value = ",".join([*filter(None, given), *names])
    problem = slurm_exclusion.too_few(names, total, job.nodes)
    if not problem and len(value) > _MAX_LENGTH:
        problem = f"the list of {len(names)} nodes is too long for a directive"
    if problem:
        return job, problem
    kept = [entry for entry in job.directives if setting(split_directive(entry)) != "--exclude"]
    return replace(job, directives=(*kept, f"--exclude={value}")), ""


def quote(word: str) -> str:
    """Quote a word of an #SBATCH line: sbatch reads double quotes, backslashes, # as a comment."""
    if _UNQUOTED.fullmatch(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
