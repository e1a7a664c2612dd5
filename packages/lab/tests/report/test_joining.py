"""Comparisons whose seeds or norms were trained in several folders."""

import json
from pathlib import Path

import pytest
from synthetic import write_comparison

from powernorm.errors import InputError
from powernorm_lab.report.loading import read_comparison
from powernorm_lab.report.results_document import joined, results_document
from powernorm_lab.runs import RESULTS_FILE

OPTIONS = {"ln": {}, "bn": {"momentum": 0.05}}


def part(folder: Path, norms: tuple[str, ...], seeds: tuple[int, ...], **settings: object) -> Path:
    options = {norm: OPTIONS[norm] for norm in norms}
    return write_comparison(
        folder,
        norms=norms,
        seeds=seeds,
        extra_settings={"norm_options": options, "date": "2026-11-21", **settings},
    )


def test_seeds_and_norms_of_several_folders_are_one_comparison(tmp_path: Path) -> None:
    whole = part(tmp_path / "whole", ("ln", "bn"), (0, 2, 3))
    parts = [
        part(tmp_path / "a", ("ln", "bn"), (0, 2)),
        part(tmp_path / "b", ("ln",), (3,), date="2026-11-20"),
        part(tmp_path / "c", ("bn",), (3,)),
    ]
    expected = results_document([whole])
    (together,) = joined(map(read_comparison, parts))
    assert together.settings["norm_options"] == OPTIONS
    assert together.settings["date"] == "2026-11-20 to 2026-11-21"
    assert results_document(parts) == expected.replace("2026-11-21", "2026-11-20 to 2026-11-21")


def test_changes_of_options_of_their_norms_are_put_together(tmp_path: Path) -> None:
    paper = [
        {"norm": "ln", "placement": "pre", "dataset": "PTB", "metric": "test_perplexity"}
        | {"value": 1.0, "source": "A 2020, Table 1"}
    ]
    parts = [
        part(tmp_path / "a", ("ln",), (0,)),
        part(tmp_path / "b", ("bn",), (0,)),
        part(tmp_path / "c", ("bn",), (2,)),
    ]
    common = {"model.num_layers": {"here": "3", "preset": "6"}}
    momentum = {"norm_options.bn.momentum": {"here": "0.05", "preset": "0.1"}}
    own = [{"norm_options.ln.eps": {"here": "1", "preset": "2"}}, momentum, momentum]
    for folder, settings in zip(parts, own, strict=True):
        results = json.loads((folder / RESULTS_FILE).read_text())
        results["reduced"] = "Small."
        results["changes"] = {"preset": "full", "settings": common | settings}
        if folder != parts[0]:
            results["paper"] = paper
        (folder / RESULTS_FILE).write_text(json.dumps(results))
    (together,) = joined(map(read_comparison, parts))
    assert len(together.paper) == 1
    assert together.reduced == "Small."
    assert together.changes == {
        "preset": "full",
        "settings": {
            "model.num_layers": {"here": "3", "preset": "6"},
            "norm_options.ln.eps": {"here": "1", "preset": "2"},
            "norm_options.bn.momentum": {"here": "0.05", "preset": "0.1"},
        },
    }


def test_a_sentence_of_two_notes_is_said_once(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a", ("ln",), (0,)), part(tmp_path / "b", ("bn",), (0,))]
    notes = (
        "A reduced big. Shen et al. 2020 have pre-norm only.",
        "bn: without the mask. A reduced big. Shen et al. 2020 have pre-norm only.",
    )
    for folder, note in zip(parts, notes, strict=True):
        results = json.loads((folder / RESULTS_FILE).read_text())
        (folder / RESULTS_FILE).write_text(json.dumps(results | {"reduced": note}))
    (together,) = joined(map(read_comparison, parts))
    assert together.changes is None
    assert together.reduced == (
        "A reduced big. Shen et al. 2020 have pre-norm only. bn: without the mask."
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_options": {"ln": {}, "bn": {"momentum": 0.1}}},
        {"model": {"num_features": 64, "placement": "pre"}},
        {"versions": {"torch": "2.12.0"}},
        {"machine": {"gpu": "another"}},
        {"norm_options": {}},
    ],
)
def test_what_was_made_otherwise_stands_by_itself(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    one = part(tmp_path / "a", ("ln", "bn"), (0,))
    other = part(tmp_path / "b", ("ln", "bn"), (2,), **settings)
    separate = joined(map(read_comparison, (one, other)))
    assert [len(comparison.runs) for comparison in separate] == [2, 2]


def test_a_run_is_given_once(tmp_path: Path) -> None:
    one = part(tmp_path / "a", ("ln", "bn"), (0, 2))
    other = part(tmp_path / "b", ("bn",), (2,))
    with pytest.raises(InputError, match=r"a and .*b both have bn, seed 2, of one comparison"):
        results_document([one, other])
    with pytest.raises(InputError, match="both have ln, seed 0"):
        results_document([one, one])
