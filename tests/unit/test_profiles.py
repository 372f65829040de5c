"""Site profiles: the kit's are valid and sourced; a mistake is named with file, line and key."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from utils.tools.schedulers.job_spec import Job
from utils.tools.submission import profiles
from utils.tools.submission.build_job import profile_problems
from utils.tools.submission.profiles import Origin, ProfileError

TOP = "title: Ours\nscheduler: slurm\n"
# The kit's profiles, and the vendor of each cluster's GPUs.
SITES = {"generic-slurm": None, "generic-pbs": None, "derecho": "nvidia", "polaris": "nvidia", "aurora": "intel",
         "perlmutter": "nvidia", "frontier": "amd", "lumi": "amd", "alps": "nvidia", "jean-zay": "nvidia",
         "juwels-booster": "nvidia", "jupiter": "nvidia", "isambard-ai": "nvidia", "leonardo": "nvidia",
         "roihu": "nvidia", "vista": "nvidia"}


def test_profiles_of_the_kit_are_valid() -> None:
    assert set(profiles.names()) == set(SITES)
    for name, vendor in SITES.items():
        profile = profiles.load(name)
        assert (profile.name, profile.gpu_vendor) == (name, vendor)
        assert profile.queue is None or not profile.queues or profile.queue in profile.queues
        assert profile.account_example is None or not name.startswith("generic-")


def test_origin_is_a_source_of_the_profile_or_a_url() -> None:
    profile = profiles.parse(TOP + "sources: {nodes: {url: 'https://a.b/nodes', read: 2026-11-22}}\n"
                             "gpus_per_node: {value: 4, source: nodes}\n"
                             "modules: [cuda, {value: nccl, reason: fast, source: 'https://a.b/c', read: 2026-11-20}]\n"
                             "environment: {A: {value: 1, reason: a, from_nodes: 2, source: nodes, read: 2026-11-21}}",
                             Path("x.yaml"))
    assert (profile.gpus_per_node, profile.modules, profile.environment["A"].from_nodes) == (4, ("cuda", "nccl"), 2)
    assert profile.origins == {
        "gpus_per_node": Origin("", "https://a.b/nodes", "2026-11-22"), "modules.cuda": Origin(),
        "modules.nccl": Origin("fast", "https://a.b/c", "2026-11-20"),
        "environment.A": Origin("a", "https://a.b/nodes", "2026-11-21")}


def test_values_are_taken_as_they_are_written() -> None:
    """YAML alone would make a number of a time and a truth value of "on"."""
    profile = profiles.parse(TOP + "queues: {main: {max_time: 6:00:00}}\n" + (
        "environment: {A: {value: 007, reason: a}, B: {value: on, reason: b}}\n"), Path("x.yaml"))
    job = Job(("a.py",), walltime=7 * 3600)
    assert "06:00:00" in profile_problems(profile, job, "main")[0]
    assert [profile.environment[name].value for name in "AB"] == ["007", "on"]


@pytest.mark.parametrize(("text", "line", "words"), [
    (TOP + "gpus_per_nod: 4\n", 3, ["'gpus_per_nod'", "Did you mean 'gpus_per_node'?"]),
    (TOP + "gpus_per_node: four\n", 3, ["'gpus_per_node'", "'four'", "whole number"]),
    ("title: Ours\nscheduler: lsf\n", 2, ["'scheduler'", "'lsf'", "slurm, pbs"]),
    (TOP + "queues:\n  main: {max_tim: 1:00:00}\n", 4, ["'max_tim'", "'max_time'"]),
    (TOP + "queues:\n  main:\n    max_time: soon\n", 5, ["'max_time'", "'soon'", "12:00:00"]),
    (TOP + "queues:\n  main:\n    max_time: {9: 1:00:00, 8: 2:00:00}\n", 5, ["'max_time'", "not ascending"]),
    (TOP + "queues:\n  main:\n    max_time: {few: 1:00:00}\n", 5, ["'max_time'", "'few'", "whole number"]),
    (TOP + "queues: main\n", 3, ["'queues'", "'main'", "key: value"]),
    (TOP + "modules: cuda\n", 3, ["'modules'", "'cuda'", "a list"]),
    (TOP + "setup:\n  - {a: b}\n", 4, ["'setup'", "a set of keys", "one value"]),
    (TOP + "environment:\n  A: {value: 1}\n", 4, ["'A'", "without its reason"]),
    (TOP + "environment:\n  A-B: {value: 1, reason: x}\n", 4, ["'A-B'", "letters, digits"]),
    (TOP + "gpus_per_node: {value: 4, source: nodes}\n", 3, ["'source'", "'nodes'", "a URL"]),
    (TOP + "gpus_per_node: {value: 4, read: yesterday}\n", 3, ["'read'", "'yesterday'", "2026-11-22"]),
    (TOP + "sources: {a: {url: ftp://a}}\n", 3, ["'url'", "https://"]),
    (TOP + "sources: {a: {url: 'https://a'}}\n", 3, ["'a'", "without read"]),
    (TOP + "environment:\n  A: {value: 1, reason: a, from_nodes: 0}\n", 4, ["'from_nodes'", "'0'"]),
    (TOP + "binding: {list: [4-7, eight]}\n", 3, ["'binding'", "list:4-7:eight", "0-7"]),
    (TOP + "binding: {list: [0], masks: [0x1]}\n", 3, ["'binding'", "both"]),
    (TOP + "request_gpus: maybe\n", 3, ["'request_gpus'", "true, false"]),
    (TOP + "gpu_vendor: AMD\n", 3, ["'gpu_vendor'", "'AMD'", "nvidia, amd, intel"]),
    (TOP + "queue:\n", 3, ["'queue'", "empty"]),
    (TOP + "title: again\n", 3, ["'title'", "twice"]),
    (TOP + "queue: a: b\n", 3, ["not YAML"]),
    (TOP + "? [a]\n: b\n", 3, ["a list"]),
    ("", None, ["empty"]), ("scheduler: pbs\n", None, ["'title' is missing"]), ("- a\n", None, ["a list"]),
    ("!!python/object/apply:os.system ['true']\n", None, ["a list"]), ("\0", None, ["not YAML"]),
    ("a" * 100, None, ["key: value"]), ("title: \udcff\n", None, ["not UTF-8"]),
])
def test_mistake_is_named_with_file_line_and_key(text: str, line: int | None, words: list[str],
                                                 tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ProfileError) as error:
        profiles.load(str(file))
    assert (f"{file}, line {line}:" if line else str(file)) in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(("name", "message"), [
    ("derecho2", r"Did you mean 'derecho'\?"), ("nowhere/site.yaml", r"nowhere/site\.yaml.*No such file")])
def test_missing_profile_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        profiles.load(name)


# What the pages of the centres refuse: queue, nodes, hours, the limit in the message.
REFUSED = {
    "frontier": [("batch", 1, 2.1, "02:00:00 of partition batch for 1 node\\. "), ("batch", 50, 3, "02:00:00"),
                 ("batch", 91, 2.5, "02:00:00"), ("batch", 91, 12, "02:00:00"), ("batch", 92, 6.1, "06:00:00"),
                 ("batch", 183, 7, "06:00:00"), ("batch", 184, 12.1, "12:00:00"), ("batch", 9473, 1, "9472 nodes"),
                 ("extended", 64, 24.1, "24:00:00"), ("extended", 65, 1, "64 nodes")],
    "polaris": [("prod", 10, 3.1, "03:00:00 of queue prod for 10 nodes"), ("prod", 24, 4, "03:00:00"),
                ("prod", 25, 7, "06:00:00"), ("prod", 99, 24, "06:00:00"), ("prod", 100, 25, "24:00:00"),
                ("prod", 9, 1, "minimum of queue prod, 10"), ("prod", 497, 1, "496 nodes"),
                ("debug", 1, 1.1, "01:00:00"), ("debug", 3, 1, "2 nodes"), ("debug", 1, 0.05, "minimum.*00:05:00")],
    "aurora": [("prod", 256, 13, "12:00:00 of queue prod for 256 nodes"), ("prod", 1024, 12.5, "12:00:00"),
               ("prod", 1025, 19, "18:00:00"), ("prod", 1999, 24, "18:00:00"), ("prod", 2000, 24.1, "24:00:00"),
               ("prod", 255, 1, "minimum of queue prod, 256"), ("debug", 3, 1, "2 nodes"), ("debug", 2, 2, "01:00:00"),
               ("capacity", 17, 1, "16 nodes"), ("capacity", 1, 0.01, "minimum.*00:05:00")],
    "alps": [("debug", 1, 1.6, "1.5 node-hours of partition debug"), ("debug", 2, 0.8, "1.5 node-hours"),
             ("debug", 2, 1, "1.5 node-hours"), ("debug", 3, 0.6, "1.5 node-hours"),
             ("debug", 4, 0.4, "1.5 node-hours"), ("debug", 4, 1, "1.5 node-hours"),
             ("debug", 5, 0.1, "4 nodes"), ("debug", 1, 2, "01:30:00"),
             ("normal", 1, 13, "12:00:00"), ("low", 1, 25, "24:00:00")]}


@pytest.mark.parametrize("site", REFUSED)
def test_submissions_that_the_page_of_a_centre_refuses(site: str) -> None:
    profile = profiles.load(site)
    for queue, nodes, hours, words in REFUSED[site]:
        job = Job(account="a", queue=queue, nodes=nodes, walltime=round(3600 * hours), command=("true",))
        found = " ".join(profile_problems(profile, job, queue))
        assert re.search(f"{words}.*https://.*, read 202", found), (queue, nodes, hours, found)


@pytest.mark.parametrize(("site", "queue", "nodes", "hours"), [
    ("frontier", "batch", 91, 2), ("frontier", "batch", 183, 6), ("frontier", "batch", 9472, 12),
    ("polaris", "prod", 24, 3), ("polaris", "prod", 99, 6), ("polaris", "prod", 496, 24), ("aurora", "prod", 1024, 12),
    ("aurora", "prod", 1999, 18), ("alps", "debug", 2, 0.75), ("alps", "debug", 1, 1.5), ("derecho", "develop", 2, 6),
    ("roihu", "gpumedium", 1, 36)])
def test_submissions_at_the_limit_pass(site: str, queue: str, nodes: int, hours: float) -> None:
    job = Job(account="a", queue=queue, nodes=nodes, walltime=round(3600 * hours), command=("true",))
    assert profile_problems(profiles.load(site), job, queue) == []


def test_gpus_of_all_nodes_have_a_limit() -> None:
    job = Job(account="a", queue="gpumedium", nodes=2, command=("true",))
    assert "gpus: 8 is more than the 4 GPUs of partition gpumedium" in profile_problems(
        profiles.load("roihu"), job, "gpumedium")[0]


def test_a_site_that_requires_an_account_says_so() -> None:
    found = profile_problems(profiles.load("polaris"), Job(queue="debug", command=("true",)), "debug")
    assert found == ["Polaris, ALCF (4 A100 per node, PALS, Slingshot 11) requires an account. Add --account: your "
                     "project."]


def test_a_time_above_the_limit_says_which_and_what_to_do() -> None:
    job = Job(account="a", queue="batch", nodes=4, walltime=3 * 3600, command=("true",))
    problem, = profile_problems(profiles.load("frontier"), job, "batch")
    assert problem.startswith("walltime: 03:00:00 is more than the 02:00:00 of partition batch for 4 nodes. Request "
                              "less time and continue from a checkpoint, or take another partition"), problem
