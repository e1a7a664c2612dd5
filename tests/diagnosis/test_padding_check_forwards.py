"""`padding_check` of models whose forwards fail at times, fix a type or return objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from diagnosis.test_padding_check import C, example
from powernorm.diagnosis import padding_check
from refusals import refuses


def test_calls_that_fail_and_are_made_in_another_way_do_not_confuse_the_check() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(C, C), Convolution()])

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            for layer in self.layers:
                try:
                    x = layer(x, padding_mask=padding_mask)
                except TypeError:
                    x = layer(x)
            return x

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(C, C, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.mT).mT

    report = padding_check(Tries(), example())
    assert [(leak.module, leak.reach) for leak in report.leaks] == [("layers.1.conv", 1)]
    assert report.difference > 1e-3
    assert not report.not_compared


def test_a_difference_of_the_output_is_said_where_nothing_can_be_repeated() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_alone = False

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            self.is_alone = len(x) == 1 and not self.is_alone
            if len(x) == 1 and not self.is_alone:  # each second time
                raise RuntimeError
            return x.cumsum(1).mean(1, keepdim=True) + padding_mask.sum()

    report = padding_check(Once(), example())
    assert report.difference > 1e-3
    assert "cannot run by itself" in str(report)


def test_a_model_that_fixes_a_type_is_refused_by_name() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            scores = (x @ x.mT).masked_fill(padding_mask[:, None], -torch.inf)
            return torch.softmax(scores, -1, dtype=torch.float32) @ x

    refuses(
        r"Softmax in float64.*fails on the batch \(.*Float", padding_check, Softmax(), example()
    )


def test_a_model_that_cannot_be_copied_is_refused_by_name() -> None:
    class Sharded(nn.Module):
        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("FSDP does not support deepcopy")

    refuses(
        r"Sharded cannot be copied to float64.*before it is compiled, quantized or sharded",
        padding_check,
        Sharded(),
        example(),
    )


@dataclass
class Outputs:
    """Output as libraries of time series return it."""

    forecast: Tensor


@pytest.mark.parametrize("made", [Outputs, lambda y: str(y.shape)], ids=["dataclass", "no tensors"])
def test_an_output_that_is_no_tensor_is_compared_or_named(made: Callable[[Tensor], object]) -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor, padding_mask: Tensor) -> object:
            del padding_mask
            return made(x - x.mean(1, keepdim=True))

    report = padding_check(Mixing(), example())
    assert not report.is_clean
    if made is Outputs:
        assert report.difference > 0.01
    else:
        assert report.not_compared == {"": "it returns no tensors, but a str"}
        assert "the output could not be compared" in str(report)
