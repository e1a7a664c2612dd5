"""Parameter groups of an optimizer, with weight decay of γ by the role of its norm."""

from __future__ import annotations

from typing import Any

from torch import nn

from powernorm.inspection.finder import find_norms
from powernorm.inspection.selection import Selection, place, select
from powernorm.norms.arguments import check_model, check_number


def decay_groups(
    model: nn.Module, weight_decay: float, norms: Selection = ()
) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer: decayed parameters, and the others.

    Matrices are decayed; biases and the parameters of norms are not, except γ of the selected
    norms. A γ in front of a linear map (pre-norm) could be part of it, and decay keeps both in
    balance; a γ whose output goes into the residual stream scales its branch, and decay would
    shrink it (Wang et al. 2026, arXiv:2605.26895, who decay the former only).

    Args:
        model: its parameters with `requires_grad` are grouped.
        weight_decay: weight decay of the first group.
        norms: norms whose γ is decayed, as in `powernorm.swap`; `()` for none.

    Raises:
        InputError: a selection without a norm.

    >>> from powernorm import Where
    >>> model = nn.TransformerEncoderLayer(8, 2, norm_first=True)
    >>> roles = Where(roles=("attention", "feed-forward"))
    >>> [len(group["params"]) for group in decay_groups(model, 0.1, roles)]
    [6, 6]
    """
    check_model(model)
    decay = check_number("weight_decay", weight_decay, at_least=0)
    found = place(model, find_norms(model))
    chosen = frozenset[str]() if norms == () else select(found, norms)
    owned = {
        id(parameter): site.name in chosen and name == "weight"
        for site in found
        for name, parameter in site.norm.module.named_parameters()
    }
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for parameter in model.parameters():
        if parameter.requires_grad:
            decayed = owned.get(id(parameter), parameter.ndim > 1)
            groups[not decayed]["params"].append(parameter)
    return groups
