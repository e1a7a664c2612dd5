import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm.integrations.extras import install_command
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.translation.sources import load_pairs

pytestmark = pytest.mark.usefixtures("own_cache")

datasets = pytest.importorskip("datasets")

Rows = list[dict[str, object]]


@pytest.fixture(autouse=True)
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a temporary cache and offline mode, so that tests use no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    yield
    if shown:
        datasets.enable_progress_bars()


def nested(source: str | None, target: str | None) -> dict[str, object]:
    return {"translation": {"de": source, "en": target}}


def plain(source: str | None, target: str | None) -> dict[str, object]:
    return {"de": source, "en": target, "id": 7}


def json_folder(folder: Path, splits: dict[str, Rows]) -> str:
    folder.mkdir()
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"hf:{folder}"


@pytest.mark.parametrize("row", [nested, plain])
def test_both_forms_of_columns_are_read(tmp_path: Path, row: type[nested]) -> None:
    rows = {
        "train": [row("a\u2028b", "c\nd"), row(None, "e"), row("f", "g")],
        "validation": [row("h", "i")],
        "test": [row("j", "k")],
    }
    corpus = load_pairs(json_folder(tmp_path / "data", rows), "en-de", True)
    for _ in range(2):
        assert list(corpus.pairs("train")) == [("c d", "a\u2028b"), ("g", "f")]
    assert corpus.num_dropped["train"] == {"empty": 1}
    assert [list(corpus.pairs(split)) for split in SPLITS[1:]] == [[("i", "h")], [("k", "j")]]
    assert (corpus.name, corpus.languages, corpus.tokenized) == ("data", "en-de", True)
    assert corpus.source == f"hf:{tmp_path / 'data'}"
    assert corpus.fingerprint() == corpus.fingerprint()


def test_the_feature_of_translations_in_parquet(tmp_path: Path) -> None:
    features = datasets.Features({"translation": datasets.Translation(languages=["de", "en"])})
    (tmp_path / "data").mkdir()
    for name in ("train", "validation", "test"):
        data = datasets.Dataset.from_list([nested(f"{name} de", f"{name} en")], features=features)
        data.to_parquet(tmp_path / "data" / f"{name}.parquet")
    corpus = load_pairs(f"hf:{tmp_path / 'data'}", "de-en", False)
    assert [list(corpus.pairs(split)) for split in SPLITS] == [
        [("train de", "train en")],
        [("validation de", "validation en")],
        [("test de", "test en")],
    ]
    with pytest.raises(InputError, match=r"set data\.languages=de-en or en-de"):
        load_pairs(f"hf:{tmp_path / 'data'}", None, False)


def test_missing_splits_and_languages_are_named(tmp_path: Path) -> None:
    rows: dict[str, Rows] = {"train": [nested("a", "b")], "test": [nested("a", "b")]}
    with pytest.raises(InputError, match=r"has no valid split, only .*: expected validation or"):
        load_pairs(json_folder(tmp_path / "two", rows), "de-en", False)
    rows["validation"] = rows["test"]
    source = json_folder(tmp_path / "three", rows)
    with pytest.raises(InputError, match="has no text in fr, only de, en; expected both in"):
        load_pairs(source, "de-fr", False)


def test_languages_of_columns_can_be_pasted(tmp_path: Path) -> None:
    row: dict[str, object] = {"id": 7, "pt-br": "a", "en": "b", "a note": "c"}
    source = json_folder(tmp_path / "data", {name: [row] for name in ("train", "dev", "test")})
    with pytest.raises(InputError, match=r"is in en, pt-br, .*languages=en-pt-br or pt-br-en$"):
        load_pairs(source, None, False)
    corpus = load_pairs(source, "pt-br-en", False)
    assert list(corpus.pairs("test")) == [("a", "b")]
    assert corpus.source_language == "pt-br"


def test_one_column_of_text_is_no_pair(tmp_path: Path) -> None:
    rows: Rows = [{"de": "a", "id": 3}]
    source = json_folder(tmp_path / "data", dict.fromkeys(("train", "dev", "test"), rows))
    with pytest.raises(InputError, match="has text in de only: expected two languages in"):
        load_pairs(source, None, False)


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    rows: Rows = [{"de": "a", "en": 3}]
    splits = {"train": rows, "validation": rows, "test": rows}
    corpus = load_pairs(json_folder(tmp_path / "data", splits), "de-en", False)
    with pytest.raises(InputError, match=r"split valid, row 1: 3 is no text"):
        list(corpus.pairs("valid"))


@pytest.mark.parametrize("source", ["hf:", "hf::config"])
def test_a_name_is_needed(source: str) -> None:
    with pytest.raises(InputError, match="names no data set: give hf:NAME"):
        load_pairs(source, "de-en", False)


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (f"hf:{tmp_path / 'empty'}", f"hf:{tmp_path / 'missing'}:config"):
        with pytest.raises(InputError, match="cannot be loaded") as caught:
            load_pairs(source, "de-en", False)
        assert "\n" not in str(caught.value)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=re.escape(f"package datasets: {install_command(extra='hf')}")
    ):
        load_pairs("hf:wmt14:de-en", "de-en", False)
