import json
from pathlib import Path

import pytest

from powernorm_lab.engine.logs import CsvLog, JsonLinesLog, MergedLog

COLUMNS = ("step", "loss", "rate")


def test_rows_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with CsvLog(path, COLUMNS) as log:
        assert path.read_text() == "step,loss,rate\n"
        log.write({"step": 1, "loss": 0.5, "rate": None})
        assert path.read_text().splitlines() == ["step,loss,rate", "1,0.5,"]


def test_a_new_column_is_appended_also_by_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with CsvLog(path, COLUMNS) as log:
        log.write({"step": 1, "loss": 2})
        log.write({"step": 2, "speed": 3})
    assert path.read_text().splitlines() == ["step,loss,rate,speed", "1,2,,", "2,,,3"]
    with CsvLog(path, COLUMNS, last_step=1) as log:
        log.write({"step": 2, "loss": 4, "speed": 5})
    assert path.read_text().splitlines() == ["step,loss,rate,speed", "1,2,,", "2,4,,5"]


def test_a_log_that_goes_on_drops_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n1,a\n2,b\n2,c\n3,d\n4")  # the last line was cut off
    with CsvLog(path, COLUMNS, last_step=2) as log:
        log.write({"step": 3, "loss": "e"})
    assert path.read_text().splitlines() == ["step,loss,rate", "1,a,", "2,b,", "2,c,", "3,e,"]


@pytest.mark.parametrize("last_step", [None, 5])
def test_a_new_log_starts_empty(tmp_path: Path, last_step: int | None) -> None:
    path = tmp_path / "log.csv"
    if last_step is None:
        path.write_text("step,loss\n1,a\n")
    CsvLog(path, COLUMNS, last_step).close()
    assert path.read_text() == "step,loss,rate\n"


def test_cells_of_one_step_share_a_row(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with CsvLog(path, COLUMNS) as log:
        merged = MergedLog(log)
        merged.flush()
        merged.add(1, {"loss": 0.5})
        merged.add(1, {"rate": 2})
        merged.add(2, {"loss": 0.4})
        assert len(path.read_text().splitlines()) == 2
        merged.flush()
        merged.flush()
    assert path.read_text().splitlines() == ["step,loss,rate", "1,0.5,2", "2,0.4,"]


def test_lines_of_json_that_go_on_drop_those_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLinesLog(path)
    assert not path.exists()
    for step in (0, 2, 4):
        log.write({"step": step, "text": "line\nend"})
    with path.open("a") as file:
        file.write('no json\n{"step": 2, "te')  # the last line was cut off
    JsonLinesLog(path, last_step=2).write({"step": 3, "text": ""})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert rows[0]["text"] == "line\nend"
    JsonLinesLog(path)
    assert not path.exists()
