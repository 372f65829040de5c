"""README, which has to stay short, and lists that have to be whole."""
from __future__ import annotations

import re

import yaml

from tests.docs.pages import ROOT
from utils.tools.submission import profiles


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_no_cell_of_a_table_is_longer_than_a_paragraph() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines() if line.startswith("|")]
    assert lines and max(len(cell) for line in lines for cell in re.split(r"(?<!\\)[|]", line)) <= 400


def test_all_examples_are_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    examples = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert examples and [name for name in examples if f"]({name})" not in page] == []


def test_centres_learn_of_every_variable_and_of_no_other() -> None:
    name = r"DDPKIT_[A-Z_]+"
    in_code = {found for path in (ROOT / "utils").rglob("*.py") for found in re.findall(name, path.read_text())}
    assert in_code == set(re.findall(name, (ROOT / "docs" / "centres.md").read_text()))


def row_of_table(profile: profiles.Profile) -> str:
    cluster, gpus = re.fullmatch(r"(.*?)(?: \(([^,)]*).*)?", profile.title).groups("")  # type: ignore[union-attr]
    values = yaml.load(profile.path.read_text(), yaml.BaseLoader)
    page = values["sources"][values.get("gpus_per_node", values["launcher"])["source"]]["url"]
    scheduler = {"slurm": "Slurm", "pbs": "PBS"}[profile.scheduler]
    return f"| `{profile.name}` | {cluster} | {scheduler} | {gpus} | [{page.split('/')[2]}]({page}) |"


def test_table_of_profiles_is_that_of_jobs_sites() -> None:
    table = (ROOT / "docs" / "profiles.md").read_text().rpartition("|---|\n")[2]
    assert table.splitlines() == [row_of_table(profiles.load(name)) for name in profiles.names()]
