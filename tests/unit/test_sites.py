"""`sites` and `--site`: profiles are sourced, mistakes and known faults are found, a job gets what its site says."""
from __future__ import annotations

import datetime
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit import site_check
from tests.unit.scheduler_commands import RECORDINGS, Commands, pbs_recording, slurm_output
from tests.unit.submission import Login
from utils.host import network
from utils.tools.cli import interpreter
from utils.tools.submission import profiles
from utils.tools.submission import sites_cli as sites
from utils.tools.submission.profiles import ProfileError

OLD = RECORDINGS / "profiles"
TOP = "title: Ours\nscheduler: slurm\n"
ORIGIN = "source: https://a.b/c, read: 2026-11-22"
ALT_READ = f"environment: {{FI_CXI_RDZV_PROTO: {{value: alt_read, reason: a, {ORIGIN}}}}}\n"
VENDORS = {  # of the GPUs of each cluster
    "nvidia": "alps derecho isambard-ai jean-zay juwels-booster jupiter leonardo perlmutter polaris roihu vista",
    "amd": "frontier lumi", "intel": "aurora", None: "generic-pbs generic-slurm"}


def findings(text: str, path: Path = Path("ours.yaml")) -> list[str]:
    return site_check.check(text, path)


def test_profiles_of_the_kit_have_no_findings() -> None:
    paths = {name: profiles.load(name).path for name in profiles.names()}
    assert {name: findings(path.read_text(), path) for name, path in paths.items()} == {name: [] for name in paths}
    vendors = {name: vendor for vendor, names in VENDORS.items() for name in names.split()}
    assert {name: profiles.load(name).gpu_vendor for name in profiles.names()} == vendors


def test_uncommented_queues_of_a_new_profile_are_read() -> None:
    text = TOP + "queues:\n  - {nodes: 1-2, queue: short}  # at most 00:10:00\n  - {nodes: 3-, queue: main}\n"
    profile = profiles.parse(text, Path("x.yaml"))
    assert [profile.queue_for(nodes) for nodes in (1, 2, 3, 999)] == ["short", "short", "main", "main"]


def test_variable_may_be_empty_in_quotation_marks() -> None:
    profile = profiles.parse(TOP + "environment: {A: {value: ''}}\n", Path("x.yaml"))
    assert profile.exports(1, 1) == {"A": ""}


def test_values_are_taken_as_they_are_written() -> None:
    """YAML alone would make a number of 007 and a truth value of "on"."""
    profile = profiles.parse(TOP + "environment: {A: {value: 007}, B: {value: on}}\n", Path("x.yaml"))
    assert [profile.environment[name].value for name in "AB"] == ["007", "on"]


@pytest.mark.parametrize(("text", "line", "words"), [
    (TOP + "gpus_per_nod: 4\n", 3, ["'gpus_per_nod'", "Did you mean 'gpus_per_node'?"]),
    (TOP + "gpus_per_node: four\n", 3, ["'gpus_per_node'", "'four'", "whole number"]),
    ("title: Ours\nscheduler: lsf\n", 2, ["'scheduler'", "'lsf'", "slurm, pbs"]),
    (TOP + "environment: main\n", 3, ["'environment'", "'main'", "key: value"]),
    (TOP + "modules: cuda\n", 3, ["'modules'", "'cuda'", "a list"]),
    (TOP + "setup:\n  - {a: b}\n", 4, ["'setup'", "a set of keys", "one value"]),
    (TOP + "environment:\n  A: {reason: 1}\n", 4, ["'A'", "without its value"]),
    (TOP + "environment:\n  A-B: {value: 1, reason: x}\n", 4, ["'A-B'", "letters, digits"]),
    (TOP + "binding: {list: [4-7, eight]}\n", 3, ["'binding'", "list:4-7:eight", "0-7"]),
    (TOP + "binding: {masks: [0x1]}\n", 3, ["'masks'"]),
    (TOP + "queues: debug\n", 3, ["'queues'", "'debug'", "a list"]),
    (TOP + "queues:\n  - {nodes: 1-2}\n", 4, ["an entry of 'queues'", "without 'queue'", "{nodes: 1-2, queue: debug}"]),
    (TOP + "queues: [{nodes: 2-1, queue: a}]\n", 3, ["'nodes' is '2-1'", "4, 1-2, or 10-"]),
    (TOP + "queues: [{nodes: few, queue: a}]\n", 3, ["'nodes' is 'few'"]),
    (TOP + "queues:\n  - {nodes: 1-4, queue: a}\n  - {nodes: 4-, queue: b}\n", 5,
     ["b (nodes: 4-) in 'queues' is after a (nodes: 1-4)", "ascending numbers, each once"]),
    (TOP + "queues: [{nodes: 8-, queue: a}, {nodes: 9, queue: b}]\n", 3, ["b (nodes: 9)", "after a (nodes: 8-)"]),
    (TOP + "queues: [{nodes: 1, queue: a, time: 1h}]\n", 3, ["'time' is unknown", "nodes, queue"]),
    (TOP + "proxy: proxy.site.org\n", 3, ["'proxy'", "'proxy.site.org'", "http://proxy.site.org:3128"]),
    (TOP + "proxy: {no_proxy: localhost}\n", 3, ["'proxy'", "without its value"]),
    (TOP + "environment: {A: {value: }}\n", 3, ["'value' is empty"]),
    (TOP + "queue:\n", 3, ["'queue'", "empty"]),
    (TOP + "title: again\n", 3, ["'title'", "twice"]),
    (TOP + "queue: a: b\n", 3, ["not YAML"]),
    (TOP + "? [a]\n: b\n", 3, ["a list"]),
    ("", None, ["empty"]), ("scheduler: pbs\n", None, ["'title' is missing"]), ("- a\n", None, ["a list"]),
    ("!!python/object/apply:os.system ['true']\n", None, ["a list"]), ("\0", None, ["not YAML"]),
    ("title: \udcff\n", None, ["not UTF-8"]), ("#" * (1 << 21), None, ["more than 1048576 bytes"]),
    ("title: &a [*a]\n", 1, ["a list"]), ("title: " + "[" * 50_000, None, ["not YAML"]),
])
def test_mistake_in_a_profile_is_named(text: str, line: int | None, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ProfileError) as error:
        profiles.load(str(file))
    assert (f"{file}, line {line}:" if line else str(file)) in str(error.value)
    assert [word for word in words if word not in str(error.value)] == []


# The faults of the profiles as they were on 2026-11-22, in words of the finding; the sources are in site_rules.yaml.
@pytest.mark.parametrize(("site", "faults"), [
    ("alps", ["FI_CXI_DEFAULT_TX_SIZE is above 16384", "MPICH_GPU_SUPPORT_ENABLED is not set",
              "Not set: FI_CXI_RDZV_GET_MIN, FI_CXI_RDZV_THRESHOLD,", "NCCL_NET is also set in jobs of one node"]),
    ("aurora", ["six ranks run on the wrong socket", "loads modules after the exports", "Not set: FI_MR_CACHE_MON"]),
    ("polaris", ["Not set: NCCL_NET, NCCL_NET_GDR_LEVEL,", "does not load the NCCL plugin", "NCCL_NET is missing",
                 "whatever order the GPUs are in"]),
    ("derecho", ["derecho_v2.sh", "No libfabric module", "does not load the NCCL plugin", "NCCL_NET is missing",
                 "whatever order the GPUs are in"]),
    ("perlmutter", ["nor the shifter module nccl-plugin", "NCCL_NET is missing", "does not load the NCCL plugin",
                    "Not set: FI_CXI_RDZV_GET_MIN, FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD."]),
    ("frontier", ["MIOpen keeps its database", "modules have no versions", "CRAY_LD_LIBRARY_PATH"]),
    ("lumi", ["not in the order of the cores", "does not load the NCCL plugin"]),
    ("jean-zay", [])])
def test_faults_of_old_profiles_are_found(site: str, faults: list[str]) -> None:
    found = findings((OLD / f"{site}.yaml").read_text(), OLD / f"{site}.yaml")
    assert [fault for fault in faults if fault not in "\n".join(found)] == []
    known_bad = [line for line in found if "Source: http" in line]
    assert len(known_bad) == len(faults)  # and no false alarm
    assert any("gpus_per_node: the value has no source" in one for one in found)


@pytest.mark.parametrize(("site", "good", "bad", "words"), [
    ("alps", "^LL128", "Simple", "has corrupted data"), ("alps", "userfaultfd", "memhooks", "can deadlock"),
    ("alps", "NCCL_CROSS_NIC:\n    value: \"1\"", "NCCL_NET_PLUGIN:\n    value: ofi", "NCCL_NET_PLUGIN=ofi"),
    ("lumi", "setup:", "environment: {NCCL_NET_GDR_LEVEL: {value: PHB, reason: a}}\nsetup:", "hang in the containers"),
    ("leonardo", "gpu_vendor:", "environment: {NCCL_IB_DISABLE: {value: 1, reason: a}}\ngpu_vendor:",
     "contradicts the network")])
def test_profile_made_bad_is_found(site: str, good: str, bad: str, words: str) -> None:
    text = profiles.load(site).path.read_text()
    assert good in text
    found = [finding for finding in findings(text.replace(good, bad)) if "no source" not in finding]
    assert len(found) == 1 and words in found[0]


def test_rules_have_dated_sources_and_known_facts(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("- {if: {module: cuda}, problem: a, remedy: b, source: c, read: d}\n")
    with pytest.raises(ProfileError, match=r"rules.yaml, line 1: a fact is 'module'\. Expected: .*modules"):
        site_check.load_rules(file)
    for rule in site_check.load_rules():
        assert rule.source.startswith("https://") and datetime.date.fromisoformat(rule.read), rule.problem


@pytest.mark.parametrize(("text", "words"), [
    ("gpus_per_node: 4\n", "gpus_per_node: the value has no source"),
    ("gpus_per_node: {value: 4, source: https://a.b/c}\n", "gpus_per_node: the value has no date"),
    ("gpus_per_node: {value: 4, source: nodes}\n", "gpus_per_node: the value has no source"),
    ("sources: {a: {url: ftp://a, read: 2026-11-22}}\n", "sources: a has no URL or no date"),
    (f"environment: {{A: {{value: 1, {ORIGIN}}}}}\n", "A: the variable has no reason"),
    (f"gpus_per_node: {{value: 4, {ORIGIN}}}\nbinding: {{list: [0-3, 4-7], {ORIGIN}}}\n", "2 entries for 4 GPUs"),
    (f"modules: [{{value: cuda 12, {ORIGIN}}}]\n", "modules: 'cuda 12'"),
    (f"directives: [{{value: gpu, {ORIGIN}}}]\n", "'gpu' is not an option of a scheduler"),
    (f"binding: {{list: ['0-3', '3-7'], {ORIGIN}}}\n", "several ranks share the cores [3]"),
    (f"network: {{value: IB, {ORIGIN}}}\n"
     f"environment: {{NCCL_NET: {{value: Socket, reason: a, {ORIGIN}}}}}\n", "'Socket' contradicts network 'IB'"),
    (f"interface: {{value: ib0, {ORIGIN}}}\n"
     f"environment: {{NCCL_SOCKET_IFNAME: {{value: eth0, reason: a, {ORIGIN}}}}}\n", "contradicts interface 'ib0'"),
    (f"modules: [{{value: cuda/12, {ORIGIN}}}, {{value: cuda/13, {ORIGIN}}}]\n", "modules: cuda is given 2 times"),
    (f"directives: [{{value: --mem=0, {ORIGIN}}}, {{value: --mem=1, {ORIGIN}}}]\n", "--mem is given 2 times"),
    (f"setup: [{{value: export A=1, {ORIGIN}}}]\nenvironment: {{A: {{value: 1, reason: a, {ORIGIN}}}}}\n",
     "A: set in 'environment' and again in 'setup'"),
    (ALT_READ, "--network=disable_rdzv_get"), (f"scheduler: pbs\n{ALT_READ}", "--disable_rdzv_get under PBS"),
    (f"directives: [{{value: --network=disable_rdzv_get, {ORIGIN}}}]\n{ALT_READ}", ""),
    (f"environment: {{FI_CXI_DEFAULT_TX_SIZE: {{value: many, reason: a, {ORIGIN}}}}}\n", "")])  # no number
def test_contradictions_and_duplicates_are_found(text: str, words: str) -> None:
    found = findings("title: Ours\n" + (text if "scheduler" in text else f"scheduler: slurm\n{text}"))
    assert len(found) == bool(words) and words in "".join(found)


@pytest.mark.parametrize("activated", [True, False])
def test_modules_bring_python_unless_the_user_has_activated_one(
        activated: bool, login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first Python has no PyYAML, that of the kit runs submit.py: nobody has chosen it for the ranks."""
    monkeypatch.setattr(interpreter, "KIT_PYTHON", sys.executable)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    if activated:
        monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    script = login.submit(*"run --dry-run --site roihu --account a --nodes 2 train.py".split()).out
    assert (f"export PYTHON={shlex.quote(sys.executable)}\n" in script) == activated


@pytest.mark.parametrize(("words", "message"), [
    ("list --output x.yaml", "error: list takes no --output"), ("new alps", "error: new takes no FILE"),
    ("new --output no/x.yaml", "no/x.yaml cannot be written: No such file or directory")])
def test_mistake_in_the_command_line_is_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="[12]"):
        sys.exit(sites.main(words.split()))
    assert message in capsys.readouterr().err


def test_list_says_where_the_values_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    """The date is that of the newest page; values of which it says more are those of every other profile."""
    assert sites.main(["list"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(rows) == profiles.names()
    for name, row in rows.items():
        if not name.startswith("generic"):
            pages = yaml.load(profiles.load(name).path.read_text(), yaml.BaseLoader)["sources"].values()
            date = max(page["read"] for page in pages)
            assert re.search(f"; from .*pages of .*{date}, never run there by us$", row), row


def test_new_profile_of_a_slurm_cluster(commands: Commands, tmp_path: Path) -> None:
    commands.add("sinfo", slurm_output("sinfo"))
    commands.add("scontrol", slurm_output("nodes"), when="node")
    commands.add("scontrol", slurm_output("partitions"), when="partition")
    commands.add("nvidia-smi", "GPU 0: NVIDIA A100 (UUID: GPU-1)\n")
    commands.add("ip", "1: lo: <LOOPBACK,UP>\n2: eth0: <UP>\n3: hsn0: <UP>\n4: hsn1: <UP>\n")
    (commands.folder / "bash").unlink()  # a link to the real one
    commands.write("bash", "#!/bin/sh\necho '/apps/modules:\ncuda/12.4\naws-ofi-nccl/1.9\ngcc/13'\n")
    commands.add("sbatch")
    file = tmp_path / "ours.yaml"
    assert sites.main(["new", "--output", str(file)]) == 0
    text = file.read_text()
    profile = profiles.parse(text, file)
    assert (profile.queue, profile.gpus_per_node, profile.cores_per_node) == ("main", 2, 4)
    assert (profile.gpu_vendor, profile.network, profile.interface) == ("nvidia", "AWS Libfabric", "hsn0,hsn1")
    assert "\n# queues:\n" in text and "\n#   - {nodes: 1-4, queue: short}  # at most 00:10:00\n" in text
    assert f'source: "$ sinfo, scontrol show node", read: {datetime.date.today()}}}\n' in text
    assert "#   aws-ofi-nccl/1.9\n#   cuda/12.4\n" in text and "gcc" not in text
    assert not [finding for finding in findings(text) if "no source" in finding]
    assert sites.main(["new", "--output", str(file)]) == 1  # a file is not overwritten


def test_new_profile_of_a_pbs_cluster_names_what_it_did_not_find(
        commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.tools.submission.new_profile.gpu_vendor", lambda: None)
    for name, option in (("qstat_Qf_json", "-Qf"), ("qstat_Bf_json", "-Bf")):
        commands.add("qstat", pbs_recording(f"commands/{name}")["stdout"], when=option)
    commands.add("pbsnodes", pbs_recording("commands/pbsnodes_a_json")["stdout"])
    commands.add("qsub")
    assert sites.main(["new"]) == 0
    text = capsys.readouterr().out
    profile = profiles.parse(text, Path("ours.yaml"))
    assert (profile.queue, profile.gpus_per_node, profile.cores_per_node) == ("workq", 4, 4)
    assert re.search(r"\n#   - \{nodes: \S+, queue: small\}  # at most 00:10:00\n", text)
    missing = text.partition("# Not found:\n")[2]
    assert re.findall("^#   (.+?): ", missing, re.M) == ["gpu_vendor", "network, interface", "modules", "binding"]


@pytest.mark.parametrize(("suffix", "host", "name"), [
    ("i", "jwb0001", "jwb0001i"), ("i", "jwb0001.juwels", "jwb0001i.juwels"), ("i", "10.0.0.1", ""), ("", "n1", ""),
    (".hsn.site", "x1.host.site", "x1.hsn.site"), (".hsn.site", "x1.hsn.site", "")])
def test_host_has_a_name_on_the_fabric(suffix: str, host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(socket.AF_INET, 1, 6, "", (host, 0))])
    monkeypatch.setenv("DDPKIT_HOST_SUFFIX", suffix)
    assert network.resolve_on_fabric(host) == ([name] if name else [])
