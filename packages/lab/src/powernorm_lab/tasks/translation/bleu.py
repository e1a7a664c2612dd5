"""Corpus scores of translations by sacrebleu, with their signatures."""

import re
from collections.abc import Sequence
from typing import Final, Protocol

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacremoses import MosesDetokenizer, MosesTokenizer

from powernorm_lab.tasks.translation.moses import MOSES, moses_rules
from powernorm_lab.training.evaluation import Scores

_DASH: Final = re.compile(r"(?<!\S)@-@(?!\S)|(\S)-(\S)")
"""Moses' own split dash, which stays; else a dash within a token."""


class Translated(Protocol):
    """What is known of the text that was translated."""

    @property
    def target_language(self) -> str:
        """Return its code."""
        ...

    @property
    def tokenized(self) -> bool:
        """Return whether its lines are tokens with spaces between them."""
        ...


def corpus_scores(
    translations: Sequence[str],
    references: Sequence[str],
    corpus: Translated,
    *,
    splits_compounds: bool = False,
) -> Scores:
    """Return BLEU in the forms that papers use, and chrF.

    - `test_bleu`: detokenized and cased, sacrebleu's own tokens (13a), which are the same for all.
      Text that came as tokens is put together by Moses' rules first, on both sides.
    - `test_bleu_tokenised`: over Moses' tokens, cased, as Wang et al. 2022 report it, and Shen et
      al. 2020 on WMT14; text that came as tokens keeps them.
    - `test_bleu_lowercase`: the same in lower case, as Shen et al. report it on IWSLT14.
    - `test_bleu_compound`, where it is asked for: as `test_bleu_tokenised`, with compounds split at
      their dashes on both sides, as Vaswani et al. 2017 score WMT14 English-German, and Xu et al.
      2019 after them.
    - `test_chrf`: of the detokenized text.
    """
    language = corpus.target_language
    plain = [
        _detokenized(lines, language, corpus.tokenized) for lines in (translations, references)
    ]
    tokens = [_tokenized(lines, language, corpus.tokenized) for lines in (translations, references)]
    # Without force, sacrebleu prints a warning where lines end in a full stop of its own.
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

    That script replaces every `(\S)-(\S)` by `\1 ##AT##-##AT## \2`; matches do not overlap, so of
    `a-b-c` the first dash alone is split. The dash of a compound that Moses has split already
    (`@-@`, its option -a), which that script would take to pieces, stays as it is.

    >>> split_compounds("a rich-text format , semi @-@ final")
    'a rich ##AT##-##AT## text format , semi @-@ final'
    """
    return _DASH.sub(lambda m: f"{m[1]} ##AT##-##AT## {m[2]}" if m[1] else m[0], tokens)


def corpus_bleu(
    translations: Sequence[str], references: Sequence[str], corpus: Translated
) -> float:
    """Return the first of `corpus_scores` alone: detokenized and cased, 0 to 100."""
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
