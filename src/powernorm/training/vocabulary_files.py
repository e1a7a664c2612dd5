"""The subwords in the folder of a run of translation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powernorm.data.pair_subwords import Subwords
from powernorm.errors import InputError
from powernorm.training.run_folders import read_json

VOCABULARY_FILE: Final = "subwords.json"
"""The subwords of both languages, and which these are."""


@dataclass(frozen=True)
class Vocabulary:
    """What text becomes numbers by, and numbers text."""

    source: Subwords
    target: Subwords
    languages: tuple[str, str]
    tokenised: bool
    """Whether the text is tokens with spaces between them."""


def vocabulary_record(
    source: Subwords, target: Subwords, languages: tuple[str, str], *, tokenised: bool
) -> dict[str, Any]:
    """Return what a run's folder keeps of the subwords, so that it can translate by itself."""
    return {
        "source_language": languages[0],
        "target_language": languages[1],
        "tokenised": tokenised,
        "source": source.to_json(),
        "target": None if target is source else target.to_json(),
    }


def read_vocabulary(path: Path) -> Vocabulary:
    """Return what `vocabulary_record` gave.

    Raises:
        InputError: the file is missing or damaged.
    """
    if not path.is_file():
        raise InputError(
            f"{path} is missing: keep a model in the folder of its run, which has the subwords."
        )
    content = read_json(path)
    try:
        source = Subwords.from_json(content["source"])
        target = source if content["target"] is None else Subwords.from_json(content["target"])
        return Vocabulary(
            source,
            target,
            (str(content["source_language"]), str(content["target_language"])),
            bool(content["tokenised"]),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} holds no subwords ({error!r}): train the run anew.") from error
