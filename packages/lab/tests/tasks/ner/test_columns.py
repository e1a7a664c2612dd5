import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.tests.data.byte_mutations import mutated
from official_entities import CONLL_2003, FILES, ORIGINAL, SENTENCES

from powernorm.errors import InputError
from powernorm_lab.tasks.ner.sources import parse_columns
from powernorm_lab.tasks.ner.tag_schemes import Span, tags_of


@pytest.mark.parametrize("name", FILES)
def test_every_official_format_has_the_same_sentences(name: str) -> None:
    # Files are read with "\n" at the ends of lines.
    assert parse_columns(FILES[name].replace("\r\n", "\n"), "f") == SENTENCES


def test_neighbors_of_one_kind_are_two_entities() -> None:
    expected = (Span("LOC", 0, 2), Span("LOC", 2, 3))
    for tags in ("B-LOC I-LOC B-LOC", "I-LOC I-LOC B-LOC", "B-LOC E-LOC S-LOC"):
        text = "\n".join(f"w x y {tag}" for tag in tags.split())
        assert parse_columns(text, "f")[0].spans == expected


def test_characters_of_a_chinese_text_may_be_wide_spaces() -> None:
    (sentence,) = parse_columns("北 B-LOC\n京 E-LOC\n\u3000 O\n\x0b O", "f")
    assert sentence.words == ("北", "京", "\u3000", "\x0b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a O\nb", "f, line 2 has 1 columns: expected 2, a word first and its tag last"),
        ("a", "f, line 1 has 1 columns: expected 2"),
        ("a N C O\nb N O", "f, line 2 has 3 columns: expected 4"),
        ("a\tO\n\tO", r"f, line 2, column 1 \(word\): ''; expected a word"),
        ("a\tO\nb\tO\tO", "f, line 2 has 3 columns: expected 2"),
        ("a O\nb PER", r"f, line 2, column 2 \(tag\): 'PER'; expected O, or one of B, I"),
        ("a B-", r"line 1, column 2 \(tag\): 'B-'"),
        ("a N X-PER", r"line 1, column 3 \(tag\): 'X-PER'"),
        ("a O\n\nb B-P\nc I-L\n", r"line 4: the tag I-L; expected B-L, .* \(.*read as IOB2"),
        ("a B-P\n\nb I-P", "line 3: the tag I-P; expected B-P"),
        ("a B-P\nb O\nc S-P", r"line 2: the tag O; expected the middle .* because line 3 has S-P"),
        ("a S-P\nb B-P\n\nc O", "line 2: the sentence ends after B-P; expected the middle"),
    ],
)
def test_damage_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_columns(text, "f")


def test_a_scheme_may_be_given() -> None:
    text = "a O\nb I-P\n\nc B-P\n"
    with pytest.raises(InputError, match="line 2: the tag I-P"):
        parse_columns(text, "f")
    first, second = parse_columns(text, "f", "iob")
    assert (first.spans, second.spans) == ((Span("P", 1, 2),), (Span("P", 0, 1),))


WORDS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1)


@given(st.lists(st.lists(st.tuples(WORDS, st.booleans()), min_size=1), min_size=1, max_size=4))
def test_what_is_written_is_read(sentences: list[list[tuple[str, bool]]]) -> None:
    blocks = []
    for sentence in sentences:
        spans = [Span("P", i, i + 1) for i, (_, is_name) in enumerate(sentence) if is_name]
        tags = tags_of(spans, len(sentence), "iob2")
        blocks.append(
            "\n".join(f"{word} {tag}" for (word, _), tag in zip(sentence, tags, strict=True))
        )
    found = parse_columns("\n\n".join(blocks), "f")
    assert [list(item.words) for item in found] == [[w for w, _ in item] for item in sentences]
    assert [len(item.spans) for item in found] == [sum(n for _, n in item) for item in sentences]


def check_damaged(content: bytes) -> None:
    text = content.decode("utf-8", "replace").replace("\r\n", "\n")
    try:
        found = parse_columns(text, "damaged")
    except InputError:
        return
    for sentence in found:
        assert all(sentence.words)
        ends = [0, *(span.end for span in sentence.spans)]
        for before, span in zip(ends, sentence.spans, strict=False):
            assert before <= span.start < span.end <= len(sentence.words)


@pytest.mark.parametrize("name", FILES)
@given(st.data())
def test_damaged_files_give_a_clean_error_or_sentences(name: str, data: st.DataObject) -> None:
    check_damaged(data.draw(mutated(FILES[name].encode())))


@pytest.mark.parametrize("name", FILES)
@given(st.data())
def test_lines_and_columns_may_be_missing_or_doubled(name: str, data: st.DataObject) -> None:
    lines = FILES[name].split("\n")
    index = data.draw(st.integers(0, len(lines) - 1))
    separator = "\t" if "\t" in lines[index] else " "
    columns = lines[index].split(separator)
    column = data.draw(st.integers(0, len(columns) - 1))
    match data.draw(st.sampled_from(["cut", "double", "drop", "repeat", "swap"])):
        case "cut":
            del lines[index]
        case "double":
            lines.insert(index, lines[index])
        case "drop":
            lines[index] = separator.join(columns[:column] + columns[column + 1 :])
        case "repeat":
            lines[index] = separator.join(columns[: column + 1] + columns[column:])
        case _:
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[index], lines[other] = lines[other], lines[index]
    check_damaged("\n".join(lines).encode())


@pytest.mark.slow
@settings(max_examples=5000)
@given(
    st.sampled_from([CONLL_2003, ORIGINAL, *FILES.values()]).flatmap(lambda t: mutated(t.encode()))
)
def test_thousands_of_damaged_files(content: bytes) -> None:
    check_damaged(content)
