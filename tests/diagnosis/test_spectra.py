import pytest
import torch
from torch import nn

from powernorm.diagnosis.spectra import embedding_spectra, normalized_spectrum


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
