"""Hold ddpkit plan against published training speeds: python -m tests.published

  --write   write the table and the picture into docs/
  --fit     print the constants of jobs/hardware.yaml that fit best
  --trace   trace the programs that are not in traces.json.gz; needs torchvision, timm and transformers
"""
from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from .cases import measurements, trace_all
from .compare import Comparison, Scaled, efficiencies, fit, is_fitted, summary, times

DOCS = Path(__file__).parents[2] / "docs"
MARKS = ("<!-- published -->", "<!-- end of published -->")


def grouped(found: Sequence[Comparison], key: Callable[[Comparison], str]) -> dict[str, list[Comparison]]:
    groups = defaultdict(list)
    for comparison in found:
        groups[key(comparison)].append(comparison)
    return dict(sorted(groups.items()))


def rows_of_table(found: Sequence[Comparison]) -> list[str]:
    lines = []
    groups = {**grouped(found, lambda one: one.row.gpu), **grouped(found, lambda one: one.row.kind)}
    for name, members in groups.items():
        errors = sorted(one.error for one in members)
        lines.append(f"| {name} | {len(members)} | {errors[len(errors) // 2]:.2f} | {errors[-1]:.2f} | "
                     f"{sum(one.inside for one in members)} |")
    return lines


def text_of_documentation(found: Sequence[Comparison], scaled: Sequence[Scaled]) -> str:
    """Return what stands between the marks of docs/performance.md."""
    fitted, others = ([one for one in found if is_fitted(one.row) == wanted] for wanted in (True, False))
    inside = sum(one.inside for one in scaled)
    worst = max(one.step.low_efficiency - one.efficiency for one in scaled)
    gpus = max(one.row.gpus for one in scaled)
    lines = ["`python -m tests.published`: error factor of the predicted time of a step on one GPU.", "",
             "| rows | number | median, 9 of 10, largest | published value in the printed range |", "|---|---|---|---|"]
    for name, members in (("all", found), ("fitted", fitted), ("held back: other sources and GPUs", others)):
        lines.append(f"| {name} | {len(members)} | {summary([one.error for one in members])} | "
                     f"{sum(one.inside for one in members)} |")
    lines += ["", "| GPU, or network and precision | number | median error | largest | in the range |",
              "|---|---|---|---|---|", *rows_of_table(found), "",
              f"Efficiency on 2 to {gpus} GPUs, with the published time of one: the published value is in the printed "
              f"range in {inside} of {len(scaled)} rows, and at most {worst:.3f} below it.", "",
              "![predicted against published times](published.png)"]
    return "\n".join(lines)


def write(found: Sequence[Comparison], scaled: Sequence[Scaled]) -> None:
    page = DOCS / "performance.md"
    begin, end = map(re.escape, MARKS)
    text = f"{MARKS[0]}\n{text_of_documentation(found, scaled)}\n{MARKS[1]}"
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: text, page.read_text(encoding="utf-8"), flags=re.DOTALL),
                    encoding="utf-8")
    draw(found, DOCS / "published.png")


def draw(found: Sequence[Comparison], path: Path) -> None:
    """Draw predicted against published times, with the diagonal, by kind of network."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5.4), dpi=110)
    # Of a micro-step: accumulation makes some a hundred times longer.
    published = [one.row.seconds / one.row.accumulate for one in found]
    ends = (min(published) / 1.6, max(published) * 1.6)
    axes.plot(ends, ends, color="0.4", linewidth=1, label="equal")
    for factor in (1 / 1.3, 1.3):
        axes.plot(ends, [factor * end for end in ends], color="0.75", linewidth=0.8, linestyle="--",
                  label="factor 1.3" if factor > 1 else None)
    for (name, members), color in zip(grouped(found, lambda one: one.row.kind.split()[0]).items(), ("C0", "C1"),
                                      strict=True):
        for fitted, face in ((True, color), (False, "none")):
            chosen = [one for one in members if is_fitted(one.row) == fitted]
            axes.scatter([one.row.seconds / one.row.accumulate for one in chosen],
                         [one.predicted / one.row.accumulate for one in chosen], s=22, facecolors=face,
                         edgecolors=color, linewidths=1, label=f"{name}, {'fitted' if fitted else 'held back'}")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published time of a micro-step, s",
             ylabel="predicted, s")
    axes.set_aspect("equal")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})


def outside(found: Comparison | Scaled) -> str:
    return "" if found.inside else ", outside its range"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--write", "--fit", "--trace"):
        parser.add_argument(option, action="store_true")
    args = parser.parse_args()
    if args.trace:
        trace_all()
    if args.fit:
        for name, value in asdict(fit()).items():
            print(f"  {name}: {value:.3g}")
        return
    found, scaled = times(), efficiencies()
    for name, members in grouped(found, lambda one: f"{one.row.gpu}, {one.row.kind}").items():
        print(name)
        for one in members:
            print(f"  {one.row.id:<42} published {one.row.seconds * 1e3:9.1f} ms, "
                  f"predicted {one.predicted * 1e3:9.1f} ms, ratio {one.ratio:.2f}{outside(one)}")
    print("efficiency")
    for point in scaled:
        print(f"  {point.row.id:<42} published {point.efficiency:.3f}, predicted {point.step.low_efficiency:.3f} to "
              f"{point.step.efficiency:.3f}{outside(point)}")
    print(text_of_documentation(found, scaled).rsplit("\n", 2)[0])
    others = len(measurements()) - len(found) - len(scaled)
    print(f"{others} rows with a program are compiled, uncertain, or have no row on one GPU")
    if args.write:
        write(found, scaled)


if __name__ == "__main__":
    main()
