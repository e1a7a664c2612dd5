"""Short names: the same in the API, the command line, run folders and reports."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.norms import pointwise, token
from powernorm.norms.base import Norm
from powernorm.norms.batch import BatchNorm, PowerNormV
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.moving_average import MovingAverageBatchNorm
from powernorm.norms.power import PowerNorm
from powernorm.norms.regularized import RegularizedBatchNorm
from powernorm.norms.renorm import BatchRenorm


@dataclass(frozen=True)
class NormInfo:
    """One row of the table of norms."""

    name: str
    title: str
    layer: Callable[..., Norm]
    averages_over: str
    static: bool
    """Is it an affine map per feature in evaluation, with its default options?"""
    paper: str
    presets: Mapping[str, Any] = field(default_factory=dict)
    """Options that the short name stands for, overridable."""

    @property
    def needs_batch_statistics(self) -> bool:
        """Does training use statistics over the tokens of a batch?"""
        return inspect.isclass(self.layer) and issubclass(self.layer, BatchStatisticsNorm)


_FEATURES = "features of a token"
_TOKENS = "valid tokens of the batch"
_SHEN = "Shen et al. 2020"
_XU = "Xu et al. 2019"

_ROWS: Final = (
    NormInfo("ln", "LayerNorm", token.LayerNorm, _FEATURES, False, "Ba et al. 2016"),
    NormInfo("ln-simple", "SimpleLayerNorm", token.SimpleLayerNorm, _FEATURES, False, _XU),
    NormInfo("detach", "DetachNorm", token.DetachNorm, _FEATURES, False, _XU),
    NormInfo("adanorm", "AdaNorm", token.AdaNorm, _FEATURES, False, _XU),
    NormInfo("rms", "RMSNorm", token.RMSNorm, _FEATURES, False, "Zhang and Sennrich 2019"),
    NormInfo(
        "gs", "GroupScaling", token.GroupScaling, "groups of features of a token", False, _SHEN
    ),
    NormInfo(
        "gn",
        "GroupNorm",
        token.GroupNorm,
        "groups of features of a token",
        False,
        "Wu and He 2018",
    ),
    NormInfo("dyt", "DynamicTanh", pointwise.DynamicTanh, "nothing", False, "Zhu et al. 2025"),
    NormInfo("none", "no norm", pointwise.Identity, "nothing", True, "-"),
    NormInfo("bn", "BatchNorm", BatchNorm, _TOKENS, True, "Ioffe and Szegedy 2015"),
    NormInfo(
        "rbn", "RegularizedBatchNorm", RegularizedBatchNorm, _TOKENS, True, "Wang et al. 2022"
    ),
    NormInfo(
        "brn",
        "BatchRenorm",
        BatchRenorm,
        "valid tokens of the batch, corrected to the running ones",
        True,
        "Ioffe 2017",
    ),
    NormInfo(
        "mabn",
        "MovingAverageBatchNorm",
        MovingAverageBatchNorm,
        "valid tokens of the last batches",
        True,
        "Yan et al. 2020",
    ),
    NormInfo("pnv", "PowerNormV", PowerNormV, _TOKENS, True, _SHEN),
    NormInfo(
        "pn",
        "PowerNorm",
        PowerNorm,
        "features of a token, then valid tokens of all batches so far",
        False,
        _SHEN,
    ),
    NormInfo(
        "pn-only",
        "PowerNorm without GroupScaling",
        PowerNorm,
        "valid tokens of all batches so far",
        True,
        _SHEN,
        {"groups": None},
    ),
    NormInfo(
        "pn-static",
        "PowerNorm without GroupScaling, stabilised",
        PowerNorm,
        "valid tokens of all batches so far",
        True,
        "this library, after Shen et al. 2020",
        # The slow ν is part of it: at the paper's 0.1 the layer stays bounded but does not learn a
        # language model (docs/stability.md).
        {"groups": None, "max_ratio": 5.0, "backward_momentum": 0.001},
    ),
)

NORMS: Final[Mapping[str, NormInfo]] = {row.name: row for row in _ROWS}
"""The table of norms by short name."""


def norm_info(name: str) -> NormInfo:
    """The row of a short name.

    Raises:
        InputError: unknown name; lists the known ones.
    """
    if name not in NORMS:
        near = difflib.get_close_matches(name, NORMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown norm {name!r}, known are {', '.join(NORMS)}{hint}")
    return NORMS[name]


def build_norm(name: str, num_features: int | tuple[int, ...], **options: Any) -> Norm:
    """Build a norm by short name.

    Args:
        name: one of `NORMS`.
        num_features: C.
        options: keyword arguments of the layer, over those that the name stands for.

    Raises:
        InputError: unknown name (lists the known ones), unknown option (lists the layer's).

    >>> build_norm("pn-only", 8).is_static
    True
    """
    info = norm_info(name)
    check_norm_options(name, options)
    return info.layer(num_features, **{**info.presets, **options})


def check_norm_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise an InputError unless the norm takes these options with values of these types."""
    info = norm_info(name)
    parameters = inspect.signature(info.layer).parameters
    known = [key for key in parameters if key != "num_features"]
    for key, value in options.items():
        if key not in known:
            raise InputError(
                f"{info.title} ({name}) has no option {key!r}, it takes {', '.join(known)}"
            )
        annotation = str(parameters[key].annotation)
        if not _fits(value, annotation):
            raise InputError(
                f"option {key} of {name} is {value!r} ({type(value).__name__}), expected "
                f"{annotation}"
            )


def _fits(value: Any, annotation: str) -> bool:
    """Does a value fit a parameter's annotation, as far as plain types go?"""
    accepted = {part.strip() for part in annotation.split("|")}
    if value is None:
        return "None" in accepted
    if isinstance(value, bool):
        return "bool" in accepted
    if isinstance(value, int):
        return bool(accepted & {"int", "float"})
    if isinstance(value, float):
        return "float" in accepted
    if isinstance(value, str):
        return bool(accepted & {"str", "Variant", "Decay", "torch.device"})
    return not accepted <= {"int", "float", "bool", "str", "None", "Variant", "Decay"}


def short_name(layer: Norm) -> str:
    """The layer's short name; of names for one class, the one whose options fit most closely."""
    fitting = [
        info
        for info in NORMS.values()
        if info.layer is type(layer)
        and all(getattr(layer, option, None) == value for option, value in info.presets.items())
    ]
    if not fitting:
        return type(layer).__name__
    return max(fitting, key=lambda info: len(info.presets)).name
