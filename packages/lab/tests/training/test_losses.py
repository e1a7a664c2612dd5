import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from minimized import training_losses
from tiny_translation import tiny_translation, write_pairs
from torch import Tensor

from powernorm.norms import RegularizedBatchNorm
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.tasks.translation.data import EncodedPairs
from powernorm_lab.tasks.translation.task import TranslationTask
from powernorm_lab.training.losses import smoothed_cross_entropy

PENALTIES = {"mean_penalty": 30.0, "var_penalty": 20.0}
SMOOTHING = 0.2


@settings(max_examples=40)
@given(
    positions=st.integers(1, 12),
    vocabulary=st.integers(1, 9),
    smoothing=st.sampled_from([0.0, 0.1, 0.5, 0.99]),
    seed=st.integers(0, 1000),
)
def test_equals_torch(positions: int, vocabulary: int, smoothing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(positions, vocabulary, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (positions,), generator=generator)
    targets[torch.rand(positions, generator=generator) < 0.3] = IGNORED

    def torchs(epsilon: float) -> Tensor:
        return F.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=epsilon
        )

    minimized, plain = smoothed_cross_entropy(logits, targets, smoothing)
    torch.testing.assert_close(minimized, torchs(smoothing), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, torchs(0.0), rtol=1e-5, atol=1e-5)
    assert not plain.requires_grad
    (own,) = torch.autograd.grad(minimized, logits)
    (wanted,) = torch.autograd.grad(torchs(smoothing), logits)
    torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)


def test_nothing_to_predict_costs_nothing() -> None:
    """A process may have a batch without rows."""
    logits = torch.randn(3, 5, requires_grad=True)
    minimized, plain = smoothed_cross_entropy(logits, torch.full((3,), IGNORED), SMOOTHING)
    assert float(minimized.detach()) == float(plain) == 0.0
    (gradient,) = torch.autograd.grad(minimized, logits)
    assert not gradient.any()


def test_half_precision_is_summed_in_float32() -> None:
    logits = torch.zeros(4000, 3, dtype=torch.bfloat16)
    minimized, plain = smoothed_cross_entropy(logits, torch.zeros(4000, dtype=torch.long), 0.1)
    assert minimized.dtype == plain.dtype == torch.float32
    assert float(plain) == pytest.approx(4000 * math.log(3), rel=1e-5)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> EncodedPairs:
    pairs = write_pairs(tmp_path_factory.mktemp("losses") / "pairs")
    return TranslationTask().encode(tiny_translation(pairs))


def brute_force(logits: Tensor, targets: Tensor) -> float:
    """Compute the smoothed loss by its definition, position by position, in float64."""
    total = 0.0
    for row, target in zip(logits.double().tolist(), targets.tolist(), strict=True):
        if target == IGNORED:
            continue
        log_sum = math.log(sum(math.exp(value) for value in row))
        for token, value in enumerate(row):
            wanted = SMOOTHING / len(row) + (1 - SMOOTHING) * (token == target)
            total -= wanted * (value - log_sum)
    return total


@pytest.mark.parametrize("norm", ["ln", "rbn"])
def test_losses_of_an_update_add_up_to_the_mean_over_its_tokens(
    encoded: EncodedPairs, norm: str
) -> None:
    """The mean over micro-batches of different sizes is (Σ losses + Σ penalties) / tokens."""
    config = tiny_translation(
        Path(encoded.corpus.source),
        model={"dropout": 0.0, "attention_dropout": 0.0},
        optimizer={"accumulation": 3},
        training={"label_smoothing": SMOOTHING},
        norm_options={"rbn": PENALTIES},
    )
    task = TranslationTask()
    pairs = task.data(encoded, config, 0).batches
    batches = [pairs.batch(position) for position in range(3)]
    assert len({batch.num_targets for batch in batches}) > 1
    model, other = (task.build(config, norm, task.sizes(encoded), 0) for _ in range(2))
    losses, cross_entropies, total, plain, penalties, num_tokens = [], [], 0.0, 0.0, 0.0, 0
    for batch in batches:
        got = training_losses(model, batch, SMOOTHING)
        got["loss"].backward()
        losses.append(float(got["loss"].detach()))
        cross_entropies.append(float(got["cross_entropy"]))
        graph = other(**batch.inputs()).flatten(0, 1)
        logits = graph.detach()
        targets = batch.targets.flatten()
        total += brute_force(logits, targets)
        plain += float(F.cross_entropy(logits.double(), targets, reduction="sum"))
        layers = [m for m in other.modules() if isinstance(m, RegularizedBatchNorm)]
        penalties += sum(float(layer.penalty().detach()) for layer in layers)
        graph.sum().backward()  # updates the running statistics, on which penalties depend
        num_tokens += int((targets != IGNORED).sum())
    assert (penalties > 1) == (norm == "rbn")
    assert sum(losses) / 3 == pytest.approx((total + penalties) / num_tokens, rel=1e-5)
    assert sum(cross_entropies) / 3 == pytest.approx(plain / num_tokens, rel=1e-5)
