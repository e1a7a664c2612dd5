"""Why does a parser lose so much when LayerNorm's mean is detached?

    OMP_NUM_THREADS=1 python benchmarks/detached_mean.py        # trains what is missing, judges
    python benchmarks/detached_mean.py --stored --docs          # figure and table of the docs

The norm y = (x - μ)/σ ignores a shift of x, but with a detached μ its gradient does not: with
g = ∂L/∂y, ∂L/∂x keeps the component of g/σ along (1, …, 1) that LayerNorm's gradient lacks. Where
x = W h + b, two things follow. The rows of W and b drift together, which changes no output; and h
receives Wᵀ times that component, which changes the output of the layers below for no reason. With
Adam there is a third: the component enters the second moments, so that the useful part of an update
is divided by more.

The model is the parser of the recipe `petrogold` (two norms, Adam at 1e-3, Kaiming), for one pass
of its ten (341 updates). Each arm of `ARMS` removes one of the three, or changes the optimizer. SGD
has momentum 0.9 and, for each of its two arms, the rate of the lowest validation loss of five after
170 updates (seed 100).

Rules, written before the runs. Measure: UAS of the test split after the last update, paired by
seed, seeds 0 to 4, Student's t, 95 %. The *loss* is detach-mean minus ln-simple. An intervention
*explains* it if the gap of its arm to ln-simple lies within 0.5 UAS on both sides, *explains a
part* if its arm is ahead of detach-mean and behind ln-simple with intervals that exclude 0, and
*explains nothing* if its gap to detach-mean lies within 0.5 UAS on both sides; else it is open.
If time ends, the seeds that every arm has count. No seed, arm or rate is added later.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import powernorm_lab as lab
from powernorm_lab.tasks.parse.model import HiddenLayer
from powernorm_lab.tasks.parse.settings import ParsingSettings
from powernorm_lab.tasks.parse.task import ParsingTask

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results" / "detached-mean.json"
DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "results" / "parse" / "detached-mean.csv"
SEEDS, TRIAL_SEED = range(5), 100
STEPS, TRIAL_STEPS, MEASURE_EVERY = 341, 170, 31
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
MARGIN = 0.5
"""UAS."""
DECAY = 0.1


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Attributes:
        norm: short name of the norm.
        detached: which statistics are detached.
        change: intervention of `intervene`.
        sgd: whether SGD replaces Adam.
        decay: AdamW's weight decay of the matrices.
    """

    norm: str = "detach"
    detached: tuple[bool, bool] = (True, False)
    change: str = ""
    sgd: bool = False
    decay: float = 0.0


ARMS = {
    "ln-simple": Arm("ln-simple"),
    "detach-std": Arm(detached=(False, True)),
    "detach-both": Arm(detached=(True, True)),
    "detach-mean": Arm(),
    "weights centered": Arm(change="weights"),
    "gradients centered": Arm(change="gradients"),
    "gradients below centered": Arm(change="below"),
    "no bias": Arm(change="bias"),
    "weight decay": Arm(decay=DECAY),
    "ln-simple, weight decay": Arm("ln-simple", decay=DECAY),
    "ln-simple, SGD": Arm("ln-simple", sgd=True),
    "detach-mean, SGD": Arm(sgd=True),
}
INTERVENTIONS = {
    "weights centered": ("ln-simple", "detach-mean"),
    "gradients centered": ("ln-simple", "detach-mean"),
    "gradients below centered": ("ln-simple", "detach-mean"),
    "no bias": ("ln-simple", "detach-mean"),
    "weight decay": ("ln-simple, weight decay", "detach-mean"),
    "detach-mean, SGD": ("ln-simple, SGD", "detach-mean"),
}
"""The arms that LayerNorm-simple and the detached mean are compared with. The last two change
both norms: their loss is the gap to LayerNorm-simple of the same optimizer."""


def without_mean(x: Tensor, dim: int) -> Tensor:
    """Return x minus its mean over a dimension."""
    return x - x.mean(dim, keepdim=True)


class LowerCentered(nn.Module):
    """A linear map whose weights receive the whole gradient, its input the centered one.

    Args:
        linear: module with a submodule or itself an nn.Linear; other parameters belong to its
            input.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the linear map."""
        weights = {
            name: value
            for name, value in self.linear.named_parameters()
            if not name.startswith("tables")
        }
        others = {
            name: value.detach()
            for name, value in self.linear.named_parameters()
            if name.startswith("tables")
        }
        fixed = {name: value.detach() for name, value in weights.items()}
        own: Tensor = torch.func.functional_call(
            self.linear, weights | others, (x.detach() if x.is_floating_point() else x,)
        )
        below: Tensor = torch.func.functional_call(self.linear, fixed, (x,))
        if below.requires_grad:
            below.register_hook(lambda gradient: without_mean(gradient, -1))
        return own + below - below.detach()


def linears(model: nn.Module) -> list[nn.Linear]:
    """Return the linear maps in front of the norms."""
    layers = [layer for layer in model.modules() if isinstance(layer, HiddenLayer)]
    return [next(m for m in layer.linear.modules() if isinstance(m, nn.Linear)) for layer in layers]


def intervene(model: nn.Module, change: str) -> Callable[[], None]:
    """Change a new model, and return what is to be called after each update."""
    parameters = [parameter for linear in linears(model) for parameter in linear.parameters()]
    if change == "gradients":
        for parameter in parameters:
            parameter.register_hook(lambda gradient: without_mean(gradient, 0))
    elif change == "bias":
        for bias in (parameter for parameter in parameters if parameter.ndim == 1):
            nn.init.zeros_(bias).requires_grad_(False)
    elif change == "below":
        for layer in [module for module in model.modules() if isinstance(module, HiddenLayer)]:
            layer.linear = LowerCentered(layer.linear)

    @torch.no_grad()
    def after_update() -> None:
        for parameter in parameters if change == "weights" else ():
            parameter.copy_(without_mean(parameter, 0))

    return after_update


@torch.no_grad()
def measured(model: nn.Module, states: Tensor) -> Row:
    """Return |μ| and σ of each norm's input, means over tokens, and the share of W along 1."""
    found: Row = {"mean": [], "std": [], "common": []}
    handles = [
        norm.register_forward_pre_hook(
            lambda _, given: (
                found["mean"].append(given[0].mean(-1).abs().mean().item()),
                found["std"].append(given[0].std(-1, correction=0).mean().item()),
                None,
            )[-1]
        )
        for norm in (layer.norm for layer in model.modules() if isinstance(layer, HiddenLayer))
    ]
    model(states)
    for handle in handles:
        handle.remove()
    for linear in linears(model):
        common = linear.weight.mean(0).norm() * len(linear.weight) ** 0.5
        found["common"].append((common / linear.weight.norm()).item())
    return found


def settings(arm: Arm, steps: int) -> ParsingSettings:
    """Return the settings of a run."""
    detached = dict(zip(("detach_mean", "detach_std"), arm.detached, strict=True))
    base = lab.override(lab.recipe("parse", "petrogold"), [f"training.max_steps={steps}"])
    options = {arm.norm: detached} if arm.norm == "detach" else {}
    return cast(
        ParsingSettings, replace(base, norms=(arm.norm,), variants=(), norm_options=options)
    )


def train(task: ParsingTask, encoded: Any, arm: Arm, seed: int, steps: int, rate: float) -> Row:
    """Train one run; return its scores, and its measures over the training."""
    config = settings(arm, steps)
    model = task.build(config, arm.norm, task.sizes(encoded), seed)
    after_update = intervene(model, arm.change)
    data = task.data(encoded, config, seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": arm.decay},
        {"params": others},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=rate, momentum=0.9)
        if arm.sgd
        else torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
    )
    probe = next(iter(data.evaluation("valid", max_tokens=1024))).inputs()["states"]
    torch.manual_seed(seed)
    losses, course = [], []
    for step, (batch,) in enumerate(data.updates(torch.device("cpu"))):
        if step % MEASURE_EVERY == 0:
            course.append({"step": step} | measured(model.eval(), probe))
        model.train()
        loss = F.cross_entropy(model(**batch.inputs()), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_update()
        losses.append(loss.item())
    course.append({"step": steps} | measured(model.eval(), probe))
    with torch.no_grad():
        valid = [
            (F.cross_entropy(model(**b.inputs()), b.targets, reduction="sum"), len(b.targets))
            for b in data.evaluation("valid")
        ]
    scores = data.scores("test", model, torch.device("cpu"))
    return {
        "test_uas": scores["uas"],
        "valid_loss": float(sum(total for total, _ in valid)) / sum(count for _, count in valid),
        "train_loss": sum(losses[-steps // 10 :]) / len(losses[-steps // 10 :]),
        "course": course,
    }


def gap(rows: list[Row], ahead: str, behind: str) -> tuple[float, float, float, int]:
    """Return the mean difference of UAS, its interval, and the number of seeds."""
    scores = {(row["arm"], row["seed"]): row["test_uas"] for row in rows if "trial" not in row}
    whole = [seed for seed in SEEDS if all((arm, seed) in scores for arm in ARMS)]
    gaps = [scores[ahead, seed] - scores[behind, seed] for seed in whole]
    if len(gaps) < 2:
        raise SystemExit(f"{len(gaps)} seeds are complete; two are needed")
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    return sum(gaps) / len(gaps), float(low), float(high), len(gaps)


def verdict(rows: list[Row], arm: str) -> str:
    """Return what the rules say of an intervention."""
    simple, detached = INTERVENTIONS[arm]
    _, low, high, _ = gap(rows, arm, simple)
    _, low_gain, high_gain, _ = gap(rows, arm, detached)
    if low > -MARGIN and high < MARGIN:
        return "explains it"
    if high < 0 and low_gain > 0:
        return "explains a part"
    if low_gain > -MARGIN and high_gain < MARGIN:
        return "explains nothing"
    return "open"


def table(rows: list[Row]) -> str:
    """Return the results of the arms as CSV: UAS, the gap to LayerNorm-simple, what it explains."""
    lines = [["", "test UAS", "minus ln-simple of the same optimizer (95 %)", "explains the loss"]]
    for name in ARMS:
        scores = [row["test_uas"] for row in rows if row["arm"] == name and "trial" not in row]
        simple = INTERVENTIONS.get(name, ("ln-simple", ""))[0]
        mean, low, high, _ = gap(rows, name, simple)
        lines.append(
            [
                name,
                f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f}",
                ""
                if ARMS[name].norm == "ln-simple"
                else f"{mean:+.2f} ({low:+.2f} to {high:+.2f})",
                verdict(rows, name) if name in INTERVENTIONS else "",
            ]
        )
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(lines)
    return written.getvalue()


def draw(rows: list[Row], path: Path) -> None:
    """Draw |μ|, σ and the share of W along 1 over the training, first and second norm."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "powernorm", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, layout="constrained")
    labels = ("mean |μ| of the norm's input", "mean σ", "share of W along (1, …, 1)")
    for layer, line in enumerate(axes):
        for axis, key, label in zip(line, ("mean", "std", "common"), labels, strict=True):
            for name in ("ln-simple", "detach-std", "detach-both", "detach-mean"):
                own = [row["course"] for row in rows if row["arm"] == name and "trial" not in row]
                values = torch.tensor([[point[key][layer] for point in run] for run in own])
                steps = [point["step"] for point in own[0]]
                (drawn,) = axis.plot(steps, values.mean(0), label=name)
                axis.fill_between(
                    steps,
                    values.min(0).values,
                    values.max(0).values,
                    color=drawn.get_color(),
                    alpha=0.2,
                )
            axis.set_title(f"norm {layer + 1}: {label}", fontsize=9)
            if key != "common":
                axis.set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel("updates")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def complete(rows: list[Row]) -> None:
    """Train what is missing, seed by seed; add and store its rows."""
    task = ParsingTask()
    encoded = task.encode(settings(ARMS["ln-simple"], STEPS))
    known = {(row["arm"], row["seed"], row["rate"]) for row in rows}

    def add(name: str, seed: int, steps: int, rate: float, **also: Any) -> None:
        if (name, seed, rate) in known:
            return
        found = train(task, encoded, ARMS[name], seed, steps, rate)
        rows.append({"arm": name, "seed": seed, "rate": rate} | also | found)
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
        print(name, seed, rate, found["test_uas"], found["valid_loss"], flush=True)

    by_sgd = [name for name, arm in ARMS.items() if arm.sgd]
    for rate in RATES:
        for name in by_sgd:
            add(name, TRIAL_SEED, TRIAL_STEPS, rate, trial=True)
    best = {}
    for name in by_sgd:
        tried = [row for row in rows if row["arm"] == name and "trial" in row]
        finite = [row for row in tried if isfinite(row["valid_loss"])]
        best[name] = min(finite, key=lambda row: row["valid_loss"])["rate"]
    for seed in SEEDS:
        for name in ARMS:
            add(name, seed, STEPS, best.get(name, 1e-3))


def main() -> None:
    """Train what is missing, then print what the rules say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stored", action="store_true", help="judge what is stored; train nothing")
    parser.add_argument("--docs", action="store_true", help="write the figure and table of docs/")
    given = parser.parse_args()
    rows: list[Row] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    if not given.stored:
        torch.set_num_threads(1)
        complete(rows)
    for name in ARMS:
        print(f"{name} - ln-simple: {gap(rows, name, 'ln-simple')}")
    for name in INTERVENTIONS:
        print(name, verdict(rows, name), gap(rows, name, INTERVENTIONS[name][0]))
    if given.docs:
        draw(rows, DOCS / "images" / "detached-mean.svg")
        TABLE.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
