"""The base class and interface of every norm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.arguments import check_flag, check_number, feature_count
from powernorm.norms.feature_dims import (
    LAST,
    Normalized,
    answer,
    check_feature_dim,
    features_last,
    over_dimension,
)
from powernorm.norms.masks import check_padding_mask, current_padding_mask, padding_mask
from powernorm.norms.nested import check_beside_nested, check_nested, nested_like, packed_tokens
from powernorm.norms.sharded import (
    check_sharded,
    is_sharded,
    local_mask,
    local_state,
    local_values,
    sharded_like,
)
from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.graphs import same_sizes, shape_of
from powernorm.ops.operators import PLAIN_TYPES
from powernorm.ops.pointwise import scale_and_shift
from powernorm.ops.torch_private import disable_dynamo, warn_of_untested_torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from powernorm.ops.kernels.cpu.prepared import Prepared


class Norm(nn.Module):
    """A normalization of vectors of features: (..., C) in and out, same dtype.

    `norm(x, padding_mask)` returns y. `norm(x, padding_mask, residual)` normalizes the sum and
    returns (y, x + residual), in one pass over the data if the norm has a kernel: the pre-norm
    pattern `y, stream = norm(branch, mask, stream)`.

    A jagged nested tensor (batch, j*, C) gives one of the same structure, as without the padding.
    A distributed tensor (DTensor) whose tokens are divided gives one with the same placements;
    batch statistics are those of all tokens, as far as the norm's process group has them.

    Args:
        num_features: C, an integer or a 1-tuple as torch's `normalized_shape`.
        eps: added inside the root, > 0.
        feature_dim: the dimension of x that holds the features: 1 for (N, C, H, W) and (N, C, L).
            The mask then has the shape of x without that dimension, and the output has the memory
            layout of x. With `channels_last` (or any layout with contiguous features) that costs
            nothing; else x is copied once, and so are y and the gradients.
    """

    num_features: int
    eps: float
    feature_dim: int = LAST  # of the class too: for layers that were pickled without one
    is_pointwise: bool = False
    """Whether the layer takes an input that is not contiguous as it is."""
    checks_itself: bool = False
    """Whether `normalize` checks its input's shape itself, once it knows the mask of the scope."""
    reads_mask: bool = False
    """Whether the layer uses the mask of a scope; `powernorm.swap` then passes it the model's."""
    takes_local: bool = True
    """Whether the layer gets the local tokens of a distributed tensor, not the tensor itself."""
    registered_as: str = ""
    """Short name of a user-defined layer, under which it was built."""
    built_with: Mapping[str, Any] = MappingProxyType({})
    """Options with which a user-defined layer was built."""
    shown_settings: tuple[str, ...] = ()
    """Attributes that `repr` shows besides the features; `affine` is whether there is a γ."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" not in cls.__dict__:
            # torch.compile limits the number of compilations of a code object. Each class gets a
            # code object of its own, so that layers compiled one by one do not use up the limit
            # of other classes.
            cls.forward = _own_code(cls.forward, cls)  # type: ignore[method-assign]

    def __init__(
        self, num_features: int | tuple[int, ...], eps: float, feature_dim: int = LAST
    ) -> None:
        super().__init__()
        warn_of_untested_torch()
        self.num_features = feature_count(num_features)
        self.eps = check_number("eps", eps, above=0)
        self.feature_dim = check_feature_dim(feature_dim)

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Normalized:
        """Normalize over `feature_dim`; see the class."""
        if type(x) is not Tensor or x.is_nested:
            if not isinstance(x, Tensor):
                raise InputError(
                    f"{self.class_name} got a {type(x).__name__}, expected a tensor: convert with "
                    "torch.as_tensor(x)"
                )
            if x.is_nested:
                return self._normalize_nested(x, padding_mask, residual)
            if self.takes_local and is_sharded(x):
                return self._normalize_sharded(x, padding_mask, residual)
        if self.checks_itself and self.feature_dim == LAST:
            return self.normalize(x, padding_mask, residual)
        return self.normalize_dense(x, padding_mask, residual)

    def normalize_dense(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None
    ) -> Normalized:
        """Normalize over `feature_dim` an input that is neither nested nor distributed."""
        dim = self.feature_dim
        if not (self.checks_itself and dim == LAST):
            self.check_input(x, padding_mask, residual)
        if dim == LAST:
            return self.normalize(x, padding_mask, residual)
        return over_dimension(self.normalize, x, padding_mask, residual, dim, self.is_pointwise)

    def _normalize_nested(
        self, x: Tensor, mask: Tensor | None, residual: Tensor | None
    ) -> Normalized:
        check_nested(self.class_name, x, self.feature_dim)
        self.check_input(x, None)
        check_beside_nested(self.class_name, x, mask, residual)
        others = None if residual is None else packed_tokens(residual)
        with padding_mask(None):  # an outer mask is for padded tensors
            result = self.normalize_dense(packed_tokens(x), None, others)
        return _wrapped(result, partial(nested_like, x=x))

    # Compiled code cannot replace the norm's own state, so such a call is a graph break.
    @disable_dynamo
    def _normalize_sharded(
        self, x: Tensor, mask: Tensor | None, residual: Tensor | None
    ) -> Normalized:
        x = cast("DTensor", x)
        dim = self.feature_dim
        self.check_input(x, None, residual)
        check_sharded(self.class_name, x, residual, dim)
        self.check_copies(x)
        if mask is None and self.wants_mask:
            mask = current_padding_mask(features_last(x, dim), self)
        others = None if residual is None else local_values(cast("DTensor", residual))
        local = local_values(x), local_mask(mask, x, dim), others
        with local_state(self, x), padding_mask(None):  # the outer mask is for all tokens
            result = self.normalize_dense(*local)
        return _wrapped(result, partial(sharded_like, x=x))

    def check_copies(self, x: DTensor) -> None:
        """Raise an InputError if a forward's statistics would count tokens several times."""

    @abstractmethod
    def normalize(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None, /
    ) -> Normalized:
        """Normalize (..., C), features last, whatever `feature_dim` is."""

    @property
    def class_name(self) -> str:
        """Name of the layer in errors and tables."""
        return type(self).__name__

    @property
    def affine_part(self) -> nn.Module:
        """Module whose parameters `weight` and `bias`, if it has them, are γ and β."""
        return self

    @property
    def wants_mask(self) -> bool:
        """Whether a forward in the current mode uses the mask of a scope."""
        return self.reads_mask

    @property
    def is_static(self) -> bool:
        """Whether the layer is an affine map per feature in evaluation, which can be folded."""
        return False

    @property
    def centers(self) -> bool:
        """Whether it is `a ⊙ (x - mean x) + c` in evaluation, the mean over the features.

        Such a layer is not static, but folds into linear maps behind it.
        """
        return False

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (a, c) with `y = a ⊙ x + c` in evaluation, each (C,) in float64.

        Of a layer that `centers`, it is `y = a ⊙ (x - mean x) + c`.

        Raises:
            InputError: the layer is not static.
        """
        raise InputError(
            f"{self.class_name} depends on each token in evaluation: it is no affine map per "
            "feature and cannot be folded"
        )

    def transient_state(self) -> dict[str, object]:
        """Return the attributes that a training forward changes, without buffers and parameters."""
        return {}

    def check_input(
        self, x: Tensor, padding_mask: Tensor | None, residual: Tensor | None = None
    ) -> None:
        """Raise an InputError unless a forward's input, mask and residual fit the layer."""
        dim = self.feature_dim
        ndim = x.ndim
        if not -ndim <= dim < ndim or shape_of(x)[dim] != self.num_features:
            where = "the last dimension" if dim == LAST else f"dimension {dim} (feature_dim)"
            raise InputError(
                f"{self.class_name} was built for {self.num_features} features in {where}, "
                f"got an input of shape {tuple(x.shape)}{self._advice(x)}"
            )
        if not x.is_floating_point():
            raise InputError(
                f"{self.class_name} got an input of dtype {x.dtype}, expected a floating "
                "point type: convert with x.float()"
            )
        if padding_mask is not None:
            check_padding_mask(padding_mask, x, dim)
        if residual is None:
            return
        if same_sizes(shape_of(residual), shape_of(x)) is False or not residual.is_floating_point():
            raise InputError(
                f"residual has shape {tuple(residual.shape)} and dtype {residual.dtype}, expected "
                f"the input's shape {tuple(x.shape)} and a floating point type"
            )
        if residual.device != x.device:
            raise InputError(
                f"residual is on {residual.device}, the input is on {x.device}: pass "
                "`residual.to(x.device)`"
            )

    def _advice(self, x: Tensor) -> str:
        """Return advice which feature_dim would fit an input, if exactly one would."""
        fitting = [dim for dim, size in enumerate(x.shape) if size == self.num_features]
        if len(fitting) != 1:
            return ""
        dim = LAST if fitting[0] == x.ndim - 1 else fitting[0]
        return f": build the layer with feature_dim={dim} for it"

    def extra_repr(self) -> str:
        """Return the features, their dimension and the `shown_settings`."""
        dim = "" if self.feature_dim == LAST else f", feature_dim={self.feature_dim}"
        shown = {name: getattr(self, name) for name in self.shown_settings}
        if "affine" in shown:
            shown["affine"] = self.weight is not None
        settings = [f", {name.removeprefix('initial_')}={shown[name]!r}" for name in shown]
        return f"{self.num_features}{dim}{''.join(settings)}"


def _wrapped(result: Normalized, wrap: Callable[[Tensor], Tensor]) -> Normalized:
    """Return a forward's result with its tensors wrapped."""
    if isinstance(result, tuple):
        y, total = result
        return wrap(y), wrap(total)
    return wrap(result)


def _own_code(forward: Any, owner: type) -> Any:
    """Return a copy of a forward that differs from it only in identity."""
    code = forward.__code__.replace(co_qualname=f"{owner.__qualname__}.forward")
    copied = FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    return update_wrapper(copied, forward)


class AffineNorm(Norm):
    """A norm with learned γ (`weight`) and β (`bias`), each (C,), or neither."""

    shown_settings: tuple[str, ...] = ("eps", "affine")
    _prepared: Prepared | None = None
    """The last training call as its backend prepared it, for the next calls."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        feature_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, feature_dim)
        check_flag("affine", affine)
        shape = (self.num_features,)
        if affine:
            self.weight = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        if affine and bias:
            self.bias = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    def gamma_and_beta(self) -> tuple[Tensor | None, Tensor | None]:
        """Return γ and β, or None; computed tensors if they are pruned or parametrized.

        Looked up directly where they are parameters: reading an attribute of a module takes as
        long as updating it.
        """
        parameters = self._parameters
        try:
            return parameters["weight"], parameters["bias"]
        except KeyError:
            return self.weight, self.bias

    def may_prepare(self, x: Tensor, residual: Tensor | None) -> bool:
        """Return whether calls like this one can be prepared, or may have been."""
        return not torch.compiler.is_compiling() and residual is None and type(x) in PLAIN_TYPES

    def run_prepared(
        self,
        x: Tensor,
        mask: Tensor | None,
        settings: tuple[Any, ...] | None,
        carrier: Tensor | None = None,
    ) -> Any:
        """Return the result of the prepared call, None if this call differs from it.

        Args:
            x: (..., C).
            mask: its padding mask.
            settings: everything that the call depends on besides the tensors given here; None if it
                cannot be prepared.
            carrier: carrier of a norm whose statistics are updated in the backward.
        """
        call = self._prepared
        if call is None:
            return None
        if settings != call.settings or x.dtype is not call.dtype:
            self.__dict__["_prepared"] = None
            return None
        weight, bias = self.gamma_and_beta()
        if not call.fits(x, mask, weight, bias):
            return None
        return call.run(x, mask, weight, bias, carrier)

    def keep_prepared(self, call: Prepared | None, settings: tuple[Any, ...]) -> None:
        """Keep a prepared call for the next ones."""
        if call is not None:
            call.settings = settings
            self.__dict__["_prepared"] = call

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_prepared", None)
        return state

    def scale_and_shift(self, y: Tensor) -> Tensor:
        """Return γ ⊙ y + β in the type of y; y itself without γ and β."""
        if self.weight is None:
            return y
        return scale_and_shift(y.to(accumulation_dtype(y)), self.weight, self.bias).to(y.dtype)

    def reset_parameters(self) -> None:
        """Set γ to 1 and β to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class StatelessNorm(AffineNorm):
    """A norm that computes its output from the input alone, without a mask or a state."""

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor:
        """Return y, (..., C), features last."""

    def normalize(self, x: Tensor, _: Tensor | None, residual: Tensor | None, /) -> Normalized:
        """Normalize (..., C), features last, whatever `feature_dim` is."""
        total = x if residual is None else x + residual
        return answer((self.transform(total), total), residual)
