"""Rows of the runs, and outcomes of the rules."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from sacrebleu.metrics import BLEU, CHRF
from scipy import stats

import powernorm_lab as lab
from arms import ARMS, SETTINGS
from rules import COMPARISONS, LEVEL, MARGIN

SCORES = {"bleu": BLEU, "chrf": CHRF}
SAMPLES = 1000
"""Samples of the bootstrap over the sentences of the test split."""


def rows(out: Path, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return known rows and a row for each other finished run in a folder of the study."""
    found = {(row["setting"], row["arm"], row["seed"]): row for row in known}
    for setting in SETTINGS:
        for path in sorted((out / setting).glob("*/result.json")):
            run = json.loads(path.read_text(encoding="utf-8"))
            key = (setting, run["label"], run["seed"])
            if run["status"] == "finished" and key not in found:
                found[key] = dict(zip(("setting", "arm", "seed"), key, strict=True)) | _row(
                    run, path.parent
                )
    return [found[key] for key in sorted(found)]


def _row(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the scores of a run, with bootstrap intervals of BLEU and chrF."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lines = (folder / "translations.tsv").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [line.split("\t")[:0:-1] for line in lines]
    translations, references = zip(*pairs, strict=True)
    found: dict[str, Any] = {"test_loss": round(run["metrics"]["test_loss"], 5)}
    for name, metric in SCORES.items():
        scorer = metric(references=[list(references)])
        scored = scorer.corpus_score(list(translations), None, n_bootstrap=SAMPLES)
        told = json.loads(scored.format(signature=str(scorer.get_signature()), is_json=True))
        if abs(scored.score - run["metrics"][f"test_{name}"]) > 0.01:
            raise SystemExit(f"{folder}: {name} is {scored.score}, result.json says otherwise")
        found[name] = round(run["metrics"][f"test_{name}"], 3)
        found[f"{name}_interval"] = told["confidence_var"]
    return found | {
        "learning_rate": config["optimizer"]["learning_rate"],
        "on": "GPU" if run["tokens_per_second"] > 30_000 else "CPU",
    }


def write(folder: Path, known: list[dict[str, Any]]) -> None:
    """Write the tables of the settings whose runs are all over as CSV files of docs/results."""
    for name, table in tables(known).items():
        table.to_csv(folder / f"{name}.csv", index=False)


def tables(known: list[dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """Return arms and comparisons of each setting whose runs are all over."""
    frame = pd.DataFrame(known)
    found = {}
    for setting, (_, seeds) in SETTINGS.items():
        own = frame[frame["setting"] == setting]
        bleu = own.pivot_table(index="seed", columns="arm", values="bleu")
        bleu = bleu.reindex(index=seeds, columns=list(ARMS))
        if not bleu.isna().any(axis=None):
            arms = pd.DataFrame([_arm(name, own[own["arm"] == name]) for name in ARMS])
            found[f"layer-scale-{setting}"] = arms
            found[f"layer-scale-{setting}-differences"] = pd.DataFrame(_comparisons(bleu))
    return found


def _arm(name: str, runs: pd.DataFrame) -> dict[str, str]:
    return {
        "arm": f"`{name}`",
        "learning rate": f"{runs['learning_rate'].iloc[0]:g}",
        "BLEU": f"{runs['bleu'].mean():.2f} ± {runs['bleu'].std():.2f}",
        "a run's bootstrap": f"± {runs['bleu_interval'].mean():.2f}",
        "chrF": f"{runs['chrf'].mean():.2f} ± {runs['chrf'].std():.2f}",
        "test loss": f"{runs['test_loss'].mean():.3f}",
    }


def _comparisons(bleu: pd.DataFrame) -> Iterator[dict[str, str]]:
    gaps = [bleu[ahead] - bleu[behind] for _, ahead, behind in COMPARISONS]
    tests = [stats.ttest_1samp(gap, 0) for gap in gaps]
    corrected = lab.holm([test.pvalue for test in tests])
    for (claim, ahead, behind), gap, test, p in zip(
        COMPARISONS, gaps, tests, corrected, strict=True
    ):
        low, high = test.confidence_interval(0.95)
        yield {
            "claim": claim,
            "ahead minus behind": f"`{ahead}` - `{behind}`",
            "BLEU (95 %)": f"{gap.mean():+.2f} ({low:+.2f} to {high:+.2f})",
            "p, Holm": f"{p:.3f}",
            "outcome": _verdict(gap.mean(), low, high, p),
        }


def _verdict(mean: float, low: float, high: float, p: float) -> str:
    if p < LEVEL:
        return "shown" if mean > 0 else "contradicted"
    return "level" if low > -MARGIN and high < MARGIN else "open"
