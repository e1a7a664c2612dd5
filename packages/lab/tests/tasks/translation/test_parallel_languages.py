import pytest

from powernorm.errors import InputError
from powernorm_lab.tasks.translation.layouts import (
    check_languages,
    header_languages,
    is_joined,
    language_pair,
    missing_languages,
    pairs_of,
)
from powernorm_lab.tasks.translation.settings import TranslationDataSettings


@pytest.mark.parametrize(
    ("languages", "found", "expected"),
    [
        ("de-en", (), ("de", "en")),
        ("zh_CN-en", (), ("zh_CN", "en")),
        ("pt-br-en", ("en", "pt", "pt-br"), ("pt-br", "en")),
        ("en-pt-br", ("en", "pt", "pt-br"), ("en", "pt-br")),
        ("pt-pt-br", ("en", "pt", "pt-br"), ("pt", "pt-br")),
        ("zh-CN-pt-br", ("zh-CN", "pt-br"), ("zh-CN", "pt-br")),
        ("pt-br-en", ("en", "de"), ("pt-br", "en")),
        ("pt-br-en", ("pt", "pt-br"), ("pt-br", "en")),
    ],
)
def test_the_languages_of_the_data_tell_which_hyphen_is_meant(
    languages: str, found: tuple[str, ...], expected: tuple[str, str]
) -> None:
    assert language_pair(languages, found) == expected
    assert TranslationDataSettings(batch_tokens=8, languages=languages).languages == languages


@pytest.mark.parametrize(
    "languages", ["de", "de-", "-de", "de-de", "de en", "", "de--en", "dé-en", "de-en\n"]
)
def test_what_is_no_pair_is_refused_alike_everywhere(languages: str) -> None:
    for check in (
        check_languages,
        language_pair,
        lambda given: TranslationDataSettings(batch_tokens=8, languages=given),
    ):
        with pytest.raises(InputError, match=r"is no pair of languages: give the source and the"):
            check(languages)


@pytest.mark.parametrize(
    ("languages", "found"), [("pt-br-en", ()), ("a-b-c", ("a", "a-b", "b-c", "c"))]
)
def test_what_has_several_readings_is_refused(languages: str, found: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"may be .* or .*without hyphens, as pt_br"):
        language_pair(languages, found)


def test_two_languages_in_one_file() -> None:
    assert is_joined("en-de", {"de", "en"})
    assert is_joined("zh-CN-en", {"zh-CN", "en"})
    assert not is_joined("zh-CN", {"zh", "en"})
    assert not is_joined("de", {"de", "en"})


@pytest.mark.parametrize(
    ("line", "asked", "expected"),
    [
        ("de\ten", None, ("de", "en")),
        ("pt-BR\tzh_CN", None, ("pt-BR", "zh_CN")),
        ("deu\teng", None, None),
        ("deu\teng", "deu-eng", ("deu", "eng")),
        ("German\tEnglish", "english-german", ("German", "English")),
        ("Ja\tNo", None, None),
        ("xq\ten", None, None),
        ("de\tde", None, None),
        ("de\ten\tfr", None, None),
        ("de", None, None),
        ("de en", None, None),
        ("", None, None),
    ],
)
def test_headers(line: str, asked: str | None, expected: tuple[str, str] | None) -> None:
    assert header_languages(line, asked) == expected


def test_a_long_choice_is_cut_short() -> None:
    message = str(missing_languages(pairs_of(["a", "b", "c", "d", "e"]), "The text"))
    assert message.startswith("The text is in a, b, c, d, e, with no direction")
    assert message.count("-") == 12
    assert message.endswith(" or another pair of these")
