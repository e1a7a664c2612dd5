"""Does the verdict hold? Train many small settings with each norm, and diagnose them early.

    python studies/verdict/run.py --out runs/verdict
    python studies/verdict/run.py --scores-of studies/verdict/verdict.json --out runs/scores

The first command trains every setting, measures its checkpoints after a tenth of the training, and
writes `verdict.json` with the scores, `tables/` and `scatter.svg`. After Ctrl-C the same command
continues. The second command scores settings that were measured before.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import powernorm
import powernorm_lab as lab
from powernorm.diagnosis import DiagnosisRow, evaluation_gap
from scores import CLEAR_GAP, NORMS, TIDS, scores_of
from settings import RUNS, Setting, settings
from tables import write_tables
from training import Examples, data_of, early_model, train

NUM_BATCHES = 50
"""Training batches in each pass of an early diagnosis."""
QUANTITIES = [*TIDS, *(f"{norm}{of}_gap" for of in ("", "_batch") for norm in NORMS)]
"""Early quantities. `…_gap` is the norm's loss minus LayerNorm's on the valid split at that time.
`…_batch_gap` evaluates the norm with the statistics of each batch, because early running statistics
lag behind."""

STORED = ["group", "task", "placement", "num_layers", "num_features", "learning_rate", "max_steps"]
"""Stored attributes of a setting."""

Runs = dict[tuple[str, int], Any]
"""Results by norm and seed."""


def main() -> None:
    """Parse, train, measure, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/verdict"))
    parser.add_argument("--only", action="append", choices=settings(), metavar="SETTING")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--scores-of", type=Path, metavar="FILE", help="a verdict.json")
    given = parser.parse_args()
    if given.scores_of:
        results = json.loads(given.scores_of.read_text(encoding="utf-8"))
    else:
        results = {"format": 1, "preset": "demo", "num_batches": NUM_BATCHES}
        names = given.only or list(settings())
        try:
            results["settings"] = list(measured_settings(names, given.out, given.set))
        except powernorm.InputError as error:
            parser.error(str(error))
        except KeyboardInterrupt:
            raise SystemExit("interrupted; the same command continues") from None
    results |= {"clear_gap": CLEAR_GAP, **scores_of(results["settings"])}
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2) + "\n"
    (given.out / "verdict.json").write_text(text, encoding="utf-8")
    write_tables(results, given.out)
    print(f"{given.out}: verdict.json, tables, scatter.svg")


def measured_settings(
    names: Sequence[str], out: Path, assignments: list[str]
) -> Iterator[dict[str, Any]]:
    """Train missing runs, one setting after the other, and yield its measurements."""
    console = Console(stderr=True)
    with lab.ComparisonProgress(console) as progress:
        for index, name in enumerate(names, start=1):
            console.print(f"[{index}/{len(names)}] {name}", markup=False, highlight=False)
            runs: Runs = {}
            setting = changed(settings()[name], assignments)
            for norms, seeds in RUNS:
                results = train(setting, out / name, norms, seeds, on_event=progress)
                runs |= {(run.norm, run.seed): run for run in results.runs}
            failed = [run.folder for run in runs.values() if run.status == "failed"]
            if failed:
                raise SystemExit(f"{name}: {', '.join(failed)} failed; see result.json there")
            folders = {norm: out / name / runs[norm, 0].folder for norm, seed in runs if not seed}
            yield {
                "name": name,
                **{key: getattr(setting, key) for key in STORED},
                **early_of(setting, folders),
                "gaps": {norm: gap_of(norm, runs) for norm in NORMS if norm in folders},
            }


def changed(setting: Setting, assignments: list[str]) -> Setting:
    """Return a setting with changed numbers, such as `max_steps=10`."""
    known = [field.name for field in fields(setting)]
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        if key not in known:
            raise powernorm.InputError(f"--set {assignment}: choose one of {', '.join(known)}")
        setting = replace(setting, **{key: type(getattr(setting, key))(value)})
    return setting


def gap_of(norm: str, runs: Runs) -> dict[str, Any]:
    """Return the final losses minus LayerNorm's, for seeds in which neither run was lost."""
    keys = ("valid", "test", "seeds")
    record: dict[str, Any] = {key: [] for key in keys} | {"num_lost": 0, "num_base_lost": 0}
    for seed in sorted(seed for name, seed in runs if name == norm):
        ours, base = runs[norm, seed].metrics, runs["ln", seed].metrics
        lost, base_lost = (found.get("test_loss") is None for found in (ours, base))
        if not lost and not base_lost:
            record["seeds"].append(seed)
            for split in ("valid", "test"):
                record[split].append(ours[f"{split}_loss"] - base[f"{split}_loss"])
        elif not base_lost:
            record["num_lost"] += 1
        elif not lost:
            record["num_base_lost"] += 1
    return record


def early_of(setting: Setting, runs: Mapping[str, Path]) -> dict[str, Any]:
    """Measure the early checkpoints of one seed; a run lost before them has no quantities."""
    data = data_of(setting, runs["ln"], NUM_BATCHES)
    batches = [batch.inputs for batch in data.training]
    step, advice = None, None
    found: dict[str, float | None] = {}
    losses: dict[str, tuple[float, float]] = {}
    for norm, run in runs.items():
        model = early_model(setting, run)
        if model is None:
            continue
        step = setting.early_step
        if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
            continue
        losses[norm] = losses_of(model, data.valid)
        # A non-finite loss comes from non-finite activations, which cannot be diagnosed.
        if norm == "ln" and math.isfinite(losses[norm][0]):
            report = powernorm.diagnose(model, batches, batch_sizes=(), spectra=False)
            found |= ln_quantities(report.rows)
            advice = advice_of(report.verdict)
        elif norm == "bn" and math.isfinite(losses[norm][0]):
            tid: Any = powernorm.training_inference_discrepancy(model, batches).summary()
            found |= {f"bn_{key.replace('_', '_tid_')}": value for key, value in tid.items()}
    for norm, (running, batch) in losses.items() if "ln" in losses else ():
        found[f"{norm}_gap"] = running - losses["ln"][0]
        found[f"{norm}_batch_gap"] = batch - losses["ln"][0]
    return {
        "tokens_per_batch": data.tokens_per_batch,
        "early_step": step,
        "early": {key: finite(found.get(key)) for key in QUANTITIES},
        "advice": advice,
    }


@torch.no_grad()
def losses_of(model: nn.Module, batches: list[Examples]) -> tuple[float, float]:
    """Return the mean loss with running statistics and with those of each batch."""
    gap = evaluation_gap(model, batches, mean_nll)
    if gap is not None:
        return gap.running_loss, gap.batch_loss
    losses = [mean_nll(model, batch) for batch in batches]
    loss = sum(nll * number for nll, number in losses) / sum(number for _, number in losses)
    return loss, loss


def mean_nll(model: nn.Module, batch: Examples) -> tuple[float, int]:
    """Return the mean negative log-likelihood of a batch and the number of its targets."""
    logits, number = model(**batch.inputs).flatten(0, -2), int((batch.targets != -100).sum())
    nll = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
    return float(nll) / max(number, 1), number


def ln_quantities(rows: Sequence[DiagnosisRow]) -> dict[str, float]:
    """Return quantities of batch statistics in a LayerNorm model: last norm, and average."""
    found = {}
    for part in ("mean", "var", "total", "pn"):
        values = [getattr(row, f"{part}_tid") for row in rows]
        found[f"ln_{part}_tid_last"] = values[-1]
        found[f"ln_{part}_tid_avg"] = sum(values) / len(values)
    return found


def advice_of(verdict: Mapping[str, Any]) -> str:
    """Return the norm that a diagnosis advises, `ln` for keep, or `lowest K to NORM`."""
    if verdict["action"] == "swap lowest":
        return f"lowest {verdict['lowest']} to {verdict['norm']}"
    return str(verdict["norm"]) if verdict["action"] == "swap" else "ln"


def finite(value: float | None) -> float | None:
    """Return a finite number, or None for JSON."""
    return value if value is not None and math.isfinite(value) else None


if __name__ == "__main__":
    main()
