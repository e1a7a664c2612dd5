"""What a tuning searches of each norm's own settings: plain data, by option of its constructor.

A range is a text, as users write theirs: `log:LOW:HIGH` and `linear:LOW:HIGH` of numbers,
`int:LOW:HIGH` of whole numbers, `choice:A,B,…` of values.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm.norms.registry import NORMS, norm_info

_MOMENTUM: Final = "log:0.005:0.5"
"""Around torch's 0.1; the papers' α of 0.9 and 0.95 are 0.1 and 0.05 here."""
_PENALTY: Final = "log:0.01:10"
"""As far apart as the λ that Wang et al. 2022 chose for their tasks."""
_POWER_NORM: Final = MappingProxyType(
    # ν of a short run has to be slow, or the division by it runs away (docs/stability.md).
    {"momentum": _MOMENTUM, "backward_momentum": "log:0.0005:0.5"}
)

SEARCH_SPACES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "ln": {},
        "ln-simple": {},
        "detach": {},
        # Xu et al. 2019 choose C on validation; k is 1/10 there.
        "adanorm": {"scale": "log:0.3:3", "k": "log:0.02:0.3"},
        "rms": {},
        # The number of groups has to divide the features of every norm: only a user can say.
        "gs": {},
        "gn": {},
        "dyt": {"alpha": "log:0.1:2"},
        "derf": {"alpha": "log:0.1:2"},
        "dyisru": {},
        "seednorm": {},
        "scalenorm": {},
        "none": {},
        "bn": {"momentum": _MOMENTUM},
        "rbn": {"momentum": _MOMENTUM, "mean_penalty": _PENALTY, "var_penalty": _PENALTY},
        "brn": {"momentum": _MOMENTUM, "max_r": "log:1.2:10", "max_d": "log:0.3:10"},
        "mabn": {"momentum": "log:0.002:0.2", "window": "int:4:64"},
        "un": {"momentum": _MOMENTUM, "window": "int:2:16"},
        "repbn": {"momentum": _MOMENTUM},
        # How long the old norm fades is a part of the run: its steps are the user's.
        "prepbn": {"momentum": _MOMENTUM},
        "taper": {},
        "pnv": {"momentum": _MOMENTUM},
        "pn": _POWER_NORM,
        "pn-only": _POWER_NORM,
        "pn-static": {**_POWER_NORM, "max_ratio": "log:1.5:20"},
    }
)
"""By short name. A norm without settings of its own that would be chosen on validation has none."""

ATTRIBUTE: Final = "search_space"
"""Of a user's own layer class: the same for it."""


def search_space(name: str) -> Mapping[str, str]:
    """Return the ranges that a norm declares for its options.

    Args:
        name: short name, or `module:Class`, which is imported; a class of a user's own declares
            them in its attribute `search_space`.

    Raises:
        InputError: unknown norm, or a declaration that is no mapping of texts.

    >>> search_space("bn")
    {'momentum': 'log:0.005:0.5'}
    """
    info = norm_info(name)
    if name in NORMS:
        return SEARCH_SPACES[name]
    own = getattr(info.layer, ATTRIBUTE, {})
    if not isinstance(own, Mapping) or not all(
        isinstance(part, str) for item in own.items() for part in item
    ):
        raise InputError(
            f"{ATTRIBUTE} of {name} is {own!r}, expected ranges by option, such as "
            "{'momentum': 'log:0.01:0.5'}"
        )
    return own
