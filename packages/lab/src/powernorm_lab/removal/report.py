"""Report of a removal: results, training curves, and the treatment of each norm."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from pandas import DataFrame, Series

from powernorm.json_reading import read_json_object
from powernorm_lab.report.comparison_tables import settings_table
from powernorm_lab.report.document import Article, Section, document, part, write_page
from powernorm_lab.report.drawing import DrawnFigure
from powernorm_lab.report.lines import Band, Panel, panels_figure
from powernorm_lab.report.loading import read_metrics
from powernorm_lab.report.numerals import counted, duration, printable
from powernorm_lab.report.tables import Table
from powernorm_lab.runs import METRICS_FILE, REMOVAL_FILE, REPORT_FILE, RESULT_FILE

_FIX: Final = "make the removal again"
_SPLITS: Final = ("valid", "test", "other")
_WORDS: Final = {
    "loss": "loss, nats per target",
    "divergence": "divergence from the original, nats per position",
    "error": "error relative to the variance of the original's outputs",
    "cosine": "cosine between embeddings (means over tokens) and the original's",
    "lowest_cosine": "the lowest of them",
}


def write_removal_page(folder: Path) -> Path:
    """Write `report.html` into the folder of a removal, from the files there.

    Returns:
        The path of the page.

    Raises:
        InputError: a file is missing or damaged.
    """
    settings = read_json_object(folder / REMOVAL_FILE, _FIX)
    result = read_json_object(folder / RESULT_FILE, _FIX)
    curve = read_metrics(folder / METRICS_FILE)
    name = printable(str(settings["original"]["model"]))
    article = Article(
        f"Norms out of {name}",
        _lead(result),
        list(_sections(settings, result, curve)),
        conclusion=_conclusion(result),
    )
    return write_page(document(f"Removal: {name}", [article]), folder / REPORT_FILE)


def removal_table(metrics: Mapping[str, float | None]) -> Table:
    """Return the metrics of the original and of the model without norms, by split."""
    lines = []
    for split in _SPLITS:
        for name, words in _WORDS.items():
            value = metrics.get(f"{split}_{name}")
            if value is None:
                continue
            before = metrics.get(f"original_{split}_{name}")
            lines.append(
                {
                    "": f"{'another text:' if split == 'other' else split} {words}",
                    "original": "" if before is None else f"{before:.4f}",
                    "without norms": f"{value:.4f}",
                    "change": "" if before is None else f"{value - before:+.4f}",
                }
            )
    return Table.filled(Table.of(lines, [""]).columns, lines)


def _lead(result: Mapping[str, Any]) -> str:
    steps, seconds = int(result["num_steps"]), float(result["seconds"])
    text = f"{result['label']}, seed {result['seed']}: {counted(steps, 'update')}"
    if result["status"] != "finished":
        return f"{text}, {result['status']} after {result['step']}: --resume continues from there"
    return f"{text} in {duration(seconds)}"


def _conclusion(result: Mapping[str, Any]) -> list[str]:
    """Return sentences about the result."""
    metrics, rows = result["metrics"], result.get("fold", [])
    if result["status"] != "finished":
        return []
    left = [row["name"] for row in rows if row["action"] == "simplify"]
    said = f"None of {counted(len(rows), 'norm')} is left"
    if not rows:
        said = (
            f"{counted(len(result['norms']), 'norm')} of the model's class divide by a constant, "
            "because their eps is much larger than any variance"
        )
    if left:
        said += f"; {counted(len(left), 'multiply-add')} per feature remain, such as {left[0]}"
    sentences = [said + "."]
    loss, before = metrics.get("valid_loss"), metrics.get("original_valid_loss")
    if loss is not None and before is not None:
        sentences.append(
            f"The loss on the valid split is {loss:.3f} nats, and the original's is {before:.3f}: "
            f"{loss - before:+.3f}, for one seed."
        )
    return sentences


def _sections(
    settings: Mapping[str, Any], result: Mapping[str, Any], curve: DataFrame
) -> Iterator[Section]:
    table = removal_table(result["metrics"])
    if table.rows:
        yield (
            "result",
            "Result",
            part("copied", table, "Result", "Whole splits: original and folded model."),
        )
    drawn = list(_figures(curve))
    if drawn:
        yield "curves", "Training curves", part("gallery", drawn)
    if result.get("norms"):
        yield "norms", "Every norm", _norm_table(result).html("Norms", _NORMS)
    if result.get("fold_errors"):
        yield "fold", "Folding, verified", _errors(result["fold_errors"], _FOLDED)
    if result.get("stock_errors"):
        yield "stock", "Loaded by transformers", _errors(result["stock_errors"], _STOCK)
    yield "settings", "Settings and environment", _settings(settings)


_NORMS: Final = (
    "Explained: fraction of the variance of the norm's outputs that its replacement explains after "
    "the fit, before any training. Deviation: constant that the replacement divides by, measured "
    "in the fit."
)


def _norm_table(result: Mapping[str, Any]) -> Table:
    into = {row["name"]: row["into"] for row in result.get("fold", [])}
    lines = [
        {
            "norm": row["name"],
            "kind": row["kind"],
            "role": row["role"],
            "from step": str(row["step"]),
            "explained": _cell(row["explained"], ".1%"),
            "deviation": _cell(row["deviation"], ".3g"),
            "folded into": ", ".join(into.get(row["name"], ())),
        }
        for row in result["norms"]
    ]
    texts = ("norm", "kind", "role", "folded into")
    return Table.filled(Table.of(lines, texts, wide="folded into").columns, lines)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _figures(curve: DataFrame) -> Iterator[DrawnFigure]:
    shown = (
        ("train_loss", "Training loss", "training loss", "Mean since the previous row."),
        ("valid_loss", "Loss on the valid split", "nats per target", _VALID),
        ("valid_divergence", "Divergence from the original", "nats per position", _VALID),
        ("valid_error", "Error of the outputs", "relative to their variance", _VALID),
        ("valid_cosine", "Cosine to the original's embeddings", "mean over rows", _VALID),
    )
    for number, (column, title, label, caption) in enumerate(shown):
        points = curve.set_index("step")[column] if column in curve else Series(dtype=float)
        points = points[np.isfinite(points)]
        if len(points) < 2:
            continue
        before = curve.get(f"original_{column}", Series(dtype=float)).dropna().tolist()
        references = {"original": before[0]} if before else {}
        band = Band("without norms", 0, points.index.tolist(), points.tolist())
        yield from panels_figure(
            [Panel(title, label, [band], references)],
            caption=caption,
            x_label="step",
            prefix=f"curve-{number}",
        )


_VALID: Final = "Part of the split; step 0 is after the fit, before any training."


_FOLDED: Final = "Largest difference of the folded model from the trained one."
_STOCK: Final = (
    "Largest difference between the folder stock, loaded by its class, and the trained model."
)


def _errors(errors: Sequence[Mapping[str, Any]], caption: str) -> Markup:
    lines = [
        {
            "computed in": row["dtype"].removeprefix("torch."),
            "absolute": f"{row['absolute']:.1e}",
            "relative": f"{row['relative']:.1e}",
        }
        for row in errors
    ]
    return Table.of(lines, ["computed in"]).html("Errors", caption)


def _settings(settings: Mapping[str, Any]) -> Markup:
    environment = {key: settings[key] for key in ("versions", "machine", "date")}
    original = {key: value for key, value in settings["original"].items() if value is not None}
    return Markup("").join(
        [
            settings_table(original).html("Original", "Original"),
            settings_table(settings["settings"]).html(*["Settings of the removal"] * 2),
            part("heading", "Environment"),
            settings_table(environment).html(*["Versions and machine"] * 2),
        ]
    )
