"""Site profiles: those of the kit are right in form and sourced, mistakes are named with file, line and key."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # where the scripts import each other from
import sites

MINIMAL = "title: Ours\nscheduler: slurm\n"


def test_the_named_clusters_are_there() -> None:
    assert {"generic-slurm", "generic-pbs", "derecho", "polaris", "aurora", "perlmutter", "frontier", "lumi", "alps",
            "jean-zay"} <= set(sites.names())


@pytest.mark.parametrize("name", sites.names())
def test_every_profile_loads(name: str) -> None:
    site = sites.load(name)
    assert site.name == name
    assert site.queue is None or not site.queues or site.queue in site.queues


@pytest.mark.parametrize("name", sites.names())
def test_every_profile_names_its_sources_with_a_date(name: str) -> None:
    comment = "\n".join(line for line in sites.load(name).path.read_text().splitlines() if line.startswith("#"))
    assert re.search(r"https?://\S+", comment)
    assert re.search(r"20\d\d-\d\d-\d\d", comment)


@pytest.mark.parametrize("name", [name for name in sites.names() if not name.startswith("generic")])
def test_every_cluster_insists_on_an_account(name: str) -> None:
    assert sites.load(name).account_example


@pytest.mark.parametrize(("name", "vendor"), [("frontier", "amd"), ("lumi", "amd"), ("aurora", "intel"),
                                              ("derecho", "nvidia"), ("generic-slurm", None)])
def test_a_cluster_knows_whose_gpus_it_has(name: str, vendor: str | None) -> None:
    assert sites.load(name).gpu_vendor == vendor


def test_a_time_is_not_taken_for_a_number_by_yaml() -> None:
    site = sites.parse(MINIMAL + "queues: {main: {max_time: 6:00:00}}\n", Path("x.yaml"))
    assert site.queues["main"].max_time == 6 * 3600


def test_values_are_taken_as_they_were_written() -> None:
    site = sites.parse(MINIMAL + "environment: {A: {value: 007, reason: a}, B: {value: on, reason: b}}\n", Path("x"))
    assert (site.environment["A"].value, site.environment["B"].value) == ("007", "on")


@pytest.mark.parametrize(("text", "line", "words"), [
    (MINIMAL + "gpus_per_nod: 4\n", 3, ["'gpus_per_nod'", "Did you mean 'gpus_per_node'?"]),
    (MINIMAL + "gpus_per_node: four\n", 3, ["'gpus_per_node'", "'four'", "whole number"]),
    (MINIMAL + "gpus_per_node: 0\n", 3, ["'gpus_per_node'", "'0'"]),
    ("title: Ours\nscheduler: lsf\n", 2, ["'scheduler'", "'lsf'", "slurm, pbs"]),
    (MINIMAL + "queues:\n  main: {max_tim: 1:00:00}\n", 4, ["'max_tim'", "'max_time'"]),
    (MINIMAL + "queues:\n  main:\n    max_time: soon\n", 5, ["'max_time'", "'soon'", "12:00:00"]),
    (MINIMAL + "queues: main\n", 3, ["'queues'", "'main'", "key: value"]),
    (MINIMAL + "modules: cuda\n", 3, ["'modules'", "'cuda'", "a list"]),
    (MINIMAL + "setup:\n  - {a: b}\n", 4, ["'setup'", "a set of keys", "one value"]),
    (MINIMAL + "environment:\n  A: {value: 1}\n", 4, ["'A'", "without its reason"]),
    (MINIMAL + "environment:\n  A-B: {value: 1, reason: x}\n", 4, ["'A-B'", "letters, digits and _"]),
    (MINIMAL + "ask_for_gpus: maybe\n", 3, ["'ask_for_gpus'", "true, false"]),
    (MINIMAL + "gpu_vendor: AMD\n", 3, ["'gpu_vendor'", "'AMD'", "nvidia, amd, intel"]),
    (MINIMAL + "queue:\n", 3, ["'queue'", "empty"]),
    (MINIMAL + "title: again\n", 3, ["'title'", "twice"]),
    (MINIMAL + "queue: a: b\n", 3, ["not YAML"]),
    (MINIMAL + "? [a]\n: b\n", 3, ["a list"]),
])
def test_a_mistake_is_named_with_file_line_and_key(text: str, line: int, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(sites.SiteError) as error:
        sites.load(str(file))
    assert f"{file}, line {line}:" in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("text", "words"), [
    ("", "empty"), ("scheduler: pbs\n", "'title' is missing"), ("- a\n", "a list"),
    ("!!python/object/apply:os.system ['true']\n", "a list"), ("\x00", "not YAML"), ("a" * 100, "key: value"),
])
def test_a_file_that_is_no_profile_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(sites.SiteError, match=re.escape(words)):
        sites.load(str(file))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_bytes(b"title: \xff\n")
    with pytest.raises(sites.SiteError, match="not UTF-8"):
        sites.load(str(file))


def test_an_unknown_site_suggests_the_nearest() -> None:
    with pytest.raises(sites.SiteError, match=r"Did you mean 'derecho'\?"):
        sites.load("derecho2")


def test_a_site_file_that_is_not_there_is_named() -> None:
    with pytest.raises(sites.SiteError, match=r"nowhere/site\.yaml.*No such file"):
        sites.load("nowhere/site.yaml")
