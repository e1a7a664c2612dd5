"""A model's own BatchNorms made to leave out padding."""

from __future__ import annotations

from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.norms.arguments import check_model
from powernorm.surgery.erasing import erase_padding
from powernorm.surgery.swapping import Swap, plan_swap


def mask_batch_norms(model: nn.Module) -> Swap:
    """Make a model's own BatchNorms leave out padding, as its mask says where it is.

    Each `torch.nn.BatchNorm1d` (of a Conformer's convolution module, PatchTST's) becomes this
    library's `BatchNorm` with the same parameters, statistics, counter, momentum, eps and
    mode, and gets the model's mask as the norms of a swap do. Convolutions beside such a norm that
    are wider than one position get zeros at padding, in evaluation too, where otherwise the last
    positions of a sequence would see what is padded to it: a padded sequence then gives what it
    gives alone.

    Args:
        model: changed in place.

    Returns:
        The swap of these norms, with `undo()`.

    Raises:
        InputError: the model has no such norm, or was compiled or wrapped already.

    >>> import torch
    >>> class Subsampled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
    ...     def forward(self, x, padding_mask):
    ...         return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
    >>> model = Subsampled()
    >>> masked = mask_batch_norms(model)
    >>> model.norm.class_name, masked.plan.rows[0].mask
    ('BatchNorm', 'padding_mask')
    >>> y = model(torch.randn(2, 5, 4), torch.arange(5) >= torch.tensor([[5], [3]]))
    """
    check_model(model)
    found = {name: norm for norm in find_norms(model) if is_batch_norm(norm) for name in norm.names}
    if not found:
        raise InputError(
            f"{type(model).__name__} has no BatchNorm1d that could leave out padding: "
            "powernorm.swap puts norms of the batch in the place of others"
        )
    swapped = plan_swap(model, "bn", where=lambda name, _: name in found).apply()
    for step in erase_padding(model, tuple(swapped.norms)):
        swapped.on_undo(step)
    return swapped


def is_batch_norm(norm: FoundNorm) -> bool:
    """Return whether a norm is a BatchNorm of sequences: torch's, or one that computes the same."""
    kinds = (nn.BatchNorm1d, nn.SyncBatchNorm)
    return norm.reading is not None and isinstance(norm.inner[1], kinds)
