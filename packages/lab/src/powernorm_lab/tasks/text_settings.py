"""Settings of text that several tasks share."""

from typing import Annotated, Literal

from pydantic import Field

from powernorm_lab.settings.data import LEAST_SUBWORDS, BatchedDataSettings
from powernorm_lab.settings.section import section

Length = Annotated[int, Field(ge=2, lt=2**63)]
NumSubwords = Annotated[int, Field(ge=LEAST_SUBWORDS, lt=2**63)]


@section("data")
class SequenceDataSettings(BatchedDataSettings):
    """What is read and how it is cut into batches of sequences."""

    sequence_length: Length = 64
    """Tokens in a segment; also the longest context that the model sees."""


Vocabulary = Literal["subwords", "words"]


@section("data")
class SubwordDataSettings(SequenceDataSettings):
    """A text over its subwords, or over whole words."""

    vocabulary: Vocabulary = "subwords"
    """`subwords` spell every word by byte pairs; `words` are those between white space, and those
    that are not among them are `<unk>`, as in the papers."""
    vocabulary_size: NumSubwords = 2000
    """Number of byte-pair subwords, every byte and the end mark among them; of words at most, the
    most frequent ones, the end mark and `<unk>` among them."""
