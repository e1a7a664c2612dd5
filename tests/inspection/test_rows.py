"""Output of `print(plan)`: 80 characters a line, whatever the names and the reasons are."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import powernorm
from powernorm.inspection.rows import NormRow, NormTable, format_rows
from surgery.foreign_models import FAMILIES, conformer_module


@cache
def tables() -> dict[str, NormTable]:
    torch.manual_seed(0)
    conformer = conformer_module().Conformer(16, 2, 32, 2, 3)
    lengths = torch.tensor([20, 12])
    batches = [(torch.randn(2, 20, 16), lengths) for _ in range(2)]
    encoder, inputs = FAMILIES["torch-encoder"]()
    return {
        "swap": powernorm.plan_swap(conformer, "bn"),
        "diagnose": powernorm.diagnose(conformer, batches),
        "fold": powernorm.plan_fold(encoder.eval(), inputs, keep="statistics"),
        "insert": powernorm.plan_insert(conformer),
    }


@pytest.mark.parametrize("name", ["swap", "diagnose", "fold", "insert"])
def test_a_table_is_80_characters_wide(name: str) -> None:
    table = tables()[name]
    text = str(table)
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    for row in table.rows:
        assert row.name in words
        assert name == "diagnose" or " ".join(row.reason.split()) in " ".join(words)
    assert max(map(len, table.to_text(120).splitlines())) <= 120


@pytest.mark.parametrize("name", ["swap", "diagnose", "fold", "insert"])
def test_a_wide_table_has_all_columns_and_a_line_a_norm(name: str) -> None:
    table = tables()[name]
    lines = table.to_text(None).splitlines()
    for row, line in zip(table.rows, lines[1:], strict=False):
        assert line.startswith(f"{row.name} ")
        assert line.endswith(row.reason)
    filled = {
        key for row in table.to_rows() for key, value in row.items() if value not in (None, (), "")
    }
    assert filled == {word for word in lines[0].split() if word != "%"}
    assert "not shown" not in table.to_text(None)


LONG = "a_module_with_a_long_name." * 5


@pytest.mark.parametrize("name", [LONG, "", "norm"])
def test_names_of_any_length(name: str) -> None:
    row = NormRow(
        name=name, kind="layer", action="keep", into=("a" * 30, "b" * 9), reason="word " * 30
    )
    text = format_rows([row], width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert f"{'a' * 30}, {'b' * 9}" in text
    assert name in text.replace("layer  keep", "").replace(" ", "").replace("\n", "")
