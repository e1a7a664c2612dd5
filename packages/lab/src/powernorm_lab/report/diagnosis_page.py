"""Page of a diagnosis, and its tables and sentences, which are also on a comparison's page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from powernorm.records import (
    SMALLEST_GAP,
    DiagnosisRecord,
    EvaluationRow,
    ThresholdRecord,
    VerdictRecord,
    swap_call,
)
from powernorm_lab.report import diagnosis_figures, numerals
from powernorm_lab.report.columns import TID_MEANING
from powernorm_lab.report.document import Article, SectionParts, document, gallery, part, write_page
from powernorm_lab.report.loading import read_diagnosis
from powernorm_lab.report.numerals import printable
from powernorm_lab.report.paper_tables import evaluation_table, tid_table
from powernorm_lab.report.records import Comparison
from powernorm_lab.report.summary import average
from powernorm_lab.report.tables import Table, copies


def lead_words(record: DiagnosisRecord) -> str:
    """Return a summary of the diagnosed model and data.

    >>> from powernorm_lab.report.diagnosis_page import lead_words
    >>> record = {"step": 300, "num_batches": 40, "num_tokens": 81_920, "padding": 0.125,
    ...           "layers": [{}, {}]}
    >>> lead_words(record)
    'Step 300. 2 norm layers, 40 batches, 81.9k tokens, 12.50 % of the positions are padding.'
    """
    step = "" if record["step"] is None else f"Step {record['step']}. "
    layers = len(record["layers"])
    padding = "no padding"
    if record["padding"] > 0:
        padding = f"{numerals.percent(record['padding'])} % of the positions are padding"
    return (
        f"{step}{layers} norm {'layer' if layers == 1 else 'layers'}, "
        f"{record['num_batches']} {'batch' if record['num_batches'] == 1 else 'batches'}, "
        f"{numerals.count(record['num_tokens'])} tokens, {padding}."
    )


def verdict_words(verdict: VerdictRecord) -> str:
    """Return the recommendation in one sentence.

    >>> verdict_words({"action": "swap lowest", "norm": "bn", "lowest": 2, "reasons": [],
    ...                "thresholds": []})
    'Swap the norms of the 2 lowest layers to bn and keep the others.'
    """
    norm = numerals.printable(verdict["norm"] or "a norm with batch statistics")
    if verdict["action"] == "swap":
        return f"Swap the norms to {norm}."
    if verdict["action"] == "swap lowest":
        lowest = verdict["lowest"]
        layers = "lowest layers" if lowest is None else f"{lowest} lowest layers"
        layers = "lowest layer" if lowest == 1 else layers
        return f"Swap the norms of the {layers} to {norm} and keep the others."
    return "Keep the norms as they are."


def padding_words(record: DiagnosisRecord) -> str:
    """Return a sentence about TID with padding counted as tokens; empty without such TIDs."""
    layers = record["layers"]
    parts = []
    for key, name in (("mean_tid", "mean"), ("var_tid", "var")):
        own = average(layers, key)
        padded = average(layers, f"padded_{key}")
        if own is not None and padded is not None:
            parts.append(
                f"average {name} TID {numerals.percent(padded)} % instead of "
                f"{numerals.percent(own)} %"
            )
    if not parts:
        return ""
    share = numerals.percent(record["padding"])
    return f"With padding ({share} % of the positions) counted as tokens: {', '.join(parts)}."


def evaluation_words(rows: Sequence[EvaluationRow]) -> str:
    """Return sentences about the gap of running and batch statistics, and re-estimation.

    >>> evaluation_words([
    ...     {"statistics": "running", "tokens": None, "loss": 4.5},
    ...     {"statistics": "re-estimated", "tokens": None, "loss": 4.2},
    ...     {"statistics": "batch", "tokens": 4096, "loss": 4.0},
    ... ])
    'With running statistics the loss is 4.5000, 0.5000 above that with batch statistics of about \
4.1k predictions (4.0000). Re-estimation closes 60 % of the gap.'
    """
    losses = {row["statistics"]: row["loss"] for row in rows if row["statistics"] != "batch"}
    running, estimated = losses.get("running"), losses.get("re-estimated")
    batches = [row for row in rows if row["statistics"] == "batch"]
    if running is None:
        return ""
    if not batches:
        if estimated is None:
            return f"With running statistics the loss is {running:.4f}."
        return (
            f"With running statistics the loss is {running:.4f}, with re-estimated ones "
            f"{estimated:.4f} ({estimated - running:+.4f})."
        )
    largest = max(batches, key=lambda row: row["tokens"] or 0)
    size = (
        ""
        if largest["tokens"] is None
        # The loss is a mean over tokens, images or texts.
        else f" of about {numerals.count(largest['tokens'])} predictions"
    )
    gap = running - largest["loss"]
    # For a smaller gap, the share would be a quotient of rounding errors and noise.
    if not gap > SMALLEST_GAP * abs(running):
        higher = "no higher than" if gap <= 0 else f"less than {100 * SMALLEST_GAP:g} % above that"
        return (
            f"With running statistics the loss is {running:.4f}, {higher} with batch "
            f"statistics{size} ({largest['loss']:.4f}): there is no gap to close."
        )
    words = (
        f"With running statistics the loss is {running:.4f}, {gap:.4f} above that with batch "
        f"statistics{size} ({largest['loss']:.4f})."
    )
    if estimated is None:
        return words
    share = 100 * (running - estimated) / gap
    if share > 100:
        return (
            f"{words} Re-estimation closes the gap: with re-estimated ones it is {estimated:.4f}."
        )
    if share < 0:
        return f"{words} Re-estimation widens the gap by {-share:.0f} %."
    return f"{words} Re-estimation closes {share:.0f} % of the gap."


# The tables of a diagnosis.


Layer = Mapping[str, Any]
"""Row of a diagnosis by DIAGNOSIS_COLUMNS."""


@dataclass(frozen=True)
class LayerColumn:
    """A column of the layers' table.

    Attributes:
        keys: quantities of the cell; a column without any of them is omitted.
        heading: heading of the column.
        text: function from a layer to its cell.
        numeric: whether it is aligned to the right.
        averaged: whether the last line averages it.
    """

    keys: tuple[str, ...]
    heading: str
    text: Callable[[Layer], str]
    numeric: bool = True
    averaged: bool = False


def _tid(key: str, heading: str) -> LayerColumn:
    return LayerColumn(
        (key,), heading, lambda layer: numerals.percent(layer.get(key)), averaged=True
    )


def _plain(key: str, heading: str) -> LayerColumn:
    return LayerColumn((key,), heading, lambda layer: _size(layer.get(key)))


def _words(key: str, heading: str) -> LayerColumn:
    return LayerColumn(
        (key,), heading, lambda layer: numerals.printable(layer.get(key) or "–"), numeric=False
    )


def _size(value: float | None) -> str:
    """Format a number of any magnitude with about three digits."""
    if value is None or isnan(value) or 0.01 <= abs(value) < 1e5 or value == 0:
        return numerals.number(value)
    return f"{value:.1e}"


def _outliers(layer: Layer) -> str:
    number, ratio, feature = (
        layer.get(key) for key in ("num_outliers", "outlier_ratio", "outlier_feature")
    )
    if number is None:
        return numerals.NOTHING
    if ratio is None or feature is None:
        return f"{number:.0f}"
    return f"{number:.0f} (feature {feature:.0f}: {numerals.number(ratio, 1)}×)"


def _position(layer: Layer) -> str:
    position, ratio = layer.get("top_position"), layer.get("top_position_ratio")
    if position is None:
        return numerals.NOTHING
    return f"{position:.0f}" + ("" if ratio is None else f" ({numerals.number(ratio, 1)}×)")


def _sink(layer: Layer) -> str:
    share, feature = layer.get("sink_share"), layer.get("sink_feature")
    if not share or feature is None:
        return numerals.NOTHING
    return f"feature {feature:.0f} in {numerals.number(100 * share, 1)} %"


COLUMNS: Final[Sequence[LayerColumn]] = (
    _words("layer", "layer"),
    _words("norm", "norm"),
    _words("verdict", "verdict"),
    _tid("mean_tid", "mean TID, %"),
    _tid("var_tid", "var TID, %"),
    _tid("pnv_tid", "PowerNormV, %"),
    _tid("pn_tid", "PowerNorm, %"),
    _tid("padded_mean_tid", "mean, padding counted"),
    _tid("padded_var_tid", "var, padding counted"),
    LayerColumn(("num_outliers",), "outlier features", _outliers),
    LayerColumn(("top_position",), "top position", _position),
    _tid("saturated_share", "saturated, %"),
    _plain("slope", "slope"),
    LayerColumn(("sink_share",), "residual sink", _sink),
    _plain("lambda_1", "λ₁"),
    _plain("kappa_20", "κ 20 %"),
    _plain("kappa_50", "κ 50 %"),
    _plain("kappa_80", "κ 80 %"),
    _words("reason", "reason"),
)

KAPPA_MEANING: Final = (
    "λ₁: largest eigenvalue of the input's covariance; κ p %: λ₁ over the eigenvalue at p % of the "
    "features, large where the covariance is close to singular"
)
MEANINGS: Final = (
    "TID (Wang et al. 2022, Definition 1): of mean and deviation for BatchNorm, of the quadratic "
    "mean for PowerNormV and for PowerNorm behind GroupScaling. "
    "Outlier features: number, and the largest with its root mean square over the median "
    "feature's. Top position: the position in the sequence with the largest mean square, over the "
    "average. Saturated: share of values beyond the linear range of DyT, Derf or DyISRU, |z| > 1 "
    "of γ f(z) + β; slope: dz/dx, which is α or 1/√B. Residual sink: the feature that is most "
    "often above 100 times its token's median magnitude, and in how many tokens."
)


def verdict_contents(verdict: VerdictRecord) -> list[Markup]:
    """Return the verdict with its reasons and thresholds."""
    contents = [part("verdict", verdict["action"].split()[0], verdict_words(verdict))]
    call = swap_call(verdict)
    if call:
        contents.append(part("paragraph", "In Python: ", code=numerals.printable(call)))
    if verdict["reasons"]:
        contents.append(part("bullets", verdict["reasons"]))
    if verdict["thresholds"]:
        pairs = [
            (f"{limit['quantity']}: {_size_of(limit)}", limit["source"])
            for limit in verdict["thresholds"]
        ]
        contents += [
            part("paragraph", "Its limits, and where they come from:"),
            part("definitions", pairs),
        ]
    return contents


def _size_of(limit: ThresholdRecord) -> str:
    """Format a threshold, in percent for a TID as everywhere on the page."""
    if limit["quantity"].endswith("_tid"):
        return f"{100 * limit['limit']:.4g} %"
    return f"{limit['limit']:.4g}"


def layer_contents(layers: Sequence[Layer]) -> list[Markup]:
    """Return the table of layers, also for copying; empty without a layer."""
    if not layers:
        return []
    columns = [column for column in COLUMNS if _has_values(column, layers)]
    caption = f"{TID_MEANING}, in percent."
    if any(column.heading.startswith("κ") for column in columns):
        caption += f" {KAPPA_MEANING}."
    if len(layers) > 1:
        caption += " The last line averages the layers."
    copied = [column for column in columns if column.keys != ("reason",)]
    return [
        _table(columns, layers).html("Layers", caption),
        part("folded", "What the columns mean", [part("paragraph", MEANINGS)]),
        copies(_table(copied, layers)),
    ]


def _table(columns: Sequence[LayerColumn], layers: Sequence[Layer]) -> Table:
    return Table(
        [column.heading for column in columns],
        [column.numeric for column in columns],
        _lines(columns, layers),
        wide="reason",
        num_foot=int(len(layers) > 1),
    )


def _has_values(column: LayerColumn, layers: Sequence[Layer]) -> bool:
    return any(layer.get(key) not in (None, "") for layer in layers for key in column.keys)


def _lines(columns: Sequence[LayerColumn], layers: Sequence[Layer]) -> list[list[str]]:
    lines = [[column.text(layer) for column in columns] for layer in layers]
    if len(layers) > 1:
        lines.append(["average", *(_average(column, layers) for column in columns[1:])])
    return lines


def _average(column: LayerColumn, layers: Sequence[Layer]) -> str:
    if not column.averaged:
        return ""
    return numerals.percent(average(layers, column.keys[0]))


def evaluation_contents(record: DiagnosisRecord, prefix: str) -> list[Markup]:
    """Return losses and scores by kind of statistics, and the effect of re-estimation."""
    rows = record["evaluation"]
    if not rows:
        return []
    caption = "Loss of the same weights, by the statistics that the norms evaluate with."
    if any("scores" in row for row in rows):
        caption = (
            "Loss and scores of a whole split by the same weights, by the statistics that the "
            "norms evaluate with. The number after batch is the largest number of positions in a "
            "batch, padding included, if batches are cut by tokens, else the approximate number of "
            "its tokens."
        )
    return [
        part("paragraph", evaluation_words(rows)),
        evaluation_table(record).html("Evaluation", caption),
        *gallery(diagnosis_figures.evaluation(record, prefix)),
    ]


def paper_contents(record: DiagnosisRecord) -> list[Markup]:
    """Return the TID next to the published one; empty without a published one."""
    table = tid_table(record)
    caption = "TID here and of the same norm in the paper; the run's recipe may be a reduced one."
    return [] if table is None else [table.html("TID here and in the paper", caption)]


MAX_DRAWN: Final = 12
"""Largest number of runs whose diagnoses have figures on a comparison's page, about ten each."""


def diagnosis_sections(record: DiagnosisRecord, prefix: str) -> list[SectionParts]:
    """Return the sections of a diagnosis.

    Args:
        record: the diagnosis.
        prefix: prefix of the figures' ids.
    """
    padding = padding_words(record)
    tid = [
        *([part("paragraph", padding)] if padding else []),
        *gallery(diagnosis_figures.tid_by_layer(record, prefix)),
    ]
    spectra = [
        *diagnosis_figures.spectra(record, prefix),
        *diagnosis_figures.conditioning(record, prefix),
    ]
    sizes = gallery(diagnosis_figures.batch_sizes(record, prefix))
    return [
        *_tables(record),
        ("tid", "TID by layer", tid),
        ("batch-sizes", "Sensitivity to the batch's size", sizes),
        (
            "evaluation",
            "Running, re-estimated and batch statistics",
            evaluation_contents(record, prefix),
        ),
        ("spectra", "Spectrum and conditioning", gallery(spectra)),
        ("scales", "γ against the deviation", _scales(record, prefix)),
        ("notes", "Notes", [part("bullets", record["notes"])] if record["notes"] else []),
    ]


def _tables(record: DiagnosisRecord) -> list[SectionParts]:
    return [
        ("verdict", "Verdict", verdict_contents(record["verdict"])),
        ("layers", "Layers", [*layer_contents(record["layers"]), *paper_contents(record)]),
    ]


def _scales(record: DiagnosisRecord, prefix: str) -> list[Markup]:
    drawn = diagnosis_figures.scales(record, prefix)
    words = (
        "γ of each feature against the deviation of the layer's input there (Shen et al. 2020, "
        "App. B.1)."
    )
    return [part("paragraph", words, kind="soft"), part("gallery", drawn)] if drawn else []


def comparison_contents(comparison: Comparison) -> list[Markup]:
    """Return a collapsible block for each run with a diagnosis; the first one is open."""
    blocks: list[Markup] = []
    for index, run in enumerate(comparison.runs):
        if run.diagnosis is None:
            continue
        record = run.diagnosis
        prefix = f"{comparison.anchor}diagnosis-{index}-"
        contents = [part("paragraph", lead_words(record), kind="lead")]
        is_drawn = len(blocks) < MAX_DRAWN
        for _, heading, parts in (
            diagnosis_sections(record, prefix) if is_drawn else _tables(record)
        ):
            contents += [part("heading", heading), *parts] if parts else []
        if not is_drawn:
            contents.append(
                part(
                    "paragraph",
                    "`powernorm report` with this run alone draws its figures.",
                )
            )
        summary = f"{run.folder}: {verdict_words(record['verdict'])}"
        blocks.append(part("folded", summary, contents, is_open=not blocks))
    return blocks


def write_diagnosis_page(diagnosis: DiagnosisRecord | Path, target: Path) -> Path:
    """Write the page of a diagnosis.

    Args:
        diagnosis: the record, or the path of its `diagnosis.json`.
        target: path of the HTML file.

    Returns:
        `target`.

    Raises:
        InputError: the file is damaged, or a newer version of powernorm wrote it.
    """
    record = read_diagnosis(diagnosis) if isinstance(diagnosis, Path) else diagnosis
    return write_page(render_diagnosis(record), target)


def render_diagnosis(record: DiagnosisRecord) -> str:
    """Return the page of a diagnosis as HTML."""
    heading = f"Diagnosis: {printable(record['model'])}"
    lead = lead_words(record)
    return document(heading, [Article(heading, lead, diagnosis_sections(record, ""))])
