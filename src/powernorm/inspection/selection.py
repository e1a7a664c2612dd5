"""Selecting norms by name, class, role, side of an encoder-decoder, and layer index."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, get_args

from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm

Role = Literal["attention", "feed-forward", "final", "embedding", "other"]
"""Part of a model that a norm belongs to: a sub-layer, the end of a stack, or embeddings."""

Side = Literal["encoder", "decoder"]

_LISTED: Final = 12
"""Number of names that an error shows."""

_ATTENTION: Final = re.compile(r"att|(^|[._])sa_|input_layernorm|layernorm_before")
_FEED_FORWARD: Final = re.compile(r"ff|feed|mlp|fc|dense|^output|layernorm_after|full_layer|final")
_EMBEDDING: Final = re.compile(r"emb|(^|[._])pre(_|norm|layer)|_pre$")
_LAYER_CLASS: Final = re.compile(r"(layer|block)$", re.IGNORECASE)


@dataclass(frozen=True, repr=False)
class Where:
    """A selection of norms; each condition that is given must hold.

    Args:
        names: globs over the dotted name.
        types: classes, or globs over the name of the norm's class.
        roles: attention, feed-forward, final, embedding, other.
        side: encoder or decoder, of a model that has both.
        lowest: norms inside the layers with index below this, on each side (Wang et al. 2022,
            Fig. 3), ≥ 1.

    Raises:
        InputError: there is no such role, side or number.
    """

    names: str | Sequence[str] | None = None
    types: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None
    roles: Role | Sequence[Role] | None = None
    side: Side | None = None
    lowest: int | None = None

    def __post_init__(self) -> None:
        for name in ("names", "roles"):
            value = getattr(self, name)
            if value is not None and not _are_words(value):
                raise InputError(f"{name} is {value!r}, expected a string or a sequence of strings")
        if not all(isinstance(kind, str | type) for kind in _several(self.types)):
            raise InputError(
                f"types is {self.types!r}, expected a class, a glob over class names, or several"
            )
        for role in _several(self.roles):
            if role not in get_args(Role):
                raise InputError(f"unknown role {role!r}, known are {', '.join(get_args(Role))}")
        if self.side is not None and self.side not in get_args(Side):
            raise InputError(f"side is {self.side!r}, expected 'encoder' or 'decoder'")
        if self.lowest is not None and (type(self.lowest) is not int or self.lowest < 1):
            raise InputError(f"lowest is {self.lowest!r}, expected a whole number of layers ≥ 1")

    def __repr__(self) -> str:
        """Return the conditions that are given."""
        given = ((item.name, getattr(self, item.name)) for item in fields(self))
        shown = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
        return f"Where({shown})"

    def selects(self, site: Site) -> bool:
        """Return whether all conditions hold for a norm."""
        names, types, roles = (_several(one) for one in (self.names, self.types, self.roles))
        return (
            (
                self.names is None
                or any(fnmatchcase(name, glob) for name in site.norm.names for glob in names)
            )
            and (
                self.types is None
                or any(
                    fnmatchcase(site.type_name, kind)
                    if isinstance(kind, str)
                    else site.norm.is_a(kind)
                    for kind in types
                )
            )
            and (self.roles is None or site.role in roles)
            and (self.side is None or site.side == self.side)
            and (self.lowest is None or (site.layer is not None and site.layer < self.lowest))
        )


Selection = str | Sequence[str] | Callable[[str, nn.Module], bool] | Where | None
"""Globs over dotted names, a predicate of (name, module), conditions, or None for the default."""


@dataclass(frozen=True)
class Site:
    """A norm and its place in the model."""

    norm: FoundNorm
    role: Role
    side: Side | None
    layer: int | None
    """Index of the norm's layer in the stack of its side, 0 next to the input; None outside."""

    @property
    def name(self) -> str:
        """First dotted name of the norm."""
        return self.norm.names[0]

    @property
    def type_name(self) -> str:
        """Name of the norm's class, or of a function."""
        return self.norm.type_name


def place(model: nn.Module, norms: Iterable[FoundNorm]) -> tuple[Site, ...]:
    """Return each norm with its role, side and layer."""
    norms = tuple(norms)
    sides = stacks(model, [name for norm in norms for name in norm.names])
    return tuple(_site(model, norm, sides) for norm in norms)


def stacks(model: nn.Module, norm_names: Sequence[str]) -> dict[str, Side]:
    """Return the encoder and decoder stacks of an encoder-decoder model by dotted name.

    A model counts as one if it has an `encoder` beside a `decoder` with norms in both. BERT does
    not: the `decoder` of its masked language model is a Linear.

    Args:
        model: the model.
        norm_names: the dotted names of its norms.
    """
    found: dict[str, Side] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        ends: tuple[Side, Side] = ("encoder", "decoder")
        if any(name.startswith(f"{outer}.") for outer in found) or not all(
            isinstance(getattr(module, end, None), nn.Module)
            and any(norm.startswith(f"{prefix}{end}.") for norm in norm_names)
            for end in ends
        ):
            continue
        found.update({f"{prefix}{end}": end for end in ends})
    return found


def select(sites: Sequence[Site], where: Selection) -> frozenset[str]:
    """Return the first names of the norms that a selection matches.

    Args:
        sites: all norms.
        where: None means the encoder of an encoder-decoder model (Shen et al. 2020, App. A; Wang
            et al. 2022, App. A), all norms of others; see `_by_default`.

    Raises:
        InputError: nothing is selected; the message lists the model's norms.
    """
    if where is None:
        both = any(site.side is not None for site in sites)
        chosen = [site for site in _by_default(sites) if not both or site.side == "encoder"]
    elif callable(where):
        _check_question(where)
        chosen = [
            site for site in sites if any(where(name, site.norm.module) for name in site.norm.names)
        ]
    else:
        if not isinstance(where, Where) and not _are_words(where):
            raise InputError(
                f"where is {where!r}, expected a glob over names, a sequence of globs, a function "
                "of (name, module), a powernorm.Where or None"
            )
        conditions = where if isinstance(where, Where) else Where(names=where)
        chosen = [site for site in sites if conditions.selects(site)]
    if not chosen:
        raise InputError(f"where={where!r} selects no norm; {inventory(sites)}")
    return frozenset(site.name for site in chosen)


def _by_default(sites: Sequence[Site]) -> Sequence[Site]:
    """Return the norms that are selected by default.

    Norms over channels, such as BatchNorm2d, are selected only in a model that has no others:
    beside norms over tokens they belong to convolutions, which padding masks do not fit.
    """
    tokens = [site for site in sites if not site.norm.is_over_channels]
    readable = any(site.norm.reading is not None for site in tokens)
    return tokens if readable else sites


def inventory(sites: Sequence[Site]) -> str:
    """Return a sentence that lists the norms of a model."""
    if not sites:
        return (
            "the model has no norms at all, but may call functions behind helpers: "
            "powernorm.plan_swap sees those with example_inputs"
        )
    names = [site.name for site in sites]
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    parts = [f"the model has the norms {', '.join(names[:_LISTED])}{rest}"]
    parts.append(f"types {', '.join(sorted({site.type_name for site in sites}))}")
    parts.append(f"roles {', '.join(sorted({site.role for site in sites}))}")
    sides = sorted({site.side for site in sites if site.side is not None})
    parts.append(f"sides {', '.join(sides)}" if sides else "no encoder and decoder side")
    layers = {site.layer for site in sites if site.layer is not None}
    if layers:
        parts.append(f"layers 0 to {max(layers)}")
    return "; ".join(parts)


def _are_words(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(word, str) for word in value)


def _check_question(where: Callable[[str, nn.Module], bool]) -> None:
    try:
        inspect.signature(where).bind("", nn.Identity())
    except TypeError as error:
        raise InputError(f"where has to be a function of (name, module): {error}") from error
    except ValueError:  # a function in C++ does not say what it takes
        return


def _several(value: Any) -> Sequence[Any]:
    """Return one value or several as a sequence, which is empty for None."""
    if value is None:
        return ()
    return value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _site(model: nn.Module, norm: FoundNorm, sides: dict[str, Side]) -> Site:
    name = norm.names[0]
    path = name.split(".") if name else []  # the model may be a norm itself
    modules = [model]  # each is the parent of the same part of the path
    for attribute in path:
        child = getattr(modules[-1], attribute, None)
        # The call of a function is a step, too, and no module.
        modules.append(child if isinstance(child, nn.Module) else norm.module)
    parent = modules[-2] if path else model
    stack = next((outer for outer in sides if name.startswith(f"{outer}.")), "")
    start = len(stack.split(".")) if stack else 0
    # A layer is the first item of a list of modules of one class.
    items = (i for i in range(start, len(path)) if path[i].isdigit() and _is_stack(modules[i]))
    at = next(items, None)
    layer = None if at is None else int(path[at])
    types = _sublayer_types(modules[at - 1]) if at else None
    role: Role
    if types is not None and layer is not None:
        role = "feed-forward" if types[layer] == "f" else "attention"
        layer = max(0, sum(kind == "a" for kind in types[: layer + 1]) - 1)
    elif at is not None:
        role = _role_in_layer(path[at + 1 :], path[-1], parent)
    elif path and _LAYER_CLASS.search(type(parent).__name__):
        role = _role_in_layer(path[-1:], path[-1], parent)
    else:
        role = _role_outside(".".join(path).lower(), parent)
    return Site(norm, role, sides.get(stack), layer)


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    classes = {type(item) for item in module}
    return len(classes) == 1 and (isinstance(module, nn.ModuleList) or len(module) > 1)


def _sublayer_types(module: nn.Module) -> Sequence[str] | None:
    # x-transformers numbers sub-layers, and lists their kinds in `layer_types`.
    foreign = type(module).__module__.startswith("x_transformers")
    return getattr(module, "layer_types", None) if foreign else None


def _role_in_layer(rest: Sequence[str], last: str, parent: nn.Module) -> Role:
    """Return the role by the rest of a norm's name after the layer, and by its neighbors."""
    path = ".".join(rest).lower()
    neighbors = tuple(parent._modules)
    if last.startswith("post_attention") and "." not in path:
        # In Llama the norm comes after the attention and before the feed-forward network. In
        # Gemma 2, which has another norm before that network, it belongs to the attention.
        own = any(name.startswith("pre_f") for name in neighbors)
        return "attention" if own else "feed-forward"
    if last == "layer_norm" and "final_layer_norm" in neighbors:
        return "attention"  # Wav2Vec2 names only one of the two
    kind = type(parent).__name__.lower()
    if re.search(r"attention$|attn$", kind) or _ATTENTION.search(path):
        return "attention"
    numbered = _by_number(last, neighbors)
    if numbered is not None:
        return numbered
    if re.search(r"ff$|feedforward$|mlp$", kind) or _FEED_FORWARD.search(path):
        return "feed-forward"
    return "other"


def _by_number(name: str, neighbors: Sequence[str]) -> Role | None:
    """Return the role of norm1, norm2, …: the last belongs to the feed-forward network.

    The others belong to attention. None if the names are not numbered.
    """
    match = re.fullmatch(r"(.*?)(\d+)", name)
    if match is None:
        return None
    found = (re.fullmatch(re.escape(match[1]) + r"(\d+)", other) for other in neighbors)
    numbers = [int(other[1]) for other in found if other is not None]
    if len(numbers) < 2:
        return None
    return "feed-forward" if int(match[2]) == max(numbers) else "attention"


def _role_outside(path: str, parent: nn.Module) -> Role:
    if _EMBEDDING.search(path) or "embed" in type(parent).__name__.lower():
        return "embedding"
    return "final" if any(_is_stack(module) for module in parent.modules()) else "other"
