from io import StringIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lab.report.synthetic import write_comparison


@pytest.fixture
def comparison_folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "demo")


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "small", norms=("ln", "bn"), seeds=(0,))


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures without a picture: drawing takes long, and many tests look at the rest only."""

    def savefig(_drawn: Figure, stream: StringIO, **_options: object) -> None:
        stream.write('<svg xmlns="http://www.w3.org/2000/svg"/>')

    monkeypatch.setattr(Figure, "savefig", savefig)
