"""A job's options for qsub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...job.units import format_walltime
from .directives import option_name, option_value
from .job_spec import Job, JobError, split_directive

Options = list[list[str]]  # one list of words per option, unquoted

_UNQUOTED = re.compile(r"[A-Za-z0-9_=.,:@%+/\[\]^*~-]+")  # qsub reads these as they are
_ARRAY = re.compile(r"([0-9]+)-([0-9]+)(?::[1-9][0-9]*)?(?:%[1-9][0-9]*)?")


def directives(job: Job) -> Options:
    """Return the options of a job: one select, each chunk on a separate host.

    An option in job.directives replaces the kit's option for the same setting (-q, -l select, ...).
    """
    _refuse(job)
    extra = [split_directive(entry) for entry in job.directives]
    replaced = {setting for words in extra for setting in settings(words)}
    kept = [words for words in _field_options(job) if not replaced & set(settings(words))]
    return kept + extra


def _refuse(job: Job) -> None:
    """Raise JobError for what Slurm supports and PBS does not."""
    if job.components:
        raise JobError(
            "components",
            "these are for Slurm only; in PBS they are chunks. Give a directive, such as "
            "'-l select=1:ncpus=4+2:ncpus=8:ngpus=4'.",
        )
    if job.array:
        indices = _ARRAY.fullmatch(job.array)
        if indices is None or int(indices[1]) >= int(indices[2]):
            raise JobError(
                "array",
                f"{job.array!r} is not one rising range, and PBS accepts nothing else. "
                "Write for example 0-9, 0-9:2 or 0-9%2.",
            )
    if job.dependency and ("?" in job.dependency or "singleton" in job.dependency):
        raise JobError(
            "dependency", f"{job.dependency!r} is for Slurm only. Write for example afterany:1234."
        )
    if job.output and (not job.output.isascii() or re.search(r"[\"'\\`$%:]", job.output)):
        raise JobError(
            "output",
            f"{job.output!r} holds a pattern, a quote, a colon or a letter outside ASCII, which "
            "qsub refuses or misreads. Give a plain file name, or a folder with / at its end: the "
            "log is then named after the job id.",
        )
    if job.signal_seconds and not job.walltime:
        raise JobError(
            "signal_seconds",
            "PBS sends no signal before the end; the job script itself waits for it, and needs "
            "the walltime. Give a walltime.",
        )


def _field_options(job: Job) -> Iterator[list[str]]:
    """The options that the fields of a job stand for."""
    yield ["-l", f"select={_select(job)}"]
    yield ["-l", "place=scatter"]  # by default two chunks may share a host
    if job.walltime:
        yield ["-l", f"walltime={format_walltime(job.walltime)}"]
    values = {
        "-N": job.name,
        "-q": job.queue,
        "-A": job.account,
        "-J": job.array,
        "-j": "oe",
        "-k": "doe",  # write the log to its final place while the job runs
        "-o": job.output,
        "-W": job.dependency and f"depend={job.dependency}",
        "-r": None if job.requeue is None else "y" if job.requeue else "n",
    }
    for name, value in values.items():
        if value is not None:
            yield [name, value]


def _select(job: Job) -> str:
    """One chunk per node: "2:ncpus=8:mpiprocs=4:ompthreads=2:ngpus=4:mem=64gb".

    Without ompthreads PBS sets OMP_NUM_THREADS of every rank to all cores of the chunk.
    """
    cores_per_rank = job.cores_per_rank or 1
    resources: dict[str, str | int | None] = {
        "ncpus": job.ranks * cores_per_rank,
        "mpiprocs": 1 if job.launcher == "torchrun" else job.ranks,
        "ompthreads": cores_per_rank,
        "ngpus": job.gpus_per_node or None,
        "mem": job.memory and f"{job.memory.lower().removesuffix('b')}b",
    }
    in_chunk = {resource.partition("=")[0] for resource in job.chunk}
    parts = [
        f"{name}={value}"
        for name, value in resources.items()
        if value is not None and name not in in_chunk
    ]
    return ":".join([str(job.nodes), *parts, *job.chunk])


def settings(words: Sequence[str]) -> list[str]:
    """Return the settings that an option decides: ["-l", "a=1,b=2"] -> ["-l a", "-l b"]."""
    name = option_name(words)
    value = option_value(words)
    if name == "-W":
        return [f"-W {value.partition('=')[0]}"]
    if name != "-l":
        return [name]
    decided = [f"-l {part.partition('=')[0].strip()}" for part in value.split(",")]
    if "-l nodes" in decided:  # Torque's form decides both
        decided += ["-l select", "-l place"]
    return decided


def quote(word: str) -> str:
    """Quote a word of a #PBS line, in which qsub knows quotes but no escapes."""
    if _UNQUOTED.fullmatch(word):
        return word
    for mark in "\"'":
        if mark not in word:
            return f"{mark}{word}{mark}"
    raise JobError(
        "directives",
        f"{word[:60]!r} has both kinds of quotes, which a #PBS line cannot hold. Give the option "
        "to qsub on its command line.",
    )
