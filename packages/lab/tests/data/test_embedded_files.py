"""The distribution `powernorm-data`: found, verified, and advice if it is missing."""

import shutil
import tomllib
from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.data import catalog
from powernorm_lab.data.catalog import SETS, corpora_folder, data_set, embedded_texts
from powernorm_lab.data.embedded import embedded_corpus
from powernorm_lab.data.fetching import cached_state, places
from powernorm_lab.tasks.classify.sources import load_texts
from powernorm_lab.tasks.ner.sources import load_entities
from powernorm_lab.tasks.parse.sources import load_treebank
from powernorm_lab.tasks.translation.sources import verse_pairs

DISTRIBUTION = Path(__file__).parents[4] / "packages" / "data"
PACKED = [entry for entry in SETS.values() if entry.home == "embedded"]


def test_every_file_is_the_known_one_and_none_is_unknown() -> None:
    folder = corpora_folder()
    assert folder is not None
    assert {path.name for path in folder.glob("*.xz")} == {
        file.name for entry in PACKED for file in entry.files
    }
    for name in ("sotu", "verses", "rt", "petrogold", "turkish", "hironsan"):
        assert all(embedded_texts(data_set(name)))
        assert cached_state(name) == "whole"


@pytest.mark.skipif(not DISTRIBUTION.exists(), reason="a source archive is without the corpora")
def test_every_license_has_its_text() -> None:
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    texts = {path.stem for path in (DISTRIBUTION / "LICENSES").glob("*.txt")}
    assert set(project["license"].split(" AND ")) == texts
    terms = (DISTRIBUTION / "LICENSES" / "DATA.md").read_text()
    for entry in PACKED:
        assert all(f"`{file.name}`" in terms for file in entry.files)


@pytest.mark.parametrize(
    "read",
    [
        embedded_corpus,
        lambda: load_treebank(None),
        lambda: load_texts(None),
        lambda: load_entities(None),
        lambda: verse_pairs(None),
        lambda: places("rt"),
    ],
)
def test_without_the_package_every_reader_says_what_to_install(
    read: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "PACKAGE", "powernorm_data_that_is_not_here")
    with pytest.raises(InputError, match=r"powernorm-data, which is not installed.*packages/data"):
        read()  # type: ignore[operator]
    assert cached_state("rt") == "absent"
    assert cached_state("drawn-digits") == "whole"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
            "has the sha256 .* expected",
        ),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(
    harm: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = places("hironsan")
    package = tmp_path / "copied_data"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(file, package)
    harm(package / file.name)  # type: ignore[operator]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(catalog, "PACKAGE", "copied_data")
    with pytest.raises(InputError, match=f"{file.name} {message}.*install powernorm-data again"):
        load_entities(None)
