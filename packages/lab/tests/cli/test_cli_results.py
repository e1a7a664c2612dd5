"""`powernorm results` and the figures of `report` as subprocesses."""

import re
from pathlib import Path

from lab.tests.report.synthetic import write_comparison

from commands import powernorm, refusal


def test_results_are_printed(tmp_path: Path) -> None:
    write_comparison(tmp_path / "demo")
    printed = powernorm(tmp_path, "results", "demo", fresh=True)
    assert (printed.code, printed.err) == (0, "")
    assert "### lm, demo" in printed.out
    twice = powernorm(tmp_path, "results", "demo", "demo")
    assert "demo and demo both have ln, seed 0, of one comparison" in twice.refused()
    write_comparison(tmp_path / "more", seeds=(7,))
    joined = powernorm(tmp_path, "results", "demo", "more")
    assert (joined.code, joined.out.count("### lm, demo")) == (0, 1)


def test_folders_without_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty has neither" in refusal(tmp_path, "results", "empty")


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


def test_figures_as_files(tmp_path: Path) -> None:
    write_comparison(tmp_path / "demo", norms=("ln", "bn"), seeds=(0,))
    wanted = ["report", "demo", "--figures", "figures", "--format", "svg, pdf"]
    outcome = powernorm(tmp_path, *wanted)
    assert (outcome.code, outcome.err) == (0, "")
    page, first, second, *_ = outcome.out.splitlines()
    assert page == "report: demo/report.html"
    what = "Training loss against tokens for ln, bn"
    assert [first, second] == [f"figures/curve-0.{form}: {what}" for form in ("svg", "pdf")]
    text = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert len(list((tmp_path / "figures").iterdir())) == 2 * text.count("<svg")


def test_figures_that_cannot_be_written(tmp_path: Path) -> None:
    write_comparison(tmp_path / "demo", norms=("ln",), seeds=(0,))
    (tmp_path / "file").touch()
    for options, words in (
        (["--figures", "new", "--format", "svg,eps"], "expected some of svg, pdf, png"),
        (["--format", "svg"], "give --figures DIR, too"),
        (["--figures", "file"], "file cannot be written"),
    ):
        assert words in refusal(tmp_path, "report", "demo", *options)
    assert not (tmp_path / "new").exists()
