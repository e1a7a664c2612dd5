"""Base classes of the tasks' sections `data`."""

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
