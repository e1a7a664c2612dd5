"""Does a fit help where LayerNorms become pointwise norms and the model is trained on?

    OMP_NUM_THREADS=1 python benchmarks/removal_pointwise.py --out runs/pointwise   # resumable

Originals: the recipe `addresses` of `powernorm compare lm` (2 layers) with 500 updates, LayerNorm,
three seeds. All norms of a copy become `dyt` (then `dyisru`), with γ and β of the LayerNorm kept or
by `powernorm.match_teacher` on 8 batches; it is trained for 3 % and 10 % of the original's
updates by the default of `powernorm remove`: half of the original's learning rate, the same for
both arms, and its distillation (of the logits alone at 3 %, half and half with the task's loss at
10 %). Loss in nats a token of the test split.

Rule, written before the runs: of each target and length the difference fitted minus kept, paired
by seed, with its 95 % interval of Student's t. The fit *helps* if the interval lies below 0 and
*harms* if above 0; else it is open. A loss that is not finite leaves its seed out, and the number
of seeds is printed. `dyt` is the question; `dyisru` is run if time allows, by the same rule. No
seed, length or rate is added later.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import nn

import powernorm
import powernorm_lab as lab
from powernorm.surgery.removal import logit_divergence
from powernorm_lab.removal.originals import Original, open_original
from powernorm_lab.removal.settings import RemovalSettings
from powernorm_lab.training.optimization import build_optimizer, rate_factor
from removal_methods import CHANGES, RESULTS, original

SEEDS = (0, 1, 2)
DISTILLATION = {0.03: 1.0, 0.1: 0.5}
"""Weight of the distillation by length, the rest is the task's loss."""
TARGETS = ("dyt", "dyisru")
NUM_BATCHES = 8
Row = dict[str, Any]


def replaced(start: Original, to: str, *, fitted: bool) -> tuple[nn.Module, list[Row]]:
    """Return a copy of the original with other norms, and the rows of the fit."""
    model = copy.deepcopy(start.model)
    powernorm.swap(model, to=to, where="*")
    batches = [start.batch(index) for index in range(NUM_BATCHES)]
    if not fitted:
        return model, []
    return model, powernorm.match_teacher(model, start.model, batches, start.run).to_rows()


def train(model: nn.Module, start: Original, share: float) -> None:
    """Train a copy of the original on, as `powernorm remove` does."""
    settings = RemovalSettings()
    config = settings.optimizer.resolved(start.learning_rate)
    assert start.num_steps is not None
    assert config.clip_norm is not None
    num_steps, weight = round(share * start.num_steps), DISTILLATION[share]
    optimizer = build_optimizer(model.train(), config)
    for step in range(num_steps):
        batch = start.batch(step)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate_factor(settings.schedule, step, num_steps)
        with torch.no_grad():
            theirs = start.logits(start.run(start.model, batch))
        outputs = start.run(model, batch)
        loss = weight * logit_divergence(start.logits(outputs), theirs, start.valid(batch))
        if weight < 1:
            total, count = start.nll(model, outputs, batch)
            loss = loss + (1 - weight) * total / count
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
    model.eval()


@torch.no_grad()
def test_loss(model: nn.Module, start: Original) -> float:
    """Return the loss of the test split, nats a token."""
    pairs = [start.nll(model, start.run(model, one), one) for one in start.evaluation("test")]
    return float(sum(total for total, _ in pairs)) / sum(count for _, count in pairs)


def trials(start: Original, to: str, seed: int) -> list[Row]:
    """Return the rows of one original: both arms, before the training and at each length."""
    rows = []
    for arm in ("kept", "fitted"):
        begun, fits = replaced(start, to, fitted=arm == "fitted")
        common = {"norm": to, "arm": arm, "seed": seed}
        loss = test_loss(begun, start)
        rows.append(common | {"share": 0.0, "test_loss": loss, "fits": fits})
        for share in DISTILLATION:
            model = copy.deepcopy(begun)
            torch.manual_seed(seed)
            train(model, start, share)
            rows.append(common | {"share": share, "test_loss": test_loss(model, start)})
            print(rows[-1], flush=True)
    return rows


def judged(rows: list[Row], to: str, share: float) -> tuple[str, str]:
    """Return outcome and numbers of a target at a length."""
    losses = {
        (row["arm"], row["seed"]): row["test_loss"]
        for row in rows
        if row["norm"] == to and row["share"] == share
    }
    gaps = torch.tensor(
        [losses["fitted", seed] - losses["kept", seed] for arm, seed in losses if arm == "kept"],
        dtype=torch.float64,
    )
    gaps = gaps[gaps.isfinite()]
    count = len(gaps)
    if count < 2:
        return "open", f"n = {count}"
    half = float(stats.t.ppf(0.975, count - 1) * gaps.std() / count**0.5)
    mean = float(gaps.mean())
    word = "helps" if mean + half < 0 else "harms" if mean - half > 0 else "open"
    return word, f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}, n = {count})"


def main() -> None:
    """Train what is missing, then print what the rule says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stored", action="store_true", help="judge what is stored; train nothing")
    given = parser.parse_args()
    stored = RESULTS / "removal-pointwise.json"
    rows: list[Row] = json.loads(stored.read_text("utf-8")) if stored.exists() else []
    if not given.stored:
        torch.set_num_threads(1)
        config = lab.override(
            lab.recipe("lm", "addresses"),
            [*CHANGES, "training.max_steps=500", f"seeds={list(SEEDS)}"],
        )
        lab.compare(config, given.out / "originals", resume=(given.out / "originals").exists())
        for to in TARGETS:
            for seed in SEEDS:
                if any(row["norm"] == to and row["seed"] == seed for row in rows):
                    continue
                start = open_original(original(given.out, seed), RemovalSettings().data, seed)
                if not any(row["norm"] == "ln" and row["seed"] == seed for row in rows):
                    loss = test_loss(start.model, start)
                    rows.append(
                        {
                            "norm": "ln",
                            "arm": "original",
                            "seed": seed,
                            "share": 0.0,
                            "test_loss": loss,
                        }
                    )
                rows += trials(start, to, seed)
                stored.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for to in TARGETS:
        for share in (0.0, *DISTILLATION):
            print(to, share, *judged(rows, to, share))


if __name__ == "__main__":
    main()
