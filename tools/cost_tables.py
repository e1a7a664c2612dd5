"""Write the tables of docs/costs.md from the stored rows; torch is not needed.

    python tools/cost_tables.py
    python tools/cost_tables.py --add "MiniLM, LayerNorm" minilm.json   # of export_int8.py

Each table is a CSV file in docs/costs, which the page shows.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Table = list[Sequence[object]]
"""The rows of a table, the first its headings."""

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FOLDER = Path(__file__).parents[1] / "docs" / "costs"
RIVALS = ("LayerNorm", "RMSNorm", "DyT", "folded")
NAMES = {"folded": "**folded**"}


def read(name: str, results: Path = RESULTS) -> list[Row]:
    """Return the rows of a JSON lines file without the machine's; none if there is no file."""
    path = results / name
    if not path.exists():
        return []
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if "machine" not in row]


def write(folder: Path, tables: Mapping[str, Table]) -> None:
    """Write each table that has rows into its file."""
    for name, (head, *rows) in tables.items():
        if rows:
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([head, *rows])


def exported(rows: Sequence[Row]) -> Table:
    """Return the table of operators in the exported graphs."""
    kinds = ("operators", "norms", "reductions", "square_roots", "divisions", "exponentials")
    head = ("", "all", "norms", "reductions", "square roots", "divisions", "exp, erf, tanh")
    lines = (
        (f"{row['placement']}-norm, {name(row)}", *(row[kind] for kind in kinds))
        for row in rows
        if row["precision"] == "float32" and row["stage"] == "file"
    )
    return [head, *lines]


def quantized(rows: Sequence[Row]) -> Table:
    """Return the table of operators that onnxruntime makes of the quantized graphs."""
    kinds = ("operators", "integer", "floating", "quantize", "dequantize", "casts")
    head = ("precision", "", "all", "in integers", "in floating point")
    lines = (
        (precision, f"{row['placement']}-norm, {name(row)}", *(row[kind] for kind in kinds))
        for precision in ("int8 static, all", "int8 static", "int8 dynamic")
        for row in rows
        if row["precision"] == precision and row["stage"] == "onnxruntime"
    )
    return [(*head, "quantize", "dequantize", "casts"), *lines]


def proofs(rows: Sequence[Row]) -> Table:
    """Return the table of circuits of trained models."""
    base = {row["placement"]: row["rows"] for row in rows if row["rival"] == RIVALS[0]}
    lines = (
        (
            f"{row['placement']}-norm, {name(row)}",
            f"{row['nats']:.3f}",
            f"{row['rows']:,}",
            f"{row['rows'] / base[row['placement']]:.3f}",
            ", ".join(row["lookups"]),
        )
        for row in rows
    )
    return [("", "loss (nats)", "rows", "/ LayerNorm", "tables of"), *lines]


def proven(rows: Sequence[Row]) -> Table:
    """Return the table of verified proofs, with sizes and times."""
    head = ["", "characters", "loss (nats)", "rows", "of which 2^k are proven", "setup (s)"]
    head += ["proving (s)", "verifying (s)", "key (MB)", "proof (kB)", "error of the circuit"]
    lines = (
        (
            f"{row['placement']}-norm, {name(row)}",
            row["tokens"],
            f"{row['nats']:.3f}",
            f"{row['fitted_rows']:,}",
            f"2^{row['log_rows']}",
            f"{row['setup_s']:.0f}",
            f"{row['prove_s']:.0f}",
            f"{row['verify_s']:.2f}",
            f"{row['key_bytes'] / 1e6:,.0f}",
            f"{row['proof_bytes'] / 1e3:.0f}",
            f"{row['error']:.2%}",
        )
        for row in rows
    )
    return [head, *lines]


def name(row: Row) -> str:
    """Return the name of a rival in the tables."""
    rival = str(row["rival"])
    return NAMES.get(rival, rival)


def cases(rows: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Row], dict[tuple[str, str], Row]]]:
    """Return a row of each case, each rival's fastest row, and all rows by rival and setting."""
    keys = ("features", "placement", "engine", "precision", "threads")

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[one] for one in keys)

    for _, group in groupby(rows, key=key):
        found = list(group)
        best: dict[str, Row] = {}
        for row in sorted(found, key=lambda row: float(row["median_us"])):
            best.setdefault(row["rival"], row)
        yield found[0], best, {(row["rival"], row["setting"]): row for row in found}


def spans(
    rows: Sequence[Row],
    columns: Sequence[Callable[[dict[str, Row], dict[tuple[str, str], Row]], float | None]],
) -> Iterator[tuple[str, ...]]:
    """Return the range over widths and threads by placement, engine, precision and column."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for row, best, settings in cases(rows):
        way = (f"{row['placement']}-norm", f"{row['engine']} {row['precision']}")
        cells = found.setdefault(way, [[] for _ in columns])
        for cell, column in zip(cells, columns, strict=True):
            value = column(best, settings)
            if value is not None:
                cell.append(value)
    for way, cells in sorted(found.items(), key=lambda item: item[0][0], reverse=True):
        yield (*way, *map(span, cells))


def span(values: Sequence[float]) -> str:
    """Return the lowest and the highest value as text."""
    if not values:
        return ""
    low, high = (f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}-{high}"


def over(one: str, other: str) -> Callable[[dict[str, Row], Any], float]:
    """Return the function for the time of a rival over another's, each in its best setting."""
    return lambda best, _: best[one]["median_us"] / best[other]["median_us"]


def unfused(best: dict[str, Row], settings: dict[tuple[str, str], Row]) -> float | None:
    """Return the time of LayerNorm with onnxruntime's fusion over that without."""
    del best
    pair = settings.get(("LayerNorm", "fused")), settings.get(("LayerNorm", "unfused"))
    if pair[0] is None or pair[1] is None:
        return None
    return float(pair[0]["median_us"] / pair[1]["median_us"])


def latency(rows: Sequence[Row]) -> Table:
    """Return the table of time ratios, of each rival in its best setting."""
    pairs = [("folded", "LayerNorm"), ("folded", "RMSNorm"), ("folded", "DyT")]
    pairs += [("RMSNorm", "LayerNorm"), ("DyT", "LayerNorm")]
    head = ["", "engine and precision", *(f"{one} / {other}" for one, other in pairs)]
    columns = [*(over(*pair) for pair in pairs), unfused]
    return [[*head, "LayerNorm fused / not"], *spans(rows, columns)]


def errors(rows: Sequence[Row]) -> Table:
    """Return the table of each rival's errors against its own float32 outputs."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        way = f"{row['engine']} {row['precision']}"
        found.setdefault(way, {rival: [] for rival in RIVALS})[row["rival"]].append(row["error"])
    lines = (
        (way, *(f"{min(cell):.2g} to {max(cell):.2g}" for cell in cells.values()))
        for way, cells in found.items()
        if "float32" not in way
    )
    return [("engine and precision", *(NAMES.get(r, r) for r in RIVALS)), *lines]


def memory(rows: Sequence[Row]) -> Table:
    """Return the memory peaks of the wide encoders on one thread, in megabytes."""
    lines: Table = [("", *(NAMES.get(rival, rival) for rival in RIVALS))]
    for row, best, _ in cases(rows):
        if row["features"] == 512 and all(one["peak_bytes"] is not None for one in best.values()):
            cells = [f"{best[rival]['peak_bytes'] / 1e6:.1f}" for rival in RIVALS]
            lines.append((f"{row['placement']}-norm, {row['engine']} {row['precision']}", *cells))
    return lines


def trained(reports: Sequence[Row]) -> Table:
    """Return the table of quantized files of trained models, compared with torch in float32."""
    kinds = {"dynamic": "dynamic", "matmul": "static", "all": "static, all"}
    head = ("model", "int8", "norms left", "MB", "error", "cosine", "same largest entry", "vectors")
    lines = (
        (
            report["label"],
            kinds[report["quantization"]],
            len(report["left"]),
            f"{report['bytes'] / 1e6:.1f}",
            f"{report['agreement']['error']:.2%}",
            f"{report['agreement']['cosine']:.4f}",
            f"{report['agreement']['same_largest']:.1%}",
            f"{report['agreement']['vectors']:,}",
        )
        for report in reports
    )
    return [head, *lines]


def tables(results: Path = RESULTS) -> dict[str, Table]:
    """Return all tables by name."""
    costs = read("removal.jsonl", results)
    operators = read("operators.jsonl", results)
    return {
        "exported": exported(operators),
        "quantized": quantized(operators),
        "proofs": proofs(read("proofs.jsonl", results)),
        "latency": latency(costs),
        "errors": errors(costs),
        "memory": memory(costs),
        "proven": proven(read("proven.jsonl", results)),
        "trained": trained(read("exports.jsonl", results)),
    }


def add(label: str, report: Path, results: Path = RESULTS) -> None:
    """Store the report of a quantized export; one with this label and quantization is replaced."""
    row = {"label": label, **json.loads(report.read_text(encoding="utf-8"))}
    if row["agreement"] is None:
        raise SystemExit(f"{report} is of a file in float32: export with --int8")
    same = (label, row["quantization"])
    rows = [
        one for one in read("exports.jsonl", results) if (one["label"], one["quantization"]) != same
    ]
    text = "".join(json.dumps(one) + "\n" for one in (*rows, row))
    (results / "exports.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", nargs=2, metavar=("LABEL", "JSON"), help="store a report first")
    given = parser.parse_args()
    if given.add:
        add(given.add[0], Path(given.add[1]))
    write(FOLDER, tables())


if __name__ == "__main__":
    main()
