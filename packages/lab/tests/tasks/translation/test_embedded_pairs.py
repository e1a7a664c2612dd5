import pytest

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.data.embedded import embedded_corpus
from powernorm_lab.tasks.translation.sources import load_pairs

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(("source", "languages"), [(None, None), ("verses", "en-de")])
def test_verses_are_those_of_the_corpora_of_one_language(
    source: str | None, languages: str | None
) -> None:
    corpus = load_pairs(source, languages, False)
    assert corpus.languages == languages or corpus.languages == "de-en"
    sides = [
        embedded_corpus(f"verses-{language}")
        for language in (corpus.source_language, corpus.target_language)
    ]
    for split in SPLITS:
        expected = list(zip(*(side.documents[split] for side in sides), strict=True))
        assert list(corpus.pairs(split)) == expected
        assert corpus.num_dropped[split] == {"empty": 0}
    assert corpus.name == "verses"
    assert corpus.license.startswith("public domain")
    assert "Elberfelder" in corpus.source


def test_other_languages_and_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="de-fr does not fit the embedded verses: give de-en or"):
        load_pairs(None, "de-fr", False)
    with pytest.raises(InputError, match="tokenized=true does not fit the embedded verses"):
        load_pairs(None, None, True)
