"""Likelihood of a split under a model."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from powernorm.diagnosis import evaluation_gap
from powernorm_lab.data.batch import Batch, EvaluationBatches
from powernorm_lab.engine.between_steps import evaluating
from powernorm_lab.engine.processes import summed
from powernorm_lab.training.losses import outputs_nll

GAP_BATCHES: Final = 8
"""Maximal number of batches that each validation also evaluates with batch statistics."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The cost of a text in nats."""

    nll: float
    """Negative log-likelihood, summed over all tokens."""
    num_tokens: int
    words_per_token: float
    """Ratio in the text's split."""

    @property
    def loss(self) -> float:
        """Return the nats per token."""
        return self.nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Return exp(nats per word), which is comparable between vocabularies; may be infinite."""
        return word_perplexity(self.loss, self.words_per_token)


@dataclass(frozen=True)
class Scores:
    """Scores of the test split beyond its likelihood."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    """Descriptions of how metrics were computed, by their names."""
    translations: tuple[tuple[str, str, str], ...] = ()
    """Source, reference and translation of each sentence."""


def word_perplexity(loss: float, words_per_token: float) -> float:
    """Return exp(nats per word) of a loss in nats per token; infinite on overflow."""
    nats_per_word = loss / words_per_token
    return math.exp(nats_per_word) if nats_per_word < 700 or math.isnan(loss) else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], *, words_per_token: float, device: torch.device
) -> Likelihood:
    """Return the likelihood over the batches of all processes in evaluation mode, in float32.

    The model's mode is restored afterwards.
    """
    with evaluating(model):
        # float64: a split has too many tokens for a float32 sum.
        total, number = summed_nll(model, batches, device, _sum_dtype(device))
    return Likelihood(total, round(number), words_per_token)


def summed_nll(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the nats and the number of targets, summed over the batches of all processes.

    Args:
        model: model in evaluation mode.
        batches: batches of this process.
        device: device of the model.
        dtype: dtype of the sum.
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

    They are measured on at most `GAP_BATCHES` evenly spaced batches. The result is empty for a
    model without batch statistics.
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
    """Return the value for a JSON file; None for infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
