"""Settings of language modeling, masked language modeling and tagging."""

from typing import Annotated

from pydantic import Field

from powernorm.lab.settings.data import LEAST_SUBWORDS, BatchedDataSettings
from powernorm.lab.settings.section import section

Length = Annotated[int, Field(ge=2, lt=2**63)]
NumSubwords = Annotated[int, Field(ge=LEAST_SUBWORDS, lt=2**63)]


@section("data")
class SequenceDataSettings(BatchedDataSettings):
    """What is read and how it is cut into batches of sequences."""

    sequence_length: Length = 64
    """Tokens in a segment; also the longest context that the model sees."""


@section("data")
class SubwordDataSettings(SequenceDataSettings):
    """A text over its subwords."""

    vocabulary_size: NumSubwords = 2000
    """Number of byte-pair subwords, every byte and the end mark among them."""
