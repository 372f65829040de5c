"""Which mpiexec is which, which programs belong here, how many GPUs this host shows, and to a container."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from utils.launch.container import in_container
from utils.launch.gpus import count_gpus, gpu_vendor
from utils.launch.plan import PlanError
from utils.launch.programs import Mpiexec, Programs, from_version, identify

ROOT = Path(__file__).resolve().parents[2]
OPENMPI5 = "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
OPENMPI4 = "mpiexec.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: Fri\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"


@pytest.mark.parametrize(("said", "kind", "major"), [
    (OPENMPI5, "openmpi", 5), (OPENMPI4, "openmpi", 4), (MPICH, "mpich", 5), (INTEL, "intel-mpi", 0),
    ("PALS version 1.3.4\n", "pals", 0)])
def test_an_mpiexec_is_known_by_what_it_says_of_its_version(said: str, kind: str, major: int) -> None:
    assert from_version("/x/mpiexec", said) == Mpiexec("/x/mpiexec", kind, major)


@pytest.mark.parametrize("said", ["pbs_version = 23.06.06\n", "", "usage: mpiexec\n"])
def test_what_only_has_the_name_is_no_mpiexec(said: str) -> None:
    assert from_version("/x/mpiexec", said) is None


@pytest.mark.parametrize("kind", ["mpich", "openmpi", "impi"])
def test_the_real_ones_are_told_apart(kind: str, need: Callable[[str], Path]) -> None:
    found = identify(str(need(kind)))
    assert found is not None and found.kind == {"impi": "intel-mpi"}.get(kind, kind)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def says(path: Path, version: str) -> Path:
    return program(path, f"#!/bin/sh\ncat <<'END'\n{version}END\n")


def test_look_alikes_on_path_are_passed_over(tmp_path: Path) -> None:
    says(tmp_path / "pbs/mpiexec", "pbs_version = 23.06.06\n")
    program(tmp_path / "torque/mpiexec", "#!/usr/bin/perl -w\n# starts ranks in Slurm\nexec 'srun';\n")
    real = says(tmp_path / "mpi/mpiexec", OPENMPI5)
    path = os.pathsep.join(str(tmp_path / name) for name in ("pbs", "torque", "mpi")) + f"{os.pathsep}/usr/bin:/bin"
    assert Programs({"PATH": path}, pals_folder=tmp_path / "none").mpiexec == Mpiexec(str(real), "openmpi", 5)


def test_on_a_cray_its_own_mpiexec_goes_before_one_of_conda_on_path(tmp_path: Path) -> None:
    says(tmp_path / "conda/mpiexec", MPICH)
    own = says(tmp_path / "pals/1.8/bin/mpiexec", "PALS version 1.8\n")
    says(tmp_path / "pals/1.10/bin/mpiexec", "PALS version 1.10\n")
    programs = Programs({"PATH": f"{tmp_path}/conda:{tmp_path}/pals/1.8/bin:/usr/bin:/bin"},
                        pals_folder=tmp_path / "pals")
    assert programs.pals == programs.mpiexec == Mpiexec(str(own), "pals")


def test_the_newest_pals_is_taken_where_none_is_loaded(tmp_path: Path) -> None:
    says(tmp_path / "pals/1.8/bin/mpiexec", "PALS\n")
    newest = says(tmp_path / "pals/1.10/bin/mpiexec", "PALS\n")
    assert Programs({"PATH": "/bin"}, pals_folder=tmp_path / "pals").pals == Mpiexec(str(newest), "pals")


@pytest.mark.parametrize(("first", "other"), [("slurm", True), ("mpi", False)])
def test_an_open_mpi_beside_a_srun_that_is_not_the_one_on_path_is_noted(tmp_path: Path, first: str,
                                                                        other: bool) -> None:
    for folder, name in (("mpi", "mpiexec"), ("mpi", "srun"), ("slurm", "srun")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
        (tmp_path / folder / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / first), str(tmp_path / "mpi"), str(tmp_path / "slurm")])
    found = Programs({"PATH": path}).mpiexec
    assert found == Mpiexec(str(tmp_path / "mpi" / "mpiexec"), "openmpi", 4, other_srun=other)


def test_without_any_mpiexec_there_is_none(tmp_path: Path) -> None:
    assert Programs({"PATH": str(tmp_path)}, pals_folder=tmp_path).mpiexec is None


def test_pbs_tmrsh_is_of_no_use_outside_of_a_task_of_pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path / "pbs_tmrsh", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Programs({"PATH": str(tmp_path)}).find("pbs_tmrsh") is None
    assert Programs({"PATH": str(tmp_path), "PBS_JOBCOOKIE": "c"}).find("pbs_tmrsh") == str(found)


# GPUs -----------------------------------------------------------------------------------------------------------------

def nvidia(root: Path, count: int) -> Path:
    for number in range(count):
        (root / f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0").mkdir(parents=True)
    return root


def test_a_host_without_gpus_has_none(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path) == 0
    assert gpu_vendor(tmp_path) is None


def test_gpus_of_nvidia_are_counted(tmp_path: Path) -> None:
    assert count_gpus({}, nvidia(tmp_path, 4)) == 4
    assert gpu_vendor(tmp_path) == "nvidia"


def test_gpus_of_nvidia_are_counted_in_a_container_by_their_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert count_gpus({}, tmp_path) == 2


def test_gpus_of_amd_are_counted_without_the_cpus_beside_them(tmp_path: Path) -> None:
    for number, units in enumerate((0, 0, 440, 440)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\nmem_banks_count 1\n")
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"ROCR_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert gpu_vendor(tmp_path) == "amd"


@pytest.mark.parametrize(("mask", "left"), [("", 0), ("0", 1), ("2,3", 2), ("GPU-aa,GPU-bb,GPU-cc", 3), ("-1", 0),
                                            ("0,-1,1", 1), ("NoDevFiles", 0), ("0,1,2,3,4,5,6,7", 4)])
def test_only_gpus_that_the_mask_leaves_count(mask: str, left: int, tmp_path: Path) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": mask}, nvidia(tmp_path, 4)) == left


# A container ----------------------------------------------------------------------------------------------------------

def programs(folder: Path, *names: str) -> Programs:
    for name in names:
        (folder / name).touch(mode=0o755)
    return Programs({"PATH": str(folder)})


@pytest.mark.parametrize(("vendor", "option"), [("nvidia", ["--nv"]), ("amd", ["--rocm"]), ("intel", []), (None, [])])
def test_a_container_is_shown_the_gpus_by_the_option_of_their_vendor(vendor: str | None, option: list[str],
                                                                     tmp_path: Path) -> None:
    words = in_container("a b.sif", ["train.py", "-x"], vendor, programs(tmp_path, "apptainer", "singularity"))
    assert words == [f"{tmp_path}/apptainer", "exec", *option, "a b.sif", "python", "-u", "train.py", "-x"]


def test_singularity_serves_where_apptainer_is_not(tmp_path: Path) -> None:
    words = in_container("a.sif", ["hostname"], None, programs(tmp_path, "singularity"))
    assert words == [f"{tmp_path}/singularity", "exec", "a.sif", "hostname"]


def test_without_a_container_program_it_is_said_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="neither apptainer nor singularity is on PATH"):
        in_container("a.sif", ["hostname"], None, programs(tmp_path))


def test_launch_py_runs_a_script_that_only_the_container_has(tmp_path: Path) -> None:
    (tmp_path / "singularity").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "singularity").chmod(0o755)
    options = ["--ranks-per-node", "1", "--container", "a b.sif", "--gpu-vendor", "amd"]
    words = [sys.executable, str(ROOT / "scripts" / "launch.py"), *options, "/opt/train.py", "--lr", "1"]
    done = subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "exec --rocm a b.sif python -u /opt/train.py --lr 1\n"), done.stderr
