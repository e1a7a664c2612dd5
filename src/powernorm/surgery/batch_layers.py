"""Choosing among the layers with batch statistics of a model."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from powernorm.errors import InputError
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.observation import check_model, observed_layers

Names = str | Iterable[str]
"""A glob over module names, or several: `"encoder.*"`, `["*.norm1", "final_norm"]`."""


def choose_layers(
    model: nn.Module, names: Names | None, purpose: str
) -> dict[str, BatchStatisticsNorm]:
    """The layers with batch statistics that a glob matches, by name, in the order of the model.

    Args:
        model: any module.
        names: globs over the names of modules; None means all layers.
        purpose: what they are wanted for, for the messages ("to calibrate").

    Raises:
        InputError: no model, no globs, a model without such a layer, or a glob that matches none.
    """
    check_model(model)
    patterns = check_names(names, purpose)
    layers = observed_layers(model)
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no layer with batch statistics {purpose}: put some in "
            "first, for example with powernorm.swap"
        )
    if patterns is None:
        return layers
    chosen = {name for pattern in patterns for name in _matches(layers, pattern, purpose)}
    return {name: layer for name, layer in layers.items() if name in chosen}


def check_names(names: Names | None, purpose: str) -> list[str] | None:
    """Globs as a list, None for None.

    Raises:
        InputError: what is neither a glob nor several, or none at all.
    """
    if names is None:
        return None
    given: object = names
    patterns = [names] if isinstance(names, str) else names
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise InputError(f"names is {names!r}, expected a glob over module names, or several")
    patterns = list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"names has {pattern!r}, expected globs over module names")
    if not patterns:
        raise InputError(f"names is empty, so there is nothing {purpose}: give a glob, or None")
    return patterns


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for a message, cut where there are many."""
    every = list(names)
    text = ", ".join(repr(name) for name in every[:most])
    return text if len(every) <= most else f"{text} and {len(every) - most} more"


def _matches(layers: Iterable[str], pattern: str, purpose: str) -> list[str]:
    found = [name for name in layers if fnmatchcase(name, pattern)]
    if not found:
        raise InputError(
            f"names has {pattern!r}, which matches no layer with batch statistics {purpose}; the "
            f"model has {listed(layers)}"
        )
    return found
