"""The type of a number that a paper prints, to stand beside ours."""

from dataclasses import dataclass
from math import isinf

from powernorm_lab.models.choices import Placement
from powernorm_lab.runs import PaperRecord


@dataclass(frozen=True, slots=True)
class PaperResult:
    """A measure of a norm on a data set as a paper prints it."""

    norm: str
    """Short name, or the label of a variant; `pn` is PowerNorm with GroupScaling."""
    dataset: str
    placement: Placement
    value: float | None
    """On the test split; infinite where the paper says so, None where it says that the training
    diverged. A BLEU of 0 is a training that failed, too."""
    source: str
    """Paper and table."""
    metric: str = "test_perplexity"
    """Name among the metrics of a run; perplexities are per word."""
    against: tuple[str, ...] = ("ln",)
    """The rows that the paper compares this one with."""

    def record(self) -> PaperRecord:
        """Return the same for `results.json`."""
        return PaperRecord(
            norm=self.norm,
            placement=self.placement,
            dataset=self.dataset,
            metric=self.metric,
            # JSON has no infinity: a perplexity that is infinite is of a training that failed.
            value=None if self.value is not None and isinf(self.value) else self.value,
            source=self.source,
            against=list(self.against),
        )
