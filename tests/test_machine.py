"""No property of the machine decides a test, and our pinned versions install on others."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from machine import CACHES
from powernorm_lab.data.cache import cache_folder
from powernorm_lab.data.fetching import cached_state

ROOT = Path(__file__).parents[1]


def test_home_and_caches_are_the_suites_own() -> None:
    home = Path(os.environ["POWERNORM_TEST_HOME"])
    assert home.parent == Path(tempfile.gettempdir())
    assert Path.home() == home
    for variable in CACHES:
        assert Path(os.environ[variable]).is_relative_to(home), variable
    assert cache_folder().is_relative_to(home)
    names = ("mnist", "conll2003", "imdb", "msra")
    assert {cached_state(name) for name in names} == {"absent"}
    assert Path(torch.hub.get_dir()).is_relative_to(home)


def test_home_starts_empty_and_is_removed(tmp_path: Path) -> None:
    """In a suite of its own: this one's caches are in use."""
    for name in ("conftest.py", "tests/covering.py", "tests/machine.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "test_home.py").write_text(
        "import os\n"
        "def test_home():\n"
        "    print('home:', os.environ['HOME'], os.listdir(os.environ['HOME']))\n"
    )
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    variables = {key: value for key, value in os.environ.items() if key != "POWERNORM_TEST_HOME"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found = re.search(r"home: (\S+) \[\]", done.stdout)
    assert found, done.stdout
    assert Path(found[1]) != Path.home()
    assert not Path(found[1]).exists()


def test_what_torch_brings_is_not_pinned() -> None:
    """Each build of torch asks for its own triton and CUDA packages."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert not re.findall(r"(?mi)^(triton|nvidia|cuda)\S*", pins)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11.2", "3.12", "3.13"])
def test_pins_resolve(python: str, tmp_path: Path) -> None:
    """Against the metadata of the package index, where torch is the CUDA build.

    3.11.2 is what Debian 12 ships.
    """
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--all-extras"),
        *("--constraint", "constraints.txt", "--python-version", python),
        *("--python-platform", "x86_64-manylinux_2_28", "--no-config", "--no-header"),
        "--no-python-downloads",
        *("--cache-dir", str(tmp_path)),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode != 0 and re.search("dns error|client error", done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)", done.stdout))
    assert pins["torch"] == "2.13.0"
    # The CUDA build's own, and nothing that we leave to chance beside them.
    assert "triton" in pins
    written = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    pinned = set(re.findall(r"(?m)^([\w.-]+)==", written))
    free = {name for name in pins if name.lower() not in pinned}
    assert {name for name in free if not re.match("nvidia-|cuda-|triton$", name)} == set()
