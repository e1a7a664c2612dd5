"""Published results that are shown with a comparison, and the settings that they are of."""

import json
from math import isinf

import pytest

from powernorm.norms import NORMS
from powernorm_lab.recipes import (
    changes_of,
    measure_of,
    named_recipe,
    paper_records,
    paths_of,
    recipe,
    reduced_note,
)
from powernorm_lab.recipes.files import EMBEDDED
from powernorm_lab.recipes.studies import study_config
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.overrides import override

ALL = [
    (task, preset)
    for task, presets in ((task, paths_of(task)) for task in TASKS)
    for preset in presets
]
WITHOUT_SCORES = [("image", "cifar10-resnet18"), ("image", "mnist-resnet20"), ("lm", "addresses")]
"""Recipes whose experiments have no published scores."""


@pytest.mark.parametrize(("task", "preset"), ALL)
def test_records_can_stand_in_results(task: str, preset: str) -> None:
    config = recipe(task, preset)
    records = paper_records(config)
    # The results are JSON, which has no infinity.
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert {record["placement"] for record in records} <= {config.placement}
    is_experiment = preset not in ("smoke", "demo")
    assert bool(records) == (is_experiment and (task, preset) not in WITHOUT_SCORES)
    if not is_experiment:
        assert reduced_note(config) == named_recipe(task, preset).about.note
    changes = changes_of(config)
    assert (changes and changes["preset"]) == named_recipe(task, preset).about.stands_for


XU = ("none", "ln", "ln-simple", "detach-both", "detach-mean", "detach-std", "adanorm")
SHEN = ("ln", "bn", "pnv", "pn")
WANG = ("ln", "bn", "rbn", "pn-only", "pn", "brn", "mabn")

PAPERS = {"xu2019": XU, "shen2020": SHEN, "wang2022": WANG, "petrogold": XU, "resnet20": ("bn",)}
"""Columns of a paper by a part of the preset's name."""

# Xu et al. 2019, Tables 1 to 4: "BLEU", no more is said, except of WMT14, which has "the same
# compound splitting following previous". They do not say the placement of lm-char.
# Shen et al. 2020, Table 1: "case-insensitive BLEU for … IWSLT14 De-En" and "tokenized
# case-sensitive … for WMT14 En-De".
# Wang et al. 2022, Tables 2 and 3: "case sensitive tokenized BLEU".
# He et al. 2016, Table 6: an error of 8.75 %.
COLUMNS = """
classify    rt-xu2019            pre  test_accuracy     76.85 77.21 76.66 76.40 75.02 77.04 77.50
classify    sst5-xu2019          pre  test_accuracy     38.55 39.23 40.54 40.04 40.99 41.74 40.54
image       mnist-xu2019         pre  test_accuracy     99.14 99.13 99.09 99.10 99.25 99.10 99.35
parse       ptb-xu2019           pre  test_uas          88.31 89.12 89.19 89.79 89.45 89.80 89.23
parse       petrogold            pre  test_uas          88.31 89.12 89.19 89.79 89.45 89.80 89.23
image       cifar10-resnet20     pre  test_accuracy     91.25
lm-char     enwik8-xu2019        pre  test_bits_per_character  1.04 1.07 1.07 1.12 1.07 1.10 1.07
lm-char     enwik8-xu2019        post test_bits_per_character  1.04 1.07 1.07 1.12 1.07 1.10 1.07
translation wmt14-xu2019         pre  test_bleu_compound    none 28.3 28.4 none 28.3 none 28.5
translation iwslt14-xu2019       pre  test_bleu_tokenised   34.0 35.5 35.5 33.9 35.6 34.2 35.6
translation iwslt15-xu2019       pre  test_bleu_tokenised   28.4 31.2 31.6 27.7 31.3 29.8 31.4
translation iwslt14-shen2020     pre  test_bleu_lowercase   35.5 34.4 35.5 35.9
translation wmt14-shen2020       pre  test_bleu_tokenised   29.5 28.1 28.5 30.1
translation iwslt14-wang2022-pre pre  test_bleu_tokenised   35.5 34.8 35.6 34.5 35.6 35.2 35.0
translation iwslt14-wang2022-post post test_bleu_tokenised  35.5 34.0 35.5 0    35.6 35.3 0
translation wmt16-wang2022-pre   pre  test_bleu_tokenised   27.3 25.2 26.2 26.0 27.2 25.3 26.8
translation wmt16-wang2022-post  post test_bleu_tokenised   27.3 25.0 26.5 0    0    25.8 0
classify    imdb-wang2022-pre    pre  test_accuracy         84.1 84.0 84.4 84.2 83.3 84.3 84.4
classify    imdb-wang2022-post   post test_accuracy         84.1 84.0 84.5 84.2 84.0 83.6 84.1
classify    sogou-wang2022-pre   pre  test_accuracy         94.5 94.3 94.7 94.4 94.4 94.5 94.6
classify    sogou-wang2022-post  post test_accuracy         94.6 94.3 94.7 90.6 94.6 94.5 94.5
classify    dbpedia-wang2022-pre pre  test_accuracy         97.5 97.5 97.5 97.4 97.3 97.4 97.5
classify    dbpedia-wang2022-post post test_accuracy        97.5 97.5 97.6 97.1 97.4 97.5 97.5
classify    yelp-wang2022-pre    pre  test_accuracy         93.3 93.3 93.5 93.3 93.4 93.4 93.3
classify    yelp-wang2022-post   post test_accuracy         93.3 93.3 93.6 89.6 93.2 93.3 93.5
ner         conll-wang2022-pre   pre  test_f1               91.0 89.9 90.6 11.1 54.1 91.1 90.9
ner         conll-wang2022-post  post test_f1               91.3 90.9 91.4 67.1 90.9 89.9 90.8
ner         resume-wang2022-pre  pre  test_f1               94.0 93.2 94.0 5.0  93.3 94.1 94.8
ner         resume-wang2022-post post test_f1               94.8 94.5 94.8 94.4 94.3 93.6 94.4
"""


def column(line: str) -> tuple[str, str, str, dict[tuple[str, str], float | None]]:
    """Return task, preset, placement, and the values of a line by metric and norm."""
    task, preset, placement, metric, *values = line.split()
    norms = next(own for paper, own in PAPERS.items() if paper in preset)
    numbers = [None if value == "none" else float(value) for value in values]
    found = {(metric, norm): number for norm, number in zip(norms, numbers, strict=True)}
    return task, preset, placement, found


@pytest.mark.parametrize("line", COLUMNS.strip().splitlines())
def test_columns_are_those_of_the_papers(line: str) -> None:
    task, preset, placement, expected = column(line)
    rows = [row for row in named_recipe(task, preset).results if row.placement == placement]
    assert {(row.metric, row.norm): row.value for row in rows} == expected
    assert len(rows) == len(expected)
    config = recipe(task, preset)
    if config.placement != placement:
        config = override(config, [f"model.placement={placement}"])
    records = paper_records(config)
    assert {(one["metric"], one["norm"]): one["value"] for one in records} == expected


@pytest.mark.parametrize(
    ("task", "preset", "norm", "other", "difference"),
    [
        # "AdaNorm outperforms LayerNorm … 0.22 ACC on MNIST", "0.11 UAC on PTB"
        ("image", "mnist-xu2019", "adanorm", "ln", 0.22),
        ("parse", "ptb-xu2019", "adanorm", "ln", 0.11),
        # "-0.04" and "1.48" of DetachNorm in Table 2
        ("image", "mnist-xu2019", "detach-both", "none", -0.04),
        ("parse", "ptb-xu2019", "detach-both", "none", 1.48),
        # "PN outperforms LN by 0.4/0.6 BLEU"; BatchNorm is 1.1 and 1.4 below LayerNorm.
        ("translation", "iwslt14-shen2020", "pn", "ln", 0.4),
        ("translation", "wmt14-shen2020", "pn", "ln", 0.6),
        ("translation", "iwslt14-shen2020", "bn", "ln", -1.1),
        ("translation", "wmt14-shen2020", "bn", "ln", -1.4),
    ],
)
def test_differences_are_those_of_the_papers_texts(
    task: str, preset: str, norm: str, other: str, difference: float
) -> None:
    values = {row.norm: row.value or 0 for row in named_recipe(task, preset).results}
    assert values[norm] - values[other] == pytest.approx(difference)


@pytest.mark.parametrize(
    ("preset", "norm", "values"),
    [
        ("full", "ln", [53.2, 54.5]),
        ("ptb-shen2020", "ln", [53.2]),
        ("ptb-shen2020", "pnv", [55.3]),
        ("ptb-shen2020", "pn", [47.6]),
        ("wikitext103-shen2020", "bn", [27.2]),
        ("ptb-wang2022-pre", "ln", [54.5]),
        ("ptb-wang2022-pre", "rbn", [43.2]),
        ("ptb-wang2022-pre", "pnv", []),
        ("ptb-wang2022-post", "rbn", [44.6]),
        ("wikitext103-wang2022-pre", "bn", [17.8]),
        ("wikitext103-wang2022-post", "bn", [17.2]),
        # Infinite in the paper: the results are JSON.
        ("wikitext103-wang2022-post", "pn-only", [None]),
    ],
)
def test_perplexities_of_the_papers(preset: str, norm: str, values: list[float | None]) -> None:
    records = paper_records(recipe("lm", preset))
    assert [record["value"] for record in records if record["norm"] == norm] == values
    printed = named_recipe("lm", "wikitext103-wang2022-pre").results
    infinite = [one for one in printed if one.value is not None and isinf(one.value)]
    assert sorted(one.norm for one in infinite) == ["mabn", "pn-only", "pn-only"]


@pytest.mark.parametrize(("task", "preset"), ALL)
def test_results_are_of_norms_that_can_be_run_and_name_their_table(task: str, preset: str) -> None:
    known = set(NORMS) | {variant.label for variant in recipe(task, preset).variants}
    rows = named_recipe(task, preset).results
    assert len(set(rows)) == len(rows)
    assert {row.norm for row in rows} <= known
    assert all("Table" in row.source for row in rows)


def test_records_follow_the_placement() -> None:
    config = override(
        recipe("translation", "iwslt14-wang2022-pre"),
        ["model.placement=post", "model.final_norm=none", "norms=mabn"],
    )
    records = {record["norm"]: record["value"] for record in paper_records(config)}
    assert (records["mabn"], records["bn"]) == (0.0, 34.0)


def test_a_study_that_no_paper_prints_has_no_records() -> None:
    config = study_config("lm", "penalties", "demo")
    assert paper_records(config) == []
    assert reduced_note(config) is None
    # The numbers of a recipe come with its note.
    assert "The text is an embedded one" in str(reduced_note(study_config("lm", "alphas", "full")))


def test_measures() -> None:
    assert {task: measure_of(task) for task in TASKS} == {
        "lm": "test_perplexity",
        "translation": "test_bleu",
        "ner": "test_f1",
        "parse": "test_uas",
        "classify": "test_accuracy",
        "image": "test_accuracy",
        "lm-char": "test_bits_per_character",
        "sequences": "test_accuracy",
    }


@pytest.mark.parametrize(("task", "preset"), ALL)
def test_catalog_says_what_a_preset_needs(task: str, preset: str) -> None:
    info = named_recipe(task, preset).about
    config = recipe(task, preset)
    assert info.summary
    assert len(info.summary) < 60
    assert ("GPU" in info.cost) == ("estimate" in info.cost and "core" not in info.cost)
    if config.task == "translation":
        assert (info.data == EMBEDDED) == (config.data.path is None)
        assert bool(info.source) == (preset not in ("smoke", "demo") and info.stands_for is None)
    if info.data != EMBEDDED:
        assert "--data" in info.data
        assert config.data.path is None or "FOLDER" in info.data or config.data.path in info.data


def test_what_xu_et_al_compare_a_row_with() -> None:
    """ "a variant of LayerNorm-simple", and the column against no norm in Table 2."""
    for task, preset in (("classify", "rt-xu2019"), ("image", "mnist-xu2019")):
        against = {row["norm"]: row["against"] for row in paper_records(recipe(task, preset))}
        assert against.pop("detach-both") == ["none", "ln-simple"]
        assert against.pop("detach-mean") == against.pop("detach-std") == ["ln-simple"]
        assert against == {key: ["ln"] for key in ("none", "ln", "ln-simple", "adanorm")}
