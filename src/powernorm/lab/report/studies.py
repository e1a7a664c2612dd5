"""The section of a study: its figure first, and what became of the runs that have no number."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from markupsafe import Markup

from powernorm.lab.report import scatters, study_figures, study_grids
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.numerals import STATUS_WORDS
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.templates import part
from powernorm.runs import StudyInfo

StudyFigures = Callable[[Comparison, StudyInfo], Sequence[DrawnFigure]]

FIGURES: Final[Mapping[str, StudyFigures]] = MappingProxyType(
    {
        "micro-batches": study_figures.micro_batches,
        "lowest-layers": study_figures.lowest_layers,
        "penalties": study_grids.penalties,
        "alphas": study_grids.alphas,
        "scales": scatters.scales,
        "layernorm-parts": study_figures.layernorm_parts,
        "future": study_figures.future,
    }
)
"""By the name of the study; one that is not here is drawn by the shape of its variants."""


def study_contents(comparison: Comparison) -> list[Markup]:
    """Source, figures and lost runs of a study; empty for a comparison of norms as such."""
    study = comparison.study
    if study is None:
        return []
    drawn = FIGURES.get(study["name"], _by_shape)(comparison, study)
    contents = [
        part(
            "paragraph",
            f"After {study['source']}, with the model and data of this comparison.",
            kind="soft",
        )
    ]
    if drawn:
        contents.append(part("gallery", drawn))
    else:
        contents.append(part("paragraph", "No run has a number to draw."))
    return contents + _lost_runs(comparison)


def _by_shape(comparison: Comparison, study: StudyInfo) -> Sequence[DrawnFigure]:
    if any(run.y is not None for run in comparison.runs):
        return study_grids.alphas(comparison, study)
    if any(run.x is not None for run in comparison.runs):
        return study_figures.micro_batches(comparison, study)
    return study_figures.scores_of_variants(comparison)


def _lost_runs(comparison: Comparison) -> list[Markup]:
    lost = [
        f"{run.name}, seed {run.seed}: {STATUS_WORDS[run.shown_status]}"
        for run in comparison.runs
        if not run.finished
    ]
    if not lost:
        return []
    words = f"Without a number in the figures: {'; '.join(lost)}."
    return [part("paragraph", words, kind="alarm")]
