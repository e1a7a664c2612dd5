"""torch's fused Transformer layer, which never calls the norms that it reads.

In evaluation without gradients `nn.TransformerEncoderLayer` computes LayerNorm by the weights of
whatever stands in `norm1` and `norm2`, and `nn.TransformerEncoder` hands its layers a nested tensor
and no mask. Both are switched off where they would pass a norm by, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Switch:
    """An attribute that was set, with what it was before."""

    owner: nn.Module
    attribute: str
    before: object


def without_fast_path(
    model: nn.Module, norms: Collection[nn.Module] | None = None
) -> tuple[Switch, ...]:
    """Switch the fused path and nested tensors off, in the instances and not in torch.

    The attributes travel with copies and pickles of the model.

    Args:
        model: with layers of `torch.nn` anywhere inside.
        norms: only layers that hold one of these, and the encoders around them; None means all.

    Returns:
        What was changed, for `restore`.
    """
    wanted = None if norms is None else {id(norm) for norm in norms}
    switches: list[Switch] = []
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            attribute, off = "activation_relu_or_gelu", 0
        elif isinstance(module, nn.TransformerEncoder):
            attribute, off = "use_nested_tensor", False
        else:
            continue
        before = getattr(module, attribute, off)
        if before != off and _touched(module, wanted):
            switches.append(Switch(module, attribute, before))
            setattr(module, attribute, off)
    return tuple(switches)


def _touched(module: nn.Module, wanted: set[int] | None) -> bool:
    return wanted is None or any(id(part) in wanted for part in module.modules())


def restore(switches: Iterable[Switch]) -> None:
    """Put back what `without_fast_path` changed."""
    for switch in switches:
        setattr(switch.owner, switch.attribute, switch.before)
