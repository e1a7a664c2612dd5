"""Numbers of the claims that fresh seeds decide, by the rules of benchmarks/results/fresh-seeds.md.

    python benchmarks/fresh_seeds.py                                # the table of all claims
    python benchmarks/fresh_seeds.py --collect petrogold RUNS…      # adds or replaces rows of runs

Rows are in benchmarks/results/fresh-seeds.csv, one a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

import powernorm
import powernorm_lab as lab

ROWS: Final = Path(__file__).parent / "results" / "fresh-seeds.csv"
CONFIDENCE: Final = 0.95
ENDED: Final = ("finished", "diverged", "nonfinite")


class Gap(NamedTuple):
    """Two groups of runs whose numbers are compared, or one; a group is a setting and a norm."""

    claim: str
    ahead: tuple[str, str]
    behind: tuple[str, str] | None
    quantities: Sequence[str]
    is_ratio: bool = False
    """Whether nothing is paired, and logarithms are compared (two unlike models)."""
    family: str = ""
    """Comparisons that Holm's correction takes together; "" for a comparison by itself."""


DISTANCES: Final = ("mean_distance", "var_distance")
SPIKES: Final = ("mean_spike", "var_spike")
TIDS: Final = ("mean_tid", "var_tid")
ENDS: Final = ("train_loss", "valid_loss")
RESNET: Final = ("mnist-resnet20", "bn")
ENCODER: Final = ("rt-xu2019", "bn")
GAPS: Final = (
    Gap("S1", ENCODER, RESNET, DISTANCES, is_ratio=True),
    Gap("S2", ENCODER, RESNET, SPIKES, is_ratio=True),
    *(
        Gap("S5", (f"verses-{way}", "pnv"), (f"verses-{way}", "bn"), ("var_distance", "var_spike"))
        for way in ("both", "neither")
    ),
    *(
        Gap("S12", (f"verses-{way}", norm), None, ("scales_inside",))
        for norm in ("pnv", "bn")
        for way in ("both", "neither")
    ),
    Gap("W7", ENCODER, RESNET, TIDS, is_ratio=True),
    *(
        Gap("W7", (f"verses-mini-{place}", "bn"), RESNET, TIDS, is_ratio=True)
        for place in ("pre", "post")
    ),
    *(
        Gap("W7", ENCODER, RESNET, tuple(f"{one}_{size}" for one in TIDS), is_ratio=True)
        for size in (1024, 4096)
    ),
    Gap("W18", ("lm-demo-pre", "pn-only"), ("lm-demo-pre", "pn"), ("test_loss",), family="W18"),
    Gap("W18", ("lm-demo-post", "pn-only"), ("lm-demo-post", "pn"), ("test_loss",), family="W18"),
    Gap("W18", ("lm-demo-pre-tuned", "pn-only"), ("lm-demo-pre", "pn"), ("test_loss",)),
    Gap("X10", ("petrogold", "ln"), ("petrogold", "ln-simple"), ENDS),
    Gap("X12", ("petrogold", "ln"), ("petrogold", "adanorm"), ENDS),
    *(
        Gap(claim, ("rt-tuned", norm), ("rt-tuned", other), ("test_accuracy",), family="RT")
        for claim, norm, other in (
            ("W4", "bn", "ln"),
            ("W13", "rbn", "ln"),
            ("S9", "pn", "ln"),
            ("W12", "rbn", "bn"),
        )
    ),
    Gap("W14", ("rt-tuned", "rbn"), ("rt-tuned", "bn"), TIDS),
    *(
        Gap(claim, (f"conll{one}", norm), (f"conll{two}", other), ("test_f1",), family="CoNLL")
        for claim, one, norm, two, other in (
            ("W3", "", "bn", "", "ln"),
            ("W19", "", "pn", "", "ln"),
            ("S8", "", "pn", "", "bn"),
            ("S8", "", "pn", "-scaled", "bn"),
            ("S8", "", "pn-only", "", "bn"),
            ("S3", "-scaled", "bn", "", "ln"),
        )
    ),
)
SCORES: Final = ("test_loss", "test_accuracy", "test_f1")


def numbers(run: Path) -> dict[str, float]:
    """Return what a run's files say: losses, statistics of the first norm, γ, and TID."""
    found: dict[str, float] = {}
    curve = pd.read_csv(run / "metrics.csv")
    for name, column in (("train_loss", curve["train_loss"]), ("valid_loss", curve["valid_loss"])):
        known = column.dropna()
        found[name] = known.tail(1 if name == "valid_loss" else -(-len(known) // 10)).mean()
    if (run / "norms.csv").exists():
        rows = pd.read_csv(run / "norms.csv")
        first = rows[rows["layer"] == rows["layer"].iloc[0]]
        half = first.tail(len(first) // 2)
        for part in ("mean", "var"):
            found[f"{part}_distance"] = first[f"{part}_distance"].tail(-(-len(first) // 10)).mean()
            gradients = half[f"{part}_gradient_norm"]
            found[f"{part}_spike"] = gradients.max() / gradients.median()
    if (run / "scales.json").exists():
        layers = json.loads((run / "scales.json").read_text("utf-8"))["layers"]
        inside = [
            np.abs(layer["weight"]) <= np.array(layer["deviation"])
            for layer in layers
            if layer["weight"]
        ]
        if inside:
            found["scales_inside"] = float(np.concatenate(inside).mean())
    if (run / "diagnosis.json").exists():
        sizes = json.loads((run / "diagnosis.json").read_text("utf-8"))["batch_sizes"]
        for size, part in pd.DataFrame(sizes, columns=["tokens", *TIDS]).groupby("tokens"):
            if size in (1024, 4096):
                found |= {f"{name}_{size}": part[name].mean() for name in TIDS}
    return found


def collect(setting: str, folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each ended run of the claims; of results without run folders, TID alone."""
    wanted = {group for gap in GAPS for group in (gap.ahead, gap.behind)}
    for folder in folders:
        for run in lab.read_comparison(folder).runs:
            place = folder / run.folder
            if run.status not in ENDED or (setting, run.norm) not in wanted:
                continue
            yield {
                "setting": setting,
                "norm": run.norm,
                "seed": run.seed,
                "status": run.status,
                **{name: run.metrics.get(name) for name in SCORES},
                "mean_tid": run.tid_of("mean_avg"),
                "var_tid": run.tid_of("var_avg"),
                **(numbers(place) if (place / "metrics.csv").exists() else {}),
            }


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each claim, comparison and number that has runs."""
    found = pd.DataFrame(
        line | {"family": gap.family or f"{gap.claim} {line['comparison']}"}
        for gap in GAPS
        for line in _lines(gap, rows)
    )
    families = found.groupby("family", sort=False)
    found["p, Holm"] = families["p"].transform(lambda part: lab.holm(list(part)))
    return found.drop(columns="family")


def _lines(gap: Gap, rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    groups = [
        rows[(rows["setting"] == setting) & (rows["norm"] == norm)]
        .set_index("seed")
        .reindex(columns=gap.quantities)
        for setting, norm in (gap.ahead, gap.behind or gap.ahead)
    ]
    for name in gap.quantities:
        ours, theirs = (group[name].astype(float).dropna() for group in groups)
        if min(len(ours), len(theirs)) < 2:
            continue
        if gap.is_ratio:
            test = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False)
            middle = np.log(ours).mean() - np.log(theirs).mean()
            ends = test.confidence_interval(CONFIDENCE)
            count = f"{len(ours)} and {len(theirs)}"
            values = np.exp([middle, ends.low, ends.high])
        else:
            gaps = ours if gap.behind is None else (ours - theirs).dropna()
            test = stats.ttest_1samp(gaps, 0)
            ends = test.confidence_interval(CONFIDENCE)
            count, values = str(len(gaps)), np.array([gaps.mean(), ends.low, ends.high])
        form = ".3g" if gap.is_ratio or gap.behind is None else "+.3g"
        mean, low, high = (format(value, form) for value in values)
        yield {
            "claim": gap.claim,
            "comparison": (" / " if gap.is_ratio else " - ").join(
                " ".join(group) for group in (gap.ahead, gap.behind) if group
            ),
            "number": name,
            "seeds": count,
            "value (95 %)": f"{mean} ({low} to {high})",
            "p": nan if gap.behind is None else float(test.pvalue),
        }


def main() -> None:
    """Print the table, or add rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    settings = sorted({group[0] for gap in GAPS for group in (gap.ahead, gap.behind) if group})
    parser.add_argument("--collect", choices=settings, metavar="SETTING", help=", ".join(settings))
    parser.add_argument("runs", nargs="*", type=Path, help="folders of comparisons")
    options = parser.parse_args()
    if bool(options.collect) != bool(options.runs):
        parser.error("--collect SETTING and the folders of its comparisons go together")
    rows = pd.read_csv(ROWS)
    if options.collect:
        try:
            added = pd.DataFrame(collect(options.collect, options.runs))
        except powernorm.InputError as error:
            parser.error(str(error))
        key = ["setting", "norm", "seed"]
        rows = pd.concat([rows, added]).drop_duplicates(key, keep="last")
        rows.sort_values(key).to_csv(ROWS, index=False, float_format="%.6g")
    with pd.option_context("display.width", 160, "display.max_colwidth", 60):
        print(table(rows).to_string(index=False, float_format="{:.2g}".format))


if __name__ == "__main__":
    main()
