"""Small translation models and batches for the tests of the model and of the search."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.norms import build_norm
from powernorm_lab.models.choices import Initialization, Placement, TransformerShape
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.tasks.translation.model import NormPlaces, TranslationModel
from powernorm_lab.tasks.translation.settings import SharedEmbeddings

VOCABULARY, FEATURES = 11, 8


def factory(norm: str) -> NormFactory:
    def make(num_features: int) -> nn.Module:
        return build_norm(norm, num_features)

    return make


def build(
    encoder_norm: str = "ln",
    decoder_norm: str = "ln",
    *,
    vocabulary: int = VOCABULARY,
    placement: Placement = "pre",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    activation_dropout: float | None = None,
    shared_embeddings: SharedEmbeddings = "all",
    initialization: Initialization = "xavier",
    num_layers: int = 2,
    seed: int = 0,
    **shape: Any,
) -> TranslationModel:
    return TranslationModel(
        vocabulary,
        vocabulary,
        NormPlaces.everywhere(factory(encoder_norm)),
        factory(decoder_norm),
        TransformerShape(
            num_features=FEATURES,
            num_layers=num_layers,
            num_heads=2,
            feedforward_features=12,
            placement=placement,
            dropout=dropout,
            attention_dropout=attention_dropout,
            activation_dropout=activation_dropout,
            initialization=initialization,
            activation="relu",
            **shape,
        ),
        shared_embeddings=shared_embeddings,
        seed=seed,
    )


def tokens(batch: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """Tokens that are not the end mark."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (batch, length), generator=generator)


def padding(*lengths: int, length: int | None = None) -> Tensor:
    """The mask of rows of these lengths."""
    return torch.arange(length or max(lengths)) >= torch.tensor(lengths)[:, None]


def trained(model: TranslationModel, steps: int = 3) -> TranslationModel:
    """Return the model in evaluation mode, with trained weights and running statistics."""
    vocabulary = model.head.out_features
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.add_(0.2 * (noise - 0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        source, target = (tokens(4, 6, seed, vocabulary) for seed in (step, step + 100))
        logits = model(source, target[:, :-1], padding(6, 6, 4, 3))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # `none` diverges without it
        optimizer.step()
    return model.eval()
