"""Runs of the study: translation models with and without layer-scale in front of each norm.

Three settings: `reduced` (the recipe verses-reduced, each arm at a learning rate tuned alike) and
`mini-pre`, `mini-post` (the recipes of these names, all arms at the recipe's rate).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import powernorm_lab as lab

GROUPS = 4
"""Groups of layer-scale, one per head as in Shen et al. 2020."""
ARMS: dict[str, tuple[str, bool]] = {
    "ln": ("ln", False),
    "bn": ("bn", False),
    "bn-scaled": ("bn", True),
    "pnv": ("pnv", False),
    "pnv-scaled": ("pnv", True),
    "pn": ("pn", False),
    "pn-scaled": ("pn", True),
    "rbn": ("rbn", False),
    "gs": ("gs", True),
}
"""Norm, and whether layer-scale precedes it; `gs` is layer-scale without a norm."""
SETTINGS = {
    "reduced": ("verses-reduced", tuple(range(10, 15))),
    "mini-pre": ("verses-mini-pre", tuple(range(10, 20))),
    "mini-post": ("verses-mini-post", tuple(range(10, 20))),
}
"""Recipe and seeds; earlier runs of these recipes have the seeds 0 to 4."""
RATES = (1e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3)
TRIALS = "trials"
TRIAL_SEED = 100
TRIAL_STEPS = 667
"""A third of verses-reduced."""


def comparison(setting: str, rates: dict[str, float] | None = None) -> lab.ComparisonSettings:
    """Return the comparison of the arms, optionally with a learning rate for each arm."""
    recipe, seeds = SETTINGS[setting]
    variants = tuple(_variant(arm, arm, rates[arm] if rates else None) for arm in ARMS)
    return replace(_base(recipe, variants), seeds=seeds)


def trials() -> lab.ComparisonSettings:
    """Return the tuning of `reduced`: every arm at every rate, one seed, a third of the length."""
    variants = tuple(_variant(f"{arm}-at-{rate:g}", arm, rate) for rate in RATES for arm in ARMS)
    changes = [
        f"training.max_steps={TRIAL_STEPS}",
        "training.average_checkpoints=0",
        "training.tid_batches=0",
        "training.monitor_every=0",
        "decoding.beam_size=1",
    ]
    return lab.override(replace(_base("verses-reduced", variants), seeds=(TRIAL_SEED,)), changes)


def trial_rows(out: Path) -> list[dict[str, Any]]:
    """Return arm, rate and validation loss of each trial of a folder of the study."""
    results = json.loads((out / TRIALS / "results.json").read_text(encoding="utf-8"))
    found = []
    for run in results["runs"]:
        arm, _, rate = run["label"].partition("-at-")
        loss = run["metrics"]["valid_loss"] if run["status"] == "finished" else None
        found.append({"arm": arm, "learning_rate": float(rate), "valid_loss": loss})
    return found


def best_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the rate of the lowest validation loss of each arm."""
    finished = [row for row in rows if row["valid_loss"] is not None]
    ordered = sorted(finished, key=lambda row: row["valid_loss"], reverse=True)
    return {row["arm"]: row["learning_rate"] for row in ordered}


def _base(recipe: str, variants: tuple[lab.Variant, ...]) -> lab.ComparisonSettings:
    config = lab.recipe("translation", recipe)
    options: dict[str, dict[str, Any]] = {norm: {} for norm in ("ln", "bn", "gs")}
    for norm in ("rbn", "pn", "pnv"):
        own = config.norm_options.get(norm, {})
        options[norm] = {key: own[key] for key in own if key != "groups"}
    training = replace(config.training, average_statistics="average")
    return replace(
        config,
        norms=tuple(dict.fromkeys(variant.norm for variant in variants)),
        norm_options=options,
        training=training,
        variants=variants,
    )


def _variant(label: str, arm: str, rate: float | None) -> lab.Variant:
    norm, is_scaled = ARMS[arm]
    options = {"groups": GROUPS if is_scaled else None} if norm not in ("ln", "rbn") else {}
    settings = {} if rate is None else {"optimizer.learning_rate": repr(rate)}
    return lab.Variant(label, norm, options, settings)
