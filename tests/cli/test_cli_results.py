"""`powernorm results`, `fluctuation`, `curves` and `figures` as subprocesses."""

import re
from pathlib import Path

from commands import powernorm, refusal
from lab.report.synthetic import write_comparison


def test_results_are_printed(tmp_path: Path) -> None:
    write_comparison(tmp_path / "demo")
    printed = powernorm(tmp_path, "results", "demo", fresh=True)
    assert (printed.code, printed.err) == (0, "")
    assert "### lm, demo" in printed.out
    twice = powernorm(tmp_path, "results", "demo", "demo")
    assert "demo and demo both hold ln, seed 0, of one comparison" in twice.refused()
    write_comparison(tmp_path / "more", seeds=(7,))
    joined = powernorm(tmp_path, "results", "demo", "more")
    assert (joined.code, joined.out.count("### lm, demo")) == (0, 1)


def test_folders_without_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty holds neither" in refusal(tmp_path, "results", "empty")


def test_tables_are_files(tmp_path: Path) -> None:
    write_comparison(tmp_path / "demo", seeds=(0, 1, 2))
    outcome = powernorm(tmp_path, "report", "demo", "--tables", "tables")
    assert outcome.out.splitlines()[-1] == "report: demo/report.html"
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {f"{n}.{e}" for n in ("results", "runs", "seeds") for e in ("md", "tex", "csv")}
    (ln,) = re.findall(r"^ln,.*", (tmp_path / "tables" / "results.csv").read_text(), re.MULTILINE)
    assert ln.startswith("ln,1.23M,102.0 ± 2.0,102.0 ± 2.0,–,")
    write_comparison(tmp_path / "more", seeds=(7,))
    assert powernorm(tmp_path, "report", "demo", "more", "--tables", "tables").code == 0
    assert (tmp_path / "tables" / "1-results.md").is_file()
    (tmp_path / "file").touch()
    assert "give another" in refusal(tmp_path, "report", "demo", "--tables", "file")


def test_figures(tmp_path: Path) -> None:
    write_comparison(tmp_path / "demo", norms=("ln", "bn"), seeds=(0,))
    assert powernorm(tmp_path, "report", "demo").code == 0
    outcome = powernorm(tmp_path, "figures", "demo", "--out", "figures", fresh=True)
    assert (outcome.code, outcome.err) == (0, "")
    first = outcome.out.splitlines()[0]
    assert first == "figures/curve-0.svg: Training loss against training tokens for ln, bn"
    assert (tmp_path / "figures" / "curve-0.svg").is_file()
    assert "none.html cannot be read" in refusal(tmp_path, "figures", "none.html")
