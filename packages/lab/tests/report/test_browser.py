"""Pages in a real browser, at the widths of a desktop's window and a phone."""

import csv
import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any, Final

import matplotlib.image
import numpy as np
import pytest
from lab.tests.report.own_functions import write_own_comparison
from lab.tests.report.synthetic import write_comparison
from lab.tests.report.synthetic_diagnoses import bert_diagnosis, small_diagnosis, write_diagnosis
from lab.tests.report.synthetic_translations import write_translations

from powernorm_lab.report import write_diagnosis_page, write_report
from powernorm_lab.report.figures import MAX_CURVES

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)

WIDTHS: Final = (1280, 390)
PAGES: Final = ("comparison", "several", "diagnosis", "small", "translations", "own")

# Pages run only their own script, so that an outer page measures them.
MEASURE: Final = """
// The first cells after a click on the headings "norm" and "test perplexity", up to three times.
function sorted(page) {
  const table = page.querySelector('#results table.sortable');
  if (table === null) return {};
  const first = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  const found = { before: first() };
  for (const name of ['test perplexity', 'norm']) {
    const heading = [...table.tHead.rows[0].cells].find(cell => cell.textContent === name);
    if (heading === undefined) continue;
    found[name] = [1, 2, 3].map(() => {
      heading.querySelector('button').click();
      return [heading.getAttribute('aria-sort'), ...first()];
    });
  }
  return found;
}
// What the page says under the pointer at the end of the first line of the first figure.
function hovered(page, view) {
  const svg = page.querySelector('#curves svg[data-frames], #tid svg[data-rows]');
  if (svg === null) return null;
  const line = svg.querySelector('g[data-name] > path');
  const end = line.getPointAtLength(line.getTotalLength()).matrixTransform(svg.getScreenCTM());
  const away = new view.PointerEvent('pointermove', { clientX: 1, clientY: 1 });
  const on = new view.PointerEvent('pointermove', { clientX: end.x + 2, clientY: end.y + 2 });
  const tip = page.querySelector('.tip');
  svg.dispatchEvent(on);
  const text = tip.textContent, shown = !tip.hidden;
  svg.dispatchEvent(away);
  return [line.parentNode.dataset.name, text, shown, tip.hidden];
}
function measure(frame) {
  const page = frame.contentDocument, view = frame.contentWindow;
  const shown = node => { const box = node.getBoundingClientRect();
    return node.checkVisibility() && box.width > 50 && box.height > 30; };
  const inside = node => node.closest('.scroll, pre, svg') !== null;
  const right = [...page.body.querySelectorAll('*')].filter(node => !inside(node)
    && node.getBoundingClientRect().right > view.innerWidth + 1).map(node => node.outerHTML);
  const sections = {};
  for (const section of page.querySelectorAll('section')) {
    sections[section.id] = {
      height: section.getBoundingClientRect().height,
      figures: [...section.querySelectorAll('svg')].filter(shown).length,
      tables: [...section.querySelectorAll('table')].filter(shown).length,
    };
  }
  return {
    window: view.innerWidth, page: page.documentElement.scrollWidth, right: right.slice(0, 3),
    sections: sections, title: page.title, text: page.body.innerText.length,
    background: view.getComputedStyle(page.body).backgroundColor,
    scrolls: [...page.querySelectorAll('.scroll')].filter(
      box => box.checkVisibility() && box.scrollWidth > box.clientWidth + 2).length,
    opened: [...page.querySelectorAll('details')].map(node => node.open),
    cues: [...page.querySelectorAll('.cue')].filter(cue => cue.checkVisibility()
      && /column|more/.test(cue.textContent)).length,
    sorted: sorted(page),
    hovered: hovered(page, view),
  };
}
window.onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe'))
    found[frame.id] = measure(frame);
  document.getElementById('found').textContent = JSON.stringify(found);
};
"""


def browse(folder: Path, *options: str) -> str:
    """Return the output of headless Chromium for `frames.html`."""
    command = [
        str(BROWSER),
        "--headless=new",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-extensions",
        # Without this, the outer page cannot access the inner ones.
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *options,
        (folder / "frames.html").as_uri(),
    ]
    outcome = subprocess.run(command, check=True, capture_output=True, timeout=120)
    return outcome.stdout.decode("utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the pages, and one that shows each of them at both widths."""
    place = tmp_path_factory.mktemp("browser")
    comparison = write_comparison(place / "demo", norms=("ln", "bn", "pn"), seeds=(0,))
    write_diagnosis(comparison / "bn-pre-seed0", small_diagnosis())
    write_diagnosis(comparison / "pn-pre-seed0", small_diagnosis())
    write_report([comparison]).rename(place / "comparison.html")
    other = write_comparison(place / "other", norms=("pn",), seeds=(1,))
    write_report([other, comparison / "ln-pre-seed0"], place / "several.html")
    write_diagnosis_page(bert_diagnosis(), place / "diagnosis.html")
    write_diagnosis_page(small_diagnosis(), place / "small.html")
    (place / "translations.html").write_text(_translations_page(place), encoding="utf-8")
    (place / "own.html").write_text(_own_page(place), encoding="utf-8")
    frames = "".join(
        f'<iframe id="{name}-{width}" src="{name}.html" width="{width}" height="900" '
        'style="border:0"></iframe>'
        for name in PAGES
        for width in WIDTHS
    )
    (place / "frames.html").write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0">{frames}'
        f'<pre id="found"></pre><script>{MEASURE}</script></body>',
        encoding="utf-8",
    )
    return place


def _translations_page(place: Path) -> str:
    """Write a page with everything expanded, and with words that cannot be broken."""
    folder = write_translations(place / "verses", reduced="in place of " * 40 + "x" * 200)
    sentences = folder / "ln-pre-seed0" / "translations.tsv"
    sentences.write_text(f"{'s' * 300}\treference\t{'t ' * 300}\n", encoding="utf-8")
    page = write_report([folder]).read_text(encoding="utf-8")
    return page.replace("<details>", '<details open="">')


def _own_page(place: Path) -> str:
    """Write a page of a function with many metrics and long names, with everything expanded."""
    names = ["x" * 300, "<b>", *(f"metric_{number}" for number in range(30))]
    folder = write_own_comparison(
        place / "own",
        norms=("ln", "a_package.of_layers:MyVeryLongNormalization"),
        seeds=(0,),
        lost=(),
        metrics=dict.fromkeys(names, 0.123),
        logged=dict.fromkeys(names, 0.123),
    )
    page = write_report([folder]).read_text(encoding="utf-8")
    return page.replace("<details>", '<details open="">')


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, Any]:
    found = re.search(r'<pre id="found">(.+?)</pre>', browse(folder, "--dump-dom"), re.DOTALL)
    assert found is not None
    return dict(json.loads(unescape(found[1])))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_runs_out_of_the_window(measured: dict[str, Any], name: str, width: int) -> None:
    page = measured[f"{name}-{width}"]
    assert page["window"] == width
    assert page["right"] == []
    assert page["page"] <= width
    assert page["title"].startswith("powernorm: ")
    assert page["text"] > 500
    assert all(section["height"] > 40 for section in page["sections"].values())


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_of_a_diagnosis_is_seen(measured: dict[str, Any], width: int) -> None:
    sections = measured[f"diagnosis-{width}"]["sections"]
    figures = {name: section["figures"] for name, section in sections.items()}
    assert figures == {
        "verdict": 0,
        "layers": 0,
        "tid": 2,
        "batch-sizes": 2,
        "evaluation": 1,
        "spectra": 4,
        "scales": 1,
        "notes": 0,
    }
    assert [sections[name]["tables"] for name in ("layers", "evaluation")] == [1, 1]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_of_a_comparison_is_seen(measured: dict[str, Any], width: int) -> None:
    sections = measured[f"comparison-{width}"]["sections"]
    # Four lines over training, the gap, and a map for each of two norms; AdaNorm's share is not
    # there; of the two diagnoses the first one is open.
    expected = {"curves": 2, "tid": 5 + 2, "gradients": 4, "diagnoses": 2}
    assert {name: sections[name]["figures"] for name in expected} == expected
    assert sections["results"]["tables"] == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_papers_and_sentences_are_seen(measured: dict[str, Any], width: int) -> None:
    page = measured[f"translations-{width}"]
    assert page["sections"]["paper"]["tables"] == 1
    assert page["sections"]["translations"]["height"] > 200
    assert page["opened"] == [True] * 7


@pytest.mark.parametrize("width", WIDTHS)
def test_many_metrics_of_an_own_function_are_seen(measured: dict[str, Any], width: int) -> None:
    sections = measured[f"own-{width}"]["sections"]
    assert sections["results"]["tables"] == 2
    assert sections["curves"]["figures"] == MAX_CURVES


def test_wide_tables_scroll_in_their_own_box_on_a_phone(measured: dict[str, Any]) -> None:
    for name in ("comparison", "diagnosis"):
        assert measured[f"{name}-390"]["scrolls"] >= 1


def test_a_table_with_columns_out_of_sight_says_so(measured: dict[str, Any]) -> None:
    for page in measured.values():
        assert page["cues"] == page["scrolls"], page["title"]


def test_a_click_on_a_heading_sorts_the_table(measured: dict[str, Any]) -> None:
    """Numbers sort by value, cells without one are last, and the third click restores the order."""
    found = measured["comparison-1280"]["sorted"]
    assert found["before"] == ["ln", "bn", "pn", "unigram", "bigram"]
    assert found["test perplexity"] == [
        ["ascending", "ln", "pn", "bn", "bigram", "unigram"],
        ["descending", "unigram", "bigram", "bn", "pn", "ln"],
        [None, *found["before"]],
    ]
    assert found["norm"][0] == ["ascending", "bigram", "bn", "ln", "pn", "unigram"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_line_says_its_value_under_the_pointer(
    measured: dict[str, Any], folder: Path, width: int
) -> None:
    name, text, shown, hidden_after = measured[f"comparison-{width}"]["hovered"]
    assert (name, shown, hidden_after) == ("ln", True, True)
    found = re.fullmatch(r"ln: ([\d.]+) at ([\d.e+]+) tokens", text)
    assert found is not None, text
    with (folder / "demo" / "ln-pre-seed0" / "metrics.csv").open() as stream:
        last = list(csv.DictReader(stream))[-1]
    assert float(found[1]) == pytest.approx(float(last["train_loss"]), rel=0.01)
    assert float(found[2]) == pytest.approx(float(last["tokens"]), rel=0.01)


def test_a_layer_says_its_name_under_the_pointer(measured: dict[str, Any]) -> None:
    """The axis shows only a part of the name."""
    name, text, shown, _ = measured["diagnosis-1280"]["hovered"]
    assert (name, shown) == ("mean + deviation", True)
    layer = bert_diagnosis()["layers"][-1]
    found = re.fullmatch(rf"{re.escape(layer['layer'])}, mean \+ deviation: ([\d.]+)", text)
    assert found is not None, text
    total = 100 * (layer["mean_tid"] + layer["var_tid"])
    assert float(found[1]) == pytest.approx(total, rel=0.01)


def test_first_diagnosis_of_a_comparison_is_open(measured: dict[str, Any]) -> None:
    opened = measured["comparison-1280"]["opened"]
    assert opened.count(True) == 1


def test_style_is_allowed_by_the_policy(measured: dict[str, Any]) -> None:
    assert {page["background"] for page in measured.values()} == {"rgb(255, 255, 255)"}


@pytest.mark.slow
def test_picture_is_not_blank(folder: Path) -> None:
    browse(folder, f"--screenshot={folder / 'shot.png'}", "--window-size=1300,1900")
    picture = matplotlib.image.imread(folder / "shot.png")[..., :3]
    assert picture.shape[:2] == (1900, 1300)
    # The first page, then the same on a phone.
    for rows, columns in ((slice(0, 900), slice(0, 1280)), (slice(900, 1800), slice(0, 390))):
        part = picture[rows, columns]
        ink = (part.mean(axis=2) < 0.6).mean()
        assert 0.005 < ink < 0.5
        assert len(np.unique((part * 255).astype(np.uint8).reshape(-1, 3), axis=0)) > 50
