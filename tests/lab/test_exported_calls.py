"""A model as a function of tensors, and how well two of them agree."""

import math

import pytest
import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.exported_calls import Agreement, TensorCall, agreement_of


def agreement(wanted: Tensor, found: Tensor, *more: Tensor) -> Agreement:
    """Of outputs that are given, on one batch; `more` is its padding mask."""

    class Says(nn.Module):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            del x, padding_mask
            return wanted

    call = TensorCall(Says(), (torch.zeros(1), *more))
    return agreement_of(lambda *_: found, call, [call.example], "test")


def test_rows_are_vectors() -> None:
    wanted = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    found = agreement(wanted, torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]))
    assert (found.vectors, found.cosine, found.same_largest) == (2, 0.5, 0.5)
    assert found.error == pytest.approx(math.sqrt(2 / 26))


def test_padding_does_not_count() -> None:
    wanted = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    found = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    masked = agreement(wanted, found, torch.tensor([[False, True]]))
    assert (masked.vectors, masked.cosine, masked.error) == (1, 1.0, 0.0)
    nothing = agreement(wanted, found, torch.tensor([[True, True]]))
    assert (nothing.vectors, nothing.error) == (0, 0.0)


@pytest.mark.parametrize("shape", [(3,), ()])
def test_a_number_for_each_row_is_one_vector(shape: tuple[int, ...]) -> None:
    found = agreement(torch.ones(shape), 2 * torch.ones(shape))
    assert (found.vectors, found.cosine, found.error) == (1, pytest.approx(1.0), 1.0)


def test_zeros_and_infinities() -> None:
    assert agreement(torch.zeros(2, 3), torch.zeros(2, 3)).error == 0
    ruled_out = torch.tensor([[1.0, 2.0, -torch.inf]])
    assert agreement(ruled_out, ruled_out).cosine == pytest.approx(1)
    # Not a good agreement, whatever it is compared with.
    assert math.isnan(agreement(torch.ones(2, 3), torch.full((2, 3), torch.nan)).cosine)


class Optional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask


def test_batches_have_the_arguments_of_the_first() -> None:
    x, mask = torch.randn(2, 3), torch.ones(2, 3)
    both = TensorCall(Optional(), {"x": x, "mask": mask})
    assert both.tensors_of({"mask": mask, "x": x})[0] is x
    with pytest.raises(InputError, match="a batch has x, where the first one has x, mask"):
        both.tensors_of({"x": x})
    one = TensorCall(Optional(), {"x": x})
    with pytest.raises(InputError, match="a batch has x, mask, where the first one has x"):
        one.tensors_of({"x": x, "mask": mask})
    with pytest.raises(InputError, match="a batch has 1 positional arguments"):
        one.tensors_of((x,))
