"""What a diagnosis shows, on a page of its own or inside a comparison's."""

from collections.abc import Iterator, Sequence
from typing import Final

from markupsafe import Markup

from powernorm.lab.report import diagnosis_figures, diagnosis_words
from powernorm.lab.report.diagnosis_tables import (
    evaluation_contents,
    layer_contents,
    paper_contents,
    verdict_contents,
)
from powernorm.lab.report.document import SectionParts
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.templates import part
from powernorm.runs import DiagnosisRecord

MAX_DRAWN: Final = 12
"""Runs whose diagnosis has its figures on the page of a comparison: each has about ten."""


def diagnosis_sections(record: DiagnosisRecord, prefix: str) -> Iterator[SectionParts]:
    """What a diagnosis has to show; a section without contents is left out.

    Args:
        record: the diagnosis.
        prefix: of the ids of its figures.
    """
    yield from _tables(record)
    padding = diagnosis_words.padding_words(record)
    parts: Sequence[tuple[str, str, Sequence[Markup]]] = (
        (
            "tid",
            "TID by layer",
            [
                *([part("paragraph", padding)] if padding else []),
                *_galleries(diagnosis_figures.tid_by_layer(record, prefix)),
            ],
        ),
        (
            "batch-sizes",
            "Sensitivity to the batch's size",
            _galleries(diagnosis_figures.batch_sizes(record, prefix)),
        ),
        (
            "evaluation",
            "Running, re-estimated and batch statistics",
            [
                *evaluation_contents(record),
                *_galleries(diagnosis_figures.evaluation(record, prefix)),
            ]
            if record["evaluation"]
            else [],
        ),
        ("spectra", "Spectrum and conditioning", _spectra(record, prefix)),
        ("scales", "γ against the deviation", _scales(record, prefix)),
        ("notes", "Notes", _notes(record["notes"])),
    )
    for name, heading, contents in parts:
        if contents:
            yield name, heading, contents


def _tables(record: DiagnosisRecord) -> Iterator[SectionParts]:
    yield "verdict", "Verdict", verdict_contents(record["verdict"])
    if record["layers"]:
        yield "layers", "Layers", [*layer_contents(record["layers"]), *paper_contents(record)]


def _galleries(drawn: Sequence[DrawnFigure]) -> list[Markup]:
    return [part("gallery", drawn)] if drawn else []


def _spectra(record: DiagnosisRecord, prefix: str) -> list[Markup]:
    drawn = [
        *diagnosis_figures.spectra(record, prefix),
        *diagnosis_figures.conditioning(record, prefix),
    ]
    return _galleries(drawn)


def _scales(record: DiagnosisRecord, prefix: str) -> list[Markup]:
    drawn = diagnosis_figures.scales(record, prefix)
    words = (
        "γ of each feature against the deviation of the layer's input there (Shen et al. 2020, "
        "App. B.1)."
    )
    return [part("paragraph", words, kind="soft"), part("gallery", drawn)] if drawn else []


def _notes(notes: Sequence[str]) -> list[Markup]:
    if not notes:
        return []
    return [part("bullets", notes)]


def comparison_contents(comparison: Comparison) -> list[Markup]:
    """A folded block a run that has a diagnosis, the first one open."""
    blocks: list[Markup] = []
    for index, run in enumerate(comparison.runs):
        if run.diagnosis is None:
            continue
        record = run.diagnosis
        prefix = f"{comparison.anchor}diagnosis-{index}-"
        contents = [part("paragraph", diagnosis_words.lead_words(record), kind="lead")]
        is_drawn = len(blocks) < MAX_DRAWN
        for _, heading, parts in (
            diagnosis_sections(record, prefix) if is_drawn else _tables(record)
        ):
            contents += [part("heading", heading), *parts]
        if not is_drawn:
            contents.append(
                part(
                    "paragraph",
                    "`powernorm report` draws its figures on the page of the run alone.",
                )
            )
        summary = f"{run.folder}: {diagnosis_words.verdict_words(record['verdict'])}"
        blocks.append(part("folded", summary, contents, is_open=not blocks))
    return blocks
