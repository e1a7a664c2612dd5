"""Translation of text by a trained model."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from powernorm.errors import InputError
from powernorm_lab.runs import SUBWORDS_FILE
from powernorm_lab.tasks.trained_models import (
    SUBWORDS,
    TrainedModel,
    is_folded,
    load_folded_run,
    load_trained,
    run_config,
)
from powernorm_lab.tasks.translation.model import TranslationModel
from powernorm_lab.tasks.translation.search import translate_ids
from powernorm_lab.tasks.translation.settings import DecodingSettings, TranslationSettings
from powernorm_lab.tasks.translation.vocabulary import (
    Moses,
    Pieces,
    SubwordVocabulary,
    TextEncoder,
    read_vocabulary,
    vocabulary_of,
)

Ranked = list[tuple[str, float]]
"""Translations of a sentence with their scores, best first."""


@dataclass(frozen=True)
class Translator:
    """Translates sentences.

    Attributes:
        model: model in evaluation mode.
        subwords: subwords of source and target.
        decoding: settings of the search.
        num_best: number of translations of each sentence.
        device: device of the model.
        max_length: maximal number of subwords of a sentence; longer sentences are truncated.
        moses: tokenizes and detokenizes text; None for a model of raw text.
    """

    model: TranslationModel
    subwords: tuple[TextEncoder, TextEncoder]
    decoding: DecodingSettings
    num_best: int
    device: torch.device
    max_length: int
    moses: Moses | None = None

    def translate(self, sentences: Sequence[str]) -> list[Ranked]:
        """Return the translations of each sentence, on one line each.

        The translations of an empty sentence are empty. Sentences that are longer than `max_length`
        cause a warning.
        """
        filled = [number for number, text in enumerate(sentences) if text.strip()]
        source, target = self.subwords
        texts = [sentences[number] for number in filled]
        ids = source.encode(texts if self.moses is None else list(map(self.moses.tokenized, texts)))
        for number, row in zip(filled, ids, strict=True):
            if len(row) > self.max_length:
                warnings.warn(
                    f"sentence {number} has {len(row)} subwords; only the first "
                    f"{self.max_length} are translated",
                    stacklevel=2,
                )
                del row[self.max_length :]
        found = translate_ids(
            self.model, ids, self.decoding, self.device, num_best=self.num_best
        ).hypotheses
        ranked: list[Ranked] = [[("", 0.0)] * self.num_best for _ in sentences]
        for number, best in zip(filled, found, strict=True):
            texts = target.decode([hypothesis.tokens for hypothesis in best])
            if self.moses is not None:
                texts = list(map(self.moses.detokenized, texts))
            # Subwords can spell every byte, including line breaks.
            texts = [" ".join(text.split()) for text in texts]
            scores = (hypothesis.score for hypothesis in best)
            known = list(zip(texts, scores, strict=True))
            # `num_best` lines for each sentence, even if the search found fewer translations.
            ranked[number] = known + [("", -math.inf)] * (self.num_best - len(known))
        return ranked


def load_translator(
    path: Path,
    *,
    num_best: int = 1,
    tokens: bool = False,
    device: torch.device | str = "cpu",
) -> Translator:
    """Load a model that `powernorm compare translation` trained.

    Args:
        path: a run's folder, one of its checkpoints, or the folder of a folded model.
        num_best: number of translations of each sentence; the beam of the run is enlarged to this.
        tokens: for a model of tokenized text: use tokens as input and output; otherwise text is
            tokenized and detokenized by Moses' rules. For a model of subwords without codes: use
            split text as input.
        device: device of the search.

    Raises:
        InputError: there is no such model, or it is of another task.
    """
    trained, vocabulary = _load(path)
    config = run_config(trained.settings)
    model = trained.model
    if not isinstance(config, TranslationSettings) or not isinstance(model, TranslationModel):
        raise InputError(f"{path} is a run of the task {config.task}, which does not translate")
    known = vocabulary()
    if isinstance(known.source, Pieces) and known.source.codes is None and not tokens:
        raise InputError(
            f"{path} was trained on split files without their codes: give text that is split in "
            "the same way (`Hau@@ s`), with tokens=True"
        )
    decoding = replace(config.decoding, beam_size=max(num_best, config.decoding.beam_size))
    moses = None
    if known.tokenization is not None and not tokens:
        moses = Moses(known.languages, known.tokenization)
    return Translator(
        model=model.to(device),
        subwords=(known.source, known.target),
        decoding=decoding,
        num_best=num_best,
        device=torch.device(device),
        max_length=config.data.sequence_length - 1,
        moses=moses,
    )


def _load(path: Path) -> tuple[TrainedModel, Callable[[], SubwordVocabulary]]:
    """Return a model, and a function that reads its subwords."""
    if is_folded(path):
        folded = load_folded_run(path)
        return folded, lambda: vocabulary_of(folded.settings.get(SUBWORDS, {}), path)
    folder = path if path.is_dir() else path.parent.parent
    return load_trained(path), lambda: read_vocabulary(folder / SUBWORDS_FILE)
