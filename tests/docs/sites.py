"""docs/guide/sites.md: a short section for each profile.

python -m tests.docs.sites --write     write the page again, from the profiles
"""

from __future__ import annotations

import re
import sys
import textwrap

from tests.docs import pages
from utils.job.allocation import format_walltime
from utils.tools.submission import profiles
from utils.tools.submission.profiles import Profile

PAGE = pages.GUIDE / "sites.md"

HEAD = """\
# Sites

This page is written from the profiles in `jobs/sites/`.
`./scripts/sites.py show NAME` prints every value of a profile with its source. The profiles follow
the pages of the centres; no job has been run on these clusters. On a login node of the cluster, and
without `--dry-run`, the commands submit the job.

Your cluster is not here? `./scripts/sites.py new` writes a profile for it. See
[jobs/README.md](../../jobs/README.md).
"""


def site_guide() -> str:
    """Return the page for the profiles of the kit."""
    return "\n".join([HEAD, *(_section(profiles.load(name)) for name in profiles.names())])


def _section(profile: Profile) -> str:
    account = _account(profile)
    options = f"--site {profile.name}" + (f" -A {account}" if account else "")
    lines = [
        f"## {profile.title[:1].upper()}{profile.title[1:]}",
        "",
        _wrapped(_facts(profile)),
        "",
        "```console",
        f"$ ./scripts/submit.py run {options} --nodes 2 --time 30m --dry-run \\",
        ">     examples/01_ddp_minimal.py",
        "...",
        "```",
        "",
    ]
    return "\n".join([*lines, *_settings(profile), ""])


def _facts(profile: Profile) -> str:
    scheduler = {"slurm": "Slurm", "pbs": "PBS"}[profile.scheduler]
    parts = [f"Profile `{profile.name}`. {scheduler}"]
    if profile.queue:
        parts.append(f"{profile.queue_option if scheduler == 'Slurm' else 'queue'} {profile.queue}")
    if profile.gpus_per_node:
        parts.append(f"{profile.gpus_per_node} GPU{'s' * (profile.gpus_per_node > 1)} per node")
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


def _settings(profile: Profile) -> list[str]:
    """Name what a job loads and sets, and the pages that document it."""
    parts = [
        f"{verb} {', '.join(f'`{name}`' for name in names)}"
        for verb, names in (
            ("requests", (*profile.directives, *profile.chunk)),
            ("loads", profile.modules),
            ("sets", tuple(profile.environment)),
        )
        if names
    ]
    pages = dict.fromkeys(
        origin.source for origin in profile.origins.values() if origin.source.startswith("http")
    )
    links = ", ".join(f"[{number}]({page})" for number, page in enumerate(pages, 1))
    sentences = [f"A job {_listed(parts)}."] if parts else []
    sentences += [f"Sources: {links}."] if links else []
    return [_wrapped(sentence) for sentence in sentences]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _listed(parts: list[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PAGE.write_text(site_guide())
