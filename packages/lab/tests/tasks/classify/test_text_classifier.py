import pytest
import torch
import torch.nn.functional as F
from lab.tests.tiny_models import (
    CLASSES,
    FEATURES,
    LENGTH,
    VOCABULARY,
    padding,
    text_classifier,
    tokens,
)
from torch import Tensor

from powernorm.norms import BatchStatisticsNorm
from powernorm_lab.tasks.classify.settings import Pooling


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_pooling_by_hand(pooling: Pooling) -> None:
    model = text_classifier("ln", pooling=pooling).eval()
    words, mask = tokens(4), padding(9, 4, 1, 6)
    states = model.features(words, mask)
    expected = []
    for row, kept in enumerate(~mask):
        own = states[row, kept]
        expected.append(own.mean(0) if pooling == "mean" else own.max(0).values)
    logits = model.head(torch.stack(expected))
    torch.testing.assert_close(model(words, mask), logits)


def test_the_mark_is_a_position_of_its_own_in_front() -> None:
    model = text_classifier("ln", pooling="cls").eval()
    words, mask = tokens(4), padding(9, 4, 1, 6)
    states = model.features(words, mask)
    assert states.shape == (4, LENGTH + 1, FEATURES)
    torch.testing.assert_close(model(words, mask), model.head(states[:, 0]))
    # The output depends on the words.
    changed = words % (VOCABULARY - 1) + 1
    assert not torch.allclose(model(changed, mask), model(words, mask))


def test_embeddings_of_another_size_are_projected() -> None:
    model = text_classifier("ln", embedding_features=5)
    assert model.embedding.weight.shape == (VOCABULARY, 5)
    assert model(tokens(4), padding(9, 4, 1, 6)).shape == (4, CLASSES)
    assert text_classifier("ln", embedding_features=FEATURES).projection is None


def test_dropout_of_embeddings_drops_whole_words_and_leaves_their_positions() -> None:
    torch.manual_seed(0)
    model = text_classifier("none", embedding_dropout=0.5)
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    words = tokens(4)
    for _ in range(50):
        model(words)
    found = torch.stack(seen) - model.positions.weight
    dropped = (found.abs() < 1e-7).all(dim=-1)
    torch.testing.assert_close(
        found[~dropped], model.embedding(words).expand_as(found)[~dropped], atol=1e-6, rtol=0
    )
    assert 0.45 < float(dropped.double().mean()) < 0.55
    seen.clear()
    model.eval()(words)
    torch.testing.assert_close(seen[0], model.embedding(words) + model.positions.weight)


def test_norms_of_the_lowest_layers_only() -> None:
    model = text_classifier("bn", num_norm_layers=1)
    names = [name for name, m in model.named_modules() if isinstance(m, BatchStatisticsNorm)]
    assert names == ["layers.0.attention_frame.norm", "layers.0.feedforward_frame.norm"]


@pytest.mark.parametrize("norm", ["ln", "adanorm", "none", "bn", "rbn", "pn"])
def test_a_classifier_learns_which_word_is_there(norm: str) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(3, VOCABULARY, (48, LENGTH), generator=generator)
    targets = torch.arange(48) % CLASSES
    lengths = torch.randint(2, LENGTH + 1, (48,), generator=generator)
    words[torch.arange(48), torch.arange(48) // 3 % 2] = targets
    mask = torch.arange(LENGTH) >= lengths[:, None]
    model = text_classifier(norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(words, mask), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0], norm
