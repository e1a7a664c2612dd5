"""Reading of `diagnosis.json`: round trips, and errors about damaged files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.tests.report.synthetic_diagnoses import bert_diagnosis, small_diagnosis, write_diagnosis

from powernorm.errors import InputError
from powernorm_lab.report import read_comparison, read_diagnosis
from powernorm_lab.runs import DIAGNOSIS_FILE


@pytest.mark.parametrize("record", [bert_diagnosis(), small_diagnosis()], ids=["bert", "small"])
def test_what_was_written_is_read(tmp_path: Path, record: Any) -> None:
    assert read_diagnosis(write_diagnosis(tmp_path, record)) == record


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
    record: Any = json.loads(json.dumps(bert_diagnosis()))
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
