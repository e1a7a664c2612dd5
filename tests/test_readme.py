"""The README's and the documentation's Python blocks run; its table is the registry's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import powernorm

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


# Libraries of extras; a block that shows one is skipped where it is not installed.
OPTIONAL = ("onnxruntime", "transformers", "timm")


# The exporter of torch 2.13 and torch itself.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in OPTIONAL:
        if re.search(rf"^(import|from) {library}\b", block, re.M):
            pytest.importorskip(library)
    if "onnxruntime" in block:
        # A process of its own: once another test has made a pool of threads for all, the usual way
        # to open a model fails.
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=300)
        return
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {"__name__": "__main__"})


def test_table_of_norms_is_the_registry() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| (.+?) \| (.+?) \| (yes|no) \| (.+?) \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert rows == [
        (info.name, info.title, info.averages_over, "yes" if info.static else "no", info.paper)
        for info in powernorm.NORMS.values()
    ]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
