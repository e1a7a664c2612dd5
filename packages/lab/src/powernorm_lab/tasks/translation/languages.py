"""Language codes in the names of files and columns, and pairs of languages from the user."""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import permutations
from typing import Final

from powernorm.errors import InputError

LanguagePair = tuple[str, str]
"""The languages of source and target."""

FILE_LANGUAGE: Final = r"[A-Za-z]{2,3}(?:[_-][A-Za-z0-9]+)*"
"""Pattern of language codes at the ends of file names: `de`, `deu`, `zh_CN`, `pt-br`."""
_PAIR: Final = re.compile(r"\w+(?:-\w+)+", re.ASCII)
_HEADER: Final = re.compile(r"(?P<code>[a-z]{2})(?:[_-][A-Za-z0-9]+)*")
_ISO_639_1: Final = (
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy "
    "da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu "
    "hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb "
    "lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om "
    "or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw "
    "ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)
_MOST_SHOWN: Final = 12


def check_languages(languages: str) -> None:
    """Check that a string is two different languages with a hyphen between them, such as `de-en`.

    Raises:
        InputError: it is not.
    """
    if not _PAIR.fullmatch(languages) or not _readings(languages):
        raise InputError(
            f"data.languages={languages!r} is no pair of languages: give the source and the "
            "target, as de-en"
        )


def language_pair(languages: str, found: Collection[str] = ()) -> LanguagePair:
    """Return source and target of a pair of languages such as `de-en` or `pt-br-en`.

    Args:
        languages: the pair.
        found: languages of the data, which resolve the ambiguity of hyphens; the result need not be
            among them.

    Raises:
        InputError: it is no pair of different languages, or is ambiguous.
    """
    check_languages(languages)
    readings = _readings(languages)
    # Prefer the reading with the most known languages, then the longest codes (pt-br over pt).
    known = [[language for language in pair if language in found] for pair in readings]
    ranks = [(len(languages), len("".join(languages))) for languages in known]
    best = [pair for pair, rank in zip(readings, ranks, strict=True) if rank == max(ranks)]
    if len(best) > 1 and (max(ranks)[0] == 2 or not found):
        ways = " or ".join(" and ".join(pair) for pair in best)
        raise InputError(
            f"data.languages={languages} may be {ways}: write the languages without hyphens, as "
            "pt_br (also in the names of files)"
        )
    return best[0]


def is_joined(language: str, found: Collection[str]) -> bool:
    """Return whether this is a pair of languages of `found`, for files with both languages."""
    return any(set(pair) <= set(found) for pair in _readings(language))


def header_languages(line: str, asked: str | None) -> LanguagePair | None:
    """Return the languages of a header with two columns; None if the line is a sentence pair.

    Args:
        line: the first line, with a tab between its columns.
        asked: languages that the user has given, which need not be known codes.
    """
    first, tab, second = line.partition("\t")
    if not tab or first == second:
        return None
    codes = [_HEADER.fullmatch(cell) for cell in (first, second)]
    is_known = all(match and match["code"] in _ISO_639_1.split() for match in codes)
    named = same_languages(asked, first, second) or same_languages(asked, second, first)
    return (first, second) if is_known or named else None


def same_languages(asked: str | None, source: str, target: str) -> bool:
    """Return whether the user gave these languages, ignoring case and kind of hyphen."""
    return asked is not None and _plain(asked) == _plain(f"{source}-{target}")


def missing_languages(pairs: Iterable[LanguagePair], source: str) -> InputError:
    """Return the error for data with several pairs of languages and no choice.

    Args:
        pairs: the pairs of the data, at least one.
        source: name of the data.
    """
    choices = sorted(set(pairs))
    found = sorted({language for pair in choices for language in pair})
    names = ["-".join(pair) for pair in choices[:_MOST_SHOWN]]
    last = names.pop() if len(choices) <= _MOST_SHOWN else "another pair of these"
    return InputError(
        f"{source} is in {', '.join(found)}, with no direction of translation given: set "
        f"data.languages={', '.join(names)} or {last}"
    )


def pairs_of(languages: Iterable[str]) -> list[LanguagePair]:
    """Return all ordered pairs of different languages."""
    return list(permutations(sorted(set(languages)), 2))


def _readings(languages: str) -> Sequence[LanguagePair]:
    parts = languages.split("-")
    pairs = [("-".join(parts[:n]), "-".join(parts[n:])) for n in range(1, len(parts))]
    return [pair for pair in pairs if pair[0] != pair[1]]


def _plain(language: str) -> str:
    return language.casefold().replace("_", "-")
