import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm_lab.tasks.parse.sources import COLUMNS, Sentence, Word, parse_conllu

SAMPLE = """\
# sent_id = a-1
# text = Na costa.
1-2\tNa\t_\t_\t_\t_\t_\t_\t_\t_
1\tEm\tem\tADP\t_\t_\t3\tcase\t_\t_
2\ta\to\tDET\t_\tGender=Fem\t3\tdet\t_\t_
3\tcosta\tcosta\tNOUN\t_\t_\t0\troot\t_\tSpaceAfter=No
3.1\tfica\tficar\tVERB\t_\t_\t_\t_\t0:root\t_
4\t.\t.\tPUNCT\t_\t_\t3\tpunct\t_\t_

# a note

1\tSim\tsim\tADV\t_\t_\t_\t_\t_\t_
"""


def word_line(number: int, form: str = "a", head: str = "_") -> str:
    return "\t".join([str(number), form, "_", "X", "_", "_", head, "_", "_", "_"])


def test_words_without_contractions_and_empty_nodes() -> None:
    first, second = parse_conllu(SAMPLE, "f")
    assert first.comments == {"sent_id": "a-1", "text": "Na costa."}
    assert first.words == (
        Word("Em", "em", "ADP", 3, "case"),
        Word("a", "o", "DET", 3, "det"),
        Word("costa", "costa", "NOUN", 0, "root"),
        Word(".", ".", "PUNCT", 3, "punct"),
    )
    # Comments alone are not a sentence, and the last sentence needs no blank line after it.
    assert second == Sentence((Word("Sim", "sim", "ADV", None, "_"),), {})


FORMS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(
    lambda form: not form.startswith("#")
)


@given(st.lists(st.lists(FORMS, min_size=1), max_size=4))
def test_what_is_written_is_read(sentences: list[list[str]]) -> None:
    blocks = ["\n".join(word_line(i, form) for i, form in enumerate(s, 1)) for s in sentences]
    found = parse_conllu("\n\n".join(blocks), "f")
    assert [[word.form for word in sentence.words] for sentence in found] == sentences


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1 a _ X _ _ _ _ _ _"], r"f, line 2 has 1 columns: expected the 10 of CoNLL-U \(ID FORM"),
        ([word_line(1) + "\t_"], "f, line 2 has 11 columns: expected the 10"),
        ([word_line(1, form="")], r"f, line 2, column 2 \(FORM\): ''; expected a value, or _"),
        ([word_line(1), word_line(3)], r"f, line 3, column 1 \(ID\): '3'; expected 2, because"),
        ([word_line(0)], r"f, line 2, column 1 \(ID\): '0'; expected 1, because"),
        ([word_line(1, head="x")], r"f, line 2, column 7 \(HEAD\): 'x'; expected the number"),
        ([word_line(1, head="-1")], r"column 7 \(HEAD\): '-1'; expected the number"),
        ([word_line(1, head="²")], r"column 7 \(HEAD\): '²'; expected the number"),
        ([word_line(1), word_line(2, head="3")], r"line 3, column 7 \(HEAD\): '3'; expected 0 for"),
        ([word_line(1, head="1")], r"line 2, column 7 \(HEAD\): '1'; expected 0 for the root or"),
        (["1-2" + word_line(1)[1:]], "f, line 2: a sentence without words"),
    ],
)
def test_damage_is_named_with_its_place(lines: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_conllu("\n".join(["# text = a", *lines, ""]), "f")
    assert len(COLUMNS) == 10
