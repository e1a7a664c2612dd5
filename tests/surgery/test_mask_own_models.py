"""User-defined models: which arguments mark padding, and with which value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.inspection import mask_arguments
from powernorm.inspection.mask_checks import MaskWarning
from powernorm.surgery.swapping import plan_swap, swap
from refusals import refuses
from surgery.foreign_models import (
    PAD,
    VOCABULARY,
    WIDTH,
    images,
    padding,
    timm_vit,
    tokens,
    torch_encoder,
    vectors,
)
from surgery.test_mask_owners import all_get, seen_by

FULL = padding()
"""The first sequence has no padding, as in a batch that is as long as its longest."""

FORWARDS = {
    name: f"def forward(self, x, {name}=None): return self.run(x)"
    for name in (
        "mask", "src_mask", "pad_mask", "padding_mask", "src_padding_mask", "key_mask",
        "key_padding_mask", "input_mask", "valid_mask", "attention_mask", "lengths",
        "input_lengths", "x_lens", "ilens", "target_lengths", "m",
    )
}  # fmt: skip


class Own(nn.Module):
    """A user-defined model on vectors, or on tokens if it has an embedding."""

    def __init__(self, embeds: bool = False, length_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD) if embeds else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.length_first = length_first

    def run(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.norm(x.transpose(0, 1) if self.length_first else x)


def own(name: str, **options: Any) -> nn.Module:
    """A swapped model whose mask is the argument of that name."""
    scope: dict[str, Any] = {}
    exec(FORWARDS[name], scope)
    model = type("Mine", (Own,), {"forward": scope["forward"]})(**options).train()
    swap(model, "bn", momentum=1.0)
    return model


def mean_of_valid(model: nn.Module, x: Tensor, mask: Tensor) -> bool:
    return torch.allclose(model.norm.running_mean, x[~mask].mean(0), atol=1e-5)


def test_the_plan_says_that_no_mask_reaches() -> None:
    (row,) = plan_swap(own("m"), "bn").rows
    assert (row.action, row.mask, row.reason) == ("swap", None, "no mask reaches")
    assert plan_swap(own("m"), "ln").rows[0].reason == ""


@pytest.mark.parametrize("meaning", ["keep", "padding"])
@pytest.mark.parametrize("embeds", [False, True])
def test_padding_in_the_data_shows_the_direction(meaning: str, embeds: bool) -> None:
    # Each sequence is padded: the mask alone would fit both ways round.
    model, mask = own("mask", embeds=embeds), padding(2)
    x = tokens(2) if embeds else vectors(2).masked_fill(mask.unsqueeze(-1), 0.0)
    model(x, mask if meaning == "padding" else ~mask)
    assert mean_of_valid(model, model.embed(x).detach(), mask)


def test_what_cannot_be_told_is_one_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = own("mask"), torch.randn(2, 7, WIDTH)  # where padding is, nothing shows
    refuses(r'mask of Mine may.*declare_mask\("mask", "keep" or', model, x, ~padding(2))
    monkeypatch.setattr(mask_arguments, "_declared", {})
    powernorm.declare_mask("mask", "keep", type(model))
    model(x, ~padding(2))
    assert mean_of_valid(model, x, padding(2))


def test_a_declared_name_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_arguments, "_declared", {})
    powernorm.declare_mask("m", "padding")
    model = own("m")
    assert plan_swap(type(model)(), "bn").rows[0].mask == "m"
    model(vectors(), FULL)
    assert mean_of_valid(model, vectors(), FULL)
    powernorm.declare_mask("m", "lengths", type(model))
    model = type(model)().train()
    swap(model, "bn", momentum=1.0)
    model(vectors(), torch.tensor([5, 3]))
    assert mean_of_valid(model, vectors(), FULL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a b", "keep"), "name is 'a b'"),
        (("m", "valid"), "meaning is 'valid', expected one of keep, padding, lengths"),
        (("m", "keep", int), "cls is <class 'int'>"),
    ],
)
def test_declarations_that_mean_nothing(arguments: Any, words: str) -> None:
    refuses(words, powernorm.declare_mask, *arguments)


def test_a_batch_without_padding_decides_nothing() -> None:
    for ones in (True, False):
        model = own("mask")
        model(vectors(), torch.full((2, 5), ones))
        model(vectors(), FULL)
        assert mean_of_valid(model, vectors(), FULL)


def test_a_direction_that_changes_is_an_error() -> None:
    model = own("mask")
    model(vectors(), FULL)
    refuses(r"mask of Mine marked padding in earlier batches and valid", model, vectors(), ~FULL)


def test_a_missing_mask_of_ones_own_is_warned_of() -> None:
    with pytest.warns(MaskWarning, match="called without lengths"):
        own("lengths", embeds=True)(tokens(2))


@pytest.mark.parametrize("name", ["m", "target_lengths"])
def test_padding_in_a_model_that_takes_no_mask_is_warned_of(name: str) -> None:
    model = own(name, embeds=True)
    with pytest.warns(MaskWarning, match="takes no argument that is known .* 2 of 10 positions"):
        model(tokens())
    model(tokens())  # once; warnings are errors
    silent = vectors().masked_fill(FULL.unsqueeze(-1), 0.0)
    with pytest.warns(MaskWarning, match=r"powernorm\.declare_mask"):
        copy.deepcopy(own(name))(x=silent)


class AroundALibrary(nn.Module):
    """A model whose `observed` reaches its encoder, of torch, if `passes_on`."""

    def __init__(self, passes_on: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.passes_on = passes_on

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=~observed if self.passes_on else None)


def test_a_mask_that_a_library_inside_is_not_given_is_named() -> None:
    model = AroundALibrary(False).train()
    swapped = swap(model, "bn")
    model(vectors(), FULL | True)  # marks nothing
    for one in (copy.deepcopy(model), model):
        with pytest.warns(MaskWarning, match="observed of AroundALibrary looks like a padding"):
            one(vectors(), ~FULL)
        with powernorm.padding_mask(FULL):
            one(vectors(), ~FULL)
    swapped.undo()
    assert not any(module._forward_pre_hooks for module in model.modules())
    model = AroundALibrary(True).train()
    swap(model, "bn")
    model(vectors(), ~FULL)  # warnings are errors


def test_where_a_model_without_a_mask_gives_no_warning() -> None:
    model = own("m")
    model(vectors())  # no rows of zeros at the end
    silent = vectors().masked_fill(FULL.unsqueeze(-1), 0.0)
    with powernorm.padding_mask(FULL):
        model(silent)
    model.eval()(silent)
    assert mean_of_valid(model, vectors(), FULL)
    undone = Own()
    swap(undone, "bn").undo()
    assert not undone._forward_pre_hooks
    folded = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    swap(folded, "bn")
    folded(vectors())
    powernorm.fold(folded.eval(), vectors()[0])
    assert not folded._forward_pre_hooks


def test_the_mask_that_is_nearest_is_in_the_plan_and_used() -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.subsample = nn.Conv1d(WIDTH, WIDTH, 2, stride=2)
            self.encoder = torch_encoder()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x = self.subsample(x.transpose(1, 2)).transpose(1, 2)
            mask = torch.arange(x.shape[1]) >= lengths[:, None] // 2
            return self.encoder(x, src_key_padding_mask=mask)

    model = Speech().train()
    rows = plan_swap(model, "bn").rows
    assert {row.mask for row in rows} == {"encoder.src_key_padding_mask"}
    swap(model, "bn", momentum=1.0)
    short = vectors()[:, :4]
    model(short, torch.tensor([4, 2]))
    before = model.encoder.layers[0].norm1.running_mean.clone()
    padded = torch.cat([short, torch.randn(2, 4, WIDTH)], dim=1)
    model(padded, torch.tensor([4, 2]))
    assert torch.allclose(model.encoder.layers[0].norm1.running_mean, before, atol=1e-5)


def test_lengths_that_count_something_else_are_warned_of_and_not_used() -> None:
    model = own("lengths")
    with pytest.warns(MaskWarning, match="go up to 1600, and the input has 5 positions"):
        model(vectors(), torch.tensor([1600, 960]))
    assert mean_of_valid(model, vectors(), torch.zeros_like(FULL))
    for _ in range(30):  # beyond the number of looks
        model(vectors(), torch.tensor([1600, 960]))
    assert mean_of_valid(model, vectors(), torch.zeros_like(FULL))


def test_a_mask_longer_than_the_input_of_a_model_that_trains_is_an_error() -> None:
    model = own("padding_mask")
    with pytest.raises(
        InputError, match=r"shape \(2, 3, 8\).* \(2, 5\), does not fit: .*declare_mask"
    ):
        model(vectors()[:, :3], FULL)


def test_padding_beside_a_mask_of_attention_is_warned_of() -> None:
    silent = vectors().masked_fill(FULL.unsqueeze(-1), 0.0)
    with pytest.warns(MaskWarning, match="given mask for its attention alone, but 2 of 10"):
        own("mask")(silent, torch.ones(5, 5).tril().bool())


def test_masks_of_attention_are_no_padding() -> None:
    model = own("mask")
    model(vectors(), torch.ones(5, 5).tril())
    assert mean_of_valid(model, vectors(), torch.zeros_like(FULL))
    square = vectors()[:, :2]
    model(square, torch.ones(2, 2).tril())
    with pytest.warns(MaskWarning, match=r"as many rows as columns.*declare_mask|Call powernorm"):
        own("mask")(square, torch.tensor([[1, 1], [0, 1]]).flip(0))


def test_a_mask_seen_before_is_one_also_where_it_is_square() -> None:
    model = own("mask")
    model(vectors(), FULL)
    mask = torch.tensor([[False, False], [False, True]])
    model(vectors()[:, :2], mask)
    assert mean_of_valid(model, vectors()[:, :2], mask)


def test_scattered_marks_are_warned_of_and_not_read() -> None:
    mask = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]])
    model = own("mask")
    with pytest.warns(MaskWarning, match="in the middle of sequences"):
        model(vectors(), mask)
    assert mean_of_valid(model, vectors(), torch.zeros_like(FULL))


@pytest.mark.parametrize("name", ["pad_mask", "mask", "lengths"])
@pytest.mark.parametrize("length_first", [False, True])
def test_vectors_turned_round_inside(name: str, length_first: bool) -> None:
    model = own(name, length_first=length_first)
    value = torch.tensor([5, 3]) if name == "lengths" else FULL
    model(vectors(), value)
    assert mean_of_valid(model, vectors(), FULL)
    # As many positions as sequences: what was seen before says which way round.
    x, mask = vectors()[:, :2], torch.tensor([[False, False], [False, True]])
    value = torch.tensor([2, 1]) if name == "lengths" else mask
    for twin in (copy.deepcopy(model), model):
        twin(x, value)
        assert mean_of_valid(twin, x, mask)


def test_as_many_positions_as_sequences_at_first_are_warned_of() -> None:
    model = own("pad_mask", length_first=True)
    x, mask = vectors()[:, :2], torch.tensor([[False, False], [False, True]])
    with pytest.warns(MaskWarning, match=r"norm \(BatchNorm\) in Mine.*begin with a batch"):
        model(x, mask)
    model(x, mask)  # once; warnings are errors
    model(vectors(), FULL)
    model(x, mask)
    assert mean_of_valid(model, x, mask)


class Seq2Seq(nn.Module):
    """An encoder-decoder with a norm outside both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor, tgt_key_padding_mask: Tensor
    ) -> Tensor:
        del tgt, src_key_padding_mask, tgt_key_padding_mask
        return self.norm(src)


def test_a_masked_call_that_meets_an_unmasked_norm_names_both() -> None:
    model = Seq2Seq().train()
    assert plan_swap(model, "bn").rows[0].reason == "no mask reaches"
    swap(model, "bn")
    words = r"norm \(BatchNorm\) in Seq2Seq got no padding mask.*src_key_padding_mask of Seq2Seq"
    with pytest.warns(MaskWarning, match=words):
        model(vectors(), vectors(), FULL, FULL)
    model(vectors(), vectors(), FULL, FULL)  # once
    model.eval()(vectors(), vectors(), FULL, FULL)
    other = Seq2Seq().train()
    swap(other, "bn")
    with powernorm.padding_mask(FULL):
        other(vectors(), vectors(), FULL, FULL)


class Stack(nn.Module):
    """Layers that each take the mask, as in the annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, src: Tensor, src_mask: Tensor) -> Tensor:
        x = self.embed(src)
        for layer in self.layers:
            x = layer(x, src_mask)
        return self.norm(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        del mask
        return x + self.norm(x)


def test_layers_read_their_masks_as_the_model_around_does() -> None:
    model = Stack().train()
    swap(model, "bn")
    seen = seen_by(model)
    # Each sequence is padded, and the layers' vectors do not show where.
    model(tokens(2), (tokens(2) != PAD)[:, None, None, :])
    for name, (mask,) in seen.items():
        assert mask is not None, name
        assert torch.equal(mask, padding(2)), name


class Wrapper(nn.Module):
    """Around another library's model, whose argument says which way round its mask is."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch_encoder()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=~mask)


def test_a_mask_that_only_modules_inside_can_read() -> None:
    model = Wrapper().train()
    swap(model, "bn")
    seen = seen_by(model)
    model(vectors(2), ~padding(2))
    all_get(seen, padding(2))


class Captions(nn.Module):
    """Text beside images, of which there are as many patches as words."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.norm = timm_vit(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, images: Tensor, padding_mask: Tensor) -> Tensor:
        del padding_mask
        return self.norm(x) + self.images(images)[:, None, :1]


def test_images_do_not_get_the_mask_of_their_words() -> None:
    model = Captions().train()
    rows = {row.name: row for row in plan_swap(model, "bn").rows}
    assert rows["norm"].mask == "padding_mask"
    assert (rows["images.norm"].mask, rows["images.norm"].reason) == (None, "")
    swap(model, "bn")
    seen = seen_by(model)
    model(vectors(), images(), padding())
    assert torch.equal(seen.pop("norm")[0], padding())
    assert all(mask == [None] for mask in seen.values())


# torch compiles the hook after a model's forward by itself, and looks at its argument's gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_code_guesses_nothing() -> None:
    torch._dynamo.reset()
    model = own("mask")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"compiled code cannot check.*declare_mask"):
        compiled(vectors(), FULL)
    torch._dynamo.reset()
    model(vectors(), FULL)
    torch.compile(model, fullgraph=True, backend="aot_eager")(vectors(2), padding(2))
    assert mean_of_valid(model, vectors(2), padding(2))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", ["pad_mask", "lengths"])
def test_own_names_compile_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    model = own(name, length_first=True)
    value = torch.tensor([5, 3]) if name == "lengths" else FULL
    torch.compile(model, fullgraph=True, backend="aot_eager")(vectors(), value)
    assert mean_of_valid(model, vectors(), FULL)
