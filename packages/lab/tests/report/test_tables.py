"""Snapshots of the tables and the conclusion of comparisons, and tables of special characters.

For intended changes, run `pytest packages/lab/tests/report --snapshot-update` and check the
differences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from lab.tests.report.own_functions import write_own_comparison
from lab.tests.report.study_folders import Row, write_study
from lab.tests.report.synthetic import made_comparison, made_run, printed, write_comparison
from lab.tests.report.synthetic_diagnoses import (
    bert_diagnosis,
    paper_statistics,
    scored_diagnosis,
)
from lab.tests.report.synthetic_translations import SOURCE, paper_record, write_translations
from syrupy.assertion import SnapshotAssertion

from powernorm.records import DiagnosisRecord
from powernorm_lab.report import Comparison, read_comparison, summarize
from powernorm_lab.report.comparison_tables import (
    norm_table,
    run_table,
    scored_weights,
    signatures,
)
from powernorm_lab.report.conclusion import conclusion, race_table, seed_table
from powernorm_lab.report.paper_tables import evaluation_table, paper_table, score_tables, tid_table
from powernorm_lab.report.results_document import claims, joined
from powernorm_lab.report.statistics import best_rows
from powernorm_lab.report.tables import Column, Table

PERPLEXITY = "test_perplexity"


def compared(
    values: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float] | None = None,
    metric: str = "test_accuracy",
) -> Comparison:
    """Return a comparison with these values by seed."""
    runs = [
        made_run(norm, seed, metrics={metric: value})
        for norm, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]
    known = [{"name": name, "metrics": {metric: one}} for name, one in (baselines or {}).items()]
    return made_comparison(runs, metric, baselines=known)


def changed(comparison: Comparison, norms: str, **values: Any) -> Comparison:
    """Change all runs of some norms; a function gets the run."""
    return replace(
        comparison,
        runs=[
            replace(run, **{key: one(run) if callable(one) else one for key, one in values.items()})
            if run.name in norms.split(",")
            else run
            for run in comparison.runs
        ],
    )


STUDY = {"name": "future", "title": "With and without the causal mask"}
MARK = "sees the future"
MARKED = (
    Row("ln", "ln", [3.0, 3.2, 3.1]),
    Row("bn", "bn", [3.1, 3.3, 3.2]),
    Row("ln-future", "ln", [2.0, 2.2, 2.1], remark=MARK),
    Row("bn-future", "bn", [1.8, "diverged", 1.9], remark=MARK),
    Row("pn-future", "pn", ["nonfinite", "failed", "interrupted"], remark=MARK),
)
STATUSES = {"ln": "nonfinite", "bn": "diverged", "rbn": "failed", "pn": "interrupted"}

MADE: dict[str, Comparison] = {
    "better, worse and neither": compared(
        {
            "ln": [70.0, 70.1, 70.2, 70.1],
            "bn": [75.0, 75.2, 75.1, 75.2],
            "pn": [60.0, 60.1, 60.3, 60.1],
            "rms": [70.1, 70.0, 70.3, 70.0],
        }
    ),
    "less is better in a perplexity": compared(
        {"ln": [70.0, 70.1, 70.2], "bn": [75.0, 75.2, 75.1], "pn": [70.1, 70.0, 70.2]},
        metric=PERPLEXITY,
    ),
    "one norm": compared({"bn": [70.0, 70.1]}),
    "one seed": compared({"ln": [70.0], "bn": [99.0]}),
    "two seeds": compared({"ln": [70.0, 70.1], "bn": [99.0, 99.1]}),
    "one behind a baseline": compared(
        {"ln": [70.0, 70.1], "bn": [75.0, 75.2], "pn": [10.0, 10.1]}, {"majority": 60.0}
    ),
    "all behind a baseline": compared(
        {"ln": [70.0, 70.1, 70.2], "bn": [74.9, 75.1, 75.0]}, {"majority": 75.0, "words": 50.0}
    ),
    "one with too few seeds": compared(
        {"ln": [70.0, 70.1, 70.2], "bn": [75.0, 75.1, 75.2], "pn": [99.0, 99.1]}
    ),
    "no reference": compared({"bn": [70.0, 71.0, 72.0], "pn": [70.0, 71.0, 72.0]}),
    "a reference of zero": compared({"ln": [0.0, 0.0], "bn": [4.0, 4.0]}),
    "a run that only began": made_comparison([made_run("pn", 3, status="unfinished")], PERPLEXITY),
    "a hostile name": compared({"a|b <i>\n*c*": [70.0], "$x_": [70.0]}),
    "seven seeds": compared({"ln": [70.0 + i / 9 for i in range(7)], "bn": [75.0] * 7}),
    "more seeds than can be counted": compared(
        {
            "ln": [70 + i / 7 for i in range(6)],
            "bn": [70 + i / 7 + (-1) ** i * 0.01 + 1e-5 for i in range(6)],
        }
    ),
}

OF_LANGUAGE_MODELS: dict[str, Callable[[Comparison], Comparison]] = {
    "a status each": lambda one: replace(
        changed(one, "ln,bn,rbn,pn", status=lambda run: STATUSES[run.name]), baselines=[]
    ),
    "a perplexity that is no number": lambda one: changed(
        one, "bn", status="finished", metrics={PERPLEXITY: math.nan}
    ),
    "the best is a norm all of whose runs finished": lambda one: changed(
        one, "bn", metrics={PERPLEXITY: 1.0}
    ),
    "behind a baseline": lambda one: changed(one, "rbn", metrics={PERPLEXITY: 2000.0}),
    "placements are kept apart": lambda one: replace(
        one, runs=[*one.runs[:4], *(replace(run, placement="post") for run in one.runs[:2])]
    ),
    "another goal": lambda one: replace(one, goal={"metric": "valid_loss", "direction": "min"}),
}


def own(folder: Path) -> Comparison:
    """Return a function with speeds and a baseline, whose last run lacks the goal."""
    baselines = [{"name": "majority", "metrics": {"accuracy": 0.31, "valid_loss": None}}]
    one = read_comparison(write_own_comparison(folder, lost=(), baselines=baselines))
    runs = [
        replace(run, examples_per_second=725.0, tokens_per_second=41_000.0, parameters=None)
        for run in one.runs
    ]
    runs[0] = replace(runs[0], status="nonfinite", metrics={"accuracy": None})
    runs[-1] = replace(runs[-1], metrics=runs[-1].metrics | {"accuracy": None})
    return replace(one, runs=runs)


def raced(folder: Path) -> Comparison:
    """Return a race with five seeds, which have intervals and no tests."""
    one = read_comparison(write_own_comparison(folder, seeds=range(5), lost=()))
    drop = {"label": "bn", "after": 3, "behind": "pn", "difference": 0.03, "at_least": 0.01}
    lost = {"label": "rms", "after": 4, "behind": "pn", "difference": None, "at_least": None}
    return replace(
        changed(one, "bn", status=lambda run: "dropped" if run.seed > 2 else "finished"),
        race={"confidence": 0.95, "margin": 0.001},
        standing={
            "metric": "accuracy",
            "leader": "pn",
            "left": ["ln", "pn"],
            "dropped": [drop | {"seeds": 3}, lost | {"seeds": 0}],
            "outcome": "level",
            "rounds": 5,
        },  # type: ignore[typeddict-item]
    )


def marked(folder: Path) -> Comparison:
    """Return runs that see the future, with published results of both forms."""
    paper = [
        paper_record(f"{norm}{mark}", value, metric=PERPLEXITY) | {"against": [f"ln{mark}"]}
        for mark in ("", "-future")
        for norm, value in (("ln", 50.0), ("bn", 45.0))
    ]
    return replace(read_comparison(write_study(folder, STUDY, MARKED)), paper=paper)


def translated(folder: Path) -> Comparison:
    """Return translations with two signatures, a lost norm, one seed, and an infinite value."""
    one = read_comparison(write_translations(folder))
    infinite = paper_record("ln", float("inf"), metric=PERPLEXITY)
    one = changed(one, "pn", signatures={"test_bleu": "other"})
    runs = [run for run in changed(one, "bn", status="nonfinite").runs if run.name != "ln"]
    return replace(one, runs=[one.runs[0], *runs], paper=[*one.paper, infinite])


WRITTEN: dict[str, Callable[[Path], Comparison]] = {
    "own function": own,
    "race": raced,
    "marked study": marked,
    "translations": translated,
}


def shown(comparison: Comparison) -> str:
    """Return the conclusion and the tables."""
    rows = summarize(comparison)
    best = best_rows(rows, comparison.measure)
    tables = {
        "norms": norm_table(comparison, rows),
        "runs": run_table(comparison),
        "seeds": seed_table(comparison, rows),
        "race": race_table(comparison) if comparison.standing else None,
        "paper": paper_table(comparison) if comparison.paper else None,
    }
    return "\n".join(
        [
            *conclusion(comparison),
            f"Shaded: {', '.join(sorted(best)) or 'none'}.",
            *(f"{name}\n{table.markdown()}" for name, table in tables.items() if table),
            scored_weights(comparison),
            *map(": ".join, signatures(comparison)),
            *(f"{one.norm} against {one.against}: {one.outcome}" for one in claims(comparison)),
        ]
    )


@pytest.mark.parametrize("case", MADE)
def test_made(case: str, snapshot: SnapshotAssertion) -> None:
    assert shown(MADE[case]) == snapshot


@pytest.mark.parametrize("case", OF_LANGUAGE_MODELS)
def test_language_models(case: str, comparison_folder: Path, snapshot: SnapshotAssertion) -> None:
    assert shown(OF_LANGUAGE_MODELS[case](read_comparison(comparison_folder))) == snapshot


@pytest.mark.parametrize("case", WRITTEN)
def test_written(case: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert shown(WRITTEN[case](tmp_path / "runs")) == snapshot


def scored(folder: Path) -> Comparison:
    """Return two seeds with scores by kind of statistics, beside a norm without."""
    one = read_comparison(write_comparison(folder, norms=("rbn", "adanorm")))
    one = changed(one, "rbn", diagnosis=lambda run: scored_diagnosis(20.0 + 2 * run.seed))
    record = paper_record("rbn", 35.6, source=SOURCE, metric="test_bleu_tokenised")
    return replace(one, paper=[record], paper_statistics=paper_statistics("rbn"))


def test_scores_by_kind_of_statistics(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Norms without scores have no column; the paper's measure replaces the goal."""
    (comparison,) = joined([scored(tmp_path / "runs")])
    found = [f"{heading}\n{table.markdown()}" for heading, table in score_tables([comparison])]
    assert "\n".join([*found, paper_table(comparison).markdown()]) == snapshot
    unscored = changed(comparison, "rbn", diagnosis=bert_diagnosis())
    assert score_tables([unscored]) == []


def test_a_diagnosis_beside_the_paper(snapshot: SnapshotAssertion) -> None:
    record: DiagnosisRecord = scored_diagnosis(20.0) | {"paper": paper_statistics()}  # type: ignore[assignment]
    tid = tid_table(record)
    assert tid is not None
    assert f"{evaluation_table(record).markdown()}\n{tid.markdown()}" == snapshot
    assert tid_table(bert_diagnosis()) is None


def test_a_reference_that_never_finished_is_told_from_one_that_was_not_trained() -> None:
    values = {"ln": [70.0, 71.0], "bn": [70.0, 71.0], "pn": [70.0, 71.0]}
    failed = changed(compared(values), "ln", status="failed", metrics={})
    assert conclusion(failed)[0].startswith("No test: no seed finished both with ln")
    assert "ln, which is not among them" in conclusion(compared({"bn": [1, 2], "pn": [1, 2]}))[0]


def test_many_norms_give_no_false_alarm() -> None:
    """One of twenty equal norms has p < 5 % by chance and would be better without correction."""
    noise = [0.1, -0.1, 0.02, -0.02]
    lucky = {"ln": [70.0] * 4, "lucky": [70.3, 70.2, 70.25, 70.5]}
    assert conclusion(compared(lucky))[0].startswith("Better than ln")
    others = {f"n{index}": [70 + 3 * one for one in noise] for index in range(19)}
    found = conclusion(compared(lucky | others))
    assert not any(sentence.startswith(("Better", "Worse")) for sentence in found)
    assert "n10 and 8 more" in found[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a$b$", r"a\$b\$"),
        ("~~a~~", r"\~\~a\~\~"),
        ("a&lt;b", r"a\&lt;b"),
        ("<b>*_`|[x]\\", r"\<b\>\*\_\`\|\[x\]\\"),
    ],
)
def test_markdown_shows_names_as_they_are(name: str, expected: str) -> None:
    table = Table.of([{"n": name}], ["n"])
    assert table.markdown().splitlines()[-1] == f"| {expected} |"


@pytest.mark.parametrize("name", ["[2cm]", "*", " [x", "*[1ex] b"])
def test_latex_rows_are_no_arguments_of_the_row_before(name: str) -> None:
    lines = Table.of([{name: "a"}, {name: name}], [name]).latex().splitlines()
    assert lines[2].startswith("{}")
    assert lines[5].startswith("{}")
    assert lines[4] == r"a \\"


def test_columns_of_one_name_both_stay() -> None:
    """Two metrics of a function may have the same shortened name."""
    columns = [Column[list[str]](name, itemgetter(index)) for index, name in enumerate("nxx")]
    table = Table(columns, [["a", "1", "2"]])
    assert "| a | 1 | 2 |" in table.markdown()
    assert r"a & 1 & 2 \\" in table.latex()
    assert table.html("l", "c").count("<td") == 2
    assert Table.of([], ["n", "x"]).latex().count("&") == 1


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("write", [write_comparison, write_translations])
def test_what_does_not_fit_into_a_terminal_is_named(
    tmp_path: Path, width: int, write: Callable[[Path], Path]
) -> None:
    text = printed(write(tmp_path / "demo"), width)
    assert max(map(len, text.splitlines())) <= width
    words = text.replace(";", "").split()
    comparison = read_comparison(tmp_path / "demo")
    for heading in norm_table(comparison, summarize(comparison)).headings:
        assert all(word in words for word in heading.split()), heading
    # The column of statuses precedes less important columns if a norm lost a run.
    assert ("diverged:" in text) == (width >= 80)


def test_a_race_of_five_seeds_is_printed(tmp_path: Path) -> None:
    """Its table of seeds has intervals and no columns of tests."""
    comparison = raced(tmp_path / "runs")
    seeds = seed_table(comparison, summarize(comparison))
    assert seeds is not None
    assert seeds.headings == ["norm", "seeds", "mean (95 %)", "middle half (95 %)"]
    text = printed(comparison, 80, terminal=False)
    assert all(heading in text for heading in seeds.headings)


def test_names_are_not_taken_for_markup(comparison_folder: Path) -> None:
    results = comparison_folder / "results.json"
    results.write_text(results.read_text().replace('"adanorm"', '"[red]a[/x]\\u001b[2J"'))
    assert "[red]a[/x]\N{REPLACEMENT CHARACTER}[2J" in printed(comparison_folder, 200)
    text = printed(comparison_folder, 80, terminal=False)
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_pipe_has_80_characters_or_as_many_as_asked(comparison_folder: Path) -> None:
    """A file has the same lines on every machine, unless `COLUMNS` or `wide` change them."""
    narrow = printed(comparison_folder, 60, terminal=False, asked=True)
    assert max(map(len, narrow.splitlines())) <= 60
    text = printed(comparison_folder, 200, terminal=False)
    assert 60 < max(map(len, text.splitlines())) <= 80
    text = printed(comparison_folder, 40, terminal=False, wide=True)
    (line,) = [line for line in text.splitlines() if line.startswith("bn ")]
    assert "1 of 2 finished; diverged: seed 1" in line
    assert "not shown" not in text
