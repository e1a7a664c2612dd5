"""Figures of a page as files: what a reader of SVG other than a browser needs is in them."""

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.report.synthetic import write_comparison
from powernorm.errors import InputError
from powernorm.lab.report import write_report
from powernorm.lab.report.figure_files import save_figures

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report, which takes seconds to draw."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    return write_report(write_comparison(folder, norms=("ln", "bn"), seeds=(0,)))


def test_every_figure_of_the_page(page: Path, tmp_path: Path) -> None:
    written = save_figures(page.parent, tmp_path / "figures")
    assert len(written) == page.read_text(encoding="utf-8").count("<svg")
    assert list(written) == list(save_figures(page, tmp_path / "figures"))
    curve = tmp_path / "figures" / "curve-0.svg"
    assert written[curve] == "Training loss against training tokens for ln, bn"
    assert any(file.name.startswith("heat") for file in written)


def test_each_stands_alone(page: Path, tmp_path: Path) -> None:
    for file in save_figures(page, tmp_path):
        text = file.read_text(encoding="utf-8")
        # The page's colors, its script's data and the short form of links are the page's alone.
        assert not [word for word in ("var(", "currentColor", "data-", " href=") if word in text]
        root = ElementTree.parse(file).getroot()
        assert root.tag == f"{SVG}svg"
        width, height = root.attrib["viewBox"].split()[2:]
        assert (root.attrib["width"], root.attrib["height"]) == (f"{width}pt", f"{height}pt")
        assert root[0].tag == f"{SVG}rect"
        assert root[0].attrib["fill"] == "#ffffff"


def test_the_colors_are_those_of_the_light_page(page: Path, tmp_path: Path) -> None:
    save_figures(page, tmp_path)
    text = (tmp_path / "curve-0.svg").read_text(encoding="utf-8")
    assert "stroke: #0072b2" in text
    assert "#58b2f0" not in text


def test_what_is_no_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<svg></svg>")
    (tmp_path / "b.html").write_bytes(b"\xff\xfe\x00")
    broken = '<svg viewBox="0 0 1 1" role="img"><g></svg>'
    (tmp_path / "c.html").write_text(broken)
    (tmp_path / "d.html").write_text('<svg viewBox="0 0 1 1" role="img"></svg>')
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.html")
    for page, out, message in (
        ("a.html", "out", "a.html holds no figure of powernorm"),
        ("b.html", "out", "not UTF-8"),
        ("c.html", "out", "c.html has a damaged figure"),
        ("none.html", "out", "No such file"),
        ("pipe.html", "out", "is no regular file"),
        (".", "out", "report.html cannot be read"),
        ("d.html", "file", "file cannot be written"),
    ):
        with pytest.raises(InputError, match=message):
            save_figures(tmp_path / page, tmp_path / out)


def test_names_do_not_leave_the_folder(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text('<svg viewBox="0 0 1 1" role="img"><g id="../../up-figure_1"/></svg>')
    assert list(save_figures(page, tmp_path / "out")) == [tmp_path / "out" / "figure-1.svg"]
