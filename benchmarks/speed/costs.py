"""The cost of norms at inference, in each engine and precision: every rival at its best setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Final

from speed.encoders import SIZES, Kind
from speed.engines import Case, Measured, measure_cases
from speed.inference import title
from speed.rows import Known, Note, Row, by_case, case_of, figures
from speed.showing import Mark, View, milliseconds, print_table, text

RIVALS: Final[tuple[Kind, ...]] = ("LayerNorm", "RMSNorm", "DyT", "folded")
BASELINE: Final = RIVALS[0]
INPUTS: Final = (1, 128)
"""Sequences, and tokens of each."""
THREADS: Final = (1, 2)
COMPILED_FEATURES: Final = 384
"""Width of the encoders that inductor compiles, which takes longer than all that is timed."""
PRECISIONS: Final = {
    "torch": ("float32", "bfloat16", "int8 dynamic"),
    "inductor": ("float32", "bfloat16"),
    "onnxruntime": ("float32", "int8 dynamic", "int8 static", "int8 static, all"),
    "openvino": ("float32", "bfloat16", "int8 static", "int8 static, all"),
}
"""By engine. Static: the matrix products, or all operators that onnxruntime's quantizer knows.
onnxruntime has no kernels in bfloat16 for processors, and OpenVINO none for onnxruntime's dynamic
quantization."""


def way(row: Row) -> str:
    """Return engine, precision and threads in words."""
    threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
    return f"{row['engine']} {row['precision']}, {threads}"


VIEW: Final = View(
    case=(
        *("layers", "features", "placement", "batch", "tokens"),
        *("engine", "precision", "threads"),
    ),
    title=lambda row: f"{title(row)}, {way(row)}",
    name=lambda row: f"{row['rival']} {row['setting']}".strip(),
    columns=milliseconds(2)
    | {
        "/ LayerNorm": lambda row: text(row, "ratio", ".3f"),
        "error": lambda row: text(row, "error", ".1e"),
        "peak MB": lambda row: text(row, "peak_bytes", ".1f", 1e-6),
    },
    heading="time of an encoder over the one with LayerNorm, each in its best setting",
    marks={
        "LayerNorm": Mark("LayerNorm", "#e08b4f", "D"),
        "RMSNorm": Mark("RMSNorm", "#a374b5", "^"),
        "DyT": Mark("DyT", "#8fbf88", "s"),
        "folded": Mark("folded", "#1f77b4", "o"),
    },
    series="rival",
    panel=("layers", "features", "placement"),
    line=way,
    panel_title=title,
)


def cost_cases() -> list[Case]:
    """Return what is measured, encoder after encoder."""
    return [
        Case(size, engine, precision, threads, *INPUTS)
        for size in sorted(SIZES, key=lambda size: size.features)
        for engine, precisions in PRECISIONS.items()
        for precision in precisions
        for threads in THREADS
        if size.features == COMPILED_FEATURES or engine != "inductor"
    ]


def measure_costs(seconds: float, known: Known, note: Note) -> Iterator[list[Row]]:
    """Yield the rows of each case; see `Measure` in `bench.py`."""
    cases = [case for case in cost_cases() if case_of(_fields(case), VIEW.case) not in known]
    if not find_spec("openvino"):
        note("openvino is not installed (pip install openvino) and left out")
        cases = [case for case in cases if case.engine != "openvino"]
    found = measure_cases(cases, RIVALS, seconds=seconds, note=note, thorough=True)
    yield from map(make_rows, found)


def _fields(case: Case) -> Row:
    way = {"engine": case.engine, "precision": case.precision, "threads": case.threads}
    return way | case.fields


def make_rows(measured: Measured) -> list[Row]:
    """Return a row for each rival and setting."""
    medians = {key: median(seconds) for key, seconds in measured.samples.items()}
    baseline = min(found for (rival, _), found in medians.items() if rival == BASELINE)
    return [
        {
            "rival": key[0],
            "setting": key[1],
            **_fields(measured.case),
            **figures(seconds, digits=1),
            "ratio": round(medians[key] / baseline, 4),
            "error": float(f"{measured.errors[key]:.3g}"),
            "peak_bytes": measured.peaks.get(key),
        }
        for key, seconds in measured.samples.items()
    ]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return of each case and rival the row of its fastest setting, in the order of the rivals."""
    found = []
    for case in by_case(rows, VIEW.case):
        fastest: dict[str, Row] = {}
        for row in sorted(case, key=lambda row: float(row["median_us"])):
            fastest.setdefault(row["rival"], row)
        found += [fastest[rival] for rival in RIVALS if rival in fastest]
    return found


def print_best(rows: Sequence[Row]) -> None:
    """Print of all cases every rival in its best setting, over LayerNorm in its best one."""
    for encoder in by_case(best_rows(rows), VIEW.panel):
        lines = []
        for case in by_case(encoder, VIEW.case):
            ratios = {row["rival"]: text(row, "ratio", ".3f") for row in case}
            lines.append((way(case[0]), *(ratios.get(rival, "") for rival in RIVALS[1:])))
        heading = f"{title(encoder[0])}: each in its best setting, over LayerNorm in its own"
        print_table(heading, ("", *RIVALS[1:]), lines)
