"""Settings of the translation task."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from powernorm_lab.models.placements import WITHOUT_FINAL_NORM
from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import DataSettings, Length, NumSubwords
from powernorm_lab.settings.model import DetailedTransformerSettings
from powernorm_lab.settings.section import (
    NotNegative,
    NotNegativeNumber,
    Positive,
    refuse,
    section,
)
from powernorm_lab.settings.training import ClassifierTrainingSettings, SelectedBy
from powernorm_lab.tasks.translation.layouts import check_languages

SharedEmbeddings = Literal["all", "target", "none"]
"""Shared tables of a translation model: source, target and output; target and output; or none."""

LengthNormalization = Literal["power", "wu2016"]
"""Divisor of the log-probability of a hypothesis of n tokens: n^α, or ((5 + n) / 6)^α (Wu et al.
2016, eq. 14)."""


@section("data")
class TranslationDataSettings(DataSettings):
    """Settings of sentence pairs and their batches."""

    batch_tokens: Positive
    """Positions of the longer side of a micro-batch, including padding, over all processes."""
    subwords: str = "learned"
    """Source of the subwords: `learned` on the train split; `split` for files that hold subwords
    (`Hau@@ s`); or the path of codes of subword-nmt or of a model of SentencePiece (.model), which
    split the words of the files."""
    joint_vocabulary: bool = True
    """For subwords that are not learned: whether source and target share a vocabulary."""
    vocabulary_size: NumSubwords | None = 2000
    """Number of byte-pair subwords, including all bytes and the end mark; none if they are not
    learned."""
    target_vocabulary_size: NumSubwords | None = None
    """Number of subwords of a separate target vocabulary; none is one vocabulary for both."""
    sequence_length: Length = 64
    """Maximal length of a side in subwords, including the end mark; longer pairs are left out."""
    languages: str | None = None
    """Source and target language, as `de-en`; none is that of the embedded verses."""
    tokenized: bool = False
    """Whether the lines are tokenized (by Moses), as those of official corpora."""
    split_compounds: bool = False
    """Whether to report `test_bleu_compound`, too: BLEU of tokens with compounds split at their
    dashes, as some papers score WMT14 English-German."""
    max_length_ratio: Annotated[float, Field(ge=1)] | None = None
    """Training pairs whose lengths in subwords differ by more than this factor are left out; none
    keeps all."""
    max_pairs: Positive | None = None
    """Number of evenly spaced training pairs to use; none is all."""

    def __post_init__(self) -> None:
        if self.languages is not None:
            check_languages(self.languages)
        if self.subwords == "learned":
            self._check_learned()
        else:
            self._check_imported()

    def _check_learned(self) -> None:
        if self.vocabulary_size is None:
            raise refuse(
                "data.vocabulary_size", None, "is the number of learned subwords: give a number"
            )
        if not self.joint_vocabulary:
            raise refuse(
                "data.joint_vocabulary",
                False,
                "is for subwords that are not learned: give data.target_vocabulary_size, or set "
                "data.subwords",
            )

    def _check_imported(self) -> None:
        for name in ("vocabulary_size", "target_vocabulary_size"):
            if getattr(self, name) is not None:
                raise refuse(
                    f"data.{name}",
                    getattr(self, name),
                    f"is the number of learned subwords, but data.subwords={self.subwords} defines "
                    f"its own: set data.{name}=none",
                )
        if self.subwords.endswith(".model") and not self.joint_vocabulary:
            raise refuse(
                "data.joint_vocabulary", False, "does not fit one model of SentencePiece for both"
            )


@section("model")
class TranslationShape(DetailedTransformerSettings):
    """The shape of an encoder-decoder Transformer."""

    num_decoder_layers: Positive | None = None
    """Number of decoder layers; none is that of the encoder."""
    decoder_norm: str = "ln"
    """Short name of the decoder's norms; `same` is the encoder's norm. The papers change only the
    encoder."""
    final_norm: str | None = None
    """Short name of the norm after the encoder's last layer, for placements with one; none is the
    run's norm."""
    final_norm_warmup: NotNegative | None = None
    """Warm-up steps of the norm after the encoder's last layer, if it has a warm-up; none is that
    of the other norms."""
    shared_embeddings: SharedEmbeddings = "all"
    """Shared embedding tables: all three, target and output, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement not in WITHOUT_FINAL_NORM:
            return
        for name in ("final_norm", "final_norm_warmup"):
            if getattr(self, name) is not None:
                raise refuse(
                    f"model.{name}",
                    getattr(self, name),
                    f"does not apply to model.placement={self.placement}, which has no norm after "
                    f"the last layer: set model.{name}=none",
                )


@section("decoding")
class DecodingSettings:
    """Settings of the search for translations."""

    beam_size: Positive = 5
    """Number of hypotheses kept at each step; 1 is greedy."""
    length_normalization: LengthNormalization = "power"
    """Divisor of the log-probability of a hypothesis of length n: n^α (`power`, as in the papers),
    or ((5 + n) / 6)^α (`wu2016`)."""
    length_penalty: NotNegativeNumber = 1.0
    """α; 0 does not normalize."""
    max_length_factor: NotNegativeNumber = 1.0
    """A translation has at most factor · (length of its source) + offset subwords."""
    max_length_offset: NotNegative = 50
    """Offset in the formula of `max_length_factor`."""
    batch_tokens: Positive = 4096
    """Source positions of a batch in the search, including padding."""


@section("training")
class TranslationTrainingSettings(ClassifierTrainingSettings):
    """Length of the run, logging, and translation in validations."""

    score_every: NotNegative = 0
    """Number of validations between two that translate up to 500 evenly spaced sentences greedily;
    the last validation does, too. Their BLEU is `valid_score` in metrics.csv. 0 translates none."""
    select_by: SelectedBy = "loss"


@section()
class TranslationSettings(ComparisonSettings):
    """Settings of `powernorm compare translation`."""

    task: ClassVar[str] = "translation"
    measure: ClassVar[str] = "test_bleu"
    score: ClassVar[Goal | None] = Goal(metric="valid_bleu", direction="max")
    data: TranslationDataSettings
    model: TranslationShape = TranslationShape()
    training: TranslationTrainingSettings = TranslationTrainingSettings()
    decoding: DecodingSettings = DecodingSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.data.target_vocabulary_size
        if self.model.shared_embeddings == "all" and not self.data.joint_vocabulary:
            raise refuse(
                "data.joint_vocabulary",
                False,
                "gives the target a separate vocabulary, which cannot share a table with that of "
                "the source: set model.shared_embeddings to target or none",
            )
        if self.model.shared_embeddings == "all" and own is not None:
            raise refuse(
                "data.target_vocabulary_size",
                own,
                "gives the target a separate vocabulary, which cannot share a table with that of "
                "the source: set model.shared_embeddings to target or none",
            )
