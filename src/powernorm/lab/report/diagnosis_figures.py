"""The figures of a diagnosis: what is drawn from which rows, and what the caption says."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final, cast

from powernorm.lab.report import curves, numerals, profiles, scatters
from powernorm.lab.report.curves import Series
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.layer_names import short_names
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.profiles import Profile
from powernorm.runs import BatchSizeRow, DiagnosisRecord

MAX_LINES: Final = 8
"""Layers that have a line each; of more, the average and the last are drawn."""

_TIDS: Final[Mapping[str, str]] = {
    "mean_tid": "mean (BatchNorm)",
    "var_tid": "deviation (BatchNorm)",
    "pnv_tid": "PowerNormV",
    "pn_tid": "PowerNorm",
}


def tid_by_layer(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """TID of each layer, and the same with padding counted where there is padding."""
    limits = _limits(record)
    caption = "Two-pass TID in percent by layer, top: first, logarithmic."
    if limits:
        words = ", ".join(f"{numerals.percent(limit)} % ({name})" for name, limit in limits)
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
    """The verdict's thresholds of TIDs and sums of them, with what they are for."""
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
        limits=(),
        scale=100,
    )


def conditioning(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """κ_p and λ₁ of each layer's input (Wang et al. 2022, Fig. 6 and 7)."""
    kappas = {"kappa_20": "κ 20 %", "kappa_50": "κ 50 %", "kappa_80": "κ 80 %"}
    return [
        *_profile_figure(
            record,
            kappas,
            title="Conditioning by layer",
            x_label="κ",
            caption="κ: the largest eigenvalue of the covariance of the layer's input over the "
            "eigenvalue at 20, 50 and 80 % of the features (Wang et al. 2022, Fig. 6). Lower "
            "usually trains faster.",
            prefix=f"{prefix}kappa",
            limits=(),
        ),
        *_profile_figure(
            record,
            {"lambda_1": "λ₁"},
            title="Largest eigenvalue by layer",
            x_label="λ₁",
            caption="λ₁ of the same covariance (Wang et al. 2022, Fig. 7). Smaller usually "
            "permits higher learning rates.",
            prefix=f"{prefix}lambda",
            limits=(),
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
    limits: Sequence[float],
    scale: float = 1,
) -> list[DrawnFigure]:
    layers = record["layers"]
    columns = {
        label: [_value(layer, key, scale) for layer in layers] for key, label in quantities.items()
    }
    lines = [
        Profile(label, values)
        for label, values in columns.items()
        if any(value is not None for value in values)
    ]
    svg = profiles.draw_profiles(
        [str(layer["layer"]) for layer in layers],
        lines,
        title=title,
        x_label=x_label,
        limits=limits,
        prefix=prefix,
        description=f"{title}: {', '.join(line.label for line in lines)}",
    )
    return [] if svg is None else [DrawnFigure(svg, caption)]


def _value(layer: Mapping[str, Any], key: str, scale: float) -> float | None:
    """A column, or what the verdicts on BatchNorm look at: mean and deviation together."""
    values = [layer.get(part) for part in (("mean_tid", "var_tid") if key == "total" else (key,))]
    return None if None in values else scale * sum(cast(list[float], values))


def batch_sizes(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """TID against the number of tokens in a batch."""
    rows = record["batch_sizes"]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    if len({row["tokens"] for row in rows}) < 2:
        return []
    if len(layers) <= MAX_LINES:
        panels = [
            (key, f"TID by batch size: {name}", _lines_of_layers(rows, layers, key))
            for key, name in _TIDS.items()
        ]
    else:
        last = [row for row in rows if row["layer"] == layers[-1]]
        panels = [
            ("average", "TID by batch size: average", _lines_of_quantities(rows)),
            ("last", "TID by batch size: last layer", _lines_of_quantities(last)),
        ]
    return [
        DrawnFigure(
            curves.draw_curves(
                lines,
                order=[line.norm for line in lines],
                title=title,
                x_label="tokens in a batch",
                y_label="TID, %",
                logarithmic=True,
                logarithmic_x=True,
                baselines={},
                prefix=f"{prefix}sizes-{name.replace('_', '-')}",
                description=f"{title}: TID against tokens in a batch",
            ),
            "The same tokens in batches of another size; both axes logarithmic.",
        )
        for name, title, lines in panels
        if lines
    ]


def _lines_of_layers(rows: Sequence[BatchSizeRow], layers: Sequence[str], key: str) -> list[Series]:
    return [
        line
        for layer, name in zip(layers, short_names(layers), strict=True)
        for line in _line(name, [row for row in rows if row["layer"] == layer], key)
    ]


def _lines_of_quantities(rows: Sequence[BatchSizeRow]) -> list[Series]:
    return [line for key, name in _TIDS.items() for line in _line(name, rows, key)]


def _line(name: str, rows: Sequence[BatchSizeRow], key: str) -> list[Series]:
    """Mean over the rows of each size, in percent."""
    sizes: dict[int, list[float]] = {}
    for row in rows:
        # A TypedDict takes literal keys only.
        value = dict[str, Any](row)[key]
        if value is not None and isfinite(value):
            sizes.setdefault(row["tokens"], []).append(100 * value)
    points = [(size, sum(values) / len(values)) for size, values in sorted(sizes.items())]
    if not points:
        return []
    return [Series(name, [float(x) for x, _ in points], [y for _, y in points])]


def spectra(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Singular values of the embeddings (Shen et al. 2020, Fig. 6)."""
    lines = [
        curves.thinned(printable(one["name"]), list(enumerate(one["values"], start=1)))
        for one in record["spectra"]
        if any(value > 0 for value in one["values"])
    ]
    if not lines:
        return []
    svg = curves.draw_curves(
        lines,
        order=[line.norm for line in lines],
        title="Singular values of the embedding",
        x_label="index",
        y_label="σ / σ₁",
        logarithmic=True,
        baselines={},
        prefix=f"{prefix}spectrum",
        description="Singular values of the embedding matrix, divided by the largest, by index",
    )
    return [
        DrawnFigure(
            svg,
            "Divided by the largest, logarithmic (Shen et al. 2020, Fig. 6). A slow fall means "
            "that the embedding uses its dimensions evenly.",
        )
    ]


def scales(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """|γ| of each feature against the deviation there (Shen et al. 2020, App. B.1)."""
    return scatters.draw_scales(
        record["scales"],
        lead="A point a feature",
        below="|γ| is at most the deviation",
        owner=printable(record["model"]),
        prefix=f"{prefix}scales",
    )


def evaluation(record: DiagnosisRecord, prefix: str) -> list[DrawnFigure]:
    """Loss by the size of the batches that the statistics come from (W22, Table 8)."""
    batches = sorted(
        (row["tokens"], row["loss"])
        for row in record["evaluation"]
        if row["statistics"] == "batch" and row["tokens"] is not None
    )
    if len(batches) < 2:
        return []
    ends = [float(batches[0][0]), float(batches[-1][0])]
    lines = [
        Series("batch", [float(tokens) for tokens, _ in batches], [loss for _, loss in batches]),
        *(
            Series(printable(row["statistics"]), ends, [row["loss"]] * 2)
            for row in record["evaluation"]
            if row["statistics"] != "batch"
        ),
    ]
    svg = curves.draw_curves(
        lines,
        order=[line.norm for line in lines],
        title="Loss by statistics",
        x_label="tokens in a batch",
        y_label="loss",
        logarithmic=False,
        logarithmic_x=True,
        baselines={},
        prefix=f"{prefix}evaluation",
        description="Loss with batch statistics against the batch's size, and with the running and "
        "re-estimated statistics",
    )
    return [
        DrawnFigure(
            svg,
            "The same weights with batch statistics of several sizes, with the running ones, and "
            "with those re-estimated over the training data (Wang et al. 2022, Table 7 and 8).",
        )
    ]
