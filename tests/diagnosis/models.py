"""Small models for the tests of diagnosis, and the inputs of their norms, by brute force."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from powernorm.norms import BatchStatisticsNorm, build_norm

BATCH_STATISTICS_NORMS = (
    *("bn", "rbn", "brn", "mabn", "un", "repbn", "prepbn", "pnv", "pn", "pn-only", "pn-static"),
)

OPTIONS = {
    "brn": {"warmup_steps": 0, "ramp_steps": 1},
    "mabn": {"warmup_steps": 0, "window": 2, "ratio_start": 0},
    "un": {"warmup_steps": 0, "window": 2, "ratio_start": None},
    "prepbn": {"decay_steps": 3},
    "pn": {"warmup_steps": 2, "groups": 2},
    "pn-only": {"warmup_steps": 2},
    "pn-static": {"warmup_steps": 2},
}

Batch = tuple[Tensor, Tensor | None]


class Masked(nn.Module):
    """Two norms with a mask, and a dropout that must be off while diagnosing."""

    def __init__(self, norm: str, features: int = 6) -> None:
        super().__init__()
        options = OPTIONS.get(norm, {})
        self.embed = nn.Linear(features, features, dtype=torch.float64)
        self.lower = build_norm(norm, features, dtype=torch.float64, **options)
        self.dropout = nn.Dropout(0.5)
        self.between = nn.Linear(features, features, dtype=torch.float64)
        self.upper = build_norm(norm, features, dtype=torch.float64, **options)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        hidden = self.dropout(self.lower(self.embed(x), padding_mask))
        return self.upper(self.between(hidden).tanh(), padding_mask=padding_mask)


def batches(number: int = 4, features: int = 6, *, seed: int = 0) -> list[Batch]:
    """Batches of unequal size, the odd ones padded, each with its own mean and scale."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Batch] = []
    for index in range(number):
        shape = (2 + index % 3, 3 + index, features)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        mask = None
        if index % 2:
            mask = torch.zeros(shape[:2], dtype=torch.bool)
            mask[0, 1:] = True
            # What must not be looked at.
            x[mask] = 1e6
        made.append((x * (1 + index) + index, mask))
    return made


@contextmanager
def inputs_of(layers: Iterable[BatchStatisticsNorm]) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """The valid tokens that went into each layer, call by call: (tokens, C)."""
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0]
        mask = args[1] if len(args) > 1 else kwargs.get("padding_mask")
        tokens = x.detach() if mask is None else x.detach()[~mask]
        groups = layer.groups
        if groups is not None:
            parts = tokens.reshape(*tokens.shape[:-1], groups, -1)
            scale = (parts.square().mean(-1, keepdim=True) + layer.eps).sqrt()
            tokens = (parts / scale).reshape(tokens.shape)
        seen[layer].append(tokens.reshape(-1, x.shape[-1]))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in seen]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
