import copy
from itertools import product

import pytest
import torch
from lab.tests.tiny_models import (
    MODELS,
    VOCABULARY,
    check_causal,
    tokens,
    trained,
    transformer_xl,
)
from naive_transformer_xl import naive_logits
from torch import Tensor

from powernorm.norms import NORMS, Norm
from powernorm.surgery import fold
from powernorm_lab.models.choices import Placement
from powernorm_lab.runs import PLACEMENTS
from powernorm_lab.tasks.lm_char.model import TransformerXL, shifted

TEXT = 12
READ = MODELS["transformer-xl"].inputs


def text(rows: int = 2, seed: int = 0) -> Tensor:
    return tokens(rows, TEXT, seed)


def in_segments(model: TransformerXL, words: Tensor, length: int) -> Tensor:
    """Return the logits of a text, computed segment by segment."""
    outputs = []
    for first in range(0, words.shape[1], length):
        starts = torch.arange(len(words)) * 1000 + first
        outputs.append(model(words[:, first : first + length], starts))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", ["ln", "bn", "pn", "adanorm"])
@pytest.mark.parametrize(
    ("length", "memory", "max_distance"), [(3, 4, None), (4, 2, 3), (5, 0, None), (2, 20, 6)]
)
@torch.no_grad()
def test_against_loops_in_float64(
    norm: str, placement: Placement, length: int, memory: int, max_distance: int | None
) -> None:
    with torch.enable_grad():
        model = trained(
            transformer_xl(
                norm, placement=placement, memory_length=memory, max_distance=max_distance
            ),
            READ,
        )
    model.double()
    tokens = text()
    expected = naive_logits(model, tokens, length, memory)
    # The encodings of distances are float32.
    torch.testing.assert_close(in_segments(model, tokens, length), expected, rtol=1e-5, atol=1e-6)


def test_shift_is_what_it_says() -> None:
    """Entry (i, j) has the distance memory + i - j, for keys up to the query."""
    length, keys = 4, 7
    by_distance = torch.arange(length * keys, dtype=torch.float32).view(1, length, keys)
    got = shifted(by_distance)
    for i in range(length):
        for j in range(keys - length + i + 1):
            distance = keys - length + i - j
            assert got[0, i, j] == by_distance[0, i, keys - 1 - distance]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_no_output_depends_on_a_later_token(norm: str, placement: Placement) -> None:
    with torch.enable_grad():
        model = trained(transformer_xl(norm, placement=placement, dropout=0.1), READ)
    tokens = text()
    check_causal(lambda x: in_segments(model, x, 4), tokens)
    for position in range(TEXT - 4):
        changed = tokens.clone()
        changed[:, position] = changed[:, position] % (VOCABULARY - 1) + 1
        # Also positions of the next segment, which attends to this one in the memory only.
        following = slice(position // 4 * 4 + 4, position // 4 * 4 + 8)
        got, expected = (in_segments(model, x, 4)[:, following] for x in (changed, tokens))
        assert not torch.equal(got, expected)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("norm", "placement"),
    [
        *product(NORMS, ("pre", "post")),
        *(("bn", one) for one in PLACEMENTS if one not in ("pre", "post", "bn-linear", "hybrid")),
    ],
)
@torch.no_grad()
def test_segments_with_memory_are_the_whole_text(norm: str, placement: Placement) -> None:
    with torch.enable_grad():
        model = trained(
            transformer_xl(norm, placement=placement, memory_length=TEXT), READ
        ).double()
    tokens = text()
    whole = model(tokens)
    for length in (1, 3, 4, TEXT):
        got = in_segments(model, tokens, length)
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_in_training_too_where_norms_look_at_one_token(placement: Placement) -> None:
    model = transformer_xl("ln", placement=placement, memory_length=TEXT).train()
    whole = model(text())
    torch.testing.assert_close(in_segments(model, text(), 4), whole)


def test_the_memory_is_no_longer_than_its_length() -> None:
    """A change out of reach of every layer's memory has no effect."""
    model = transformer_xl(memory_length=2).eval()
    tokens, changed = text(), text()
    changed[:, 0] = changed[:, 0] % (VOCABULARY - 1) + 1
    with torch.no_grad():
        before, after = in_segments(model, tokens, 2), in_segments(model, changed, 2)
    # Each of the two layers attends to two positions before its segment.
    assert not torch.equal(before[:, 2:6], after[:, 2:6])
    assert torch.equal(before[:, 6:], after[:, 6:])


def test_no_gradient_goes_into_the_memory() -> None:
    model = transformer_xl(memory_length=4).train()
    first, second = text()[:, :4], text()[:, 4:8]
    starts = torch.tensor([0, 100])
    model(first, starts)
    model(second, starts + 4).sum().backward()
    # If the first segment's graph were part of it, this would fail or change the gradients.
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    frozen = transformer_xl(memory_length=4).train()
    with torch.no_grad():
        frozen(first, starts)
    frozen(second, starts + 4).sum().backward()
    for name, parameter in frozen.named_parameters():
        # Autograd sums the uses of a weight in an unspecified order.
        torch.testing.assert_close(parameter.grad, got[name], rtol=1e-4, atol=1e-4)


def test_training_and_evaluation_have_memories_of_their_own() -> None:
    def second(model: TransformerXL, *, validated: bool) -> Tensor:
        starts = torch.tensor([0, 100])
        model.train()(text()[:, :4], starts)
        if validated:
            with torch.inference_mode():
                # Even an evaluation of the same positions.
                in_segments(model.eval(), text(seed=5), 4)
        output: Tensor = model.train()(text()[:, 4:8], starts + 4)
        return output

    undisturbed = second(transformer_xl(), validated=False)
    assert torch.equal(second(transformer_xl(), validated=True), undisturbed)
    anew = transformer_xl().train()(text()[:, 4:8], torch.tensor([4, 104]))
    assert not torch.equal(anew, undisturbed)


def test_memory_of_another_length_in_evaluation() -> None:
    short = transformer_xl(memory_length=2, evaluation_memory_length=TEXT).eval()
    with torch.no_grad():
        whole = short(text())
        torch.testing.assert_close(in_segments(short, text(), 4), whole)
    assert not torch.allclose(in_segments(short.train(), text(), 4), whole)


@pytest.mark.parametrize("training", [True, False])
def test_batches_that_take_turns_keep_their_memories(training: bool) -> None:
    """This holds in evaluation, too, in which TID and others use training batches."""
    model = transformer_xl(num_lanes=2, memory_length=TEXT).train(training)
    starts, segments = torch.tensor([0, 100]), range(0, TEXT, 4)
    alone = [in_segments(model, text(seed=seed), 4) for seed in (0, 1)]
    turns = [
        model(text(seed=seed)[:, first : first + 4], starts + 500 * seed + first)
        for first in segments
        for seed in (0, 1)
    ]
    for seed in (0, 1):
        assert torch.equal(torch.cat(turns[seed::2], dim=1), alone[seed])


def test_without_places_nothing_is_remembered() -> None:
    model = transformer_xl().eval()
    with torch.no_grad():
        once = model(text())
        assert torch.equal(model(text()), once)
        in_segments(model, text(), 4)
        assert torch.equal(model(text()), once)


def test_what_ends_in_padding_is_not_gone_on_from() -> None:
    model = transformer_xl().eval()
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1, 2:] = True
    starts = torch.tensor([0, 100])
    with torch.no_grad():
        padded = model(text()[:, :4], starts, mask)
        torch.testing.assert_close(padded[1, :2], model(text()[1:, :2])[0])
        model(text()[:, :4], starts, mask)
        anew = model(text()[:, 4:8])
        assert torch.equal(model(text()[:, 4:8], starts + 4), anew)


def test_a_row_of_padding_alone_is_finite() -> None:
    model = transformer_xl("bn").train()
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert model(torch.zeros(1, 4, dtype=torch.long), torch.tensor([-1]), mask).isfinite().all()


def test_parts() -> None:
    model = transformer_xl("bn", placement="pre")
    names = {name.split(".")[-2] for name, _ in model.named_parameters() if "attention." in name}
    assert names == {"query", "key_value", "distance", "output", "attention"}
    assert not any(name.endswith("bias") for name in names if name != "attention")
    assert model.head.weight is model.embedding.weight
    assert model.final_norm is not None
    assert transformer_xl("bn", placement="post").final_norm is None
    assert "memory" not in "".join(model.state_dict())


def test_a_copy_goes_on_by_itself() -> None:
    model = transformer_xl().train()
    starts = torch.tensor([0, 100])
    model(text()[:, :4], starts)
    twin = copy.deepcopy(model)
    expected = model(text()[:, 4:8], starts + 4)
    assert torch.equal(twin(text()[:, 4:8], starts + 4), expected)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", ["bn", "pn-static"])
def test_a_folded_model_has_no_norm_and_its_memory(norm: str, placement: Placement) -> None:
    model = trained(transformer_xl(norm, placement=placement, memory_length=6), READ).double()
    unfolded = copy.deepcopy(model)
    fold(model, (text(),))
    assert not any(isinstance(module, Norm) for module in model.modules())
    with torch.no_grad():
        expected = in_segments(unfolded, text(), 4)
        torch.testing.assert_close(in_segments(model, text(), 4), expected, rtol=1e-6, atol=1e-8)
