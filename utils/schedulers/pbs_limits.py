"""What a job asks of PBS in all, and which limits of its queue and of the server this is outside of. Pure functions.

Limits are resources_max and resources_min (Reference Guide of PBS, queue and server attributes). They hold for a job as
a whole: with select=3:ncpus=4 a job asks for ncpus=12 and nodect=3.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .checks import parse_size
from .job import format_walltime
from .pbs_answers import Record, seconds_of, text
from .script import option_of, value

_PER_PROCESS = ("ompthreads",)  # not summed over the chunks


def requests(options: Sequence[Sequence[str]], default_chunk: Mapping[str, str]) -> dict[str, float]:
    """Resource -> amount for the whole job, of options such as ["-l", "select=2:ncpus=8+1:mem=4gb"].

    Torque's nodes=N:ppn=M stands for select=N:ncpus=M:mpiprocs=M, as in PBS. Resources without an amount (host=n1) are
    left out.
    """
    asked: dict[str, float] = {}
    for words in options:
        if option_of(words) != "-l":
            continue
        for part in value(words).split(","):
            name, _, given = part.strip().partition("=")
            if name in ("select", "nodes"):
                for resource, total in _in_chunks(given, default_chunk).items():
                    asked.setdefault(resource, total)  # what is given for the whole job counts
            elif (number := amount(given)) is not None:
                asked[name] = number
    return asked


def _in_chunks(text: str, default_chunk: Mapping[str, str]) -> dict[str, float]:
    """The sums over the chunks of "2:ncpus=8:mpiprocs=4+1:ngpus=2" or "2:ppn=4+n3"; nodect is their number."""
    sums: dict[str, float] = {}
    for chunk in text.split("+"):
        words = chunk.split(":")
        count = int(words[0]) if words[0].isdecimal() else 1
        resources = {**default_chunk, **dict(word.split("=", 1) for word in words if "=" in word)}
        if "ppn" in resources:
            resources = {**resources, "ncpus": resources["ppn"], "mpiprocs": resources.pop("ppn")}
        for name, given in {**resources, "nodect": "1"}.items():
            number = amount(given)
            if number is not None and name not in _PER_PROCESS:
                sums[name] = sums.get(name, 0) + count * number
    return sums


def amount(given: str) -> float | None:
    """A number, bytes of a size ("4gb"), seconds of a duration ("02:00:00"); None of anything else."""
    if ":" in given:
        return seconds_of(given)
    size = parse_size(given)
    if size is not None:
        return size
    return float(given) if re.fullmatch(r"[0-9]+\.[0-9]+", given) else None


def outside_limits(options: Sequence[Sequence[str]], queue: str, queues: Mapping[str, Record],
                   server: Record) -> list[str]:
    """What a job in this queue asks for that its limits do not allow, each with its fix.

    A routing queue passes a job on to the first of its destinations that takes it.
    """
    record = queues.get(queue, {})
    places = [name.partition("@")[0] for name in text(record, "route_destinations").split(",")]
    known = [name for name in places if name in queues and name != queue]
    own = _outside(options, queue, record, server)
    if own or not known or len(known) < len(places):
        return own
    return min((outside_limits(options, name, {one: queues[one] for one in queues if one != queue}, server)
                for name in known), key=len)


def _outside(options: Sequence[Sequence[str]], name: str, queue: Record, server: Record) -> list[str]:
    def table(attribute: str) -> dict[str, tuple[str, str]]:
        """Resource -> its value and whose it is; the queue's goes before the server's."""
        found = {}
        for owner, record in (("the server", server), (f"queue {name}", queue)):
            values = record.get(attribute)
            for resource, given in values.items() if isinstance(values, dict) else ():
                found[resource] = (str(given), owner)
        return found

    asked = requests(options, {resource: given for resource, (given, _) in table("default_chunk").items()})
    for resource, (given, _) in table("resources_default").items():
        if resource not in asked and (number := amount(given)) is not None:
            asked[resource] = number
    found = []
    for attribute, beyond, word, fix in (("resources_max", float.__gt__, "more", "less"),
                                         ("resources_min", float.__lt__, "less", "more")):
        for resource, (given, owner) in table(attribute).items():
            limit = amount(given)
            if limit is not None and resource in asked and beyond(float(asked[resource]), float(limit)):
                whole = "" if ":" in given else " for the whole job"
                found.append(f"{resource}: {_shown(asked[resource], given)}{whole} is {word} than the "
                             f"{_shown(limit, given)} of {owner} ({attribute}). Ask for {fix}, or take another queue.")
    return found


def _shown(number: float, like: str) -> str:
    """An amount in the form of another one: "01:00:00", "4.5gb", "12"."""
    if ":" in like:
        return format_walltime(int(number))
    if like.isdecimal():
        return f"{number:g}"
    return f"{number / (1 << 30):.4g}gb" if parse_size(like) is not None else f"{number:g}"
