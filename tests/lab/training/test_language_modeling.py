import math
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from minimised import training_losses
from tiny_training import Configure
from torch import Tensor

from powernorm.lab.data.batch import Batch
from powernorm.lab.data.corpus import SPLITS
from powernorm.lab.data.readers import read_corpus
from powernorm.lab.data.subwords import EncodedCorpus, encode_corpus
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.training import (
    OptimizerSettings,
    SmoothedTrainingSettings,
)
from powernorm.lab.tasks.lm.batches import LanguageModelData
from powernorm.lab.tasks.registry import task_of
from powernorm.lab.training.batches import RunLoader
from powernorm.lab.training.evaluation import evaluate, word_perplexity
from powernorm.lab.training.module import TaskModule, build_optimizer, penalty_callback
from powernorm.lab.training.quietness import quiet_lightning
from powernorm.norms import RegularizedBatchNorm

SIZE = 300
PENALTIES = {"mean_penalty": 30.0, "var_penalty": 20.0}


@pytest.fixture(scope="module")
def encoded(text: Path) -> EncodedCorpus:
    return encode_corpus(read_corpus(text), SIZE)


def module(encoded: EncodedCorpus, config: ComparisonSettings, norm: str = "ln") -> TaskModule:
    model = task_of(config).build(config, norm, (SIZE,), seed=0)
    return TaskModule(model, config, LanguageModelData(encoded, config, 0))


def cross_entropy_sum(model: torch.nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(
        model(batch.named["tokens"]).flatten(0, 1), batch.targets.flatten(), reduction="sum"
    )


def test_loss_is_mean_cross_entropy_plus_penalty_over_tokens(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    config = configure(norm_options={"rbn": PENALTIES}, dropout=0.0)
    lightning = module(encoded, config, "rbn")
    batch = LanguageModelData(encoded, config, 0).segments.batch(0)
    got = training_losses(lightning, batch)
    layers = [m for m in lightning.model.modules() if isinstance(m, RegularizedBatchNorm)]
    assert len(layers) == 3
    num_tokens = batch.targets.numel()
    penalties = sum(float(layer.penalty().detach()) for layer in layers)
    assert penalties > 1
    # A second model, because the first one's running statistics have moved.
    plain = cross_entropy_sum(module(encoded, config, "rbn").model, batch).detach() / num_tokens
    assert float(got["cross_entropy"]) == pytest.approx(float(plain), rel=1e-6)
    assert float(got["loss"].detach()) == pytest.approx(
        float(plain) + penalties / num_tokens, rel=1e-6
    )


class GradientKeeper(pl.Callback):
    """Keeps the gradients of the first update."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        del trainer, optimizer
        if not self.gradients:
            self.gradients = [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_update_sees_the_penalty_once(
    configure: Configure, encoded: EncodedCorpus, accumulation: int
) -> None:
    """(Σ cross entropies + Σ penalties) / tokens of the update, through Lightning itself."""
    config = configure(
        norm_options={"rbn": PENALTIES},
        dropout=0.0,
        optimizer=OptimizerSettings(accumulation=accumulation),
        training=SmoothedTrainingSettings(max_steps=1),
    )
    keeper = GradientKeeper()
    with quiet_lightning():
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=1,
            accumulate_grad_batches=accumulation,
            callbacks=[keeper, penalty_callback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        data = LanguageModelData(encoded, config, 0)
        trainer.fit(module(encoded, config, "rbn"), datamodule=data)

    model = task_of(config).build(config, "rbn", (SIZE,), seed=0)
    layers = [m for m in model.modules() if isinstance(m, RegularizedBatchNorm)]
    total, num_tokens = torch.zeros(()), 0
    segments = LanguageModelData(encoded, config, 0).segments
    for position in range(accumulation):
        batch = segments.batch(position)
        loss = cross_entropy_sum(model, batch)
        loss = loss + sum(layer.penalty() for layer in layers)
        loss.backward()
        total, num_tokens = total + loss.detach(), num_tokens + batch.targets.numel()
    expected = [p.grad / num_tokens for p in model.parameters() if p.grad is not None]
    assert len(keeper.gradients) == len(expected)
    for got, wanted in zip(keeper.gradients, expected, strict=True):
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
    updates, micro_batches = (LanguageModelData(encoded, c, 0).segments for c in (whole, parts))
    later = 2 * updates.batches_per_epoch + 1
    cut = [micro_batches.batch(4 * later + part).named["tokens"] for part in range(4)]
    assert torch.equal(torch.cat(cut), updates.batch(later).named["tokens"])


def test_penalty_changes_the_gradient_noticeably(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    """Guards the two tests above: without the penalty their numbers would differ."""
    gradients = []
    for options in (PENALTIES, {"mean_penalty": 0.0, "var_penalty": 0.0}):
        config = configure(norm_options={"rbn": options}, dropout=0.0)
        lightning = module(encoded, config, "rbn")
        batch = LanguageModelData(encoded, config, 0).segments.batch(0)
        training_losses(lightning, batch)["loss"].backward()
        gradients.append(lightning.model.embedding.weight.grad)
    assert gradients[0] is not None
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-2)


def test_label_smoothing_is_minimised_but_not_logged(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    config = configure(training=SmoothedTrainingSettings(label_smoothing=0.2), dropout=0.0)
    batch = LanguageModelData(encoded, config, 0).segments.batch(0)
    lightning = module(encoded, config)
    got = lightning.training_step(batch, 0)
    logits = lightning.model(batch.named["tokens"]).flatten(0, 1)
    log_p = logits.log_softmax(-1)
    plain = -log_p.gather(1, batch.targets.flatten()[:, None]).mean().detach()
    assert float(got["cross_entropy"]) == pytest.approx(float(plain), rel=1e-5)
    smooth = (0.8 * plain - 0.2 * log_p.mean()).detach()
    assert float(got["loss"].detach()) == pytest.approx(float(smooth), rel=1e-5)


def test_all_norms_get_the_same_batches(configure: Configure, encoded: EncodedCorpus) -> None:
    config = configure()
    first, second = (LanguageModelData(encoded, config, 3).train_dataloader() for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.named["tokens"], two.named["tokens"])
    third = LanguageModelData(encoded, config, 4).train_dataloader()
    assert not torch.equal(next(iter(third)).named["tokens"], next(iter(LanguageModelData(
        encoded, config, 3).train_dataloader())).named["tokens"])  # fmt: skip


def test_loader_goes_on_where_its_state_was_taken(
    configure: Configure, encoded: EncodedCorpus
) -> None:
    config = configure(optimizer=OptimizerSettings(accumulation=3))

    def loader() -> RunLoader:
        return LanguageModelData(encoded, config, 0).train_dataloader()

    whole = [batch.named["tokens"] for batch in loader()]
    assert len(whole) == len(loader()) == 12 * 3
    stopped = loader()
    batches = iter(stopped)
    for _ in range(10):
        next(batches)
    state = stopped.state_dict()
    other = loader()
    other.load_state_dict(state)
    rest = [batch.named["tokens"] for batch in other]
    assert len(rest) == len(whole) - 10
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[10:], strict=True))


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
