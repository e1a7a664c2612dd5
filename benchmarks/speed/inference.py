"""Folded encoders beside those without norms and those with other norms, and what was promised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Final, NamedTuple

import torch

from speed.encoders import SIZES, Kind, Size
from speed.engines import Case, Measured, measure_cases
from speed.rows import Known, Note, Row, by_case, case_of, figures
from speed.showing import Mark, View, milliseconds, print_table, text

KINDS: Final[tuple[Kind, ...]] = ("folded", "identity", "LayerNorm", "RMSNorm", "BatchNorm")
INPUTS: Final = ((1, 16), (1, 128), (16, 64))
"""(batch, tokens)."""
WAYS: Final = (("torch", "float32"), ("torch", "bfloat16"), ("onnxruntime", "float32"))
SAME: Final[Mapping[Kind, Kind]] = {"folded": "BatchNorm", "identity": "BatchNorm"}
"""Whose float32 outputs in torch an encoder has to give, where those are not its own."""


def title(row: Row) -> str:
    """Return the encoder in words."""
    size = Size(*case_of(row, Size._fields))  # type: ignore[arg-type]
    return size.label


def way(row: Row) -> str:
    """Return input, engine and type in words."""
    return f"{row['batch']}×{row['tokens']}, {row['engine']} {row['dtype']}"


VIEW: Final = View(
    case=("layers", "features", "placement", "batch", "tokens", "engine", "dtype"),
    title=lambda row: f"{title(row)}, {way(row)}",
    name=lambda row: str(row["provider"]),
    columns=milliseconds(2)
    | {
        "/ identity": lambda row: text(row, "ratio_to_identity", ".3f"),
        "/ LayerNorm": lambda row: text(row, "ratio", ".3f"),
    },
    heading="time of an encoder over the same one without norms",
    marks={
        "identity": Mark("no norms (identity)", "#30363c", "|"),
        "BatchNorm": Mark("BatchNorm, not folded", "#8fbf88", "s"),
        "LayerNorm": Mark("LayerNorm", "#e08b4f", "D"),
        "RMSNorm": Mark("RMSNorm", "#a374b5", "^"),
        "folded": Mark("folded", "#1f77b4", "o"),
    },
    series="provider",
    ratio="ratio_to_identity",
    panel=("layers", "features", "placement"),
    line=way,
    panel_title=title,
)


class Target(NamedTuple):
    """The folded encoder takes between `least` and `most` times what a rival takes."""

    rival: str
    most: float
    least: float = 0.0
    batch_of_one: bool = False

    @property
    def label(self) -> str:
        """The bounds in words."""
        bounds = f"≤ {self.most:.2f}" if not self.least else f"{self.least:.2f} to {self.most:.2f}"
        return bounds + (" at batch 1" if self.batch_of_one else "")


TARGETS: Final = (
    Target("identity", 1.02, 0.98),
    Target("LayerNorm", 0.95, batch_of_one=True),
    Target("RMSNorm", 0.90),
)


def measure_inference(seconds: float, known: Known, note: Note) -> Iterator[list[Row]]:
    """Yield the rows of each case; see `Measure` in `bench.py`."""
    cases = [
        Case(size, *one, torch.get_num_threads(), *inputs)
        for size, inputs, one in product(SIZES, INPUTS, WAYS)
    ]
    left = [case for case in cases if case_of(_fields(case), VIEW.case) not in known]
    found = measure_cases(left, KINDS, seconds=seconds, note=note, thorough=False, same=SAME)
    yield from map(make_rows, found)


def _fields(case: Case) -> Row:
    return {"engine": case.engine, "dtype": case.precision, **case.fields}


def make_rows(measured: Measured) -> list[Row]:
    """Return a row for each encoder."""
    medians = {kind: median(seconds) for (kind, _), seconds in measured.samples.items()}
    return [
        {
            "provider": kind,
            **_fields(measured.case),
            **figures(seconds, digits=1),
            "ratio": round(medians[kind] / medians["LayerNorm"], 4),
            "ratio_to_identity": round(medians[kind] / medians["identity"], 4),
        }
        for (kind, _), seconds in measured.samples.items()
    ]


def outcomes(rows: Sequence[Row]) -> list[tuple[Row, dict[Target, float]]]:
    """Return of each case the row of the folded encoder, and its time over each rival's."""
    found = []
    for case in by_case(rows, VIEW.case):
        by_provider = {row["provider"]: row for row in case}
        if {"folded", *(target.rival for target in TARGETS)} <= by_provider.keys():
            folded = by_provider["folded"]
            # To three digits: what is printed is what is judged.
            ratios = {
                target: round(folded["median_us"] / by_provider[target.rival]["median_us"], 3)
                for target in TARGETS
            }
            found.append((folded, ratios))
    return found


def verdict(target: Target, row: Row, ratio: float) -> str:
    """Return whether a target was met; nothing where it was not promised."""
    if target.batch_of_one and row["batch"] > 1:
        return ""
    return "met" if target.least <= ratio <= target.most else "missed"


def print_targets(rows: Sequence[Row]) -> None:
    """Print the folded encoder against its rivals on all cases, with what was promised."""
    found = outcomes(rows)
    if not found:
        return
    lines = [
        (VIEW.title(row), *(f"{x:.3f} {verdict(t, row, x):<6}" for t, x in ratios.items()))
        for row, ratios in found
    ]
    print_table("the folded encoder over that with", ("", *(t.rival for t in TARGETS)), lines)
    for target in TARGETS:
        words = [verdict(target, row, ratios[target]) for row, ratios in found]
        judged = [word for word in words if word]
        met = f"{judged.count('met')} of {len(judged)} met"
        print(f"folded / {target.rival}, target {target.label}: {met}")
