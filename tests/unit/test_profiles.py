"""Site profiles: the kit's are valid and sourced; a mistake is named with file, line and key."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from utils.schedulers import Job
from utils.submission import profiles
from utils.submission.build import profile_problems
from utils.submission.profiles import ProfileError

MINIMAL = "title: Ours\nscheduler: slurm\n"
CLUSTERS = {"derecho", "polaris", "aurora", "perlmutter", "frontier", "lumi", "alps", "jean-zay"}


def test_clusters_and_generic_schedulers_have_profiles() -> None:
    assert CLUSTERS | {"generic-slurm", "generic-pbs"} == set(profiles.names())


@pytest.mark.parametrize("name", profiles.names())
def test_profile_is_valid_and_names_dated_sources(name: str) -> None:
    profile = profiles.load(name)
    assert profile.name == name
    assert profile.queue is None or not profile.queues or profile.queue in profile.queues
    assert (profile.account_example is not None) == (name in CLUSTERS)
    comment = "\n".join(re.findall("^#.*", profile.path.read_text(), re.M))
    assert re.search(r"https?://\S+", comment) and re.search(r"20\d\d-\d\d-\d\d", comment)


@pytest.mark.parametrize(("name", "vendor"), [
    ("frontier", "amd"), ("lumi", "amd"), ("aurora", "intel"), ("derecho", "nvidia"),
    ("generic-slurm", None)])
def test_cluster_names_the_vendor_of_its_gpus(name: str, vendor: str | None) -> None:
    assert profiles.load(name).gpu_vendor == vendor


def test_values_are_taken_as_they_are_written() -> None:
    """YAML alone would make a number of a time and a truth value of "on"."""
    profile = profiles.parse(MINIMAL + "queues: {main: {max_time: 6:00:00}}\n" + (
        "environment: {A: {value: 007, reason: a}, B: {value: on, reason: b}}\n"), Path("x.yaml"))
    job = Job(("a.py",), walltime=7 * 3600)
    assert "06:00:00" in profile_problems(profile, job, "main")[0]
    assert [profile.environment[name].value for name in "AB"] == ["007", "on"]


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
    (MINIMAL + "environment:\n  A-B: {value: 1, reason: x}\n", 4, ["'A-B'", "letters, digits"]),
    (MINIMAL + "request_gpus: maybe\n", 3, ["'request_gpus'", "true, false"]),
    (MINIMAL + "gpu_vendor: AMD\n", 3, ["'gpu_vendor'", "'AMD'", "nvidia, amd, intel"]),
    (MINIMAL + "queue:\n", 3, ["'queue'", "empty"]),
    (MINIMAL + "title: again\n", 3, ["'title'", "twice"]),
    (MINIMAL + "queue: a: b\n", 3, ["not YAML"]),
    (MINIMAL + "? [a]\n: b\n", 3, ["a list"]),
])
def test_mistake_is_named_with_file_line_and_key(text: str, line: int, words: list[str],
                                                 tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(ProfileError) as error:
        profiles.load(str(file))
    assert f"{file}, line {line}:" in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(("data", "words"), [
    (b"", "empty"), (b"scheduler: pbs\n", "'title' is missing"), (b"- a\n", "a list"),
    (b"!!python/object/apply:os.system ['true']\n", "a list"), (b"\0", "not YAML"),
    (b"a" * 100, "key: value"), (b"title: \xff\n", "not UTF-8")])
def test_file_that_is_no_profile_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_bytes(data)
    with pytest.raises(ProfileError, match=re.escape(words)):
        profiles.load(str(file))


@pytest.mark.parametrize(("name", "message"), [
    ("derecho2", r"Did you mean 'derecho'\?"),
    ("nowhere/site.yaml", r"nowhere/site\.yaml.*No such file")])
def test_missing_profile_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        profiles.load(name)


def test_missing_pyyaml_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ProfileError, match="PyYAML is not installed.*pip install pyyaml"):
        profiles.load("lumi")
