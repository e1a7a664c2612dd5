import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.training.tiny_training import TRAINING, Configure, compare, of_task
from powernorm.errors import InputError
from powernorm.lab.data.treebanks import load_treebank
from powernorm.lab.engine.events import DataPrepared, Event
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.tasks.registry import task_of
from powernorm.lab.tasks.trained_models import load_trained, run_text, training_batches


def tagging(configure: Configure, path: str = "turkish", **changes: object) -> ComparisonSettings:
    config = of_task("tag", configure(dropout=0.0, **changes))
    return replace(config, data=replace(config.data, path=path, batch_size=16))


def test_taggers_soon_know_more_than_the_frequencies(configure: Configure, tmp_path: Path) -> None:
    training = replace(TRAINING, max_steps=200, validate_every=100, tid_batches=3)
    events: list[Event] = []
    config = tagging(configure, norms=("ln", "bn"), training=training)
    results = compare(config, tmp_path, on_event=events.append)
    unigram, word = (row["metrics"]["test_loss"] for row in results.baselines)
    assert unigram is not None
    assert word is not None
    assert word < unigram
    for run in results.runs:
        loss = run.metrics["test_loss"]
        assert run.status == "finished"
        assert loss is not None
        assert loss < unigram - 0.5, run.norm
        # Per tag, not per word of the text.
        assert run.metrics["test_perplexity"] == pytest.approx(math.exp(loss))
    assert results.runs[1].tid is not None
    assert results.data["splits"]["test"]["documents"] == 485
    (prepared,) = (event for event in events if isinstance(event, DataPrepared))
    assert prepared.units == "words and tags"


def test_padding_has_no_say_in_a_tagger(configure: Configure) -> None:
    config = tagging(configure)
    encoded = task_of(config).encode(
        replace(config, data=replace(config.data, path="turkish", vocabulary_size=300))
    )
    batch = task_of(config).data(encoded, config, 0).batches.batch(0)
    padding = batch.named["padding_mask"]
    assert padding is not None
    assert bool(padding.any())
    for norm in ("ln", "bn"):
        model = task_of(config).build(config, norm, (encoded.vocabulary_size,), seed=0).train()
        before = model(**batch.inputs())[~padding]
        other = batch.named["tokens"].masked_fill(padding, 7)
        torch.testing.assert_close(model(other, padding)[~padding], before)
        # Neither has how much of it there is: the rows alone, one by one, in evaluation.
        model.eval()
        whole = model(**batch.inputs())
        for row, kept in enumerate(~padding):
            alone = model(batch.named["tokens"][row : row + 1, kept])[0]
            torch.testing.assert_close(whole[row, kept], alone, atol=1e-5, rtol=1e-4)


def test_a_tagger_knows_its_text_and_tags_another(configure: Configure, tmp_path: Path) -> None:
    config = tagging(configure, norms=("bn",))
    compare(config, tmp_path / "runs")
    settings = load_trained(tmp_path / "runs" / "bn-pre-seed0").settings
    (batch,) = training_batches(settings, 1)
    assert set(batch) == {"tokens", "padding_mask"}

    own = run_text(settings)
    assert own.fingerprint == settings["data_fingerprint"]
    sentences = load_treebank("turkish").sentences["test"]
    lines = []
    for item in sentences:
        lines += [
            f"{i}\t{word.form}\t_\t{word.tag}\t_\t_\t_\t_\t_\t_"
            for i, word in enumerate(item.words, start=1)
        ]
        lines.append("")
    path = tmp_path / "other.conllu"
    path.write_text("\n".join(lines), encoding="utf-8")
    other = run_text(settings, data=str(path))
    assert other.vocabulary_size == own.vocabulary_size
    # The first sentence of the run's test split begins this file too, in the same ids.
    start = len(sentences[0].words)
    assert torch.equal(other.splits["train"].tokens[:start], own.splits["test"].tokens[:start])
    path.write_text("1\ta\t_\tAUX\t_\t_\t_\t_\t_\t_\n\n" * 10)
    with pytest.raises(InputError, match="has the tag 'AUX', which the model does not know"):
        run_text(settings, data=str(path))


def test_a_text_without_tags_is_refused(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name of an embedded treebank"):
        compare(tagging(configure, path="rt"), tmp_path)
