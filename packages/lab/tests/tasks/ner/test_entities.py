import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.tests.training.minimized import training_losses
from lab.tests.training.tiny_training import compare
from tiny_entities import TRAINING, tiny_entities, write_entities

import powernorm
from powernorm.errors import InputError
from powernorm.norms import penalty
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.ner.data import NUM_MARKS, EncodedEntities, span_scores
from powernorm_lab.tasks.ner.model import EntityTagger
from powernorm_lab.tasks.ner.tag_schemes import spans_of
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.tasks.trained_models import load_trained, run_text, training_batches
from surgery.static_models import left_of


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_entities(tmp_path_factory.mktemp("entities") / "names")


def encoded_of(config: ComparisonSettings) -> EncodedEntities:
    encoded = task_of(config).encode(config)
    assert isinstance(encoded, EncodedEntities)
    return encoded


def build(config: ComparisonSettings, norm: str = "ln") -> EntityTagger:
    task = task_of(config)
    encoded = task.encode(config)
    model = task.build(config, norm, task.sizes(encoded), 0)
    task.fill(model, encoded)
    assert isinstance(model, EntityTagger)
    return model


def test_taggers_learn_more_than_each_word_says(names: Path, tmp_path: Path) -> None:
    training = replace(TRAINING, max_steps=90, validate_every=30, tid_batches=3)
    config = tiny_entities(names, norms=("ln", "bn", "rbn", "pn"), training=training)
    results = compare(config, tmp_path)
    unigram, word = (row["metrics"] for row in results.baselines)
    assert [row["name"] for row in results.baselines] == ["unigram", "word"]
    assert unigram["test_f1"] == 0
    assert word["test_f1"] is not None
    assert word["test_f1"] < 70
    for run in results.runs:
        metrics = run.metrics
        assert run.status == "finished"
        assert metrics["test_f1"] is not None
        assert metrics["test_f1"] > 80, run.norm
        assert {"valid_f1", "test_precision", "test_recall"} <= set(metrics)
        assert metrics["test_perplexity"] == pytest.approx(math.exp(metrics["test_loss"] or 0))
        assert (run.tid is not None) == (run.norm != "ln")
        assert run.examples_per_second
    splits = results.data["splits"]
    assert [splits[split]["documents"] for split in ("train", "valid", "test")] == [150, 40, 40]
    assert results.data["kinds"] == ["LOC", "PER"]


def test_the_loss_is_a_mean_over_sentences_and_reported_over_words(names: Path) -> None:
    config = tiny_entities(names, norm_options={"rbn": {"mean_penalty": 10.0}})
    data = task_of(config).data(encoded_of(config), config, 0)
    batch = data.batches.batch(0)
    found = training_losses(build(config, "rbn").train(), batch)
    other = build(config, "rbn").train()
    nll = other.nll(other(**batch.inputs()), batch.targets).detach()
    added = penalty(other, reduction="token_sum").detach()
    assert added > 0
    torch.testing.assert_close(found["loss"].detach(), (nll + added) / 10)
    torch.testing.assert_close(found["cross_entropy"], nll / batch.num_tokens)


def test_scores_are_those_of_whole_sentences(names: Path) -> None:
    config = tiny_entities(names, data={"sequence_length": 3, "evaluation_batch_size": 7})
    encoded = encoded_of(config)
    data = task_of(config).data(encoded, config, 0)
    model = build(config).eval()
    found: list[int] = []
    for batch in data.evaluation("test"):
        for tags in model.decode(model(**batch.inputs()), batch.named["padding_mask"]):
            found += tags
    sentences = encoded.corpus.sentences["test"]
    gold, predicted, at = [], [], 0
    for sentence in sentences:
        length = len(sentence.words)
        gold.append(sentence.spans)
        predicted.append(spans_of([encoded.tags[tag] for tag in found[at : at + length]], "iob"))
        at += length
    assert at == len(found)
    expected = span_scores(gold, predicted)
    assert data.scores("test", model, torch.device("cpu")) == expected
    assert config.score_name in expected


def test_word_vectors_begin_the_embeddings(names: Path, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("adams 0 0 2 0\nMR 1 0 0 0\nw19 0 3 4 0\n")
    given = {"vectors": str(path)}
    config = tiny_entities(names, data=given, model={"embedding_features": 4})
    weight = build(config).embedding.weight
    encoded = encoded_of(config)
    ids = {word: index for index, word in enumerate(encoded.words, start=NUM_MARKS)}
    assert weight[ids["adams"]].tolist() == [0, 0, 1, 0]
    assert weight[ids["mr"]].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(weight[ids["w19"]], torch.tensor([0, 0.6, 0.8, 0]))
    plain = tiny_entities(names, model={"embedding_features": 4})
    others = [index for word, index in ids.items() if word not in ("adams", "mr", "w19")]
    assert torch.equal(weight[others], build(plain).embedding.weight[others])

    with pytest.raises(InputError, match=r"vectors of 4 numbers.* set model\.embedding_features=4"):
        compare(tiny_entities(names, data=given), tmp_path / "out")


def as_characters(folder: Path, names: Path) -> Path:
    """Write the same sentences with a letter in place of each word."""
    folder.mkdir()
    letters: dict[str, str] = {}
    for file in sorted(names.iterdir()):
        lines = [line.split() for line in file.read_text().splitlines()]
        for columns in lines:
            if columns:
                columns[0] = letters.setdefault(columns[0], chr(0x4E00 + len(letters)))
        (folder / file.name).write_text("\n".join(map(" ".join, lines)) + "\n")
    return folder


def test_bigrams_from_file_to_a_trained_tagger(names: Path, tmp_path: Path) -> None:
    data = as_characters(tmp_path / "characters", names)
    first, second = (data / "train.char.bmes").read_text().split()[:4:2]
    file = tmp_path / "bi.vec"
    file.write_text(f"1 3\n{first}{second} 0 3 4\n")
    given = {"bigram_vectors": str(file)}
    with pytest.raises(InputError, match=r"bigram_vectors=.*bi.vec has .* set model.bigram_featu"):
        tiny_entities(data, data=given)
    with pytest.raises(InputError, match=r"vectors of 3 numbers.* set model\.bigram_features=3"):
        compare(tiny_entities(data, data=given, model={"bigram_features": 5}), tmp_path / "out")
    for characters in (None, 4):
        shape = {"bigram_features": 3, "character_features": characters}
        config = tiny_entities(data, norms=("bn",), data=given, model=shape)
        encoded = encoded_of(config)
        assert encoded.bigrams is not None
        place = encoded.bigrams[first + second]
        model = build(config)
        torch.testing.assert_close(model.bigrams.weight[place], torch.tensor([0, 0.6, 0.8]))
        plain = {**shape, "bigram_features": None}
        assert (
            model.projection.in_features
            == 3 + build(tiny_entities(data, model=plain)).projection.in_features
        )
    results = compare(config, tmp_path / "runs")
    assert results.data["bigram_vectors"] == 1
    run = tmp_path / "runs" / "bn-pre-seed0"
    trained = load_trained(run)
    (batch,) = training_batches(trained.settings, 1)
    assert set(batch) == {"tokens", "characters", "bigrams", "padding_mask"}
    assert trained.model(*trained.example_inputs()).shape[:2] == (2, 40)
    with torch.no_grad():
        trained.model.eval()
        other = {**batch, "bigrams": torch.full_like(batch["bigrams"], 1)}
        assert not torch.equal(trained.model(**batch), trained.model(**other))


def test_a_tagger_knows_its_words_and_reads_another_text(names: Path, tmp_path: Path) -> None:
    config = tiny_entities(names, norms=("bn",))
    compare(config, tmp_path / "runs")
    run = tmp_path / "runs" / "bn-pre-seed0"
    trained = load_trained(run)
    (batch,) = training_batches(trained.settings, 1)
    assert set(batch) == {"tokens", "characters", "padding_mask"}
    trained.model(*trained.example_inputs())
    own = run_text(trained.settings)
    assert own.fingerprint == trained.settings["data_fingerprint"]
    path = tmp_path / "other.iob2"
    path.write_text("in O\nEssen B-LOC\n\n" * 12)
    other = run_text(trained.settings, data=str(path))
    assert other.words == own.words
    assert len(other.corpus.sentences["train"]) == 10
    report = diagnose_run(run, num_batches=3)
    assert report.evaluation


def test_the_embedded_sentences_are_the_default(names: Path) -> None:
    config = tiny_entities(names)
    default = replace(config, data=replace(config.data, path=None))
    assert task_of(config).summary(task_of(config).encode(default)).name == "hironsan"
    own = task_of(config).encode(
        replace(config, data=replace(config.data, path=None, max_examples=40))
    )
    assert len(own.corpus.sentences["train"]) == 40
    # The user's file is not encoded with the words of the embedded corpus.
    assert encoded_of(config).kinds == ("LOC", "PER")


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_tagger_without_characters_folds_what_can_be(names: Path, placement: str) -> None:
    config = tiny_entities(
        names, model={"placement": placement, "num_layers": 2, "character_features": None}
    )
    task = task_of(config)
    encoded = task.encode(config)
    model = build(config, "bn").train()
    segments = task.data(encoded, config, 0).batches
    for position in range(3):
        model(**segments.batch(position).inputs())
    model.eval()
    batch = segments.batch(3).inputs()
    before = model(**batch)
    report = powernorm.fold(model, batch)
    torch.testing.assert_close(model(**batch), before, rtol=1e-4, atol=1e-4)
    actions = Counter(left_of(row) for row in report.rows)
    # The keys of the attention are its unchanged input, so a multiply-add remains before it.
    expected = {"pre": {"fold": 3, "multiply-add": 2}, "post": {"fold": 3, "multiply-add": 1}}
    assert actions == expected[placement]
