"""How the scores of a comparison came about: which weights, and sacrebleu's signatures."""

from collections.abc import Iterable

from markupsafe import Markup

from powernorm.lab.report.measures import MEASURES, heading_of
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.templates import part
from powernorm.runs import BEST_SCORED


def scored_weights(comparison: Comparison) -> str:
    """Which weights were scored, in a sentence.

    Empty where no run says so, and where it goes without saying: the best checkpoint's perplexity.
    """
    found = _by_text((run.scored, run.name) for run in comparison.runs if run.scored)
    if not found or (set(found) == {BEST_SCORED} and not comparison.measure.higher_is_better):
        return ""
    return f"Scored: {'; '.join(_with_names(text, names, found) for text, names in found.items())}."


def signatures(comparison: Comparison) -> list[tuple[str, str]]:
    """What each score is called, and its signature in full, once each."""
    metrics = dict.fromkeys(
        [*MEASURES, *(metric for run in comparison.runs for metric in run.signatures)]
    )
    lines = []
    for metric in metrics:
        found = _by_text(
            (run.signatures[metric], run.name)
            for run in comparison.runs
            if metric in run.signatures
        )
        lines += [
            (printable(heading_of(metric)), _with_names(text, names, found))
            for text, names in found.items()
        ]
    return lines


def _by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by text, each once."""
    found: dict[str, list[str]] = {}
    for text, name in pairs:
        names = found.setdefault(text, [])
        if name not in names:
            names.append(name)
    return found


def _with_names(text: str, names: list[str], found: dict[str, list[str]]) -> str:
    """The text, with the norms that it is true of where that is not all."""
    return printable(text if len(found) == 1 else f"{text} ({', '.join(names)})")


def scoring_notes(comparison: Comparison) -> list[Markup]:
    """The same for the page, below the table; empty where no run says anything."""
    weights, lines = scored_weights(comparison), signatures(comparison)
    return [part("scoring", weights, lines)] if weights or lines else []
