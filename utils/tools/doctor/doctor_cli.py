"""`doctor`: find out what is wrong with a job."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from ...log import print_result
from ..arguments import ArgumentParser
from .causes import Level
from .logs import Diagnosis, diagnose

EXIT_RESTART = 1
EXIT_WRONG_USE = 2  # as in argparse: a mistyped file name is not a diagnosis
EXIT_NO_RESTART = 3
EXIT_UNKNOWN = 4

_LOGS_EPILOG = """\
exit status:
  0  no failure was found
  1  a cause was found; a restart may help
  2  the command line is wrong, or a file cannot be read
  3  a cause was found; a restart does not help
  4  the job failed, or a line mentions an error, and the output does not show why
"""
_RESTART = {
    True: "helps",
    False: "does not help: the job would fail again",
    None: "may help; the output does not show it",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return an exit status. words: the command line without the command."""
    parser = ArgumentParser(prog="doctor.py", description="Find out what is wrong with a job.")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    logs = subcommands.add_parser(
        "logs",
        help="find in the output of a job why it failed",
        description="Find in the output of a job which rank failed first, on which host, what "
        "that usually means, what to do, and whether a restart helps.",
        epilog=_LOGS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    logs.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="output of one job: one file, or one per rank or host; - is standard input",
    )
    logs.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(words)
    if "-" in args.files and sys.stdin is None:
        logs.error("standard input is closed. Expected the output of a job there, or its file")
    try:
        with contextlib.ExitStack() as stack:
            found = diagnose(
                [
                    (sys.stdin.buffer, "standard input")
                    if name == "-"
                    else (stack.enter_context(open(name, "rb")), name)
                    for name in args.files
                ]
            )
    except OSError as error:
        print(
            f"doctor.py: error: {error.filename} cannot be read: {error.strerror}. Expected the "
            "output file of a job. Check the path.",
            file=sys.stderr,
        )
        return EXIT_WRONG_USE
    print_result(json.dumps(_as_dict(found), indent=2) if args.json else _describe(found))
    return exit_status(found)


def exit_status(found: Diagnosis | None) -> int:
    """Return the exit status of `doctor logs`."""
    if found is None:
        return 0
    if found.cause.restart is False:
        return EXIT_NO_RESTART
    return EXIT_UNKNOWN if found.cause.level >= Level.EXIT else EXIT_RESTART


def summary(found: Diagnosis) -> str:
    """Describe a diagnosis in one line."""
    where = _where(found)
    return (
        f"{where + ': ' if where else ''}{found.cause.name}. {found.cause.meaning} "
        f"{found.cause.remedy} A restart {_RESTART[found.cause.restart]}."
    )


def _where(found: Diagnosis) -> str:
    """Return "rank 3 on n2", "rank 3", "n2" or ""."""
    rank = "" if found.rank is None else f"rank {found.rank}"
    return " on ".join(text for text in (rank, found.host) if text)


def _describe(found: Diagnosis | None) -> str:
    if found is None:
        return "No failure was found. No line matches a symptom in the table of causes."
    first, cause = found.finding, found.cause
    lines = [
        f"Cause:    {cause.name}",
        f"Failed:   {_where(found) or 'the output does not show which rank or host failed first'}",
        f"Line:     {first.file}:{first.line_number}: {first.line.strip()[:300]}",
        f"Meaning:  {cause.meaning}",
        f"Check:    {cause.check}",
        f"Remedy:   {cause.remedy}",
        f"Restart:  {_RESTART[cause.restart]}",
    ]
    also = [f"{one.cause.name} ({one.file}:{one.line_number})" for one in found.others]
    if also:
        lines.append(f"Also:     {', '.join(dict.fromkeys(also))}")
    return "\n".join(lines)


def _as_dict(found: Diagnosis | None) -> dict[str, object]:
    if found is None:
        return {"cause": None}
    first, cause = found.finding, found.cause
    return {
        "cause": cause.name,
        "rank": found.rank,
        "host": found.host,
        "restart": cause.restart,
        "meaning": cause.meaning,
        "check": cause.check,
        "remedy": cause.remedy,
        "file": first.file,
        "line_number": first.line_number,
        "line": first.line,
        "others": [
            {"cause": one.cause.name, "file": one.file, "line_number": one.line_number}
            for one in found.others
        ],
    }
