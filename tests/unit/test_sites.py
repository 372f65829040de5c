"""`sites`: known faults of old profiles are found; the kit's profiles have none; what a job gets of a profile."""
from __future__ import annotations

import datetime
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.unit.scheduler_commands import RECORDINGS, Commands, pbs_recording, slurm_output
from tests.unit.submission import Login
from utils.host import network
from utils.tools import interpreter
from utils.tools.submission import profiles, site_checks
from utils.tools.submission import sites_cli as sites
from utils.tools.submission.profiles import ProfileError

OLD = RECORDINGS / "profiles"
TOP = "title: Ours\nscheduler: slurm\n"
ORIGIN = "source: https://a.b/c, read: 2026-11-22"


def findings(text: str, path: Path = Path("ours.yaml")) -> list[str]:
    return site_checks.check(profiles.parse(text, path), site_checks.load_rules())


# The faults of the profiles as they were on 2026-11-22, in words of the finding; the sources are in site_rules.yaml.
@pytest.mark.parametrize(("site", "faults"), [
    ("alps", ["FI_CXI_DEFAULT_TX_SIZE is above 16384", "MPICH_GPU_SUPPORT_ENABLED is not set",
              "Not set: FI_CXI_RDZV_GET_MIN, FI_CXI_RDZV_THRESHOLD, FI_CXI_RDZV_EAGER_SIZE.",
              "NCCL_NET is also set in jobs of one node"]),
    ("aurora", ["six ranks run on the wrong socket", "loads modules after the exports",
                "Not set: FI_MR_CACHE_MONITOR, CCL_ALLREDUCE_SCALEOUT, CCL_KVS_USE_MPI_RANKS."]),
    ("polaris", ["Not set: NCCL_NET, NCCL_NET_GDR_LEVEL, NCCL_CROSS_NIC, NCCL_COLLNET_ENABLE, "
                 "FI_CXI_DISABLE_HOST_REGISTER, FI_MR_CACHE_MONITOR, FI_CXI_DEFAULT_CQ_SIZE.",
                 "does not load the NCCL plugin", "NCCL_NET is missing", "whatever order the GPUs are in"]),
    ("derecho", ["derecho_v2.sh", "No libfabric module", "does not load the NCCL plugin", "NCCL_NET is missing",
                 "whatever order the GPUs are in"]),
    ("perlmutter", ["nor the shifter module nccl-plugin", "NCCL_NET is missing", "does not load the NCCL plugin",
                    "Not set: FI_CXI_RDZV_GET_MIN, FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD."]),
    ("frontier", ["MIOpen keeps its database", "modules have no versions", "CRAY_LD_LIBRARY_PATH"]),
    ("lumi", ["not in the order of the cores", "does not load the NCCL plugin"]),
    ("jean-zay", [])])
def test_faults_of_old_profiles_are_found(site: str, faults: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sites.main(["check", str(OLD / f"{site}.yaml")]) == 1
    found = capsys.readouterr().out
    assert [fault for fault in faults if fault not in found] == []
    known_bad = [line for line in found.splitlines() if "Source: http" in line]
    assert len(known_bad) == len(faults)  # and no false alarm
    assert "gpus_per_node: the value has no source" in found


def test_profiles_of_the_kit_have_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert sites.main(["check"]) == 0
    assert capsys.readouterr().out.count(": no findings\n") == len(profiles.names())


@pytest.mark.parametrize(("site", "good", "bad", "words"), [
    ("alps", "^LL128", "Simple", "has corrupted data"), ("alps", "userfaultfd", "memhooks", "can deadlock"),
    ("alps", "NCCL_CROSS_NIC:\n    value: \"1\"", "NCCL_NET_PLUGIN:\n    value: ofi", "NCCL_NET_PLUGIN=ofi"),
    ("polaris", "NCCL_COLLNET_ENABLE", "OTHER", "Not set: NCCL_COLLNET_ENABLE"),
    ("derecho", "libfabric/1.15.2.0", "mkl", "No libfabric module"),
    ("lumi", "setup:", "environment: {NCCL_NET_GDR_LEVEL: {value: PHB, reason: a}}\nsetup:", "hang in the containers"),
    ("leonardo", "gpu_vendor:", "environment: {NCCL_IB_DISABLE: {value: 1, reason: a}}\ngpu_vendor:",
     "contradicts the network")])
def test_profile_made_bad_is_found(site: str, good: str, bad: str, words: str) -> None:
    text = profiles.load(site).path.read_text()
    assert good in text
    found = [finding for finding in findings(text.replace(good, bad)) if "no source" not in finding]
    assert len(found) == 1 and words in found[0]


def test_value_that_is_no_number_is_not_compared() -> None:
    text = f"environment: {{FI_CXI_DEFAULT_TX_SIZE: {{value: many, reason: a, {ORIGIN}}}}}\n"
    assert findings(TOP + text) == []


def test_rules_have_dated_sources() -> None:
    for rule in site_checks.load_rules():
        assert rule.source.startswith("https://") and datetime.date.fromisoformat(rule.read), rule.problem


def test_rule_about_an_unknown_fact_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("- {if: {module: cuda}, problem: a, remedy: b, source: c, read: d}\n")
    with pytest.raises(ProfileError, match=r"rules.yaml, line 1: a fact is 'module'\. Expected: .*modules"):
        site_checks.load_rules(file)


def test_alt_read_needs_its_option_of_the_scheduler() -> None:
    variable = f"environment: {{FI_CXI_RDZV_PROTO: {{value: alt_read, reason: a, {ORIGIN}}}}}\n"
    [finding] = findings(TOP + variable)
    assert "--network=disable_rdzv_get" in finding
    [finding] = findings(TOP.replace("slurm", "pbs") + variable)
    assert "--disable_rdzv_get under PBS" in finding
    option = f"directives: [{{value: --network=disable_rdzv_get, {ORIGIN}}}]\n"
    assert findings(TOP + option + variable) == []


@pytest.mark.parametrize(("text", "words"), [
    ("gpus_per_node: 4\n", "gpus_per_node: the value has no source"),
    ("gpus_per_node: {value: 4, source: https://a.b/c}\n", "gpus_per_node: the value has no date"),
    (f"queue: b\nqueues: {{a: {{{ORIGIN}}}}}\n", "queue: b is not one of"),
    (f"queues: {{a: {{min_nodes: 3, max_nodes: 2, {ORIGIN}}}}}\n", "queues.a: min_nodes is more"),
    (f"gpus_per_node: {{value: 4, {ORIGIN}}}\nbinding: {{masks: [0xf, 0xf0], {ORIGIN}}}\n", "2 entries for 4 GPUs"),
    (f"modules: [{{value: cuda 12, {ORIGIN}}}]\n", "modules: 'cuda 12'"),
    (f"directives: [{{value: gpu, {ORIGIN}}}]\n", "'gpu' is not an option of a scheduler"),
    (f"binding: {{list: ['0-3', '3-7'], {ORIGIN}}}\n", "several ranks share the cores [3]"),
    (f"binding: {{masks: [0x3, 0x6], {ORIGIN}}}\n", "several ranks share the cores [1]"),
    (f"network: {{value: IB, {ORIGIN}}}\n"
     f"environment: {{NCCL_NET: {{value: Socket, reason: a, {ORIGIN}}}}}\n", "'Socket' contradicts network 'IB'"),
    (f"interface: {{value: ib0, {ORIGIN}}}\n"
     f"environment: {{NCCL_SOCKET_IFNAME: {{value: eth0, reason: a, {ORIGIN}}}}}\n", "contradicts interface 'ib0'"),
    (f"modules: [{{value: cuda/12, {ORIGIN}}}, {{value: cuda/13, {ORIGIN}}}]\n", "modules: cuda is given 2 times"),
    (f"directives: [{{value: --mem=0, {ORIGIN}}}, {{value: --mem=1, {ORIGIN}}}]\n", "--mem is given 2 times"),
    (f"setup: [{{value: export A=1, {ORIGIN}}}]\nenvironment: {{A: {{value: 1, reason: a, {ORIGIN}}}}}\n",
     "A: set in 'environment' and again in 'setup'")])
def test_contradictions_and_duplicates_are_found(text: str, words: str) -> None:
    [finding] = findings(TOP + text)
    assert words in finding


def script(login: Login, words: str) -> str:
    return login.submit("run", "--dry-run", "--account", "a", *words.split(), "train.py").out


def test_exports_follow_modules_and_precede_set_up_lines(login: Login) -> None:
    lines = script(login, "--site polaris --nodes 2 --env OWN=2").splitlines()
    order = ["module use /soft/modulefiles", "module load conda",
             "export NCCL_NET='AWS Libfabric'", "export OWN=2", "conda activate"]
    assert [line for line in lines if line in order] == order


@pytest.mark.parametrize(("words", "expected", "absent"), [
    ("--site alps --nodes 2", ["export NCCL_NET='AWS Libfabric'", "export DDPKIT_NETWORK='AWS Libfabric'"], "CPU_BIND"),
    ("--site alps --nodes 1", ["export FI_CXI_DEFAULT_TX_SIZE=16384"], "NCCL_NET="),
    ("--site frontier --nodes 2", ["export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3\n",
                                   "export GLOO_SOCKET_IFNAME=hsn0\n"], "CPU_BIND"),
    ("--site frontier --nodes 1", ["export NCCL_CROSS_NIC=1"], "SOCKET_IFNAME"),
    ("--site juwels-booster --nodes 2", ["export DDPKIT_NETWORK=IB", "export DDPKIT_HOST_SUFFIX=i"], "IFNAME"),
    ("--site lumi --nodes 1", ["export DDPKIT_CPU_BIND=mask_cpu:0x00fe000000000000,0xfe00000000000000,"], "NCCL"),
    ("--site aurora --nodes 1", ["export DDPKIT_CPU_BIND=list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:",
                                 "export OMP_NUM_THREADS=4\n"], "IFNAME"),
    ("--site aurora --nodes 1 --ntasks-per-node 6", ["module load frameworks"], "CPU_BIND"),
    ("--site alps --nodes 2 --env NCCL_NET=Socket", ["export NCCL_NET=Socket"], "NCCL_NET='")])
def test_job_gets_what_its_nodes_and_ranks_need(words: str, expected: list[str], absent: str, login: Login) -> None:
    text = script(login, words)
    assert [line for line in expected if line not in text] == [] and absent not in text


@pytest.mark.parametrize("activated", [True, False])
def test_modules_bring_python_unless_the_user_has_activated_one(
        activated: bool, login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first Python has no PyYAML, that of the kit runs submit.py: nobody has chosen it for the ranks."""
    monkeypatch.setattr(interpreter, "KIT_PYTHON", sys.executable)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    if activated:
        monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert (f"export PYTHON={sys.executable}\n" in script(login, "--site roihu --nodes 2")) == activated


@pytest.mark.parametrize("words", ["list alps", "new alps", "check --output x.yaml"])
def test_argument_of_another_subcommand_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sites.main(words.split())
    assert f"error: {words.split()[0]} takes no " in capsys.readouterr().err


def test_show_explains_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert sites.main(["show", "alps"]) == 0
    shown = capsys.readouterr().out
    profile = profiles.load("alps")
    assert "environment: NCCL_NET=AWS Libfabric (from 2 nodes)\n      NCCL uses Slingshot" in shown
    assert "queues: debug, up to 01:30:00, 4 nodes, 1.5 node-hours\n" in shown
    assert len(re.findall(r"^      https://\S+, read 20\d\d-\d\d-\d\d$", shown, re.M)) == len(profile.origins)


def test_new_profile_of_a_slurm_cluster(commands: Commands, tmp_path: Path) -> None:
    commands.add("sinfo", slurm_output("sinfo"))
    commands.add("scontrol", slurm_output("nodes"), when="node")
    commands.add("scontrol", slurm_output("partitions"), when="partition")
    commands.add("nvidia-smi", "GPU 0: NVIDIA A100 (UUID: GPU-1)\n")
    commands.add("ip", "1: lo: <LOOPBACK,UP>\n2: eth0: <UP>\n3: hsn0: <UP>\n4: hsn1: <UP>\n")
    (commands.folder / "bash").unlink()  # a link to the real one
    commands.write("bash", "#!/bin/sh\necho '/apps/modules:\ncuda/12.4\naws-ofi-nccl/1.9\ngcc/13'\n")
    file = tmp_path / "ours.yaml"
    commands.add("sbatch")
    assert sites.main(["new", "--output", str(file)]) == 0
    profile = profiles.load(str(file))
    assert (profile.queue, profile.gpu_vendor) == ("main", "nvidia")
    assert (profile.gpus_per_node, profile.cores_per_node) == (2, 4)
    assert (profile.network, profile.interface) == ("AWS Libfabric", "hsn0,hsn1")
    assert profile.queues["short"].max_walltime_seconds == 600 and profile.queues["main"].max_nodes == 4
    assert profile.origins["gpus_per_node"].source == "$ sinfo, scontrol show node"
    assert profile.origins["network"].read == datetime.date.today().isoformat()
    text = file.read_text()
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
    assert profile.queues["small"].max_walltime_seconds == 600
    missing = text.partition("# Not found:\n")[2]
    assert re.findall("^#   (.+?): ", missing, re.M) == ["gpu_vendor", "network, interface", "modules", "binding"]


@pytest.mark.parametrize(("suffix", "host", "name"), [
    ("i", "jwb0001", "jwb0001i"), ("i", "jwb0001.juwels", "jwb0001i.juwels"), ("i", "10.0.0.1", ""), ("", "n1", ""),
    (".hsn.site", "x1.host.site", "x1.hsn.site"), (".hsn.site", "x1.hsn.site", "")])
def test_host_has_a_name_on_the_fabric(suffix: str, host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.9.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setenv("DDPKIT_HOST_SUFFIX", suffix)
    assert network.resolve_on_fabric(host) == (["10.9.0.1"] if name else [])
    assert asked == ([name] if name else [])
