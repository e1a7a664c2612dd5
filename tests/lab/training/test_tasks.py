import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from minimized import training_losses
from tiny_training import TRAINING, Configure, compare, of_task

from powernorm.errors import InputError
from powernorm.inspection.modules import batch_layers
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.readers import load_corpus
from powernorm.lab.data.subwords import encode_corpus
from powernorm.lab.engine.folders import EARLY
from powernorm.lab.engine.state import read_checkpoint
from powernorm.lab.settings.comparison import ComparisonSettings, early_step, to_json
from powernorm.lab.tasks.registry import task_of
from powernorm.lab.tasks.settings import settings_from
from powernorm.lab.tasks.trained_models import load_trained, run_data, training_batches
from powernorm.lab.training.evaluation import evaluate
from powernorm.norms import penalty


def masked(configure: Configure, **changes: object) -> ComparisonSettings:
    return of_task("mlm", configure(**changes))


def test_masked_language_models_train_and_learn(configure: Configure, tmp_path: Path) -> None:
    training = replace(TRAINING, max_steps=120, validate_every=60, tid_batches=3)
    config = masked(configure, norms=("ln", "bn"), dropout=0.0, training=training)
    results = compare(config, tmp_path)
    (unigram,) = results.baselines
    base = unigram["metrics"]["test_loss"]
    assert base is not None
    for run in results.runs:
        loss = run.metrics["test_loss"]
        assert run.status == "finished"
        assert loss is not None
        assert loss < base - 0.05, run.norm
        # Per masked token, not per word.
        assert run.metrics["test_perplexity"] == pytest.approx(math.exp(loss))
    assert results.runs[1].tid is not None


def test_the_unigram_is_asked_for_the_masked_tokens_alone(configure: Configure) -> None:
    config = masked(configure)
    encoded = encode_corpus(load_corpus(config.data.path), config.data.vocabulary_size)
    counts = torch.bincount(encoded.splits["train"].tokens, minlength=encoded.vocabulary_size) + 1
    nll, number = 0.0, 0
    for batch in task_of(config).data(encoded, config, 0).evaluation("valid"):
        for target in batch.targets.flatten().tolist():
            if target != IGNORED:
                nll -= math.log(float(counts[target]) / float(counts.sum()))
                number += 1
    (found,) = task_of(config).baselines(encoded, config)
    assert found["metrics"]["valid_loss"] == pytest.approx(nll / number)


def test_the_masked_loss_is_the_mean_over_targets_plus_the_penalty(configure: Configure) -> None:
    config = masked(configure, dropout=0.0, norm_options={"rbn": {"mean_penalty": 10.0}})
    encoded = encode_corpus(load_corpus(config.data.path), config.data.vocabulary_size)
    data = task_of(config).data(encoded, config, 0)
    batch = data.batches.batch(0)
    size = encoded.vocabulary_size + task_of(config).num_extra_tokens
    model = task_of(config).build(config, "rbn", (size,), seed=0).train()
    found = training_losses(model, batch)

    other = task_of(config).build(config, "rbn", (size,), seed=0).train()
    logits = other(batch.named["tokens"], batch.named["padding_mask"]).detach()
    asked = batch.targets != IGNORED
    plain = F.cross_entropy(logits[asked], batch.targets[asked])
    added = penalty(other, reduction="token_sum").detach()
    torch.testing.assert_close(found["cross_entropy"], plain)
    torch.testing.assert_close(found["loss"].detach(), plain + added / batch.num_targets)
    assert added > 0


def test_padding_has_no_say_in_a_masked_language_model(configure: Configure) -> None:
    config = masked(configure, norms=("bn",), dropout=0.0)
    encoded = encode_corpus(load_corpus(config.data.path), config.data.vocabulary_size)
    batch = task_of(config).data(encoded, config, 0).batches.batch(0)
    padding = torch.zeros_like(batch.named["tokens"], dtype=torch.bool)
    padding[::2, -3:] = True
    model = task_of(config).build(config, "bn", (encoded.vocabulary_size + 1,), seed=0).train()
    before = model(batch.named["tokens"], padding)[~padding]
    after = model(batch.named["tokens"].masked_fill(padding, 7), padding)[~padding]
    torch.testing.assert_close(after, before)


def test_only_causal_models_cannot_see_ahead(configure: Configure) -> None:
    for config, sees in ((configure(dropout=0.0), False), (masked(configure, dropout=0.0), True)):
        model = task_of(config).build(config, "bn", (50,), seed=0).eval()
        tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 50
        differs = not torch.equal(model(tokens)[:, 0], model(changed)[:, 0])
        assert differs is sees


def test_an_unknown_task_lists_the_known_ones(configure: Configure) -> None:
    with pytest.raises(InputError, match="no task 'mt': choose one of lm, mlm"):
        settings_from(to_json(configure()) | {"task": "mt"})


def test_a_trained_model_knows_its_batches(configure: Configure, tmp_path: Path) -> None:
    config = masked(configure, norms=("bn",), seeds=(3,))
    results = compare(config, tmp_path)
    trained = load_trained(tmp_path / "bn-pre-seed3")
    batches = training_batches(trained.settings, 4)
    assert {"tokens", "padding_mask"} == set(batches[0])
    encoded = encode_corpus(load_corpus(config.data.path), config.data.vocabulary_size)
    expected = task_of(config).data(encoded, config, 3).batches.batch(2)
    assert torch.equal(batches[2]["tokens"], expected.named["tokens"])
    loss = evaluate(
        trained.model,
        run_data(trained.settings).evaluation("test"),
        words_per_token=1.0,
        device=torch.device("cpu"),
    ).loss
    assert loss == pytest.approx(results.runs[0].metrics["test_loss"])


EARLY_TRAINING = replace(TRAINING, early_checkpoint=0.4)


def test_the_early_checkpoint_is_of_its_update(configure: Configure, tmp_path: Path) -> None:
    config = configure(norms=("bn",), training=EARLY_TRAINING)
    assert early_step(config) == 5
    compare(config, tmp_path / "long")
    early = tmp_path / "long" / "bn-pre-seed0" / "checkpoints" / EARLY
    assert read_checkpoint(early)["step"] == 5
    model = load_trained(early).model
    # Every batch of the first five updates, and none after them, went through.
    (layer, *_) = batch_layers(model).values()
    assert int(layer.num_batches_tracked) == 5


def test_accumulated_updates_count_once(configure: Configure, tmp_path: Path) -> None:
    optimizer = replace(configure().optimizer, accumulation=2)
    config = configure(norms=("bn",), training=EARLY_TRAINING, optimizer=optimizer)
    compare(config, tmp_path)
    early = tmp_path / "bn-pre-seed0" / "checkpoints" / EARLY
    assert read_checkpoint(early)["step"] == 5
    (layer, *_) = batch_layers(load_trained(early).model).values()
    assert int(layer.num_batches_tracked) == 10


def test_without_the_setting_no_early_checkpoint_is_kept(
    configure: Configure, tmp_path: Path
) -> None:
    compare(configure(), tmp_path)
    assert not (tmp_path / "ln-pre-seed0" / "checkpoints" / EARLY).exists()
    with pytest.raises(InputError, match=r"early_checkpoint=1\.5 is too large"):
        replace(TRAINING, early_checkpoint=1.5)
