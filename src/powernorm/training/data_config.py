"""The section `data` of a configuration."""

from dataclasses import dataclass, field

from powernorm.data.parallel_languages import check_languages
from powernorm.errors import InputError
from powernorm.training.config_checks import check_at_least
from powernorm.training.config_fields import LATER


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is read and how it is cut into batches."""

    path: str | None = None
    """Folder or file of the user's text, or the name of a data set; None is the task's own.

    That is `sotu` of language models, `petrogold` of `tag` and `parse`, `verses` of `translation`,
    `rt` of `classify`, `hironsan` of `ner`; `powernorm data` lists all.
    """
    vocabulary_size: int = 2000
    """Number of byte-pair subwords, at least 257 (every byte and the end mark).

    For the tasks `tag`, `parse`, `classify` and `ner` the number of words instead, marks included,
    at least one beside them. Which of the two holds is the task's to check.
    """
    sequence_length: int = 64
    """Tokens in a segment; also the longest context that the model sees."""
    batch_size: int = 32
    """Segments in a micro-batch."""
    evaluation_batch_size: int = 64
    """Segments in a batch of validation and test."""
    languages: str | None = field(default=None, metadata=LATER)
    """Source and target of a translation, as `de-en`; None is that of the embedded verses."""
    tokenised: bool = field(default=False, metadata=LATER)
    """Whether the lines of a translation come as tokens (Moses), as the official ones do."""
    target_vocabulary_size: int | None = field(default=None, metadata=LATER)
    """Subwords of a target language with a vocabulary of its own; None is one for both."""
    batch_tokens: int | None = field(default=None, metadata=LATER)
    """Positions of a micro-batch (of pairs those of the longer side), over all processes."""
    count_padding: bool = field(default=True, metadata=LATER)
    """Whether padded positions count in `batch_tokens`."""
    max_length_ratio: float | None = field(default=None, metadata=LATER)
    """Training pairs whose sides differ by more than this factor in subwords are left out; None
    keeps them."""
    max_pairs: int | None = field(default=None, metadata=LATER)
    """Only about so many training pairs, evenly spaced; None is all."""
    max_examples: int | None = field(default=None, metadata=LATER)
    """Only about so many training examples, evenly spaced; None is all."""
    vectors: str | None = field(default=None, metadata=LATER)
    """Text file of word vectors (GloVe) that the embeddings of a tagger of names begin with."""
    augmentation: bool = field(default=False, metadata=LATER)
    """Whether images of the training are shifted and mirrored at random."""

    def __post_init__(self) -> None:
        check_at_least("data.vocabulary_size", self.vocabulary_size, 1)
        for name, least in (
            ("target_vocabulary_size", 257),
            ("batch_tokens", 1),
            ("max_pairs", 1),
            ("max_examples", 1),
        ):
            if getattr(self, name) is not None:
                check_at_least(f"data.{name}", getattr(self, name), least)
        if self.max_length_ratio is not None and not self.max_length_ratio >= 1:
            raise InputError(
                f"data.max_length_ratio={self.max_length_ratio} must be 1 or more, or none for all."
            )
        if self.languages is not None:
            check_languages(self.languages)
        check_at_least("data.sequence_length", self.sequence_length, 2)
        check_at_least("data.batch_size", self.batch_size, 1)
        check_at_least("data.evaluation_batch_size", self.evaluation_batch_size, 1)
