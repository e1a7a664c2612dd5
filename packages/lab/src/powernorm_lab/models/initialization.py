"""Initial weights that depend on the seed and the architecture alone, never on the norms."""

import math
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from powernorm.norms import Norm
from powernorm_lab.models.choices import Initialization


@runtime_checkable
class ScalesBranches(Protocol):
    """A layer that begins with smaller weights on its branches (DeepNorm)."""

    def scale_branches(self) -> None:
        """Multiply what was drawn."""
        ...


@runtime_checkable
class DrawsWeights(Protocol):
    """A module with weights of its own, outside of linear maps and embeddings."""

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw these weights anew."""
        ...


def initialize(
    model: nn.Module, seed: int, initialization: Initialization = "xavier"
) -> torch.Generator:
    """Draw the weights of every Linear and Embedding of the model anew.

    The draws come from a generator of their own in the order of the modules, and norms keep what
    their constructors gave them, so that models that differ in their norms only start from the
    same weights. Linear: uniform after Glorot and Bengio (2010), bias 0 (`xavier`); or weight and
    bias uniform within 1 / √inputs, as torch's own linear layers begin (`kaiming`). Embedding:
    normal with variance 1 / features, which gives logits of variance 1 when it is tied to a
    normalized output. After these, what a module draws by itself (`DrawsWeights`); then the scales
    of branches (`ScalesBranches`).

    Returns:
        The generator, for what is still to be drawn.
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
    """The modules of a model in their order, each once, without norms and what is in them."""
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    inside = {part for norm in norms for part in norm.modules()}
    return (module for module in model.modules() if module not in inside)


def initialize_table(table: Tensor, generator: torch.Generator) -> None:
    """Draw an embedding's table, or an output's, (vocabulary, features)."""
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
