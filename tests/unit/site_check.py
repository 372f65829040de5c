"""Checks of profiles: missing sources, duplicates, contradictions, known problems (site_rules.yaml)."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from utils.host.cores import parse_binding
from utils.tools.schedulers.job_spec import Job, JobError
from utils.tools.submission import profiles
from utils.tools.submission.profiles import Node, Profile, Read

RULES = Path(__file__).parent / "site_rules.yaml"

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


def check(text: str, path: Path) -> list[str]:
    """Return the findings for a profile; empty if there are none."""
    profile = profiles.parse(text, path)
    facts = _facts(profile, text)
    known_bad = (rule.finding(facts) for rule in load_rules())
    return [
        *_unsourced(text),
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


def _facts(profile: Profile, text: str) -> dict[str, str]:
    """Return the facts that rules may test: _FACTS, NAME and NAME.from_nodes of each variable.

    "environment": the names of the variables. "software": modules, set-up lines and directives.
    "text": the file.
    """
    facts = {}
    for name in _KEYS:
        value = getattr(profile.launch if name in profile.launch._fields else profile, name)
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
    facts["text"] = text
    return facts


def _unsourced(text: str) -> Iterator[str]:
    values = yaml.load(text, yaml.BaseLoader)
    pages = values.pop("sources", {})
    for name, page in pages.items():
        if not re.match(r"https?://", page["url"]) or not _is_date(page["read"]):
            yield f"sources: {name} has no URL or no date"
    for key in ("title", "scheduler", "origin", "account_example", "queue_option"):
        values.pop(key, None)
    if isinstance(values.get("queue"), str):
        del values["queue"]
    for key, value in values.items():
        named = value if key == "environment" else dict.fromkeys([key], value)
        if isinstance(value, list):
            named = {f"{key}.{number}": entry for number, entry in enumerate(value, start=1)}
        for name, entry in named.items():
            parts = entry if isinstance(entry, dict) else {}
            page = pages.get(parts.get("source"), parts)
            if "source" not in parts or not (parts["source"] in pages or re.match(r"https?://|\$ ", parts["source"])):
                yield f"{name}: the value has no source"
            elif not _is_date(page.get("read", "")):
                yield f"{name}: the value has no date"
            elif key == "environment" and "reason" not in parts:
                yield f"{name}: the variable has no reason"


def _is_date(text: str) -> bool:
    return re.fullmatch(r"20\d\d-\d\d-\d\d", text) is not None


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
            ("train.py",),
            memory=profile.memory_per_node,
            queue=",".join({entry.queue for entry in profile.queues}) or profile.queue,
            setup=profile.setup,
            module_paths=profile.module_paths,
            modules=profile.modules,
            environment=profile.exports(2, profile.gpus_per_node or 1),
            directives=(*profile.directives, *profile.stage_directives),
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
