"""Does the verdict hold? Train many small settings with each norm, and diagnose them early.

    python studies/verdict/run.py --out runs/verdict

Trains every setting, measures what its checkpoints after a tenth of the training show, and writes
`verdict.json` with the scores, `tables.md` and `scatter.svg`. After Ctrl-C the same command goes
on.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import powernorm
from powernorm import lab
from powernorm.diagnosis import evaluation_gap
from scores import CLEAR_GAP, NORMS, choosing_half, scores_of
from settings import NUM_BATCHES, RUNS, settings_of
from tables import write_tables

LN_QUANTITIES = [
    f"ln_{part}_tid_{of}" for of in ("last", "avg") for part in ("mean", "var", "total")
]
QUANTITIES = [
    *LN_QUANTITIES,
    *("ln_pn_tid_last", "ln_pn_tid_avg"),
    *("bn_mean_tid_last", "bn_var_tid_last", "bn_mean_tid_avg", "bn_var_tid_avg"),
    *(f"{norm}_gap" for norm in NORMS),
    *(f"{norm}_batch_gap" for norm in NORMS),
]
"""What is known early. TID as fractions: what BatchNorm (PowerNorm behind GroupScaling) would see
in the early LayerNorm model, and what BatchNorm does see in the early BatchNorm model; `…_gap` is
the norm's loss minus LayerNorm's on the valid split at that time, `…_batch_gap` the same with the
norm evaluated by the statistics of each batch, since running ones lag behind early."""

Quantities = dict[str, float | None]


def main() -> None:
    """Parse, train, measure, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=RUNS, default="demo")
    parser.add_argument("--out", type=Path, default=Path("runs/verdict"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    try:
        settings = measured_settings(given.preset, given.out, given.set)
    except powernorm.InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on") from None
    results = {
        "format": 1,
        "preset": given.preset,
        "num_batches": NUM_BATCHES[given.preset],
        "clear_gap": CLEAR_GAP,
        "choosing": choosing_half(settings),
        "settings": settings,
        **scores_of(settings),
    }
    path = given.out / "verdict.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_tables(results, given.out)
    print(f"{path}, {given.out / 'tables.md'}, {given.out / 'scatter.svg'}")


def measured_settings(preset: str, out: Path, assignments: list[str]) -> list[dict[str, Any]]:
    """Train what is not trained yet, one setting after the other, and measure each."""
    console = Console(stderr=True)
    records = []
    settings = settings_of(preset)
    with lab.ComparisonProgress(console) as progress:
        for index, (name, base) in enumerate(settings.items(), start=1):
            console.print(f"[{index}/{len(settings)}] {name}", markup=False, highlight=False)
            runs: dict[tuple[str, int], Any] = {}
            for norms, seeds in RUNS[preset]:
                chosen = [f"norms={','.join(norms)}", f"seeds={','.join(map(str, seeds))}"]
                config = lab.override(base, [*assignments, *chosen])
                results = lab.compare(config, out / name, resume=True, on_event=progress)
                runs |= {(run["norm"], run["seed"]): run for run in results["runs"]}
            failed = [run["folder"] for run in runs.values() if run["status"] == "failed"]
            if failed:
                raise SystemExit(f"{name}: {', '.join(failed)} failed; see result.json there")
            records.append(record_of(name, config, runs, out / name, NUM_BATCHES[preset]))
    return records


def record_of(
    name: str,
    config: lab.ComparisonConfig,
    runs: Mapping[tuple[str, int], Mapping[str, Any]],
    folder: Path,
    num_batches: int,
) -> dict[str, Any]:
    """Return one setting: what was seen early in the first seed, and what came of it."""
    first = {norm: folder / run["folder"] for (norm, seed), run in runs.items() if seed == 0}
    early = early_of(first, num_batches)
    return {
        "name": name,
        "group": name.partition(f"-{config.model.placement}-")[0],
        "task": config.task,
        "placement": config.model.placement,
        "tokens_per_batch": early["tokens_per_batch"],
        "num_layers": config.model.num_layers,
        "num_features": config.model.num_features,
        "learning_rate": config.optimizer.learning_rate,
        "max_steps": config.training.max_steps,
        "early_step": early["step"],
        "early": {key: early["quantities"].get(key) for key in QUANTITIES},
        "advice": early["advice"],
        "gaps": {norm: gap_of(norm, runs) for norm in NORMS if (norm, 0) in runs},
    }


def gap_of(norm: str, runs: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the final losses minus LayerNorm's, of seeds in which neither loss was lost."""
    record: dict[str, Any] = {"valid": [], "test": [], "seeds": [], "num_lost": 0}
    record["num_base_lost"] = 0
    for seed in sorted(seed for name, seed in runs if name == norm):
        ours, base = runs[norm, seed]["metrics"], runs["ln", seed]["metrics"]
        if ours["test_loss"] is not None and base["test_loss"] is not None:
            record["seeds"].append(seed)
            for split in ("valid", "test"):
                record[split].append(ours[f"{split}_loss"] - base[f"{split}_loss"])
        elif base["test_loss"] is not None:
            record["num_lost"] += 1
        elif ours["test_loss"] is not None:
            record["num_base_lost"] += 1
    return record


def early_of(runs: Mapping[str, Path], num_batches: int) -> dict[str, Any]:
    """Measure the early checkpoints of one seed; a run that was lost by then has no quantities."""
    data = lab.run_data(json.loads((runs["ln"] / "config.json").read_text(encoding="utf-8")))
    found: dict[str, Any] = {"step": None, "advice": None, "quantities": {}}
    found["tokens_per_batch"] = data.segments.tokens_per_batch
    batches = [data.segments.batch(index).inputs() for index in range(num_batches)]
    valid = list(data.evaluation("valid"))
    losses: dict[str, tuple[float, float]] = {}
    for norm, run in runs.items():
        checkpoint = run / "checkpoints" / "early.ckpt"
        if not checkpoint.exists():
            continue
        trained = lab.load_trained(checkpoint)
        found["step"] = trained.step
        model = trained.model
        if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
            continue
        losses[norm] = losses_of(model, valid)
        if not math.isfinite(losses[norm][0]):
            continue
        if norm == "ln":
            report = powernorm.diagnose(model, batches, batch_sizes=(), spectra=False)
            found["advice"] = advice_of(report.verdict)
            found["quantities"] |= ln_quantities(report.rows)
        elif norm == "bn":
            tid: Any = powernorm.training_inference_discrepancy(model, batches).summary()
            found["quantities"] |= {
                f"bn_{part}_tid_{of}": tid[f"{part}_{of}"]
                for of in ("last", "avg")
                for part in ("mean", "var")
            }
    for norm, (running, batch) in losses.items() if "ln" in losses else ():
        found["quantities"][f"{norm}_gap"] = running - losses["ln"][0]
        found["quantities"][f"{norm}_batch_gap"] = batch - losses["ln"][0]
    # JSON has no infinity and no NaN.
    found["quantities"] = {
        key: value if value is not None and math.isfinite(value) else None
        for key, value in found["quantities"].items()
    }
    return found


@torch.no_grad()
def losses_of(model: nn.Module, batches: list[Any]) -> tuple[float, float]:
    """Return the mean loss by running statistics and by those of each batch."""
    gap = evaluation_gap(model, batches, mean_nll)
    if gap is not None:
        return gap.running_loss, gap.batch_loss
    losses, numbers = zip(*(mean_nll(model, batch) for batch in batches), strict=True)
    loss = sum(map(math.prod, zip(losses, numbers, strict=True))) / sum(numbers)
    return loss, loss


def mean_nll(model: nn.Module, batch: Any) -> tuple[float, int]:
    """Return the mean negative log-likelihood of a batch and the number of its targets."""
    logits = model(**batch.inputs()).flatten(0, -2)
    nll = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
    return float(nll) / max(batch.num_targets, 1), batch.num_targets


def ln_quantities(rows: Any) -> Quantities:
    """Return what batch statistics would see in a LayerNorm model: last norm, and average."""
    tids = {
        "mean": [row.mean_tid for row in rows],
        "var": [row.var_tid for row in rows],
        "total": [row.total_tid for row in rows],
        "pn": [row.pn_tid for row in rows],
    }
    found: Quantities = {}
    for name, values in tids.items():
        known = [value for value in values if value is not None]
        found[f"ln_{name}_tid_last"] = values[-1]
        found[f"ln_{name}_tid_avg"] = sum(known) / len(known) if known else None
    return found


def advice_of(verdict: Mapping[str, Any]) -> str:
    """Return the norm that a diagnosis advises, `ln` for keep, or `lowest K to NORM`."""
    if verdict["action"] == "swap lowest":
        return f"lowest {verdict['lowest']} to {verdict['norm']}"
    return verdict["norm"] if verdict["action"] == "swap" else "ln"


if __name__ == "__main__":
    main()
