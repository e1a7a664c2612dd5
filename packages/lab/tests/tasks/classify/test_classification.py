import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lab.tests.training.minimized import training_losses
from lab.tests.training.tiny_training import TRAINING, Configure, compare, of_task

from powernorm.norms import NORMS, penalty
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.classify.data import ClassifiedTextData, EncodedTexts
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.tasks.trained_models import load_trained, run_text, training_batches


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts of 1 to 12 words, with a single word that determines the class."""
    folder = tmp_path_factory.mktemp("reviews")
    rng = random.Random(0)
    telling = {"good": ("lovely", "fine"), "bad": ("dull", "poor"), "so": ("okay", "fair")}
    for split, number in (("train", 240), ("valid", 60), ("test", 60)):
        lines = []
        for _ in range(number):
            label = rng.choice(list(telling))
            words = [f"w{rng.randrange(30)}" for _ in range(rng.randrange(12))]
            words.insert(rng.randrange(len(words) + 1), rng.choice(telling[label]))
            lines.append(f"{label}\t{' '.join(words)}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def classifying(
    configure: Configure,
    path: Path,
    *,
    batch_tokens: int | None = 128,
    norms: tuple[str, ...] = ("ln",),
    max_steps: int = 12,
) -> ComparisonSettings:
    training = replace(TRAINING, max_steps=max_steps, validate_every=max_steps // 3)
    config = of_task("classify", configure(dropout=0.0, norms=norms, training=training))
    sizes = (16, 16) if batch_tokens is None else (32, 64)
    data = replace(
        config.data,
        path=str(path),
        batch_tokens=batch_tokens,
        batch_size=sizes[0],
        evaluation_batch_size=sizes[1],
    )
    return replace(config, data=data)


def encoded_of(config: ComparisonSettings) -> EncodedTexts:
    encoded = task_of(config).encode(config)
    assert isinstance(encoded, EncodedTexts)
    return encoded


@pytest.mark.parametrize("batch_tokens", [None, 128])
def test_classifiers_learn_and_are_scored(
    configure: Configure, reviews: Path, tmp_path: Path, batch_tokens: int | None
) -> None:
    config = classifying(
        configure, reviews, batch_tokens=batch_tokens, norms=("ln", "bn"), max_steps=120
    )
    results = compare(config, tmp_path)
    prior, bayes = results.baselines
    assert (prior["name"], bayes["name"]) == ("unigram", "naive_bayes")
    assert bayes["metrics"]["test_accuracy"] == 100.0
    chance = prior["metrics"]["test_accuracy"]
    assert chance is not None
    for run in results.runs:
        assert run.status == "finished", run.message
        accuracy = run.metrics["test_accuracy"]
        assert accuracy is not None
        assert accuracy > chance + 30, run.norm
        assert run.examples_per_second
    assert results.runs[1].tid is not None
    assert results.data["splits"]["test"]["texts"] == 60
    assert results.data["classes"] == ["bad", "good", "so"]

    folder = tmp_path / "bn-pre-seed0"
    trained = load_trained(folder)
    encoded = encoded_of(config)
    assert run_text(trained.settings).fingerprint == encoded.fingerprint
    # Row by row without padding, with the chosen checkpoint.
    for name in ("valid", "test"):
        split = encoded.splits[name]
        with torch.no_grad():
            answers = [int(trained.model(text[None].long()).argmax()) for text in split.texts()]
        right = sum(a == b for a, b in zip(answers, split.labels.tolist(), strict=True))
        found = results.runs[1].metrics[f"{name}_accuracy"]
        assert found == pytest.approx(100 * right / len(split))
    (batch,) = training_batches(trained.settings, 1)
    assert set(batch) == {"tokens", "padding_mask"}
    assert diagnose_run(folder, num_batches=4).evaluation


def test_the_best_checkpoint_is_that_of_the_highest_valid_accuracy(
    configure: Configure, reviews: Path, tmp_path: Path
) -> None:
    config = classifying(configure, reviews, max_steps=60)
    training = replace(config.training, validate_every=5)
    (run,) = compare(replace(config, training=training), tmp_path).runs
    lines = (tmp_path / run.folder / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    seen = [
        float(cell)
        for line in lines[1:]
        if (cell := dict(zip(names, line.split(","), strict=True)).get("valid_score", ""))
    ]
    best = run.metrics["valid_accuracy"]
    assert best is not None
    assert seen, names
    assert best == pytest.approx(max(seen))


@pytest.mark.parametrize("norm", NORMS)
def test_norms_get_the_mask_of_the_padding(configure: Configure, reviews: Path, norm: str) -> None:
    config = classifying(configure, reviews, batch_tokens=None)
    encoded = encoded_of(config)
    task = task_of(config)
    batch = task.data(encoded, config, 0).batches.batch(0)
    padding = batch.named["padding_mask"]
    assert bool(padding.any())
    model = task.build(config, norm, task.sizes(encoded), seed=0).train()
    before = model(**batch.inputs())
    other = batch.named["tokens"].masked_fill(padding, 7)
    torch.testing.assert_close(model(other, padding), before)


def test_another_set_is_scored_by_the_words_of_the_first(
    configure: Configure, reviews: Path, tmp_path: Path
) -> None:
    config = classifying(configure, reviews)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.tsv").write_text("bad\tdull new words\ngood\tw1\n")
    encoded = task_of(config).encode(config, str(tmp_path))
    own = encoded_of(config)
    ids = {word: i for i, word in enumerate(own.vocabulary.words, start=2)}
    assert encoded.splits["test"].texts()[0].tolist() == [ids["dull"], 1, 1]
    assert encoded.labels == own.labels


def test_a_part_of_the_training_texts(configure: Configure, reviews: Path) -> None:
    config = classifying(configure, reviews)
    few = replace(config, data=replace(config.data, max_examples=50))
    assert len(encoded_of(few).splits["train"]) == 50
    assert encoded_of(few).fingerprint != encoded_of(config).fingerprint


@pytest.mark.parametrize("norm", ["ln", "rbn"])
def test_all_texts_of_an_accumulated_update_count_alike(
    configure: Configure, reviews: Path, norm: str
) -> None:
    config = override(classifying(configure, reviews), ["optimizer.accumulation=3"])
    encoded = encoded_of(config)
    data = ClassifiedTextData(encoded, config, 0)
    # The last update begins in one epoch and ends in the next.
    first = data.batches.batches_per_epoch // 3 * 3
    positions = range(first, first + 3) if data.batches.batches_per_epoch % 3 else range(3)
    batches = [data.batches.batch(position) for position in positions]
    sizes = [batch.num_targets for batch in batches]
    assert len(set(sizes)) > 1
    assert [batch.loss_targets for batch in batches] == [pytest.approx(sum(sizes) / 3)] * 3
    task = task_of(config)
    model, other = (task.build(config, norm, task.sizes(encoded), 0) for _ in range(2))
    mean, total = 0.0, 0.0
    for batch in batches:
        step = training_losses(model, batch)["loss"]
        step.backward()
        mean += float(step.detach()) / 3
        outputs = other(**batch.inputs())
        loss = F.cross_entropy(outputs, batch.targets, reduction="sum")
        if norm == "rbn":
            loss = loss + penalty(other, "token_sum")
        loss.backward()  # updates the running statistics, on which penalties depend
        total += float(loss.detach())
    assert mean == pytest.approx(total / sum(sizes), rel=1e-5)


def test_validation_during_the_run_may_read_a_part(configure: Configure, reviews: Path) -> None:
    config = classifying(configure, reviews)
    data = ClassifiedTextData(encoded_of(config), config, 0)
    whole = sum(batch.num_targets for batch in data.evaluation("valid"))
    part = sum(batch.num_targets for batch in data.evaluation("valid", max_tokens=100))
    assert whole == 60
    assert 0 < part < 30
