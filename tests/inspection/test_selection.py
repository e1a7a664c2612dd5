"""Which norms a swap means: by name, class, role, side and height."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from powernorm.inspection.selection import Where
from powernorm.surgery.swapping import plan_swap
from refusals import refuses
from surgery.foreign_models import FAMILIES, torch_encoder

ENCODER_DECODERS = ("torch-transformer", "t5", "bart", "marian")
SECOND = {"layers.0.norm2", "layers.1.norm2"}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_by_default_only_the_encoder_of_an_encoder_decoder(name: str) -> None:
    model, _ = FAMILIES[name]()
    plan = plan_swap(model)
    for row in plan.rows:
        assert (row.action == "swap") == (row.side == "encoder")
        assert row.reason == ("" if row.side == "encoder" else "not selected")
    assert {row.side for row in plan.rows} == {"encoder", "decoder"}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("layers.0.*", {"layers.0.norm1", "layers.0.norm2"}),
        (["norm", "*1.norm1"], {"norm", "layers.1.norm1"}),
        (lambda name, module: name == "norm" and isinstance(module, nn.LayerNorm), {"norm"}),
        (Where(roles="attention"), {"layers.0.norm1", "layers.1.norm1"}),
        (Where(lowest=1), {"layers.0.norm1", "layers.0.norm2"}),
        (Where(roles=["final", "feed-forward"], names="*norm2"), SECOND),
        (Where(types="Layer*", lowest=2, roles="feed-forward"), SECOND),
        (Where(types=nn.LayerNorm, lowest=2, roles="feed-forward"), SECOND),
        (Where(types=("RMS*", nn.LayerNorm), lowest=2, roles="feed-forward"), SECOND),
    ],
)
def test_where(where: Any, expected: set[str]) -> None:
    plan = plan_swap(torch_encoder(), "bn", where=where)
    assert {row.name for row in plan.rows if row.action == "swap"} == expected


def test_the_side_of_a_selection() -> None:
    model, _ = FAMILIES["t5"]()
    rows = plan_swap(model, where=Where(side="decoder", lowest=1)).rows
    chosen = [row.name for row in rows if row.action == "swap"]
    assert chosen == [f"decoder.block.0.layer.{i}.layer_norm" for i in range(3)]


@pytest.mark.parametrize(
    ("where", "word"),
    [
        ("nothing", "layers.0.norm1"),
        (Where(side="encoder"), "no encoder and decoder side"),
        (Where(types="RMS*"), "types LayerNorm"),
        (Where(types=nn.RMSNorm), "types LayerNorm"),
        (Where(roles="embedding"), "roles attention, feed-forward, final"),
        ((), "layers 0 to 1"),
        (7, "expected a glob"),
    ],
)
def test_a_selection_of_nothing_lists_what_there_is(where: Any, word: str) -> None:
    refuses(word, plan_swap, torch_encoder(), where=where)


def test_conditions_that_do_not_exist() -> None:
    refuses("known are attention", Where, roles="head")
    refuses("'encoder' or 'decoder'", Where, side="left")
    refuses("≥ 1", Where, lowest=0)


def test_only_norms_that_cannot_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((3, 4)))
    refuses("2 dimensions", plan_swap, model)
    refuses("no norms at all", plan_swap, nn.Sequential(nn.Linear(4, 4)))
