"""Norms of a run by short names and options, checked before any training."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm.norms import NORMS, Norm, build_norm, check_norm_options
from powernorm.norms.adapted import check_output
from powernorm.norms.registry import has_option
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.settings.comparison import ComparisonSettings, options_of
from powernorm_lab.settings.model import SAME, TransformerSettings

EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


UPPER_NORM: Final = "ln"
"""Norm above the `model.num_norm_layers` lowest layers, with its default options."""


def norm_factory(norm: str, options: Mapping[str, Any] = EMPTY, **fixed: Any) -> NormFactory:
    """Return a function that builds a norm for a number of features.

    Unless the options say otherwise, running statistics start as in torch, as in all stored runs.

    Args:
        norm: short name.
        options: options of the norm.
        fixed: further options that the model sets.
    """
    start = {"start": "torch"} if norm in NORMS and has_option(norm, "start") else {}
    return lambda num_features: build_norm(norm, num_features, **{**start, **options, **fixed})


def qk_norm_factory(config: ComparisonSettings) -> NormFactory | None:
    """Return the factory of the norms of queries and keys; None for none, or the layer's norm.

    Raises:
        InputError: the norm is unknown, or its options do not fit it or the model.
    """
    model = config.model
    if not isinstance(model, TransformerSettings) or model.qk_norm is None:
        return None
    if model.qk_norm_type == SAME:
        return None
    width = (model.qk_norm_width,)
    return norm_factory(model.qk_norm_type, norm_options(config, model.qk_norm_type, width))


def norm_options(config: ComparisonSettings, norm: str, widths: Sequence[int]) -> dict[str, Any]:
    """Return the options of a norm, checked by building it.

    Args:
        config: settings with the options.
        norm: short name.
        widths: numbers of features of the model's norms.

    Raises:
        InputError: the norm or an option is unknown, or an option does not fit the model.
    """
    options = options_of(config, norm)
    check_norm_options(norm, options)
    if "feature_dim" in options:
        raise InputError(
            f"norm_options.{norm}.feature_dim={options['feature_dim']}: the model defines the "
            "dimension of the features; leave it out"
        )
    for width in widths:
        built = build_norm(norm, width, **options)
        if norm not in NORMS:
            _try_out(built)
    return options


def _try_out(norm: Norm) -> None:
    """Run a user's norm once, to find errors before any training.

    Raises:
        InputError: its output is not a tensor, or has another shape than its input.
    """
    x = torch.zeros(2, 3, norm.num_features)
    try:
        with torch.no_grad():
            y = norm.eval()(x)
    except InputError:
        raise
    except Exception:  # it may need another device or more dimensions, which a run provides
        return
    check_output(norm, y, x)
