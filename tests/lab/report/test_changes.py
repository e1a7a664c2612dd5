"""Settings that are not the preset's: a table of their own, and marked where they stand."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.report.synthetic import printed, write_comparison
from powernorm.errors import InputError
from powernorm.lab.report import read_comparison, write_report
from powernorm.lab.report.results_document import results_document
from powernorm.runs import RESULTS_FILE

NOTE = "A reduced big. The text is an embedded one, not the Penn Treebank."
CHANGES = {
    "preset": "big",
    "settings": {
        "model.num_layers": {"here": 3, "preset": 6},
        "optimizer.clip_norm": {"here": 0.1, "preset": None},
        "norm_options.pn.groups": {"here": 4},
        "optimizer.betas": {"here": [0.9, 0.98], "preset": [0.9, 0.999]},
    },
}
NEW = {"reduced": NOTE, "changes": CHANGES}


def write(folder: Path, said: dict[str, Any]) -> Path:
    """A comparison whose results say this of the preset."""
    write_comparison(folder, norms=("ln",), seeds=(0,))
    path = folder / RESULTS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return folder


@pytest.mark.usefixtures("blank_figures")
def test_page_marks_and_lists_them(tmp_path: Path) -> None:
    page = write_report(write(tmp_path / "demo", NEW)).read_text(encoding="utf-8")
    settings = page[page.index('id="settings"') :]
    assert settings.count('<tr class="changed">') == 1
    assert "3 (preset: 6)" in settings
    assert "Marked: not as in the preset big" in settings
    results = page[page.index('id="results"') : page.index('id="curves"')]
    assert f'<p class="reduced">{NOTE}</p>' in results
    assert "clip_norm</th><td>0.1</td><td>None</td>" in results
    assert "groups</th><td>4</td><td>its default</td>" in results
    assert "optimizer.clip\\_norm &amp; 0.1 &amp; None" in results
    assert "in place of" not in page


def test_terminal_and_markdown_list_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "demo", NEW)
    shown = printed(folder, 100)
    assert NOTE in shown
    assert "4 settings differ from the preset big:" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["setting", "here", "big"] in lines
    assert ["model.num_layers", "3", "6"] in lines
    page = results_document([folder])
    assert "4 settings differ from the preset big, as listed below." in page
    assert "| model.num_layers | 3 | 6 |" in page
    assert "| norm_options.pn.groups | 4 | its default |" in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], "changes is [], expected an object"),
        ({"preset": "big"}, "changes.settings is missing"),
        ({"preset": 1, "settings": {}}, "changes.preset is 1, expected a string"),
        (
            {"preset": "big", "settings": {"seeds": 3}},
            "changes.settings.seeds is 3, expected an object",
        ),
    ],
)
def test_damaged_changes_are_named(tmp_path: Path, changes: Any, words: str) -> None:
    folder = write(tmp_path / "demo", {"changes": changes})
    with pytest.raises(InputError) as caught:
        read_comparison(folder)
    assert words in str(caught.value)
