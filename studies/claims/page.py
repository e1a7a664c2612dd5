"""Generator of docs/claims.md from claims.json."""

from typing import Any

from arms import BASE, GROUPS, SEEDS, TRIALS, Sweep
from rules import CLAIMS, MARGIN, Results

_MODEL: Any = BASE["model"]
_DATA: Any = BASE["data"]
_TRAINING: Any = BASE["training"]

HEAD = f"""# What the field claims

This study tests six claims of 2020 to 2026 about normalization on one small language model. The
rule of each was written before anything was trained ([rules.py](../studies/claims/rules.py)). Every
norm of a tuned claim had the same budget: {TRIALS} trials by `lab.tune` over the learning rate, the
warm-up and the norm's own settings, judged on the valid split, then {len(SEEDS)} seeds with the
best settings.

**Scope.** The model has {_MODEL["num_layers"]} layers of {_MODEL["num_features"]} features and
trains for {_TRAINING["max_steps"]} updates of
{_DATA["batch_size"]} × {_DATA["sequence_length"]} tokens of the State of the Union addresses; the
claims are about models a thousand times as large. After so short a training no norm beats the
bigram model, which has counted the whole text (test perplexity of a word 1,997; `ln` with AdamW
4,440). *Shown* and *contradicted* refer to this model; *open* means that these runs do not decide
it.

```sh
python studies/claims/run.py --out runs/claims        # some 75 minutes of a core; resumable
python studies/claims/run.py --write docs/claims.md   # this page, from studies/claims/claims.json
```
"""


REMARKS = """
## What to read into it

These remarks were written after the runs.

- **Derf** is behind with both optimizers, and behind DyT: in few updates the learned slope has
  little time to change. The claim is about long trainings.
- **PRepBN** is not only level but ahead: the interval excludes 0. Batches of 512 tokens of one text
  suit batch statistics; the third claim has smaller batches.
- **UnifiedNorm** is behind in its training loss too (5.30 for LayerNorm's 4.58 over the last
  updates of seed 0), so its forward and its approximate gradient are the cause here, not inference.
  Its authors train with batches of thousands of tokens.
- **Peri-LN** and pre-norm have the same spread up to 0.016, the best rate of both. The ratio comes
  from higher rates, where pre-norm gets worse and Peri-LN hardly does. The valid split would not
  select these rates.
- **BatchNorm** in place of LayerNorm trained at every rate, so there was no divergence to cure;
  inside the feed-forward it helps up to 0.064 and breaks at 0.128.
"""

LATER = """
## Four later claims

These use another small model (`studies/next-norms`, [rules](../studies/next-norms/rules.py) written
before the runs): characters, 12 layers of 48 features, 200 updates, 5 seeds each, rates tuned alike.

| claim | here | found |
|---|---|---|
| LayerNorm scaling helps in 12 layers (Sun et al. 2025) | **contradicted** | `lns` - `pre` +0.0101 (+0.0062 to +0.0139) |
| HybridNorm is as good as pre and post (Zhuo et al. 2025) | **contradicted** | `hybrid` - `pre` +0.0839 (+0.0264 to +0.1414) |
| decay of γ helps input norms, hurts output norms (Wang et al. 2026) | **contradicted** | input +0.0498 (+0.0406 to +0.0590); output -0.0115 (-0.0152 to -0.0078) |
| saturation after a tenth of the training predicts that DyT loses (2604.23434) | **open** | Spearman's ρ -0.18 (-0.54 to +0.01), 20 runs |

Six of the eight tuned models took the highest of the three rates, 4e-3 (`hybrid` and `post` 2e-3),
so some may want a higher one. The decay of γ was 2, twenty times that of the matrices, to have an
effect within 200 updates: alone it would halve a γ at 4e-3. The study's README discusses each claim.
"""  # noqa: E501


def page(measured: dict[str, Any]) -> str:
    """Return the page.

    Args:
        measured: contents of claims.json.
    """
    results = losses_of(measured)
    lines = [HEAD, "| claim | | here | found |", "|---|---|---|---|"]
    for claim in CLAIMS:
        missing = [name for name in claim.groups if name not in results]
        if missing:
            lines.append(f"| {claim.claim} | {claim.source} | not trained yet | |")
        else:
            verdict = claim.judge(results)
            lines.append(
                f"| {claim.claim} | {claim.source} | **{verdict.word}** | {verdict.found} |"
            )
    lines += [
        "",
        "Differences of test loss in nats per token with their 95 % intervals (Student's t, paired",
        "by seed); above 0 is worse.",
        *(REMARKS.splitlines() if all(group.name in results for group in GROUPS) else []),
        *LATER.splitlines(),
        "",
        "## The rules",
        "",
        f"The margin is {MARGIN} nats, three percent of perplexity. A run is *lost* when its loss",
        "was not finite or it ended above the unigram distribution.",
        "",
        *(f"- **{claim.claim}**: {claim.rule}." for claim in CLAIMS),
        "",
        "## What was trained",
        "",
    ]
    for group in GROUPS:
        if group.name in results:
            lines += _group(group.name, isinstance(group, Sweep), measured)
    return "\n".join(lines).rstrip() + "\n"


def losses_of(measured: dict[str, Any]) -> Results:
    """Return test losses by group, arm and seed, with None for lost runs."""
    return {
        name: {arm: found["losses"] for arm, found in group.items()}
        for name, group in measured["groups"].items()
    }


def _group(name: str, is_sweep: bool, measured: dict[str, Any]) -> list[str]:
    group = measured["groups"][name]
    lines = [f"### {name}", ""]
    lines += (
        ["| placement | rate | test loss | lost |", "|---|--:|--:|--:|"]
        if is_sweep
        else ["| norm | test loss | lost | best settings of its trials |", "|---|--:|--:|---|"]
    )
    for arm, found in group.items():
        kept = [value for value in found["losses"] if value is not None]
        lost = len(found["losses"]) - len(kept)
        if is_sweep:
            placement, _, rate = arm.partition("@")
            lines.append(f"| `{placement}` | {rate} | {_spread(kept)} | {lost} |")
        else:
            settings = ", ".join(f"{key} {value:.3g}" for key, value in found["settings"].items())
            lines.append(f"| `{arm}` | {_spread(kept)} | {lost} | {settings} |")
    return [*lines, ""]


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.4f}"
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.4f} ± {deviation:.4f}"
