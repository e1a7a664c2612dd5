"""Study of causality: the built-in study has the settings of the stored runs."""

import json
import runpy
from pathlib import Path
from typing import Any

import powernorm_lab as lab
from powernorm_lab.comparing import notes_of
from powernorm_lab.report.studies import study_figures
from powernorm_lab.tasks.builtin import comparison_settings

STUDY = Path(__file__).parents[2] / "studies" / "causality"
STORED = STUDY / "results" / "results.json"


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def test_settings_are_those_of_the_stored_runs() -> None:
    results = stored()
    config = lab.study_config("lm", "future", "reduced")
    found = json.loads(json.dumps(comparison_settings(config)))
    for other in ("versions", "machine", "date"):
        del found[other], results["settings"][other]
    assert found == results["settings"]
    notes = notes_of(config)
    assert sorted(map(str, notes.paper)) == sorted(map(str, results["paper"]))
    assert "its perplexity is that of no language model" in str(notes.reduced)
    assert "signs of their differences to LayerNorm" in str(notes.reduced)


def test_stored_results_have_their_figures() -> None:
    comparison = lab.read_comparison(STORED.parent)
    assert comparison.study is not None
    assert comparison.study["name"] == "future"
    shown = [f"{one.svg}{one.caption}" for one in study_figures(comparison)]
    assert len(shown) == 2
    for word in ("causal", "sees the future", "Test perplexity", "gap to ln of its form"):
        assert word in "".join(shown)


def test_figure_is_drawn_from_the_stored_results(tmp_path: Path) -> None:
    draw = runpy.run_path(str(STUDY / "figure.py"))["draw"]
    draw(lab.read_comparison(STORED.parent), tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
