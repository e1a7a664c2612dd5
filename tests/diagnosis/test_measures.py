"""Measures of a norm's input, by hand and by their definitions."""

import math

import pytest
import torch
from torch import nn

from powernorm.diagnosis.measures import (
    CovarianceSums,
    PositionEnergy,
    TokenShares,
    conditioning,
    embedding_spectra,
    loud_features,
    normalized_spectrum,
)


def test_conditioning_equals_the_definition() -> None:
    """κ_p = λ_1/λ_⌈p d⌉ by singular values of the centered tokens."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(200, 10, generator=generator, dtype=torch.float64)
    tokens = tokens * torch.linspace(0.1, 3, 10, dtype=torch.float64) + 5
    sums = CovarianceSums()
    for part in tokens.split([50, 1, 149]):
        sums.add(part)
    found = sums.cells()
    centered = tokens - tokens.mean(0)
    values = torch.linalg.svdvals(centered).square() / 200
    assert found["lambda_1"] == pytest.approx(values[0].item(), rel=1e-10)
    for name, share in (("kappa_20", 0.2), ("kappa_50", 0.5), ("kappa_80", 0.8)):
        index = math.ceil(round(share * 10, 6))
        assert found[name] == pytest.approx((values[0] / values[index - 1]).item(), rel=1e-9)


def test_a_large_mean_does_not_eat_the_digits() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(500, 4, generator=generator)
    shifted = CovarianceSums()
    shifted.add(tokens + 4096)
    plain = CovarianceSums()
    plain.add(tokens)
    assert shifted.cells()["lambda_1"] == pytest.approx(plain.cells()["lambda_1"], rel=1e-3)


def test_scale_changes_lambda_and_not_kappa() -> None:
    generator = torch.Generator().manual_seed(3)
    covariance = torch.randn(30, 8, generator=generator, dtype=torch.float64).T.cov()
    one, other = conditioning(covariance), conditioning(9 * covariance)
    assert other.pop("lambda_1") == pytest.approx(9 * one.pop("lambda_1"))
    assert other == pytest.approx(one)


def test_degenerate_covariance_is_infinite() -> None:
    covariance = torch.diag(torch.tensor([4.0, 2.0, 0.0, 0.0, 0.0]))
    found = conditioning(covariance)
    assert found == {"lambda_1": 4, "kappa_20": 1, "kappa_50": math.inf, "kappa_80": math.inf}


def test_too_few_tokens_have_no_conditioning() -> None:
    sums = CovarianceSums()
    assert sums.cells() == {}
    sums.add(torch.ones(1, 3))
    assert sums.cells() == {}


def test_equals_the_eigenvalues_of_the_gram_matrix() -> None:
    matrix = torch.randn(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(matrix.T @ matrix).flip(0)
    expected = (eigenvalues / eigenvalues[0]).sqrt().tolist()
    assert normalized_spectrum(matrix) == pytest.approx(expected)


def test_a_matrix_of_nothing() -> None:
    assert normalized_spectrum(torch.zeros(4, 2)) == [0.0, 0.0]


def test_large_embeddings_each_once() -> None:
    model = nn.ModuleDict(
        {"words": nn.Embedding(30, 4), "positions": nn.Embedding(8, 4), "other": nn.Linear(4, 4)}
    )
    model["again"] = nn.Embedding(30, 4)
    model["again"].weight = model["words"].weight
    assert [found["name"] for found in embedding_spectra(model, {})] == ["words"]
    assert embedding_spectra(nn.Linear(2, 2), {}) == []
    with torch.inference_mode():
        built = nn.Embedding(30, 4)
    assert len(embedding_spectra(built, {})) == 1


def test_loud_features() -> None:
    found = loud_features(torch.tensor([1.0, 1.0, 49.0, 100.0, 1.0]))
    assert (found["num_outliers"], found["outlier_feature"]) == (2, 3)
    assert found["outlier_ratio"] == pytest.approx(10)


def test_silent_features() -> None:
    assert loud_features(torch.zeros(4))["num_outliers"] == 0
    found = loud_features(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert found["outlier_ratio"] == math.inf


def test_the_first_valid_token_counts_as_the_first() -> None:
    """Left padding shifts positions; what is padded has no energy."""
    x = torch.ones(2, 5, 3)
    mask = torch.tensor([[True, True, False, False, False], [False] * 5])
    x[0, :2] = 1e6
    x[0, 2] = 10
    x[1, 0] = 10
    energy = PositionEnergy()
    energy.add(x, mask)
    found = energy.cells()
    assert found == {"top_position": 0, "top_position_ratio": pytest.approx(100)}


def test_batches_of_other_lengths_add_up() -> None:
    energy = PositionEnergy()
    energy.add(torch.ones(1, 2, 4), None)
    energy.add(torch.cat([torch.ones(3, 3, 4), 4 * torch.ones(3, 1, 4)], dim=1), None)
    assert energy.cells() == {"top_position": 3, "top_position_ratio": 16.0}


def test_no_sequences() -> None:
    energy = PositionEnergy()
    energy.add(torch.ones(4, 3), None)
    assert energy.cells() == {}


def test_a_residual_sink_is_the_feature_above_100_medians_in_most_tokens() -> None:
    """By hand: of six tokens four have the sink, one has another large feature."""
    tokens = torch.tensor([[1.0, -1, 1, 1, 1]]).repeat(6, 1)
    tokens[:4, 2] = -101.0
    tokens[4, 0] = 101.0
    tokens[5, 2] = 99.0
    shares = TokenShares(nn.LayerNorm(5))
    shares.add(tokens[:3])
    shares.add(tokens[3:])
    found = shares.cells()
    assert (found["sink_feature"], found["sink_share"]) == (2, 4 / 6)
    assert not {"saturated_share", "slope"} & found.keys()
