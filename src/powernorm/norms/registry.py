"""Short names: the same in the API, the command line, run folders and reports.

The norms of this library are in `NORMS`. Users' norms get a name by `register_norm` or by an entry
point of an installed package, or are written as `module:Class`, which is imported on use.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast, get_args

from torch import nn

from powernorm.errors import InputError
from powernorm.norms import pointwise, token, token_scale
from powernorm.norms.arguments import Start, TokenKind, Variant, feature_count
from powernorm.norms.base import Norm
from powernorm.norms.batch import BatchNorm, PowerNormV
from powernorm.norms.divergences import Divergence
from powernorm.norms.moving_average import MovingAverageBatchNorm
from powernorm.norms.named_layers import imported_layer, packaged_layer, packaged_names
from powernorm.norms.own_layers import (
    build_own,
    check_layer,
    check_options,
    is_same_layer,
    title_of,
)
from powernorm.norms.power import Decay, PowerNorm
from powernorm.norms.regularized import RegularizedBatchNorm
from powernorm.norms.renorm import BatchRenorm
from powernorm.norms.reparametrized import (
    Evaluation,
    ProgressiveRepBatchNorm,
    RepBatchNorm,
)
from powernorm.norms.taper import TaperNorm
from powernorm.norms.unified import UnifiedNorm


@dataclass(frozen=True)
class NormInfo:
    """One row of the table of norms."""

    name: str
    title: str
    layer: Callable[..., nn.Module]
    averages_over: str
    static: bool
    """Whether it is an affine map per feature in evaluation, with its default options; for a norm
    that changes during training, at its end."""
    paper: str
    presets: Mapping[str, Any] = field(default_factory=dict)
    """Options that the short name sets; they can be overridden."""
    search: Mapping[str, str] = field(default_factory=dict)
    """Ranges from which a tuning chooses options: `log:LOW:HIGH` or `linear:LOW:HIGH` for numbers,
    `int:LOW:HIGH` for integers, `choice:A,B,…` for values."""


_FEATURES = "features of a token"
_GROUPS = "groups of features of a token"
_TOKENS = "valid tokens of the batch"
_LAST_BATCHES = "valid tokens of the last batches"
_SO_FAR = "valid tokens of all batches so far"
_SHEN = "Shen et al. 2020"
_XU = "Xu et al. 2019"
_GUO = "Guo et al. 2024"

_ALPHA: Final = {"alpha": "log:0.1:2"}
_MOMENTUM: Final = {"momentum": "log:0.005:0.5"}
"""Around torch's 0.1; the papers' α of 0.9 and 0.95 are 0.1 and 0.05 here."""
_PENALTY: Final = "log:0.01:10"
"""As wide as the range of λ that Wang et al. 2022 chose for their tasks."""
_POWER: Final = {**_MOMENTUM, "backward_momentum": "log:0.0005:0.5"}
"""ν of a short run has to be slow, or the division by it diverges (docs/stability.md)."""

_ROWS: Final = (
    NormInfo("ln", "LayerNorm", token.LayerNorm, _FEATURES, False, "Ba et al. 2016"),
    NormInfo("ln-simple", "SimpleLayerNorm", token.SimpleLayerNorm, _FEATURES, False, _XU),
    NormInfo("detach", "DetachNorm", token.DetachNorm, _FEATURES, False, _XU),
    NormInfo(
        "adanorm",
        "AdaNorm",
        token.AdaNorm,
        _FEATURES,
        False,
        _XU,
        # Xu et al. 2019 choose C on validation; k is 1/10 there.
        search={"scale": "log:0.3:3", "k": "log:0.02:0.3"},
    ),
    NormInfo("rms", "RMSNorm", token.RMSNorm, _FEATURES, False, "Zhang and Sennrich 2019"),
    # The number of groups has to divide the features of every norm, which only a user can choose.
    NormInfo("gs", "GroupScaling", token.GroupScaling, _GROUPS, False, _SHEN),
    NormInfo("gn", "GroupNorm", token.GroupNorm, _GROUPS, False, "Wu and He 2018"),
    NormInfo(
        "dyt",
        "DynamicTanh",
        pointwise.DynamicTanh,
        "nothing",
        False,
        "Zhu et al. 2025",
        search=_ALPHA,
    ),
    NormInfo("derf", "Derf", pointwise.Derf, "nothing", False, "Chen et al. 2025", search=_ALPHA),
    NormInfo("dyisru", "DyISRU", pointwise.DyISRU, "nothing", False, "Stollenwerk 2025"),
    NormInfo("seednorm", "SeeDNorm", token_scale.SeeDNorm, _FEATURES, False, "Cai et al. 2025"),
    NormInfo(
        "scalenorm", "ScaleNorm", token_scale.ScaleNorm, _FEATURES, False, "Nguyen and Salazar 2019"
    ),
    NormInfo("biasnorm", "BiasNorm", token_scale.BiasNorm, _FEATURES, False, "Yao et al. 2023"),
    NormInfo(
        "gatednorm", "GatedNorm", token_scale.GatedRMSNorm, _FEATURES, False, "Qiu et al. 2026"
    ),
    NormInfo("none", "no norm", pointwise.Identity, "nothing", True, "-"),
    NormInfo(
        "bn", "BatchNorm", BatchNorm, _TOKENS, True, "Ioffe and Szegedy 2015", search=_MOMENTUM
    ),
    NormInfo(
        "rbn",
        "RegularizedBatchNorm",
        RegularizedBatchNorm,
        _TOKENS,
        True,
        "Wang et al. 2022",
        search={**_MOMENTUM, "mean_penalty": _PENALTY, "var_penalty": _PENALTY},
    ),
    NormInfo(
        "brn",
        "BatchRenorm",
        BatchRenorm,
        "valid tokens of the batch, corrected to the running ones",
        True,
        "Ioffe 2017",
        search={**_MOMENTUM, "max_r": "log:1.2:10", "max_d": "log:0.3:10"},
    ),
    NormInfo(
        "mabn",
        "MovingAverageBatchNorm",
        MovingAverageBatchNorm,
        _LAST_BATCHES,
        True,
        "Yan et al. 2020",
        search={"momentum": "log:0.002:0.2", "window": "int:4:64"},
    ),
    NormInfo(
        "un",
        "UnifiedNorm",
        UnifiedNorm,
        _LAST_BATCHES,
        True,
        "Yang et al. 2022",
        search={**_MOMENTUM, "window": "int:2:16"},
    ),
    NormInfo("repbn", "RepBatchNorm", RepBatchNorm, _TOKENS, True, _GUO, search=_MOMENTUM),
    NormInfo(
        "prepbn",
        "ProgressiveRepBatchNorm",
        ProgressiveRepBatchNorm,
        "features of a token, at the end valid tokens of the batch",
        True,
        _GUO,
        # The length of the old norm's decay depends on the run, so the user sets its steps.
        search=_MOMENTUM,
    ),
    NormInfo(
        "taper",
        "TaperNorm",
        TaperNorm,
        "features of a token, at the end nothing",
        True,
        "Kanavalau et al. 2026",
    ),
    NormInfo("pnv", "PowerNormV", PowerNormV, _TOKENS, True, _SHEN, search=_MOMENTUM),
    NormInfo(
        "pn",
        "PowerNorm",
        PowerNorm,
        f"features of a token, then {_SO_FAR}",
        False,
        _SHEN,
        search=_POWER,
    ),
    NormInfo(
        "pn-only",
        "PowerNorm without GroupScaling",
        PowerNorm,
        _SO_FAR,
        True,
        _SHEN,
        {"groups": None},
        _POWER,
    ),
    NormInfo(
        "pn-static",
        "PowerNorm without GroupScaling, stabilized",
        PowerNorm,
        _SO_FAR,
        True,
        "this library, after Shen et al. 2020",
        # The slow ν is part of it: at the paper's 0.1 the layer stays bounded but does not learn a
        # language model (docs/stability.md).
        {"groups": None, "max_ratio": 5.0, "backward_momentum": 0.001},
        {**_POWER, "max_ratio": "log:1.5:20"},
    ),
)

NORMS: Final[Mapping[str, NormInfo]] = {row.name: row for row in _ROWS}
"""This library's norms by short name."""

REGISTERED: Final[dict[str, NormInfo]] = {}
"""Norms registered in this process by users, or by packages whose names were used."""

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
"""Allowed names: they become part of folder names, and are listed separated by commas."""
_NO_OPTIONS: Final = ("track_running_stats",)
"""Arguments of the layers that are not options, because they have only one value."""
_CHOICES: Final = {
    **{name: (name,) for name in ("torch.device", "torch.dtype", "dist.ProcessGroup")},
    "Variant": tuple(map(repr, get_args(Variant))),
    "Start": tuple(map(repr, get_args(Start))),
    "Decay": tuple(map(repr, get_args(Decay))),
    "Divergence": tuple(map(repr, get_args(Divergence))),
    "Evaluation": tuple(map(repr, get_args(Evaluation))),
    "TokenKind": tuple(map(repr, get_args(TokenKind))),
}
"""Accepted classes and values of arguments, by the annotation."""
_UNKNOWN: Final = "-"
"""Table entry for an unknown property of a user's norm."""


def register_norm(
    name: str, layer: Callable[..., nn.Module], *, presets: Mapping[str, Any] | None = None
) -> None:
    """Register your own norm under a short name, like those of `NORMS`, in this process.

    From then on `build_norm(name, C)`, `powernorm.swap(model, to=name)` and comparisons accept it.
    Without registering, `module:Class` is accepted wherever a short name is (`powernorm compare lm
    --norms ln,my.module:MyNorm`): that imports the module, which runs its code. A package registers
    its norms by entry points of the group `powernorm.norms`.

    Args:
        name: letters, digits, dots, underscores and hyphens.
        layer: `layer(num_features, **options)` returns a module whose forward takes (..., C), with
            or without a `padding_mask`, and keeps the shape. It is any torch module, which
            `AdaptedNorm` then adapts to the interface of `Norm` (residual, `feature_dim`, mask of
            the scope), or a subclass of `powernorm.Norm`, which is used as it is. `device`,
            `dtype` and `feature_dim` are passed to it only if it takes them.
        presets: options that the name sets; they can be overridden.

    Raises:
        InputError: a name that is taken or not allowed, a layer that cannot be called with a number
            of features, a preset that the layer does not take. Registering the same class again,
            as when a notebook's cell is run twice, replaces it.

    >>> class Doubled(nn.LayerNorm):
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> register_norm("doubled", Doubled)
    >>> build_norm("doubled", 8)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"name is {name!r}, expected letters, digits, dots, underscores and hyphens, the first "
            "a letter or digit: it becomes part of a folder's name"
        )
    # On file systems that ignore case, names that differ only in case would share run folders.
    taken = {known.lower(): info for known, info in _known().items()}.get(name.lower())
    if taken is not None and (
        taken.name in NORMS or taken.name != name or not is_same_layer(taken.layer, layer)
    ):
        raise InputError(f"the name {name!r} is taken by {title_of(taken.layer)}: choose another")
    if not isinstance(presets, Mapping | None):
        raise InputError(f"presets is {presets!r}, expected a mapping of options by name, or None")
    REGISTERED[name] = _own_row(name, layer, presets or {})


def norm_info(name: str) -> NormInfo:
    """Return the row of a short name, or of a `module:Class`.

    A module is imported, which runs its code.

    Raises:
        InputError: unknown name; lists the known ones. Or a module or class that cannot be loaded.
    """
    if not isinstance(name, str):
        raise InputError(f"norm is {name!r}, expected a short name, as 'rbn'")
    info = _known().get(name)
    if info is not None:
        return info
    if ":" in name:
        return _own_row(name, imported_layer(name), {})
    layer = packaged_layer(name)
    if layer is None:
        raise _unknown(name)
    register_norm(name, layer)
    return REGISTERED[name]


def search_space(name: str) -> Mapping[str, str]:
    """Return the ranges that a norm declares for its options, as `NormInfo.search`.

    Args:
        name: short name, or `module:Class`, which is imported; a user's class declares them in its
            attribute `search_space`.

    Raises:
        InputError: unknown norm, or a declaration that is not a mapping of strings.

    >>> search_space("bn")
    {'momentum': 'log:0.005:0.5'}
    """
    info = norm_info(name)
    if name in NORMS:
        return info.search
    own = getattr(info.layer, "search_space", {})
    if not isinstance(own, Mapping) or not all(
        isinstance(part, str) for item in own.items() for part in item
    ):
        raise InputError(
            f"search_space of {name} is {own!r}, expected ranges by option, such as "
            "{'momentum': 'log:0.01:0.5'}"
        )
    return own


def build_norm(name: str, num_features: int | tuple[int, ...], **options: Any) -> Norm:
    """Build a norm by short name.

    Args:
        name: one of `NORMS`, your own (`register_norm`) or `module:Class`.
        num_features: C.
        options: keyword arguments of the layer; they override those that the name sets.

    Raises:
        InputError: unknown name (lists the known ones), unknown option (lists the layer's); for
            your own norms also a layer that cannot be built.

    >>> build_norm("pn-only", 8).is_static
    True
    """
    info = norm_info(name)
    _check_options(info, options)
    chosen = {**info.presets, **options}
    if name in NORMS:
        return cast(Norm, info.layer(num_features, **chosen))
    return build_own(name, info.layer, feature_count(num_features), chosen)


def check_norm_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise an InputError unless the norm takes these options with values of these types."""
    _check_options(norm_info(name), options)


def has_option(name: str, option: str) -> bool:
    """Return whether a norm of `NORMS` takes an option."""
    return option in inspect.signature(NORMS[name].layer).parameters


def _known() -> Mapping[str, NormInfo]:
    return {**NORMS, **REGISTERED}


def _unknown(name: str) -> InputError:
    known = list(dict.fromkeys([*_known(), *packaged_names()]))
    # `layernorm` and `Batch-Norm` mean the layers with these titles.
    spellings = {_letters(info.title): info.name for info in reversed([*_known().values()])}
    spellings |= {_letters(one): one for one in known}
    near = difflib.get_close_matches(_letters(name), spellings, n=1)
    hint = (
        f"did you mean {spellings[near[0]]!r}?"
        if near
        else "your own norms are my.module:MyNorm, or registered by register_norm"
    )
    return InputError(f"unknown norm {name!r}, known are {', '.join(known)}; {hint}")


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


def _own_row(name: str, layer: object, presets: Mapping[str, Any]) -> NormInfo:
    """Return the row of a user's norm, after checking its layer."""
    checked = check_layer(name, layer)
    check_options(name, checked, presets)
    is_static = getattr(checked, "is_static", False) is True
    title = getattr(checked, "__name__", name)
    return NormInfo(name, title, checked, _UNKNOWN, is_static, _UNKNOWN, dict(presets))


def _check_options(info: NormInfo, options: Mapping[str, Any]) -> None:
    if info.name not in NORMS:
        check_options(info.name, info.layer, options)
        return
    check_options(
        info.name, info.layer, options, title=info.title, choices=_CHOICES, hidden=_NO_OPTIONS
    )


def short_name(layer: Norm) -> str:
    """Return the layer's short name; if several names fit, the one with the most presets."""
    if layer.registered_as:
        return layer.registered_as
    fitting = [
        info
        for info in (*NORMS.values(), *REGISTERED.values())
        if info.layer is type(layer)
        and all(getattr(layer, option, None) == value for option, value in info.presets.items())
    ]
    if not fitting:
        return layer.class_name
    return max(fitting, key=lambda info: len(info.presets)).name
