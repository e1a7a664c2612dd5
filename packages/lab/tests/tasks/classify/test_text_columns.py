"""Users' tables with or without a header: classes and texts by the names of columns."""

from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.recipes import recipe
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.classify.sources import Columns, load_texts
from powernorm_lab.tasks.registry import task_of

pytestmark = pytest.mark.usefixtures("own_cache")

CSV = 'id,Stars,title,body\n1,good,"Nice, ""really""",worth it\n2,bad,Dull,no\n'
TSV = "id\tStars\ttitle\tbody\n1\tgood\tNice\tworth it\n2\tbad\tDull\tno\n"
CHOSEN = Columns("stars", ("title", "body"))


def written(folder: Path, suffix: str, text: str) -> Path:
    for split in ("train", "valid", "test"):
        (folder / f"{split}.{suffix}").write_text(text)
    return folder


def rows(path: Path, columns: Columns = Columns()) -> list[tuple[str, str]]:  # noqa: B008
    return [(row.label, row.text) for row in load_texts(str(path), columns).read["train"]()]


def test_columns_of_a_csv_file_by_their_names(tmp_path: Path) -> None:
    folder = written(tmp_path, "csv", CSV)
    assert rows(folder, CHOSEN) == [("good", 'Nice, "really" worth it'), ("bad", "Dull no")]
    assert rows(folder, Columns("Stars", ("BODY",))) == [("good", "worth it"), ("bad", "no")]


def test_columns_of_a_table_with_tabs_by_their_names(tmp_path: Path) -> None:
    assert rows(written(tmp_path, "tsv", TSV), CHOSEN)[0] == ("good", "Nice worth it")


def test_usual_names_need_not_be_given(tmp_path: Path) -> None:
    folder = written(tmp_path, "csv", "text,label\nfine words,yes\nbad words,no\n")
    assert rows(folder) == [("yes", "fine words"), ("no", "bad words")]
    assert rows(written(tmp_path, "csv", "class,text\nyes,a\n")) == [("yes", "a")]


def test_without_a_header_a_row_is_a_numbered_class_and_texts(tmp_path: Path) -> None:
    folder = written(tmp_path, "csv", '"1","a title","a text"\n"2","b","c"\n')
    assert rows(folder) == [("1", "a title a text"), ("2", "b c")]


def test_one_csv_file_is_divided(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    lines = [f"text {number},{('good', 'bad')[number % 2]}" for number in range(60)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    found = load_texts(str(path))
    split = {name: list(read()) for name, read in found.read.items()}
    assert sum(map(len, split.values())) == 60
    assert all(split.values())
    config = override(recipe("classify", "smoke"), [f"data.path={path}"])
    encoded = task_of(config).encode(config)
    assert encoded.labels == ("bad", "good")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns("rating", ("title",)), r"no column 'rating'; .* Stars, .* data\.label_column"),
        (Columns("stars", ("title", "summary")), r"no column 'summary'; .* data\.text_columns"),
        (Columns("stars"), r"no column 'sentence, text'; .* data\.text_columns"),
    ],
)
def test_a_column_that_is_not_there_is_named(
    tmp_path: Path, columns: Columns, message: str
) -> None:
    folder = written(tmp_path, "csv", CSV)
    with pytest.raises(InputError, match=message):
        rows(folder, columns)


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path, "csv", "text,label\nfine,\n")
    with pytest.raises(InputError, match=r"train\.csv, line 2, column 2: no class"):
        rows(folder)


def test_columns_of_what_has_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rt is no table of your own: leave out data\.label"):
        load_texts("rt", CHOSEN)
    (tmp_path / "rt-polarity.pos").write_text("fine\n")
    with pytest.raises(InputError, match=r"is no table of your own"):
        load_texts(str(tmp_path), CHOSEN)


def test_settings_name_them(tmp_path: Path) -> None:
    folder = written(tmp_path, "csv", CSV)
    assignments = [
        f"data.path={folder}",
        "data.label_column=stars",
        "data.text_columns=title,body",
    ]
    config = override(recipe("classify", "smoke"), assignments)
    assert task_of(config).encode(config).labels == ("bad", "good")
