"""`sites`: list, explain, check and write the profiles of clusters."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..argument_parser import ArgumentParser
from ..schedulers import SchedulerError, format_walltime
from . import profiles, site_checks
from .files import KIT
from .new_profile import new_profile
from .profiles import Profile, ProfileError

PROGRAM = "sites.py" if (KIT / "scripts" / "sites.py").exists() else "ddpkit sites"
COMMANDS = {
    "list": "list the profiles that come with the kit",
    "show": "print each value of a profile with its reason, its source and the date it was read",
    "check": "check profiles: sources, duplicates, contradictions and values known to be bad",
    "new": "write a profile from what the scheduler, the modules and the hardware report",
}
GROUPS = {"profiles of the kit": ("list", "show"), "your own profile": ("new", "check")}
DESCRIPTION = f"""\
List, explain, check and write profiles of clusters, for `submit run --site`.

{PROGRAM} show derecho              why each value is set, and where that is documented
{PROGRAM} check                     all profiles of the kit
{PROGRAM} new --output ours.yaml    on a login node, or better on a node with GPUs
{PROGRAM} check ours.yaml

Exit status of check: 0 if there are no findings, 1 otherwise.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0 for success, 1 for an error or findings.

    words: the command line without the name of the command; None: that of this process.
    """
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    parser = ArgumentParser(prog=PROGRAM, usage=f"{PROGRAM} SUBCOMMAND ...")
    if not words or words[0] not in COMMANDS:
        found = f"{words[0]!r} is not a subcommand" if words else "a subcommand is missing"
        parser.error(f"{found}. Expected one of: {', '.join(COMMANDS)}. See: {PROGRAM} --help")
    try:
        return _run(words[0], words[1:])
    except (ProfileError, SchedulerError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stderr.close()
        return 1


def _usage() -> str:
    lines = [f"usage: {PROGRAM} SUBCOMMAND ...", "", DESCRIPTION.rstrip()]
    for group, names in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<6} {COMMANDS[name]}" for name in names)]
    return "\n".join([*lines, "", f"Options of each: {PROGRAM} SUBCOMMAND --help"])


def _run(name: str, words: Sequence[str]) -> int:
    text = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"{PROGRAM} {name}", description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    if name in ("show", "check"):
        count, default = ("+", None) if name == "show" else ("*", profiles.names())
        parser.add_argument("sites", nargs=count, default=default, metavar="NAME|FILE")
    if name == "new":
        parser.add_argument("--scheduler", choices=profiles.SCHEDULERS, help="default: detected")
        parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args(words)
    if name == "list":
        return _list()
    if name == "show":
        print("\n\n".join(explain(profiles.load(site)) for site in args.sites))
        return 0
    if name == "check":
        return _check(args.sites)
    return _new(args.scheduler, args.output)


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
        limits = [format_walltime(seconds)] if seconds else []
        limits += [f"{nodes} nodes"] if nodes else []
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


def _new(scheduler: str | None, output: Path | None) -> int:
    text = new_profile(scheduler)
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
