"""Small Transformer-XLs and a text that they read in segments."""

import torch
from lab.tests.task_models import learned
from torch import Tensor, nn

from powernorm.norms import build_norm
from powernorm_lab.models.choices import Placement, TransformerShape
from powernorm_lab.tasks.lm_char.model import TransformerXL

VOCABULARY, FEATURES, TEXT = 11, 8, 12


def build(
    norm: str = "ln",
    *,
    placement: Placement = "post",
    memory_length: int = 4,
    evaluation_memory_length: int | None = None,
    max_distance: int | None = None,
    num_lanes: int = 1,
    dropout: float = 0.0,
    seed: int = 0,
) -> TransformerXL:
    def make(num_features: int) -> nn.Module:
        return build_norm(norm, num_features)

    return TransformerXL(
        VOCABULARY,
        make,
        TransformerShape(
            num_features=FEATURES,
            num_layers=2,
            num_heads=2,
            feedforward_features=12,
            placement=placement,
            dropout=dropout,
            activation="relu",
        ),
        memory_length=memory_length,
        evaluation_memory_length=evaluation_memory_length,
        num_lanes=num_lanes,
        max_distance=max_distance,
        seed=seed,
    )


def text(rows: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, TEXT), generator=generator)


def trained(model: TransformerXL) -> TransformerXL:
    return learned(model, text)


def in_segments(model: TransformerXL, tokens: Tensor, length: int) -> Tensor:
    """Return the logits of a text, computed segment by segment."""
    outputs = []
    for first in range(0, tokens.shape[1], length):
        starts = torch.arange(len(tokens)) * 1000 + first
        outputs.append(model(tokens[:, first : first + length], starts))
    return torch.cat(outputs, dim=1)
