"""Corpus scores of translations by sacrebleu, with their signatures."""

from collections.abc import Sequence
from typing import Protocol

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacremoses import MosesDetokenizer, MosesTokenizer

from powernorm.lab.tasks.translation.moses import MOSES, moses_rules
from powernorm.lab.training.task import Scores


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
    translations: Sequence[str], references: Sequence[str], corpus: Translated
) -> Scores:
    """Return BLEU in the three forms that papers use, and chrF.

    - `test_bleu`: detokenized and cased, sacrebleu's own tokens (13a), which are the same for all.
      Text that came as tokens is put together by Moses' rules first, on both sides.
    - `test_bleu_tokenised`: over Moses' tokens, cased, as Wang et al. 2022 report it, and Shen et
      al. 2020 on WMT14; text that came as tokens keeps them.
    - `test_bleu_lowercase`: the same in lower case, as Shen et al. report it on IWSLT14.
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
    scores: dict[str, float | None] = {}
    signatures: dict[str, str] = {}
    tokens_of = "none" if corpus.tokenized else f"{moses_rules(language)}-sacremoses-{MOSES}"
    for name, (metric, (hypotheses, truths)) in metrics.items():
        scores[name] = round(metric.corpus_score(hypotheses, [truths]).score, 4)
        signature = str(metric.get_signature())
        signatures[name] = signature.replace("tok:none", f"tok:none|moses:{tokens_of}")
    return Scores(scores, signatures)


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
