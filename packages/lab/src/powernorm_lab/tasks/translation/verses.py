"""The sentence pairs of `powernorm-data`."""

from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import split_by_position
from powernorm_lab.data.embedded import (
    VERSES,
    english_chapters,
    german_chapters,
)
from powernorm_lab.data.lines import TextPair
from powernorm_lab.data.sets.catalog import data_set
from powernorm_lab.tasks.translation.corpus import ParallelCorpus, corpus_in_memory
from powernorm_lab.tasks.translation.languages import language_pair

VERSE_LANGUAGES: Final = (("de", "en"), ("en", "de"))


def verse_pairs(languages: str | None, *, tokenized: bool = False) -> ParallelCorpus:
    """Return the verses of the Bible in German and English, split by chapter.

    The splits are those of the embedded corpora `verses-de` and `verses-en`.

    Args:
        languages: source and target language, as `en-de`; None is German to English.
        tokenized: must be False, because the verses are plain text.

    Raises:
        InputError: the verses are not in these languages, or `tokenized` is True.
    """
    known = {language for pair in VERSE_LANGUAGES for language in pair}
    chosen = VERSE_LANGUAGES[0] if languages is None else language_pair(languages, known)
    if chosen not in VERSE_LANGUAGES:
        raise InputError(
            f"data.languages={languages} does not fit the embedded verses: give de-en or en-de"
        )
    if tokenized:
        raise InputError(
            "data.tokenized=true does not fit the embedded verses, which are plain text: leave it "
            "out"
        )
    about = data_set(VERSES)
    texts = {"de": german_chapters(), "en": english_chapters()}
    chapters: list[list[TextPair]] = [
        list(zip(sources, targets, strict=True))
        for sources, targets in zip(*(texts[language] for language in chosen), strict=True)
    ]
    return corpus_in_memory(
        VERSES,
        {
            split: [pair for chapter in part for pair in chapter]
            for split, part in split_by_position(chapters).items()
        },
        languages=chosen,
        source=about.origin,
        license=about.license,
    )
