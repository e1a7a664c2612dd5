from dataclasses import replace
from typing import Any

import pytest

from powernorm.diagnosis import DiagnosisRow, Limits
from powernorm.diagnosis.reports import advice
from powernorm.diagnosis.verdicts import judge_layer, judge_model
from refusals import refuses

LIMITS = Limits(bn=0.05, rbn=0.2, rbn_itself=0.09, pn=0.03)
LAYER = DiagnosisRow(
    name="layers.0.norm",
    kind="layer",
    action="keep",
    norm="ln",
    index=0,
    side=None,
    uses_batch_statistics=False,
    centered=True,
    mean_tid=0.01,
    var_tid=0.02,
    pnv_tid=0.02,
    pn_tid=0.01,
    padded_mean_tid=None,
    padded_var_tid=None,
    num_outliers=0,
    outlier_ratio=2.0,
    outlier_feature=3,
    top_position=0,
    top_position_ratio=1.5,
    lambda_1=1.0,
    kappa_20=2.0,
    kappa_50=3.0,
    kappa_80=4.0,
)


def judged(**changes: Any) -> DiagnosisRow:
    layer = replace(LAYER, **changes)
    return layer.judged(*judge_layer(layer, LIMITS))


@pytest.mark.parametrize(
    ("mean", "var", "pn", "verdict"),
    [
        (0.02, 0.03, 0.0, "bn"),
        (0.02, 0.031, 0.0, "rbn"),
        (0.1, 0.1, 0.0, "rbn"),
        (0.1, 0.11, 0.03, "pn"),
        (0.1, 0.11, 0.031, "keep"),
    ],
)
def test_of_a_layernorm(mean: float, var: float, pn: float, verdict: str) -> None:
    assert judged(mean_tid=mean, var_tid=var, pn_tid=pn).verdict == verdict


@pytest.mark.parametrize(
    ("norm", "mean", "var", "verdict"),
    [
        ("bn", 0.01, 0.02, "keep"),
        ("bn", 0.05, 0.05, "rbn"),
        ("bn", 0.2, 0.2, "ln"),
        ("rbn", 0.04, 0.05, "keep"),
        ("rbn", 0.05, 0.05, "ln"),
        ("pnv", None, 0.02, "keep"),
        ("pnv", None, 0.04, "ln"),
    ],
)
def test_of_a_norm_with_batch_statistics(
    norm: str, mean: float | None, var: float, verdict: str
) -> None:
    layer = judged(
        norm=norm,
        mean_tid=mean,
        var_tid=var,
        pn_tid=0.1,
        uses_batch_statistics=True,
        centered=mean is not None,
    )
    assert layer.verdict == verdict


def test_the_reason_of_a_batch_norm_says_what_the_verdict_says() -> None:
    layer = judged(norm="bn", uses_batch_statistics=True, var_tid=0.5, pn_tid=0.02)
    assert layer.verdict == "pn"
    assert "its own TID is 51 % > 5 %" in layer.reason
    assert "GroupScaling" in layer.reason


def far(name: str, index: int | None) -> DiagnosisRow:
    return judged(name=name, index=index, var_tid=0.5, pn_tid=0.5)


def near(name: str, index: int | None, **changes: Any) -> DiagnosisRow:
    return judged(name=name, index=index, **changes)


def test_the_last_norm_decides() -> None:
    verdict = judge_model([far("a", 0), near("b", 1)], LIMITS)
    assert (verdict["action"], verdict["norm"], verdict["lowest"]) == ("swap", "bn", None)
    assert "b" in verdict["reasons"][0]
    assert advice(verdict) == 'swap to bn: powernorm.swap(model, "bn")'


def test_the_lowest_layers() -> None:
    layers = [near("a", 0), near("b", 0, var_tid=0.1), near("c", 1), far("d", 2), far("e", None)]
    verdict = judge_model(layers, LIMITS)
    assert (verdict["action"], verdict["norm"], verdict["lowest"]) == ("swap lowest", "rbn", 2)
    assert "Where(lowest=2)" in advice(verdict)
    assert "side" not in verdict


def test_the_lowest_layers_of_an_encoder() -> None:
    layers = [near("a", 0, side="encoder"), judged(side="encoder", var_tid=0.5, pn_tid=0.5)]
    layers[1] = judged(name="b", index=1, side="encoder", var_tid=0.5, pn_tid=0.5)
    verdict = judge_model(layers, LIMITS)
    assert 'Where(lowest=1, side="encoder")' in advice(verdict)


@pytest.mark.parametrize(
    "layers",
    [
        [near("c", 2), far("final", None)],  # the lowest were not selected
        [near("a", 0), near("c", 2), far("d", 3)],  # a layer without norms
    ],
)
def test_only_layers_from_the_bottom_without_a_gap(layers: list[DiagnosisRow]) -> None:
    verdict = judge_model(layers, LIMITS)
    expected = ("swap lowest", 1) if layers[0].index == 0 else ("keep", None)
    assert (verdict["action"], verdict["lowest"]) == expected


def test_one_norm_has_to_fit_all_of_the_lowest() -> None:
    """Low TID of the mean and deviation says nothing about the quadratic mean, and vice versa."""
    first = near("a", 0, pn_tid=0.5)
    second = judged(name="b", index=1, var_tid=0.5, pn_tid=0.01)
    assert (first.verdict, second.verdict) == ("bn", "pn")
    verdict = judge_model([first, second, far("c", 2)], LIMITS)
    assert (verdict["lowest"], verdict["norm"]) == (1, "bn")


def test_a_batch_norm_that_is_there_and_bad() -> None:
    bad = judged(name="a", index=0, norm="bn", uses_batch_statistics=True, var_tid=0.9, pn_tid=0.9)
    verdict = judge_model([bad, far("b", 1)], LIMITS)
    assert verdict["action"] == "keep"
    assert any("a (ln)" in reason for reason in verdict["reasons"])


def test_keep() -> None:
    verdict = judge_model([far("a", 0), near("b", 1), far("c", None)], LIMITS)
    assert (verdict["action"], verdict["norm"], verdict["lowest"]) == ("keep", None, None)
    assert advice(verdict) == "keep the norms as they are"


def test_back_to_layernorm() -> None:
    layer = judged(norm="bn", uses_batch_statistics=True, var_tid=0.5, pn_tid=0.5)
    verdict = judge_model([layer], LIMITS)
    assert (verdict["action"], verdict["norm"]) == ("swap", "ln")


def test_what_a_reader_should_know() -> None:
    layers = [
        near("a", 0, top_position_ratio=50.0, num_outliers=2, outlier_ratio=9.0),
        near("b", 1, padded_mean_tid=0.2, padded_var_tid=0.3),
    ]
    text = " ".join(judge_model(layers, LIMITS)["reasons"])
    assert "position 0 is 50 times" in text
    assert "2 features of a" in text
    assert "50 % instead of 3 % in b" in text
    assert "is 9 times as loud" in text


@pytest.mark.parametrize(
    "options", [{"bn": -0.1}, {"pn": float("nan")}, {"bn": "x"}, {"bn": 0.3, "rbn": 0.2}]
)
def test_limits_that_are_none(options: dict[str, Any]) -> None:
    refuses(r"limits\.(bn|rbn|pn) is", Limits, **options)


def test_limits_say_where_they_come_from() -> None:
    records = Limits().to_records()
    assert [record["quantity"].split(":")[0] for record in records] == [
        *("bn", "rbn", "rbn itself", "pn")
    ]
    assert all(record["source"] for record in records)
