"""The figure of the study that trains each norm twice, with the causal mask and without."""

from collections.abc import Sequence
from typing import Final

from powernorm.report.figures import DrawnFigure
from powernorm.report.records import Comparison, Run
from powernorm.report.study_dots import DotRow, draw_dots
from powernorm.report.study_values import Measure, Point, metric, points_of
from powernorm.report.summary import REFERENCE
from powernorm.runs import StudyInfo

_FORMS: Final = ("causal", "sees the future")
_SEEDS: Final = "Mean over seeds, and a bar from the lowest to the highest."


def future(comparison: Comparison, study: StudyInfo) -> list[DrawnFigure]:
    """Test perplexity of both forms of each norm, and what each is against LayerNorm's."""
    del study
    return [
        *_pairs(
            comparison,
            "both",
            metric("test_perplexity"),
            "Test perplexity",
            "perplexity per word",
            f"{_SEEDS} What sees the future is no language model: the length of a line is what it "
            "is given.",
        ),
        *_pairs(
            comparison,
            "gap",
            _gap(comparison),
            f"Test loss, gap to {REFERENCE} of the same form",
            "nats per token",
            f"{_SEEDS} Left of 0 a norm is better than {REFERENCE} with the same seed. A gain in "
            "one form only is a gain of the leak, not of the norm.",
        ),
    ]


def _pairs(
    comparison: Comparison, key: str, measure: Measure, title: str, x_label: str, caption: str
) -> list[DrawnFigure]:
    points = points_of(comparison, measure)
    marked = {run.name for run in comparison.runs if run.remark}
    norms = list(dict.fromkeys(point.norm for point in points))
    rows = []
    for norm in norms:
        own = [point for point in points if point.norm == norm]
        forms = [next((p for p in own if (p.name in marked) == hidden), None) for hidden in (0, 1)]
        if any(form is not None and form.value is not None for form in forms):
            values = [None if form is None else form.value for form in forms]
            rows.append(DotRow(norm, values, _note(forms)))
    if not rows:
        return []
    svg = draw_dots(
        rows,
        _FORMS,
        title=title,
        x_label=x_label,
        prefix=f"{comparison.anchor}study-{key}",
        description=f"{title} of each norm, causal and seeing the future",
    )
    return [DrawnFigure(svg, caption)]


def _note(forms: Sequence[Point | None]) -> str:
    """What became of runs without a number."""
    parts = zip(_FORMS, forms, strict=True)
    return "; ".join(f"{name}: {'/'.join(p.lost)}" for name, p in parts if p is not None and p.lost)


def _gap(comparison: Comparison) -> Measure:
    """Test loss minus that of LayerNorm with the same seed and the same remark."""
    loss = metric("test_loss")
    references = {
        (run.remark, run.seed): loss(run)
        for run in comparison.runs
        if run.norm == REFERENCE and run.finished
    }

    def gap(run: Run) -> float | None:
        ours, theirs = loss(run), references.get((run.remark, run.seed))
        if run.norm == REFERENCE or ours is None or theirs is None:
            return None
        return ours - theirs

    return gap
