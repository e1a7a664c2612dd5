"""Subwords in the folder of a translation run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm_lab.engine.folders import read_json
from powernorm_lab.tasks.translation.imported_subwords import TextEncoder, text_encoder
from powernorm_lab.tasks.translation.moses import Tokenization

SUBWORDS: Final = "subwords"
"""Key of the subwords in the settings of a folded model."""


@dataclass(frozen=True)
class SubwordVocabulary:
    """Subwords of source and target, with languages and tokenization."""

    source: TextEncoder
    target: TextEncoder
    languages: tuple[str, str]
    tokenization: Tokenization | None
    """Tokenization of tokenized text; None for raw text."""


def vocabulary_record(
    source: TextEncoder,
    target: TextEncoder,
    languages: tuple[str, str],
    tokenization: Tokenization | None,
) -> dict[str, Any]:
    """Return the record of the subwords for a run's folder, with which the run can translate."""
    return {
        "source_language": languages[0],
        "target_language": languages[1],
        "tokenisation": None if tokenization is None else tokenization.to_json(),
        "source": source.to_json(),
        "target": None if target is source else target.to_json(),
    }


def read_vocabulary(path: Path) -> SubwordVocabulary:
    """Read a record of `vocabulary_record` from a file.

    Raises:
        InputError: the file is missing or damaged.
    """
    if not path.is_file():
        raise InputError(
            f"{path} with the subwords is missing: keep a model in the folder of its run"
        )
    return vocabulary_of(read_json(path), path)


def vocabulary_of(content: Mapping[str, Any], path: Path) -> SubwordVocabulary:
    """Return the subwords of a record of `vocabulary_record`.

    Args:
        content: the record.
        path: path of its file, for messages.

    Raises:
        InputError: the record is invalid.
    """
    try:
        source = text_encoder(content["source"])
        target = source if content["target"] is None else text_encoder(content["target"])
        languages = (str(content["source_language"]), str(content["target_language"]))
        found = content["tokenisation"]
        tokenization = None if found is None else Tokenization(**found)
        return SubwordVocabulary(source, target, languages, tokenization)
    except (KeyError, TypeError, InputError) as error:
        raise InputError(f"{path} holds no subwords ({error!r}): train the run again") from error
