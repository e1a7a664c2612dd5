from typing import Any

import torch
from lab.tests.tiny_models import CHARACTERS, LENGTH, MODELS, entity_tagger, padding
from torch import Tensor, nn

from powernorm.norms import BatchStatisticsNorm
from powernorm_lab.tasks.ner.model import CharacterFeatures, EntityTagger


def inputs() -> dict[str, Tensor]:
    lengths = (LENGTH, LENGTH - 2, LENGTH - 2)
    return {**MODELS["tagger"].inputs(0), "padding_mask": padding(*lengths)}


def test_placement_decides_where_norms_stand() -> None:
    def num_norms(**changes: Any) -> int:
        modules = entity_tagger("bn", **changes).modules()
        return sum(isinstance(module, BatchStatisticsNorm) for module in modules)

    assert num_norms(placement="pre") == 2 * 2 + 1
    assert num_norms(placement="post") == 2 * 2
    upper = {"num_norm_layers": 1, "upper_norm": nn.LayerNorm}
    assert num_norms(placement="pre", **upper) == 2


def test_characters_are_optional() -> None:
    batch = inputs()
    model = entity_tagger(character_features=0).eval()
    torch.testing.assert_close(
        model(**batch), model(batch["tokens"], padding_mask=batch["padding_mask"])
    )
    with_characters = entity_tagger().eval()
    other = {**batch, "characters": batch["characters"].flip(-1)}
    assert not torch.allclose(with_characters(**batch), with_characters(**other))


def test_words_and_characters_are_dropped_by_themselves() -> None:
    def rates(model: EntityTagger) -> tuple[float, float]:
        assert model.characters is not None
        return model.embedding_dropout.p, model.characters.dropout.p

    assert rates(entity_tagger(dropout=0.1)) == (0.1, 0.1)
    assert rates(entity_tagger(dropout=0.1, embedding_dropout=0.5)) == (0.5, 0.5)
    assert rates(entity_tagger(embedding_dropout=0.5, character_dropout=0.0)) == (0.5, 0.0)


def test_loss_and_decoding_are_those_of_the_tag_sequences() -> None:
    model = entity_tagger().eval()
    batch = inputs()
    scores = model(**batch)
    targets = torch.ones(3, LENGTH, dtype=torch.long).masked_fill(batch["padding_mask"], -100)
    torch.testing.assert_close(model.nll(scores, targets), model.tags.nll(scores, targets))
    decoded = model.decode(scores, batch["padding_mask"])
    assert [len(row) for row in decoded] == [LENGTH, LENGTH - 2, LENGTH - 2]


@torch.no_grad()
def test_character_features_are_a_masked_maximum_over_windows() -> None:
    torch.manual_seed(0)
    module = CharacterFeatures(CHARACTERS, 4)
    words = torch.tensor([[3, 5, 6, 2], [4, 0, 0, 0], [0, 0, 0, 0]])
    got = module(words)
    for row, length in enumerate([4, 1, 0]):
        padded = torch.cat(
            [torch.zeros(1, 4), module.embedding(words[row, :length]), torch.zeros(1, 4)]
        )
        found = [module.filters(padded[i : i + 3].flatten()).relu() for i in range(length)]
        expected = torch.stack(found).amax(0) if found else torch.zeros(4)
        torch.testing.assert_close(got[row], expected)
    # Neither the content nor the amount of padding after a word's end has an effect.
    torch.testing.assert_close(module(words[1, :1]), got[1])
