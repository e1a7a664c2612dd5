"""Initial weights that depend on the seed and the architecture, but not on the norms."""

import math
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from powernorm.norms import Norm
from powernorm_lab.models.choices import Initialization


@runtime_checkable
class ScalesBranches(Protocol):
    """A layer that scales down the initial weights of its branches (DeepNorm)."""

    def scale_branches(self) -> None:
        """Scale the initial weights."""
        ...


@runtime_checkable
class DrawsWeights(Protocol):
    """A module with weights other than those of linear maps and embeddings."""

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw these weights."""
        ...


def initialize(
    model: nn.Module, seed: int, initialization: Initialization = "xavier"
) -> torch.Generator:
    """Draw the initial weights of every Linear and Embedding of the model.

    Weights are drawn from a separate generator in the order of the modules, and norms keep the
    weights of their constructors, so that models that differ only in their norms start from the
    same weights. Linear: uniform after Glorot and Bengio (2010), bias 0 (`xavier`); or weight and
    bias uniform within 1 / √inputs, as in torch's linear layers (`kaiming`). Embedding: normal
    with variance 1 / features, which gives logits of variance 1 when it is tied to a normalized
    output. Then modules draw further weights (`DrawsWeights`) and scale their branches
    (`ScalesBranches`).

    Returns:
        The generator, for further draws.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in outside_norms(model):
        if isinstance(module, nn.Linear):
            _initialize_linear(module, initialization, generator)
        elif isinstance(module, nn.Embedding):
            initialize_table(module.weight, generator)
    for module in outside_norms(model):
        if isinstance(module, DrawsWeights):
            module.draw_weights(generator)
    for module in outside_norms(model):
        if isinstance(module, ScalesBranches):
            module.scale_branches()
    return generator


def outside_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules of a model in order, each once, without norms and their submodules."""
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    inside = {part for norm in norms for part in norm.modules()}
    return (module for module in model.modules() if module not in inside)


def initialize_table(table: Tensor, generator: torch.Generator) -> None:
    """Draw the table of an embedding or output layer, (vocabulary, features)."""
    nn.init.normal_(table, std=1 / math.sqrt(table.shape[1]), generator=generator)


def _initialize_linear(
    linear: nn.Linear, initialization: Initialization, generator: torch.Generator
) -> None:
    if initialization == "xavier":
        nn.init.xavier_uniform_(linear.weight, generator=generator)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
        return
    nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=generator)
    if linear.bias is not None:
        bound = 1 / math.sqrt(linear.in_features)
        nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
