"""The subwords in the folder of a run of translation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm_lab.engine.folders import read_json
from powernorm_lab.tasks.translation.imported_subwords import TextEncoder, text_encoder
from powernorm_lab.tasks.translation.moses import Tokenization

"""The subwords of both languages, and which these are."""
SUBWORDS: Final = "subwords"
"""The same among the settings of a folded model."""


@dataclass(frozen=True)
class SubwordVocabulary:
    """What text becomes numbers by, and numbers text."""

    source: TextEncoder
    target: TextEncoder
    languages: tuple[str, str]
    tokenization: Tokenization | None
    """Of text that is tokens with spaces between them; None for text as it is written."""


def vocabulary_record(
    source: TextEncoder,
    target: TextEncoder,
    languages: tuple[str, str],
    tokenization: Tokenization | None,
) -> dict[str, Any]:
    """Return what a run's folder keeps of the subwords, so that it can translate by itself."""
    return {
        "source_language": languages[0],
        "target_language": languages[1],
        "tokenisation": None if tokenization is None else tokenization.to_json(),
        "source": source.to_json(),
        "target": None if target is source else target.to_json(),
    }


def read_vocabulary(path: Path) -> SubwordVocabulary:
    """Return what `vocabulary_record` gave.

    Raises:
        InputError: the file is missing or damaged.
    """
    if not path.is_file():
        raise InputError(
            f"{path} is missing: keep a model in the folder of its run, which has the subwords"
        )
    return vocabulary_of(read_json(path), path)


def vocabulary_of(content: Mapping[str, Any], path: Path) -> SubwordVocabulary:
    """Return what `vocabulary_record` gave.

    Args:
        content: the record.
        path: of the file in which it was.

    Raises:
        InputError: it is something else.
    """
    try:
        source = text_encoder(content["source"])
        target = source if content["target"] is None else text_encoder(content["target"])
        languages = (str(content["source_language"]), str(content["target_language"]))
        found = content["tokenisation"]
        tokenization = None if found is None else Tokenization(**found)
        return SubwordVocabulary(source, target, languages, tokenization)
    except (KeyError, TypeError, InputError) as error:
        raise InputError(f"{path} holds no subwords ({error!r}): train the run anew") from error
