"""Parse labels that launchers, loggers and schedulers put before a line: rank, host, time."""

from __future__ import annotations

import re
from typing import NamedTuple

HOST = r"[A-Za-z0-9_][\w.-]{0,252}"  # the longest host name has 253 characters

# A host name before a line: it has a digit, and is not the name of a program.
_LABEL_HOST = (
    r"(?!(?:python|pip|perl|gcc|g\+\+|cc1|lib|slurmstepd|torchrun|rank|step|epoch|iter|task|line"
    r"|batch|sample|fold|layer|stage|phase|trial|seed|run|worker|gpu_?id|device|cuda|world_?size)"
    r"[\d._:-])(?![\w.-]*\.(?:py|sh|so|cc|cpp|cu|c|h)\b)"
    r"(?![\w.]*(?:Error|Exception|Warning|Interrupt|Timeout|Expired|Exit)\b)"
    r"(?P<host>[a-z](?=[\w.-]*\d)[\w.-]*{more})"
)
_DATE = r"\d{4}[-/]\d\d[-/]\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_TIME = "|".join(
    (
        rf"{_DATE}[T _]{_CLOCK}",
        _CLOCK,
        r"1\d{9}\.\d+",  # seconds since 1970
        r"(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?: \d{4})?",  # syslog, ctime
    )
)
_BEGINS = (
    r"\[|\d+: |Traceback \(most|[\w.]+(?:Error|Exception|Interrupt|Expired|Timeout)\b|  File \""
    r"|[\w./-]+\[\d+\]: |(?:ERROR|FATAL|CRITICAL|error|fatal)\b|srun: |slurmstepd"
)
# task: the launcher's number of a process, which is a rank or one of torchrun's agents. local:
# number of a rank on its host.
_LABELS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\x1b\[[\d;]*m",
        r"\[[Rr]ank ?(?P<rank>\d+)\]:? ?",
        rf"\[?(?:{_TIME})\]?:? " + _LABEL_HOST.format(more="") + rf":? (?={_BEGINS})",
        rf"\[?(?:{_TIME})\]?:?(?: |(?=\[\d+,))",
        # torch: "W1014 10:22:41.771000 41822 torch/distributed/run.py:766] "
        r"[IWEFC]\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?[\w./-]+:\d+\] ",
        r"[\w.-]+\[\d+\]: (?=\[|\d+: |Traceback)",  # program name in a syslog line
        r"\[[A-Za-z_]+(?P<local>\d+)\]:? ?",  # torchrun: "[default0]:", "[trainer2]:"
        r"\[ *(?P<task>\d+)\] (?! )",  # mpiexec -l of MPICH and Intel MPI
        r"\[ *(?P<local>\d+)\]:(?=[^\s]| \S)",  # torchrun, without a role
        r"\[(?P<task>\d+)@(?P<host>[\w.-]+)\] ",  # MPICH with the pattern "[%r@%h] "
        r" *(?P<task>\d+): ",  # srun --label, padded for ten tasks or more
        r"\[(?:[\w.@-]+,)? *(?P<task>\d+)(?:\[\w+\])?\]<std(?:err|out|diag)>: ?",  # Open MPI
        r"\[\d+,mpirank:(?P<task>\d+)(?:,(?P<host>[\w.-]+))?\]<std(?:err|out)>: ?",
        r"\([\w ]+ pid=\d+(?:, ip=(?P<host>[\w.:-]+))?[^)]*\) ",  # Ray
        r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\] ",  # kubectl logs --prefix
        # torchx: role and replica
        rf"(?!step|epoch|iter|batch)[a-z][\w-]*/(?P<replica>\d+):? (?={_BEGINS})",
        r"(?:trainer|worker|default|train|node|main|ddp)/(?P<replica>\d+):? ",
        r"rank (?P<rank>\d+) on (?P<host>\S+) failed: ",
        r"[Rr](?:ank|ANK)[ =_-]?(?P<rank>\d+)(?:/\d+)?(?::| \|) ",
        r"(?P<host>[a-z][\w.-]*\d) +\| ",  # compose
        r"\([Rr]ank ?(?P<rank>\d+)\):? ",
        _LABEL_HOST.format(more="") + r" (?=\[[Rr]ank ?\d)",
        r"<[Rr]ank ?(?P<rank>\d+)>:? ?",
        _LABEL_HOST.format(more="") + r" +(?P<task>\d+): ",  # mpiexec -l of PALS
        # pdsh, clush, ssh
        _LABEL_HOST.format(more=r"|[a-z][\w.-]*(?=: (?:\[(?:rank ?)?\d|Traceback \(most)") + "): ",
    )
)


class Labels(NamedTuple):
    """The contents of the labels before a line, and the rest of the line."""

    rank: int | None
    host: str | None
    task: int | None
    local: int | None
    message: str


def split_labels(line: str) -> Labels:
    """Return the contents of the labels before a line, and the rest of the line."""
    named: dict[str, str] = {}
    rest = line
    while found := next(filter(None, (label.match(rest) for label in _LABELS)), None):
        named.update((name, text) for name, text in found.groupdict().items() if text is not None)
        rest = rest[found.end() :]
    rank, task, local = (
        int(named[name]) if name in named else None for name in ("rank", "task", "local")
    )
    if "replica" in named:  # its own host, where local numbers start again
        local = None
    return Labels(rank, named.get("host"), task, local, rest)
