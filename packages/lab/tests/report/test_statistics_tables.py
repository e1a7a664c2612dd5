"""TID and scores by kind of statistics next to published ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_comparison
from synthetic_diagnoses import bert_diagnosis, write_diagnosis
from syrupy.assertion import SnapshotAssertion

from powernorm.errors import InputError
from powernorm.records import DiagnosisRecord, EvaluationRow, PaperStatistic
from powernorm_lab.report import read_comparison, read_diagnosis, render_diagnosis, render_page
from powernorm_lab.report.paper_tables import evaluation_table, paper_table, score_tables, tid_table
from powernorm_lab.report.results_document import joined
from powernorm_lab.runs import RESULTS_FILE

pytestmark = pytest.mark.usefixtures("blank_figures")


def scored_diagnosis(bleu: float) -> DiagnosisRecord:
    """Return scores with running, re-estimated and batch statistics of two sizes."""
    record = bert_diagnosis()
    kinds: list[tuple[str, int | None, float]] = [
        ("running", None, bleu),
        ("re-estimated", None, bleu + 1),
        ("re-estimated in one pass", None, bleu + 2),
        ("batch", 512, bleu + 3),
        ("batch", 1024, bleu + 4),
    ]
    record["evaluation"] = []
    for statistics, size, score in kinds:
        row = EvaluationRow(
            statistics=statistics,
            tokens=None if size is None else size - 12,
            loss=2.0,
            scores={"test_bleu": score + 0.5, "test_bleu_tokenised": score},
        )
        if size is not None:
            row["size"] = size
        record["evaluation"].append(row)
    return record


def paper(norm: str = "bn") -> list[PaperStatistic]:
    shared: dict[str, Any] = {"norm": norm, "placement": "pre", "dataset": "IWSLT14 De-En"}
    tid = {"mean_last": 3.4, "var_last": 4.6, "mean_avg": 3.2, "var_avg": 5.5}
    scores: list[tuple[str, int | None, float]] = [
        ("running", None, 34.8),
        ("re-estimated in one pass", None, 34.9),
        ("batch", 512, 27.2),
    ]
    rows = [
        PaperStatistic(**shared, metric=metric, value=value, source="Wang et al. 2022, Table 4")
        for metric, value in tid.items()
    ]
    for statistics, size, value in scores:
        row = PaperStatistic(
            **shared,
            metric="test_bleu_tokenised",
            value=value,
            source="Wang et al. 2022, Table 7",
            statistics=statistics,
        )
        if size is not None:
            row["size"] = size
        rows.append(row)
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two scored norms with two seeds; the paper has results of the first."""
    out = write_comparison(tmp_path / "runs", norms=("rbn", "adanorm"))
    for seed in (0, 1):
        write_diagnosis(out / f"rbn-pre-seed{seed}", scored_diagnosis(20.0 + 2 * seed))
    path = out / RESULTS_FILE
    results = json.loads(path.read_text())
    record = {"norm": "rbn", "placement": "pre", "dataset": "IWSLT14 De-En", "value": 35.6}
    record |= {"metric": "test_bleu_tokenised", "source": "Wang et al. 2022, Table 2"}
    more = {"paper": [record], "paper_statistics": paper("rbn")}
    path.write_text(json.dumps(results | more))
    return out


def test_the_tables_of_a_comparison(folder: Path, snapshot: SnapshotAssertion) -> None:
    """Norms without scores have no column; the paper's measure replaces the goal."""
    comparison = read_comparison(folder)
    shown = [f"{heading}\n{table.markdown()}" for heading, table in score_tables([comparison])]
    assert "\n".join([*shown, paper_table(comparison).markdown()]) == snapshot
    assert "Scores by kind of statistics" in render_page(comparison)
    # Parts of one comparison keep them.
    (whole,) = joined([comparison])
    assert len(whole.paper_statistics) == 7


def test_without_scores_there_are_no_tables(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "runs", norms=("rbn",))
    assert score_tables([read_comparison(out)]) == []
    write_diagnosis(out / "rbn-pre-seed0", bert_diagnosis())
    assert score_tables([read_comparison(out)]) == []
    assert "Scores by kind" not in str(render_page(read_comparison(out)))


def test_a_diagnosis_beside_the_paper(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    record = scored_diagnosis(20.0)
    record["paper"] = paper()
    read = read_diagnosis(write_diagnosis(tmp_path, record))
    assert read == record
    tid = tid_table(read)
    assert tid is not None
    tables = (evaluation_table(read), tid)
    assert "\n".join(table.markdown() for table in tables) == snapshot
    page = render_diagnosis(read)
    assert all(table.html("", "").partition("<tbody>")[2] in page for table in tables)
    assert tid_table(bert_diagnosis()) is None


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("evaluation", 3, "size"), "big", r"evaluation\[3\]\.size is 'big'"),
        (("evaluation", 0, "scores"), [1], r"evaluation\[0\]\.scores is \[1\]"),
        (("paper", 0, "value"), None, r"paper\[0\]\.value is null"),
        (("paper", 0, "placement"), "mid", r"paper\[0\]\.placement is 'mid'"),
    ],
)
def test_damaged_files(
    tmp_path: Path, place: tuple[str, int, str], value: object, words: str
) -> None:
    record: Any = scored_diagnosis(20.0)
    record["paper"] = paper()
    record[place[0]][place[1]][place[2]] = value
    with pytest.raises(InputError, match=words):
        read_diagnosis(write_diagnosis(tmp_path, record))
