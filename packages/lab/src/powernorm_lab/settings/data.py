"""What the sections `data` of the tasks are made of."""

from powernorm_lab.settings.section import Positive, section

LEAST_SUBWORDS = 257
"""Every byte and the end mark."""


@section("data")
class DataSettings:
    """What is read."""

    path: str | None = None
    """Folder or file of the user's own, or the name of a data set (`powernorm data` lists them);
    none is the task's own."""


@section("data")
class BatchedDataSettings(DataSettings):
    """What is read, and how much of it is a batch."""

    batch_size: Positive = 32
    """Rows of a micro-batch: segments, sentences, texts or images."""
    evaluation_batch_size: Positive = 64
    """Rows of a batch of validation and test."""
