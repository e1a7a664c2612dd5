"""The stored rows of all architectures, and the pages of the documentation made from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]

ROOT: Final = Path(__file__).parents[2]
ROWS: Final = Path(__file__).with_name("rows.jsonl")
DOCS: Final = ROOT / "docs"

_LARGE: Final = "transformers"
_LETTERS: Final = ("a-c", "d-g", "h-o", "p-z")
"""First letters of that library's models, for pages of about a hundred."""

_GRADES: Final = ("ok", "takes none", "not invariant itself", "warned", "refused", "silent")
"""Results of the padding test, best first."""
_STATUSES: Final = ("ok", "refused", "wrong")
_MORE_IS_BETTER: Final = ("swapped", "called", "folded")


def read() -> dict[str, Row]:
    """Return the stored rows by name."""
    if not ROWS.exists():
        return {}
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row for row in rows}


def store(rows: Mapping[str, Row]) -> None:
    """Store rows in place of those of the same names, and write the pages."""
    merged = {**read(), **rows}
    ordered = sorted(merged.values(), key=lambda row: (row["library"], row["name"]))
    lines = [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in ordered]
    ROWS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for path, text in pages(ordered).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def worse(row: Row, stored: Row) -> list[str]:
    """Return in which ways a row is worse than the stored one."""
    found = []
    for name, grades in (("status", _STATUSES), ("mask", _GRADES)):
        now, before = (_grade(one.get(name, ""), grades) for one in (row, stored))
        if now > before:
            found.append(f"{name} was {stored.get(name)}, is {row.get(name)}")
    found.extend(
        f"{name} was {stored[name]}, is {row.get(name, 0)}"
        for name in _MORE_IS_BETTER
        if row.get(name, 0) < stored.get(name, 0)
    )
    if found:
        found.extend((*row["wrong"], *row["refused"]))
    return found


def _grade(value: str, grades: tuple[str, ...]) -> int:
    return grades.index(value) if value in grades else len(grades)


_START: Final = """# Models

`make test-models` runs [surgery](surgery.md) on {count} architectures, built small from
configurations with random weights, and writes this page. Each is swapped to `bn`, trained for a
step, calibrated, folded, saved and loaded. The columns are:

- **norms**: the norms found; **swapped**: those swapped by default (in an encoder-decoder those of
  the encoder).
- **mask**: whether the running statistics of all norms stay the same if a batch is padded further
  with large values. `ok`; `takes none`: the model has no padding mask; `not invariant itself`: the
  model's own tokens change with the padding, before the norm; `warned`: a `MaskWarning` names the
  norm; or an error with advice.
- **folded** to nothing, to a **multiply-add** per feature, or **kept**; in an encoder-decoder
  on both sides. **error**: bound of the largest relative difference to the unfolded model (float64
  if the model's code allows it) on the example and on inputs of another batch size, another
  length, and with padding on either side, if it takes a mask.
- **saved**: `powernorm.save` and `powernorm.load` give a model with bitwise the same outputs and,
  after a step in training, the same statistics: built by its own configuration, or loaded into
  a given model.
- **training**: a step with finite loss and gradients for every swapped norm that was called.

"""


def pages(rows: Iterable[Row]) -> dict[Path, str]:
    """Return the pages by path: summary and small libraries, the large one, what was refused."""
    rows = list(rows)
    libraries = dict.fromkeys(row["library"] for row in rows)
    small = [
        f"## {library}\n\n{_table([row for row in rows if row['library'] == library])}\n"
        for library in libraries
        if library != _LARGE
    ]
    names = [f"models/{_LARGE}-{letters}" for letters in _LETTERS] + ["models/reasons"]
    tree = "\n".join(["```{toctree}", ":hidden:", *names, "```"])
    where = f"Those of {_LARGE}: " + ", ".join(
        f"[{letters.replace('-', ' to ')}]({name}.md)"
        for letters, name in zip(_LETTERS, names, strict=False)
    )
    reasons = "[Why some were refused, not swapped or not folded to nothing](models/reasons.md)."
    start = _START.format(count=len(rows))
    parts = [start, _summary(rows), f"{where}.\n\n{reasons}\n", _wrong(rows), *small, tree]
    found = {"models.md": parts, "models/reasons.md": ["# Reasons\n", _reasons(rows)]}
    for letters, name in zip(_LETTERS, names, strict=False):
        first, last = letters.split("-")
        own = [
            row
            for row in rows
            if row["library"] == _LARGE and first <= _name(row)[0].lower() <= last
        ]
        title = f"# Models of {_LARGE}, {first} to {last}\n\n"
        found[f"{name}.md"] = [f"{title}[What the columns say](../models.md).\n", _table(own)]
    return {
        DOCS / name: "\n".join(part for part in parts if part).rstrip("\n") + "\n"
        for name, parts in found.items()
    }


def _summary(rows: list[Row]) -> str:
    lines = ["| library | architectures | ok | refused in part | wrong |", "|---|--:|--:|--:|--:|"]
    for library in dict.fromkeys(row["library"] for row in rows):
        counts = Counter(row["status"] for row in rows if row["library"] == library)
        cells = [library, counts.total(), *(counts[status] for status in _STATUSES)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    norms = {
        name: sum(row.get(name, 0) for row in rows)
        for name in ("norms", "swapped", "folded", "multiply_adds", "fold_kept")
    }
    return (
        "\n".join(lines) + "\n\n"
        f"{norms['norms']:,} norms, {norms['swapped']:,} of them swapped by default. Folded to "
        f"nothing {norms['folded']:,}, to a multiply-add {norms['multiply_adds']:,}, kept "
        f"{norms['fold_kept']:,}.\n"
    )


def _wrong(rows: list[Row]) -> str:
    lines = [f"- {row['name']}: {_escaped(text)}" for row in rows for text in row["wrong"]]
    return "\n".join(["## Known to be wrong", "", *lines, ""]) if lines else ""


_COLUMNS: Final = {
    "model": "name",
    "norms": "norms",
    "swapped": "swapped",
    "mask": "mask",
    "training": "training",
    "folded": "folded",
    "multiply-add": "multiply_adds",
    "kept": "fold_kept",
    "error": "fold_error",
    "saved": "save",
}
"""Headings and the keys of rows; a new stage adds its own."""


def _table(rows: list[Row]) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---|--:|--:|---|---|--:|--:|--:|--:|---|"]
    for row in rows:
        cells = [_cell(row, key) for key in _COLUMNS.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row, key: str) -> str:
    if key == "name":
        return f"{_name(row)} ({row['note']})" if row.get("note") else _name(row)
    if key == "folded" and row.get("fold") in ("refused", "crashed"):
        return row["fold"]
    if key == "training":
        return str(row.get(key, row.get("train", "")))
    return str(row.get(key, ""))


def _name(row: Row) -> str:
    return str(row["name"].removeprefix(f"{row['library']}/"))


def _reasons(rows: list[Row]) -> str:
    parts = [_listed("Refused", ((text, row["name"]) for row in rows for text in row["refused"]))]
    for heading, key in (
        ("Not swapped", "kept"),
        ("Not folded to nothing", "fold_reasons"),
    ):
        found = ((text, row["name"]) for row in rows for text in row.get(key, ()))
        parts.append(_listed(heading, found))
    unlisted = [f"- {row['name']}: {row['unlisted']}" for row in rows if row.get("unlisted")]
    if unlisted:
        heading = "Modules that are named like norms and are none that the finder lists"
        parts.append("\n".join([f"## {heading}", "", *unlisted, ""]))
    return "\n".join(parts)


def _listed(heading: str, found: Iterable[tuple[str, str]]) -> str:
    models: dict[str, list[str]] = {}
    for text, name in found:
        models.setdefault(text, []).append(name)
    ordered = sorted(models.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"- {_escaped(text)} ({', '.join(names)})" for text, names in ordered]
    return "\n".join([f"## {heading}", "", *lines, ""])


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")
