"""Stand-ins for the commands of Slurm and PBS, and what the real ones have printed."""
from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"

class Commands:
    """Programs in a folder that is PATH; each prints what it was given, and logs its words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("bash", "env", "git"):
            (folder / name).symlink_to(shutil.which(name) or name)
        self._cases: dict[str, list[str]] = {}

    def add(self, name: str, output: str = "", error: str = "", status: int = 0, when: str = "") -> None:
        """Let a program print and exit. The case added last comes first.

        when: only for calls with this word among their arguments.
        """
        case = f"printf %s {shlex.quote(output)}; printf %s {shlex.quote(error)} >&2; exit {status}"
        cases = self._cases.setdefault(name, [])
        cases.insert(0, f'case " $* " in *" {when} "*) {case};; esac' if when else case)
        self._write(name, "\n".join(cases))

    def add_submitter(self, name: str, *, refused: int = 0, error: str = "") -> None:
        """Add sbatch or qsub, which prints 101, 102, ..., and refuses the submission with one number."""
        server = ".head" if name == "qsub" else ""
        refuse = f"printf %s {shlex.quote(error)} >&2; exit 1"
        self._write(name, f"echo >> {name}.count; mapfile count < {name}.count\n"
                          f"[ ${{#count[@]}} != {refused} ] || {{ {refuse}; }}\n"
                          f"echo $((100 + ${{#count[@]}})){server}")

    def _write(self, name: str, lines: str) -> None:
        log = f"cd {shlex.quote(str(self.folder))}; printf '%q ' {name} \"$@\" >> calls; echo >> calls"
        self.write(name, f"#!/bin/bash\n{log}\n{lines}\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def calls(self, name: str = "") -> list[list[str]]:
        """The words of each call, of one program or of all."""
        log = self.folder / "calls"
        calls = [shlex.split(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [words for words in calls if name in ("", words[0])]


def slurm_output(name: str) -> str:
    recording = json.loads((RECORDINGS / "slurm" / "answers" / f"{name}.json").read_text())
    return str(recording["output"])


def pbs_recording(name: str) -> Any:
    return json.loads((RECORDINGS / "pbs" / f"{name}.json").read_text())


def pbs_record(name: str) -> dict[str, Any]:
    """The last record of qstat in a recording, of the job that it is about."""
    recording = pbs_recording(name)
    if "Jobs" in recording:
        [recording] = recording["Jobs"].values()
    return dict(recording.get("final") or recording.get("afterok") or recording)


def pbs_job(record: dict[str, Any], job_id: str = "7.server") -> str:
    """What qstat -f -F json prints about a job, of which some attributes are known."""
    known = {name: value for name, value in record.items() if value is not None}
    return json.dumps({"Jobs": {job_id: known}})
