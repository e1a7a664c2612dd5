"""Singular values of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from powernorm.runs import SpectrumRecord


def embedding_spectra(model: nn.Module) -> list[SpectrumRecord]:
    """The spectrum of each large embedding, a shared one once (Shen et al. 2020, Fig. 6).

    Those with less than half of the rows of the largest are left out: positions, token types.
    """
    tables: dict[int, tuple[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not module.weight.is_meta:
            tables.setdefault(id(module.weight), (name, module.weight))
    most = max((weight.shape[0] for _, weight in tables.values()), default=0)
    return [
        SpectrumRecord(name=name or "embedding", values=normalised_spectrum(weight))
        for name, weight in tables.values()
        if 2 * weight.shape[0] >= most
    ]


@torch.no_grad()
def normalised_spectrum(matrix: Tensor) -> list[float]:
    """Singular values of a matrix, the largest first, divided by it; zeros for a matrix of 0."""
    values = torch.linalg.svdvals(matrix.detach().double().cpu())
    largest = values[0].item()
    return [value / largest if largest else 0.0 for value in values.tolist()]
