"""Folding through every placement of the laboratory's models, at 1e-12 in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.norms import BatchStatisticsNorm, build_norm
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.runs import PLACEMENTS
from powernorm_lab.tasks.lm.model import LanguageModel
from surgery.static_models import left_of, settle

BOUND = 1e-12
VARIANTS: dict[str, dict[str, Any]] = {
    # Of `pre` and `post` all other tests of folding are.
    **{one: {"placement": one} for one in PLACEMENTS if one not in ("pre", "post")},
    "qk-whole": {"qk_norm": "whole"},
}
ACTIONS = {"hybrid": {"fold", "simplify"}}
"""Norms that the heads share leave a multiply-add."""
MORE: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "pre-embedding-norm": {"placement": "pre", "embedding_norm": True},
}


def model_of(options: dict[str, Any], norm: str = "bn") -> LanguageModel:
    """Two layers whose scales and statistics are those of no start."""
    shape = TransformerShape(
        num_features=8, num_layers=2, num_heads=2, feedforward_features=12, **options
    )
    model = LanguageModel(
        13, lambda num_features: build_norm(norm, num_features), shape, max_length=7, seed=2
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator) * 0.5)
    settle(model)
    return model.double()


def tokens(length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(13, (2, length), generator=generator)


def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


@pytest.mark.parametrize("variant", some_default(VARIANTS, *list(VARIANTS)[::2]))
def test_every_placement_folds(variant: str) -> None:
    model = model_of(VARIANTS[variant])
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    expected, padded = model(tokens()), model(tokens(5), mask)
    report = powernorm.fold(model, {"tokens": tokens()})
    assert {row.action for row in report.rows} == ACTIONS.get(variant, {"fold"})
    assert not [part for part in model.modules() if isinstance(part, BatchStatisticsNorm)]
    assert report.errors[0].relative <= BOUND
    assert gap(model(tokens()), expected) <= BOUND
    assert gap(model(tokens(5), mask)[~mask], padded[~mask]) <= BOUND
    report.undo()
    assert torch.equal(model(tokens()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["bn", "pnv", "pn-static", "mabn"])
@pytest.mark.parametrize("variant", MORE)
def test_every_placement_folds_with_other_static_norms(variant: str, norm: str) -> None:
    model = model_of(MORE[variant], norm)
    expected = model(tokens())
    report = powernorm.fold(model, {"tokens": tokens()})
    assert {row.action for row in report.rows} == ACTIONS.get(variant, {"fold"})
    assert gap(model(tokens()), expected) <= BOUND


def test_a_norm_that_heads_share_leaves_a_multiply_add() -> None:
    """A norm of queries and keys per head: the rows of the maps would have to be tied by heads."""
    model = model_of({"qk_norm": "per_head"})
    expected = model(tokens())
    report = powernorm.fold(model, {"tokens": tokens()})
    left = {row.name.split(".")[3] for row in report.rows if left_of(row) == "multiply-add"}
    assert left == {"query_norm", "key_norm"}
    assert {left_of(row) for row in report.rows} == {"fold", "multiply-add"}
    assert gap(model(tokens()), expected) <= BOUND


def test_the_constant_of_deepnorm_is_saved_with_what_folding_made_of_it(tmp_path: Any) -> None:
    """α is a buffer, and takes up the scales of the norms around it."""
    model = model_of({"placement": "deepnorm"})
    fresh: nn.Module = copy.deepcopy(model)
    expected = model(tokens())
    powernorm.fold(model, {"tokens": tokens()})
    powernorm.save(model, tmp_path / "folded")
    loaded = powernorm.load(tmp_path / "folded", fresh)
    assert gap(loaded(tokens()), expected) <= BOUND
