"""The field's next norms, tried with equal tuning on one small character model.

python studies/next-norms/run.py --out runs/next-norms    # trains what is missing; resumable
python studies/next-norms/run.py --write                  # results.md from results.json
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import rules
from arms import ARMS, RATES, SEEDS, STEPS, TRIAL_SEED, run_arm

HERE = Path(__file__).parent
RESULTS, TRIALS, PAGE = (HERE / name for name in ("results.json", "trials.json", "results.md"))
CLAIMS = (
    ("LayerNorm scaling helps in 12 layers (Sun et al. 2025)", ("pre", "lns"), rules.lns),
    (
        "Decay of γ helps input norms and hurts output norms (Wang et al. 2026)",
        ("peri", "peri-input", "peri-output"),
        rules.decay,
    ),
    (
        "HybridNorm is as good as pre and post (Zhuo et al. 2025)",
        ("pre", "hybrid", "post"),
        rules.hybrid,
    ),
    (
        "Saturation after a tenth of the training predicts that DyT loses (2604.23434)",
        ("pre", *(arm for arm in ARMS if arm.startswith("dyt"))),
        rules.saturation,
    ),
)
"""Claim, its arms, its rule."""


def train(out: Path) -> None:
    """Tune each arm, then train its seeds; write the rows after each arm."""
    trials: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for name, arm in ARMS.items():
        if arm.tuned_as is None:
            for rate in RATES:
                trials += run_arm(out / "trials", name, rate, (TRIAL_SEED,))
            _write(TRIALS, trials)
        rows += run_arm(out, name, best_rate(trials, arm.tuned_as or name), SEEDS)
        _write(RESULTS, rows)


def best_rate(trials: list[dict[str, Any]], arm: str) -> float:
    """Return the rate with the lowest validation loss of an arm's trials."""
    own = [row for row in trials if row["arm"] == arm and math.isfinite(row["valid_loss"])]
    return float(min(own, key=lambda row: row["valid_loss"])["learning_rate"])


def page(rows: list[dict[str, Any]]) -> str:
    """Return results.md."""
    kept = [row for row in rows if math.isfinite(row["test_loss"])]
    losses = {
        arm: {row["seed"]: row["test_loss"] for row in kept if row["arm"] == arm} for arm in ARMS
    }
    shares = {
        arm: {row["seed"]: row["saturated"] for row in kept if row["arm"] == arm}
        for arm in ARMS
        if arm.startswith("dyt")
    }
    lines = [
        "# Results",
        "",
        "Differences of test loss, nats a character, 95 % intervals; 12 layers of 48 features,",
        f"{STEPS} updates of 8 × 64 characters. A claim is judged when all of its runs are there.",
        "",
        "| claim | here | found |",
        "|---|---|---|",
    ]
    for claim, arms, judge in CLAIMS:
        missing = sum(len(SEEDS) - sum(row["arm"] == arm for row in rows) for arm in arms)
        if missing:
            lines.append(f"| {claim} | no conclusion | {missing} runs are missing |")
            continue
        more = (shares,) if judge is rules.saturation else ()
        word, found = judge(losses, *more)  # type: ignore[operator]
        lines.append(f"| {claim} | **{word}** | {found} |")
    lines += [
        "",
        "| arm | rate | seeds | test loss | share with \\|α x\\| > 1 |",
        "|---|--:|--:|--:|--:|",
    ]
    for arm, by_seed in losses.items():
        if by_seed:
            rate = next(row["learning_rate"] for row in rows if row["arm"] == arm)
            share = f"{_mean(shares[arm]):.2f}" if arm in shares else ""
            lines.append(
                f"| `{arm}` | {rate:g} | {len(by_seed)} | {_mean(by_seed):.4f} | {share} |"
            )
    return "\n".join(lines) + "\n"


def _mean(by_seed: dict[int, float]) -> float:
    return sum(by_seed.values()) / len(by_seed)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def main() -> None:
    """Parse, then train or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/next-norms"))
    parser.add_argument("--write", action="store_true", help="write the page, train nothing")
    given = parser.parse_args()
    if not given.write:
        train(given.out)
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
