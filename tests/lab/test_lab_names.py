"""`powernorm.lab` costs nothing until it is used, and has what it names."""

import subprocess
import sys

import pytest

from powernorm import lab


def test_import_loads_nothing() -> None:
    code = "import sys, powernorm.lab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", lab.__all__)
def test_names_are_there(name: str) -> None:
    assert getattr(lab, name).__name__ == name


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'powernorm\.lab' has no attribute 'train_all'"):
        _ = lab.train_all
