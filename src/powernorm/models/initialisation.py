"""Initial weights that depend on the seed and the architecture alone, never on the norms."""

import math

import torch
from torch import nn


def initialise(model: nn.Module, seed: int) -> None:
    """Draw the weights of every Linear and Embedding of the model anew.

    The draws come from a generator of their own in the order of the modules, and norms keep what
    their constructors gave them, so that models that differ in their norms only start from the
    same weights. Linear: uniform after Glorot and Bengio (2010), bias 0. Embedding: normal with
    variance 1 / features, which gives logits of variance 1 when it is tied to a normalised output.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            std = 1 / math.sqrt(module.embedding_dim)
            nn.init.normal_(module.weight, std=std, generator=generator)
