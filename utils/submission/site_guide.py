"""Write a page with a short section for each profile: docs/guide/sites.md."""

from __future__ import annotations

import re

from ..schedulers import format_walltime
from .profiles import Profile

HEAD = """\
# Sites

This page is written by `./scripts/sites.py guide` from the profiles in `jobs/sites/`.
`./scripts/sites.py show NAME` prints every value of a profile with its source. The profiles follow
the pages of the centres; no job has been run on these clusters. On a login node of the cluster, and
without `--dry-run`, the commands submit the job.

Your cluster is not here? `./scripts/sites.py new` writes a profile for it. See
[jobs/README.md](../../jobs/README.md).
"""


def site_guide(profiles: list[Profile]) -> str:
    """Return the page for these profiles."""
    return "\n".join([HEAD, *(_section(profile) for profile in profiles)])


def _section(profile: Profile) -> str:
    account = _account(profile)
    options = f"--site {profile.name}" + (f" -A {account}" if account else "")
    lines = [
        f"## {profile.title[:1].upper()}{profile.title[1:]}",
        "",
        _facts(profile),
        "",
        "```console",
        f"$ ./scripts/submit.py run {options} --nodes 2 --time 30m --dry-run \\",
        ">     examples/01_ddp_minimal.py",
        "...",
        "```",
        "",
    ]
    reasons = [*_reasons(profile)]
    return "\n".join([*lines, *reasons, *([""] if reasons else [])])


def _facts(profile: Profile) -> str:
    scheduler = {"slurm": "Slurm", "pbs": "PBS"}[profile.scheduler]
    parts = [f"Profile `{profile.name}`. {scheduler}"]
    if profile.queue:
        parts.append(f"{profile.queue_option if scheduler == 'Slurm' else 'queue'} {profile.queue}")
    if profile.gpus_per_node:
        parts.append(f"{profile.gpus_per_node} GPUs per node")
    if profile.cores_per_node:
        parts.append(f"{profile.cores_per_node} cores per node")
    text = ", ".join(parts) + "."
    limits = [
        f"{name} {format_walltime(queue.max_walltime_seconds)}"
        for name, queue in profile.queues.items()
        if queue.max_walltime_seconds
    ]
    return text + (f" Longest jobs: {', '.join(limits)}." if limits else "")


def _account(profile: Profile) -> str:
    """Return an account such as those of the site; "" if none is needed."""
    if profile.account_example is None:
        return ""
    found = re.search(r"for example (\S+)", profile.account_example)
    return found[1] if found else "ACCOUNT"


def _reasons(profile: Profile) -> list[str]:
    """List what the profile sets, if it has a reason."""
    lines = []
    for name, origin in profile.origins.items():
        key, _, entry = name.partition(".")
        if not origin.reason or key not in ("environment", "modules", "setup", "directives"):
            continue
        value, condition = entry, ""
        if key == "environment":
            variable = profile.environment[entry]
            value = f"{entry}={variable.value}"
            if variable.from_nodes > 1:
                condition = f" (from {variable.from_nodes} nodes)"
        source = f" ([source]({origin.source}))" if origin.source.startswith("http") else ""
        lines.append(f"- `{value}`{condition}: {origin.reason}{source}")
    return lines
