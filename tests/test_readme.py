"""The Python blocks of the README and the documentation run and print what the pages show."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import powernorm

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [
    pytest.param(
        block,
        output,
        id=f"{page.relative_to(ROOT)}-{number}",
        marks=[pytest.mark.slow] * (page.name in ("inference.md", "removal.md")),
    )
    for page in PAGES
    for number, (block, output) in enumerate(
        re.findall(
            r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text("utf-8"), re.DOTALL
        )
    )
]


# Libraries of extras; a block that shows one is skipped where it is not installed.
OPTIONAL = ("onnxruntime", "transformers", "timm", "x_transformers")


# x-transformers, the exporter of torch 2.13 and torch itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize(("block", "output"), BLOCKS)
def test_python_block_runs(
    block: str,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A `text` block directly below is what it prints, numbers and line breaks aside."""
    for library in OPTIONAL:
        if re.search(rf"^(import|from) {library}\b", block, re.M):
            pytest.importorskip(library)
    if "onnxruntime" in block:
        # A process of its own: once another test has made a pool of threads for all, the usual way
        # to open a model fails.
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=300)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("powernorm.norms.registry.REGISTERED", {})
    exec(compile(block, "block", "exec"), {"__name__": "__main__"})
    if output:
        assert without_numbers(capsys.readouterr().out) == without_numbers(output)


def without_numbers(text: str) -> list[str]:
    """The words of an output; its measured numbers depend on the machine."""
    return re.sub(r"\d+\.\d+(e[+-]\d+)?", "0.0", text).split()


def test_it_fits_on_a_first_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_links_on_a_package_index(tmp_path: Path) -> None:
    """There nothing is beside the README; without the setting it stays as it is."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("version.py", "ops/kernels/cpu/building.py"):
        (tmp_path / "src/powernorm" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src/powernorm" / name, tmp_path / "src/powernorm" / name)
    (tmp_path / "src/powernorm/__init__.py").touch()
    (tmp_path / "LICENSES").mkdir()
    (tmp_path / "LICENSES/DATA.md").touch()
    made = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('made')"
    shown = {}
    for url in ("", "https://example.org/powernorm"):
        (tmp_path / "made").mkdir()
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", made],
            cwd=tmp_path,
            env=os.environ | {"POWERNORM_URL": url},
            check=True,
            capture_output=True,
        )
        metadata = next((tmp_path / "made").glob("*.dist-info/METADATA"))
        shown[url] = metadata.read_text(encoding="utf-8").partition("\n\n")[2]
        shutil.rmtree(tmp_path / "made")
    plain, absolute = shown.values()
    assert plain.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    targets = re.findall(r"\]\(([^)]+)\)", absolute)
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", plain)) > 20
    assert all(target.startswith("https://example.org/powernorm/") for target in targets)
    assert "](https://example.org/powernorm/raw/main/docs/images/speed-light.svg)" in absolute


def test_table_of_norms_is_the_registry() -> None:
    table = (ROOT / "docs" / "layers" / "norms.csv").read_text(encoding="utf-8")
    _, *rows = csv.reader(table.replace(r"\-", "-").splitlines())  # else it would be a list
    assert rows == [
        [f"`{name}`", info.title, info.averages_over, "yes" if info.static else "no", info.paper]
        for name, info in powernorm.NORMS.items()
    ]


def tables_of(page: Path) -> list[Path]:
    """Return the tables of a page, which are files in a folder with its name."""
    return sorted(page.with_suffix("").glob("*.csv"))


def test_every_table_is_on_its_page() -> None:
    for page in PAGES:
        shown = re.findall(r"^:file: (.*)", page.read_text("utf-8"), re.M)
        own = [table.relative_to(page.parent).as_posix() for table in tables_of(page)]
        assert sorted(file for file in shown if not file.startswith("../")) == own, page.name
        assert all((page.parent / file).exists() for file in shown), page.name


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
        prose += "\n".join(table.read_text("utf-8") for table in tables_of(page))
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
