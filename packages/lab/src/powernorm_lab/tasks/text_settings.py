"""Settings of text that several tasks share."""

from typing import Annotated, Literal

from pydantic import Field

from powernorm_lab.settings.data import LEAST_SUBWORDS, BatchedDataSettings
from powernorm_lab.settings.section import section

Length = Annotated[int, Field(ge=2, lt=2**63)]
NumSubwords = Annotated[int, Field(ge=LEAST_SUBWORDS, lt=2**63)]


@section("data")
class SequenceDataSettings(BatchedDataSettings):
    """Settings of data that are divided into batches of sequences."""

    sequence_length: Length = 64
    """Number of tokens in a segment, which is the longest context of the model."""


Vocabulary = Literal["subwords", "words"]


@section("data")
class SubwordDataSettings(SequenceDataSettings):
    """Settings of a text that is encoded by subwords or whole words."""

    vocabulary: Vocabulary = "subwords"
    """`subwords`: byte pairs, which spell every word; `words`: tokens between white space, with
    `<unk>` for words outside of the vocabulary, as in the papers."""
    vocabulary_size: NumSubwords = 2000
    """Number of byte-pair subwords, including all bytes and the end mark; for words the maximal
    number of most frequent ones, including the end mark and `<unk>`."""
