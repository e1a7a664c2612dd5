"""The site: pages in the navigation, the reference, its loaded files, its search results."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import powernorm as command

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.glob("**/*.md"))
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
DOCUMENTED = re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)$", REFERENCE, re.MULTILINE)
PACKAGES = ("norms", "ops", "inspection", "surgery", "diagnosis", "integrations.lightning")
TOGETHER = ("powernorm", *(f"powernorm.{name}" for name in PACKAGES), "powernorm_lab")


def value_of(name: str) -> object:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            if length == 1:
                raise
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def test_every_page_is_in_one_group_of_the_navigation() -> None:
    """Elsewhere nobody finds it; `make docs` refuses it too."""
    listed = [
        entry
        for page in ("index.md", "results.md", "papers.md", "models.md")
        for tree in re.findall(
            r"```\{toctree\}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL
        )
        for line in tree.splitlines()
        if line and not line.startswith(":")
        for entry in [re.sub(r".*<(.+)>", r"\1", line)]
    ]
    assert Counter(listed) == Counter(set(PAGES) - {"index"})


@pytest.mark.parametrize("package", TOGETHER)
def test_everything_public_is_in_the_reference(package: str) -> None:
    module = importlib.import_module(package)
    values = [value_of(name) for name in DOCUMENTED]
    missing = [
        name
        for name in module.__all__
        if not inspect.ismodule(value := getattr(module, name))
        and not any(value is one for one in values)
    ]
    assert missing == [], "give each a line in a page of docs/api"


def test_the_reference_has_each_name_once() -> None:
    assert [name for name, count in Counter(DOCUMENTED).items() if count > 1] == []


def test_names_in_the_pages_exist() -> None:
    """A page that names what was renamed sends its reader nowhere."""
    names = {
        name
        for page in (DOCS.parent / "README.md", *DOCS.glob("**/*.md"), *DOCS.glob("**/*.csv"))
        for name in re.findall(r"`(powernorm(?:_lab)?(?:\.\w+)+)", page.read_text(encoding="utf-8"))
    } - {"powernorm.safetensors", "powernorm.norms"}
    for name in sorted(names):
        value_of(name)


def test_every_command_is_on_its_page(tmp_path: Path) -> None:
    pytest.importorskip("powernorm_lab")
    shown = command(tmp_path, "--help").out
    names = re.findall(r"^  ([a-z-]+) ", shown.partition("Commands:")[2], re.MULTILINE)
    table = (DOCS / "commands" / "commands.csv").read_text(encoding="utf-8")
    assert sorted(names) == sorted(re.findall(r"^`powernorm ([a-z-]+)`", table, re.MULTILINE))


def _documented_calls() -> set[tuple[str, ...]]:
    """Return the words of each command in the pages and their tables."""
    root = DOCS.parent
    patterns = ("docs/**/*.md", "docs/**/*.csv", "studies/**/*.md", "benchmarks/**/*.md")
    files = [root / "README.md", root / "CONTRIBUTING.md"]
    files += [file for pattern in patterns for file in root.glob(pattern)]
    found = set()
    for file in files:
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        calls = re.findall(
            r"`(?:\$ )?powernorm ([^`]+)`|^(?:\$ )?powernorm (.+)$", text, re.MULTILINE
        )
        lines = [one or other for one, other in calls]
        if file.is_relative_to(DOCS / "papers"):
            lines += re.findall(r"`((?!python)[a-z][a-z-]* [^`]*(?:RUN|--)[^`]*)`", text)
        found |= {tuple(re.split(r" [|#&>;]|;", line)[0].split()) for line in lines}
    return found


def test_commands_in_the_pages_exist() -> None:
    pytest.importorskip("powernorm_lab")
    from powernorm.cli.commands import app

    wrong = []
    for name, *words in _documented_calls():
        found: Any = typer.main.get_command(app)
        if not re.fullmatch(r"[a-z]+", name) or name == "is":
            continue
        for word in (name, *words):
            found = getattr(found, "commands", {}).get(word, found)
        wrong += [name] * (not found.name)
        options = {"--help", *(one for param in found.params for one in param.opts)}
        wrong += [
            f"{name} {word}" for word in words if word.startswith("--") and word not in options
        ]
    assert wrong == []


# What a browser fetches by itself; links that a reader follows are not among them.
LOADS = re.compile(
    r"""<(?:script|img|source|iframe)\b[^>]*\bsrc(?:set)?=["'](?:https?:)?//
    | <link\b[^>]*\brel=["'](?:stylesheet|preload|icon)[^>]*\bhref=["'](?:https?:)?//
    | url\(["']?(?:https?:)?// | @import\s+["'](?:https?:)?//""",
    re.VERBOSE,
)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_needs_nothing_else(tmp_path: Path) -> None:
    """Links and anchors that lead nowhere, and pages in no group, are warnings."""
    pytest.importorskip("sphinx")
    site = tmp_path / "site"
    strict = ("--fail-on-warning", "--keep-going", "--quiet")
    places = ("--doctree-dir", tmp_path / "trees", DOCS, site)
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, *places],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for file in (*site.glob("**/*.html"), *site.glob("**/*.css")):
        assert LOADS.search(file.read_text(encoding="utf-8")) is None, file
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    terms = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["terms"]
    stems = {"build_norm", "fold", "syncbatchnorm", "save_pretrain"}  # of save_pretrained
    assert stems - terms.keys() == set()
    assert '<span class="k' in (site / "index.html").read_text(encoding="utf-8")
    assert "<mfrac>" in (site / "layers.html").read_text(encoding="utf-8")
