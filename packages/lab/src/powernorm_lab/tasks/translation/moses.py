"""Moses' tokens: how a corpus was made of them, a user's text made like it, and text again."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

from sacremoses import MosesDetokenizer, MosesTokenizer

MOSES: Final = version("sacremoses")
NO_LANGUAGE: Final = "en"
"""Whose rules are used where no language is known."""
SAMPLE: Final = 20_000
"""Lines that are looked at."""
ESCAPES: Final = ("&apos;", "&quot;", "&amp;", "&#91;", "&lt;")
SPLIT_DASH: Final = "@-@"


@dataclass(frozen=True)
class Tokenization:
    """What Moses' tokenizer was told, as far as its output shows."""

    escapes: bool
    """Whether `'`, `"`, `&` and the like are written as `&apos;` and so on."""
    splits_dashes: bool
    """Whether words with a dash are parted, as `semi @-@ final`."""
    lowercase: bool

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Tokenization":
        """Look at the beginning of a corpus."""
        sample = list(islice(lines, SAMPLE))
        return cls(
            escapes=any(mark in line for line in sample for mark in ESCAPES),
            splits_dashes=any(SPLIT_DASH in line.split() for line in sample),
            lowercase=all(line == line.lower() for line in sample),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it for a file."""
        return asdict(self)


class Moses:
    """Text into tokens of the source language, and tokens of the target language into text.

    Args:
        languages: of source and target.
        tokenization: of the corpus.
    """

    def __init__(self, languages: tuple[str, str], tokenization: Tokenization) -> None:
        self._tokenizer = MosesTokenizer(lang=moses_rules(languages[0]))
        self._detokenizer = MosesDetokenizer(lang=moses_rules(languages[1]))
        self._tokenization = tokenization

    def tokenized(self, text: str) -> str:
        """Return the tokens of a text with spaces between them, as in the corpus."""
        known = self._tokenization
        tokens: str = self._tokenizer.tokenize(
            text.lower() if known.lowercase else text,
            aggressive_dash_splits=known.splits_dashes,
            escape=known.escapes,
            return_str=True,
        )
        return tokens

    def detokenized(self, tokens: str) -> str:
        """Return the text that tokens make."""
        return str(self._detokenizer.detokenize(tokens.split()))


def moses_rules(language: str) -> str:
    """Return the code by which sacremoses knows a language; of de_DE it is de.

    For a language without rules of its own it uses the general ones, and English abbreviations.
    """
    return language.lower().replace("_", "-").split("-")[0] or NO_LANGUAGE
