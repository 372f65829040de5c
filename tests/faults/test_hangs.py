"""Hangs of 8 ranks on 4 hosts, and pauses that are none. tests/unit/test_hang_watch.py needs no processes."""
from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.faults import hangs
from tests.faults.hangs import HangLab, Result
from tests.faults.replay import judge
from tests.matrix import with_all

# What a report must contain; LINE is the line of hangs.py that ends with "# hang: KIND", WORKER that of loader workers.
BEHIND = r"rank 5 on h3 .* did not enter collective \d+, .* It is at LINE.*waits in all_reduce of \[\[16\]\]"
OTHER = r"rank 5 on h3 .* entered a different collective \d+: {0} at LINE.*The other ranks entered {1}"
LATE = (r"rank 5 on h3 .* did not enter .*collective \d+ of group .*\(ranks {0}\), in which {1}.* "
        r"It is at LINE.*Rank \d waits in")
CIRCLE = (r"which rank is wrong cannot be told: .*rank {0} on h\d \S+ \d+\) waits for ranks? {1} in {2}.* at LINE.*; "
          "rank 5 on h3 .* waits for ranks? {3}")
POLLS = r"all ranks have been at LINE for (?:[4-9]|1\d|20) s, without a collective"
# For each kind the limit in seconds, and the cause; the ranks that it blames are 5 but for those of BLAMED.
KINDS = {
    "skipped-collective": (1.5, OTHER.format(r"all_reduce of \[\[16\]\]", "barrier at")),
    "other-shape": (1.5, OTHER.format(r"all_reduce of \[\[4000\]\]", r"all_reduce of \[\[16\]\]")),
    "stopped": (3.0, r"rank 5 on h3 .* does not respond: its process is stopped by a signal .* at LINE.*all_reduce"),
    "cut-host": (3.0, r"rank 4 on h3 .* network is cut.* rank 5 on h3 .* network is cut.* at LINE.*all_reduce"),
    "endless-loop": (1.5, r"rank 5 on h3 .* is busy \(\d+ % of a core.* at LINE.*\n[^$]*?" + BEHIND),
    "blocked-loader": (1.5, BEHIND.replace("LINE", "LINE, and waits for its DataLoader workers at WORKER", 1)),
    "loaders-all": (1.5, "all ranks wait for their DataLoader workers, which are at LINE$"),
    "polls": (1.5, POLLS), "polls-lock": (1.5, POLLS),
    "blocked-teardown": (1.5, r"rank 5 on h3 .* is idle after the other ranks have left. It is at LINE"),
    "exited": (1.5, r"rank 5 on h3 left .*at LINE.* after \d+ collectives, and other ranks still wait for it"),
    "group-skipped": (1.5, CIRCLE.format(4, 5, "barrier", "4,6-7")),
    "hsdp": (12.0, LATE.format("4-7", "ranks 4,6-7 wait")),
    "recv-unsent": (1.5, BEHIND),
    "pipeline": (1.5, "which rank is wrong cannot be told: .*rank 4 on h3 .* is at .*; "
                      "rank 5 on h3 .* is at LINE; rank 6"),
    "thread": (4.0, LATE.format("0-7", "ranks 0-4,6-7 wait")),
    "gil": (1.5, "rank 5 on h3 .* does not respond: its process is in native code. Its last .*waits in all_reduce"),
    "aborted-itself": (1.5, r"rank 5 on h3 .* ended without a report.*gloo has aborted it: rank \d waits in all_reduce "
                            r"of \[\[4000\]\] at .*, and rank 5 entered another, smaller collective"),
}
# tests/unit/test_hang_watch.py and test_late_ranks.py judge positions like those of these.
IN_TABLES = ("blocked-teardown", "group-skipped", "hsdp", "recv-unsent", "pipeline", "thread")
BLAMED = {"cut-host": {4, 5}, "group-skipped": set(), "pipeline": set(), "aborted-itself": set(),
          "loaders-all": set(), "polls": set(), "polls-lock": set()}
UNCHANGED = pytest.mark.parametrize("unchanged", [False, *with_all(True)], ids=["ported", "unchanged"])
LOST = (r"A host is lost: no response for \d+ s.*\n(?:ddpkit-failure .*\n)?rank 4 on h3 .* does not respond to h1: its "
        r"host is down, .*"
        r"rank 5 on h3 .* does not respond to h1: its host is down")


@pytest.fixture(scope="module")
def hang_lab(need: Callable[[str], Path]) -> Iterator[HangLab]:
    need("hosts")
    with Hosts(4) as hosts, contextlib.closing(HangLab(hosts)) as lab:
        yield lab


def marked(kind: str) -> str:
    """A pattern of the lines of hangs.py that end with "# hang: KIND"."""
    lines = enumerate(Path(hangs.__file__).read_text().splitlines(), 1)
    numbers = "|".join(str(number) for number, line in lines if re.search(rf"# hang: {kind}(?![\w-])", line))
    return rf"[^,]*hangs\.py, line (?:{numbers}), in \w+"


def check(result: Result, cause: str, kind: str) -> None:
    """Compare the cause in the report, with its source line, and the ranks that these lines blame."""
    cause = cause.replace("LINE", marked(kind)).replace("WORKER", marked("loaders-all"))
    found = re.search(cause, result.output, re.MULTILINE)
    assert found, result.output
    lines = re.findall(r"ddpkit-failure (.*)", result.output)
    at_fault = {"cut-host": {None, 0}, "aborted-itself": {5}}.get(kind, BLAMED.get(kind, {5}) or {None})
    assert lines and {json.loads(line)["rank"] for line in lines} <= at_fault, result.output  # 0: on the other side
    whole_lines = re.search(r".*" + re.escape(found[0]) + r".*", result.output)
    blames = r"rank (\d) on h\d(?: \(pid \d+\))? (?:did|does|entered|is idle|is in no|left)"
    assert whole_lines and {int(rank) for rank in re.findall(blames, whole_lines[0])} == BLAMED.get(kind, {5})


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in IN_TABLES), *with_all(*IN_TABLES)])
def test_hang_is_explained_and_ends_the_job(hang_lab: HangLab, kind: str) -> None:
    explain(hang_lab, kind, unchanged=False)


@pytest.mark.parametrize("kind", with_all(*KINDS))
def test_hang_of_an_unchanged_script_is_explained(hang_lab: HangLab, kind: str) -> None:
    explain(hang_lab, kind, unchanged=True)


def explain(hang_lab: HangLab, kind: str, unchanged: bool) -> None:
    limit, cause = KINDS[kind]
    result = hang_lab.run(kind, limit, unchanged=unchanged)
    check(result, cause, kind)
    ended = [status for rank, status in enumerate(result.statuses) if rank != 5 or kind != "stopped"]
    assert None not in ended and any(ended) and len(result.remaining) == (kind == "stopped"), result
    if kind == "gil":
        assert re.search(r'^Timeout \(.*\n(.*\n)*? .*hangs\.py", line \d+ in go_wrong', result.output, re.MULTILINE)
    if kind in ("blocked-loader", "loaders-all", "polls"):
        again, ranks = judge(next(result.folder.glob("hang-*/positions.json")))
        assert ranks == BLAMED.get(kind, {5}) and again in result.output
    if kind == "blocked-loader":
        files = sorted(result.folder.glob("hang-*/rank[0-9]*.txt"))
        assert [file.name for file in files] == [f"rank{rank}-h{rank // 2 + 1}.txt" for rank in range(8)]
        assert files[5].read_text().partition("Thread MainThread:")[2].lstrip().startswith('File "')
        hung, waiting = files[5].read_text(), files[0].read_text()
        assert "hangs.py" in hung and " in go_wrong" in hung and "all_reduce of [[16]]" in hung
        assert "NOT ENDED, at " in waiting and "NOT ENDED" not in hung


@UNCHANGED
def test_lost_host_ends_the_job_without_hang_timeout(hang_lab: HangLab, unchanged: bool) -> None:
    """Also on the lost host itself. A cut network or a switched-off host closes no connection."""
    result = hang_lab.run("cut-host", limit=0, seconds=40, lost_seconds=6, unchanged=unchanged)
    check(result, LOST, "cut-host")
    waiting = [status for rank, status in enumerate(result.statuses) if rank != 5]  # which sleeps in no collective
    assert waiting == [1] * 7, result.output
    assert re.search(r"\nrank 0 on h1 .* does not respond to h3", result.output)


@UNCHANGED
def test_killed_rank_ends_the_job_without_hang_timeout(hang_lab: HangLab, unchanged: bool) -> None:
    """Also ranks that wait in a collective without it, or in one of NCCL, which does not raise."""
    result = hang_lab.run("killed", limit=0, seconds=40, lost_seconds=6, unchanged=unchanged)
    assert result.statuses == [1] * 5 + [-9] + [1] * 2, result.output
    ended = r"\nrank 5 on h3 .* ended without a report"
    for line in (r"A rank has ended: no collective for \d+ s since then\n", ended):
        assert re.search(line, result.output), result.output


@UNCHANGED
def test_pauses_are_no_hang(hang_lab: HangLab, unchanged: bool) -> None:
    """Trainings that pause two to three times as long as the limit, or in which one rank computes that long."""
    kinds = ["busy-hsdp", "evaluate", "busy", "compute", "write", "compile", "busy-pipeline", "busy-thread"]
    if unchanged:
        kinds.remove("evaluate")  # which reports its progress
    with ThreadPoolExecutor(3) as pool:
        results = dict(zip(kinds, pool.map(lambda kind: hang_lab.run(
            kind, 12.0 if kind == "busy-hsdp" else 4.0, 100, None, unchanged), kinds), strict=True))
    for kind, result in results.items():
        assert result.statuses == [0] * 8 and "The ranks hang" not in result.output, (kind, result.output)
    for kind, notices in ({} if unchanged else {"evaluate": 0}).items() | {"busy": 1}.items():
        found = re.findall(r"rank 0 on h1 .* is busy \(.*core.*\) at .*hangs.py, line \d+, in compute. .*report_"
                           r"progress\(\) there, or set a larger hang_timeout. Otherwise the job ends after 12 s",
                           results[kind].output)
        assert len(found) == notices, results[kind].output
