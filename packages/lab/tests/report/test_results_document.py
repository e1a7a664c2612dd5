"""Documents of results, alone and joined from several folders."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lab.tests.report.own_functions import FUNCTION, write_own_comparison
from lab.tests.report.synthetic import PAPER, edited, write_comparison
from markdown_it import MarkdownIt

from powernorm.errors import InputError
from powernorm_lab.report import read_comparison
from powernorm_lab.report.comparison_tables import headline
from powernorm_lab.report.results_document import joined, results_document
from powernorm_lab.runs import RESULTS_FILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write four seeds with published results, as `results.json` only, like stored results."""
    whole = write_comparison(
        tmp_path / "whole",
        norms=("ln", "bn", "rbn"),
        seeds=(0, 1, 2, 3),
        extra_settings={"date": "2026-11-22"},
        paper=PAPER,
        reduced="A smaller model.",
    )
    kept = tmp_path / "kept"
    kept.mkdir()
    (whole / RESULTS_FILE).rename(kept / RESULTS_FILE)
    return kept


def lines_of(text: str, norm: str) -> list[list[str]]:
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| {norm} |")]
    return [[cell.strip("| ") for cell in row] for row in rows]


def test_papers_numbers_beside_marked_runs_and_failed_scores(folder: Path) -> None:
    with edited(folder / RESULTS_FILE) as results:
        for run in results["runs"]:
            run["remark"] = "sees the future"
        results["goal"] = {"metric": "test_bleu", "direction": "max"}
        failed = {"metric": "test_bleu", "value": 0.0}
        results["paper"] = [record | failed for record in PAPER if record["norm"] == "rbn"]
    text = results_document([folder])
    (row,) = lines_of(text, "rbn (sees the future)")
    assert row[1] == "0, failed (Shen et al. 2020, Table 2)"
    assert "not run" not in text


def test_a_baseline_without_the_measure_has_no_row(folder: Path) -> None:
    with edited(folder / RESULTS_FILE) as results:
        del results["baselines"][0]["metrics"]["test_perplexity"]
    text = results_document([folder])
    assert not lines_of(text, "unigram (baseline)")
    assert lines_of(text, "bigram (baseline)")


def test_a_papers_decimals_are_those_of_its_column(folder: Path) -> None:
    values = {"ln": 77.5, "rbn": 77.21, "pnv": 76.0}
    with edited(folder / RESULTS_FILE) as results:
        results["paper"] = [record | {"value": values[str(record["norm"])]} for record in PAPER]
        # Of another paper, which prints one.
        results["paper"] += [PAPER[0] | {"source": "Wang et al. 2022, Table 2", "value": 75.0}]
    text = results_document([folder])
    papers = "77.50 (Shen et al. 2020, Table 2); 75.0 (Wang et al. 2022, Table 2)"
    assert lines_of(text, "ln")[0][1] == papers
    assert lines_of(text, "pnv")[0][1] == "76.00 (Shen et al. 2020, Table 2)"


def test_a_model_with_one_place_for_its_norms_has_no_placement(folder: Path) -> None:
    assert "`powernorm compare lm --preset demo`, pre-norm;" in results_document([folder])
    with edited(folder / RESULTS_FILE) as results:
        results["task"] = "image"
    assert "`powernorm compare image --preset demo`; the measure" in results_document([folder])
    assert headline(read_comparison(folder)) == "image · demo"


HOSTILE = (
    '| a ||\n\n| b |\n---\n# c\n- d\r\n<script>e()</script><b onclick="f">g</b> &lt; '
    "[h](javascript:i) ![j](https://k.l) [m]: n\n`o` ``p`` **q** __r__ _s_ ~~t~~ $u$ https://v.w "
    "www.x.y <z@a.b> "
    "\\\\| <!-- end --> <!-- begin --> \u2028 \\"
)
KEPT = ("status", "placement", "metric", "direction", "folder")
"""Keys whose values are restricted: enumerations, and paths that must be inside the folder."""


def made_hostile(value: Any, key: str = "") -> Any:
    """Return the value with hostile suffixes in all of its strings."""
    if isinstance(value, dict):
        return {name: made_hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [made_hostile(item, key) for item in value]
    return value + HOSTILE if isinstance(value, str) and key not in KEPT else value


def check_page(text: str, num_sections: int) -> None:
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    kinds = Counter(token.type for token in tokens)
    inside = Counter(part.type for token in tokens for part in token.children or ())
    assert kinds["heading_open"] == num_sections
    allowed = {"heading", "paragraph", "table", "thead", "tbody", "tr", "th", "td"}
    assert {kind.rpartition("_")[0] or kind for kind in kinds} <= allowed | {"inline"}
    assert set(inside) <= {"text", "code_inline", "softbreak", "text_special"}
    assert kinds["table_open"] == 2 * num_sections
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert kinds["tr_open"] == len(rows) - kinds["table_open"]
    columns, widths = 0, []
    for token in tokens:
        columns = 0 if token.type == "tr_open" else columns + (token.type in ("th_open", "td_open"))
        widths += [columns] if token.type == "tr_close" else []
    assert set(widths) == {8, 9}
    shown = "".join(
        part.content for token in tokens for part in token.children or () if part.type == "text"
    )
    assert "<script>e()</script>" in shown
    plain = re.sub(r"(`+).*?[^`]\1(?!`)", "", text)
    assert not re.search(r"[^\\]://|www[^\\]", plain)


def test_texts_of_a_file_stay_texts(folder: Path) -> None:
    """Results may come from others, and their pages are read in a browser."""
    with edited(folder / RESULTS_FILE) as results:
        for run in results["runs"]:
            run["remark"] = "sees the future"
        results["paper"][1]["against"] = ["ln"]
        results["settings"]["machine"] = {"num_cpus": 2, "num_threads": 1, "gpu": "x"}
        results |= made_hostile(results)
    text = results_document([folder])
    check_page(text, 1)


@pytest.mark.parametrize("value", ["x", 3, [1], True, None])
def test_facts_of_another_kind_are_left_out(folder: Path, value: object) -> None:
    for key in ("machine", "versions"):
        with edited(folder / RESULTS_FILE) as results:
            results["settings"] |= {"machine": {"num_cpus": 2}, "versions": {}, key: value}
        assert "### lm, demo" in results_document([folder])


# Comparisons whose seeds or norms were trained in several folders.


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
        with edited(folder / RESULTS_FILE) as results:
            results["reduced"] = "Small."
            results["changes"] = {"preset": "full", "settings": common | settings}
            if folder != parts[0]:
                results["paper"] = paper
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
        with edited(folder / RESULTS_FILE) as results:
            results["reduced"] = note
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


@pytest.mark.parametrize(
    "other",
    [
        {"goal": {"metric": "valid_loss", "direction": "min"}},
        {"goal": {"metric": "accuracy", "direction": "min"}},
        {"task": "my.module:other"},
        {"function": FUNCTION | {"sha256": "f" * 64}},
    ],
)
def test_other_goals_and_functions_stand_by_themselves(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    one = write_own_comparison(tmp_path / "a", seeds=(0, 1), lost=())
    two = write_own_comparison(tmp_path / "b", seeds=(2, 3), lost=(), **other)
    assert len(joined(map(read_comparison, (one, two)))) == 2


def test_seeds_of_one_function_are_put_together(tmp_path: Path) -> None:
    """The function's file may have another path on another machine."""
    moved = FUNCTION | {"file": "elsewhere/module.py"}
    one = write_own_comparison(tmp_path / "a", seeds=(0, 1), lost=())
    two = write_own_comparison(tmp_path / "b", seeds=(2, 3), lost=(), function=moved)
    (together,) = joined(map(read_comparison, (one, two)))
    assert len(together.runs) == 12
