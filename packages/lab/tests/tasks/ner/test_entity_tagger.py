from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from lab.tests.task_models import check_first_weights
from torch import Tensor, nn

from powernorm.norms import NORMS, BatchStatisticsNorm, build_norm
from powernorm_lab.models.choices import Placement, TransformerShape
from powernorm_lab.runs import PLACEMENTS
from powernorm_lab.tasks.ner.model import CharacterFeatures, EntityTagger
from powernorm_lab.tasks.ner.tag_sequences import TagSequences

WORDS, CHARACTERS, TAGS, LENGTH = 13, 9, 3, 6
FREE = ((True,) * TAGS, ((True,) * TAGS,) * TAGS, (True,) * TAGS)


def build(norm: str = "ln", *, seed: int = 0, **changes: Any) -> EntityTagger:
    sizes = {"num_features": 8, "num_heads": 2, "feedforward_features": 12}
    known = {item.name for item in fields(TransformerShape)} & changes.keys()
    chosen: dict[str, Any] = {"placement": "post", "activation": "relu", **sizes}
    chosen |= {name: changes.pop(name) for name in known}
    settings: dict[str, Any] = {
        "embedding_features": 5,
        "num_characters": CHARACTERS,
        "character_features": 4,
        "seed": seed,
    }

    def make(num_features: int) -> nn.Module:
        return build_norm(norm, num_features)

    return EntityTagger(
        WORDS,
        TagSequences(*FREE),
        make,
        TransformerShape(**chosen),
        **{**settings, **changes},
    )


def inputs(padding: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(3, LENGTH, dtype=torch.bool)
    if padding:
        mask[1:, -padding:] = True
    return {
        "tokens": torch.randint(1, WORDS, (3, LENGTH), generator=generator),
        "characters": torch.randint(0, CHARACTERS, (3, LENGTH, 4), generator=generator),
        "padding_mask": mask,
    }


@pytest.mark.parametrize(
    ("norm", "placement"),
    [
        *product(("ln", "bn", "rbn", "pn"), ("pre", "post")),
        *(("bn", one) for one in PLACEMENTS if one not in ("pre", "post", "bn-linear", "hybrid")),
    ],
)
def test_padding_changes_neither_statistics_nor_valid_outputs(
    norm: str, placement: Placement
) -> None:
    whole = inputs(padding=2)
    whole["padding_mask"][0, -2:] = True
    short = {name: value[:, :-2] for name, value in whole.items()}
    reference = build(norm, placement=placement).train()
    expected = reference(**short)
    garbage = {
        **whole,
        "tokens": whole["tokens"].clone(),
        "characters": whole["characters"].clone(),
    }
    garbage["tokens"][:, -2:] = 7
    garbage["characters"][:, -2:] = 3
    for batch in (whole, garbage):
        model = build(norm, placement=placement).train()
        torch.testing.assert_close(model(**batch)[:, :-2], expected)
        for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm", NORMS)
def test_all_norms_start_from_the_same_weights(norm: str) -> None:
    weights = check_first_weights(build, norm, 27)
    assert all(weight.any() for name, weight in weights.items() if "attention" in name)


def test_placement_decides_where_norms_stand() -> None:
    def num_norms(**changes: Any) -> int:
        modules = build("bn", **changes).modules()
        return sum(isinstance(module, BatchStatisticsNorm) for module in modules)

    assert num_norms(placement="pre") == 2 * 2 + 1
    assert num_norms(placement="post") == 2 * 2
    upper = {"num_norm_layers": 1, "upper_norm": nn.LayerNorm}
    assert num_norms(placement="pre", **upper) == 2


def test_characters_are_optional() -> None:
    batch = inputs()
    model = build(character_features=0).eval()
    torch.testing.assert_close(
        model(**batch), model(batch["tokens"], padding_mask=batch["padding_mask"])
    )
    with_characters = build().eval()
    other = {**batch, "characters": batch["characters"].flip(-1)}
    assert not torch.allclose(with_characters(**batch), with_characters(**other))


def test_words_and_characters_are_dropped_by_themselves() -> None:
    def rates(model: EntityTagger) -> tuple[float, float]:
        assert model.characters is not None
        return model.embedding_dropout.p, model.characters.dropout.p

    assert rates(build(dropout=0.1)) == (0.1, 0.1)
    assert rates(build(dropout=0.1, embedding_dropout=0.5)) == (0.5, 0.5)
    assert rates(build(embedding_dropout=0.5, character_dropout=0.0)) == (0.5, 0.0)


def test_loss_and_decoding_are_those_of_the_tag_sequences() -> None:
    model = build().eval()
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
    words = torch.tensor([[3, 5, 8, 2], [4, 0, 0, 0], [0, 0, 0, 0]])
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
