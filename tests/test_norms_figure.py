"""The picture of all norms in docs/concepts.md is that of the registry."""

from __future__ import annotations

import importlib.util
import re
from html import unescape
from pathlib import Path
from types import ModuleType

import powernorm

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("norms_figure", IMAGES / "norms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(picture: str) -> list[str]:
    return [unescape(text).strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture)]


def test_picture_of_norms_is_the_registry(tmp_path: Path) -> None:
    figure = drawing()
    drawn = {info.name for _, infos in figure.rows() for info in infos}
    assert drawn == set(powernorm.NORMS), "PATTERNS says how to shade each"
    figure.main(tmp_path / "norms.svg")
    stored, now = ((p / "norms.svg").read_text() for p in (IMAGES, tmp_path))
    assert texts(stored) == texts(now), "python docs/images/norms.py"
    assert texts(now).count("● un") == 1
