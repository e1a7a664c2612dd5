"""A trained model of translation as something that takes text and gives text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from sacremoses import MosesDetokenizer, MosesTokenizer

from powernorm.data.pair_subwords import Subwords
from powernorm.errors import InputError
from powernorm.models.translation import TranslationModel
from powernorm.training.bleu import moses_rules
from powernorm.training.config import DecodingConfig
from powernorm.training.trained_models import (
    TrainedModel,
    load_folded_run,
    load_trained,
    run_config,
)
from powernorm.training.translating import translate_ids
from powernorm.training.vocabulary_files import VOCABULARY_FILE, Vocabulary, read_vocabulary

Ranked = list[tuple[str, float]]
"""Translations of a sentence with their scores, best first."""


@dataclass(frozen=True)
class Translator:
    """Translates sentences.

    Attributes:
        model: in evaluation mode.
        subwords: of source and target.
        decoding: how to search.
        num_best: translations of each sentence.
        device: of the model.
        prepare: what is done to a sentence before it is cut into subwords.
        finish: what is done to a translation.
    """

    model: TranslationModel
    subwords: tuple[Subwords, Subwords]
    decoding: DecodingConfig
    num_best: int
    device: torch.device
    prepare: Callable[[str], str] = str
    finish: Callable[[str], str] = str

    def translate(self, sentences: Sequence[str]) -> list[Ranked]:
        """Return the translations of each sentence; of an empty one an empty one."""
        filled = [number for number, text in enumerate(sentences) if text.strip()]
        source, target = self.subwords
        ids = source.encode([self.prepare(sentences[number]) for number in filled])
        found = translate_ids(
            self.model, ids, self.decoding, self.device, num_best=self.num_best
        ).hypotheses
        ranked: list[Ranked] = [[("", 0.0)] * self.num_best for _ in sentences]
        for number, best in zip(filled, found, strict=True):
            texts = target.decode([hypothesis.tokens for hypothesis in best])
            ranked[number] = [
                (self.finish(text), hypothesis.score)
                for text, hypothesis in zip(texts, best, strict=True)
            ]
        return ranked


def load_translator(
    path: Path,
    *,
    beam_size: int | None = None,
    length_penalty: float | None = None,
    num_best: int = 1,
    tokens: bool = False,
    device: str = "auto",
) -> Translator:
    """Load what `powernorm compare translation` trained.

    Args:
        path: a run's folder, one of its checkpoints, or a folded model in the folder.
        beam_size: of the search; None is the run's, or `num_best` where that is more.
        length_penalty: of the search; None is the run's.
        num_best: translations of each sentence.
        tokens: of a model of tokenised text: take and give tokens; else Moses' rules split text
            into tokens and put it together again.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        InputError: there is no such model, or it does not translate.
    """
    place = _device(device)
    trained, place_of_subwords = _load(path)
    config = run_config(trained.settings)
    if config.task != "translation" or not isinstance(trained.model, TranslationModel):
        raise InputError(f"{path} is a run of the task {config.task}, which does not translate.")
    vocabulary = read_vocabulary(place_of_subwords)
    decoding = replace(
        config.decoding,
        beam_size=beam_size or max(num_best, config.decoding.beam_size),
        length_penalty=(
            config.decoding.length_penalty if length_penalty is None else length_penalty
        ),
    )
    if num_best > decoding.beam_size:
        raise InputError(
            f"--n-best {num_best} is more than the beam of {decoding.beam_size}: give a larger "
            "--beam."
        )
    prepare, finish = _moses(vocabulary, tokens=tokens)
    return Translator(
        model=trained.model.to(place),
        subwords=(vocabulary.source, vocabulary.target),
        decoding=decoding,
        num_best=num_best,
        device=place,
        prepare=prepare,
        finish=finish,
    )


def _load(path: Path) -> tuple[TrainedModel, Path]:
    if path.is_file() and path.parent.name != "checkpoints":
        return load_folded_run(path), path.parent / VOCABULARY_FILE
    folder = path if path.is_dir() else path.parent.parent
    return load_trained(path), folder / VOCABULARY_FILE


def _moses(vocabulary: Vocabulary, *, tokens: bool) -> tuple[Callable[[str], str], ...]:
    if not vocabulary.tokenised or tokens:
        return str, str
    source, target = map(moses_rules, vocabulary.languages)
    tokenizer, detokenizer = MosesTokenizer(lang=source), MosesDetokenizer(lang=target)

    def prepare(text: str) -> str:
        return str(tokenizer.tokenize(text, return_str=True, escape=False))

    def finish(text: str) -> str:
        return str(detokenizer.detokenize(text.split()))

    return prepare, finish


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {name!r} is not known: give auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda, but torch finds no CUDA device: give auto or cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
