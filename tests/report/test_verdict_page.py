import json
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from powernorm.errors import InputError
from powernorm.report import write_reports
from powernorm.report.verdict import print_verdict, render_verdict, verdict_markdown
from powernorm.report.verdict_records import mean_gap, read_verdict
from powernorm.verdict_runs import (
    EARLY_QUANTITIES,
    GapRecord,
    PredictorScore,
    VerdictResults,
    VerdictSetting,
)

TASKS = ("lm-sotu", "mlm-rt")


def gaps(values: list[float], *, num_lost: int = 0) -> GapRecord:
    seeds = list(range(len(values)))
    return GapRecord(valid=values, test=values, seeds=seeds, num_lost=num_lost, num_base_lost=0)


def setting(index: int) -> VerdictSetting:
    tid = 0.02 * (index + 1)
    gap = tid - 0.07
    early: dict[str, float | None] = dict.fromkeys(EARLY_QUANTITIES, tid)
    early["rbn_gap"] = None
    return VerdictSetting(
        name=f"{TASKS[index % 2]}-{index}",
        group=TASKS[index % 2],
        task=TASKS[index % 2].partition("-")[0],
        placement="pre" if index < 4 else "post",
        tokens_per_batch=64.0 * 2**index,
        num_layers=2,
        num_features=64,
        learning_rate=8e-3,
        max_steps=400,
        early_step=40,
        early=early,
        advice="rbn" if index else None,
        gaps={
            "bn": gaps([gap - 0.01, gap + 0.01]) if index != 7 else gaps([], num_lost=2),
            "pn": gaps([0.5]),
        },
    )


def score(norm: str, predictor: str, threshold: float | None) -> PredictorScore:
    return PredictorScore(
        norm=norm,
        predictor=predictor,
        num_settings=8,
        num_positive=5,
        threshold=threshold,
        hits_choosing=1.0,
        hits_scored=0.75,
        num_scored=4,
        interval=(0.3, 0.95),
        splits_mean=0.8125,
        splits_interval=(0.5, 1.0),
        leave_one_out=0.875,
        leave_one_out_clear=None,
        leave_one_group_out=0.625,
        num_clear=6,
        auc=0.9333,
        auc_alike=0.625,
        num_alike=16,
        rank_correlation=0.71,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results = VerdictResults(
        format=1,
        preset="demo",
        num_batches=50,
        clear_gap=0.01,
        choosing=["lm-sotu-0", "mlm-rt-1", "lm-sotu-4", "mlm-rt-5"],
        settings=[setting(index) for index in range(8)],
        scores=[
            score("bn", "ln_total_tid_last", 0.07),
            score("bn", "tokens_per_batch", 700.0),
            score("bn", "majority", None),
            {**score("bn", "always worse", None), "splits_mean": 0.625},
            score("pn", "ln_pn_tid_last", None),
        ],
        advice=[
            {"rule": "advice", "num_settings": 7, "num_no_worse": 5, "num_best": 3},
            {"rule": "ln", "num_settings": 7, "num_no_worse": 7, "num_best": 2},
        ],
    )
    (tmp_path / "verdict.json").write_text(json.dumps(results))
    return tmp_path


def test_the_page_has_the_figure_and_every_number(folder: Path) -> None:
    page = write_reports([folder])
    assert page == folder / "report.html"
    text = page.read_text()
    assert "BatchNorm ended worse than LayerNorm in 5 of 8" in text
    assert text.count("<svg") == 4
    for cell in ("7.00 %", "75 % (30 to 95)", "81 % (50 to 100)", "88 %", "0.93", "2 NaN"):
        assert cell in text
    for index in range(8):
        assert f"{TASKS[index % 2]}-{index}" in text
    assert not re.search(r'(src|href)="(?!#)', text)


def test_a_point_is_drawn_for_every_setting_with_a_finite_gap(folder: Path) -> None:
    results = read_verdict(folder)

    def num_shapes(settings: list[VerdictSetting]) -> int:
        text = render_verdict({**results, "settings": settings})
        return text[text.index("<svg") : text.index("</svg>")].count("<use")

    settings = results["settings"]
    # Points, legend and ticks are all drawn by reference to a shape.
    assert num_shapes(settings) - num_shapes([*settings[:3], *settings[4:]]) == 1
    assert num_shapes(settings) == num_shapes(settings[:7])


def test_markdown_tables_are_complete(folder: Path) -> None:
    text = verdict_markdown(read_verdict(folder))
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("### ")] == [
        "### Predicting bn against ln",
        "### Predicting pn against ln",
        "### Following the advice",
        "### The settings",
    ]
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) == (2 + 4) + (2 + 1) + (2 + 2) + (2 + 8)
    (tokens,) = [line for line in tables if line.startswith("| tokens in a batch | 700")]
    assert "| 0.93 | 0.62 (16) | 0.71 |" in tokens
    assert "+0.500 (1)" in text
    assert "| -0.050 (2) |" in text
    assert "| the norm that powernorm.diagnose advises | 5 of 7 (71 %) | 3 of 7 (43 %) |" in text
    assert "| always ln | 7 of 7 (100 %) | 2 of 7 (29 %) |" in text


def lead_of(results: VerdictResults, folder: Path) -> str:
    (folder / "verdict.json").write_text(json.dumps(results))
    console = Console(width=2000, record=True)
    print_verdict(console, folder)
    return console.export_text().splitlines()[0]


def test_the_lead_has_the_rates_beside_what_costs_nothing(folder: Path) -> None:
    results = read_verdict(folder)
    text = lead_of(results, folder)
    assert "in 81 % by the best of 1 discrepancies at a tenth of the training" in text
    assert "in 81 % by the number of tokens in a batch, and in 62 % by always saying" in text
    assert "no worse than LayerNorm in 5 and the best of four, or as good, in 3 of 7" in text
    assert "always ln would have been so in 7 and 2." in text
    # A part of the study: nothing is claimed of what is not there.
    early = lead_of({**results, "scores": [], "advice": []}, folder)
    assert early.strip().endswith("BatchNorm ended worse than LayerNorm in 5 of 8.")


def test_a_lost_layer_norm_counts_as_better(folder: Path) -> None:
    results = read_verdict(folder)
    lost = results["settings"][6]
    lost["gaps"]["bn"]["num_base_lost"] = 1
    assert mean_gap(lost, "bn") == -inf
    assert "worse than LayerNorm in 4 of 8" in lead_of(results, folder)
    assert "+0.070 (2), ln 1 NaN" in verdict_markdown(results)


def test_the_terminal_gets_the_rates(folder: Path) -> None:
    console = Console(width=200, record=True)
    print_verdict(console, folder)
    text = console.export_text()
    assert "tokens in a batch: right in 75 % of 4 scored settings, in 81 % over random" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "newer version"),
        ({"scores": [{"norm": "bn"}]}, r"scores\[0\]\.predictor is missing"),
        ({"settings": [{"name": 3}]}, r"settings\[0\]\.name is 3, expected a string"),
        ({"choosing": "x"}, "choosing is 'x', expected a list"),
    ],
)
def test_damaged_files_are_named(folder: Path, change: dict[str, Any], message: str) -> None:
    path = folder / "verdict.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        read_verdict(folder)


def test_an_interval_needs_two_numbers(folder: Path) -> None:
    path = folder / "verdict.json"
    content = json.loads(path.read_text())
    content["scores"][1]["interval"] = [0.5]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"scores\[1\]\.interval does not have two numbers"):
        read_verdict(folder)


def test_names_from_a_file_are_no_markup(folder: Path) -> None:
    path = folder / "verdict.json"
    content = json.loads(path.read_text())
    content["settings"][0]["name"] = "<script>alert(1)</script>"
    content["settings"][0]["group"] = "$<b>"
    path.write_text(json.dumps(content))
    assert "<script" not in render_verdict(read_verdict(folder))
