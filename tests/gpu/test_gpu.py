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
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from tests.gpu.conftest import PROGRAMS, ROOT, Ended, Gpus, run, torchrun
from tests.launch.launchers import MPIS
from utils.host.cores import read_topology

pytestmark = pytest.mark.gpu
Record = Callable[[str, str], None]
MOST_RANKS = 4
GB = 1e9


def command_of(launcher: str, ranks: int, need: Callable[[str], Path]) -> tuple[list[str], dict[str, str]]:
    """The words that start the ranks on this machine, and variables."""
    if launcher == "torchrun":
        return torchrun(ranks), {}
    if launcher == "direct":
        return [sys.executable, PROGRAMS], {}
    if launcher == "by hand":
        return [sys.executable, PROGRAMS], {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                                            "MASTER_PORT": "29544"}
    options = ["--allow-run-as-root", "--bind-to", "none"] if launcher.startswith("openmpi") else []
    return [str(need(MPIS[launcher][0])), *options, "-n", str(ranks), sys.executable, PROGRAMS], {}


@pytest.mark.parametrize("launcher", ["torchrun", "direct", "by hand", *MPIS])
def test_nccl_starts_and_ends(launcher: str, gpus: Gpus, need: Callable[[str], Path], record: Record) -> None:
    """Every launcher; with NCCL and gloo side by side."""
    ranks = min(len(gpus), MOST_RANKS)
    command, env = command_of(launcher, ranks, need)
    done = run([*command, "collectives", "placement"], env=env)
    figures = done.figures()
    alone = launcher in ("direct", "by hand")
    assert figures["world_size"] == (1 if alone else ranks)
    assert "backend nccl" in done.output and "destroy_process_group() was not called" not in done.output
    used = [rank["uuid"] for rank in figures["placement"]["ranks"]]
    assert used == gpus.uuids[:len(used)]
    record("setup_distributed()", f"{figures['start_seconds']:.2f} s on {figures['world_size']} rank(s)")


def test_gpu_is_pinned_by_index_uuid_and_mask(gpus: Gpus) -> None:
    last = len(gpus) - 1
    masks = {None: 0, gpus.entries[last]: last, f"GPU-{gpus.uuids[last]}": last,
             ",".join(reversed(gpus.entries)): last}
    for mask, expected in masks.items():
        env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        [rank] = run([sys.executable, PROGRAMS, "placement"], env=env).figures()["placement"]["ranks"]
        assert rank["uuid"] == gpus.uuids[expected] and rank["index"] == rank["current"] == 0, mask


def test_two_ranks_on_one_gpu_are_refused_with_the_table(gpus: Gpus) -> None:
    mask = gpus.entries[0]
    done = run(torchrun(2, "placement"), env={"CUDA_VISIBLE_DEVICES": mask})
    assert done.status != 0 and "use the same GPU; expected a GPU for each rank" in done.output, done.output
    for rank in range(2):
        row = rf"rank {rank} \(local rank {rank}\): index 0 = \S*{gpus.uuids[0]}\S*, CUDA_VISIBLE_DEVICES={mask}"
        assert re.search(row, done.output), done.output


def processes_of() -> Counter[str]:
    """The number of processes with a context on each GPU, by its UUID."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        shown = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
        return Counter(line.split(",")[0].strip().removeprefix("GPU-") for line in shown.splitlines() if "," in line)
    return Counter()


def test_no_rank_has_a_context_on_a_gpu_of_another(several_gpus: Gpus, tmp_path: Path) -> None:
    ranks, before = min(len(several_gpus), MOST_RANKS), processes_of()
    process = subprocess.Popen(torchrun(ranks, "--folder", str(tmp_path), "hold"), cwd=ROOT, text=True,
                               start_new_session=True)
    with killed_at_end(process):
        wait_until((tmp_path / "running").exists, "the ranks", seconds=120)
        after = processes_of() - before
        (tmp_path / "seen").touch()
        assert process.wait(60) == 0
    if not after:
        pytest.skip("nvidia-smi shows no processes here")
    assert after == Counter(several_gpus.uuids[:ranks])


def test_bf16_training_follows_single_precision(gpus: Gpus, record: Record) -> None:
    figures = run(torchrun(min(len(gpus), MOST_RANKS), "train")).figures()["train"]
    for name, one in figures.items():
        record(f"GPT-2 124M, {name}, not compiled", f"{one['tokens_per_second']:,.0f} tokens/s per GPU")


def test_compiled_training_runs(gpus: Gpus, record: Record) -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))) or not header.exists():
        pytest.skip(f"needs a C compiler and {header}: Triton compiles with them")
    figures = run(torchrun(min(len(gpus), MOST_RANKS), "compiled"), seconds=400).figures()["compiled"]
    for name, one in figures.items():
        record(f"GPT-2 124M, {name}, compiled", f"{one['tokens_per_second']:,.0f} tokens/s per GPU")


def test_memory_is_that_of_the_plan(gpus: Gpus, record: Record) -> None:
    figures = run(torchrun(1, "memory")).figures()["memory"]
    measured, predicted = figures["measured"], figures["predicted"]
    record("peak memory of GPT-2 124M, AdamW, DDP",
           f"{measured / GB:.2f} GB, predicted {predicted / GB:.2f} GB ({predicted / measured - 1:+.1%})")
    assert 0.9 < predicted / measured < 1.1


def test_checkpoint_stalls_less_than_torch_save_and_resumes_with_the_same_bits(
        gpus: Gpus, tmp_path: Path, record: Record) -> None:
    figures = run(torchrun(min(len(gpus), MOST_RANKS), "--folder", str(tmp_path), "checkpoint")).figures()["checkpoint"]
    record(f"save() of {figures['bytes'] / GB:.1f} GB on the GPU stops the loop",
           f"{figures['save']:.2f} s; torch.save() {figures['torch_save']:.2f} s")
    assert figures["save"] < figures["torch_save"]


def test_a_save_of_gpu_tensors_runs_while_the_training_continues(
        gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.test_checkpoint import check_save_beside_training  # imports torch

    check_save_beside_training("cuda", tmp_path, monkeypatch)


def test_a_hang_in_nccl_is_explained(several_gpus: Gpus, tmp_path: Path, record: Record) -> None:
    done: Ended = run(torchrun(2, "--folder", str(tmp_path), "--hang-timeout", "8", "hang"), seconds=180)
    assert done.status != 0
    assert re.search(r"rank 1 on \S+ .* did not enter collective \d+.*programs.py, line \d+, in hang", done.output,
                     re.DOTALL), done.output
    record("a hang of NCCL", "rank, host and source line are named")


def test_ranks_run_on_the_cores_of_their_gpu(gpus: Gpus, record: Record) -> None:
    topology = read_topology()
    ranks = run(torchrun(min(len(gpus), MOST_RANKS), "placement")).figures()["placement"]["ranks"]
    known = [rank for rank in ranks if rank["node"] is not None]
    if not known or topology is None:
        pytest.skip("the system does not tell the NUMA node of the GPU")
    allowed = os.sched_getaffinity(0)
    ranks_on = Counter(rank["node"] for rank in known)
    near = {node: {cpu for core in topology.cores if core.node == node for cpu in core.cpus} & allowed
            for node in ranks_on}
    if any(2 * len(ranks) * len(near[node]) < len(allowed) * ranks_on[node] for node in near):
        pytest.skip("the NUMA nodes of the GPUs have less than half of the cores: ranks also get others")
    for rank in known:
        assert set(rank["cpus"]) <= near[rank["node"]], rank
    record("NUMA nodes of the GPUs", ", ".join(str(rank["node"]) for rank in known))


def test_example_03_against_nanogpt(gpus: Gpus, record: Record) -> None:
    folder = os.environ.get("DDPKIT_NANOGPT")
    if not folder:
        pytest.skip("needs nanoGPT: scripts/test.sh --gpu --nanogpt FOLDER")
    script = ROOT / "tests" / "bench" / "nanogpt.py"
    if not script.exists():
        pytest.skip(f"needs {script.relative_to(ROOT)}")
    options = ["--device", "cuda", "--compile", "--steps", "50", "--seeds", "0"]
    done = run([sys.executable, str(script), folder, *options], seconds=300)
    assert done.status == 0, done.output
    ratio = re.search(r"median ratio .*", done.output)
    assert ratio, done.output
    record("03 against nanoGPT, compiled bfloat16, tokens per second", ratio[0])
