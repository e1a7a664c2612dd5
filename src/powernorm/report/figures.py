"""The figures of a comparison: what is drawn from which rows, and what the caption says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from powernorm.report import curves, heatmaps
from powernorm.report.markup import Markup
from powernorm.report.numerals import printable
from powernorm.report.records import Comparison, Run


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with the words that belong to it."""

    svg: Markup
    caption: str


def learning_curves(comparison: Comparison) -> list[DrawnFigure]:
    """Training loss and validation perplexity against tokens; empty where nothing was logged."""
    return [
        drawn
        for drawn in (
            _curve(comparison, "train_loss"),
            _curve(comparison, "valid_perplexity"),
        )
        if drawn is not None
    ]


_CAPTIONS: dict[str, tuple[str, str]] = {
    "train_loss": ("Training loss", "Training loss, nats per token, each point a mean of steps."),
    "valid_perplexity": (
        "Validation perplexity",
        "Perplexity per word on the validation text, logarithmic.",
    ),
}


def _curve(
    comparison: Comparison, column: Literal["train_loss", "valid_perplexity"]
) -> DrawnFigure | None:
    title, caption = _CAPTIONS[column]
    series = curves.series_of(comparison.runs, column)
    if not series:
        return None
    baselines = {
        baseline.name: value
        for baseline in comparison.baselines
        if column == "valid_perplexity"
        and (value := baseline.metrics.get("valid_perplexity")) is not None
    }
    norms = ", ".join(dict.fromkeys(printable(line.norm) for line in series))
    lost = [line for line in series if line.lost]
    notes = [caption, "One line a seed."]
    if baselines:
        notes.append("Dotted: models without a network.")
    if lost:
        notes.append(
            "A cross ends a run that diverged or became NaN; such a run may leave the frame."
        )
    svg = curves.draw_curves(
        series,
        order=comparison.norms,
        title=title,
        y_label="nats per token" if column == "train_loss" else "perplexity per word",
        logarithmic=column == "valid_perplexity",
        baselines=baselines,
        prefix=f"curve-{column.replace('_', '-')}",
        description=f"{title} against training tokens for {norms}",
    )
    return DrawnFigure(svg, " ".join(notes))


def tid_over_time(comparison: Comparison) -> list[DrawnFigure]:
    """Online variance TID averaged over layers, and S20's fluctuation, against steps."""
    panels = (
        (
            "tid-over-time",
            "TID over training",
            "variance TID, %",
            "Online TID of the variance (quadratic mean where the norm does not centre) in "
            "percent, averaged over the norm layers, logarithmic.",
            curves.mean_tid_series(comparison.runs),
        ),
        (
            "fluctuation",
            "Fluctuation, first layer",
            "‖batch - running‖ / d",
            "Distance of the batch's variance (or quadratic mean) to the running one in the first "
            "norm layer, logarithmic.",
            curves.fluctuation_series(comparison.runs),
        ),
    )
    drawn = []
    for prefix, title, y_label, caption, series in panels:
        if series:
            svg = curves.draw_curves(
                series,
                order=comparison.norms,
                title=title,
                x_label="step",
                y_label=y_label,
                logarithmic=True,
                baselines={},
                prefix=prefix,
                description=f"{title} against steps",
            )
            drawn.append(DrawnFigure(svg, caption))
    return drawn


def tid_heat_maps(comparison: Comparison) -> list[tuple[Run, DrawnFigure]]:
    """One heat map of layer against step a run that has batch statistics; one colour scale."""
    observed = [run for run in comparison.runs if run.samples]
    scale = heatmaps.colour_scale(observed)
    if scale is None:
        return []
    return [
        (run, DrawnFigure(svg, _heat_map_caption(run)))
        for index, run in enumerate(observed)
        if (svg := heatmaps.draw_heat_map(run, scale, prefix=f"heat-{index}")) is not None
    ]


def _heat_map_caption(run: Run) -> str:
    kinds: Sequence[str] = heatmaps.kinds_of(run)
    what = "mean and variance" if len(kinds) > 1 else "quadratic mean"
    ending = "" if run.finished else f" The run is marked {run.shown_status}."
    return (
        f"{printable(run.norm)}, seed {run.seed}: online TID of the {what} by layer (top: first) "
        f"and step.{ending}"
    )
