"""Moses tokenization: detecting a corpus's options, tokenizing text alike, and detokenizing."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

from sacremoses import MosesDetokenizer, MosesTokenizer

MOSES: Final = version("sacremoses")
NO_LANGUAGE: Final = "en"
"""Language whose rules are used if the language is unknown."""
SAMPLE: Final = 20_000
"""Number of lines from which options are detected."""
ESCAPES: Final = ("&apos;", "&quot;", "&amp;", "&#91;", "&lt;")
SPLIT_DASH: Final = "@-@"


@dataclass(frozen=True)
class Tokenization:
    """Options of Moses' tokenizer, detected from its output."""

    escapes: bool
    """Whether `'`, `"`, `&` and similar characters are escaped, as `&apos;`."""
    splits_dashes: bool
    """Whether words are split at dashes, as `semi @-@ final`."""
    lowercase: bool

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Tokenization":
        """Detect the options from the first lines of a corpus."""
        sample = list(islice(lines, SAMPLE))
        return cls(
            escapes=any(mark in line for line in sample for mark in ESCAPES),
            splits_dashes=any(SPLIT_DASH in line.split() for line in sample),
            lowercase=all(line == line.lower() for line in sample),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON."""
        return asdict(self)


class Moses:
    """Tokenizes text of the source language, and detokenizes the target language.

    Args:
        languages: source and target language.
        tokenization: options of the corpus.
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
        """Return the detokenized text."""
        return str(self._detokenizer.detokenize(tokens.split()))


def moses_rules(language: str) -> str:
    """Return sacremoses' code of a language, such as de for de_DE.

    For languages without rules, sacremoses uses general ones with English abbreviations.
    """
    return language.lower().replace("_", "-").split("-")[0] or NO_LANGUAGE
