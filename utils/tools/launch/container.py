"""A command that runs in a container of Apptainer or Singularity. Source: apptainer-exec(1)."""

from __future__ import annotations

from collections.abc import Sequence

from .launch_plan import PlanError, ProgramFinder

_PROGRAMS = ("apptainer", "singularity")  # two names of one program; the newer name first
# The options make the GPU libraries of the host available. Those of Intel come with the image.
_GPU_OPTIONS = {"nvidia": ["--nv"], "amd": ["--rocm"]}


def in_container(
    image: str, command: Sequence[str], vendor: str | None, programs: ProgramFinder
) -> list[str]:
    """Return the command that runs a script or program in an image.

    vendor: of the GPUs, one of gpus.VENDORS; None without GPUs. PlanError where PATH has neither
    Apptainer nor Singularity.
    """
    path = next((found for name in _PROGRAMS if (found := programs.find(name))), None)
    if path is None:
        raise PlanError(
            f"neither {' nor '.join(_PROGRAMS)} is on PATH, and one of them is needed to run "
            f"{image}. Load its module, or leave --container out"
        )
    is_script = command[0] == "-m" or command[0].endswith(".py")
    interpreter = ["python", "-u"] if is_script else []
    return [path, "exec", *_GPU_OPTIONS.get(vendor or "", []), image, *interpreter, *command]
