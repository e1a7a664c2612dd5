import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from minimized import training_losses
from tiny_training import Configure, compare
from torch import Tensor

from powernorm.norms import RegularizedBatchNorm
from powernorm_lab.data.batch import Batch
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.data.readers import read_corpus
from powernorm_lab.data.subwords import EncodedCorpus, encode_corpus
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.training import (
    OptimizerSettings,
    SmoothedTrainingSettings,
)
from powernorm_lab.tasks.lm.data import LanguageModelData
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.training import batches, fitting
from powernorm_lab.training.evaluation import evaluate, word_perplexity
from powernorm_lab.training.losses import TrainingLoss
from powernorm_lab.training.optimization import build_optimizer

SIZE = 300
PENALTIES = {"mean_penalty": 30.0, "var_penalty": 20.0}


@pytest.fixture(scope="module")
def encoded(text: Path) -> EncodedCorpus:
    return encode_corpus(read_corpus(text), SIZE)


def built(config: ComparisonSettings, norm: str = "ln") -> Any:
    return task_of(config).build(config, norm, (SIZE,), seed=0)


def cross_entropy_sum(model: torch.nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(
        model(batch.named["tokens"]).flatten(0, 1), batch.targets.flatten(), reduction="sum"
    )


def test_loss_is_mean_cross_entropy_plus_penalty_over_tokens(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    config = configure(norm_options={"rbn": PENALTIES}, dropout=0.0)
    model = built(config, "rbn")
    batch = LanguageModelData(encoded, config, 0).batches.batch(0)
    got = training_losses(model, batch)
    layers = [m for m in model.modules() if isinstance(m, RegularizedBatchNorm)]
    assert len(layers) == 3
    num_tokens = batch.targets.numel()
    penalties = sum(float(layer.penalty().detach()) for layer in layers)
    assert penalties > 1
    # A second model, because the first one's running statistics have moved.
    plain = cross_entropy_sum(built(config, "rbn"), batch).detach() / num_tokens
    assert float(got["cross_entropy"]) == pytest.approx(float(plain), rel=1e-6)
    assert float(got["loss"].detach()) == pytest.approx(
        float(plain) + penalties / num_tokens, rel=1e-6
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_update_sees_the_penalty_once(
    configure: Configure, tmp_path: Path, accumulation: int
) -> None:
    """The loss of an update in a run is (Σ cross entropies + Σ penalties) / tokens."""
    config = configure(
        norms=("rbn",),
        norm_options={"rbn": PENALTIES},
        dropout=0.0,
        optimizer=OptimizerSettings(accumulation=accumulation),
        training=SmoothedTrainingSettings(max_steps=1, tid_batches=0),
    )
    gradients: list[Tensor] = []
    real = fitting.optimized

    def keep(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Record the gradients before they are clipped."""
        gradients.extend(p.grad.clone() for p in real(optimizer) if p.grad is not None)
        return real(optimizer)

    with patch.object(fitting, "optimized", keep):
        compare(config, tmp_path)

    encoded = task_of(config).encode(config)
    model = task_of(config).build(config, "rbn", (encoded.vocabulary_size,), seed=0)
    groups = build_optimizer(model, config.optimizer)
    layers = [m for m in model.modules() if isinstance(m, RegularizedBatchNorm)]
    total, num_tokens = torch.zeros(()), 0
    segments = LanguageModelData(encoded, config, 0).batches
    for position in range(accumulation):
        batch = segments.batch(position)
        loss = cross_entropy_sum(model, batch)
        loss = loss + sum(layer.penalty() for layer in layers)
        loss.backward()
        total, num_tokens = total + loss.detach(), num_tokens + batch.targets.numel()
    expected = [p.grad / num_tokens for p in real(groups) if p.grad is not None]
    assert len(gradients) == len(expected)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)


def test_an_update_holds_the_same_tokens_however_it_is_divided(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    whole = configure()
    parts = replace(
        whole,
        data=replace(whole.data, batch_size=whole.data.batch_size // 4),
        optimizer=replace(whole.optimizer, accumulation=4),
    )
    updates, micro_batches = (LanguageModelData(encoded, c, 0).batches for c in (whole, parts))
    later = 2 * updates.batches_per_epoch + 1
    cut = [micro_batches.batch(4 * later + part).named["tokens"] for part in range(4)]
    assert torch.equal(torch.cat(cut), updates.batch(later).named["tokens"])


def test_penalty_changes_the_gradient_noticeably(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    """This guards the two tests above: without the penalty their numbers would differ."""
    gradients = []
    for options in (PENALTIES, {"mean_penalty": 0.0, "var_penalty": 0.0}):
        config = configure(norm_options={"rbn": options}, dropout=0.0)
        model = built(config, "rbn")
        batch = LanguageModelData(encoded, config, 0).batches.batch(0)
        training_losses(model, batch)["loss"].backward()
        gradients.append(model.embedding.weight.grad)
    assert gradients[0] is not None
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-2)


def test_label_smoothing_is_minimized_but_not_logged(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    config = configure(training=SmoothedTrainingSettings(label_smoothing=0.2), dropout=0.0)
    batch = LanguageModelData(encoded, config, 0).batches.batch(0)
    model = built(config)
    got = TrainingLoss(model, config.label_smoothing)(batch)
    logits = model(batch.named["tokens"]).flatten(0, 1)
    log_p = logits.log_softmax(-1)
    plain = -log_p.gather(1, batch.targets.flatten()[:, None]).mean().detach()
    assert float(got.cross_entropy) == pytest.approx(float(plain), rel=1e-5)
    smooth = (0.8 * plain - 0.2 * log_p.mean()).detach()
    assert float(got.minimized.detach()) == pytest.approx(float(smooth), rel=1e-5)


CPU = torch.device("cpu")


def test_all_norms_get_the_same_batches(configure: Configure, encoded: EncodedCorpus) -> None:
    config = configure()
    first, second, other = (
        [
            batch.named["tokens"]
            for (batch,) in LanguageModelData(encoded, config, seed).updates(CPU)
        ]
        for seed in (3, 3, 4)
    )
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not torch.equal(other[0], first[0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_run_that_goes_on(
    configure: Configure, encoded: EncodedCorpus, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run gets the remaining batches, with and without workers, and draws nothing."""
    monkeypatch.setattr(batches, "_num_loader_workers", lambda _: num_workers)
    config = configure(
        optimizer=OptimizerSettings(accumulation=3),
        training=SmoothedTrainingSettings(max_steps=12),
    )
    data = LanguageModelData(encoded, config, 0)
    whole = [data.batches.batch(position).named["tokens"] for position in range(12 * 3)]
    before = torch.get_rng_state()
    updates = list(data.updates(CPU, 10))
    assert [len(update) for update in updates] == [3, 3]
    rest = [batch.named["tokens"] for update in updates for batch in update]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[10 * 3 :], strict=True))


def test_evaluation_is_the_likelihood_of_every_token(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    config = configure()
    data = LanguageModelData(encoded, config, 0)
    model = task_of(config).build(config, "bn", (SIZE,), seed=0).train()
    for split in SPLITS:
        part = encoded.splits[split]
        got = evaluate(
            model,
            data.evaluation(split),
            words_per_token=data.words_per_token(split),
            device=torch.device("cpu"),
        )
        assert model.training
        assert got.num_tokens == part.num_tokens
    model.eval()
    stream = torch.cat([torch.zeros(1, dtype=torch.long), part.tokens])
    nll = 0.0
    with torch.no_grad():
        for start in range(0, part.num_tokens, 12):
            piece = stream[start : start + 13]
            log_p = model(piece[None, :-1])[0].double().log_softmax(-1)
            nll -= float(log_p.gather(1, piece[1:, None]).sum())
    assert got.nll == pytest.approx(nll, rel=1e-5)
    assert got.loss == pytest.approx(nll / part.num_tokens, rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(nll / part.num_words), rel=1e-4)


def test_perplexity_of_a_hopeless_loss_is_infinite() -> None:
    assert word_perplexity(1e6, 0.5) == float("inf")
    assert word_perplexity(float("nan"), 0.5) != word_perplexity(float("nan"), 0.5)


def test_weight_decay_spares_vectors(configure: Configure) -> None:
    model = task_of(configure()).build(configure(), "ln", (SIZE,), seed=0)
    optimizer = build_optimizer(model, OptimizerSettings(weight_decay=0.3))
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    for name, parameter in model.named_parameters():
        is_matrix = "norm" not in name and not name.endswith("bias")
        assert (id(parameter) in decayed) == is_matrix, name
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.slow
def test_a_compiled_training_comes_to_the_same(configure: Configure, tmp_path: Path) -> None:
    config = configure(norms=("pn",), dropout=0.0)
    compiled = replace(config, training=replace(config.training, compile=True))
    (plain,) = compare(config, tmp_path / "plain").runs
    (fast,) = compare(compiled, tmp_path / "compiled").runs
    for name, value in plain.metrics.items():
        assert fast.metrics[name] == pytest.approx(value, rel=1e-4), name
