"""Settings that are not the preset's, marked where they stand."""

import json
from pathlib import Path

import pytest

from lab.report.synthetic import write_comparison
from powernorm.lab.report import write_report
from powernorm.lab.report.changes import changes_of
from powernorm.runs import RESULTS_FILE

NOTE = (
    "A reduced big. The text is an embedded one, not the Penn Treebank. Against the preset big: "
    "model.num_layers 3 in place of 6, optimizer.clip_norm 0.1 in place of None, "
    "norm_options.pn.groups 4 in place of its default, optimizer.betas (0.9, 0.98) in place of "
    "(0.9, 0.999)."
)


def test_each_setting_has_both_values() -> None:
    found = changes_of(NOTE)
    assert found.note == "A reduced big. The text is an embedded one, not the Penn Treebank."
    assert (found.preset, found.settings) == (
        "big",
        {
            "model.num_layers": ("3", "6"),
            "optimizer.clip_norm": ("0.1", "None"),
            "norm_options.pn.groups": ("4", "its default"),
            "optimizer.betas": ("(0.9, 0.98)", "(0.9, 0.999)"),
        },
    )


@pytest.mark.parametrize("text", ["", "A reduced big.", "Against the preset big: other words."])
def test_other_notes_stay_as_they_are(text: str) -> None:
    assert (changes_of(text).note, changes_of(text).settings) == (text, {})


@pytest.mark.usefixtures("blank_figures")
def test_their_rows_are_marked(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "demo", norms=("ln",), seeds=(0,))
    written = json.loads((folder / RESULTS_FILE).read_text())
    (folder / RESULTS_FILE).write_text(json.dumps(written | {"reduced": NOTE}))
    page = write_report(folder).read_text(encoding="utf-8")
    settings = page[page.index('id="settings"') :]
    assert settings.count('<tr class="changed">') == 1
    assert "3 (preset: 6)" in settings
    assert "Marked: not as in the preset big" in settings
    results = page[page.index('id="results"') : page.index('id="curves"')]
    assert "clip_norm</th><td>0.1</td><td>None</td>" in results
    assert "in place of" not in page
