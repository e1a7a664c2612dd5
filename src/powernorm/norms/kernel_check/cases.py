"""Which calls are checked: a seeded selection that holds every pair of two properties twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Final

import torch

LARGEST: Final = 36_000
"""Elements of an input at most: the float64 formulas cost several times that memory."""
_ROUNDS: Final = 2
"""Times that every pair occurs."""
_ATTEMPTS: Final = 12
"""Random completions of a pair that has not occurred yet, of which the best is taken."""


@dataclass(frozen=True)
class Setting:
    """A norm, its options, and the moment of its life at which it is called.

    Attributes:
        norm: short name.
        options: of the layer.
        tracked: batches that its running statistics have seen.
        training: training or evaluation.
    """

    norm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tracked: int = 0
    training: bool = True

    @property
    def is_released(self) -> bool:
        """Whether the variant is the published code's."""
        return self.options.get("variant") == "released"

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        mode = "training" if self.training else "evaluation"
        return f"{self.norm}{options}, {mode} after {self.tracked} batches"


_PENALTIES: Final = {"mean_penalty": 0.5, "var_penalty": 0.2}
_RENORM: Final = {"max_r": 1.5, "max_d": 0.5, "warmup_steps": 5, "ramp_steps": 4}
_WINDOWS: Final = {"window": 3, "warmup_steps": 5, "ratio_start": 8}
_RELEASED: Final = {"variant": "released"}
_STABLE: Final = {"max_ratio": 1.2, "warmup_steps": 5}

SETTINGS: Final = (
    Setting("ln"),
    Setting("ln", {"bias": False}),
    Setting("ln-simple"),
    Setting("ln-simple", _RELEASED),
    Setting("detach"),
    Setting("detach", {"detach_mean": False}),
    Setting("detach", {"detach_std": False}),
    Setting("detach", {"detach_std": False, **_RELEASED}),
    Setting("adanorm"),
    Setting("adanorm", {"scale": 2.0, "k": 0.3, **_RELEASED}),
    Setting("rms"),
    Setting("gs"),
    Setting("gn"),
    Setting("bn", {}, 3),
    Setting("bn", {"start": "torch"}, 3),
    Setting("bn", {"momentum": None}, 3),
    Setting("bn", _RELEASED, 3),
    Setting("bn", {}, 3, training=False),
    Setting("bn", _RELEASED, 3, training=False),
    Setting("rbn", _PENALTIES, 3),
    Setting("rbn", {**_PENALTIES, "momentum": None}, 3),
    Setting("rbn", {**_PENALTIES, **_RELEASED}, 3),
    Setting("rbn", {**_PENALTIES, "penalty": "diff2"}, 3),
    Setting("rbn", {**_PENALTIES, "penalty": "reldiff", **_RELEASED}, 3),
    Setting("rbn", {**_PENALTIES, "penalty": "symkl"}, 3),
    Setting("rbn", _PENALTIES, 3, training=False),
    Setting("brn", _RENORM, 4),
    Setting("brn", _RENORM, 6),
    Setting("brn", {**_RENORM, "momentum": None}, 20),
    Setting("brn", _RENORM, 20, training=False),
    Setting("mabn", _WINDOWS, 2),
    Setting("mabn", _WINDOWS, 5),
    Setting("mabn", _WINDOWS, 9),
    Setting("mabn", _WINDOWS, 9, training=False),
    Setting("pnv", {}, 3),
    Setting("pnv", {"momentum": None}, 3),
    Setting("pnv", _RELEASED, 3),
    Setting("pnv", {}, 3, training=False),
    Setting("pnv", _RELEASED, 3, training=False),
    Setting("pn", {}, 9),
    Setting("pn", {}, 10),
    Setting("pn", {"warmup_steps": 0, "decay": "floored"}, 2),
    Setting("pn", _STABLE, 9),
    Setting("pn", {"warmup_steps": 5, **_RELEASED}, 2),
    Setting("pn", {"warmup_steps": 5, **_RELEASED}, 4),
    Setting("pn", {"warmup_steps": 5, **_RELEASED}, 5),
    Setting("pn", {}, 20, training=False),
    Setting("pn-only", {"warmup_steps": 5}, 4),
    Setting("pn-only", {"warmup_steps": 5, "momentum": 0.3, "backward_momentum": 0.2}, 9),
    Setting("pn-only", {}, 20, training=False),
    Setting("pn-static", {}, 4),
    Setting("pn-static", {}, 20),
    Setting("pn-static", {}, 20, training=False),
)
_LARGE: Final = (
    Setting("ln"),
    Setting("rms"),
    Setting("bn", {}, 3),
    Setting("bn", {}, 3, training=False),
    Setting("pnv", {}, 3),
    Setting("pn", {}, 20),
    Setting("pn-only", {}, 20),
    Setting("pn-static", {}, 20),
)
_STATELESS: Final = ("ln", "ln-simple", "detach", "adanorm", "rms", "gs", "gn")
_UNGROUPED: Final = ("ln", "ln-simple", "detach", "adanorm", "rms", "pn-only", "pn-static")


@dataclass(frozen=True)
class Case:
    """One call of a norm.

    Attributes:
        seed: of the selection.
        index: place in the selection.
        setting: norm, options, mode.
        dtype: name of the input's type.
        width: number of features.
        tokens: number of tokens.
        mask: which tokens are padding.
        padding: what padding holds, and whether the loss looks at it.
        groups: of GroupScaling or GroupNorm; 0 for none.
        residual: none, of the input's type, or a float32 stream.
        layout: shape and strides of the input.
        arriving: which outputs a gradient arrives at, and its strides.
        affine: type of γ and β, or none.
        values: distribution of the input.
    """

    seed: int
    index: int
    setting: Setting
    dtype: str
    width: int
    tokens: int
    mask: str
    padding: str
    groups: int
    residual: str
    layout: str
    arriving: str
    affine: str
    values: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the input."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def wide_dtype(self) -> torch.dtype:
        """Type that statistics are in."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def stateful(self) -> bool:
        """Whether the norm has running statistics."""
        return self.setting.norm not in _STATELESS

    def facts(self) -> dict[str, Any]:
        """Return all that is needed to see what the case is."""
        return {**asdict(self), "setting": str(self.setting)}


_AXES: Final[Mapping[str, tuple[Any, ...]]] = {
    "setting": SETTINGS,
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "width": (1, 3, 17, 64, 513, 768, 4096, 8195),
    "tokens": (0, 1, 2, 7, 64, 300, 2051),
    "mask": ("none", "random", "prefix", "all", "one valid"),
    "padding": ("in the loss", "out of it", "NaN"),
    "groups": ("none", "one", "several"),
    "residual": ("none", "same", "float32"),
    "layout": ("flat", "batch", "rows apart", "features apart", "transposed", "dim 1", "channels"),
    "arriving": ("dense", "strided", "constant", "sum only", "output only"),
    "affine": ("same", "float32", "none", "frozen"),
    "values": ("normal", "offset", "scales", "constant", "one NaN"),
}

Row = dict[str, int]
"""Places of the values in `_AXES`."""
_Pair = tuple[tuple[str, int], tuple[str, int]]


def select_cases(seed: int) -> list[Case]:
    """Return calls in which every pair of values of two properties occurs that can.

    They depend on the seed alone, so that a case is known by seed and index. Some large inputs come
    last, which kernels treat in another way than those that fit the caches.
    """
    choose = random.Random(seed)
    rows = [row for _ in range(_ROUNDS) for row in _covering(choose)]
    values = [_values_of(row, choose) for row in rows] + _large_values(choose)
    return [Case(seed, index, **value) for index, value in enumerate(values)]


def _covering(choose: random.Random) -> Iterator[Row]:
    """Yield rows until every pair has occurred: of random rows that hold a pair the best one."""
    pairs = _all_pairs()
    choose.shuffle(pairs)
    missing = set(pairs)
    for pair in pairs:
        if pair not in missing:
            continue
        rows = [_fit({**_any_row(choose), **_row_of(pair)}) for _ in range(_ATTEMPTS)]
        # Of pairs that cannot occur, as groups with a norm that has none, nothing is left.
        fitting = [row for row in rows if pair in _pairs_of(row)]
        missing.discard(pair)
        if fitting:
            best = max(fitting, key=lambda row: len(_pairs_of(row) & missing))
            missing -= _pairs_of(best)
            yield best


def _all_pairs() -> list[_Pair]:
    numbered = {name: range(len(values)) for name, values in _AXES.items()}
    return [
        ((first, i), (second, k))
        for first, second in combinations(_AXES, 2)
        for i in numbered[first]
        for k in numbered[second]
    ]


def _any_row(choose: random.Random) -> Row:
    return {name: choose.randrange(len(values)) for name, values in _AXES.items()}


def _row_of(pair: _Pair) -> Row:
    return dict(pair)


def _pairs_of(row: Row) -> set[_Pair]:
    return set(combinations(row.items(), 2))


def _fit(row: Row) -> Row:
    """Return the row with what cannot be replaced by the nearest that can."""
    value: dict[str, Any] = {name: _AXES[name][place] for name, place in row.items()}
    setting: Setting = value["setting"]
    if setting.is_released and setting.norm in _STATELESS:
        value["width"] = max(value["width"], 3)  # it divides by C - 1
    while value["tokens"] * value["width"] > LARGEST:
        value["tokens"] = _AXES["tokens"][_AXES["tokens"].index(value["tokens"]) - 1]
    # MABN's GroupScaling is a norm of its own: the gradient between the two overflows float16.
    is_mabn_in_half = setting.norm == "mabn" and value["dtype"] == "float16"
    if setting.norm in _UNGROUPED or is_mabn_in_half:
        value["groups"] = "none"
    if setting.norm == "pn" or (setting.norm in ("gs", "gn") and value["groups"] == "none"):
        value["groups"] = "one" if value["groups"] == "none" else value["groups"]
    value["padding"] = _fit_padding(setting, value["mask"], value["padding"])
    if value["dtype"] in ("float32", "float64"):
        value["residual"] = "same" if value["residual"] == "float32" else value["residual"]
        value["affine"] = "same" if value["affine"] == "float32" else value["affine"]
    if setting.norm == "mabn" and value["arriving"] == "sum only":
        value["arriving"] = "dense"  # torch adds the sum, so that this would not go through it
    if value["residual"] == "none" and value["arriving"] in ("sum only", "output only"):
        value["arriving"] = "dense"
    if value["values"] == "one NaN" and not _takes_nan(value):
        value["values"] = "normal"
    return {name: _AXES[name].index(chosen) for name, chosen in value.items()}


def _fit_padding(setting: Setting, mask: str, padding: str) -> str:
    if mask == "none":
        return "in the loss"
    return "out of it" if padding == "NaN" and _reads_padding(setting) else padding


def _reads_padding(setting: Setting) -> bool:
    """Whether NaN in padding may reach a result."""
    # Evaluation looks at no mask, so that the backward multiplies NaN by zeros; but for released
    # variants that set padding to 0. Released PowerNorm averages gradient moments over padding.
    is_power = setting.norm == "pn"
    if setting.training:
        return is_power and setting.is_released
    return is_power or not setting.is_released


def _takes_nan(value: Mapping[str, Any]) -> bool:
    """Whether a NaN in one feature stays in it."""
    setting: Setting = value["setting"]
    return (
        setting.norm not in _STATELESS
        and value["groups"] == "none"
        and value["mask"] != "all"
        and value["tokens"] > 0
    )


def _values_of(row: Row, choose: random.Random) -> dict[str, Any]:
    value = {name: _AXES[name][place] for name, place in row.items()}
    value["groups"] = _groups(value["groups"], value["width"], choose)
    return value


def _large_values(choose: random.Random) -> list[dict[str, Any]]:
    """Return some calls with inputs of 8 or, in float64, 16 MiB."""
    plain = {name: values[0] for name, values in _AXES.items()}
    plain |= {"width": 1025, "tokens": 2051, "mask": "random", "padding": "out of it", "groups": 0}
    types = ["float32", "float64"] * (len(_LARGE) // 2)
    choose.shuffle(types)
    return [
        {**plain, "setting": setting, "dtype": dtype, "groups": int(setting.norm == "pn")}
        for setting, dtype in zip(_LARGE, types, strict=True)
    ]


def _groups(kind: str, width: int, choose: random.Random) -> int:
    if kind != "several":
        return 0 if kind == "none" else 1
    divisors = [n for n in (2, 3, 4, 5, 12, 16, 17, width) if width % n == 0]
    return choose.choice(divisors)
