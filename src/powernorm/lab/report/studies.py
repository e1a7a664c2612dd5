"""The section of a study: its figures first, and what became of the runs that have no number."""

from markupsafe import Markup

from powernorm.lab.report.document import part
from powernorm.lab.report.numerals import STATUS_WORDS
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.study_figures import study_figures


def study_contents(comparison: Comparison) -> list[Markup]:
    """Source, figures and lost runs of a study; empty for a comparison of norms as such."""
    study = comparison.study
    if study is None:
        return []
    drawn = study_figures(comparison, study)
    source = f"After {study['source']}, with the model and data of this comparison."
    contents = [
        part("paragraph", source, kind="soft"),
        part("gallery", drawn) if drawn else part("paragraph", "No run has a number to draw."),
    ]
    lost = [
        f"{run.name}, seed {run.seed}: {STATUS_WORDS[run.shown_status]}"
        for run in comparison.runs
        if not run.finished
    ]
    if lost:
        words = f"Without a number in the figures: {'; '.join(lost)}."
        contents.append(part("paragraph", words, kind="alarm"))
    return contents
