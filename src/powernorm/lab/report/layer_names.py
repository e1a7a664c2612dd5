"""Names of layers as figures have room for them."""

from collections.abc import Sequence
from typing import Final

from powernorm.lab.report.numerals import printable

_LENGTH: Final = 28


def short_names(layers: Sequence[str]) -> list[str]:
    """The layers' names without what says nothing, cut to the room that there is.

    That is what all names share in front and behind, and a last part `norm`.

    >>> short_names(["model.layers.0.attention.norm", "model.layers.1.feedforward.norm"])
    ['layers.0.attention', 'layers.1.feedforward']
    """
    parts = [name.split(".") for name in layers]
    ahead = _num_shared(parts)
    behind = _num_shared([names[::-1] for names in parts]) if len(layers) > 1 else 0
    return [_short_name(names, ahead, behind) for names in parts]


def _short_name(whole: Sequence[str], ahead: int, behind: int) -> str:
    ahead = min(ahead, len(whole) - 1)
    end = max(len(whole) - behind, ahead + 1)
    if whole[ahead].isdigit():
        # A number says too little without its noun.
        ahead = max(ahead - 1, 0)
    own = list(whole[ahead:end])
    if len(own) > 1 and own[-1] == "norm":
        own.pop()
    name = printable(".".join(own))
    if len(name) <= _LENGTH:
        return name
    # The end tells layers apart; whole parts are left out where that suffices.
    while len(own) > 1 and len(printable(".".join(own))) >= _LENGTH:
        own.pop(0)
    return "…" + printable(".".join(own))[1 - _LENGTH :]


def _num_shared(names: Sequence[Sequence[str]]) -> int:
    """How many parts all names begin with."""
    shared = 0
    for column in zip(*names, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared
