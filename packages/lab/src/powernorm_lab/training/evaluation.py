"""Likelihood of a text under a model, without training it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from powernorm.diagnosis import evaluation_gap
from powernorm_lab.data.batch import Batch, EvaluationBatches
from powernorm_lab.engine.processes import summed
from powernorm_lab.engine.watching import evaluating
from powernorm_lab.training.losses import outputs_nll

GAP_BATCHES: Final = 8
"""At every validation this many batches, at most, are evaluated by batch statistics as well."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The cost of a text in nats."""

    nll: float
    """Negative log-likelihood of all tokens together."""
    num_tokens: int
    words_per_token: float
    """Of the text's split."""

    @property
    def loss(self) -> float:
        """Return the nats per token."""
        return self.nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Return exp(nats per word), which does not depend on the subwords; may be infinite."""
        return word_perplexity(self.loss, self.words_per_token)


@dataclass(frozen=True)
class Scores:
    """Scores of the test split beyond its likelihood."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    """How they were computed, by their names."""
    translations: tuple[tuple[str, str, str], ...] = ()
    """Source, reference and translation."""


def word_perplexity(loss: float, words_per_token: float) -> float:
    """Return exp(nats per word) of a loss in nats per token; infinite where it overflows."""
    nats_per_word = loss / words_per_token
    return math.exp(nats_per_word) if nats_per_word < 700 or math.isnan(loss) else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], *, words_per_token: float, device: torch.device
) -> Likelihood:
    """Return the likelihood of all batches of all processes in evaluation mode, in float32.

    The model's mode is as before afterwards.
    """
    with evaluating(model):
        # float64: a split has too many tokens for a float32 sum.
        total, number = summed_nll(model, batches, device, _sum_dtype(device))
    return Likelihood(total, round(number), words_per_token)


def summed_nll(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the nats of all batches of all processes, and the number of their targets.

    Args:
        model: in evaluation mode.
        batches: of this process.
        device: of the model.
        dtype: of the sum.
    """
    nll = torch.zeros((), dtype=dtype, device=device)
    num_targets = 0
    for batch in batches:
        moved = batch.to(device)
        nll += outputs_nll(model, model(**moved.inputs()), moved.targets)
        num_targets += batch.num_targets
    total, number = summed([float(nll), float(num_targets)])
    return total, number


def gap_cells(
    model: nn.Module, batches: EvaluationBatches, device: torch.device
) -> dict[str, float]:
    """Return the cells of METRICS_COLUMNS that compare running with batch statistics.

    Empty for a model without batch statistics. Of at most `GAP_BATCHES` batches, evenly spaced.
    """
    chosen = [batch.to(device) for batch in _spaced(batches, GAP_BATCHES)]
    gap = evaluation_gap(model, chosen, _mean_nll)
    if gap is None:
        return {}
    return {"gap_running_loss": gap.running_loss, "gap_batch_loss": gap.batch_loss}


def _spaced(batches: EvaluationBatches, number: int) -> list[Any]:
    size = len(batches)
    wanted = {round(i * size / number) for i in range(number)}
    return [batch for i, batch in enumerate(batches) if i in wanted]


def _mean_nll(model: nn.Module, batch: Any) -> tuple[float, int]:
    nll = outputs_nll(model, model(**batch.inputs()), batch.targets)
    return float(nll) / max(batch.num_targets, 1), batch.num_targets


def finite_or_none(value: float) -> float | None:
    """Return the value for a JSON file, which has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
