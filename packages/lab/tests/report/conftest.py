from collections.abc import Mapping, Sequence
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from lab.tests.report.synthetic import write_comparison
from markupsafe import Markup
from matplotlib.figure import Figure
from pandas import Series, isna

from powernorm_lab.report.drawing import DrawnFigure
from powernorm_lab.report.lines import Band, Panel, SeedLine


@pytest.fixture
def comparison_folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "demo")


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "small", norms=("ln", "bn"), seeds=(0,))


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace figures by blank ones, because drawing is slow and many tests ignore them."""

    def savefig(_drawn: Figure, stream: StringIO, **_options: object) -> None:
        stream.write('<svg xmlns="http://www.w3.org/2000/svg"/>')

    monkeypatch.setattr(Figure, "savefig", savefig)


class FigureData:
    """Recorder of the data of figures by title, without drawing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.figures: list[Sequence[Panel]] = []
        self.panels: dict[str, Panel] = {}
        self.rows: dict[str, tuple[Sequence[str], Sequence[Band]]] = {}
        self.lines: list[str] = []
        monkeypatch.setattr("powernorm_lab.report.lines.draw_panels", self._draw_panels)
        for place in ("overlays.rows_figure", "studies.rows_figure"):
            monkeypatch.setattr(f"powernorm_lab.report.{place}", self._draw_rows)
        monkeypatch.setattr("powernorm_lab.report.studies.grid", self._draw_grid)

    def _draw_panels(self, panels: Sequence[Panel], **options: Any) -> Markup:
        self.figures.append(panels)
        self.panels |= {panel.title: panel for panel in panels}
        self.lines.append(f"lines against {_words(options)}")
        for panel in panels:
            self.lines.append(f"  {_words(panel)}")
            self.lines += [f"    {_words(band)}" for band in panel.bands]
        return Markup("<svg></svg>")

    def _draw_rows(
        self, names: Sequence[str], bands: Sequence[Band], **options: Any
    ) -> list[DrawnFigure]:
        if all(isna(value) for band in bands for value in band.mean):
            return []
        self.rows[options["title"]] = names, bands
        caption = options.pop("caption")
        self.lines.append(f"rows {', '.join(names)}: {_words(options)}")
        self.lines += [f"    {_words(band)}" for band in bands]
        return [DrawnFigure(Markup("<svg></svg>"), caption)]

    def _draw_grid(
        self, cells: Mapping[tuple[float, float], tuple[float, str]], best: float, **options: Any
    ) -> Markup:
        self.lines.append(f"grid with {best:.4g} framed: {_words(options)}")
        self.lines += [f"    {x:g}, {y:g}: {words}" for (x, y), (_, words) in cells.items()]
        return Markup("<svg></svg>")


def _words(shown: Panel | Band | Mapping[str, object]) -> str:
    """Return the non-empty attributes except for bands, which have separate lines."""
    if isinstance(shown, Mapping):
        values = dict(shown)
    else:
        values = {one.name: getattr(shown, one.name) for one in fields(shown)}
    values = {name: value for name, value in values.items() if value and name != "bands"}
    return ", ".join(f"{name} {_text(value)}" for name, value in values.items())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"[{' '.join(map(_text, value))}]"
    if isinstance(value, SeedLine):
        points = Series(value.points)
        return f"{'lost ' * value.lost}{_text(points.index.tolist())} {_text(points.tolist())}"
    return str(value)


@pytest.fixture
def figure_data(monkeypatch: pytest.MonkeyPatch) -> FigureData:
    return FigureData(monkeypatch)
