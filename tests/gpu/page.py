"""The figures of scripts/test.sh --gpu in docs/performance.md: each part is between two markers."""
from __future__ import annotations

import re
from pathlib import Path


def write_part(page: Path, part: str, table: str) -> None:
    """Replace what is between <!-- gpu PART --> and <!-- end of gpu PART -->."""
    marks = re.compile(rf"(<!-- gpu {part} -->\n).*?(<!-- end of gpu {part} -->)", re.DOTALL)
    text = page.read_text(encoding="utf-8")
    page.write_text(marks.sub(lambda found: found[1] + table + found[2], text), encoding="utf-8")
