"""Reading of `diagnosis.json` and `diagnoses.jsonl`: round trips, and damaged files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.tests.report.synthetic_diagnoses import (
    bert_diagnosis,
    paper_statistics,
    scored_diagnosis,
    small_diagnosis,
    write_diagnosis,
)

from powernorm.errors import InputError
from powernorm_lab.report import read_comparison, read_diagnosis
from powernorm_lab.report.loading import read_diagnoses
from powernorm_lab.runs import DIAGNOSES_FILE, DIAGNOSIS_FILE


@pytest.mark.parametrize("kind", ["bert", "small", "scored"])
def test_a_diagnosis_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    scored = scored_diagnosis(20.0) | {"paper": paper_statistics()}
    record = {"bert": bert_diagnosis(), "small": small_diagnosis(), "scored": scored}[kind]
    assert read_diagnosis(write_diagnosis(tmp_path, record)) == record  # type: ignore[arg-type]


def test_a_layer_keeps_what_else_it_has(tmp_path: Path) -> None:
    record = small_diagnosis()
    record["layers"][0]["eigenvalues"] = [2.0, 1.0]
    read = read_diagnosis(write_diagnosis(tmp_path, record))
    assert read["layers"][0]["eigenvalues"] == [2.0, 1.0]


def test_a_run_has_its_diagnosis(comparison_folder: Path) -> None:
    write_diagnosis(comparison_folder / "bn-pre-seed0", small_diagnosis())
    runs = {run.folder: run for run in read_comparison(comparison_folder).runs}
    assert runs["bn-pre-seed0"].diagnosis == small_diagnosis()
    assert runs["bn-pre-seed1"].diagnosis is None


def damaged(tmp_path: Path, place: tuple[str | int, ...], value: object) -> Path:
    """Write a file with a changed value; None deletes the key."""
    scored = "size" in place or place[0] in ("paper", "scores") or "scores" in place
    whole = scored_diagnosis(20.0) | {"paper": paper_statistics()} if scored else bert_diagnosis()
    record: Any = json.loads(json.dumps(whole))
    target = record
    for key in place[:-1]:
        target = target[key]
    if value is ...:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    path = tmp_path / DIAGNOSIS_FILE
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("format",), 2, "format is 2, this version reads 1: update powernorm if a newer version"),
        (("model",), 3, "model is 3, expected a string"),
        (("step",), "last", "step is 'last', expected a whole number"),
        (("padding",), None, "padding is null, expected a number"),
        (("layers",), {}, "layers is {}, expected a list"),
        (("layers", 3), 7, "layers[3] is 7, expected an object"),
        (("layers", 3, "var_tid"), "x", "layers[3].var_tid is 'x', expected a number"),
        (("layers", 3, "kappa_50"), ..., "layers[3].kappa_50 is missing"),
        (("layers", 0, "reason"), 1.5, "layers[0].reason is 1.5, expected a string"),
        (
            ("verdict", "action"),
            "drop",
            "verdict.action is 'drop', expected 'keep', 'swap' or",
        ),
        (("verdict", "reasons", 1), 2, "verdict.reasons[1] is 2, expected a string"),
        (
            ("verdict", "thresholds", 0, "limit"),
            "5 %",
            "verdict.thresholds[0].limit is '5 %', expected a number",
        ),
        (("batch_sizes", 5, "tokens"), 1.5, "batch_sizes[5].tokens is 1.5, expected a whole"),
        (("spectra", 1, "values", 2), None, "spectra[1].values[2] is null, expected a number"),
        (("scales", 0, "weight"), [1.0], "scales[0].weight has 1 values, deviation 768"),
        (("evaluation", 0, "loss"), None, "evaluation[0].loss is null, expected a number"),
        (("notes",), "none", "notes is 'none', expected a list"),
        (("evaluation", 3, "size"), "big", "evaluation[3].size is 'big'"),
        (("evaluation", 0, "scores"), [1], "evaluation[0].scores is [1]"),
        (("paper", 0, "value"), None, "paper[0].value is null"),
        (("paper", 0, "placement"), "mid", "paper[0].placement is 'mid'"),
    ],
)
def test_damage_is_named_by_file_and_key(
    tmp_path: Path, place: tuple[str | int, ...], value: object, message: str
) -> None:
    path = damaged(tmp_path, place, value)
    with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
        read_diagnosis(path)


def test_truncated_file(tmp_path: Path) -> None:
    path = write_diagnosis(tmp_path, small_diagnosis())
    path.write_text(path.read_text(encoding="utf-8")[:400], encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1: not JSON .*run `powernorm diagnose` again"):
        read_diagnosis(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(key=st.sampled_from(sorted(small_diagnosis())), value=json_values)
def test_any_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    record = dict(small_diagnosis()) | {key: value}
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    refusal = ""
    read: object = None
    try:
        read = read_diagnosis(path)
    except InputError as error:
        refusal = str(error)
    assert (str(path) in refusal) == (read is None)


def test_a_damaged_line_of_diagnoses_is_named(tmp_path: Path) -> None:
    file = tmp_path / DIAGNOSES_FILE
    assert read_diagnoses(file) == []
    file.write_text(json.dumps(small_diagnosis()) + "\n")
    whole = file.read_text()
    assert read_diagnoses(file) == [small_diagnosis()]
    # A line that is still being written.
    file.write_text(whole + '{"format": 1')
    assert len(read_diagnoses(file)) == 1
    for damaged, words in (
        ("[]\n", "diagnoses.jsonl, line 2: the file is .., expected an object"),
        ("no json\n", "diagnoses.jsonl, line 2: not JSON"),
        ('{"format": 9}\n', "line 2: format is 9, this version reads 1"),
        (whole.replace('"num_tokens"', '"tokens"'), "line 2: num_tokens is missing"),
    ):
        file.write_text(whole + damaged)
        with pytest.raises(InputError, match=words.replace("[", r"\[")):
            read_diagnoses(file)
