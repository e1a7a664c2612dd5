"""Sentence pairs by name: the user's files, the embedded verses, and the Hugging Face Hub.

The Hub's library `datasets` downloads a data set once, caches it on disk and memory-maps it; it
also reads local folders in its formats. Large data sets need no more memory than small ones, and
later starts need no network.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.integrations.extras import install_command
from powernorm_lab.data.catalog import data_set
from powernorm_lab.data.corpus import SPLITS, Split, split_by_position
from powernorm_lab.data.embedded import (
    VERSES,
    english_chapters,
    german_chapters,
)
from powernorm_lab.tasks.translation.layouts import (
    LanguagePair,
    check_languages,
    language_pair,
    missing_languages,
    pairs_of,
)
from powernorm_lab.tasks.translation.readers import (
    ParallelCorpus,
    TextPair,
    corpus_in_memory,
    read_parallel,
)


def load_pairs(
    source: str | None, languages: str | None, tokenized: bool, *, is_split: bool = False
) -> ParallelCorpus:
    """Return the sentence pairs that a configuration names.

    - `verses`: the embedded verses, German to English by default
    - `hf:NAME` or `hf:NAME:CONFIG`: a data set of the Hugging Face Hub, or a local folder that the
      library `datasets` reads
    - a path for `read_parallel`: a folder with `train.de`, `train.en`, `valid.de` and so on, the
      path of such a train file, or sentence pairs in tab-separated columns

    Args:
        source: one of these; None is `verses`. (Use `./verses` for a path of this name.)
        languages: source and target language, as `de-en`, or `pt-br-en` for data in pt-br and en.
        tokenized: whether the lines are tokenized, with spaces between tokens, as by Moses.
        is_split: whether their words are split into subwords already, as `Hau@@ s`.

    Raises:
        InputError: there is no such corpus, or it has other languages.
    """
    if languages is not None:
        check_languages(languages)
    return replace(_read_pairs(source, languages, tokenized), is_split=is_split)


def _read_pairs(source: str | None, languages: str | None, tokenized: bool) -> ParallelCorpus:
    if source is None or source == VERSES:
        return verse_pairs(languages, tokenized=tokenized)
    if source.startswith(HUB_PREFIX):
        return hub_pairs(source, languages, tokenized=tokenized)
    return read_parallel(Path(source), languages, tokenized=tokenized)


# The Hugging Face Hub.


HUB_PREFIX: Final = "hf:"
_SPLIT_NAMES: Final[Mapping[Split, tuple[str, ...]]] = MappingProxyType(
    {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}
)
_TRANSLATION: Final = "translation"
"""Column with a text for each language."""
_TEXT_TYPES: Final = ("string", "large_string", "string_view")
_PORTION: Final = 1024


def hub_pairs(source: str, languages: str | None, *, tokenized: bool) -> ParallelCorpus:
    """Load a data set that has a column `translation`, or one column for each language.

    Args:
        source: `hf:NAME` or `hf:NAME:CONFIG`, with the name of a data set or a local folder.
        languages: source and target language, as `de-en`.
        tokenized: whether the lines are tokenized, with spaces between tokens.

    Raises:
        InputError: the library is missing, there is no such data set, or it lacks a split or
            language.
    """
    name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise InputError(f"data.path={source!r} names no data set: give hf:NAME or hf:NAME:CONFIG")
    loaded = _load(source, name, config or None)
    parts = {split: _part(loaded, split, source) for split in SPLITS}
    pair = _languages(parts["train"].features, languages, source)
    info = parts["train"].info
    return ParallelCorpus(
        name=name.rstrip("/").rpartition("/")[2] or name,
        source=source,
        license=str(info.license or "as the data set's page says"),
        source_language=pair[0],
        target_language=pair[1],
        tokenized=tokenized,
        read=lambda split: _pairs(parts[split], pair, f"{source}, split {split}"),
    )


def _load(source: str, name: str, config: str | None) -> Mapping[str, Any]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InputError(
            f"data.path={source} needs the package datasets: {install_command(extra='hf')}"
        ) from error
    try:
        loaded: Mapping[str, Any] = datasets.load_dataset(name, config)
    except Exception as error:  # the network, the disk, the hub and formats raise various errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"data.path={source} cannot be loaded ({reason}): expected hf:NAME or hf:NAME:CONFIG "
            "of a data set on the hub (with a network), or of a local folder"
        ) from error
    return loaded


def _part(loaded: Mapping[str, Any], split: Split, source: str) -> Any:
    for name in _SPLIT_NAMES[split]:
        if name in loaded:
            return loaded[name]
    raise InputError(
        f"{source} has no {split} split, only {', '.join(loaded)}: expected "
        f"{' or '.join(_SPLIT_NAMES[split])}"
    )


def _languages(features: Mapping[str, Any], languages: str | None, source: str) -> LanguagePair:
    feature = features.get(_TRANSLATION, features)
    found = sorted(getattr(feature, "languages", None) or feature)
    if languages is None:
        raise _no_languages(found, feature, source)
    pair = language_pair(languages, found)
    absent = [language for language in pair if language not in found]
    if absent:
        raise InputError(
            f"data.languages={languages}: {source} has no text in "
            f"{' and '.join(absent)}, only {', '.join(found)}; expected both in the column "
            f"{_TRANSLATION}, or a column for each"
        )
    return pair


def _no_languages(found: list[str], feature: Any, source: str) -> InputError:
    # Only columns of text with a name that `data.languages` can express are candidates.
    texts = [
        name
        for name in found
        if not isinstance(feature, Mapping) or getattr(feature[name], "dtype", None) in _TEXT_TYPES
    ]
    pairs = [pair for pair in pairs_of(texts) if _can_be_asked_for(pair, found)]
    if pairs:
        return missing_languages(pairs, source)
    return InputError(
        f"{source} has text in {', '.join(texts) or 'no language'} only: expected two languages in "
        f"the column {_TRANSLATION}, or a column for each, named by its language"
    )


def _can_be_asked_for(pair: LanguagePair, found: list[str]) -> bool:
    try:
        return language_pair("-".join(pair), found) == pair
    except InputError:
        return False


def _pairs(part: Any, pair: tuple[str, str], where: str) -> Iterator[TextPair]:
    nested = _TRANSLATION in part.features
    number = 0
    for portion in part.select_columns([_TRANSLATION] if nested else list(pair)).iter(_PORTION):
        if nested:
            rows = [tuple(row[name] for name in pair) for row in portion[_TRANSLATION]]
        else:
            rows = list(zip(*(portion[name] for name in pair), strict=True))
        for row in rows:
            number += 1
            yield _text(row[0], where, number), _text(row[1], where, number)


def _text(value: Any, where: str, number: int) -> str:
    """Return a text on one line, and "" for a missing one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}, row {number}: {value!r} is no text; expected a sentence")
    return value.replace("\r", " ").replace("\n", " ")


# The sentence pairs of `powernorm-data`.


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
