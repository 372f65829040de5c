"""The page of ddpkit plan, in a real browser: the same digits as the command prints."""
from __future__ import annotations

import base64
import json
import random
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_plan import links_file
from utils.tools.plan import plan_cli as cli
from utils.tools.plan import script
from utils.tools.plan.script import trace_script

IN_THE_PAGE = """<script>
const cells = id => [...byId(id).rows].map(row => [...row.cells].map(cell => cell.textContent));
const results = PAGES.map(page => {
  load(page);
  const result = plan(settings);
  result.scaling.forEach(point => { delete point.transfers; delete point.backward; });
  return {
    ...result, title: byId("title").textContent, table: cells("scaling"), sizes: cells("memory"),
    limits: byId("crossing").textContent, words: [...document.querySelectorAll("#words li")].map(e => e.textContent),
    fields: Object.fromEntries(FIELDS.map(([name, , , , unit]) => [name, [byId(name).value,
      parseField(unit, byId(name).value) / settings[name]]])),
  };
});
const parsed = TEXTS.map(([unit, text]) => parseField(unit, text));
change("bucket_mb", 5);
change("accumulate", 0.1);
const changed = {settings, figures: byId("figures").textContent};
document.body.innerHTML = "<pre id=results></pre>";
byId("results").textContent = btoa(unescape(encodeURIComponent(JSON.stringify({results, parsed, changed}))));
</script></body>"""

SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from tests.unit.plan_models import CASES, HELD_OUT
torch.distributed.init_process_group("gloo")
case = {{**CASES, **HELD_OUT}}[{name!r}]
model = DDP(case.build(), bucket_cap_mb={bucket})
optimizer = case.optimizer(model.parameters())
while True:
    for _ in range(case.accumulate):
        case.step(model).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCRIPTS = [  # model, bucket_cap_mb, options of the command
    ("CNN with BatchNorm, SGD momentum", None, ""), ("GPT, AdamW", 0.125, "--spread 0.05"),
    ("GPT, accumulation over 4", None, "--compute-seconds 0.01"), ("ViT with dropout, AdamW", 0.25, "--ring"),
    ("VAE, Adamax", None, "--bucket-cap-mb 0.5"), ("U-Net, RMSprop", 1, "--between 1e8 --spread 0"),
    ("GPT, autocast to bfloat16", 0.5, "--compute-seconds 0.1234"), ("MLP, SGD", None, "--between ethernet-10")]
SITES = ["perlmutter --nodes 3", "polaris --nodes 64", "lumi", "vista --gpus 1500"]


def random_options(chance: random.Random, folder: Path) -> str:
    def between(least: float, most: float) -> float:
        return float(f"{least * (most / least) ** chance.random():.4g}")
    buckets = f" --bucket-cap-mb {between(1, 500)}" if chance.random() < 0.6 else ""
    ring = " --ring" if chance.random() < 0.5 else ""
    links = links_file(folder / "links.json", (between(1e9, 1e12), between(1e-7, 1e-4)),
                       (between(1e8, 1e12), between(1e-6, 1e-3)), hosts=1)
    return (f"--parameters {between(1e5, 2e10)} --precision {chance.choice(('fp32', 'amp', 'bf16', 'bf16-pure'))} "
            f"--optimizer {chance.choice(('adamw', 'sgd', 'sgd-momentum'))} --gpus {int(between(1, 1500))} "
            f"--gpus-per-node {int(between(1, 16))} --links {links} "
            f"--compute-seconds {between(1e-2, 10)} --accumulate {int(between(1, 32))}{buckets}{ring}")


def printed_parts(text: str) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Return the cells of the scaling table, those of the memory, and the lines about limits."""
    rows = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    return ([row for row in rows if len(row) == 7],
            [row for row in rows if len(row) == 2 and re.fullmatch(r"[\d.]+ .?B", row[1])],
            [row[0] for row in rows if row[0].startswith("at least ")])


def test_page_has_the_digits_of_the_command_in_a_browser(
        tmp_path: Path, need: Callable[[str], Path], capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight scripts on four sites, and twenty commands without a script; one start of a browser."""
    traces: dict[str, Any] = {}  # of each script, which sites have no effect on

    def trace_once(path: str, words: list[str], **options: Any) -> Any:
        return traces.get(path) or traces.setdefault(path, trace_script(path, words, **options))

    monkeypatch.setattr(script, "trace_script", trace_once)
    browser, page = need("browser"), tmp_path / "page.html"
    data_of_page = re.compile("^let data = (.*);$", re.MULTILINE)

    def run(words: list[str]) -> str:
        assert cli.main(words) == 0, capfd.readouterr().err
        return capfd.readouterr().out

    commands = []
    for name, bucket, options in SCRIPTS:
        file = tmp_path / f"{name.split(',')[0].replace(' ', '_')}{bucket}.py"
        file.write_text(SCRIPT.format(name=name, bucket=bucket))
        commands += [f"--site {site} {options} {shlex.quote(str(file))}" for site in SITES]
    chance, exact, pages, texts = random.Random(0), [], [], []
    for command in [*commands, *(random_options(chance, tmp_path) for _ in range(20))]:
        texts.append(run(["--html", str(page), *shlex.split(command)]))
        found = data_of_page.search(page.read_text())
        assert found and "http" not in page.read_text().replace(found[0], ""), "the page must need no network"
        pages.append(json.loads(found[1]))
        exact.append(json.loads(run(["--json", *command.split()])) if "links.json" in command else None)

    typed = [["s", "4 µs"], ["s", "4 us"], ["s", "0.2"], ["s", "17ms"], ["B/s", "25 GB/s"], ["B/s", "25e9"],
             ["", "124 M"], ["%", "2.1 %"], ["MiB", "25 MiB"], ["whole", "8.4"], ["s", "4 GB"], ["B/s", "fast"]]
    code = IN_THE_PAGE.replace("PAGES", json.dumps(pages).replace("<", "\\u003c")).replace("TEXTS", json.dumps(typed))
    page.write_text(page.read_text().replace("</body>", code))
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                           f"--user-data-dir={tmp_path}/profile", page.as_uri()],
                          capture_output=True, text=True, timeout=120)
    match = re.search('<pre id="results">(.*)</pre>', done.stdout)
    assert match, done.stdout[-500:] + done.stderr[-2000:]
    shown = json.loads(base64.b64decode(match[1]))

    for text, data, result, plan in zip(texts, pages, shown["results"], exact, strict=True):
        table, sizes, limits = printed_parts(text)
        assert len(table) >= 12 and len(sizes) >= 4 and len(limits) == 2, text
        assert result["title"] == text.splitlines()[0]
        for cells, other_cells in zip(table, result["table"], strict=True):
            assert other_cells == cells
        assert (result["sizes"], result["limits"].split("; ")) == (sizes, limits)
        assert all(f"  {word}\n" in f"{text}\n" for word in data["notes"])
        for name, (value, parsed) in result["fields"].items():
            assert value == "0 %" or parsed == pytest.approx(1, rel=0.05), (name, value)
            assert name in ("gpus", "gpus_per_node", "accumulate", "parameters") or re.search("[a-zµ%]$", value, re.I)
        if plan is not None:
            assert result["memory"] == pytest.approx(plan["memory"], rel=1e-9)
            for point, other in zip(plan["scaling"], result["scaling"], strict=True):
                assert other == pytest.approx(point, rel=1e-9, abs=1e-12)
    expected = [4e-6, 4e-6, 0.2, 0.017, 25e9, 25e9, 124e6, 0.021, 25, 8, None, None]  # None: not a number
    assert [value and pytest.approx(value) for value in expected] == shown["parsed"]
    assert shown["changed"]["settings"]["bucket_mb"] == 5 and not shown["changed"]["settings"]["default_buckets"]
