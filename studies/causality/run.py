"""Does the gain of batch statistics in language modeling survive the causal mask?

    python studies/causality/run.py --out runs/causality

The published code of the Tensorized Transformer, which Shen et al. 2020 and Wang et al. 2022 build
on, leaves the mask out. Trains it with each norm in the causal form (`bn`) and in the other
(`bn-future`), from the same weights on the same batches. After Ctrl-C the same command goes on.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import powernorm
from figure import draw
from powernorm import lab

NORMS = ("ln", "bn", "rbn", "pn")
MARK = "-future"
"""Ends the label of a variant that sees the future."""
TENSORIZED = ["model.architecture=tensorized", "model.num_heads=1"]
PENALTIES = ["norm_options.rbn.mean_penalty=0.1", "norm_options.rbn.var_penalty=1.0"]

PRESETS = {
    "smoke": ("smoke", [*TENSORIZED, *PENALTIES, "model.head_features=8"]),
    "reduced": (
        "smoke",
        [
            *TENSORIZED,
            *PENALTIES,
            "model.head_features=40",
            "model.num_layers=3",
            "model.num_features=128",
            "model.feedforward_features=512",
            "model.dropout=0.1",
            "model.activation=relu",
            "data.vocabulary_size=2000",
            "data.batch_size=32",
            "data.evaluation_batch_size=128",
            "optimizer.learning_rate=8e-3",
            "training.max_steps=1500",
            "training.log_every=25",
            "training.validate_every=150",
            "training.validation_tokens=32768",
            "training.monitor_every=50",
            "training.tid_batches=40",
            "seeds=0,1,2,3,4",
        ],
    ),
    "full": ("ptb-wang2022-pre", ["seeds=0,1,2"]),
}
"""By name: the recipe of `lm` that it starts from, and what is changed. `full` is the papers'
Penn-Treebank setting, for a GPU."""

PRINTED = [
    ("Shen et al. 2020, Table 2", {"ln": 53.2, "bn": 60.7, "pn": 47.6}),
    ("Wang et al. 2022, Table 2", {"ln": 54.5, "bn": 45.9, "rbn": 43.2}),
    ("Wang et al. 2022, Table 3", {"pn": 59.8}),
]
"""Test perplexities of the Penn Treebank with pre-norm. They stand beside both forms, for the signs
of their differences to LayerNorm."""

NOTE = (
    "{marked}: without the causal mask, as the published code of the papers' model. What sees the "
    "future predicts tokens that it is given: its perplexity is that of no language model. The "
    "papers' numbers are of the Penn Treebank and of code that sees the future; they stand beside "
    "both forms, for the signs of their differences to LayerNorm."
)


def config_of(preset: str, assignments: list[str]) -> lab.ComparisonSettings:
    """Return the configuration of a preset: each norm in the causal form, then in the other."""
    recipe, changes = PRESETS[preset]
    base = replace(lab.recipe("lm", recipe), preset=preset, norms=NORMS)
    variants = tuple(
        lab.Variant(f"{norm}{mark}", norm, settings={"model.sees_future": str(bool(mark)).lower()})
        for mark in ("", MARK)
        for norm in NORMS
    )
    study = lab.Study(
        name="future",
        title="With and without the causal mask",
        source="Shen et al. 2020, Table 2, and Wang et al. 2022, Table 2",
    )
    return lab.override(replace(base, study=study, variants=variants), [*changes, *assignments])


def notes_of(config: lab.ComparisonSettings) -> lab.Notes:
    """Return what the papers print of this, and how it differs from what they did."""
    chosen = [one for one in config.variants if {one.norm, one.label} & set(config.norms)]
    marked = [one.label for one in chosen if one.label.endswith(MARK)]
    paper: list[Any] = [
        {
            "norm": f"{norm}{mark}",
            "placement": "pre",
            "dataset": "Penn Treebank",
            "metric": "test_perplexity",
            "value": value,
            "source": source,
            "against": [f"ln{mark}"],
        }
        for mark in ("", MARK)
        for source, values in PRINTED
        for norm, value in values.items()
    ]
    listed = " and ".join(filter(None, [", ".join(marked[:-1]), *marked[-1:]]))
    text = NOTE.format(marked=listed) if marked else None
    return lab.Notes(paper=paper if config.preset != "smoke" else (), reduced=text)


def main() -> None:
    """Parse, train and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="reduced")
    parser.add_argument("--out", type=Path, default=Path("runs/causality"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    try:
        config = config_of(given.preset, given.set)
        lab.compare(config, given.out, resume=True, notes=notes_of(config))
    except powernorm.InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on") from None
    draw(lab.read_comparison(given.out), given.out / "figure.svg")
    print(f"{given.out / 'figure.svg'}; the tables: powernorm results {given.out}")


if __name__ == "__main__":
    main()
