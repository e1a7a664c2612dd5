"""Per-token norms over the token's own features: no state, the same in training and evaluation.

All take `padding_mask` for the common interface; it changes no value, because tokens are
normalized independently. A token that receives no gradient passes none on, whatever it holds: NaN
in padding reaches neither the parameters nor the layers below.
"""

from __future__ import annotations

from typing import Any, cast, get_args

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.arguments import Variant, check_choice, check_groups, check_number
from powernorm.norms.base import AffineNorm, StatelessNorm
from powernorm.norms.feature_dims import Normalized
from powernorm.ops.token_norm import OPERATOR as TOKEN_NORM
from powernorm.ops.token_norm import TokenNormArgs, layer_norm, token_norm


def _by_token(norm: AffineNorm, x: Tensor, residual: Tensor | None, **settings: Any) -> Normalized:
    """Return the result of a norm's forward, by settings of `TokenNormArgs`."""
    prepares = norm.may_prepare(x, residual)
    key = (norm.eps, *settings.values()) if prepares else ()
    if prepares and norm._prepared is not None:
        result = norm.run_prepared(x, None, key)
        if result is not None:
            return cast(Tensor, result)
    weight, bias = norm.gamma_and_beta()
    args = TokenNormArgs(x, residual, weight, bias, eps=norm.eps, **settings)
    y, total = token_norm(args)
    if prepares and norm._prepared is None:
        norm.keep_prepared(TOKEN_NORM.prepare(args), key)
    return y if residual is None else (y, cast(Tensor, total))


class _StandardizingNorm(AffineNorm):
    """Base of norms with LayerNorm's statistics, in the papers' and the released form."""

    shown_settings = (*AffineNorm.shown_settings, "variant")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        variant: Variant = "paper",
        affine: bool = False,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, True, feature_dim, device, dtype)
        self.variant = check_choice("variant", variant, get_args(Variant))
        if variant == "released" and self.num_features == 1:
            raise InputError(
                "variant='released' divides by C - 1 and needs at least 2 features, got 1: use "
                "variant='paper'"
            )

    def standardize(
        self,
        x: Tensor,
        residual: Tensor | None,
        *,
        scale: float = 1.0,
        k: float = 0.0,
        detach_mean: bool = False,
        detach_std: bool = False,
    ) -> Normalized:
        """Remove mean and standard deviation; settings as in `ops.token_norm.TokenNormArgs`."""
        return _by_token(
            self,
            x,
            residual,
            released=self.variant == "released",
            scale=scale,
            k=k,
            detach_mean=detach_mean,
            detach_std=detach_std,
        )


class SimpleLayerNorm(_StandardizingNorm):
    """LayerNorm without γ and β (Xu et al. 2019, Section 3.1): `y = (x - μ)/σ` per token.

    Args:
        num_features: C.
        eps: inside the root; `released`: added to σ.
        variant: `paper`, or `released`: the variance divides by C - 1, eps is added to σ.
        affine: learn γ and β (not in the paper).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters, if affine.
        dtype: type of the parameters, if affine.

    Shape:
        x (..., C), output as x.

    >>> SimpleLayerNorm(2)(torch.tensor([[1.0, 3.0]])).round(decimals=3)
    tensor([[-1.,  1.]])
    """

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C)."""
        return self.standardize(x, residual)


class DetachNorm(_StandardizingNorm):
    """SimpleLayerNorm whose statistics are constants in the backward (Xu et al. 2019, eq. 4).

    The forward is SimpleLayerNorm's. The norm isolates the effect of the derivatives of μ and σ on
    training.

    Args:
        num_features: C.
        detach_mean: no gradient through μ.
        detach_std: no gradient through σ.
        eps: inside the root; `released`: added to σ.
        variant: `paper` or `released`, see SimpleLayerNorm.
        affine: learn γ and β (not in the paper).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters, if affine.
        dtype: type of the parameters, if affine.

    Shape:
        x (..., C), output as x.

    >>> x = torch.randn(3, 4)
    >>> torch.equal(DetachNorm(4)(x), SimpleLayerNorm(4)(x))
    True
    """

    shown_settings = (*_StandardizingNorm.shown_settings, "detach_mean", "detach_std")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        detach_mean: bool = True,
        detach_std: bool = True,
        *,
        eps: float = 1e-5,
        variant: Variant = "paper",
        affine: bool = False,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, variant, affine, feature_dim, device, dtype)
        self.detach_mean = detach_mean
        self.detach_std = detach_std

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C)."""
        return self.standardize(
            x, residual, detach_mean=self.detach_mean, detach_std=self.detach_std
        )


class AdaNorm(_StandardizingNorm):
    """AdaNorm (Xu et al. 2019, eq. 9): `z = C (1 - k y) ⊙ y`, the factor constant in backward.

    Instead of γ and β the layer scales each value by its distance from the token's mean.

    Args:
        num_features: number of features (the paper's H).
        scale: C; the released translation runs use 2.
        k: strength of the scaling; the paper finds 1/10.
        eps: inside the root; `released`: added to σ.
        variant: `paper` or `released`, see SimpleLayerNorm.
        affine: learn γ and β (not in the paper).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters, if affine.
        dtype: type of the parameters, if affine.

    Shape:
        x (..., num_features), output as x.

    >>> AdaNorm(4)(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    shown_settings = (*_StandardizingNorm.shown_settings, "scale", "k")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        scale: float = 1.0,
        k: float = 0.1,
        *,
        eps: float = 1e-5,
        variant: Variant = "paper",
        affine: bool = False,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, variant, affine, feature_dim, device, dtype)
        self.scale = check_number("scale", scale)
        self.k = check_number("k", k)

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C)."""
        return self.standardize(x, residual, scale=self.scale, k=self.k)


class LayerNorm(StatelessNorm):
    """torch's LayerNorm with this library's signature: `y = γ (x - μ)/σ + β` per token.

    Numerics:
        torch's own function computes it in evaluation, this library's kernel in training: its
        gradients ignore padding, NaN included. Results differ by rounding.

    Args:
        num_features: C.
        eps: added to the variance.
        affine: learn γ and β.
        bias: learn β, if affine.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        x (..., C), output as x.
    """

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C)."""
        if self.training:
            # Padding may hold NaN, which torch's backward multiplies by incoming zeros. Chosen by
            # the mode only, because a checkpoint repeats the forward without a known mask.
            return _by_token(self, x, residual)
        return super().normalize(x, None, residual)

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C), in evaluation."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(AffineNorm):
    """RMSNorm (Zhang and Sennrich 2019): `y = γ x/sqrt(mean x² + eps)` per token.

    Args:
        num_features: C.
        eps: added to the mean square.
        affine: learn γ (there is no β).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameter.
        dtype: type of the parameter.

    Shape:
        x (..., C), output as x.

    >>> RMSNorm(2)(torch.tensor([[3.0, 4.0]])).round(decimals=3)
    tensor([[0.8490, 1.1310]], grad_fn=<RoundBackward1>)
    """

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        affine: bool = True,
        *,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, False, feature_dim, device, dtype)

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C)."""
        return _by_token(self, x, residual, centered=False)


class GroupScaling(AffineNorm):
    """Divide each token's feature groups by their root mean square (Shen et al. 2020, App. A).

    This is the "layer-scale" that Shen et al. put before every norm of their comparison. The
    batch-statistics norms have it as an option `groups`.

    Args:
        num_features: C.
        groups: number of equal groups of features; 1, or the number of heads.
        eps: added to the mean square.
        affine: learn γ and β (not in the paper).
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters, if affine.
        dtype: type of the parameters, if affine.

    Shape:
        x (..., C), output as x.

    >>> GroupScaling(4, groups=2)(torch.tensor([1.0, 1.0, 5.0, 5.0])).round(decimals=3)
    tensor([1., 1., 1., 1.])
    """

    shown_settings = ("groups", "eps")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        groups: int = 1,
        *,
        eps: float = 1e-5,
        affine: bool = False,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, True, feature_dim, device, dtype)
        self.groups = check_groups(groups, self.num_features)

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Scale the groups of (..., C)."""
        return _by_token(self, x, residual, groups=self.groups, centered=False)


class GroupNorm(AffineNorm):
    """GroupNorm over the features of one token (Wu and He 2018), not over other tokens.

    Args:
        num_features: C.
        groups: number of equal groups of features.
        eps: added to the variance.
        affine: learn γ and β.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        x (..., C), output as x.
    """

    shown_settings = (*AffineNorm.shown_settings, "groups")

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        groups: int = 1,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, True, feature_dim, device, dtype)
        self.groups = check_groups(groups, self.num_features)

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C)."""
        return _by_token(self, x, residual, groups=self.groups)
