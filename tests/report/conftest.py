from pathlib import Path

import pytest

from report.synthetic import write_comparison


@pytest.fixture
def comparison_folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "demo")


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "small", norms=("ln", "bn"), seeds=(0,))
