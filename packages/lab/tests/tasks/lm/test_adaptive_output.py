"""The adaptive softmax equals its definition as a distribution."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms import build_norm
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.tasks.lm.model import AdaptiveLanguageModel, LanguageModel, TensorizedAttention

VOCABULARY, CUTOFFS, LENGTH = 23, (4, 11), 6


def build(
    norm: str = "ln",
    *,
    seed: int = 0,
    is_tensorized: bool = False,
    cutoffs: tuple[int, ...] = CUTOFFS,
) -> AdaptiveLanguageModel:
    model = LanguageModel(
        VOCABULARY,
        lambda num_features: build_norm(norm, num_features),
        TransformerShape(num_features=16, num_heads=2, feedforward_features=12),
        max_length=LENGTH,
        attention=partial(TensorizedAttention, 16, 5, LENGTH) if is_tensorized else None,
        seed=seed,
    )
    return AdaptiveLanguageModel(model, VOCABULARY, cutoffs, seed=seed)


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (3, LENGTH), generator=generator)


def distribution(model: AdaptiveLanguageModel, features: Tensor) -> Tensor:
    """Compute all log-probabilities by the definition of the adaptive softmax."""
    adaptive = model.adaptive
    head = (features @ adaptive.head.weight.T).log_softmax(-1)
    parts = [head[..., : CUTOFFS[0]]]
    for cluster, tail in enumerate(adaptive.tail):
        narrow, wide = (linear.weight for linear in tail)
        inside = (features @ narrow.T @ wide.T).log_softmax(-1)
        parts.append(head[..., CUTOFFS[0] + cluster, None] + inside)
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("is_tensorized", [False, True])
def test_likelihood_is_that_of_the_whole_distribution(is_tensorized: bool) -> None:
    model = build(is_tensorized=is_tensorized).eval()
    outputs = model(tokens(0))
    expected = distribution(model, outputs)
    torch.testing.assert_close(expected.exp().sum(-1), torch.ones(3, LENGTH))
    torch.testing.assert_close(model.log_probabilities(outputs), expected)
    targets = tokens(1)
    targets[0, 2:] = IGNORED
    counted = targets != IGNORED
    picked = expected[counted].gather(-1, targets[counted][:, None])
    torch.testing.assert_close(model.nll(outputs, targets), -picked.sum())


def test_targets_of_a_whole_vocabulary_reach_every_weight() -> None:
    model = build()
    outputs = model(torch.zeros(4, LENGTH, dtype=torch.long))
    model.nll(outputs, torch.arange(24).clamp(max=VOCABULARY - 1).view(4, LENGTH)).backward()
    assert all(bool(weight.grad.any()) for weight in model.adaptive.parameters())


def test_nothing_counts() -> None:
    model = build()
    nll = model.nll(model(tokens(0)), torch.full((3, LENGTH), IGNORED))
    nll.backward()
    assert float(nll.detach()) == 0
    assert model.model.embedding.weight.grad is not None
    empty = torch.zeros(0, LENGTH, dtype=torch.long)
    assert float(model.eval().nll(model(empty), empty).detach()) == 0


def test_every_process_has_all_gradients(tmp_path: Path) -> None:
    model = build()
    targets = torch.zeros(3, LENGTH, dtype=torch.long)  # in no cluster
    model.nll(model(tokens(0)), targets).backward()
    alone = [weight.grad is None for weight in model.adaptive.parameters()]
    assert alone == [False, True, True, True, True]
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model.nll(model(tokens(0)), targets).backward()
    finally:
        dist.destroy_process_group()
    assert all(weight.grad is not None for weight in model.adaptive.parameters())


@pytest.mark.parametrize("norm", ["bn", "pn", "adanorm"])
def test_all_norms_start_from_the_same_output(norm: str) -> None:
    torch.manual_seed(hash(norm) % 1000)  # earlier draws must have no effect
    ours, theirs = build(norm).adaptive.state_dict(), build("ln").adaptive.state_dict()
    assert len(ours) == 5
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["head.weight"], build(norm, seed=1).adaptive.head.weight)


@pytest.mark.parametrize(
    ("cutoffs", "message"),
    [
        ((), "do not fit a vocabulary of 23: give increasing ids from 1 to 22"),
        ((4, 23), "adaptive_cutoffs=4,23 do not fit a vocabulary of 23"),
        ((0, 4), "adaptive_cutoffs=0,4 do not fit"),
        ((9, 4), "adaptive_cutoffs=9,4 do not fit"),
        ((2, 4, 6), "less than one of the 16 features; give fewer cutoffs"),
    ],
)
def test_bad_cutoffs(cutoffs: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(cutoffs=cutoffs)
