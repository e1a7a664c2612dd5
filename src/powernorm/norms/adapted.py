"""Adapting any module, such as one that a user has registered, to the interface of all norms."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from copy import deepcopy
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.base import Norm
from powernorm.norms.checkpointing import CallRecords, SeenInputs
from powernorm.norms.feature_dims import (
    LAST,
    Normalized,
    answer,
    features_back,
    features_last,
    has_dim,
)
from powernorm.norms.masks import current_padding_mask, padding_mask
from powernorm.ops.torch_private import may_be_repeated

_EPS: Final = 1e-5
"""Value of `eps` for a module that has none; the interface requires one, but it is not used."""


class AdaptedNorm(Norm):
    """A module with `forward(x)` or `forward(x, padding_mask)` as a `Norm`.

    The features are moved to the last dimension and back, and a residual is added before the
    module. The padding mask, of the call or of the scope, is passed to the module's argument
    `padding_mask` or, by a scope, to norms of this library inside it. A module that is an affine
    map per feature in evaluation may declare it by an attribute `is_static = True`: then it folds.
    The tokens of a nested tensor reach the module as (tokens, C); a distributed one as it is.

    Args:
        layer: maps (..., C), features last, to the same shape.
        num_features: C.
        feature_dim: the dimension of x that holds the features.
        looks_along: whether the module itself works along `feature_dim`; then nothing is moved.

    Raises:
        InputError: in the forward: the module does not return a tensor of x's shape.
    """

    takes_local = False  # the module may compute over several tokens

    def __init__(
        self,
        layer: nn.Module,
        num_features: int,
        *,
        feature_dim: int = LAST,
        looks_along: bool = False,
    ) -> None:
        eps = getattr(layer, "eps", None)
        super().__init__(
            num_features, eps if isinstance(eps, float) and eps > 0 else _EPS, feature_dim
        )
        self.layer = layer
        self._looks_along = looks_along
        self._takes_mask = _takes_mask(layer)
        self._shows_mask = any(
            isinstance(part, Norm) and part.reads_mask for part in layer.modules()
        )
        self.reads_mask = self._takes_mask or self._shows_mask
        self._has_affine = _begins_as_affine(layer, self.num_features)
        self._records = CallRecords()

    @property
    def class_name(self) -> str:
        """Class name of the module."""
        return type(self.layer).__name__

    @property
    def affine_part(self) -> nn.Module:
        """The module if its `weight` and `bias` began as 1 and 0; else they may mean anything."""
        return self.layer if self._has_affine else self

    @property
    def weight(self) -> nn.Parameter | None:
        """Weight of the module, for code that reads a norm's weight."""
        return self.layer._parameters.get("weight")

    @property
    def bias(self) -> nn.Parameter | None:
        """Bias of the module, for code that reads a norm's bias."""
        return self.layer._parameters.get("bias")

    @property
    def is_static(self) -> bool:
        """Whether the module declares itself static."""
        return getattr(self.layer, "is_static", False) is True

    def normalize_dense(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None
    ) -> Normalized:
        """Normalize over `feature_dim`; see the class."""
        if padding_mask is None and self.reads_mask:
            padding_mask = self._mask_of_scope(x)
        if self._looks_along:
            self.check_input(x, padding_mask, residual)
            return self.normalize(x, padding_mask, residual)
        return super().normalize_dense(x, padding_mask, residual)

    def normalize(self, x: Tensor, mask: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Call the module with the arguments that it takes."""
        total = x if residual is None else x + residual
        shown = padding_mask(mask) if self._shows_mask and mask is not None else nullcontext()
        with shown:
            y = self.layer(total, padding_mask=mask) if self._takes_mask else self.layer(total)
        y = check_output(self, y, total)
        return answer((y.to(x.dtype), total), residual)

    def _mask_of_scope(self, x: Tensor) -> Tensor | None:
        dim = self.feature_dim
        last = features_last(x, dim) if has_dim(x, dim) else x
        mask = current_padding_mask(last, self, strict=self.training)
        if torch.compiler.is_compiling() or not may_be_repeated():
            return mask
        return self._records.replay(self.class_name, x, SeenInputs(mask, 0, ())).padding_mask

    @torch.no_grad()
    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c) with `y = a ⊙ x + c` in evaluation, found from the outputs for 0 and 1.

        Raises:
            InputError: the module does not declare itself static, or other tokens show that it is
                not.
        """
        if not self.is_static:
            return super().affine()
        twin = deepcopy(self).to("cpu", torch.float64).eval()
        generator = torch.Generator().manual_seed(0)
        others = torch.empty(6, self.num_features, dtype=torch.float64, device="cpu")
        others.normal_(0, 8, generator=generator)
        ends = torch.zeros_like(others[:2])
        ends[1] = 1
        tokens = torch.cat([ends, others])
        y = twin._of_tokens(tokens)
        shift, scale = y[0], y[1] - y[0]
        if not torch.allclose(y[2:], scale * others + shift, rtol=1e-4, atol=1e-4):
            raise InputError(
                f"{self.class_name} declares itself static, but in evaluation it is no affine map "
                "per feature: remove is_static from it"
            )
        return scale, shift

    def _of_tokens(self, tokens: Tensor) -> Tensor:
        """Return the outputs for (tokens, C), called in the layout of `feature_dim`."""
        dim = self.feature_dim
        ndim = max(3, dim + 1, -dim)
        x = features_back(tokens.reshape(*(1,) * (ndim - 2), *tokens.shape), dim)
        y = self.forward(x.contiguous())
        assert isinstance(y, Tensor)
        return features_last(y, dim).reshape(tokens.shape)

    def reset_parameters(self) -> None:
        """Reset the module and its parts, those that have a method of this name."""
        for part in self.layer.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()


def check_output(norm: Norm, y: object, x: Tensor) -> Tensor:
    """Return a norm's output, or raise an InputError unless it is a tensor of the input's shape."""
    if isinstance(y, Tensor) and y.shape == x.shape:
        return y
    what = f"the shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
    raise InputError(
        f"{norm.class_name} returned {what} for an input of shape {tuple(x.shape)}, expected a "
        "tensor of its input's shape"
    )


def _takes_mask(layer: nn.Module) -> bool:
    try:
        return "padding_mask" in inspect.signature(layer.forward).parameters
    except ValueError:  # compiled code has no signature
        return False


def _begins_as_affine(layer: nn.Module, num_features: int) -> bool:
    """Return whether a new module has γ and β, or one of them, by names, shapes and values.

    A `weight` that begins as 0 may be γ - 1.
    """
    starts = {"weight": 1.0, "bias": 0.0}
    own = {name: layer._parameters.get(name) for name in starts}
    return all(
        parameter is None
        or (
            parameter.shape == (num_features,)
            and not parameter.is_meta
            and bool((parameter == starts[name]).all())
        )
        for name, parameter in own.items()
    )
