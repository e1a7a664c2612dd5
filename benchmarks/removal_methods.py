"""Norms out of language models that are trained here: all methods, then the best at four lengths.

    python benchmarks/removal_methods.py --out runs/removal --jobs 2    # trains what is missing
    python benchmarks/removal_methods.py --out runs/removal --collect   # stores what is there
    python benchmarks/removal_methods.py --size 5M --out runs/larger --jobs 2

Five LayerNorm models learn the addresses (below the bigram model). Pilot: every arm on two of them
for 3 % of the updates, at four learning rates; the anchor at the best one. Then the best published
arm and the three best others on all five, for 1 to 30 %. What is reported is the loss over a
control, the same model trained as long with its norms, at the best of seven rates for that length.
Pilots look at the valid split, the result at the test split.

Later, as the result at 30 % asked for it: the task's loss beside the distillation, half each, and
the best published arm, at the best of three rates for each length. Three larger models get these
two arms and the control, of five rates, for 10 %; rates are chosen on one of them.
After Ctrl-C the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

import powernorm
import powernorm_lab as lab
from powernorm_lab.removal.originals import open_original
from powernorm_lab.removal.settings import RemovalSettings
from powernorm_lab.training.optimization import build_optimizer, rate_factor
from powernorm_lab.training.precision import autocast

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SEEDS = {"1M": (0, 1, 2, 3, 4), "5M": (0, 1, 2)}
PILOT_SEEDS = {"1M": (0, 1), "5M": (0,)}
PILOT_SHARE = 0.03
SHARES = (0.01, 0.03, 0.1, 0.3)
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
CONTROL_RATES = (1.25e-4, 2.5e-4, *RATES, 8e-3)
"""The control is best at lower ones: it has nothing new to learn."""
ANCHOR = 0.1
NUM_FINALISTS = 3
LATER_SHARES = (0.03, 0.1, 0.3)
LATER_RATES = (1e-3, 2e-3, 4e-3)
CHANGES = ("norms=[ln]", "training.monitor_every=0", "training.tid_batches=0")
SIZES = {
    "1M": ("model.num_layers=4",),
    "5M": (
        "model.num_layers=6",
        "model.num_features=256",
        "model.num_heads=8",
        "model.feedforward_features=1024",
        "optimizer.learning_rate=2e-3",
    ),
}
"""Changes of the recipe for the models, by their parameters."""
PRECISIONS = {"1M": "float32", "5M": "bfloat16"}
"""Type in which originals, removals and controls compute while they are trained."""
LARGER_SHARE = 0.1
LARGER_CONTROL_RATES = CONTROL_RATES[:5]
"""Rates up to that of their originals. The small control was best at an eighth of it, 5e-4."""
METHODS = ("match", "match-centered", "freeze", "freeze-in-turn", "taper", "prepbn")
PUBLISHED = ("freeze", "freeze-in-turn", "taper", "prepbn")
"""Methods that others have published; without distillation, with the anchor or not."""


@dataclass(frozen=True)
class Arm:
    """A way to take the norms out; the control, which keeps them, has no method."""

    method: str | None
    distillation: float = 0.0
    """Its weight in the loss; the task's own loss has the rest."""
    anchors: bool = False

    @property
    def name(self) -> str:
        """Name in the tables."""
        weights = {0.0: [], 0.5: ["half-distillation"], 1.0: ["distillation"]}
        parts = [self.method or "control", *weights[self.distillation]]
        return "+".join([*parts, *["anchor"] * self.anchors])

    @property
    def rates(self) -> tuple[float, ...]:
        """Rates that its pilot tries."""
        return RATES if self.method else CONTROL_RATES

    @property
    def is_published(self) -> bool:
        """Whether others have published it."""
        return self.method in PUBLISHED and not self.distillation


CONTROL = Arm(None)
ARMS = tuple(Arm(method, weight) for method in METHODS for weight in (0.0, 1.0))
LATER_ARMS = (Arm("freeze"), Arm("match", 0.5))


@dataclass(frozen=True)
class Trial:
    """One removal, or one control."""

    arm: Arm
    seed: int
    share: float
    rate: float

    def folder(self, out: Path) -> Path:
        """Return its folder."""
        return out / f"{self.arm.name}-{self.share:g}-{self.rate:g}-seed{self.seed}"

    def result(self, out: Path) -> dict[str, Any] | None:
        """Result; None before its end."""
        path = self.folder(out) / "result.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found if found.get("status") in ("finished", "nonfinite") else None

    def loss(self, out: Path, split: str) -> float:
        """Nats per token; infinite where it was no longer finite."""
        found = self.result(out)
        if found is None or found["status"] == "nonfinite":
            return float("inf")
        return float(found["metrics"][f"{split}_loss"])

    def settings(self, precision: str) -> RemovalSettings:
        """Settings of the removal; a control uses those that are not about norms."""
        changes = [
            f"seed={self.seed}",
            f"method.name={self.arm.method or 'match'}",
            f"distillation.name={'logits' if self.arm.distillation else 'none'}",
            f"distillation.share={self.arm.distillation or 'none'}",
            f"anchor.weight={ANCHOR if self.arm.anchors else 0}",
            f"optimizer.learning_rate={self.rate}",
            f"training.share={self.share}",
            f"training.precision={precision}",
            "training.num_threads=1",
            "training.validations=2",
        ]
        return lab.override(RemovalSettings(), changes)


def original(out: Path, seed: int) -> Path:
    """The run that norms are taken out of."""
    return out / "originals" / f"ln-pre-seed{seed}"


def run(trial: Trial, out: Path, precision: str) -> str:
    """Train what is not trained yet; returns what it was."""
    folder, source = trial.folder(out), original(out, trial.seed)
    settings = trial.settings(precision)
    if trial.arm.method is None:
        keep_norms(source, settings, folder)
        return folder.name
    resume = (folder / "removal.json").is_file()
    try:
        lab.remove(source, folder, settings=settings, resume=resume, quiet=True)
    except powernorm.InputError as error:
        if "no longer finite" not in str(error):
            raise
        result = json.dumps({"status": "nonfinite", "metrics": {}})
        (folder / "result.json").write_text(result, encoding="utf-8")
    return folder.name


def keep_norms(source: Path, settings: RemovalSettings, folder: Path) -> None:
    """Train a model on with its norms, by the task's loss alone, as a removal without one would."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    start = open_original(source, settings.data, settings.seed)
    assert start.num_steps is not None
    assert settings.training.share is not None
    config = settings.optimizer.resolved(start.learning_rate)
    model, num_steps = start.model.train(), max(1, round(settings.training.share * start.num_steps))
    optimizer = build_optimizer(model, config)
    for step in range(num_steps):
        batch = start.batch(step)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate_factor(settings.schedule, step, num_steps)
        optimizer.zero_grad()
        with autocast(torch.device("cpu"), settings.training.precision):
            total, num_targets = start.nll(model, start.run(model, batch), batch)
        (total / num_targets).backward()
        assert config.clip_norm is not None
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
    model.eval()
    metrics = {}
    with torch.no_grad():
        for split in ("valid", "test"):
            pairs = [start.nll(model, start.run(model, b), b) for b in start.evaluation(split)]
            metrics[f"{split}_loss"] = float(sum(t for t, _ in pairs)) / sum(n for _, n in pairs)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"status": "finished", "num_steps": num_steps, "metrics": metrics}
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


def pilot(arm: Arm, rate: float, share: float = PILOT_SHARE, size: str = "1M") -> list[Trial]:
    """An arm on the models of the pilot."""
    return [Trial(arm, seed, share, rate) for seed in PILOT_SEEDS[size]]


def pilot_loss(
    arm: Arm, rate: float, out: Path, share: float = PILOT_SHARE, size: str = "1M"
) -> float:
    """Mean valid loss of the pilot."""
    return mean(trial.loss(out, "valid") for trial in pilot(arm, rate, share, size))


def chosen(arms: Iterable[Arm], out: Path) -> dict[Arm, float]:
    """The best rate of each arm, those with the lowest loss in the pilot first."""
    best = [(*min((pilot_loss(arm, rate, out), rate) for rate in arm.rates), arm) for arm in arms]
    return {arm: rate for _, rate, arm in sorted(best, key=itemgetter(0))}


def anchored(out: Path) -> list[Trial]:
    """The arms of the pilot with an anchor, each at the best rate of itself without one."""
    rates = chosen(ARMS, out)
    return [trial for arm in ARMS for trial in pilot(replace(arm, anchors=True), rates[arm])]


def finalists(out: Path) -> dict[Arm, float]:
    """The best published arm and the three best others, each with its rate."""
    rates = chosen(ARMS, out)
    rates |= {replace(arm, anchors=True): rate for arm, rate in rates.items()}
    order = sorted(rates, key=lambda arm: pilot_loss(arm, rates[arm], out))
    published = next(arm for arm in order if arm.is_published)
    others = [arm for arm in order if not arm.is_published][:NUM_FINALISTS]
    return {arm: rates[arm] for arm in [published, *others]}


def controls() -> list[Trial]:
    """Return the control at all rates and lengths but the pilot's: its best rate depends on it."""
    lengths = [share for share in SHARES if share != PILOT_SHARE]
    return [t for share in lengths for rate in CONTROL_RATES for t in pilot(CONTROL, rate, share)]


def final(out: Path) -> list[Trial]:
    """Return the trials of the result, the shortest first."""
    arms = finalists(out)
    trials = []
    for share in SHARES:
        arms[CONTROL] = best_rate(CONTROL, CONTROL_RATES, share, out)
        trials += [
            Trial(arm, seed, share, rate) for arm, rate in arms.items() for seed in SEEDS["1M"]
        ]
    return trials


def best_rate(arm: Arm, rates: Iterable[float], share: float, out: Path, size: str = "1M") -> float:
    """Return the rate with the lowest loss on the models of the pilot, of those at a length."""
    return min(rates, key=lambda rate: pilot_loss(arm, rate, out, share, size))


def later_pilot(
    rates: Mapping[Arm, Iterable[float]], shares: Iterable[float], size: str
) -> list[Trial]:
    """Return arms whose rate is chosen again at each length, as the control's is."""
    kinds = itertools.product(shares, rates)
    return [t for share, arm in kinds for rate in rates[arm] for t in pilot(arm, rate, share, size)]


def later(
    rates: Mapping[Arm, Iterable[float]], shares: Iterable[float], out: Path, size: str
) -> list[Trial]:
    """Return the arms at their best rates."""
    return [
        Trial(arm, seed, share, best_rate(arm, rates[arm], share, out, size))
        for share, arm in itertools.product(shares, rates)
        for seed in SEEDS[size]
    ]


def stages(out: Path, size: str) -> Iterator[tuple[str, list[Trial]]]:
    """Yield name and trials of each stage; later ones depend on results of earlier ones."""
    rates: dict[Arm, Iterable[float]] = dict.fromkeys(LATER_ARMS, LATER_RATES)
    if size != "1M":
        rates[CONTROL] = LARGER_CONTROL_RATES
        yield "later, pilot", later_pilot(rates, [LARGER_SHARE], size)
        yield "later", later(rates, [LARGER_SHARE], out, size)
        return
    arms = (CONTROL, *ARMS)
    yield "pilot", [trial for arm in arms for rate in arm.rates for trial in pilot(arm, rate)]
    yield "pilot, anchored", anchored(out)
    yield "control", controls()
    yield "final", final(out)
    yield "later, pilot", later_pilot(rates, LATER_SHARES, size)
    yield "later", later(rates, LATER_SHARES, out, size)


def train(out: Path, size: str, jobs: int) -> None:
    """Train what is missing."""
    precision = PRECISIONS[size]
    changes = [
        *CHANGES,
        *SIZES[size],
        f"training.precision={precision}",
        f"seeds={list(SEEDS[size])}",
    ]
    config = lab.override(lab.recipe("lm", "addresses"), changes)
    resume = (out / "originals").exists()
    lab.compare(config, out / "originals", resume=resume, jobs=jobs)
    spawn = multiprocessing.get_context("spawn")
    for name, trials in stages(out, size):
        missing = [trial for trial in trials if trial.result(out) is None]
        print(f"{name}: {len(missing)} of {len(trials)} are missing", flush=True)
        with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
            running = [pool.submit(run, trial, out, precision) for trial in missing]
            try:
                for number, done in enumerate(as_completed(running), start=1):
                    print(f"  [{number}/{len(missing)}] {done.result()}", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def collect(out: Path, size: str) -> dict[str, Any]:
    """Losses of all that is finished."""
    results = json.loads((out / "originals" / "results.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {
        "parameters": results["runs"][0]["parameters"],
        "updates": results["settings"]["training"]["max_steps"],
        "bigram": results["baselines"],
        "originals": [one["metrics"]["test_loss"] for one in results["runs"]],
    }
    for stage, trials in stages(out, size):
        done = [trial for trial in trials if trial.result(out) is not None]
        split = "test" if stage in ("final", "later") else "valid"
        found[stage] = [
            {
                "arm": trial.arm.name,
                "seed": trial.seed,
                "share": trial.share,
                "rate": trial.rate,
                f"{split}_loss": round(trial.loss(out, split), 5),
            }
            for trial in done
        ]
        if len(done) < len(trials):
            break
    return found


def main() -> None:
    """Train, or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1M", help="parameters of the models")
    parser.add_argument("--out", type=Path, required=True, help="folder of one size's runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    given = parser.parse_args()
    try:
        if not given.collect:
            train(given.out, given.size, given.jobs)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command resumes") from None
    found = collect(given.out, given.size)
    measured = RESULTS / f"removal-methods-{given.size.lower()}.json"
    measured.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(measured)


if __name__ == "__main__":
    main()
