"""Rows of the runs, and outcomes of the rules."""

import json
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
from sacrebleu.metrics import BLEU, CHRF
from scipy import stats

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


def tables(known: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the results in Markdown."""
    frame = pd.DataFrame(known)
    for setting, (recipe, seeds) in SETTINGS.items():
        own = frame[frame["setting"] == setting]
        bleu = own.pivot_table(index="seed", columns="arm", values="bleu")
        bleu = bleu.reindex(columns=list(ARMS)).dropna()
        yield f"### {setting}, `{recipe}`"
        yield ""
        if len(bleu) < len(seeds):
            num_runs = len(seeds) * len(ARMS)
            yield f"{len(own)} of {num_runs} runs are over; nothing is compared before all are."
            yield ""
            continue
        means = own[own["seed"].isin(bleu.index)].groupby("arm")
        yield "| arm | learning rate | BLEU | chrF | test loss |"
        yield "|---|---|---|---|---|"
        for arm in ARMS:
            one = means.get_group(arm)
            yield (
                f"| `{arm}` | {one['learning_rate'].iloc[0]:g} | "
                f"{one['bleu'].mean():.2f} ± {one['bleu'].std():.2f} | "
                f"{one['chrf'].mean():.2f} | {one['test_loss'].mean():.3f} |"
            )
        yield ""
        yield "| | ahead - behind | BLEU (95 %) | p, Holm | |"
        yield "|---|---|---|---|---|"
        yield from _comparisons(bleu)
        yield ""


def _comparisons(bleu: pd.DataFrame) -> Iterator[str]:
    gaps = [bleu[ahead] - bleu[behind] for _, ahead, behind in COMPARISONS]
    tests = [stats.ttest_1samp(gap, 0) for gap in gaps]
    corrected = _holm([test.pvalue for test in tests])
    for (claim, ahead, behind), gap, test, p in zip(
        COMPARISONS, gaps, tests, corrected, strict=True
    ):
        low, high = test.confidence_interval(0.95)
        yield (
            f"| {claim} | `{ahead}` - `{behind}` | {gap.mean():+.2f} ({low:+.2f} to {high:+.2f}) | "
            f"{p:.3f} | {_verdict(gap.mean(), low, high, p)} |"
        )


def _verdict(mean: float, low: float, high: float, p: float) -> str:
    if p < LEVEL:
        return "**shown**" if mean > 0 else "**contradicted**"
    return "level" if low > -MARGIN and high < MARGIN else "open"


def _holm(probabilities: list[float]) -> list[float]:
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    corrected, largest = [nan] * len(order), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, probabilities[index] * (len(order) - rank)))
        corrected[index] = largest
    return corrected
