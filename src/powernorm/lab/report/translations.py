"""A sample of a comparison's translations, each sentence with what every norm made of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from markupsafe import Markup

from powernorm.errors import InputError
from powernorm.files import read_text
from powernorm.lab.report.document import part
from powernorm.lab.report.records import Comparison, ReportedRun, Translation
from powernorm.runs import TRANSLATIONS_COLUMNS, TRANSLATIONS_FILE

NUM_SENTENCES: Final = 10


def read_translations(path: Path) -> list[Translation]:
    """The lines of a `translations.tsv`, with or without a header.

    Raises:
        InputError: the file cannot be read, or a line has not three columns.
    """
    text = read_text(path)
    # A last line without its line end is still being written, or its writer was killed.
    complete = text[: text.rfind("\n") + 1]
    found = []
    for number, line in enumerate(complete.split("\n")[:-1], start=1):
        cells = line.removesuffix("\r").split("\t")
        if number == 1 and tuple(cells) == TRANSLATIONS_COLUMNS:
            continue
        if len(cells) != len(TRANSLATIONS_COLUMNS):
            raise InputError(
                f"{path}, line {number}: {len(cells)} columns, expected "
                f"{', '.join(TRANSLATIONS_COLUMNS)} with "
                "tabs between; mend or remove the line"
            )
        found.append(Translation(*cells))
    return found


def sample_contents(comparison: Comparison) -> list[Markup]:
    """Ten sentences of the test text, evenly spaced; empty where no run has translations."""
    by_norm = {
        run.name: found
        for run in first_runs(comparison.runs)
        if (found := _translations_of(comparison, run))
    }
    if not by_norm:
        return []
    first = next(iter(by_norm.values()))
    num_sentences = min(NUM_SENTENCES, len(first))
    sentences = [first[index * len(first) // num_sentences] for index in range(num_sentences)]
    answers = {
        name: {(one.source, one.reference): one.translation for one in found}
        for name, found in by_norm.items()
    }
    summary = f"{num_sentences} sentences of the test text, by the first run of each norm"
    listed = [_sentence(one, answers) for one in sentences]
    return [part("folded", summary, [part("sentences", listed)])]


def first_runs(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """The first run of each norm."""
    found: dict[str, ReportedRun] = {}
    for run in runs:
        found.setdefault(run.name, run)
    return list(found.values())


def _translations_of(comparison: Comparison, run: ReportedRun) -> list[Translation]:
    path = comparison.folder / run.folder / TRANSLATIONS_FILE
    return read_translations(path) if path.exists() else []


def _sentence(
    sentence: Translation, answers: Mapping[str, Mapping[tuple[str, str], str]]
) -> list[tuple[str, str]]:
    """Source, reference and every norm's translation."""
    lines = [("source", sentence.source), ("reference", sentence.reference)]
    return lines + [
        (name, found[sentence.source, sentence.reference])
        for name, found in answers.items()
        if (sentence.source, sentence.reference) in found
    ]
