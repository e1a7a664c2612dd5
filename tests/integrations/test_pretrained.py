"""Models in folders of Hugging Face's layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_encoder import TEXTS, write_encoder

import powernorm
from powernorm.errors import InputError
from powernorm.integrations.folded_pretrained import copy_companions
from powernorm.integrations.pretrained import (
    build_from_config,
    diagnose_pretrained,
    is_pretrained,
    load_pretrained,
    load_tokenizer,
)
from refusals import refuses
from surgery.models_of_other_lengths import CONVOLUTIONS, SPEECH

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def test_a_pretrained_model_is_diagnosed(encoder: Path, tmp_path: Path) -> None:
    assert is_pretrained(encoder)
    (tmp_path / "config.json").write_text('{"task": "lm"}')
    assert not is_pretrained(tmp_path)
    report = diagnose_pretrained(encoder, TEXTS, num_batches=3, batch_size=4, length=6)
    assert (report.num_batches, report.num_tokens) == (3, 3 * 4 * 6)
    assert report.model.startswith("BertModel in encoder")


def swapped(encoder: Path) -> Any:
    model = load_pretrained(encoder).model
    powernorm.swap(model, "bn")
    powernorm.calibrate(model, load_pretrained(encoder).batches(TEXTS, 4, 6))
    return model


@pytest.mark.parametrize("library", ["transformers", "powernorm"])
def test_a_swapped_model_is_read_as_it_was_written(
    encoder: Path, tmp_path: Path, library: str
) -> None:
    """By the key in its config.json, whichever library has written the folder."""
    model, folder = swapped(encoder), tmp_path / "swapped"
    if library == "transformers":
        model.save_pretrained(folder)
    else:
        powernorm.save(model, folder)
    copy_companions(encoder, folder)
    report = diagnose_pretrained(folder, TEXTS, num_batches=3, batch_size=4, length=6)
    assert {row.kind for row in report.rows} == {"bn"}
    batch = load_pretrained(folder).batches(TEXTS, 4, 6)[0]
    expected = model.eval()(**batch).last_hidden_state
    for found in (load_pretrained(folder), load_pretrained(folder, with_head=True, complete=True)):
        assert torch.equal(found.model(**batch).last_hidden_state, expected)
    built = build_from_config(folder)
    assert {row.kind for row in powernorm.plan_swap(built, to="rbn").rows} == {"bn"}


def test_what_cannot_be_diagnosed(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are 40 texts, fewer than two batches of 5000"):
        diagnose_pretrained(encoder, TEXTS, batch_size=5000)
    refuses("num_batches is 1", diagnose_pretrained, encoder, TEXTS, num_batches=1)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refuses("holds no model that can be loaded", diagnose_pretrained, tmp_path, TEXTS, batch_size=4)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_a_folder_without_a_tokenizer(kind: str, tmp_path: Path) -> None:
    """Transformers makes one that knows no word."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    refuses(r"holds no tokenizer: copy .* \(.*tokenizer.json", load_tokenizer, tmp_path)


def test_a_model_of_sounds_is_asked_for_batches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(**SPEECH, **CONVOLUTIONS)
    transformers.Wav2Vec2Model(config).save_pretrained(tmp_path)
    said = "holds a Wav2Vec2Model, which takes input_values, not text: give module:name"
    refuses(said, load_pretrained(tmp_path).batches, ["a text"], 1, 8)


def test_loading_prints_nothing(encoder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging = pytest.importorskip("transformers").utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_pretrained(encoder)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_damaged_tokenizer(encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="holds no tokenizer that can be loaded"):
        _ = load_pretrained(tmp_path / "model").tokenizer


def test_rows_end_where_the_models_positions_do(encoder: Path) -> None:
    found = load_pretrained(encoder)
    found.model.config.max_position_embeddings = 5
    (batch, *others) = found.batches(TEXTS, 16, 128)
    assert batch["input_ids"].shape == (16, 5)
    assert len(others) == 1  # the last eight texts fill no batch


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "line 1: not JSON"), ("{}", "has no model_type"), ('{"model_type": "no"}', "no model")],
)
def test_configurations_that_give_no_model(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    refuses(words, build_from_config, file)


def test_a_configuration_with_infinity(encoder: Path, tmp_path: Path) -> None:
    """Transformers has written it into configurations, though it is not JSON."""
    text = (encoder / "config.json").read_text()
    file = tmp_path / "config.json"
    file.write_text(text.replace("{", '{"limits": [0.0, Infinity],', 1))
    assert is_pretrained(tmp_path)
    assert build_from_config(file).config.limits == [0.0, float("inf")]
