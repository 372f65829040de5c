"""What only a GPU can show. A machine with one GPU runs most of it; two GPUs run all of it."""
from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from tests.gpu.conftest import PROGRAMS, ROOT, figures, run, run_on_hosts, torchrun
from tests.launch.launchers import MPIS
from utils.host.cores import read_topology

pytestmark = pytest.mark.gpu
Record = Callable[[str, str], None]
GB = 1e9
BEHIND = r"rank 1 on host1 .* did not enter collective \d+, in which ranks 0,2 wait. It is at LINE"
OTHER = (r"rank 1 on host1 .* entered a different collective 11: all_reduce of \[\[{}\]\] at LINE.*"
         r"The other ranks entered {} of \[\[16\]\]")
ENDED = r"A rank has ended: no collective for 2\d s since then\.\n  rank 1 on host1 "
HANGS = {  # how rank 1 goes wrong: what the report says
    "loop": BEHIND + r".* Rank 1 is busy \(\d+ % of a core\)",
    "stopped": "rank 1 on host1 .* does not respond: it is stopped, or busy in native code. ",
    "skipped": BEHIND, "ahead": BEHIND, "loader": BEHIND, "fsdp": BEHIND,
    "operation": OTHER.format(16, "broadcast"), "shape": OTHER.format(4000, "all_reduce"),
    "pipeline": "rank [02] .* waits in (send|recv) .*, and rank 1 on host1 .* does not take part: it is at LINE",
    "exited": ENDED + r"left by sys.exit\(\) at LINE after 10 collectives, and other ranks need it",
    "killed": ENDED + ".* ended without a report. It was killed",
    "raised": ENDED + "failed: ValueError: a sample has no label",
    "kernel": "all ranks have entered collective 11 by now: one of them, or its GPU, was late",
}
PAUSES = ("compute", "busy", "evaluate")
DIRECT = [sys.executable, PROGRAMS]
BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29544"}


@pytest.mark.parametrize("launcher", ["torchrun", "direct", "by hand", *MPIS])
def test_nccl_starts_and_ends(
        launcher: str, gpus: list[str], ranks: int, need: Callable[[str], Path], record: Record) -> None:
    """Every launcher; with NCCL and gloo side by side."""
    command = torchrun(ranks) if launcher == "torchrun" else DIRECT
    if launcher in MPIS:
        options = ["--allow-run-as-root", "--bind-to", "none"] if launcher.startswith("openmpi") else []
        if launcher == "openmpi4":
            options += ["--mca", "plm", "isolated"]  # else it ends on a machine without ssh
        command = [str(need(MPIS[launcher][0])), *options, "-n", str(ranks), *DIRECT]
    status, output = run([*command, "collectives", "placement"], env=BY_HAND if launcher == "by hand" else None)
    found = figures(status, output)
    assert found["world_size"] == (1 if launcher in ("direct", "by hand") else ranks)
    assert "backend nccl" in output and "destroy_process_group() was not called" not in output
    assert [rank["uuid"] for rank in found["placement"]["ranks"]] == gpus[:found["world_size"]]
    record(f"setup_distributed(), {found['world_size']} rank(s)", f"{found['start_seconds']:.2f} s")


def masks(gpus: list[str]) -> list[str]:
    """What selects each GPU in CUDA_VISIBLE_DEVICES; a job may have got some of them only."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return mask.split(",")[:len(gpus)] if mask else list(map(str, range(len(gpus))))


def test_gpu_is_pinned_by_index_uuid_and_mask(gpus: list[str]) -> None:
    indices = masks(gpus)
    for mask in (None, indices[-1], f"GPU-{gpus[-1]}", ",".join(reversed(indices))):
        env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        [rank] = figures(*run([*DIRECT, "placement"], env=env))["placement"]["ranks"]
        assert rank["uuid"] == gpus[-1 if mask else 0] and rank["index"] == rank["current"] == 0, mask


def test_two_ranks_on_one_gpu_are_refused_with_the_table(gpus: list[str]) -> None:
    mask = masks(gpus)[0]
    status, output = run(torchrun(2, "placement"), env={"CUDA_VISIBLE_DEVICES": mask})
    assert status != 0 and "use the same GPU; expected a GPU for each rank" in output, output
    for rank in range(2):
        row = rf"rank {rank} \(local rank {rank}\): index 0 = \S*{gpus[0]}\S*, CUDA_VISIBLE_DEVICES={mask}"
        assert re.search(row, output), output


def processes_of() -> Counter[str]:
    """The number of processes with a context on each GPU, by its UUID."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        shown = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
        return Counter(line.split(",")[0].strip().removeprefix("GPU-") for line in shown.splitlines() if "," in line)
    return Counter()


def need_two(ranks: int) -> None:
    if ranks < 2:
        pytest.skip("needs two GPUs: this machine has one")


def test_no_rank_has_a_context_on_a_gpu_of_another(gpus: list[str], ranks: int, tmp_path: Path) -> None:
    need_two(ranks)
    before = processes_of()
    words = torchrun(ranks, "--folder", str(tmp_path), "hold")
    with killed_at_end(subprocess.Popen(words, cwd=ROOT, text=True, start_new_session=True)) as process:
        wait_until((tmp_path / "running").exists, "the ranks", seconds=120)
        after = processes_of() - before
        (tmp_path / "seen").touch()
        assert process.wait(60) == 0
    if not after:
        pytest.skip("nvidia-smi shows no processes here")
    assert after == Counter(gpus[:ranks])


@pytest.mark.parametrize("program", ["train", "compiled"])
def test_bf16_training_follows_single_precision(program: str, ranks: int) -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang"))) and header.exists()
    if program == "compiled" and not has_compiler:
        pytest.skip(f"needs a C compiler and {header}: Triton compiles with them")
    assert set(figures(*run(torchrun(ranks, program)))[program]) == {"fp32", "bf16"}


def test_checkpoint_stalls_less_than_torch_save_and_resumes_with_the_same_bits(
        ranks: int, tmp_path: Path, record: Record) -> None:
    found = figures(*run(torchrun(ranks, "--folder", str(tmp_path), "checkpoint")))["checkpoint"]
    record(f"save() of {found['bytes'] / GB:.1f} GB on the GPU adds to ten steps",
           f"{found['save']:.3f} s; the first one {found['first']:.2f} s; torch.save() {found['torch_save']:.2f} s")
    assert found["save"] < found["torch_save"]


def test_a_save_of_gpu_tensors_runs_while_the_training_continues(
        gpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.test_checkpoint import check_save_beside_training  # imports torch

    check_save_beside_training("cuda", tmp_path, monkeypatch)


def test_hosts_that_share_a_gpu(gpus: list[str], tmp_path: Path, record: Record) -> None:
    """NCCL over TCP between two hosts: collectives, and resumes of DDP and FSDP2 with the same bits."""
    statuses, output = run_on_hosts(2, masks(gpus), tmp_path, "collectives", "checkpoint", "sharded", seconds=240)
    found = figures(max(statuses), output)
    assert statuses == [0, 0] and "2 ranks on 2 hosts, numbered by RANK and WORLD_SIZE, backend nccl" in output, output
    assert {"collectives", "checkpoint", "sharded"} < set(found)
    record("NCCL between two hosts", "DDP and FSDP2 resume with the same bits")


@pytest.fixture(scope="module")
def hangs(gpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], str]]:
    """What three ranks on three hosts end with, for each kind of hang in programs.py and of pause."""
    def run_kind(kind: str, folder: Path) -> tuple[list[int], str]:
        limit = [] if HANGS.get(kind, "").startswith(ENDED) else ["--hang-timeout", "6"]
        return run_on_hosts(3, masks(gpus), folder, *limit, "--kind", kind, "hang")

    kinds = [*PAUSES, *HANGS]
    folders = [tmp_path_factory.mktemp(kind) for kind in kinds]
    with ThreadPoolExecutor(6) as pool:
        return dict(zip(kinds, pool.map(run_kind, kinds, folders), strict=True))


@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_in_nccl_is_explained(kind: str, hangs: dict[str, tuple[list[int], str]]) -> None:
    statuses, output = hangs[kind]
    lines = enumerate(Path(PROGRAMS).read_text().splitlines(), 1)
    marked = "|".join(str(number) for number, line in lines if re.search(rf"# hang: {kind}\b", line))
    assert re.search(HANGS[kind].replace("LINE", rf"\S*programs\.py, line ({marked}), in \w+"), output), output
    assert -1000 not in statuses and statuses[0] == statuses[2] == 1, (statuses, output)


@pytest.mark.parametrize("kind", PAUSES)
def test_a_pause_is_no_hang_in_nccl(kind: str, hangs: dict[str, tuple[list[int], str]]) -> None:
    statuses, output = hangs[kind]
    assert statuses == [0, 0, 0] and "The ranks hang" not in output, output


def test_ranks_run_on_the_cores_of_their_gpu(ranks: int, record: Record) -> None:
    topology = read_topology()
    placed = figures(*run(torchrun(ranks, "placement")))["placement"]["ranks"]
    known = [rank for rank in placed if rank["node"] is not None]
    if not known or topology is None:
        pytest.skip("the system does not tell the NUMA node of the GPU")
    allowed = os.sched_getaffinity(0)
    ranks_on = Counter(rank["node"] for rank in known)
    near = {node: {cpu for core in topology.cores if core.node == node for cpu in core.cpus} & allowed
            for node in ranks_on}
    if any(2 * ranks * len(near[node]) < len(allowed) * ranks_on[node] for node in near):
        pytest.skip("the NUMA nodes of the GPUs have less than half of the cores: ranks also get others")
    for rank in known:
        assert set(rank["cpus"]) <= near[rank["node"]], rank
    record("NUMA nodes of the GPUs", ", ".join(str(rank["node"]) for rank in known))
