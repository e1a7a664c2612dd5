"""Synthetic comparison of translations: 4 norms × 3 seeds, with lost runs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.tests.report.synthetic import made_result, write_results, write_run

from powernorm_lab.runs import TRANSLATIONS_FILE, PaperRecord, RunResult

BLEU = {"ln": 20.0, "bn": 18.5, "rbn": 20.5, "pn": 21.0}
SEEDS = (0, 1, 2)
NUM_SENTENCES = 40
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
LOWERED = "nrefs:1|case:lc|eff:no|tok:none|moses:en-sacremoses-0.2.0|smooth:exp|version:2.6.0"
AVERAGE = "average of the last 6 checkpoints"
RECALIBRATED = f"{AVERAGE}, running statistics recalibrated"
SOURCE = "A. Paper 2020, Table 1"
OTHER = "B. Paper 2022, Table 2"


def status_of(norm: str, seed: int) -> str:
    """Return the status of a run; a seed of bn diverged and the third of pn failed."""
    return {("bn", 1): "diverged", ("pn", 2): "failed"}.get((norm, seed), "finished")


def paper_record(
    norm: str,
    value: float | None,
    *,
    source: str = SOURCE,
    metric: str = "test_bleu_lowercase",
    placement: str = "pre",
) -> PaperRecord:
    kind = {"norm": norm, "placement": placement, "dataset": "IWSLT14 De-En", "metric": metric}
    return PaperRecord(**kind, value=value, source=source)  # type: ignore[typeddict-item]


PAPER = (
    paper_record("ln", 35.5),
    paper_record("ln", 35.25, source=OTHER),
    paper_record("bn", 34.4),
    paper_record("pn", 35.9),
    paper_record("rbn", 35.6, source=OTHER, metric="test_bleu_tokenised"),
    paper_record("mabn", 0.0, source=OTHER),
    paper_record("none", None),
    paper_record("ln", 35.5, placement="post"),
)


def write_translations(folder: Path, **changes: Any) -> Path:
    """Write `results.json` with changed values, and the run folders; return `folder`."""
    head: dict[str, Any] = {
        "task": "translation",
        "preset": "verses-small",
        "settings": {"data": {"languages": "de-en"}, "seeds": list(SEEDS)},
        "data": {"name": "verses", "languages": "de-en"},
        "baselines": [
            {"name": "unigram", "metrics": {"valid_perplexity": 300.0, "test_perplexity": 310.0}},
            {"name": "copy", "metrics": {"test_bleu": 0.3, "test_chrf": 17.0}},
        ],
        "paper": list(PAPER),
        "reduced": "A reduced verses-small. Against it: model.num_layers 3 in place of 6.",
    }
    runs = [_write_run(folder, norm, seed) for norm in BLEU for seed in SEEDS]
    return write_results(folder, runs, "test_bleu", **head | changes)


def _write_run(folder: Path, norm: str, seed: int) -> RunResult:
    status = status_of(norm, seed)
    finished = status == "finished"
    result = made_result(
        norm,
        seed,
        status=status,
        metrics=_metrics(BLEU[norm] + seed) if finished else {"valid_perplexity": 400.0},
        seconds=100.0,
        tokens_per_second=20_000.0,
        parameters=1_234_567,
        scored=AVERAGE if norm == "ln" else RECALIBRATED,
        signatures={"test_bleu": SIGNATURE, "test_bleu_lowercase": LOWERED} if finished else {},
        message="" if finished else "something <b>broke</b>",
    )
    write_run(folder, result, _curve_rows(BLEU[norm]))
    if finished:
        _write_sentences(folder / result.folder / TRANSLATIONS_FILE, norm)
    return result


def _metrics(bleu: float) -> dict[str, float | None]:
    return {
        "valid_loss": 2.0,
        "test_loss": 2.1,
        "valid_perplexity": math.exp(2.0),
        "test_perplexity": math.exp(2.1),
        "test_bleu": bleu,
        "test_bleu_tokenised": bleu + 0.5,
        "test_bleu_lowercase": bleu + 1.5,
        "test_chrf": 2 * bleu,
        "decoding_tokens_per_second": 3000.0,
    }


def _curve_rows(bleu: float) -> Iterator[dict[str, float]]:
    for step in range(100, 1100, 100):
        loss = 2 + 4 * math.exp(-step / 300) - bleu / 100
        row = {"step": step, "tokens": step * 4096, "train_loss": loss, "valid_loss": loss + 0.1}
        yield row | {"valid_perplexity": math.exp(loss + 0.1)}


def _write_sentences(path: Path, norm: str) -> None:
    lines = ["source\treference\ttranslation"]
    lines += [
        f"Und es war Abend, Tag {number}\tand it was evening, day {number}"
        f"\t{norm} says <i>evening</i> & day {number}"
        for number in range(NUM_SENTENCES)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
