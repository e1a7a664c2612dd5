from __future__ import annotations

import torch
from torch import Tensor, nn

from powernorm.diagnosis import first_nonfinite
from refusals import refuses


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.upper = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.upper(self.lower(x)) * scale


def test_innermost_module_in_order_of_calls() -> None:
    model, x = Model(), torch.randn(3, 4)
    assert first_nonfinite(model, x) is None
    with torch.no_grad():
        model.upper.weight[0, 0] = float("nan")
    assert first_nonfinite(model, x) == "upper"
    with torch.no_grad():
        model.lower[2].bias[1] = float("-inf")
    assert first_nonfinite(model, x) == "lower.2"
    assert first_nonfinite(model, {"x": x}) == "lower.2"
    assert first_nonfinite(model, x, lambda m, b: m.lower[0](b)) is None


def test_what_only_the_model_itself_does() -> None:
    assert first_nonfinite(Model(), (torch.randn(3, 4), float("inf"))) == ""


def test_a_batch_that_is_broken_itself_is_nobodys_doing() -> None:
    assert first_nonfinite(Model(), torch.full((2, 4), float("nan"))) is None


def test_masks_are_let_pass() -> None:
    class Attention(nn.Module):
        def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
            return (scores + mask).softmax(-1)

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, scores: Tensor) -> Tensor:
            mask = torch.zeros(4).index_fill(0, torch.tensor([3]), float("-inf"))
            if bool(scores[0, 0] > 1):
                mask[:] = float("-inf")
            return self.attention(scores, mask)

    assert first_nonfinite(Masking(), torch.zeros(4, 4)) is None
    assert first_nonfinite(Masking(), torch.full((4, 4), 2.0)) == "attention"


def test_modes_are_those_of_the_training() -> None:
    """In training mode the batch's variance is 0, in evaluation the running one is 1."""
    model = nn.Sequential(Root())
    assert first_nonfinite(model, torch.tensor([[-1.0]])) == "0"
    model = nn.Sequential(nn.Dropout(1.0), Root())
    assert first_nonfinite(model, torch.ones(4, 4)) == "1"
    assert first_nonfinite(model.eval(), torch.ones(4, 4)) is None


def test_compiled_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Root())
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        model[0].bias.fill_(-100)
    assert first_nonfinite(compiled, torch.randn(2, 4)) == "1"


def test_bad_arguments() -> None:
    refuses("model is 3", first_nonfinite, 3, torch.ones(1))
    refuses("forward is 3", first_nonfinite, Model(), torch.ones(1, 4), 3)


def test_values_inside_objects_are_seen() -> None:
    """An output of a class of its own, which even holds itself."""

    class Output:
        def __init__(self, value: Tensor) -> None:
            self.value, self.itself = value, self

    class Wrapping(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(x.log())

    model = nn.Sequential(nn.Identity(), Wrapping())
    assert first_nonfinite(model, torch.zeros(2, 3)) == "1"
    assert first_nonfinite(model, torch.ones(2, 3)) is None
