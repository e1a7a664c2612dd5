import math

import pytest
import torch
from torch import nn

from powernorm.diagnosis.spectra import (
    CovarianceSums,
    conditioning,
    embedding_spectra,
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
