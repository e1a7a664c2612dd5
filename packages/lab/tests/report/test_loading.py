"""Reading of run folders: complete ones, those in progress, and damaged files."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from lab.tests.report.own_functions import write_own_comparison
from lab.tests.report.synthetic import edited
from lab.tests.report.synthetic_translations import write_translations

from powernorm.errors import InputError
from powernorm.json_reading import seal_json
from powernorm.records import NORMS_COLUMNS
from powernorm_lab.report import read_comparison, write_report
from powernorm_lab.report.comparison_tables import run_table
from powernorm_lab.report.loading import read_runs, read_translations, read_trials
from powernorm_lab.report.tuning import trials_by_setting
from powernorm_lab.runs import (
    COMPARISON_FILE,
    METRICS_FILE,
    NORMS_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    TRIALS_FILE,
    RunResult,
)
from powernorm_lab.schema import read_record, written

BN = "bn-pre-seed0"
REST = "," * (len(NORMS_COLUMNS) - 8)
"""Empty cells of the columns that are newer than the first version."""

pytestmark = pytest.mark.usefixtures("blank_figures")


def replace_line(path: Path, number: int, line: str) -> None:
    """Replace a line, counted from 1."""
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def change(path: Path, **values: object) -> None:
    with edited(path) as content:
        content |= values


def test_everything_is_read(comparison_folder: Path) -> None:
    comparison = read_comparison(comparison_folder)
    assert len(comparison.runs) == 10
    run = next(run for run in comparison.runs if run.folder == BN)
    assert len(run.curve) == 100
    assert run.curve["tokens"][0] == 20480.0
    assert math.isnan(run.curve["valid_loss"][0])
    assert len(run.samples) == 7 * 100
    assert run.samples["layer"][0] == "model.blocks.0.attention_norm"


def test_run_folders_alone(comparison_folder: Path) -> None:
    listed = read_comparison(comparison_folder)
    (comparison_folder / RESULTS_FILE).unlink()
    found = read_comparison(comparison_folder)
    # As text, because NaN is not equal to itself.
    assert sorted(map(repr, found.runs)) == sorted(map(repr, listed.runs))
    assert all(len(run.curve) > 40 for run in found.runs)
    assert found.placement == "pre"
    assert write_report([comparison_folder]).exists()


def test_run_that_is_going_on(comparison_folder: Path) -> None:
    folder = comparison_folder / "gn-pre-seed7"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    shutil.copy(comparison_folder / BN / METRICS_FILE, folder / METRICS_FILE)
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as stream:
        stream.write("1010,3,20")
    run = read_comparison(comparison_folder).runs[-1]
    assert (run.norm, run.placement, run.seed, run.status) == ("gn", "pre", 7, "unfinished")
    # The incomplete last line is ignored.
    assert len(run.curve) == 100
    assert "unfinished" in write_report([comparison_folder]).read_text(encoding="utf-8")


def test_run_without_logs(comparison_folder: Path) -> None:
    for path in (comparison_folder / BN).glob("*.csv"):
        path.unlink()
    run = next(run for run in read_comparison(comparison_folder).runs if run.folder == BN)
    assert (len(run.curve), len(run.samples)) == (0, 0)
    assert write_report([comparison_folder]).exists()


def test_logs_of_the_first_version(small_folder: Path) -> None:
    for path in (small_folder / BN).glob("*.csv"):
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text(
            "".join(",".join(line.split(",")[:8]) + "\n" for line in lines), encoding="utf-8"
        )
    run = next(run for run in read_comparison(small_folder).runs if run.folder == BN)
    assert len(run.samples) == 7 * 100
    assert run.samples["gradient_norm"].isna().all()
    assert run.samples["var_tid"].notna().all()
    assert write_report([small_folder]).exists()


def test_norms_that_lack_a_column_of_the_first_version(comparison_folder: Path) -> None:
    path = comparison_folder / BN / NORMS_FILE
    path.write_text("step,layer,norm,gradient_norm\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1: the header lacks mean_tid, var_tid"):
        read_comparison(comparison_folder)


def test_first_layer_that_was_not_finite(comparison_folder: Path) -> None:
    comparison = read_comparison(comparison_folder)
    runs = {run.folder: run for run in comparison.runs}
    place = runs["pn-pre-seed1"].first_nonfinite
    assert place == ("model.blocks.2.attention_norm", 410)
    assert runs[BN].first_nonfinite is None
    notes = [line[-1] for line in run_table(comparison).lines]
    end = "; first not finite in model.blocks.2.attention_norm, step 410"
    assert [note.endswith(end) for note in notes] == [
        one.folder == "pn-pre-seed1" for one in runs.values()
    ]


def test_other_folders_are_not_runs(comparison_folder: Path) -> None:
    (comparison_folder / "notes").mkdir()
    (comparison_folder / "todo.txt").write_text("x", encoding="utf-8")
    assert len(read_comparison(comparison_folder).runs) == 10


@pytest.mark.parametrize(
    ("file", "line", "content", "message"),
    [
        (METRICS_FILE, 5, "40,0,zzz,1,1,1,,,,,", "line 5: tokens is 'zzz', expected a number"),
        (METRICS_FILE, 7, "60,0", "line 7: 2 cells, expected 11"),
        (METRICS_FILE, 1, "step,epoch", "line 1: the header lacks tokens, seconds"),
        (METRICS_FILE, 3, '"20,0,1,1,1,1,,', "line .*: not CSV"),
        (NORMS_FILE, 9, f"1.5,a,bn,0,0,0,0,0{REST}", "line 9: step is '1.5', not a whole number"),
        (NORMS_FILE, 9, f",a,bn,0,0,0,0,0{REST}", "line 9: step is '', not a whole number"),
        (NORMS_FILE, 4, f"10,a,bn,0,0,0,0,x{REST}", "line 4: num_nonfinite_batches is 'x'"),
        (
            NORMS_FILE,
            4,
            f"10,a,bn,0,0,0,0,nan{REST}",
            "line 4: num_nonfinite_batches is 'nan'",
        ),
        (
            NORMS_FILE,
            4,
            f"10,a,bn,0,0,0,0,inf{REST}",
            "line 4: num_nonfinite_batches is 'inf'",
        ),
        (NORMS_FILE, 4, f"10,a,bn,0,0,0,0,1.5{REST}", "line 4: num_nonfinite_batches is '1.5'"),
        (METRICS_FILE, 5, "nan,0,1,1,1,1,,,,,", "line 5: step is 'nan', expected a finite number"),
        (METRICS_FILE, 5, "40,0,inf,1,1,1,,,,,", "line 5: tokens is 'inf', expected a finite"),
    ],
)
def test_damaged_line_is_named(
    comparison_folder: Path, file: str, line: int, content: str, message: str
) -> None:
    path = comparison_folder / BN / file
    replace_line(path, line, content)
    with pytest.raises(InputError, match=re.escape(str(path)) + ", " + message):
        read_comparison(comparison_folder)


def test_file_that_is_not_text(comparison_folder: Path) -> None:
    (comparison_folder / BN / METRICS_FILE).write_bytes(b"step\xff\xfe\n")
    with pytest.raises(InputError, match=r"metrics.csv: byte 4 is not UTF-8"):
        read_comparison(comparison_folder)


@pytest.mark.parametrize("name", [RESULTS_FILE, f"{BN}/{RESULT_FILE}"])
def test_damaged_json_is_named_with_its_line(comparison_folder: Path, name: str) -> None:
    if name != RESULTS_FILE:
        (comparison_folder / RESULTS_FILE).unlink()
    path = comparison_folder / name
    path.write_text('{\n"norm": 1,\n]', encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(str(path)) + ", line 3: not JSON"):
        read_comparison(comparison_folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 3}, "format is 3, this version reads 2: update powernorm if a newer"),
        ({"format": "1"}, "format is '1', this version reads 2: update powernorm"),
        ({"task": 3}, "task is 3, expected a string"),
        ({"runs": {}}, "runs is {}, expected a list"),
        ({"runs": [3]}, "runs[0] is 3, expected an object"),
        (
            {"runs": [{"status": "well"}]},
            "runs[0].status is 'well', expected 'finished', 'diverged'",
        ),
        ({"baselines": [{"name": "unigram"}]}, "baselines[0].metrics is missing"),
        ({"study": 3}, "study is 3, expected an object"),
        ({"study": {"name": "x"}}, "study.title is missing"),
        ({"paper": [{"norm": "ln"}]}, "paper[0].placement is missing"),
        ({"reduced": 3}, "reduced is 3, expected a string"),
        ({"changes": []}, "changes is [], expected an object"),
        ({"changes": {"preset": "big"}}, "changes.settings is missing"),
        (
            {"changes": {"preset": 1, "settings": {}}},
            "changes.preset is 1, expected a string",
        ),
        (
            {"changes": {"preset": "big", "settings": {"seeds": 3}}},
            "changes.settings.seeds is 3, expected an object",
        ),
    ],
)
def test_results_of_another_shape(
    comparison_folder: Path, values: dict[str, object], message: str
) -> None:
    change(comparison_folder / RESULTS_FILE, **values)
    with pytest.raises(InputError, match=re.escape(f"{RESULTS_FILE}: {message}")):
        read_comparison(comparison_folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", "0", "seed is '0', expected a whole number"),
        ("seed", 10**400, "expected a whole number below 2^63"),
        ("parameters", -(10**30), "expected a whole number below 2^63"),
        (
            "status",
            "paused",
            "status is 'paused', expected 'finished', 'diverged', 'nonfinite', 'interrupted', "
            "'failed', 'dropped', 'pruned' or 'unfinished' (a newer version of powernorm may know "
            "more: update it if one wrote the file); restore the file",
        ),
        ("seed", True, "seed is True, expected a whole number"),
        ("seconds", "long", "seconds is 'long', expected a number"),
        ("metrics", {"test_perplexity": [1]}, "test_perplexity is [1], expected a number"),
        ("tid", {"mean_last": 0.1}, "runs[0].tid.var_last is missing"),
        ("folder", "../elsewhere", "the run folder '../elsewhere' lies outside"),
    ],
)
def test_run_of_another_shape(
    comparison_folder: Path, key: str, value: object, message: str
) -> None:
    path = comparison_folder / RESULTS_FILE
    with edited(path) as results:
        results["runs"][0][key] = value
    with pytest.raises(InputError, match=re.escape(message)):
        read_comparison(comparison_folder)


def test_folder_that_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has neither results.json nor run folders"):
        read_comparison(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        read_comparison(tmp_path / "missing")


def test_single_run_points_to_its_comparison(comparison_folder: Path) -> None:
    with pytest.raises(InputError, match=f"a single run; give .*{comparison_folder.name}"):
        read_comparison(comparison_folder / BN)


def test_run_folder_with_a_name_of_its_own(comparison_folder: Path) -> None:
    folder = comparison_folder / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    read_comparison(comparison_folder)  # it may be a model of another library
    with pytest.raises(InputError, match=r"its name is not NORM-PLACEMENT-seedN or NORM-seedN"):
        read_runs(comparison_folder, ["mine"])


def test_numbers_that_nothing_can_hold(small_folder: Path) -> None:
    """They count as infinite, so that the run did not finish, and the page is written."""
    path = small_folder / RESULTS_FILE
    with edited(path) as results:
        first, second = results["runs"]
        first["metrics"]["test_perplexity"] = 10**400
        second["seconds"] = second["tokens_per_second"] = 10**400
    comparison = read_comparison(small_folder)
    first, _ = comparison.runs
    assert (first.metrics["test_perplexity"], first.shown_status) == (float("inf"), "nonfinite")
    table = run_table(comparison)
    rows = [dict(zip(table.headings, line, strict=True)) for line in table.lines]
    assert [rows[0]["test perplexity"], rows[1]["time"], rows[1]["tokens/s"]] == ["∞", "∞", "∞"]
    assert write_report([small_folder]).exists()
    path.write_text('{"format": 1' + 5000 * "0" + "}", encoding="utf-8")
    with pytest.raises(InputError, match=r"results.json: holds a number of thousands of digits"):
        read_comparison(small_folder)


def test_a_result_is_written_as_it_was_read(comparison_folder: Path) -> None:
    """Numbers too large for figures are kept; unknown keys are dropped."""
    path = comparison_folder / BN / RESULT_FILE
    change(path, metrics={"loss": 1e200, "first": None})
    values = json.loads(path.read_text())
    change(path, steps_per_second=3.0)
    assert written(read_record(RunResult, path, "", exact=True)) == values
    assert read_record(RunResult, path, "").metrics["loss"] == math.inf


@pytest.mark.parametrize(
    ("losses", "shown"),
    [
        ((8.0, 7.5, 7.2), "worse than a baseline"),
        ((8.0, 7.5, 9.0), "diverged"),
        ((8.0, 5.5, 7.2), "diverged"),
    ],
)
def test_a_run_that_never_rose_did_not_diverge(
    small_folder: Path, losses: tuple[float, ...], shown: str
) -> None:
    with edited(small_folder / RESULTS_FILE) as results:
        results["baselines"] = [{"name": "unigram", "metrics": {"valid_loss": 7.0}}]
        results["runs"][0] |= {"status": "diverged", "message": "the valid loss ended above"}
    log = small_folder / results["runs"][0]["folder"] / "metrics.csv"
    header = log.read_text(encoding="utf-8").splitlines()[0]
    columns = header.split(",")
    rows = [
        ",".join(
            {"step": "1", "tokens": "1", "valid_loss": str(loss)}.get(one, "") for one in columns
        )
        for loss in losses
    ]
    log.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    assert read_comparison(small_folder).runs[0].shown_status == shown


# Translations, tunings and functions.


@pytest.mark.parametrize(
    "text", ["source\treference\ttranslation\na\tb\tc\nd\te", "a\tb\tc\r\nd\te\tf"]
)
def test_last_line_may_be_half_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "translations.tsv"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_translations(tmp_path) == [("a", "b", "c")]


def test_damaged_translations_name_file_and_line(tmp_path: Path) -> None:
    folder = write_translations(tmp_path / "verses")
    path = folder / "ln-pre-seed0" / "translations.tsv"
    path.write_text("source\treference\ttranslation\na\tb\tc\na\tb\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"ln-pre-seed0/translations.tsv, line 3: 2 columns"):
        write_report([folder])


TUNED = Path(__file__).parents[4] / "benchmarks/results/papers/lm-demo-small-tuned"


def test_trials_of_another_file_are_none(tmp_path: Path) -> None:
    """A tuning may be stored without its trials."""
    shutil.copy(TUNED / RESULTS_FILE, tmp_path)
    assert trials_by_setting(read_comparison(tmp_path)) == []
    (tmp_path / TRIALS_FILE).write_text("norm,trial\nln,1\n")
    assert read_trials(tmp_path).empty


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_trials", "12", "tuning.num_trials is '12', expected a whole number"),
        ("select_by", {"metric": "valid_loss"}, "tuning.select_by.direction is missing"),
        ("norms", {"ln": {}}, "tuning.norms.ln.search is missing"),
    ],
)
def test_a_damaged_record_of_a_tuning_is_named(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    results = json.loads((TUNED / "results.json").read_text())
    results["tuning"][key] = value
    (tmp_path / "results.json").write_text(json.dumps(seal_json(results)))
    with pytest.raises(InputError, match=words):
        read_comparison(tmp_path)


def change_head(folder: Path, **values: Any) -> Path:
    """Write other values into both files of a comparison."""
    for name in (RESULTS_FILE, COMPARISON_FILE):
        change(folder / name, **values)
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"goal": {"metric": "accuracy", "direction": "up"}}, "goal.direction is 'up', expected"),
        ({"goal": {"direction": "max"}}, "goal.metric is missing"),
        ({"goal": "accuracy"}, "goal is 'accuracy', expected an object"),
        ({"function": "train"}, "function is 'train', expected an object"),
        ({"function": {"name": 3}}, "function.name is 3, expected a string"),
        ({"format": 3}, "format is 3, this version reads 2: update powernorm"),
    ],
)
@pytest.mark.parametrize("name", [RESULTS_FILE, COMPARISON_FILE])
def test_damaged_heads_are_named(
    tmp_path: Path, name: str, values: dict[str, Any], message: str
) -> None:
    folder = write_own_comparison(tmp_path / "own", norms=("ln",), seeds=(0,), lost=())
    change_head(folder, **values)
    if name == COMPARISON_FILE:
        (folder / RESULTS_FILE).unlink()
    with pytest.raises(InputError, match=re.escape(f"{name}: {message}")):
        read_comparison(folder)


def test_a_goal_must_be_said(tmp_path: Path) -> None:
    folder = write_own_comparison(tmp_path / "own", norms=("ln",), seeds=(0,), lost=())
    with edited(folder / RESULTS_FILE) as results:
        del results["goal"]
    with pytest.raises(InputError, match="goal is missing"):
        read_comparison(folder)
