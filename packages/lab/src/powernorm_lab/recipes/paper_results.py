"""Published results of papers, which are shown next to ours."""

from dataclasses import dataclass
from math import isinf

from powernorm_lab.models.choices import Placement
from powernorm_lab.runs import PaperRecord


@dataclass(frozen=True, slots=True)
class PaperResult:
    """Published result of a norm on a data set."""

    norm: str
    """Short name, or the label of a variant; `pn` is PowerNorm with GroupScaling."""
    dataset: str
    placement: Placement
    value: float | None
    """Value on the test split; infinite if the paper says so, None if the training diverged. A BLEU
    of 0 is a failed training, too."""
    source: str
    """Paper and table."""
    metric: str = "test_perplexity"
    """Name of the run metric; perplexities are per word."""
    against: tuple[str, ...] = ("ln",)
    """Rows that the paper compares this one with."""

    def record(self) -> PaperRecord:
        """Return the entry of `results.json`."""
        return PaperRecord(
            norm=self.norm,
            placement=self.placement,
            dataset=self.dataset,
            metric=self.metric,
            # JSON has no infinity; an infinite perplexity is a failed training.
            value=None if self.value is not None and isinf(self.value) else self.value,
            source=self.source,
            against=list(self.against),
        )
