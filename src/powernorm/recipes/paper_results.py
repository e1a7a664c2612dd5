"""The type of a number that a paper prints, to stand beside ours."""

from dataclasses import dataclass

from powernorm.models.choices import Placement


@dataclass(frozen=True, slots=True)
class PaperResult:
    """Perplexity of a norm on a data set as a paper prints it."""

    norm: str
    """Short name; `pn` is PowerNorm with GroupScaling."""
    dataset: str
    placement: Placement
    perplexity: float
    """Per word on the test split; infinite where the paper says so."""
    source: str
    """Paper and table."""
