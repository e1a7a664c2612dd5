"""Synthetic diagnoses: BERT with 25 norms, and a small one with gaps."""

import json
import math
import random
from pathlib import Path
from typing import Any

from powernorm.records import (
    DIAGNOSIS_COLUMNS,
    BatchSizeRow,
    DiagnosisRecord,
    EvaluationRow,
    PaperStatistic,
    ScaleRecord,
    SpectrumRecord,
    ThresholdRecord,
    VerdictRecord,
)
from powernorm_lab.runs import DIAGNOSIS_FILE

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
BERT_LAYERS = (
    "bert.embeddings.LayerNorm",
    *(
        f"bert.encoder.layer.{block}.{part}.LayerNorm"
        for block in range(12)
        for part in ("attention.output", "output")
    ),
)
SCALED_LAYERS = BERT_LAYERS[::6]
SMALL_LAYERS = ("blocks.0.attention_norm", "blocks.1.attention_norm", "final_norm")


def bert_diagnosis() -> DiagnosisRecord:
    """Return a diagnosis with everything: padding, outliers, spectra, scales, losses."""
    dice = random.Random(0)
    layers = [_bert_layer(depth, name, dice) for depth, name in enumerate(BERT_LAYERS)]
    return DiagnosisRecord(
        format=1,
        model="BertForMaskedLM",
        step=3000,
        num_batches=40,
        num_tokens=163_840,
        padding=0.3125,
        layers=layers,
        verdict=VerdictRecord(
            action="swap lowest",
            norm="rbn",
            lowest=5,
            reasons=[
                "In the 5 lowest layers the deviation's TID stays below 5 %.",
                "bert.encoder.layer.2.output.LayerNorm & above: TID <reaches> 31.2 %.",
            ],
            thresholds=[
                ThresholdRecord(
                    quantity="bn: mean_tid + var_tid",
                    limit=0.05,
                    source="Wang et al. 2022, Table 4: settings below it kept BatchNorm's score "
                    "within one point of LayerNorm's",
                ),
                ThresholdRecord(quantity="outlier_ratio", limit=20, source="docs/diagnosis.md"),
            ],
        ),
        batch_sizes=[
            _batch_size(row["layer"], row["var_tid"], size) for row in layers for size in SIZES
        ],
        spectra=[
            SpectrumRecord(
                name="bert.embeddings.word_embeddings",
                values=[(1 + index / 9) ** -0.8 for index in range(768)],
            ),
            SpectrumRecord(
                name="bert.embeddings.position_embeddings",
                values=[math.exp(-index / 40) for index in range(512)],
            ),
        ],
        scales=[_scale(name, dice) for name in SCALED_LAYERS],
        evaluation=[
            EvaluationRow(statistics="running", tokens=None, loss=2.9),
            EvaluationRow(statistics="re-estimated", tokens=None, loss=2.6),
            *(
                EvaluationRow(statistics="batch", tokens=size, loss=2.5 + 120 / size)
                for size in SIZES
            ),
        ],
        notes=[
            "No batch went through cls.predictions.transform.LayerNorm.",
            "The mask of 2 batches did not fit: <b>padding</b> was counted there.",
        ],
    )


def _bert_layer(depth: int, name: str, dice: random.Random) -> dict[str, object]:
    tid = 0.004 * 1.19**depth * dice.lognormvariate(0, 0.15)
    outliers = depth > 8
    return {
        "layer": name,
        "norm": "ln",
        "mean_tid": 0.7 * tid,
        "var_tid": tid,
        "pnv_tid": 0.9 * tid,
        "pn_tid": 0.2 * tid,
        "padded_mean_tid": 2.1 * tid,
        "padded_var_tid": 3 * tid,
        "num_outliers": 3 if outliers else 0,
        "outlier_ratio": 45.7 if outliers else 1.9,
        "outlier_feature": 308,
        "top_position": 0,
        "top_position_ratio": 1.2 + depth,
        "lambda_1": 2.0 * 1.3**depth,
        "kappa_20": 40.0 * 1.1**depth,
        "kappa_50": 200.0 * 1.2**depth,
        "kappa_80": 2e3 * 1.4**depth,
        "verdict": "rbn" if tid < 0.05 else "keep",
        "reason": "" if tid < 0.05 else f"the deviation's TID is {100 * tid:.1f} %, above 5 %",
    }


def _batch_size(layer: object, tid: object, tokens: int) -> BatchSizeRow:
    assert isinstance(tid, float)
    value = tid * math.sqrt(4096 / tokens)
    return BatchSizeRow(
        layer=str(layer),
        tokens=tokens,
        num_batches=163_840 // tokens,
        mean_tid=0.7 * value,
        var_tid=value,
        pnv_tid=0.9 * value,
        pn_tid=0.2 * value,
    )


def _scale(layer: str, dice: random.Random) -> ScaleRecord:
    deviation = [dice.lognormvariate(0, 0.8) for _ in range(768)]
    return ScaleRecord(
        layer=layer,
        weight=[1 / (0.5 + value) + dice.gauss(0, 0.1) for value in deviation],
        deviation=deviation,
    )


def small_diagnosis() -> DiagnosisRecord:
    """Return a PowerNorm run without mean, padding, spectra or losses, and one unused layer."""
    layers = [dict.fromkeys(DIAGNOSIS_COLUMNS) | {"layer": name} for name in SMALL_LAYERS]
    for depth, row in enumerate(layers):
        row |= {"norm": "pn", "verdict": "keep", "reason": "already a norm of the batch"}
        if depth < 2:
            row |= {"pnv_tid": 0.01 + 0.01 * depth, "pn_tid": 0.002}
    return DiagnosisRecord(
        format=1,
        model="pn-pre-seed0",
        step=None,
        num_batches=1,
        num_tokens=2048,
        padding=0.0,
        layers=layers,
        verdict=VerdictRecord(action="keep", norm=None, lowest=None, reasons=[], thresholds=[]),
        batch_sizes=[
            BatchSizeRow(
                layer=name,
                tokens=size,
                num_batches=2048 // size,
                mean_tid=None,
                var_tid=None,
                pnv_tid=0.4 / math.sqrt(size),
                pn_tid=None,
            )
            for name in SMALL_LAYERS[:2]
            for size in (512, 1024)
        ],
        spectra=[],
        scales=[],
        evaluation=[],
        notes=[],
    )


def scored_diagnosis(bleu: float) -> DiagnosisRecord:
    """Return scores with running, re-estimated and batch statistics of two sizes."""
    record = bert_diagnosis()
    kinds: list[tuple[str, int | None, float]] = [
        ("running", None, bleu),
        ("re-estimated", None, bleu + 1),
        ("re-estimated in one pass", None, bleu + 2),
        ("batch", 512, bleu + 3),
        ("batch", 1024, bleu + 4),
    ]
    record["evaluation"] = []
    for statistics, size, score in kinds:
        row = EvaluationRow(
            statistics=statistics,
            tokens=None if size is None else size - 12,
            loss=2.0,
            scores={"test_bleu": score + 0.5, "test_bleu_tokenised": score},
        )
        if size is not None:
            row["size"] = size
        record["evaluation"].append(row)
    return record


def paper_statistics(norm: str = "bn") -> list[PaperStatistic]:
    shared: dict[str, Any] = {"norm": norm, "placement": "pre", "dataset": "IWSLT14 De-En"}
    tid = {"mean_last": 3.4, "var_last": 4.6, "mean_avg": 3.2, "var_avg": 5.5}
    scores: list[tuple[str, int | None, float]] = [
        ("running", None, 34.8),
        ("re-estimated in one pass", None, 34.9),
        ("batch", 512, 27.2),
    ]
    rows = [
        PaperStatistic(**shared, metric=metric, value=value, source="Wang et al. 2022, Table 4")
        for metric, value in tid.items()
    ]
    for statistics, size, value in scores:
        row = PaperStatistic(
            **shared,
            metric="test_bleu_tokenised",
            value=value,
            source="Wang et al. 2022, Table 7",
            statistics=statistics,
        )
        if size is not None:
            row["size"] = size
        rows.append(row)
    return rows


def write_diagnosis(run: Path, record: DiagnosisRecord) -> Path:
    """Write a record into a run's folder."""
    path = run / DIAGNOSIS_FILE
    path.write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
    return path
