"""`sites`: list, explain, check and write the profiles of clusters.

A check finds missing sources, duplicates, contradictions and known problems. The latter are data:
jobs/site_rules.yaml, each rule with its source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...host.cores import parse_binding
from ...job.commands import SchedulerError
from ...job.notation import format_walltime
from ..arguments import ArgumentParser
from ..schedulers.job_spec import Job, JobError
from . import profiles
from .new_profile import new_profile
from .paths import JOBS
from .profiles import Node, Profile, ProfileError, Read

DESCRIPTION = """\
List, explain, check and write profiles of clusters, for `submit run --site`.

ddpkit sites list                     list the profiles of the kit
ddpkit sites show derecho             print each value with its reason, source and date
ddpkit sites check                    check all profiles of the kit for missing sources,
                                      duplicates, contradictions and known problems; exit
                                      status 1 for findings
ddpkit sites new --output ours.yaml   write a profile from what the scheduler, the modules and the
                                      hardware report; run it on a node with GPUs
ddpkit sites check ours.yaml          check a profile of your own
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
            return _check(sites, args.json)
        print("\n\n".join(explain(profiles.load(site)) for site in sites))
        return 0
    except (ProfileError, SchedulerError) as error:
        print(f"ddpkit sites: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stderr.close()
        return 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="ddpkit sites",
        usage="ddpkit sites list | show SITE ... | check [SITE ...] | new [--output FILE]",
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
    group("--json", action="store_true", help="check: print the findings as JSON")
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


def _check(sites: Sequence[str], as_json: bool) -> int:
    rules = load_rules()
    found = {site: check(profiles.load(site), rules) for site in sites}
    if as_json:
        print(json.dumps(found, indent=2))
        return int(any(found.values()))
    for site, findings in found.items():
        print(f"{site}: {len(findings) or 'no'} finding{'s' if len(findings) != 1 else ''}")
        for finding in findings:
            print(f"  - {finding}")
    return int(any(found.values()))


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
    print(f"{output}: written. Complete it, then: ddpkit sites check {output}")
    return 0


# Checks -------------------------------------------------------------------------------------------

RULES = JOBS / "site_rules.yaml"

# The keys of a profile that rules may test, and the facts made of several keys.
_KEYS = (
    *("title", "scheduler", "launcher", "gpu_vendor", "gpus_per_node", "cores_per_node"),
    *("network", "interface", "host_suffix", "binding", "module_paths", "modules", "setup"),
    *("directives", "chunk"),
)
_FACTS = (*_KEYS, "environment", "software", "text")


@dataclass(frozen=True)
class Rule:
    """A known problem, which a profile has if all conditions hold.

    conditions: by fact. "PATTERN": the fact matches this regular expression. "!PATTERN": it does
    not match, or is absent ("!.": it is absent). ">N" and "<N" compare numbers.
    lacks: variables that the profile should set; the rule applies if one is not set.
    source: a URL.
    """

    problem: str
    remedy: str
    source: str
    read: str
    conditions: dict[str, str]
    lacks: tuple[str, ...] = ()

    def finding(self, facts: dict[str, str]) -> str | None:
        """Return the problem with remedy and source, or None if the profile does not have it."""
        if not all(_holds(rule, facts.get(name)) for name, rule in self.conditions.items()):
            return None
        missing = [name for name in self.lacks if not _is_set(name, facts)]
        if self.lacks and not missing:
            return None
        problem = self.problem.replace("MISSING", ", ".join(missing))
        return f"{problem} {self.remedy} Source: {self.source} (read {self.read})"


def load_rules(path: Path = RULES) -> list[Rule]:
    """Read the rules. Raises ProfileError, which names the line, for a mistake in them."""
    rules = []
    for node in profiles.list_of(profiles.compose(profiles.read_text(path), path), "the file"):
        values = profiles.mapping(node, "a rule", _RULE_KEYS)
        missing = [key for key in (*_RULE_TEXTS, "if") if key not in values]
        if missing:
            raise profiles.mistake(node, "a rule", f"without {', '.join(missing)}", "all of them")
        rules.append(Rule(conditions=values.pop("if"), **values))
    return rules


def check(profile: Profile, rules: list[Rule]) -> list[str]:
    """Return the findings for a profile; empty if there are none."""
    facts = _facts(profile)
    known_bad = (rule.finding(facts) for rule in rules)
    return [
        *_unsourced(profile),
        *_duplicates(profile),
        *_contradictions(profile),
        *_unusable(profile),
        *(finding for finding in known_bad if finding is not None),
    ]


def _conditions(node: Node, key: str) -> dict[str, str]:
    conditions = {}
    for name, name_node, value in profiles.items(node, key):
        if not re.fullmatch(r"[A-Z][A-Z0-9_]+(\.from_nodes)?", name) and name not in _FACTS:
            raise profiles.mistake(name_node, "a fact", "", f"a variable or {', '.join(_FACTS)}")
        conditions[name] = profiles.text(value, repr(name))
    return conditions


_RULE_TEXTS = ("problem", "remedy", "source", "read")
_RULE_KEYS: dict[str, Read] = {
    "if": _conditions,
    "lacks": profiles.texts,
    **dict.fromkeys(_RULE_TEXTS, profiles.text),
}


def _holds(condition: str, value: str | None) -> bool:
    if condition.startswith("!"):
        return value is None or not re.search(condition[1:], value)
    if value is None:
        return False
    if condition[0] in "<>":
        if not re.fullmatch(r"\d+(\.\d+)?", value):
            return False
        number, limit = float(value), float(condition[1:])
        return number > limit if condition[0] == ">" else number < limit
    return re.search(condition, value) is not None


def _is_set(variable: str, facts: dict[str, str]) -> bool:
    return variable in facts or re.search(rf"\b{variable}=", facts.get("setup", "")) is not None


def _facts(profile: Profile) -> dict[str, str]:
    """Return the facts that rules may test: _FACTS, NAME and NAME.from_nodes of each variable.

    "environment": the names of the variables. "software": modules, set-up lines and directives.
    "text": the file.
    """
    facts = {}
    for name in _KEYS:
        value = getattr(profile, name)
        if value not in (None, ()):
            facts[name] = "\n".join(value) if isinstance(value, tuple) else str(value)
    for name, variable in profile.environment.items():
        facts[name] = variable.value
        if variable.from_nodes > 1:
            facts[f"{name}.from_nodes"] = str(variable.from_nodes)
    facts["environment"] = "\n".join(profile.environment)
    facts["software"] = "\n".join(
        facts[name] for name in ("modules", "setup", "directives") if name in facts
    )
    facts["text"] = profiles.read_text(profile.path) if profile.path.is_file() else ""
    return facts


def _unsourced(profile: Profile) -> Iterator[str]:
    for name, origin in profile.origins.items():
        if not (origin.source and origin.read):
            missing = "source" if not origin.source else "date"
            yield (
                f"{name}: the value has no {missing}. Every value names the page where it is "
                "documented and the date when that was read. Add 'source' and 'read'."
            )


def _duplicates(profile: Profile) -> Iterator[str]:
    options = (
        directive.strip().partition("=")[0]
        for directive in profile.directives
        if not directive.startswith("-l ")
    )
    groups = {
        "modules": (module.partition("/")[0] for module in profile.modules),
        "module_paths": profile.module_paths,
        "setup": profile.setup,
        "directives": options,
    }
    for key, entries in groups.items():
        for entry, count in Counter(entries).items():
            if count > 1:
                yield f"{key}: {entry} is given {count} times. Expected once. Remove the others."
    exported = re.findall(r"\bexport ([A-Za-z_]\w*)=", "\n".join(profile.setup))
    for name in exported:
        if name in profile.environment:
            yield f"{name}: set in 'environment' and again in 'setup'. Remove one of them."


def _contradictions(profile: Profile) -> Iterator[str]:
    if profile.queues and profile.queue is not None and profile.queue not in profile.queues:
        yield f"queue: {profile.queue} is not one of 'queues'. Correct one of them."
    for queue in profile.queues.values():
        if queue.max_nodes is not None and queue.min_nodes > queue.max_nodes:
            yield f"queues.{queue.name}: min_nodes is more than max_nodes. Correct one of them."
    if profile.binding is not None:
        yield from _binding_problems(profile)
    for variable, expected in (
        ("NCCL_NET", profile.network),
        ("NCCL_SOCKET_IFNAME", profile.interface),
    ):
        found = profile.environment.get(variable)
        if found is not None and expected is not None and found.value != expected:
            yield (
                f"{variable}: the value {found.value!r} contradicts "
                f"{'network' if variable == 'NCCL_NET' else 'interface'} {expected!r}. "
                "Correct one of them."
            )


def _unusable(profile: Profile) -> Iterator[str]:
    """Yield the first value with which no job script can be written."""
    try:
        Job(
            memory=profile.memory_per_node,
            queue=profile.queue,
            setup=profile.setup,
            module_paths=profile.module_paths,
            modules=profile.modules,
            environment=profile.exports(2, profile.gpus_per_node or 1),
            directives=profile.directives,
            chunk=profile.chunk,
        )
    except JobError as error:
        yield str(error)


def _binding_problems(profile: Profile) -> Iterator[str]:
    cores = parse_binding(profile.binding or "")
    if profile.gpus_per_node is not None and len(cores) != profile.gpus_per_node:
        yield (
            f"binding: found {len(cores)} entries for {profile.gpus_per_node} GPUs per node. "
            "Expected one entry for each GPU. Correct it."
        )
    uses = Counter(core for entry in cores for core in entry)
    shared = sorted(core for core, count in uses.items() if count > 1)
    if shared:
        yield f"binding: several ranks share the cores {shared[:8]}. Give each core to one rank."
