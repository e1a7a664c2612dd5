"""Which factory makes the norm at which place of a stack of layers."""

from typing import NamedTuple, TypeVar

from powernorm.errors import InputError
from powernorm.lab.models.layers import NormFactory

Norms = TypeVar("Norms")


class NormPlaces(NamedTuple):
    """What makes the norms of an encoder, by place."""

    attention: NormFactory
    """Of the self-attention in every layer."""
    feedforward: NormFactory
    """Of the feed-forward network in every layer."""
    final: NormFactory
    """After the last layer, with placement `pre`."""

    @classmethod
    def everywhere(cls, norm: NormFactory) -> "NormPlaces":
        """The same norm at every place."""
        return cls(norm, norm, norm)


def norms_by_layer(
    norms: Norms, num_layers: int, num_norm_layers: int | None, upper: Norms | None
) -> list[Norms]:
    """Return what makes the norms of each layer, the lowest first.

    Args:
        norms: of the lowest layers.
        num_layers: number of layers.
        num_norm_layers: number of lowest layers; None is all.
        upper: of the layers above them.

    Raises:
        InputError: there are no such layers, or nothing for those above them.
    """
    if num_norm_layers is None or num_norm_layers == num_layers:
        return [norms] * num_layers
    if upper is None or not 0 <= num_norm_layers <= num_layers:
        raise InputError(
            f"num_norm_layers={num_norm_layers} of num_layers={num_layers} layers: give 0 to "
            f"{num_layers}, and with upper_norm what makes the norms above them."
        )
    return [norms] * num_norm_layers + [upper] * (num_layers - num_norm_layers)
