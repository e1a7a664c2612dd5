"""The page of one diagnosis."""

from pathlib import Path

from powernorm.lab.report.diagnoses import read_diagnosis
from powernorm.lab.report.diagnosis_sections import diagnosis_sections
from powernorm.lab.report.diagnosis_words import lead_words
from powernorm.lab.report.document import Article, document, write_page
from powernorm.lab.report.numerals import printable
from powernorm.runs import DiagnosisRecord


def write_diagnosis_page(diagnosis: DiagnosisRecord | Path, target: Path) -> Path:
    """Writes the page of one diagnosis.

    Args:
        diagnosis: the record, or the `diagnosis.json` that holds it.
        target: the HTML file.

    Returns:
        `target`.

    Raises:
        InputError: the file is damaged, or a newer version of powernorm wrote it.
    """
    record = read_diagnosis(diagnosis) if isinstance(diagnosis, Path) else diagnosis
    return write_page(render_diagnosis(record), target)


def render_diagnosis(record: DiagnosisRecord) -> str:
    """The page of one diagnosis."""
    heading = f"Diagnosis: {printable(record['model'])}"
    lead = lead_words(record)
    return document(heading, [Article(heading, lead, list(diagnosis_sections(record, "")))])
