"""Tables and figure of the page from the stored rows.

A table is a CSV file. Only seeds that every arm has in every setting count.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from scipy import stats

import rules
from conformer import ARMS

Row = dict[str, Any]


def write(folder: Path, rows: Sequence[Row], figure: Path | None = None) -> None:
    """Write the tables into files in a folder, and the figure."""
    study = Study(rows)
    tables = {
        "sensitivity": study.sensitivity(),
        "padded": study.accuracy("padded"),
        "alone": study.accuracy("alone"),
        "statistics": study.statistics(),
        "repair": study.repair(),
    }
    for name, lines in tables.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
    if figure is not None:
        draw(study, figure)


class Study:
    """Rows of the complete seeds."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {_key(row["of"]): row for row in rows}
        self.seeds = [seed for seed in rules.SEEDS if self._is_complete(seed)]

    def _is_complete(self, seed: int) -> bool:
        runs = [("run", arm, *setting, seed) for arm in ARMS for setting in rules.SETTINGS]
        repaired = [("mend", steps, seed) for steps in rules.REPAIRS]
        return all(of in self._rows for of in (*runs, *repaired))

    def values(self, of: tuple[Any, ...], *path: str) -> list[float | None]:
        """Return a number of each seed."""
        found = []
        for seed in self.seeds:
            value: Any = self._rows[(*of, seed)]
            for key in path:
                value = value[key]
            found.append(value)
        return found

    def run(self, arm: str, setting: tuple[str, int], *path: str) -> list[float | None]:
        """Return a number of the runs of an arm."""
        return self.values(("run", arm, *setting), *path)

    def sensitivity(self) -> list[list[str]]:
        """Return the table of answers changed by padding, by arm and setting."""
        head = ["norm", *(f"{_named(setting)}" for setting in rules.SETTINGS), "logits move by"]
        body = []
        for arm in ARMS:
            cells = []
            for setting in rules.SETTINGS:
                padded = self.run(arm, setting, "padded", "changed")
                bucket = self.run(arm, setting, "bucket", "changed")
                cells.append(f"{fmean(padded):.1f} / {fmean(bucket):.1f}")
            largest = max(
                value
                for setting in rules.SETTINGS
                for way in ("padded", "bucket")
                for value in self.run(arm, setting, way, "difference")
            )
            body.append([f"`{arm}`", *cells, f"{largest:.2g}"])
        return [head, *body]

    def accuracy(self, way: str) -> list[list[str]]:
        """Return accuracies in padded batches or alone, and gaps to plain BatchNorm."""
        head = ["norm", *(_named(setting) for setting in rules.SETTINGS)]
        body = []
        for arm in ARMS:
            cells = []
            for setting in rules.SETTINGS:
                own = self.run(arm, setting, way, "accuracy")
                cell = f"{fmean(own):.1f} ± {stdev(own):.1f}"
                if arm != "bn":
                    plain = self.run("bn", setting, way, "accuracy")
                    cell += f" ({gap(own, plain, 1)})"
                cells.append(cell)
            body.append([f"`{arm}`", *cells])
        shares = [fmean(self.run("bn", setting, "padding")) for setting in rules.SETTINGS]
        body.append(["padding in training", *(f"{100 * share:.0f} %" for share in shares)])
        return [head, *body]

    def statistics(self) -> list[list[str]]:
        """Return the table of losses by statistics, and TID with padding left out and counted."""
        head = ["norm", "batch", "running", "of the batch", "TID", "TID, padding counted"]
        body = []
        for arm in ARMS:
            for setting in rules.SETTINGS:
                losses = [self.run(arm, setting, f"{kind}_loss") for kind in ("running", "batch")]
                tid = [self.run(arm, setting, name) for name in ("var_tid", "padded_var_tid")]
                if None in losses[0]:
                    continue
                cells = [f"{fmean(values):.3f}" for values in losses]
                cells += ["–" if None in part else f"{100 * fmean(part):.1f} %" for part in tid]
                body.append([f"`{arm}`", _named(setting), *cells])
        return [head, *body]

    def repair(self) -> list[list[str]]:
        """Return the table of repairs of a model that was trained with plain BatchNorm."""
        head = ["what is done", "loss", "accuracy", "loss alone", "changed"]
        head += ["loss against nothing", "against the mask alone"]
        body = []
        none, mask = (self.values(("mend", of), "padded", "loss") for of in ((), ("mask",)))
        for steps in rules.REPAIRS:
            of = ("mend", steps)
            loss = self.values(of, "padded", "loss")
            body.append(
                [
                    ", then ".join(steps) or "nothing",
                    f"{fmean(loss):.3f}",
                    f"{fmean(self.values(of, 'padded', 'accuracy')):.1f} %",
                    f"{fmean(self.values(of, 'alone', 'loss')):.3f}",
                    f"{fmean(self.values(of, 'padded', 'changed')):.1f}",
                    *("–" if loss == other else _counted(loss, other) for other in (none, mask)),
                ]
            )
        return [head, *body]


def gap(values: Sequence[Any], others: Sequence[Any], digits: int) -> str:
    """Return the mean paired difference with its 95 % interval, or that there is none."""
    pairs = [one - other for one, other in zip(values, others, strict=True)]
    mean = fmean(pairs)
    half = float(stats.t.ppf(0.975, len(pairs) - 1)) * stdev(pairs) / len(pairs) ** 0.5
    if mean - half <= 0 <= mean + half:
        return "no difference"
    return f"{mean:+.{digits}f}, {mean - half:+.{digits}f} to {mean + half:+.{digits}f}"


def _counted(values: Sequence[Any], others: Sequence[Any]) -> str:
    """Return the gap, and the number of seeds with higher values."""
    higher = sum(one > other for one, other in zip(values, others, strict=True))
    return f"{gap(values, others, 3)} (higher in {higher} of {len(values)})"


def draw(study: Study, path: Path) -> None:
    """Draw the number of answers changed by padding, with a point per seed and setting."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for place, arm in enumerate(ARMS):
        values = [
            value
            for setting in rules.SETTINGS
            for value in study.run(arm, setting, "padded", "changed")
        ]
        # Shifted, so that equal numbers do not hide each other.
        x = [place + 0.6 * (i / len(values) - 0.5) for i in range(len(values))]
        axes.plot(x, values, "o", markersize=3)
    axes.set_xticks(range(len(ARMS)), list(ARMS))
    axes.set_ylabel("answers of 370 that padding changes")
    axes.set_ylim(bottom=-0.5)
    with mpl.rc_context({"svg.hashsalt": "powernorm"}):  # the same file every time
        figure.savefig(path, metadata={"Date": None})


def _named(setting: tuple[str, int]) -> str:
    order, size = setting
    return f"{size}" if order == "random" else f"{size}, {order}"


def _key(of: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(part) if isinstance(part, list) else part for part in of)
