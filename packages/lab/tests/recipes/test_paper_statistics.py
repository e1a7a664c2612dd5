"""TID and scores by kind of statistics published by Wang et al. 2022."""

import tomllib
from collections import Counter
from dataclasses import replace

import pytest

from powernorm.records import PaperStatistic
from powernorm_lab.cli.recipes import recipes
from powernorm_lab.comparing import notes_of
from powernorm_lab.recipes import named_recipe, paper_statistics, paths_of, recipe
from powernorm_lab.recipes.paper_statistics import printed_statistics
from powernorm_lab.runs import TASKS

SIZES = (512, 1024, 2048, 4096, 8192, 16384)


def values(rows: list[PaperStatistic], norm: str) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in rows if row["norm"] == norm}


def test_all_of_tables_4_and_6_to_8() -> None:
    rows = printed_statistics()
    counts = Counter(row["source"] for row in rows)
    assert counts == {
        "Wang et al. 2022, Table 4": 80,
        "Wang et al. 2022, Table 6": 80,
        "Wang et al. 2022, Table 7": 8,
        "Wang et al. 2022, Table 8": 24,
    }
    tid = [row for row in rows if "statistics" not in row]
    keys = [(row["dataset"], row["placement"], row["norm"], row["metric"]) for row in tid]
    assert len(set(keys)) == 160 == 10 * 2 * 2 * 4
    # RegularizedBatchNorm lowers it unless both are small.
    by_key = dict(zip(keys, (row["value"] for row in tid), strict=True))
    for (dataset, placement, norm, metric), value in by_key.items():
        if norm == "rbn":
            assert value <= max(by_key[dataset, placement, "bn", metric], 1.0)


@pytest.mark.parametrize(
    ("task", "preset", "norm", "expected"),
    [
        ("translation", "wmt16-wang2022-pre", "bn", (7.9, 30.1, 7.6, 12.8)),
        ("translation", "wmt16-wang2022-post", "rbn", (2.3, 7.7, 1.5, 2.8)),
        ("lm", "ptb-wang2022-post", "bn", (0.9, 1.1, 1.0, 1.1)),
        ("ner", "conll-reduced", "rbn", (4.0, 5.6, 5.9, 6.1)),
        ("classify", "yelp-wang2022-pre", "bn", (12.1, 8.6, 4.2, 5.1)),
    ],
)
def test_recipes_have_those_of_their_data(
    task: str, preset: str, norm: str, expected: tuple[float, ...]
) -> None:
    rows = paper_statistics(recipe(task, preset))
    found = values(rows, norm)
    assert tuple(found[key] for key in ("mean_last", "var_last", "mean_avg", "var_avg")) == expected
    assert len({row["dataset"] for row in rows}) == 1


@pytest.mark.parametrize("preset", ["iwslt14-wang2022-pre", "verses-small", "verses-reduced"])
def test_translation_has_the_scores_by_statistics(preset: str) -> None:
    config = recipe("translation", preset)
    rows = [row for row in paper_statistics(config) if "statistics" in row]
    scores = {(r["norm"], r["statistics"], r.get("size")): r["value"] for r in rows}
    assert [scores["bn", "batch", size] for size in SIZES] == [27.2, 30.9, 32.3, 32.7, 32.8, 32.9]
    assert scores["bn", "running", None] == 34.8
    assert scores["rbn", "re-estimated in one pass", None] == 35.4
    # The score with running statistics is that of the paper's other tables.
    results = named_recipe("translation", preset).results
    printed = {(r.norm, r.placement): r.value for r in results if r.source.endswith("Table 2")}
    assert scores["rbn", "running", None] == printed["rbn", "pre"]
    shape = replace(config.model, placement="post", final_norm=None, final_norm_warmup=None)
    post = replace(config, model=shape)
    assert {row["placement"] for row in paper_statistics(post)} == {"post"}


def test_every_data_set_of_the_paper_has_recipes_and_no_other() -> None:
    found = set()
    for task in TASKS:
        for preset in paths_of(task):
            rows = paper_statistics(recipe(task, preset))
            found |= {row["dataset"] for row in rows}
            assert bool(rows) == any(
                result.source.startswith("Wang et al. 2022")
                for result in named_recipe(task, preset).results
            )
    assert found == {row["dataset"] for row in printed_statistics()}


def test_they_are_in_what_a_comparison_knows_before_it_is_made() -> None:
    config = recipe("ner", "conll-reduced")
    assert list(notes_of(config).paper_statistics) == paper_statistics(config)


def test_show_prints_them_as_comments(capsys: pytest.CaptureFixture[str]) -> None:
    recipes("show", "iwslt14-wang2022-post")
    text = capsys.readouterr().out
    assert "# var TID, last norm, %" in text
    assert "# BLEU tokenized, batch, 16,384                    35.2   34.8" in text
    assert tomllib.loads(text)["extends"] == "iwslt14-wang2022-pre"
    recipes("show", "lm/demo")
    assert "Also printed" not in capsys.readouterr().out
