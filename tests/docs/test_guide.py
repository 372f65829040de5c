"""The guide: its commands for this machine, its diffs, its links and pictures, and how much of it is not run."""
from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end
from tests.docs import pages
from tests.docs.pages import GUIDE, ROOT, Shell
from tests.unit.programs import warm_python

FENCES = {"console", "console slurm", "console pbs", "diff", "python"}
LARGEST_PICTURE = 100_000
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, need: Callable[[str], Path]) -> Iterator[Shell]:
    """A shell in a copy of the kit, whose mpiexec is that of MPICH, and whose Python has imported torch.

    That of the ranks of torchrun has not.
    """
    folder = tmp_path_factory.mktemp("guide")
    environ = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
    kit = pages.copy_kit(folder)
    environ |= {"PATH": pages.path_with_python(f"{need('mpich').parent}:{os.environ['PATH']}", kit), "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1"}
    with warm_python(folder, environ) as warm:
        environ |= {"PATH": f"{folder}:{environ['PATH']}", "PYTHON": str(warm)}
        process = subprocess.Popen(["bash"], cwd=kit, env=environ, text=True,
                                   start_new_session=True, **pages.shell_options())  # type: ignore[call-overload]
        with killed_at_end(process):
            yield Shell(process)


@pytest.mark.parametrize("name", pages.with_commands("here"))
def test_commands_write_what_the_page_shows(shell: Shell, name: str) -> None:
    found = pages.steps(GUIDE / name, "here")
    if not HAS_MATPLOTLIB:
        found = [step for step in found if "ddpkit plot" not in step.command]
        for step in found:
            step.command = re.sub(r" --png \S+", "", step.command)
    shell.follow(found)


def ranks_of(shell: Shell, script: str) -> dict[str, dict[str, str]]:
    """What the ranks print in the wrong and in the right part of a pitfall, by "rank 0", "rank 1" or "both ranks"."""
    done = shell.run(f"python docs/guide/pitfalls/{script}.py")
    found: dict[str, dict[str, str]] = {"wrong": {}, "right": {}}
    for part, ranks, text in re.findall(r"^(wrong|right), (.*?): (.*)$", done.output, re.MULTILINE):
        found[part][ranks] = text
    return found


def test_pitfalls_fail_and_then_are_right(shell: Shell) -> None:
    """Where the shape of the output does not show it."""
    epochs = ranks_of(shell, "set_epoch")
    assert all(first == second for first, second in map(json.loads, epochs["wrong"].values())), epochs
    assert all(first != second for first, second in map(json.loads, epochs["right"].values())), epochs
    norms = ranks_of(shell, "batch_norm")
    assert "0.000" in norms["right"]["both ranks"] and "0.000" not in norms["wrong"]["rank 0"], norms
    for part, same in (("wrong", False), ("right", True)):
        two_ranks, one_rank = ranks_of(shell, "global_batch")[part]["both ranks"].split("; one rank with 32: ")
        assert (two_ranks == one_rank) is same, part


def test_diffs_are_those_of_the_scripts() -> None:
    """To write them again: python -m tests.docs.pages --write."""
    found = [pages.DIFF.findall(page.read_text()) for page in pages.pages()]
    compared = [block for of_page in found for block in of_page]
    assert [text for _, _, text in compared] == [pages.diff(first, second) for first, second, _ in compared]
    scripts = sorted(path.name for path in (GUIDE / "steps").glob("*.py"))
    assert [(Path(first).name, Path(second).name) for first, second, _ in compared] == list(
        zip(scripts, scripts[1:], strict=False))


def test_every_command_is_in_a_block_that_is_run() -> None:
    for page in pages.pages():
        text = page.read_text()
        assert text.count("```") % 2 == 0, page
        for line, info, lines in pages.fences(page):
            place = f"{page.name}, line {line}"
            assert info in FENCES, f"{place}: {info}"
            assert info.startswith("console") or not any(each.startswith("$ ") for each in lines), place


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_pictures_are_small() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "jobs").rglob("*.md"), *ROOT.glob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"
    pictures = list((GUIDE / "figures").glob("*.png"))
    shown = {target for page in pages.pages() for target in re.findall(r"\]\(figures/([^)]+)\)", page.read_text())}
    assert {picture.name for picture in pictures} == shown
    commands = " ".join(step.command.replace(".csv", ".png") for page in pages.pages()
                        for step in pages.steps(page, "here"))
    assert [name for name in shown if not re.search(rf"\b{re.escape(name)}\b", commands)] == []  # no other origin
    assert all(picture.stat().st_size < LARGEST_PICTURE for picture in pictures)


def test_every_pitfall_is_in_the_page() -> None:
    scripts = {path.name for path in (GUIDE / "pitfalls").glob("*.py")} - {"two_ranks.py"}
    commands = {Path(step.command.split()[-1]).name for step in pages.steps(GUIDE / "04_pitfalls.md", "here")}
    assert scripts <= commands
    assert str(ROOT) not in "".join(page.read_text() for page in pages.pages())
