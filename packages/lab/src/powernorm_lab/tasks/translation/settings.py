"""Settings of translation."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from powernorm_lab.models.placements import WITHOUT_FINAL_NORM
from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import DataSettings
from powernorm_lab.settings.model import DetailedTransformerSettings
from powernorm_lab.settings.section import (
    NotNegative,
    NotNegativeNumber,
    Positive,
    refuse,
    section,
)
from powernorm_lab.settings.training import ClassifierTrainingSettings, SelectedBy
from powernorm_lab.tasks.text_settings import Length, NumSubwords
from powernorm_lab.tasks.translation.languages import check_languages

SharedEmbeddings = Literal["all", "target", "none"]
"""Which tables of a translation model are one: those of source, target and output; those of target
and output; none."""

LengthNormalization = Literal["power", "wu2016"]
"""What the log-probability of a hypothesis of n tokens is divided by: n^α, or ((5 + n) / 6)^α
(Wu et al. 2016, eq. 14)."""


@section("data")
class TranslationDataSettings(DataSettings):
    """The sentence pairs and how they are cut into batches."""

    batch_tokens: Positive
    """Positions of a micro-batch, of pairs those of the longer side, padding included, over all
    processes."""
    subwords: str = "learned"
    """Where the subwords are from: `learned` on the train split; `split`, the files hold pieces of
    words (`Hau@@ s`); or the path of codes of subword-nmt or of a model of SentencePiece (.model),
    which cut the words of the files."""
    joint_vocabulary: bool = True
    """Of subwords that are not learned: whether source and target have one vocabulary."""
    vocabulary_size: NumSubwords | None = 2000
    """Number of byte-pair subwords, every byte and the end mark among them; none where they are not
    learned."""
    target_vocabulary_size: NumSubwords | None = None
    """Subwords of a target language with a vocabulary of its own; none is one for both."""
    sequence_length: Length = 64
    """Longest side of a pair in subwords, the end mark included; longer ones are left out."""
    languages: str | None = None
    """Source and target, as `de-en`; none is that of the embedded verses."""
    tokenized: bool = False
    """Whether the lines come as tokens (Moses), as the official ones do."""
    split_compounds: bool = False
    """Whether `test_bleu_compound` is given, too: BLEU of tokens whose compounds are split at their
    dashes, as some papers score WMT14 English-German."""
    max_length_ratio: Annotated[float, Field(ge=1)] | None = None
    """Training pairs whose sides differ by more than this factor in subwords are left out; none
    keeps them."""
    max_pairs: Positive | None = None
    """Only about so many training pairs, evenly spaced; none is all."""

    def __post_init__(self) -> None:
        if self.languages is not None:
            check_languages(self.languages)
        if self.subwords == "learned":
            self._check_learned()
        else:
            self._check_imported()

    def _check_learned(self) -> None:
        if self.vocabulary_size is None:
            raise refuse("data.vocabulary_size", None, "says how many are learned: give a number")
        if not self.joint_vocabulary:
            raise refuse(
                "data.joint_vocabulary",
                False,
                "is of subwords that are not learned: give data.target_vocabulary_size, or set "
                "data.subwords",
            )

    def _check_imported(self) -> None:
        for name in ("vocabulary_size", "target_vocabulary_size"):
            if getattr(self, name) is not None:
                raise refuse(
                    f"data.{name}",
                    getattr(self, name),
                    f"says how many are learned, and data.subwords={self.subwords} has its own: "
                    f"set data.{name}=none",
                )
        if self.subwords.endswith(".model") and not self.joint_vocabulary:
            raise refuse(
                "data.joint_vocabulary", False, "does not fit one model of SentencePiece for both"
            )


@section("model")
class TranslationShape(DetailedTransformerSettings):
    """The shape of an encoder-decoder Transformer."""

    num_decoder_layers: Positive | None = None
    """Layers of the decoder; none is as many as the encoder has."""
    decoder_norm: str = "ln"
    """Short name of the norms in the decoder; `same` is the encoder's. The papers change the
    encoder only."""
    final_norm: str | None = None
    """Short name of the norm after the encoder's last layer, with placements that have one; none is
    the run's norm."""
    final_norm_warmup: NotNegative | None = None
    """Warm-up steps of the norm after the encoder's last layer, where it has a warm-up; none is
    that of the others."""
    shared_embeddings: SharedEmbeddings = "all"
    """Which tables are one: all three, target and output, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement not in WITHOUT_FINAL_NORM:
            return
        for name in ("final_norm", "final_norm_warmup"):
            if getattr(self, name) is not None:
                raise refuse(
                    f"model.{name}",
                    getattr(self, name),
                    f"has no place with model.placement={self.placement}, where no norm follows "
                    f"the last layer: set model.{name}=none",
                )


@section("decoding")
class DecodingSettings:
    """How translations are searched."""

    beam_size: Positive = 5
    """Hypotheses that are kept at each step; 1 is greedy."""
    length_normalization: LengthNormalization = "power"
    """What the log-probability of a hypothesis of length n is divided by: n^α (`power`, the papers
    here), or ((5 + n) / 6)^α (`wu2016`)."""
    length_penalty: NotNegativeNumber = 1.0
    """α; 0 compares log-probabilities as they are."""
    max_length_factor: NotNegativeNumber = 1.0
    """A translation has at most factor · (length of its source) + offset subwords."""
    max_length_offset: NotNegative = 50
    """See `max_length_factor`."""
    batch_tokens: Positive = 4096
    """Source positions of a batch of searches, padding included."""


@section("training")
class TranslationTrainingSettings(ClassifierTrainingSettings):
    """The length of the run, and what is watched and translated during it."""

    score_every: NotNegative = 0
    """Validations from one at which up to 500 evenly spaced sentences are translated, greedily, to
    the next; their BLEU is `valid_score` in metrics.csv; where there are any, that of the last is;
    0 translates none."""
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
                "gives the target pieces of its own, which cannot share a table with those of "
                "the source: set model.shared_embeddings to target or none",
            )
        if self.model.shared_embeddings == "all" and own is not None:
            raise refuse(
                "data.target_vocabulary_size",
                own,
                "gives the target subwords of its own, which cannot share a table with those of "
                "the source: set model.shared_embeddings to target or none",
            )
