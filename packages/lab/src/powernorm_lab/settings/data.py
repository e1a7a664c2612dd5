"""Base classes of the tasks' sections `data`."""

from typing import Annotated, Literal

from pydantic import Field

from powernorm_lab.settings.section import Positive, section

LEAST_SUBWORDS = 257
"""Smallest vocabulary of subwords: every byte and the end mark."""


@section("data")
class DataSettings:
    """Source of the data."""

    path: str | None = None
    """Folder, file, or name of a data set (`powernorm data` lists them); none is the task's
    default."""


@section("data")
class BatchedDataSettings(DataSettings):
    """Source of the data and batch sizes."""

    batch_size: Positive = 32
    """Rows in a micro-batch: segments, sentences, texts or images."""
    evaluation_batch_size: Positive = 64
    """Rows in a batch of validation and test."""


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
