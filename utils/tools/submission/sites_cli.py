"""`sites`: list, explain, check and write the profiles of clusters."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ...job.allocation import format_walltime
from ...job.commands import SchedulerError
from ..arguments import ArgumentParser
from . import profiles, site_checks
from .new_profile import new_profile
from .paths import KIT
from .profiles import Profile, ProfileError

PROGRAM = "sites.py" if (KIT / "scripts" / "sites.py").exists() else "ddpkit sites"
DESCRIPTION = f"""\
List, explain, check and write profiles of clusters, for `submit run --site`.

{PROGRAM} list                      list the profiles of the kit
{PROGRAM} show derecho              print each value with its reason, source and date
{PROGRAM} check                     check all profiles of the kit for missing sources, duplicates,
                                   contradictions and known problems; exit status 1 for findings
{PROGRAM} new --output ours.yaml    write a profile from what the scheduler, the modules and the
                                   hardware report; run it on a node with GPUs
{PROGRAM} check ours.yaml           check a profile of your own
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0 for success, 1 for an error or findings.

    words: the command line without the name of the command; None: that of this process.
    """
    parser = _parser()
    args = parser.parse_args(sys.argv[1:] if words is None else words)
    for option, given, used_by in (
        ("SITE", args.sites, ("show", "check")),
        ("--output", args.output, ("new",)),
    ):
        if given and args.subcommand not in used_by:
            parser.error(f"{args.subcommand} takes no {option}")
    try:
        if args.subcommand == "list":
            return _list()
        if args.subcommand == "new":
            return _new(args.output)
        sites = args.sites or profiles.names()
        if args.subcommand == "check":
            return _check(sites)
        print("\n\n".join(explain(profiles.load(site)) for site in sites))
        return 0
    except (ProfileError, SchedulerError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stderr.close()
        return 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} list | show SITE ... | check [SITE ...] | new [--output FILE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("subcommand", choices=("list", "show", "check", "new"))
    group = parser.add_argument_group("show, check").add_argument
    group(
        "sites",
        nargs="*",
        default=[],
        metavar="SITE",
        help="a name, or a file (default: all of the kit)",
    )
    group = parser.add_argument_group("new").add_argument
    group("--output", type=Path, metavar="FILE", help="a new file (default: standard output)")
    return parser


def _list() -> int:
    names = profiles.names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {profiles.load(name).title}")
    return 0


def explain(profile: Profile) -> str:
    """Return each value of a profile with its reason, its source and the date it was read."""
    lines = [f"{profile.name}: {profile.title}", f"  scheduler: {profile.scheduler}"]
    for name, origin in profile.origins.items():
        key, _, entry = name.partition(".")
        lines.append(f"  {key}: {_shown(profile, key, entry)}")
        if origin.reason:
            lines.append(f"      {origin.reason}")
        source = origin.source or "no source"
        lines.append(f"      {source}" + (f", read {origin.read}" if origin.read else ""))
    return "\n".join(lines)


def _shown(profile: Profile, key: str, entry: str) -> str:
    if key == "environment":
        variable = profile.environment[entry]
        condition = f" (from {variable.from_nodes} nodes)" if variable.from_nodes > 1 else ""
        return f"{entry}={variable.value}{condition}"
    if key == "queues":
        queue = profile.queues[entry]
        seconds, nodes = queue.max_walltime_seconds, queue.max_nodes
        limits = [
            f"{format_walltime(limit)} on {most} nodes"
            for most, limit in queue.max_walltime_by_nodes
        ]
        limits = limits or ([format_walltime(seconds)] if seconds else [])
        limits += [f"{nodes} nodes"] if nodes else []
        limits += [f"{queue.max_node_hours:g} node-hours"] if queue.max_node_hours else []
        limits += [f"{queue.max_gpus} GPUs"] if queue.max_gpus else []
        return entry + (f", up to {', '.join(limits)}" if limits else "")
    return entry or str(getattr(profile, key))


def _check(sites: Sequence[str]) -> int:
    rules = site_checks.load_rules()
    num_findings = 0
    for site in sites:
        findings = site_checks.check(profiles.load(site), rules)
        num_findings += len(findings)
        print(f"{site}: {len(findings) or 'no'} finding{'s' if len(findings) != 1 else ''}")
        for finding in findings:
            print(f"  - {finding}")
    return int(num_findings > 0)


def _new(output: Path | None) -> int:
    text = new_profile()
    if output is None:
        print(text, end="")
        return 0
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ProfileError(
            f"{output} cannot be written: {error.strerror}. Give the name of a new file."
        ) from None
    print(f"{output}: written. Complete it, then: {PROGRAM} check {output}")
    return 0
