"""`powernorm compare` with a study, and `recipes`, as a user starts them."""

import json
import re
from pathlib import Path

import pytest

from commands import SMALL, powernorm, refusal
from powernorm_lab.recipes import paths_of
from powernorm_lab.recipes.studies import STUDIES
from powernorm_lab.runs import TASKS

SHORT = (
    *("--set", "training.max_steps=4"),
    *("--set", "training.validate_every=2"),
    *("--set", "training.monitor_every=0"),
)
"""Settings for tests of the command, in which the results of a study do not matter."""


def test_study_ends_in_its_figure(tmp_path: Path, text_file: Path) -> None:
    options = ("compare", "lm", "--study", "lowest-layers", "--preset", "smoke", *SMALL, *SHORT)
    outcome = powernorm(tmp_path, *options, "--data", text_file)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "runs" / "lm-lowest-layers-smoke"
    assert outcome.out.endswith("report: runs/lm-lowest-layers-smoke/report.html\n")
    for label in ("ln", "bn-1of2", "bn-2of2"):
        assert label in outcome.out
        assert f"{label} seed 0" in outcome.err
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["study"]["source"] == "Wang et al. 2022, Figure 3"
    assert [(run["label"], run["x"]) for run in results["runs"]] == [
        ("ln", 0.0),
        ("bn-1of2", 1.0),
        ("bn-2of2", 2.0),
    ]
    page = folder / "report.html"
    assert b'<section id="study">' in page.read_bytes()


def test_recipes_say_which_studies_a_task_has(tmp_path: Path) -> None:
    studies = powernorm(tmp_path, "recipes", "image").out.partition("compare image --study")[2]
    assert "micro-batches" in studies
    assert "lowest-layers" not in studies


def test_an_embedded_text_is_data(tmp_path: Path) -> None:
    small = (*SMALL, "--set", "training.max_steps=5")
    done = powernorm(
        tmp_path, "compare", "lm", "--preset", "smoke", "--data", "rt", "--out", "r", *small
    )
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "r" / "results.json").read_text())
    assert results["data"]["name"] == "rt"


def test_all_recipes_are_listed_and_fit_a_terminal(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "recipes", fresh=True)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    first_words = [line.split()[0] for line in lines if line.strip()]
    for presets in map(paths_of, TASKS):
        assert set(presets) <= set(first_words)
    assert set(STUDIES) <= set(first_words)
    # Every number of files is explained, and every explanation has its row.
    used = {found[1] for line in lines if (found := re.search(r"(?<=.)\bfiles (\d+)\b", line))}
    explained = {found[1] for line in lines if (found := re.match(r"files (\d+): ", line))}
    assert used == explained == {str(number + 1) for number in range(len(explained))}
    assert "prepare-iwslt14.sh" in outcome.out


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_recipes_of_one_task(tmp_path: Path, task: str) -> None:
    outcome = powernorm(tmp_path, "recipes", task)
    assert outcome.code == 0
    for other, presets in ((task, paths_of(task)) for task in TASKS):
        assert (f"powernorm compare {other} --preset" in outcome.out) == (other == task)
        if other == task:
            assert all(preset in outcome.out for preset in presets)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recipes", "mt"), ["'mt'", "choose one of lm, translation, classify"]),
        # Studies of the repository are no tasks.
        (("compare", "verdict"), ["no task 'verdict': choose one of lm, translation"]),
        (("compare", "my/own.py", "--goal", "loss:min"), ["no task 'my/own.py'", "own:train"]),
        (("compare", "lm", "--study", "verdict"), ["no study 'verdict'"]),
        (
            ("compare", "image", "--study", "lowest-layers"),
            ["does not apply to the task image", "choose one of lm, translation"],
        ),
        (
            ("compare", "translation", "--preset", "full"),
            ["no preset 'full': choose one of smoke, demo, iwslt14-shen2020"],
        ),
        (
            ("compare", "translation", "--preset", "iwslt14-wang2022-pre", "--placement", "post"),
            ["use --preset iwslt14-wang2022-post"],
        ),
        (
            ("compare", "translation", "--preset", "iwslt15-xu2019"),
            ["iwslt15_en_vi does not exist", "--data FOLDER"],
        ),
    ],
)
def test_bad_choices_are_one_line(
    tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    line = refusal(tmp_path, *arguments)
    assert all(word in line for word in words), line
    assert not list(tmp_path.iterdir())
