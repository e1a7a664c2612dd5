"""Models of all tasks: a table of models, and the properties that each of them has."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from lab.tests.tiny_models import (
    CLASSES,
    MODELS,
    TinyModel,
    check_causal,
    convnet,
    drawn,
    entity_tagger,
    language_model,
    outside_norms,
    padding,
    resnet,
    tensorized_model,
    text_classifier,
    tokens,
    trained,
    transformer_xl,
    translation_model,
)
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import NORMS
from powernorm.surgery import fold
from surgery.static_models import left_of

MASKED = [name for name, row in MODELS.items() if row.masks]
ALONE = [*MASKED, "parser", "convnet", "resnet", "projecting"]
"""Models in which rows do not follow each other."""

Changes = dict[str, Any]
"""Type of changes of a model's shape."""


def grid(names: list[str]) -> list[tuple[str, str, Changes]]:
    """Return each model with every norm, in pre- and post-norm if it has them."""
    return [
        (name, norm, changes)
        for name in names
        for norm in NORMS
        for changes in MODELS[name].variants[:2]
    ]


def variants(names: list[str]) -> list[tuple[str, str, Changes]]:
    """Return all variants of each model with BatchNorm, and its first one with other norms."""
    return [
        *((name, "bn", changes) for name in names for changes in MODELS[name].variants),
        *((name, norm, MODELS[name].variants[0]) for name in names for norm in ("ln", "pn")),
    ]


def check_first_weights(name: str, norm: str) -> None:
    """Check that initial weights depend on the seed alone, not on norms or on earlier draws."""
    row = MODELS[name]
    torch.manual_seed(len(norm))
    weights, reference, other = (
        outside_norms(row.build(one, seed=seed)) for one, seed in ((norm, 5), ("ln", 5), (norm, 6))
    )
    assert weights.keys() == reference.keys() == other.keys()
    assert len(weights) == row.num_weights
    for key, weight in weights.items():
        is_constant = bool((weight == weight.flatten()[0]).all())
        assert torch.equal(weight, reference[key]), key
        assert is_constant or not torch.equal(weight, other[key]), key
        assert weight.any() or "bias" in key, key


@pytest.mark.thinned(1)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_all_norms_start_from_the_same_weights(name: str, norm: str) -> None:
    check_first_weights(name, norm)


@pytest.mark.parametrize("norm", ["bn", "pn", "adanorm", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_starts_from_weights_of_its_seed(name: str, norm: str) -> None:
    check_first_weights(name, norm)


# Padding -----------------------------------------------------------------------------------------


def with_padding(row: TinyModel, whole: Mapping[str, Tensor], *lengths: int) -> dict[str, Tensor]:
    """Return inputs with masks for rows of these lengths, of a second side in reverse order."""
    found = dict(whole)
    for side, mask in enumerate(dict.fromkeys(row.masks.values())):
        size = next(whole[name].shape[1] for name, own in row.masks.items() if own == mask)
        own = lengths if side == 0 else lengths[::-1]
        found[mask] = padding(*(min(one, size) for one in own), length=size)
    return found


def rows_alone(row: TinyModel, padded: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield each row without its padding."""
    for number in range(len(next(iter(padded.values())))):
        yield {
            name: value[number : number + 1, ~padded[row.masks[name]][number]]
            if name in row.masks
            else value[number : number + 1]
            for name, value in padded.items()
            if name not in row.masks.values()
        }


def in_double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def check_deletion(name: str, norm: str, changes: Changes) -> None:
    """Check that in evaluation each row has the outputs that it has alone."""
    row = MODELS[name]
    model = trained(row.build(norm, **changes), row.inputs).double()
    padded = in_double(row.inputs(7))
    if row.masks:
        padded = with_padding(row, padded, 9, 4, 1)
    with torch.no_grad():
        whole = model(**padded)
        for number, inputs in enumerate(rows_alone(row, padded)):
            alone = model(**inputs)[0]
            found = whole[number, : len(alone)] if row.outputs_of else whole[number]
            torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)


def check_deletion_in_training(name: str, norm: str, changes: Changes) -> None:
    """Check outputs, gradients and statistics of a batch that ends in tokens of padding."""
    row = MODELS[name]
    short = row.build(norm, **changes).double().train()
    padded = copy.deepcopy(short)
    for step in range(2):
        whole = in_double(row.inputs(step))
        cut = {key: value[:, :-2] for key, value in whole.items()}
        masks = {
            row.masks[key]: padding(*[value.shape[1] - 2] * 3, length=value.shape[1])
            for key, value in whole.items()
        }
        expected, got = short(**cut), padded(**whole, **masks)
        got = got[:, :-2] if row.outputs_of else got
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        expected.square().mean().backward()
        got.square().mean().backward()
    for (key, ours), theirs in zip(padded.named_buffers(), short.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=key)
    for (key, our), their in zip(padded.named_parameters(), short.parameters(), strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("name", "norm", "changes"), grid(ALONE), ids=str)
def test_each_row_is_computed_as_if_alone(name: str, norm: str, changes: Changes) -> None:
    check_deletion(name, norm, changes)


@pytest.mark.parametrize(("name", "norm", "changes"), variants(ALONE), ids=str)
def test_each_row_is_computed_as_if_alone_in_every_variant(
    name: str, norm: str, changes: Changes
) -> None:
    check_deletion(name, norm, changes)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("name", "norm", "changes"), grid(MASKED), ids=str)
def test_padding_changes_nothing_in_training(name: str, norm: str, changes: Changes) -> None:
    check_deletion_in_training(name, norm, changes)


@pytest.mark.parametrize(("name", "norm", "changes"), variants(MASKED), ids=str)
def test_padding_changes_nothing_in_training_in_every_variant(
    name: str, norm: str, changes: Changes
) -> None:
    check_deletion_in_training(name, norm, changes)


@pytest.mark.parametrize("norm", ["ln", "bn", "pn"])
@pytest.mark.parametrize("name", MASKED)
def test_rows_of_nothing_but_padding_do_no_harm(name: str, norm: str) -> None:
    row = MODELS[name]
    for lengths in ((9, 0, 9), (0, 0, 0)):
        model, alone = (row.build(norm).train() for _ in range(2))
        padded = with_padding(row, row.inputs(0), *lengths)
        outputs = model(**padded)
        outputs.square().mean().backward()
        assert outputs.isfinite().all()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all(buffer.isfinite().all() for buffer in model.buffers())
        if lengths[0]:
            filled = {key: value[::2] for key, value in padded.items()}
            torch.testing.assert_close(alone(**filled), outputs[::2])


# Texts -------------------------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["lm", "translation", "tensorized"])
def test_no_output_depends_on_a_later_token(name: str, norm: str, placement: str) -> None:
    row = MODELS[name]
    rate = 0.03 if name == "tensorized" else 0.1
    model = trained(row.build(norm, placement=placement, dropout=0.1), row.inputs, rate=rate)
    if name == "translation":
        source, mask = tokens(3, 6), padding(6, 4, 2)
        check_causal(lambda target: model(source, target, mask), tokens(3, 5, 1))
    else:
        check_causal(model, tokens())


DROPPING = [name for name, row in MODELS.items() if row.variants[0]] + ["parser"]


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_acts_in_training_only(name: str) -> None:
    row = MODELS[name]
    model = row.build("ln", dropout=0.5).train()
    assert not torch.equal(model(**row.inputs(0)), model(**row.inputs(0)))
    model.eval()
    assert torch.equal(model(**row.inputs(0)), model(**row.inputs(0)))


@pytest.mark.parametrize("name", ["lm", "translation", "parser"])
def test_gradients_reach_every_parameter(name: str) -> None:
    row = MODELS[name]
    for changes in row.variants[:2]:
        model = row.build("ln", **changes).train()
        outputs = model(**row.inputs(0)).flatten(0, -2)
        nn.functional.cross_entropy(outputs, torch.arange(len(outputs)) % CLASSES).backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 1e-6, key


# Folding -----------------------------------------------------------------------------------------

PLAIN = {"character_features": 0}
FOLDED: list[tuple[str, str, Changes, dict[str, int]]] = [
    ("parser", "bn", {}, {"fold": 2}),
    ("convnet", "bn", {}, {"fold": 1}),
    ("resnet", "bn", {}, {"fold": 9}),
    ("projecting", "bn", {}, {"fold": 11}),
    ("tensorized", "bn", {"placement": "pre"}, {"fold": 5}),
    # The columns of the tensor do not let the norm before them fold.
    ("tensorized", "bn", {"placement": "post"}, {"fold": 3, "multiply-add": 1}),
    # The keys of this attention are its unchanged input, so a multiply-add remains before it.
    ("tagger", "bn", {"placement": "pre", **PLAIN}, {"fold": 3, "multiply-add": 2}),
    ("tagger", "bn", {"placement": "post", **PLAIN}, {"fold": 3, "multiply-add": 1}),
    ("translation", "bn", {"placement": "deepnorm"}, {"fold": 10}),
    ("translation", "bn", {"placement": "bn-linear"}, {"fold": 26}),
]
SLOWLY_FOLDED: list[tuple[str, str, Changes, dict[str, int]]] = [
    ("tensorized", "rbn", {"placement": "pre"}, {"fold": 5}),
    ("classifier, mean", "bn", {"placement": "pre"}, {"fold": 5}),
    ("lm", "bn", {"placement": "pre"}, {"fold": 5}),
    ("translation", "bn", {"placement": "sandwich"}, {"fold": 22}),
    ("translation", "bn", {"placement": "peri"}, {"fold": 24}),
    ("translation", "bn", {"placement": "out"}, {"fold": 12}),
    ("translation", "bn", {"placement": "mix"}, {"fold": 12}),
    ("translation", "bn", {"placement": "normformer"}, {"fold": 22}),
    ("translation", "bn", {"placement": "bn-ffn"}, {"fold": 16}),
    ("translation", "bn", {"placement": "lns"}, {"fold": 12}),
    # Norms that the heads share leave a multiply-add.
    ("translation", "bn", {"placement": "hybrid"}, {"fold": 8, "multiply-add": 18}),
    ("translation", "bn", {"qk_norm": "whole"}, {"fold": 24}),
]


@pytest.mark.parametrize(
    ("name", "norm", "changes", "left"),
    [*FOLDED, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOWLY_FOLDED)],
    ids=str,
)
def test_norms_fold_into_the_weights(
    name: str, norm: str, changes: Changes, left: dict[str, int]
) -> None:
    row = MODELS[name]
    rate = 0.03 if name == "tensorized" else 0.1
    model = trained(row.build(norm, **changes), row.inputs, rate=rate).double()
    whole = in_double(row.inputs(7))
    batches = [with_padding(row, whole, 9, 4, 1) if row.masks else whole]
    if row.outputs_of:  # the plan is made on whole texts
        batches.append({key: value[:, :4] for key, value in whole.items()})
    expected = [model(**batch).detach() for batch in batches]
    report = fold(model, batches[0])
    assert Counter(map(left_of, report.rows)) == left
    for batch, before in zip(batches, expected, strict=True):
        gap = (model(**batch).detach() - before).abs().max() / before.abs().max()
        assert float(gap) <= 1e-12


# Bad input ---------------------------------------------------------------------------------------

TWO = tokens(2, 3)
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: language_model()(tokens(1, 10)), "sequence of 10 tokens is longer than max_length=9"),
    (lambda: tensorized_model()(tokens(1, 10)), "of 10 tokens is longer than max_length=9"),
    (lambda: text_classifier()(tokens(1, 10)), "a text of 10 words is longer than max_length=9"),
    (lambda: language_model(num_heads=3), "num_heads=3 does not divide num_features=8"),
    (lambda: transformer_xl(num_heads=3), "num_heads=3 does not divide num_features=8"),
    (lambda: translation_model(num_heads=3), "num_heads=3 does not divide num_features=8"),
    (lambda: entity_tagger(num_heads=3), "num_heads=3 does not divide num_features=8 into heads"),
    (lambda: translation_model(num_norm_layers=3), "num_norm_layers=3 of num_layers=2"),
    (
        lambda: translation_model().encode(TWO[0]),
        r"source has shape \(3,\) and dtype torch.int64",
    ),
    (
        lambda: translation_model()(TWO, TWO.float()),
        r"target has shape .* and dtype torch.float32",
    ),
    (lambda: translation_model()(TWO, TWO[:1]), "source has 2 rows and target 1"),
    (
        lambda: translation_model()(TWO, TWO, padding(4, 4)),
        r"source_padding_mask has shape \(2, 4\)",
    ),
    (
        lambda: translation_model()(TWO, TWO, None, torch.zeros_like(TWO)),
        r"target_padding_mask .* torch.int64, expected",
    ),
    (lambda: convnet(num_channels=2), "num_channels=2: give 1"),
    (lambda: resnet(num_channels=4), "num_channels=4: give 1"),
    (lambda: convnet(side=30), r"side=30: give 28 \(MNIST\) or 32"),
    (
        lambda: convnet()(drawn(6, 1, 32, 32)),
        r"shape \(6, 1, 32, 32\): the model takes \(images, 1, 28, 28\)",
    ),
    (
        lambda: resnet()(drawn(6, 3, 28, 28)),
        r"takes \(images, 1, 28, 28\) or \(images, 1, 32, 32\)",
    ),
    (lambda: resnet()(drawn(1, 28, 28)), r"shape \(1, 28, 28\)"),
    (lambda: resnet()(drawn(6, 1, 27, 28)), r"shape \(6, 1, 27, 28\)"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
