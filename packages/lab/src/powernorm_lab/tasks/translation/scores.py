"""Corpus scores of translations by sacrebleu, with signatures."""

import re
from collections.abc import Sequence
from typing import Final, Protocol

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacremoses import MosesDetokenizer, MosesTokenizer

from powernorm_lab.tasks.translation.vocabulary import MOSES, moses_rules
from powernorm_lab.training.evaluation import Scores

_DASH: Final = re.compile(r"(?<!\S)@-@(?!\S)|(\S)-(\S)")
"""A dash that Moses has split, which is kept; else a dash within a token."""


class Translated(Protocol):
    """Properties of a translated corpus."""

    @property
    def target_language(self) -> str:
        """Return the code of the target language."""
        ...

    @property
    def tokenized(self) -> bool:
        """Return whether the lines are tokenized, with spaces between tokens."""
        ...


def corpus_scores(
    translations: Sequence[str],
    references: Sequence[str],
    corpus: Translated,
    *,
    splits_compounds: bool = False,
) -> Scores:
    """Return the forms of BLEU that papers report, and chrF.

    - `test_bleu`: detokenized and cased, with sacrebleu's tokenizer (13a), which makes scores
      comparable. Tokenized text is first detokenized by Moses' rules, on both sides.
    - `test_bleu_tokenised`: over Moses' tokens, cased, as in Wang et al. 2022, and in Shen et al.
      2020 on WMT14; tokenized text keeps its tokens.
    - `test_bleu_lowercase`: the same in lower case, as in Shen et al. on IWSLT14.
    - `test_bleu_compound`, if `splits_compounds`: as `test_bleu_tokenised`, with compounds split at
      their dashes on both sides, as in Vaswani et al. 2017 on WMT14 English-German, and in Xu et
      al. 2019.
    - `test_chrf`: chrF of the detokenized text.
    """
    language = corpus.target_language
    plain = [
        _detokenized(lines, language, corpus.tokenized) for lines in (translations, references)
    ]
    tokens = [_tokenized(lines, language, corpus.tokenized) for lines in (translations, references)]
    # Without force, sacrebleu warns of lines that look tokenized.
    metrics = {
        "test_bleu": (BLEU(force=True), plain),
        "test_bleu_tokenised": (BLEU(tokenize="none", force=True), tokens),
        "test_bleu_lowercase": (BLEU(tokenize="none", force=True, lowercase=True), tokens),
        "test_chrf": (CHRF(), plain),
    }
    if splits_compounds:
        split = [[split_compounds(line) for line in lines] for lines in tokens]
        metrics["test_bleu_compound"] = (BLEU(tokenize="none", force=True), split)
    scores: dict[str, float | None] = {}
    signatures: dict[str, str] = {}
    tokens_of = "none" if corpus.tokenized else f"{moses_rules(language)}-sacremoses-{MOSES}"
    for name, (metric, (hypotheses, truths)) in metrics.items():
        scores[name] = round(metric.corpus_score(hypotheses, [truths]).score, 4)
        signature = str(metric.get_signature())
        rules = f"moses:{tokens_of}{'|compounds:split' if name == 'test_bleu_compound' else ''}"
        signatures[name] = signature.replace("tok:none", f"tok:none|{rules}")
    return Scores(scores, signatures)


def split_compounds(tokens: str) -> str:
    r"""Split the compounds of tokenized text at their dashes, as the script for GNMT's data does.

    That script replaces every `(\S)-(\S)` by `\1 ##AT##-##AT## \2`; matches do not overlap, so that
    only the first dash of `a-b-c` is split. Unlike in that script, a dash that Moses has split
    already (`@-@`, its option -a) is kept.

    >>> split_compounds("a rich-text format , semi @-@ final")
    'a rich ##AT##-##AT## text format , semi @-@ final'
    """
    return _DASH.sub(lambda m: f"{m[1]} ##AT##-##AT## {m[2]}" if m[1] else m[0], tokens)


def corpus_bleu(
    translations: Sequence[str], references: Sequence[str], corpus: Translated
) -> float:
    """Return `test_bleu` of `corpus_scores`: detokenized and cased, 0 to 100."""
    hypotheses, truths = (
        _detokenized(lines, corpus.target_language, corpus.tokenized)
        for lines in (translations, references)
    )
    return float(round(BLEU(force=True).corpus_score(hypotheses, [truths]).score, 4))


def _detokenized(lines: Sequence[str], language: str, is_tokenized: bool) -> list[str]:
    if not is_tokenized:
        return list(lines)
    moses = MosesDetokenizer(lang=moses_rules(language))
    return [str(moses.detokenize(line.split())) for line in lines]


def _tokenized(lines: Sequence[str], language: str, is_tokenized: bool) -> list[str]:
    if is_tokenized:
        return list(lines)
    moses = MosesTokenizer(lang=moses_rules(language))
    return [str(moses.tokenize(line, return_str=True, escape=False)) for line in lines]
