"""Models of this library as folders that transformers can load, if its classes fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.examples import as_call
from powernorm.integrations.architectures import config_of, load_from
from powernorm.surgery.folding.verify import Errors, differences
from powernorm.surgery.saving.records import KEY, is_pretrained
from powernorm.surgery.saving.stock import constant_eps, stock_state, verify_stock

_EPS: Final = re.compile(r"(^|_)eps(ilon)?$")
"""Keys of a configuration that hold the eps of its norms, such as `layer_norm_epsilon`."""
_ROUNDED: Final = {torch.float64: 0.0, torch.float32: 1e-4}
"""Largest relative error in a wider type than that of the stored weights: γ/D of a norm is rounded
to the latter once, while the model with the norm divides in the wider type."""
_ROUNDED_NARROW: Final = 0.05


def check_fits_stock(model: nn.Module) -> None:
    """Raise an InputError unless `save_stock` could write the model; nothing is written.

    Args:
        model: a swapped or folded model.
    """
    _stock_of(model)


def save_stock(model: nn.Module, path: Path) -> None:
    """Write a checkpoint of a model's own class of transformers, load it and compare each norm.

    Static norms in the place of LayerNorm and RMSNorm become norms with an eps so large that they
    divide by a constant, see `powernorm.surgery.saving.stock`.

    Args:
        model: a swapped or folded model.
        path: the folder.

    Raises:
        InputError: the class cannot hold a part of the model, or the folder cannot be written.
    """
    stock, original = _stock_of(model)
    given: Any = model
    if given.can_generate():
        stock.generation_config = given.generation_config
    try:
        stock.save_pretrained(str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    verify_stock(model, load_from(path, type(model))[0], original)


def compare_stock(model: nn.Module, path: Path, example_inputs: object) -> tuple[Errors, ...]:
    """Return the errors of the model that transformers loads from a folder, in float64 and float32.

    Args:
        model: the model given to `save_stock`, in evaluation mode.
        path: the folder.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        InputError: the errors are larger than rounding explains.
    """

    def loaded(like: nn.Module) -> nn.Module:
        stock: nn.Module = load_from(path, type(model), dtype=cast(Any, like).dtype)[0]
        return stock

    errors = differences(model, loaded, [as_call(example_inputs, model)])
    rounded = _ROUNDED.get(cast(Any, model).dtype, _ROUNDED_NARROW)
    for item in errors:
        if not item.relative <= max(item.tolerance, rounded):
            raise InputError(
                f"the model that transformers loads from {path} differs from the saved one "
                f"({item}): it cannot be used"
            )
    return errors


def _stock_of(model: nn.Module) -> tuple[Any, nn.Module]:
    """Return a model of the original class with these weights, and the original without values.

    Raises:
        InputError: it is not a model of transformers, or its class cannot hold a part of it.
    """
    if not is_pretrained(model) or not type(model).__module__.startswith("transformers."):
        raise InputError(
            f"{type(model).__name__} is no model of transformers, whose own class could load "
            "the weights: leave out stock=True"
        )
    kind, given = cast(Any, type(model)), cast(Any, model)
    config = type(given.config).from_dict(config_of(model))
    vars(config).pop(KEY, None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        with torch.device("meta"):
            original = kind._from_config(config, dtype=torch.float32)
        eps = constant_eps(model, original)
        if eps is not None:
            for key, value in config.to_dict().items():
                if _EPS.search(key) and isinstance(value, float):
                    setattr(config, key, eps)
        stock = kind._from_config(config, dtype=torch.float32)
    stock.to(given.dtype)
    stock.load_state_dict(stock_state(model, stock, original))
    stock.eval()
    verify_stock(model, stock, original)
    return stock, original
