"""The guide's commands for PBS, on the stand-in, or with --real-pbs on a real OpenPBS."""
from __future__ import annotations

import os
import subprocess
import time

import pytest

from tests.cluster.hosts import killed_at_end
from tests.cluster.pbs import HEAD, LOGIN_PATH, WORK, Pbs, PbsCluster
from tests.cluster.pbs_standin.jobs import USER
from tests.docs import pages
from tests.docs.pages import GUIDE, Shell


@pytest.mark.matrix
@pytest.mark.parametrize("name", pages.with_commands("pbs"))
def test_commands_write_what_the_page_shows(pbs: Pbs, name: str) -> None:
    folder = f"{WORK}/guide-{time.monotonic_ns()}"  # a real PBS keeps those of earlier runs
    local = pbs.local(pbs.write(f"{folder}/.keep", "")).parent
    kit = pages.copy_kit(local)
    owner = local.stat().st_uid
    for path in [kit, *kit.rglob("*")]:
        os.chown(path, owner, -1)
    environ = {"PATH": pages.path_with_python(LOGIN_PATH, kit)}
    if isinstance(pbs, PbsCluster):  # which has no /etc/pbs.conf, and may run where sbatch is installed
        environ["PBS_CONF_FILE"] = pbs.write(f"{folder}/pbs.conf", "PBS_EXEC=/opt/pbs\n")
    command = pbs.command(HEAD, ["bash"], USER, f"{folder}/ddp-kit", environ)
    process = subprocess.Popen(command, text=True, start_new_session=True, **pages.shell_options())  # type: ignore[call-overload]
    with killed_at_end(process):
        Shell(process).follow(pages.steps(GUIDE / name, "pbs"), seconds=180)
