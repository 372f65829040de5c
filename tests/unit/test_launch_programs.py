"""Which programs are installed, which MPI an mpiexec belongs to, and commands in containers."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.host.gpus import count_gpus, gpu_vendor
from utils.tools.launch.launch_cli import in_container
from utils.tools.launch.launch_plan import Mpiexec, PlanError
from utils.tools.launch.methods import OpenMpi, Pals
from utils.tools.launch.programs import Programs

OPENMPI5 = "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: Fri\n"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def prints(path: Path, version: str) -> Path:
    return program(path, f"#!/bin/sh\ncat <<'END'\n{version}END\n")


def test_look_alikes_on_path_are_passed_over(tmp_path: Path) -> None:
    prints(tmp_path / "pbs/mpiexec", "pbs_version = 23.06.06\n")
    program(tmp_path / "torque/mpiexec", "#!/usr/bin/perl -w\n# starts ranks in Slurm\nexec 'srun';\n")
    real = prints(tmp_path / "mpi/mpiexec", OPENMPI5)
    path = f"{tmp_path}/pbs:{tmp_path}/torque:{tmp_path}/mpi:/usr/bin:/bin"
    assert Programs({"PATH": path}, pals_folder=tmp_path / "none").mpiexec == Mpiexec(str(real), OpenMpi, 5)
    assert Programs({"PATH": str(tmp_path / "pbs")}, pals_folder=tmp_path).mpiexec is None


def test_pals_of_the_loaded_module_precedes_an_mpiexec_on_path(tmp_path: Path) -> None:
    prints(tmp_path / "conda/mpiexec", MPICH)
    loaded = prints(tmp_path / "pals/1.8/bin/mpiexec", "PALS version 1.8\n")
    newest = prints(tmp_path / "pals/1.10/bin/mpiexec", "PALS version 1.10\n")
    path = f"{tmp_path}/conda:{tmp_path}/pals/1.8/bin:/usr/bin:/bin"
    programs = Programs({"PATH": path}, pals_folder=tmp_path / "pals")
    assert programs.pals == programs.mpiexec == Mpiexec(str(loaded), Pals)
    without_module = Programs({"PATH": "/bin"}, pals_folder=tmp_path / "pals")
    assert without_module.pals == Mpiexec(str(newest), Pals)


@pytest.mark.parametrize(("first", "other"), [("slurm", True), ("mpi", False)])
def test_srun_beside_an_mpiexec_may_be_another_one(tmp_path: Path, first: str, other: bool) -> None:
    for path in ("mpi/mpiexec", "mpi/srun", "slurm/srun"):
        program(tmp_path / path, "#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    path = os.pathsep.join(f"{tmp_path}/{name}" for name in (first, "mpi", "slurm"))
    found = Programs({"PATH": path}).mpiexec
    assert found == Mpiexec(str(tmp_path / "mpi/mpiexec"), OpenMpi, 4, other_srun=other)


def test_pbs_tmrsh_works_only_in_a_task_of_pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path / "pbs_tmrsh", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Programs({"PATH": str(tmp_path)}).find("pbs_tmrsh") is None
    assert Programs({"PATH": str(tmp_path), "PBS_JOBCOOKIE": "c"}).find("pbs_tmrsh") == str(found)


NVIDIA = [f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0" for number in range(4)]
IN_CONTAINER = ["dev/nvidia0", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm"]
AMD = [f"sys/class/kfd/kfd/topology/nodes/{number}/properties" for number in range(4)]  # two CPUs and two GPUs


@pytest.mark.parametrize(("files", "environ", "count", "vendor"), [
    ([], {}, 0, None), (NVIDIA, {}, 4, "nvidia"), (IN_CONTAINER, {}, 2, "nvidia"), (AMD, {}, 2, "amd"),
    (AMD, {"ROCR_VISIBLE_DEVICES": "1"}, 1, "amd"),
    *((NVIDIA, {"CUDA_VISIBLE_DEVICES": mask}, left, "nvidia") for mask, left in (
        ("", 0), ("2,3", 2), ("GPU-aa,GPU-bb,GPU-cc", 3), ("0,-1,1", 1), ("NoDevFiles", 0),
        ("0,1,2,3,4,5,6,7", 4)))])
def test_visible_gpus_are_counted(
        files: list[str], environ: dict[str, str], count: int, vendor: str | None, tmp_path: Path) -> None:
    for number, file in enumerate(files):
        program(tmp_path / file, f"cpu_cores_count 0\nsimd_count {440 * (number > 1)}\nmem_banks_count 1\n")
    assert (count_gpus(environ, tmp_path), gpu_vendor(tmp_path)) == (count, vendor)


def test_command_in_a_container(tmp_path: Path) -> None:
    programs = Programs({"PATH": str(tmp_path)})
    with pytest.raises(PlanError, match="neither apptainer nor singularity is on PATH"):
        in_container("a b.sif", ["hostname"], None, programs)

    program(tmp_path / "singularity", "")
    assert in_container("a b.sif", ["hostname"], None, programs) == [
        f"{tmp_path}/singularity", "exec", "a b.sif", "hostname"]
    program(tmp_path / "apptainer", "")
    assert in_container("a b.sif", ["train.py", "-x"], "nvidia", programs) == [
        f"{tmp_path}/apptainer", "exec", "--nv", "a b.sif", "python", "-u", "train.py", "-x"]
