"""Unequal and empty processes calibrate to the same statistics as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diagnosis.models import Batch, Masked, batches
from norms.processes import run_processes
from powernorm.surgery.calibration import calibrate

WAYS = ("layer_by_layer", "one_pass")


def built(norm: str) -> Masked:
    torch.manual_seed(0)
    return Masked(norm)


def shares() -> list[list[Batch]]:
    """Batches of three processes: unequal numbers; the last one has none."""
    data = batches(5)
    return [data[:3], data[3:], []]


def one_rank(rank: int, norms: list[str]) -> list[Any]:
    results = []
    for norm in norms:
        for way in WAYS:
            model = built(norm)
            report = calibrate(model, shares()[rank], way=way)  # type: ignore[arg-type]
            results.append((model.state_dict(), report.to_rows()))
    return results


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_equal_one_process(tmp_path: Path) -> None:
    norms = ["bn", "pn"]
    ranks = run_processes(one_rank, 3, tmp_path, norms)
    data = [batch for share in shares() for batch in share]
    index = 0
    for norm in norms:
        for way in WAYS:
            model = built(norm)
            report = calibrate(model, data, way=way)  # type: ignore[arg-type]
            for rank in ranks:
                state, rows = rank[index]
                for name, tensor in model.state_dict().items():
                    torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
                assert [row["name"] for row in rows] == [row.name for row in report.rows]
                assert rows[0]["tokens"] == report.rows[0].tokens
            index += 1
