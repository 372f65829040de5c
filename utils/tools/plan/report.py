"""Write a prediction as text and as a page with sliders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .predict import COMMUNICATION_SHARE, EXPECTED_MAXIMA, OPTIMIZER_STATES, PRECISIONS, percentages

_PAGE = Path(__file__).with_name("page.html")
GB = 1e9


def as_text(plan: dict[str, Any]) -> str:
    """Return a report to read."""
    lines = []
    if plan["assumed"]:
        lines += [f"Assumed: {', '.join(plan['assumed'])}", ""]
    if plan["memory"]:
        total = sum(plan["memory"].values())
        where = f", at its peak in {plan['peak']}" if plan["peak"] else ""
        lines += [f"Memory per GPU: {total / GB:.2f} GB{where}"]
        lines += [f"  {name:<12} {size / GB:9.3f} GB" for name, size in plan["memory"].items()]
    if largest := plan["largest_micro_batch"]:
        samples, doubt = largest["samples"], largest["doubt"]
        found = "unknown" if samples is None else f"{samples} samples" if samples else "none fits"
        found += f", not confirmed: {doubt}" if doubt else ""
        lines += ["", f"Largest micro-batch on {largest['gpu']}: {found}"]
    if plan["scaling"]:
        lines += ["", "Scaling, each GPU with its own batch"]
        head = ("GPUs", "step s", "computed", "communic.", "exposed", "GB sent")
        lines.append("  " + " ".join(f"{text:>10}" for text in head) + "    efficiency")
        for row in plan["scaling"]:
            numbers = (
                *(row[f"{key}_seconds"] for key in _SECONDS),
                row["sent_bytes"] / GB,
            )
            cells = " ".join(f"{number:>10.4f}" for number in numbers)
            efficiency = percentages(row["low_efficiency"], row["efficiency"], 1)
            lines.append(f"  {row['gpus']:>10} {cells}  {efficiency}")
        for level, size in plan["holds_up_to"].items():
            limit = (
                f"on up to {size} GPU{'s' * (size > 1)}"
                if size
                else f"on all of up to {row['gpus']} GPUs"
            )
            lines.append(f"  at least {float(level):.0%} {limit}")
    if plan["advice"]:
        lines += ["", "Advice", *(f"  {text}" for text in plan["advice"])]
    if plan["notes"]:
        lines += ["", "Notes", *(f"  {text}" for text in plan["notes"])]
    return "\n".join(lines).strip()


_SECONDS = ("step", "computation", "communication", "exposed")


def write_page(inputs: dict[str, Any], path: Path) -> None:
    """Write the page with sliders. inputs: where they stand at first."""
    data = {
        "inputs": inputs,
        "precisions": {name: vars(kind) for name, kind in PRECISIONS.items()},
        "optimizer_states": OPTIMIZER_STATES,
        "expected_maxima": EXPECTED_MAXIMA,
        "communication_share": COMMUNICATION_SHARE,
    }
    text = _PAGE.read_text(encoding="utf-8")
    path.write_text(text.replace("/*DATA*/ null", json.dumps(data)), encoding="utf-8")
