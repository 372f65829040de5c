"""A command in a container: whether Apptainer or Singularity is here, and the option that shows it this host's GPUs.

Source of the options: apptainer-exec(1). Not here: what is started where (plan.py).
"""
from __future__ import annotations

from collections.abc import Sequence

from .plan import Finder, PlanError

_PROGRAMS = ("apptainer", "singularity")  # the younger name of the same program first
# What a GPU needs of the host besides its devices, which are there anyway. Libraries of Intel's come with the image.
_OPTIONS = {"nvidia": ["--nv"], "amd": ["--rocm"]}


def in_container(image: str, command: Sequence[str], vendor: str | None, programs: Finder) -> list[str]:
    """The words that run a script or program in an image. vendor: of the GPUs (gpus.VENDORS); None without any.

    PlanError where neither program is on PATH.
    """
    path = next((path for name in _PROGRAMS if (path := programs.find(name)) is not None), None)
    if path is None:
        raise PlanError(f"neither {' nor '.join(_PROGRAMS)} is on PATH, and one of them is needed to run {image}. Load "
                        "its module, or leave --container out")
    interpreter = ["python", "-u"] if command[0] == "-m" or command[0].endswith(".py") else []
    return [path, "exec", *_OPTIONS.get(vendor or "", []), image, *interpreter, *command]
