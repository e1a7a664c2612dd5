"""Figures and tables of a diagnosis."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, isnan
from typing import Any, Final, cast

import numpy as np
from markupsafe import Markup
from pandas import DataFrame, Series

from powernorm.records import DiagnosisRecord, ScaleRecord
from powernorm_lab.report import numerals, overlays
from powernorm_lab.report.document import words
from powernorm_lab.report.drawing import (
    REFERENCE,
    DrawnFigure,
    figure,
    inline_svg,
    line_style,
    logarithmic_scale,
    plain_axes,
    short_names,
)
from powernorm_lab.report.lines import (
    Band,
    Panel,
    SeedLine,
    bands_over_seeds,
    panels_figure,
    rows_figure,
)
from powernorm_lab.report.numerals import NOTHING, percent, printable
from powernorm_lab.report.overlays import KAPPAS, LAMBDAS, OverlayLine
from powernorm_lab.report.statistics import average
from powernorm_lab.report.tables import Column, Table

MAX_LINES: Final = 8
"""Largest number of layers with a line each; of more, the average and the last are drawn."""
MAX_FRAMES: Final = 12
"""Largest number of layers whose scales are drawn, from the first to the last."""
MAX_POINTS: Final = 256
"""Largest number of features drawn per layer; of more, every second, third … is drawn."""
_FRAMES_IN_ROW: Final = 2

_TIDS: Final[Mapping[str, str]] = {
    "mean_tid": "mean (BatchNorm)",
    "var_tid": "deviation (BatchNorm)",
    "pnv_tid": "PowerNormV",
    "pn_tid": "PowerNorm",
}


def tid_by_layer(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Draw the TID of each layer, and the TID with padding counted if there is padding."""
    limits = _limits(record)
    caption = "Two-pass TID in percent by layer, top: first, logarithmic."
    if limits:
        words = ", ".join(f"{percent(limit)} % ({name})" for name, limit in limits)
        caption += f" Dotted: the verdict's limits, {words}."
    return [
        *_profile_figure(
            record,
            {"total": "mean + deviation", **_TIDS},
            title="TID by layer",
            x_label="TID, %",
            caption=caption,
            prefix=f"{prefix}tid",
            limits=[100 * limit for _, limit in limits],
            scale=100,
        ),
        *_padding_figure(record, prefix),
    ]


def _limits(record: DiagnosisRecord) -> list[tuple[str, float]]:
    """Return the verdict's thresholds of TIDs and their sums, with their names."""
    found = []
    for threshold in record["verdict"]["thresholds"]:
        name, _, quantity = threshold["quantity"].rpartition(": ")
        if all(part in _TIDS for part in quantity.split(" + ")):
            found.append((printable(name or quantity), threshold["limit"]))
    return found


def _padding_figure(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    padded = {"padded_mean_tid": "mean, counted", "padded_var_tid": "deviation, counted"}
    if not any(layer.get(key) is not None for layer in record["layers"] for key in padded):
        return []
    plain = {"mean_tid": "mean, left out", "var_tid": "deviation, left out"}
    return _profile_figure(
        record,
        plain | padded,
        title="Padding left out or counted",
        x_label="TID, %",
        caption="TID of BatchNorm with padding left out of the statistics, and counted as tokens.",
        prefix=f"{prefix}padding",
        scale=100,
    )


def conditioning(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Draw κ_p and λ₁ of each layer's input (Wang et al. 2022, Fig. 6 and 7)."""
    return [
        *_profile_figure(
            record,
            {one.key: one.title for one in KAPPAS},
            title="Conditioning by layer",
            x_label="κ",
            caption="κ: the largest eigenvalue of the covariance of the layer's input over the "
            "eigenvalue at 20, 50 and 80 % of the features (Wang et al. 2022, Fig. 6). Lower "
            "usually trains faster.",
            prefix=f"{prefix}kappa",
        ),
        *_profile_figure(
            record,
            {LAMBDAS[0].key: LAMBDAS[0].title},
            title="Largest eigenvalue by layer",
            x_label=LAMBDAS[0].unit,
            caption=LAMBDAS[0].caption,
            prefix=f"{prefix}lambda",
        ),
    ]


def _profile_figure(
    record: DiagnosisRecord,
    quantities: Mapping[str, str],
    *,
    title: str,
    x_label: str,
    caption: str,
    prefix: str,
    limits: Sequence[float] = (),
    scale: float = 1,
) -> list[DrawnFigure]:
    layers = record["layers"]
    columns = {
        label: [_value(layer, key, scale) for layer in layers] for key, label in quantities.items()
    }
    known = {label: values for label, values in columns.items() if set(values) != {None}}
    return rows_figure(
        [str(layer["layer"]) for layer in layers],
        [
            Band(label, style, range(len(layers)), values)
            for style, (label, values) in enumerate(known.items())
        ],
        layers=True,
        limits=limits,
        title=title,
        x_label=x_label,
        logarithmic=True,
        caption=caption,
        prefix=prefix,
    )


def _value(layer: Mapping[str, Any], key: str, scale: float) -> float | None:
    """Return a column; `total` is the sum of mean and deviation, as in verdicts on BatchNorm."""
    values = [layer.get(part) for part in (("mean_tid", "var_tid") if key == "total" else (key,))]
    return None if None in values else scale * sum(cast(list[float], values))


def batch_sizes(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Draw TID against the number of tokens in a batch."""
    rows = DataFrame(record["batch_sizes"], columns=["layer", "tokens", *_TIDS])
    layers = list(rows["layer"].unique())
    if rows["tokens"].nunique() < 2:
        return []
    by_layer = {layer: rows[rows["layer"] == layer] for layer in layers}
    if len(layers) <= MAX_LINES:
        names = dict(zip(short_names(layers), by_layer.values(), strict=True))
        frames = [
            (
                key.replace("_", "-"),
                title,
                {name: _by_size(part, key) for name, part in names.items()},
            )
            for key, title in _TIDS.items()
        ]
    else:
        parts = (("average", "average", rows), ("last", "last layer", by_layer[layers[-1]]))
        frames = [
            (name, title, {label: _by_size(part, key) for key, label in _TIDS.items()})
            for name, title, part in parts
        ]
    return [
        drawn
        for name, title, lines in frames
        for drawn in panels_figure(
            [
                Panel(
                    f"TID by batch size: {title}",
                    "TID, %",
                    bands_over_seeds({name: [SeedLine(points)] for name, points in lines.items()}),
                    logarithmic=True,
                )
            ],
            caption="The same tokens in batches of another size; both axes logarithmic.",
            x_label="tokens in a batch",
            logarithmic_x=True,
            prefix=f"{prefix}sizes-{name}",
        )
    ]


def _by_size(rows: DataFrame, key: str) -> Series:
    """Return the mean over the rows of each size, in percent."""
    known = rows[np.isfinite(rows[key].astype(float))]
    return 100 * known.astype({key: float}).groupby("tokens")[key].mean()


def spectra(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Draw singular values of the embeddings (Shen et al. 2020, Fig. 6)."""
    return overlays.spectra([OverlayLine(record["model"], [record])], prefix)


def evaluation(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Draw the loss against the size of the batches for the statistics (W22, Table 8)."""
    batches = {
        float(row["tokens"]): row["loss"]
        for row in record["evaluation"]
        if row["statistics"] == "batch" and row["tokens"] is not None
    }
    if len(batches) < 2:
        return []
    ends = min(batches), max(batches)
    lines = {"batch": [SeedLine(batches)]} | {
        row["statistics"]: [SeedLine(dict.fromkeys(ends, row["loss"]))]
        for row in record["evaluation"]
        if row["statistics"] != "batch"
    }
    return panels_figure(
        [Panel("Loss by statistics", "loss", bands_over_seeds(lines))],
        caption="The same weights with batch statistics of several sizes, with the running ones, "
        "and with those re-estimated over the training data (Wang et al. 2022, Table 7 and 8).",
        x_label="tokens in a batch",
        logarithmic_x=True,
        prefix=f"{prefix}evaluation",
    )


def scales(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Draw |γ| of each feature against its deviation (Shen et al. 2020, App. B.1)."""
    return draw_scales(
        record["scales"],
        lead="One point per feature",
        below="|γ| is at most the deviation",
        owner=printable(record["model"]),
        prefix=f"{prefix}scales",
    )


_Pairs = list[tuple[float, float]]


def draw_scales(
    layers: Sequence[ScaleRecord],
    *,
    lead: str,
    below: str,
    ending: str = "",
    owner: str,
    prefix: str,
) -> list[DrawnFigure]:
    """Draw γ against the batch's deviation in a small plot per layer; empty without numbers.

    Args:
        layers: layers from the first.
        lead: beginning of the caption.
        below: property of points below the line, for the caption.
        ending: end of the caption.
        owner: name of the model.
        prefix: prefix of the ids in the SVG.
    """
    known = [(layer["layer"], pairs) for layer in layers if (pairs := scale_pairs(layer))]
    if not known:
        return []
    everything = [pair for _, pairs in known for pair in pairs]
    share = sum(weight <= deviation for deviation, weight in everything) / len(everything)
    left_out = sum(len(layer["weight"]) for layer in layers) - len(everything)
    drawn = _evenly_spaced(known)
    caption = words("scales", lead, below, percent(share), left_out, len(drawn), len(known))
    return [DrawnFigure(_draw_frames(drawn, owner, prefix), f"{caption}{ending}")]


def scale_pairs(layer: ScaleRecord) -> _Pairs:
    """Return pairs of deviation and |γ| that both have a logarithm."""
    return [
        (deviation, abs(weight))
        for deviation, weight in zip(layer["deviation"], layer["weight"], strict=False)
        if isfinite(deviation) and isfinite(weight) and deviation > 0 and weight
    ]


def _evenly_spaced(layers: Sequence[tuple[str, _Pairs]]) -> Sequence[tuple[str, _Pairs]]:
    """Return at most MAX_FRAMES evenly spaced layers, as a hundred take minutes to draw."""
    if len(layers) <= MAX_FRAMES:
        return layers
    return [layers[i * (len(layers) - 1) // (MAX_FRAMES - 1)] for i in range(MAX_FRAMES)]


def _draw_frames(layers: Sequence[tuple[str, _Pairs]], owner: str, prefix: str) -> Markup:
    names = short_names([name for name, _ in layers])
    rows = -(-len(layers) // _FRAMES_IN_ROW)
    with figure(0.4 + 1.3 * rows) as drawn:
        grid = drawn.subplots(rows, _FRAMES_IN_ROW, sharex=True, sharey=True, squeeze=False)
        frames = list(grid.flat)
        for axes, (_, pairs), name in zip(frames, layers, names, strict=False):
            plain_axes(axes, "", "", "")
            axes.set_title(name, loc="left", fontsize=6.5, fontweight="normal")
            x, y = zip(*pairs[:: -(-len(pairs) // MAX_POINTS)], strict=True)
            axes.plot(x, y, ".", color=line_style(0)[0], markersize=3, alpha=0.7)
            axes.axline((1, 1), (2, 2), **REFERENCE)
        logarithmic_scale(frames[0].xaxis)
        logarithmic_scale(frames[0].yaxis)
        for index, axes in enumerate(frames):
            # The last plot of every column has tick labels, even if another column is longer.
            axes.tick_params(labelsize=6.5, labelbottom=index + _FRAMES_IN_ROW >= len(layers))
        for axes in frames[len(layers) :]:
            axes.remove()
        drawn.supxlabel("deviation of the batch", fontsize=8)
        drawn.supylabel("|γ|", fontsize=8)
        description = f"γ against the deviation of the batch in each layer of {owner}"
        return inline_svg(drawn, prefix, description)


# Tables ----------------------------------------------------------------------------------------

Layer = Mapping[str, Any]
"""Row of a diagnosis by DIAGNOSIS_COLUMNS."""


def _share(key: str, heading: str) -> Column[Layer]:
    """Return a column in percent, which the last line averages."""
    return Column(heading, lambda layer: percent(layer.get(key)), key=key)


def _plain(key: str, heading: str) -> Column[Layer]:
    return Column(heading, lambda layer: _size(layer.get(key)), key=key)


def _words(key: str, *, wide: bool = False) -> Column[Layer]:
    return Column(key, lambda layer: layer.get(key) or NOTHING, numeric=False, wide=wide)


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
        return NOTHING
    if ratio is None or feature is None:
        return f"{number:.0f}"
    return f"{number:.0f} (feature {feature:.0f}: {numerals.number(ratio, 1)}×)"


def _position(layer: Layer) -> str:
    position, ratio = layer.get("top_position"), layer.get("top_position_ratio")
    if position is None:
        return NOTHING
    return f"{position:.0f}" + ("" if ratio is None else f" ({numerals.number(ratio, 1)}×)")


def _sink(layer: Layer) -> str:
    share, feature = layer.get("sink_share"), layer.get("sink_feature")
    if not share or feature is None:
        return NOTHING
    return f"feature {feature:.0f} in {numerals.number(100 * share, 1)} %"


_SHARES: Final = (
    *("mean_tid", "var_tid", "pnv_tid", "pn_tid", "padded_mean_tid", "padded_var_tid"),
    "saturated_share",
)
COLUMNS: Final[Sequence[Column[Layer]]] = (
    _words("layer"),
    _words("norm"),
    _words("verdict"),
    _share("mean_tid", "mean TID, %"),
    _share("var_tid", "var TID, %"),
    _share("pnv_tid", "PowerNormV, %"),
    _share("pn_tid", "PowerNorm, %"),
    _share("padded_mean_tid", "mean, padding counted"),
    _share("padded_var_tid", "var, padding counted"),
    Column("outlier features", _outliers),
    Column("top position", _position),
    _share("saturated_share", "saturated, %"),
    _plain("slope", "slope"),
    Column("residual sink", _sink),
    _plain("lambda_1", "λ₁"),
    _plain("kappa_20", "κ 20 %"),
    _plain("kappa_50", "κ 50 %"),
    _plain("kappa_80", "κ 80 %"),
    _words("reason", wide=True),
)


def layer_table(layers: Sequence[Layer], *, has_reasons: bool = True) -> Table:
    """Return the table of layers, with an average of those columns that are shares.

    Args:
        layers: layers of a diagnosis.
        has_reasons: whether to include the reasons of verdicts, which are long.
    """
    table = Table.filled(COLUMNS if has_reasons else COLUMNS[:-1], layers)
    if len(layers) < 2:
        return table
    averages = [
        percent(average(layers, column.key)) if column.key in _SHARES else ""
        for column in table.columns[1:]
    ]
    return replace(table, foot=["average", *averages])


def padded_tids(layers: Sequence[Layer]) -> list[tuple[str, float, float]]:
    """Return name, average TID with padding counted, and without, of mean and deviation."""
    return [
        (name, padded, own)
        for key, name in (("mean_tid", "mean"), ("var_tid", "var"))
        if (own := average(layers, key)) is not None
        and (padded := average(layers, f"padded_{key}")) is not None
    ]
