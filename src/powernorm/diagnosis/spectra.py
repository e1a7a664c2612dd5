"""Singular values of embeddings."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from powernorm.runs import SpectrumRecord

_ROWS: Final = 4096
"""So many rows of a table are converted at a time."""


def embedding_spectra(model: nn.Module, notes: dict[str, None]) -> list[SpectrumRecord]:
    """The spectrum of each large embedding, a shared one once (Shen et al. 2020, Fig. 6).

    Those with less than half of the rows of the largest are left out: positions, token types.

    Args:
        model: any module.
        notes: receives a word on tables that hold NaN or infinity, which have no spectrum.
    """
    tables: dict[int, tuple[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not module.weight.is_meta:
            tables.setdefault(id(module.weight), (name or "embedding", module.weight))
    most = max((weight.shape[0] for _, weight in tables.values()), default=0)
    found = []
    for name, weight in tables.values():
        if 2 * weight.shape[0] < most:
            continue
        if not bool(weight.isfinite().all()):
            notes[f"{name} holds NaN or infinite values: it has no spectrum"] = None
            continue
        found.append(SpectrumRecord(name=name, values=normalised_spectrum(weight)))
    return found


@torch.no_grad()
def normalised_spectrum(matrix: Tensor) -> list[float]:
    """Singular values of a matrix, the largest first, divided by it; zeros for a matrix of 0.

    Numerics: roots of the eigenvalues of its smaller Gram matrix in float64, so values below 1e-8
    of the largest are rounding.
    """
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64)
    for rows in matrix.detach().split(_ROWS):
        part = rows.cpu().double()
        gram += part.T @ part
    values = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()
    largest = values[0].item()
    return [value / largest if largest else 0.0 for value in values.tolist()]
