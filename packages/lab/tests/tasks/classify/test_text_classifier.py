from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lab.tests.task_models import check_first_weights
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import NORMS, BatchStatisticsNorm, build_norm
from powernorm_lab.models.choices import Placement, TransformerShape
from powernorm_lab.runs import PLACEMENTS
from powernorm_lab.tasks.classify.model import TextClassifier
from powernorm_lab.tasks.classify.settings import Pooling

WORDS, CLASSES, LENGTH, FEATURES = 11, 3, 9, 8


def build(
    norm: str,
    *,
    pooling: Pooling = "mean",
    placement: Placement = "pre",
    embedding_features: int | None = None,
    dropout: float = 0.0,
    embedding_dropout: float = 0.0,
    num_norm_layers: int | None = None,
    seed: int = 0,
) -> TextClassifier:
    def make(num_features: int) -> nn.Module:
        return build_norm(norm, num_features)

    return TextClassifier(
        WORDS,
        CLASSES,
        make,
        TransformerShape(
            num_features=FEATURES,
            num_layers=2,
            num_heads=2,
            feedforward_features=12,
            placement=placement,
            dropout=dropout,
            num_norm_layers=num_norm_layers,
            activation="relu",
        ),
        max_length=LENGTH,
        embedding_features=embedding_features,
        pooling=pooling,
        embedding_dropout=embedding_dropout,
        seed=seed,
        upper_norm=lambda num_features: build_norm("ln", num_features),
    )


def texts(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (4, LENGTH), generator=generator)
    lengths = torch.tensor([9, 4, 1, 6])
    return tokens, torch.arange(LENGTH) >= lengths[:, None]


def trained(norm: str, pooling: Pooling, placement: Placement) -> TextClassifier:
    """Return a model with weights and running statistics other than the initial ones."""
    model = build(norm, pooling=pooling, placement=placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = F.cross_entropy(model(*texts(step)), torch.tensor([0, 1, 2, 0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.thinned(1)
@pytest.mark.parametrize("pooling", ["mean", "max", "cls"])
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NORMS)
def test_padding_is_deletion(norm: str, placement: Placement, pooling: Pooling) -> None:
    model = trained(norm, pooling, placement).eval()
    tokens, mask = texts(seed=7)
    with torch.no_grad():
        whole = model(tokens, mask)
        for row, kept in enumerate(~mask):
            alone = model(tokens[row : row + 1, kept])
            torch.testing.assert_close(whole[row], alone[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("placement", [one for one in PLACEMENTS if one not in ("pre", "post")])
def test_padding_is_deletion_with_every_placement(placement: Placement) -> None:
    test_padding_is_deletion("bn", placement, "mean")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("pooling", ["mean", "max", "cls"])
@pytest.mark.parametrize("norm", NORMS)
def test_what_stands_at_padding_changes_nothing_in_training(norm: str, pooling: Pooling) -> None:
    tokens, mask = texts(seed=7)
    found = []
    for filling in (0, 5):
        model = trained(norm, pooling, "pre").train()
        logits = model(tokens.masked_fill(mask, filling), mask)
        F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
        gradients = [p.grad for p in model.layers.parameters() if p.grad is not None]
        found.append((logits, gradients, [b.clone() for b in model.buffers()]))
    (logits, gradients, buffers), (others, other_gradients, other_buffers) = found
    torch.testing.assert_close(logits, others)
    torch.testing.assert_close(gradients, other_gradients)
    torch.testing.assert_close(buffers, other_buffers)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_pooling_by_hand(pooling: Pooling) -> None:
    model = build("ln", pooling=pooling).eval()
    tokens, mask = texts()
    states = model.features(tokens, mask)
    expected = []
    for row, kept in enumerate(~mask):
        own = states[row, kept]
        expected.append(own.mean(0) if pooling == "mean" else own.max(0).values)
    logits = model.head(torch.stack(expected))
    torch.testing.assert_close(model(tokens, mask), logits)


def test_the_mark_is_a_position_of_its_own_in_front() -> None:
    model = build("ln", pooling="cls").eval()
    tokens, mask = texts()
    states = model.features(tokens, mask)
    assert states.shape == (4, LENGTH + 1, FEATURES)
    torch.testing.assert_close(model(tokens, mask), model.head(states[:, 0]))
    # The output depends on the words.
    changed = (tokens + 1) % WORDS
    assert not torch.allclose(model(changed, mask), model(tokens, mask))


@pytest.mark.parametrize("pooling", ["mean", "max", "cls"])
@pytest.mark.parametrize("norm", ["ln", "bn", "pn"])
def test_rows_of_nothing_but_padding_do_no_harm(norm: str, pooling: Pooling) -> None:
    model = trained(norm, pooling, "pre").train()
    tokens, mask = texts()
    mask[1:] = True
    logits = model(tokens, mask)
    assert bool(logits.isfinite().all())
    logits.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    if norm != "ln":
        # The result is the same without these rows.
        alone = trained(norm, pooling, "pre").train()
        torch.testing.assert_close(alone(tokens[:1], mask[:1]), logits[:1])


@pytest.mark.parametrize("norm", NORMS)
def test_all_norms_start_from_the_same_weights(norm: str) -> None:
    check_first_weights(
        partial(build, pooling="cls", embedding_features=5), norm, 1 + 2 + 1 + 1 + 2 * 10 + 2
    )


def test_embeddings_of_another_size_are_projected() -> None:
    model = build("ln", embedding_features=5)
    assert model.embedding.weight.shape == (WORDS, 5)
    assert model(*texts()).shape == (4, CLASSES)
    assert build("ln", embedding_features=FEATURES).projection is None


def test_dropout_of_embeddings_drops_whole_words_and_leaves_their_positions() -> None:
    torch.manual_seed(0)
    model = build("none", embedding_dropout=0.5)
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens, _ = texts()
    for _ in range(50):
        model(tokens)
    words = torch.stack(seen) - model.positions.weight
    dropped = (words.abs() < 1e-7).all(dim=-1)
    torch.testing.assert_close(
        words[~dropped], model.embedding(tokens).expand_as(words)[~dropped], atol=1e-6, rtol=0
    )
    assert 0.45 < float(dropped.double().mean()) < 0.55
    seen.clear()
    model.eval()(tokens)
    torch.testing.assert_close(seen[0], model.embedding(tokens) + model.positions.weight)


def test_norms_of_the_lowest_layers_only() -> None:
    model = build("bn", num_norm_layers=1)
    names = [name for name, m in model.named_modules() if isinstance(m, BatchStatisticsNorm)]
    assert names == ["layers.0.attention_frame.norm", "layers.0.feedforward_frame.norm"]


def test_texts_that_are_too_long_are_refused() -> None:
    with pytest.raises(InputError, match="a text of 10 words is longer than max_length=9"):
        build("ln")(torch.zeros(1, LENGTH + 1, dtype=torch.long))


@pytest.mark.parametrize("norm", ["ln", "adanorm", "none", "bn", "rbn", "pn"])
def test_a_classifier_learns_which_word_is_there(norm: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, WORDS, (48, LENGTH), generator=generator)
    targets = torch.arange(48) % CLASSES
    lengths = torch.randint(2, LENGTH + 1, (48,), generator=generator)
    tokens[torch.arange(48), torch.arange(48) // 3 % 2] = targets
    mask = torch.arange(LENGTH) >= lengths[:, None]
    model = build(norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(tokens, mask), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0], norm
