"""Per-token norms with other scales than γ: SeeDNorm, ScaleNorm, BiasNorm, GatedRMSNorm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import check_count
from powernorm.norms.base import StatelessNorm
from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.pointwise import centered_scale, dynamic_scale, low_rank_gate, unit_length
from powernorm.ops.token_norm import TokenNormArgs, token_norm


class SeeDNorm(StatelessNorm):
    """SeeDNorm, self-rescaled dynamic norm (Cai et al. 2025).

    `y = (γ + α tanh⟨x, b⟩) ⊙ x/sqrt(mean x² + eps)` per token: RMSNorm while b is 0; then its scale
    depends on the token itself. The paper decays α and b like other weights, and for images also
    drops parts of the dynamic term.

    Args:
        num_features: C.
        num_heads: number of equal slices of the features, each with its own tanh. For ViT the
            paper has 16; with one head it diverged there.
        eps: added to the mean square.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Attributes:
        weight: γ, (C,), 1 at the start.
        alpha: α, (C,), 1 at the start.
        beta: b, (C,), 0 at the start; not a shift.

    Shape:
        x (..., C), output as x.

    >>> SeeDNorm(2)(torch.tensor([[3.0, 4.0]])).round(decimals=3)
    tensor([[0.8490, 1.1310]], grad_fn=<RoundBackward1>)
    """

    shown_settings = ("num_heads", "eps")
    weight: nn.Parameter

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        num_heads: int = 1,
        eps: float = 1e-6,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, True, False, feature_dim, device, dtype)
        self.num_heads = check_count("num_heads", num_heads, 1)
        if self.num_features % num_heads:
            raise InputError(
                f"num_heads is {num_heads}, expected a divisor of the {self.num_features} features"
            )
        shape = (self.num_features,)
        self.alpha = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C)."""
        wide = x.to(accumulation_dtype(x))
        z, _ = token_norm(TokenNormArgs(wide, None, None, None, eps=self.eps, centered=False))
        y = dynamic_scale(wide, z, self.weight, self.alpha, self.beta, self.num_heads)
        return y.to(x.dtype)

    def reset_parameters(self) -> None:
        """Set γ and α to 1 and b to 0."""
        super().reset_parameters()
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)


class ScaleNorm(StatelessNorm):
    """ScaleNorm (Nguyen and Salazar 2019): `y = g x/max(‖x‖, eps)` per token, g one learned scalar.

    The paper pairs it with embeddings of fixed length (FixNorm).

    Args:
        num_features: C.
        eps: floor of the length, not added to it; a token below it is divided by eps.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameter.
        dtype: type of the parameter.

    Attributes:
        scale: g, (1,), √C at the start.

    Shape:
        x (..., C), output as x.

    >>> ScaleNorm(2)(torch.tensor([[3.0, 4.0]])).round(decimals=3)
    tensor([[0.8490, 1.1310]], grad_fn=<RoundBackward1>)
    """

    shown_settings = ("eps",)

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        eps: float = 1e-5,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, False, False, feature_dim, device, dtype)
        start = math.sqrt(self.num_features)
        self.scale = nn.Parameter(torch.full((1,), start, device=device, dtype=dtype))

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C)."""
        return unit_length(x, self.scale, self.eps)

    def reset_parameters(self) -> None:
        """Set g to √C."""
        nn.init.constant_(self.scale, math.sqrt(self.num_features))


class BiasNorm(StatelessNorm):
    """BiasNorm of the Zipformer (Yao et al. 2023, arXiv:2310.11230), `y = exp(γ) x/RMS(x - b)`.

    The scale ignores b, and x itself is not centered. The model therefore need not keep a feature
    large to make the others independent of the scale.

    Args:
        num_features: C.
        eps: added to the mean square of x - b.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Attributes:
        center: b, (C,), 0 at the start, so that the layer begins as RMSNorm.
        log_scale: γ, (1,), 0 at the start (1 in the authors' code).

    Shape:
        x (..., C), output as x.

    >>> BiasNorm(2)(torch.tensor([[3.0, 4.0]])).round(decimals=3)
    tensor([[0.8490, 1.1310]], grad_fn=<RoundBackward1>)
    """

    shown_settings = ("eps",)

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        eps: float = 1e-5,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, False, False, feature_dim, device, dtype)
        self.center = nn.Parameter(torch.zeros(self.num_features, device=device, dtype=dtype))
        self.log_scale = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C)."""
        scale = self.log_scale.to(accumulation_dtype(x)).exp()
        return centered_scale(x, self.center, scale, self.eps)

    def reset_parameters(self) -> None:
        """Set γ and b to 0."""
        nn.init.zeros_(self.center)
        nn.init.zeros_(self.log_scale)


class GatedRMSNorm(StatelessNorm):
    """GatedNorm (Qiu et al. 2026, arXiv:2601.22966): `y = z ⊙ σ(U silu(D z))`, z = RMSNorm(x).

    The gate of low rank scales features depending on the token, for which a model otherwise needs
    outlier features in the residual stream.

    Args:
        num_features: C.
        rank: R, the width of the gate.
        eps: added to the mean square.
        feature_dim: the dimension of x that holds the features; 1 for (N, C, H, W).
        device: device of the parameters.
        dtype: type of the parameters.

    Attributes:
        weight: γ of the RMSNorm, (C,), 1 at the start.
        down: D, (R, C), rows of the cosine transform DCT-IV at the start.
        up: U, (C, R), 0 at the start: every gate begins at ½. (Both initial values are ours. They
            are not random, so that a seed gives a model's other weights the same values with every
            norm.)

    Shape:
        x (..., C), output as x.

    >>> GatedRMSNorm(2, rank=1)(torch.tensor([[3.0, 4.0]])).round(decimals=3)
    tensor([[0.4240, 0.5660]], grad_fn=<RoundBackward1>)
    """

    shown_settings = ("rank", "eps")
    weight: nn.Parameter

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        rank: int = 16,
        eps: float = 1e-6,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, True, False, feature_dim, device, dtype)
        self.rank = check_count("rank", rank, 1)
        shape = (rank, self.num_features)
        self.down = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(shape[::-1], device=device, dtype=dtype))
        self._start_gate()

    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C)."""
        wide = x.to(accumulation_dtype(x))
        args = TokenNormArgs(wide, None, self.weight, None, eps=self.eps, centered=False)
        z, _ = token_norm(args)
        return low_rank_gate(z, self.down, self.up).to(x.dtype)

    def reset_parameters(self) -> None:
        """Set γ to 1, U to 0 and D to its start."""
        super().reset_parameters()
        nn.init.zeros_(self.up)
        self._start_gate()

    @torch.no_grad()
    def _start_gate(self) -> None:
        # In a fixed type on a fixed device, whatever the defaults are.
        row, column = (
            torch.arange(size, dtype=torch.float64, device="cpu") + 0.5 for size in self.down.shape
        )
        angles = torch.outer(row, column) * (math.pi / self.num_features)
        self.down.copy_(torch.cos(angles) * math.sqrt(2 / self.num_features))
