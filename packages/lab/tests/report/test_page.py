"""Pages of comparisons and diagnoses: complete, self-contained, escaped, and valid HTML."""

import json
import re
import subprocess
import sys
from base64 import b64encode
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lab.tests.report.synthetic import edited, write_comparison
from lab.tests.report.synthetic_diagnoses import (
    bert_diagnosis,
    small_diagnosis,
    write_diagnosis,
)
from lab.tests.report.synthetic_translations import AVERAGE, SIGNATURE, write_translations

from powernorm.records import EvaluationRow
from powernorm_lab.report import (
    evaluation_words,
    figures,
    lines,
    read_comparison,
    render_diagnosis,
    render_page,
    write_diagnosis_page,
    write_report,
)
from powernorm_lab.report import page as pages
from powernorm_lab.report.figures import learning_curves
from powernorm_lab.report.lines import SeedLine, bands_over_seeds
from powernorm_lab.runs import RESULTS_FILE

VOID_ELEMENTS = frozenset({"meta", "br", "hr", "wbr"})
HOSTILE = "<script>alert('x')</script>&\"$\\frac{\x1b[2J\ud800"


class Elements(HTMLParser):
    """Parser of elements and attributes; fails for unbalanced tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Collect texts; a word with optional breaks is one."""
        if self.open and self.open[-1] in {"style", "script"}:
            return
        if self.found and self.found[-1][0] == "wbr" and self.texts:
            self.texts[-1] += data
        else:
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_comparison(tmp_path_factory.mktemp("page") / "demo")
    return write_report([folder]).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def elements(page: str) -> Elements:
    return Elements(page)


@pytest.mark.parametrize(
    ("task", "unit"),
    [("lm", "tokens"), ("image", "images"), ("parse", "transitions"), ("lm-char", "bytes")],
)
def test_curves_say_what_they_count(tmp_path: Path, task: str, unit: str) -> None:
    comparison = read_comparison(write_comparison(tmp_path / "demo", norms=("ln",), seeds=(0,)))
    drawn = learning_curves(replace(comparison, task=task))
    assert drawn
    for figure in drawn:
        assert f">{unit}</text>" in figure.svg
        assert f"against {unit} for ln" in figure.svg


@pytest.mark.parametrize(("task", "unit"), [("tag", "tag"), ("mlm", "masked token")])
def test_comparisons_of_tasks_that_left_are_shown(tmp_path: Path, task: str, unit: str) -> None:
    folder = write_comparison(tmp_path / "old", norms=("ln", "bn"), seeds=(0,))
    with edited(folder / RESULTS_FILE) as results:
        results["task"] = task
    assert f"perplexity per {unit}" in write_report([folder]).read_text(encoding="utf-8")


def test_ids_are_unique_and_every_reference_has_its_target(page: str, elements: Elements) -> None:
    ids = Counter(attributes["id"] for _, attributes in elements.found if "id" in attributes)
    assert [name for name, number in ids.items() if number > 1] == []
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', page))
    assert references <= ids.keys()
    assert len(references) > 20


def test_loads_nothing(page: str, elements: Elements) -> None:
    assert "://" not in page
    assert "@import" not in page
    (script,) = elements.all("script")
    assert script == {}
    for tag in ("link", "iframe", "object", "embed", "img", "base", "form"):
        assert elements.all(tag) == []
    for _, attributes in elements.found:
        assert attributes.get("src") is None
        href = attributes.get("href")
        assert href is None or href.startswith(("#", "data:image/png;base64,"))
        assert not any(name.startswith("on") for name in attributes)


def test_policy_forbids_all_but_the_pages_own_script(page: str, elements: Elements) -> None:
    (policy,) = [
        attributes["content"]
        for attributes in elements.all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )


def test_every_table_scrolls_in_its_own_box_and_has_a_caption(
    page: str, elements: Elements
) -> None:
    tables = len(elements.all("table"))
    assert tables == 5
    assert len(re.findall(r'<div class="scroll"[^>]*><table[^>]*><caption>', page)) == tables
    assert len(elements.all("caption")) == tables


def test_colors_follow_the_theme(page: str) -> None:
    svgs = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "currentColor" in svgs
    assert "var(--series-0)" in svgs
    assert "prefers-color-scheme: dark" in page
    # All colors are replaced, so that no text is black on black.
    assert "#0102" not in svgs
    assert all("fill: currentColor" in svg for svg in re.findall(r"<svg [^>]*>", svgs))
    assert not any("fill:" in text for text in re.findall(r"<text [^>]*>", svgs))


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    folder = write_comparison(
        tmp_path / "demo", norms=("ln", "bn"), extra_settings={HOSTILE: {HOSTILE: HOSTILE}}
    )
    replacements = {'"bn"': f'"{_json(HOSTILE)}"', "lm_sotu": _json(HOSTILE)}
    results = folder / "results.json"
    text = results.read_text(encoding="utf-8").replace("stopped: ", _json(HOSTILE))
    for old, new in replacements.items():
        text = text.replace(old, new)
    results.write_text(text, encoding="utf-8")
    norms = folder / "bn-pre-seed0" / "norms.csv"
    layer = HOSTILE.replace('"', '""').replace("\ud800", "")
    norms.write_text(
        norms.read_text(encoding="utf-8").replace("model.final_norm", f'"{layer}"'),
        encoding="utf-8",
    )
    page = write_report([folder]).read_text(encoding="utf-8")
    elements = Elements(page)
    assert elements.all("script") == [{}]
    assert page.count("<script") == 1
    assert "&lt;script&gt;" in page
    assert not set(page) & {"\x1b", "\ud800"}
    assert len(elements.all("svg")) == 2 + 5 + 4 + 2


def _json(text: str) -> str:

    return json.dumps(text)[1:-1]


def test_comparison_before_its_first_run_has_ended(comparison_folder: Path) -> None:
    comparison = read_comparison(comparison_folder)
    for run in comparison.runs:
        for path in (comparison_folder / run.folder).iterdir():
            path.unlink()
        (comparison_folder / run.folder).rmdir()
    results = comparison_folder / "results.json"
    text = re.sub(r'"runs": \[.*\]', '"runs": []', results.read_text(), flags=re.DOTALL)
    results.write_text(text, encoding="utf-8")
    elements = Elements(write_report([comparison_folder]).read_text(encoding="utf-8"))
    assert elements.all("svg") == []
    assert "unigram" in elements.texts


def test_same_files_give_the_same_page(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "demo", norms=("ln",), seeds=(0,))
    comparison = read_comparison(folder)
    assert render_page(comparison) == render_page(comparison)


@pytest.mark.usefixtures("blank_figures")
def test_failed_writing_leaves_the_old_report(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report([small_folder])
    before = path.read_bytes()
    monkeypatch.setattr("powernorm_lab.report.page.render_page", lambda _: "\ud800")
    with pytest.raises(UnicodeEncodeError):
        write_report([small_folder])
    assert path.read_bytes() == before


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "demo", norms=("ln",), seeds=(0,))
    code = (
        "import sys; from pathlib import Path; from powernorm_lab.report import write_report; "
        f"write_report([Path({str(folder)!r})]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'matplotlib.pyplot')))"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


@pytest.mark.usefixtures("blank_figures")
def test_of_many_runs_some_have_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first seed of each norm comes first, and the page says how many are left out."""
    monkeypatch.setattr(figures, "MAX_MAPS", 2)
    folder = write_comparison(tmp_path / "demo", norms=("bn", "rbn"), seeds=(0, 2, 3))
    text = write_report([folder]).read_text(encoding="utf-8")
    assert re.findall(r"(\w+), seed (\d): online TID", text) == [("bn", "0"), ("rbn", "0")]
    assert "4 more runs without a map here" in text


def test_hundreds_of_lines_have_few_points_each() -> None:
    seeds = [SeedLine(dict.fromkeys(range(300), float(run)), False, True) for run in range(500)]
    (band,) = bands_over_seeds({"ln": seeds})
    assert len(band.traces) == 500
    assert sum(len(trace.points) for trace in band.traces) <= lines.MAX_DRAWN
    assert all(len(trace.points) >= 30 for trace in band.traces)
    assert set(band.traces[7].points.values) == {7}
    (band,) = bands_over_seeds({"ln": seeds[:3]})
    assert list(band.traces[0].points.index) == list(range(300))


def test_other_commands_do_not_wait_for_pandas() -> None:
    code = (
        "import sys; from powernorm.cli import main\n"
        "sys.argv = ['powernorm', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "late = {'pandas', 'jinja2', 'powernorm_lab.report'}\n"
        "sys.exit(bool(late & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


# Diagnoses and translations.


def section_names(elements: Elements) -> list[str | None]:
    return [attributes["id"] for attributes in elements.all("section")]


def row(statistics: str, loss: float, tokens: int | None = None) -> EvaluationRow:
    return EvaluationRow(statistics=statistics, tokens=tokens, loss=loss)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("batch", 4.0)], ""),
        ([row("running", 4.5)], "With running statistics the loss is 4.5000."),
        ([row("running", 4.5), row("re-estimated", 4.2)], "4.2000 (-0.3000)."),
        ([row("running", 4.0), row("batch", 4.0, 512)], "no higher than with batch statistics of "),
        (
            [row("running", 4.002), row("batch", 4.0, 512)],
            "less than 0.1 % above that with batch statistics of about 512 predictions (4.0000): "
            "there is no gap to close",
        ),
        (
            [row("running", 4.5), row("re-estimated", 4.6), row("batch", 4.0, 512)],
            "Re-estimation widens the gap by 20 %.",
        ),
        (
            [row("running", 4.5), row("re-estimated", 4.0), row("batch", 4.0), row("batch", 4.2)],
            "Re-estimation closes 100 % of the gap.",
        ),
    ],
)
def test_gap_in_words(rows: list[EvaluationRow], words: str) -> None:
    assert words in evaluation_words(rows)
    assert bool(words) == bool(evaluation_words(rows))


def test_lowest_layer_alone() -> None:
    record = bert_diagnosis()
    record["verdict"]["lowest"] = 1
    assert "the lowest layer to rbn" in render_diagnosis(record)


def test_page_of_a_file(tmp_path: Path) -> None:
    path = write_diagnosis(tmp_path, small_diagnosis())
    target = write_diagnosis_page(path, tmp_path / "out.html")
    assert target.read_text(encoding="utf-8") == render_diagnosis(small_diagnosis())
    assert sorted(found.name for found in tmp_path.iterdir()) == ["diagnosis.json", "out.html"]


def test_everything_of_a_diagnosis_is_escaped() -> None:
    hostile = '<script>&"$\\frac{\x1b[2J\ud800'
    record = bert_diagnosis()
    record["model"] = hostile
    record["notes"] = [hostile]
    record["verdict"]["norm"] = hostile
    record["verdict"]["reasons"] = [hostile]
    record["spectra"][0]["name"] = hostile
    record["scales"][0]["layer"] = hostile
    for layer in record["layers"]:
        layer |= {"layer": hostile + layer["layer"], "norm": hostile, "reason": hostile}
    page = render_diagnosis(record)
    assert Elements(page).all("script") == [{}]
    assert not set(page) & {"\x1b", "\ud800"}


def test_no_layer_at_all() -> None:
    record = small_diagnosis()
    record["layers"], record["batch_sizes"] = [], []
    assert section_names(Elements(render_diagnosis(record))) == ["verdict"]


@pytest.mark.usefixtures("blank_figures")
def test_of_many_diagnoses_the_later_have_tables_only(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten figures for each of hundreds of runs would take minutes."""
    monkeypatch.setattr(pages, "MAX_DRAWN", 1)
    for run in ("ln-pre-seed0", "bn-pre-seed0"):
        write_diagnosis(small_folder / run, small_diagnosis())
    page = write_report([small_folder]).read_text(encoding="utf-8")
    first, second = page.partition('id="diagnoses"')[2].split("bn-pre-seed0: Keep")
    assert "Layers</h3>" in first
    assert "<figure>" in first
    assert "Layers</h3>" in second
    assert "<figure>" not in second.partition("</section>")[0]
    assert "`powernorm report` with this run alone draws its figures" in second


@pytest.mark.usefixtures("blank_figures")
def test_sentence_that_a_norm_did_not_translate(tmp_path: Path) -> None:
    folder = write_translations(tmp_path / "verses")
    path = folder / "bn-pre-seed0" / "translations.tsv"
    path.write_text("source\treference\ttranslation\n" + "a\tb\tc\n", encoding="utf-8")
    page = render_page(read_comparison(folder))
    assert ">bn says" not in page
    assert page.count(">ln says") == 10


def test_without_the_keys_of_translations(tmp_path: Path) -> None:
    """All keys are optional; without results.json the measure comes from the runs."""
    folder = write_translations(tmp_path / "verses", paper=[], reduced="")
    comparison = read_comparison(folder)
    assert comparison.metric == "test_bleu"
    assert (list(comparison.paper), comparison.reduced) == ([], "")
    (folder / "results.json").unlink()
    assert read_comparison(folder).metric == "test_bleu"


@pytest.mark.usefixtures("blank_figures")
def test_everything_of_translations_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>x</script>"
    folder = write_translations(
        tmp_path / "verses",
        reduced=hostile,
        paper=[
            {
                "norm": hostile,
                "placement": "pre",
                "dataset": hostile,
                "metric": hostile,
                "value": 1.0,
                "source": hostile,
            }
        ],
    )
    results = folder / "results.json"
    text = results.read_text(encoding="utf-8")
    results.write_text(text.replace(SIGNATURE, hostile).replace(AVERAGE, hostile), encoding="utf-8")
    page = render_page(read_comparison(folder))
    assert Elements(page).all("script") == [{}]
    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;") >= 8
