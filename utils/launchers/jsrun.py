"""jsrun of IBM Job Step Manager (JSM), on LSF clusters such as Summit and Lassen.

Source: IBM's jsrun manual. Tested only against the documentation.
"""

from __future__ import annotations

from .launcher import Launcher


class Jsrun(Launcher):
    """jsmd on each host starts the tasks."""

    name = "jsrun"
    rank_variable = "JSM_NAMESPACE_RANK"
    world_size_variable = "JSM_NAMESPACE_SIZE"
    local_rank_variable = "JSM_NAMESPACE_LOCAL_RANK"
    local_world_size_variable = "JSM_NAMESPACE_LOCAL_SIZE"
    identity_variables = ("LSB_JOBID", "PMIX_NAMESPACE")
    parent_programs = ("jsmd", "jskd", "jsrun")
    also_sets = ("openmpi",)
    mpi_libraries = ("Open MPI", "IBM Spectrum MPI")
