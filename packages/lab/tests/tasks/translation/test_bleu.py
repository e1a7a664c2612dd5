import math
import re
from dataclasses import dataclass

import pytest
from sacrebleu import corpus_bleu

from powernorm_lab.tasks.translation.scores import corpus_scores, split_compounds


@dataclass(frozen=True)
class Text:
    target_language: str = "en"
    tokenized: bool = False


def bleu(matches: list[tuple[int, int]], length: int, reference_length: int) -> float:
    """Compute BLEU by its definition, from (matches, n-grams) for n = 1 … 4."""
    precision = math.exp(sum(math.log(match / total) for match, total in matches) / 4)
    brevity = 1.0 if length > reference_length else math.exp(1 - reference_length / length)
    return 100 * brevity * precision


def test_a_toy_corpus_by_hand() -> None:
    translations = ["the cat sat on the red mat", "it is so"]
    references = ["the cat sat on the mat today", "it is so good"]
    # 1-grams: 6 of 7 and 3 of 3; 2-grams: the cat, cat sat, sat on, on the (4 of 6) and 2 of 2;
    # 3-grams: 3 of 5 and 1 of 1; 4-grams: 2 of 4 and none of 0. Lengths 10 and 11.
    expected = bleu([(9, 10), (6, 8), (4, 6), (2, 4)], 10, 11)
    scores = corpus_scores(translations, references, Text())
    for name in ("test_bleu", "test_bleu_tokenised", "test_bleu_lowercase"):
        assert scores.metrics[name] == pytest.approx(expected, abs=1e-3)


def test_perfect_and_hopeless_translations() -> None:
    references = ["He goes home, doesn't he?", "The end of all things."]
    perfect = corpus_scores(references, references, Text()).metrics
    assert set(perfect.values()) == {100.0}
    empty = corpus_scores(["", ""], references, Text()).metrics
    assert set(empty.values()) == {0.0}


def test_one_empty_translation_shortens_the_corpus() -> None:
    references = ["a b c d e", "f g h i j"]
    half = corpus_scores(["a b c d e", ""], references, Text()).metrics["test_bleu"]
    assert half == pytest.approx(100 * math.exp(1 - 10 / 5), abs=1e-3)


def test_case_counts_but_for_one() -> None:
    scores = corpus_scores(["The End is near now"], ["the end is near now"], Text()).metrics
    assert scores["test_bleu_lowercase"] == 100.0
    assert scores["test_bleu"] == scores["test_bleu_tokenised"] < 100.0


def test_text_is_split_by_the_rules_of_its_kind() -> None:
    """13a keeps `doesn't` whole and Moses splits it, so one wrong word costs different amounts."""
    translations = ["He doesn't go home to them"]
    references = ["He doesn't go home to us"]
    scores = corpus_scores(translations, references, Text()).metrics
    assert scores["test_bleu"] == pytest.approx(
        bleu([(5, 6), (4, 5), (3, 4), (2, 3)], 6, 6), abs=1e-3
    )
    # He does n't / He doesn 't: one more token either way.
    assert scores["test_bleu_tokenised"] == pytest.approx(
        bleu([(6, 7), (5, 6), (4, 5), (3, 4)], 7, 7), abs=1e-3
    )


def test_tokens_stay_as_they_are_and_are_put_together_for_the_others() -> None:
    # Tokens of Moses: an escaped apostrophe, a separate comma.
    reference = "he said , &quot; it isn &apos;t so &quot; ."
    translation = "he said , &quot; it is so &quot; ."
    tokenized = corpus_scores([translation], [reference], Text(tokenized=True))
    plain = corpus_scores(['he said, "it is so".'], ['he said, "it isn\'t so".'], Text())
    # Counted by white space alone: nine tokens, of which `is` is wrong.
    matches = [(8, 9), (6, 8), (4, 7), (2, 6)]
    assert tokenized.metrics["test_bleu_tokenised"] == pytest.approx(bleu(matches, 9, 10), abs=1e-3)
    assert tokenized.metrics["test_bleu"] == plain.metrics["test_bleu"]
    assert tokenized.metrics["test_chrf"] == plain.metrics["test_chrf"]
    assert tokenized.metrics["test_bleu"] != tokenized.metrics["test_bleu_tokenised"]


def test_signatures_say_how() -> None:
    signatures = corpus_scores(["a b"], ["a b"], Text("de")).signatures
    assert list(signatures) == [
        "test_bleu",
        "test_bleu_tokenised",
        "test_bleu_lowercase",
        "test_chrf",
    ]
    assert "|case:mixed|" in signatures["test_bleu"]
    assert "|tok:13a|" in signatures["test_bleu"]
    assert "|tok:none|moses:de-sacremoses-" in signatures["test_bleu_tokenised"]
    assert "|case:lc|" in signatures["test_bleu_lowercase"]
    assert "version:" in signatures["test_chrf"]
    given = corpus_scores(["a b"], ["a b"], Text("de", tokenized=True)).signatures
    assert "|tok:none|moses:none|" in given["test_bleu_tokenised"]


@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        ("ein rich-text Format", "ein rich ##AT##-##AT## text Format"),
        ("a - b -c d- e", "a - b -c d- e"),
        ("a-b-c Ost-West-Bahn", "a ##AT##-##AT## b-c Ost ##AT##-##AT## West ##AT##-##AT## Bahn"),
        ("semi @-@ final x@-@y @-@", "semi @-@ final x@ ##AT##-##AT## @y @-@"),
    ],
)
def test_compounds_are_split_as_by_the_script(tokens: str, split: str) -> None:
    assert split_compounds(tokens) == split


@pytest.mark.parametrize("tokenized", [False, True])
def test_a_half_right_compound_counts_where_compounds_are_split(tokenized: bool) -> None:
    translations = ["das ist ein Rich-Text Format von mir", "die Ost-West-Bahn kommt heute"]
    references = ["das ist ein Plain-Text Format von mir", "die Ost-West-Bahn kommt nie"]
    text = Text("de", tokenized)
    scores = corpus_scores(translations, references, text, splits_compounds=True)
    plain = corpus_scores(translations, references, text)
    assert "test_bleu_compound" not in plain.metrics
    assert plain.metrics == {name: scores.metrics[name] for name in plain.metrics}
    split = [
        [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in lines]
        for lines in (translations, references)
    ]
    expected = corpus_bleu(split[0], [split[1]], tokenize="none", force=True).score
    assert scores.metrics["test_bleu_compound"] == pytest.approx(expected, abs=1e-3)
    assert expected > scores.metrics["test_bleu_tokenised"]
    signature = scores.signatures["test_bleu_compound"]
    assert "|case:mixed|" in signature
    assert "|compounds:split|" in signature
    assert "compounds" not in scores.signatures["test_bleu_tokenised"]


@pytest.mark.parametrize(
    ("language", "rules"),
    [("vi", "vi"), ("xx", "xx"), ("de_DE", "de"), ("PT-br", "pt"), ("", "en")],
)
def test_every_language_has_rules(language: str, rules: str) -> None:
    text = ["Anh ta nói, z.B. hôm nay (1.5)."]
    scores = corpus_scores(text, text, Text(language))
    assert scores.metrics["test_bleu_tokenised"] == 100.0
    assert f"moses:{rules}-sacremoses" in scores.signatures["test_bleu_tokenised"]
    given = corpus_scores(text, text, Text(language, tokenized=True))
    assert given.metrics["test_bleu"] == 100.0


def test_not_a_word_of_output_or_warning(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """sacrebleu warns of text that looks tokenized."""
    corpus_scores(["a , b ."] * 200, ["a , b ."] * 200, Text())
    corpus_scores(["a , b ."] * 200, ["a , b ."] * 200, Text(tokenized=True))
    captured = capfd.readouterr()
    assert (captured.out, captured.err, caplog.text) == ("", "", "")
