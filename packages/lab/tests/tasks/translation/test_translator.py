"""`load_translator`: translation of text by a trained run."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare, tiny_config
from lab.tests.training.tiny_translation import tiny_translation
from typer.testing import CliRunner

from powernorm.cli.commands import app
from powernorm.errors import InputError
from powernorm_lab.data.subwords import Subwords
from powernorm_lab.engine.folders import read_json
from powernorm_lab.tasks.translation.translator import load_translator


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWERNORM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was scored with the average of its checkpoints."""
    out = tmp_path_factory.mktemp("trained")
    compare(
        tiny_translation(
            pairs, norms=("bn",), training={"average_checkpoints": 2, "max_steps": 40}
        ),
        out,
    )
    return out / "bn-pre-seed0"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that tests may damage."""
    copy = tmp_path / "comparison" / trained.name
    shutil.copytree(trained, copy)
    return copy


def best(path: Path, sentences: list[str]) -> list[str]:
    return [ranked[0][0] for ranked in load_translator(path).translate(sentences)]


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as error:
        load_translator(path)
    return str(error.value)


def test_a_run_translates_as_it_was_scored(trained: Path, pairs: Path) -> None:
    source = (pairs / "test.de").read_text().splitlines()
    rows = [row.split("\t") for row in (trained / "translations.tsv").read_text().splitlines()[1:]]
    got = best(trained, source)
    assert got == [row[2] for row in rows]
    assert any(got)
    assert best(trained / "checkpoints" / "average.safetensors", source) == got
    for part in ("best.ckpt", "step-36.safetensors"):
        assert len(best(trained / "checkpoints" / part, source)) == len(got)


def test_a_folded_model_translates_wherever_it_is(
    trained: Path, pairs: Path, tmp_path: Path
) -> None:
    source = (pairs / "test.de").read_text().splitlines()
    for folder in (tmp_path / "folded", tmp_path / "checkpoints" / "folded"):
        done = CliRunner().invoke(app, ["fold", str(trained), "--out", str(folder)])
        assert done.exception is None, done.exception
        assert best(folder, source) == best(trained, source)


def test_sentences_keep_their_order(trained: Path) -> None:
    words = ["null", "eins", "zwei", "drei vier neun", "", "neun eins zwei null drei vier", " \t"]
    whole = best(trained, words)
    assert [bool(line) for line in whole] == [bool(line.strip()) for line in words]
    assert whole == [best(trained, [line])[0] for line in words]
    assert best(trained, []) == []


def test_scores_and_several_translations(trained: Path) -> None:
    first, empty = load_translator(trained, num_best=3).translate(["eins zwei", ""])
    scores = [score for _, score in first]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    assert len({text for text, _ in first}) == 3
    assert [text for text, _ in empty] == ["", "", ""]


def test_a_translation_is_one_line(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subword may be any byte, including a line break."""
    monkeypatch.setattr(Subwords, "decode", lambda _, rows: ["a\nb\u2028c\td\r"] * len(rows))
    assert best(trained, ["eins", "zwei"]) == ["a b c d", "a b c d"]


def test_a_sentence_that_is_too_long_is_cut_and_said(trained: Path) -> None:
    message = r"sentence 1 has \d{5,} subwords; only the first 31 are translated"
    with pytest.warns(UserWarning, match=message):
        assert len(best(trained, ["eins", "null " * 50_000, "zwei"])) == 3


def test_what_is_not_a_translation_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"The number {n} comes before {n + 1}." for n in range(600)))
    compare(tiny_config(str(text)), tmp_path / "lm")
    message = refusal(tmp_path / "lm" / "ln-pre-seed0")
    assert message.endswith("is a run of the task lm, which does not translate")
    assert "is no run of `powernorm compare`" in refusal(tmp_path)
    assert "is no run of `powernorm compare`" in refusal(text)


def test_damaged_files_are_named(run: Path) -> None:
    average = run / "checkpoints" / "average.safetensors"
    content = average.read_bytes()
    for damaged in (content[:-100], b"garbage", b""):
        average.write_bytes(damaged)
        assert "average.safetensors is damaged" in refusal(run)
    average.write_bytes(content)
    subwords = run / "subwords.json"
    record, sealed = subwords.read_text(), read_json(subwords)
    for broken in (record[: len(record) // 2], "", "[]"):
        subwords.write_text(broken)
        assert str(subwords) in refusal(run)
    changed = {**sealed, "source": sealed["source"][:1000]}
    for wrong in ({}, changed):
        subwords.write_text(json.dumps(wrong))
        assert f"{subwords} holds no subwords" in refusal(run)
    subwords.unlink()
    assert f"{subwords} with the subwords is missing" in refusal(run)
