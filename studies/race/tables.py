"""Table of the rules, and figure of budget against accuracy."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def write_tables(results: dict[str, Any], out: Path) -> None:
    """Write tables.md and budget.svg."""
    (out / "tables.md").write_text(_table(results), encoding="utf-8")
    _draw(results, out / "budget.svg")


def _table(results: dict[str, Any]) -> str:
    lines = [
        f"{results['num_settings']} settings of {', '.join(results['texts'])}, "
        f"{results['num_seeds']} seeds; {len(results['clear'])} clear cases.",
        "",
        "| rule | | cost | right in clear cases | as good as the best, all |",
        "| :--- | :--- | ---: | ---: | ---: |",
    ]
    for row in results["rules"]:
        clear = _share(row["right_clear"], row["num_clear"], row["interval_clear"])
        good = _share(row["as_good"], row["num"], row["interval"])
        lines.append(
            f"| {row['family']} | {row['rule']} | {100 * row['cost']:.0f} % | {clear} | {good} |"
        )
    return "\n".join(lines) + "\n"


def _share(count: int, total: int, interval: list[float] | None) -> str:
    if interval is None:
        return "–"
    low, high = (100 * end for end in interval)
    return f"{count} of {total} ({low:.0f} to {high:.0f} %)"


def _draw(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    families = list(dict.fromkeys(row["family"] for row in results["rules"]))
    for shift, family in enumerate(families):
        rows = sorted(
            (row for row in results["rules"] if row["family"] == family),
            key=lambda row: row["cost"],
        )
        # Slightly shifted, so that bars do not hide each other.
        x = [100 * row["cost"] + 0.4 * shift for row in rows]
        y = [100 * row["as_good"] / row["num"] for row in rows]
        ends = [[100 * end for end in row["interval"]] for row in rows]
        low = [value - end[0] for value, end in zip(y, ends, strict=True)]
        high = [end[1] - value for value, end in zip(y, ends, strict=True)]
        axes.errorbar(x, y, [low, high], fmt="o", label=family, capsize=2, markersize=4, lw=0.8)
    axes.axvline(30, color="0.7", lw=0.8, ls="--")
    axes.axhline(100 * results["goal"], color="0.7", lw=0.8, ls="--")
    axes.set_xlabel("cost, % of every norm with five seeds")
    axes.set_ylabel("choice as good as the best, %")
    axes.set_ylim(0, 104)
    axes.legend(frameon=False, fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "powernorm"}):  # the same file every time
        figure.savefig(path, metadata={"Date": None})
