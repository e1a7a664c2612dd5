"""Masks of every form, name, shape and kind of model: right, refused or warned of; never silent.

The mean of the norms' inputs tells which positions counted. A call is right if they are the valid
ones. It may raise an InputError or give a MaskWarning that names the argument instead, except where
name and form agree and the batch shows no other: then it has to be right.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.diagnosis import NormMonitor
from powernorm.errors import InputError
from powernorm.inspection import mask_arguments
from powernorm.inspection.mask_checks import MaskWarning
from powernorm.norms import BatchNorm, masks
from powernorm.surgery.swapping import swap
from refusals import refuses

BATCH, LENGTH, WIDTH = 4, 7, 6
LENGTHS = torch.tensor([7, 5, 2, 1])
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda marks: marks,
    "int": lambda marks: marks.long(),
    "float": lambda marks: marks.float(),
    "half": lambda marks: marks.half(),
}
SCORES = {
    "-inf": float("-inf"),
    "-1e4": -1e4,
    "-1e9": -1e9,
    "-65504": -65504.0,
    "lowest": torch.finfo(torch.float32).min,
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "(B, L)": lambda mask: mask,
    "(B, L, 1)": lambda mask: mask[:, :, None],
    "(B, 1, L)": lambda mask: mask[:, None],
    "(B, 1, 1, L)": lambda mask: mask[:, None, None],
    "(B, 1, L, L)": lambda mask: mask[:, None, None].expand(-1, -1, LENGTH, -1),
}
KEEP = ("attention_mask", "input_mask", "valid_mask")
PAD = ("padding_mask", "key_padding_mask", "src_key_padding_mask", "pad_mask", "src_padding_mask")
UNKNOWN = ("mask", "src_mask", "key_mask", "x_mask", "valid", "seen")
LENGTH_NAMES = ("lengths", "x_lens", "ilens", "input_lengths", "wav_lens", "length")


class Flat(nn.Module):
    """One norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def run(self, x: Tensor, mask: Any) -> Tensor:
        del mask
        return self.norm(x)


class Turned(Flat):
    """A norm over (length, batch, features)."""

    def run(self, x: Tensor, mask: Any) -> Tensor:
        del mask
        return self.norm(x.transpose(0, 1)).transpose(0, 1)


class Embeds(Flat):
    """A norm of embedded tokens; padding holds one token, which no config names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)

    def run(self, x: Tensor, mask: Any) -> Tensor:
        del mask
        return self.norm(self.embed(x))


class Nested(Flat):
    """A layer that is given the mask as the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.part()

    def part(self) -> nn.Module:
        return type("Layer", (Flat,), {"forward": type(self).forward})()

    def run(self, x: Tensor, mask: Any) -> Tensor:
        return self.norm(x) + self.layer(x, mask)


class AddsScores(Nested):
    """A layer that is given what its model adds to the scores of attention."""

    def part(self) -> nn.Module:
        def forward(self: Any, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.run(x, attention_mask)

        return type("Layer", (Flat,), {"forward": forward})()

    def run(self, x: Tensor, mask: Any) -> Tensor:
        del mask
        scores = torch.where(PADDING[:, None, None], -1e4, 0.0).expand(-1, 1, LENGTH, -1)
        return self.norm(x) + self.layer(x, scores)


class Encoder(Flat):
    """An encoder of torch inside, whose argument says what its name means."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def run(self, x: Tensor, mask: Any) -> Tensor:
        del mask
        return self.norm(self.encoder(x, src_key_padding_mask=PADDING))


KINDS = (Flat, Turned, Embeds, Nested, AddsScores, Encoder)
CONTENTS = ("random", "loud", "zeros")
CALLS = {
    name: f"def forward(self, x, {name}=None): return self.run(x, {name})"
    for name in (*KEEP, *PAD, *UNKNOWN, *LENGTH_NAMES)
}


def model_of(kind: type[Flat], name: str) -> nn.Module:
    scope: dict[str, Any] = {}
    exec(CALLS[name], scope)
    torch.manual_seed(0)
    return type(f"{kind.__name__}Of", (kind,), {"forward": scope["forward"]})().train()


def batch_of(kind: type[Flat], contents: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind is Embeds:
        tokens = torch.randint(2, 30, (BATCH, LENGTH), generator=generator)
        return tokens if contents == "random" else tokens.masked_fill(PADDING, 1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    if contents == "random":
        return torch.where(PADDING[..., None], 30 + 10 * x, x)
    return x.masked_fill(PADDING[..., None], 100.0 if contents == "loud" else 0.0)


def outcome(kind: type[Flat], name: str, value: object, contents: str, *, twice: bool) -> str:
    """Return `right`, or the refusal; a wrong result without a word is `silent`."""
    model = model_of(kind, name)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swap(model, "bn", momentum=1.0)
        inputs: dict[str, Tensor] = {}
        for at, norm in model.named_modules():
            if isinstance(norm, BatchNorm):
                norm.register_forward_pre_hook(
                    lambda _, args, at=at: inputs.__setitem__(at, args[0].detach())
                )
        try:
            for seed in range(1 + twice):
                model(batch_of(kind, contents, seed), value)
        except InputError as error:
            said.append(str(error))
    said += [str(one.message) for one in caught if one.category is MaskWarning]
    if said:
        # Of a part inside the name may be another.
        assert any(name in text or "mask" in text for text in said), said
        return "refused"
    for at, x in inputs.items():
        x = x if x.shape[0] == BATCH else x.transpose(0, 1)
        counted = model.get_submodule(at).running_mean
        if not torch.allclose(counted, x[~PADDING].mean(0), atol=1e-4):
            return f"silent at {at}"
    return "right"


NAMES = (*KEEP, *PAD, *UNKNOWN)


def values() -> dict[tuple[str, str], tuple[tuple[str, ...], Any]]:
    """Return names and value of each form and shape; it has to be right under these names."""
    made: dict[tuple[str, str], tuple[tuple[str, ...], Any]] = {}
    for shape, shaped in SHAPES.items():
        for form, formed in FORMS.items():
            made[f"keep {form}", shape] = KEEP, shaped(formed(~PADDING))
            made[f"padding {form}", shape] = PAD, shaped(formed(PADDING))
        for name, score in SCORES.items():
            scores = torch.zeros(PADDING.shape).masked_fill(PADDING, score)
            made[f"scores {name}", shape] = (*KEEP, *PAD), shaped(scores)
    return made


VALUES = values()
COUNTS = {
    "int": LENGTHS, "int32": LENGTHS.int(), "list": LENGTHS.tolist(),
    "fractions": LENGTHS / LENGTH,
}  # fmt: skip
CASES = [
    *itertools.product(KINDS, NAMES, VALUES, CONTENTS),
    *itertools.product(KINDS, LENGTH_NAMES, ((form, "") for form in COUNTS), CONTENTS),
]


def fault_of(
    kind: type[Flat], name: str, value: tuple[str, str], contents: str
) -> tuple[object, ...] | None:
    form, shape = value
    names, given = VALUES[value] if shape else (LENGTH_NAMES, COUNTS[form])
    got = outcome(kind, name, given, contents, twice=form.endswith("int"))
    # A layer that is told something else than the model may be an error of the model.
    has_to_be_right = name in names and not (kind is AddsScores and "scores" not in form)
    if got.startswith("silent") or (has_to_be_right and got != "right"):
        return got, kind.__name__, name, value, contents
    return None


SAMPLE = random.Random(0).sample(CASES, 600)


@pytest.mark.parametrize("kind", KINDS)
def test_no_mask_is_silently_wrong(kind: type[Flat]) -> None:
    cases = [case for case in SAMPLE if case[0] is kind]
    assert len(cases) > 60
    assert not [fault for case in cases if (fault := fault_of(*case))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_mask_at_all_is_silently_wrong(kind: type[Flat]) -> None:
    cases = [case for case in CASES if case[0] is kind]
    assert not [fault for case in cases if (fault := fault_of(*case))]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("padding_mask", torch.tensor([[0, 3], [3, 0]]).repeat(2, 4)[:, :7], "holds 3: a mask is"),
        ("attention_mask", torch.full((BATCH, LENGTH), 0.5), r"attention_mask .* holds 0\.5"),
        ("mask", PADDING.long() * -1, "holds -1"),
        ("attention_mask", torch.full((BATCH, 1, LENGTH, LENGTH), -3.0), "holds -3"),
        ("padding_mask", torch.full((BATCH, LENGTH), float("nan")), "holds nan"),
        ("lengths", LENGTHS.float(), "lengths of FlatOf holds the floats 1 to 7"),
        ("wav_lens", torch.tensor([1.0, 0.5, 0.0, 1.0]), "wav_lens of FlatOf holds the floats 0"),
    ],
)
def test_other_values_are_refused_by_name(name: str, value: Tensor, words: str) -> None:
    model = model_of(Flat, name)
    swap(model, "bn")
    refuses(words, model, batch_of(Flat, "random", 0), value)


def test_a_length_for_all_and_a_mask_of_zeros_hide_nothing() -> None:
    for name, value in (("length", LENGTH), ("attention_mask", torch.zeros(BATCH, LENGTH))):
        model = model_of(Flat, name)
        swap(model, "bn", momentum=1.0)
        x = batch_of(Flat, "random", 0)
        model(x, value)
        assert torch.allclose(model.norm.running_mean, x.flatten(0, 1).mean(0), atol=1e-4)


def test_what_a_batch_shows_is_no_surprise_to_a_declaration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_arguments, "_declared", {})
    model = model_of(Flat, "key_padding_mask")  # True at valid positions, as flash-attention has it
    swap(model, "bn", momentum=1.0)
    x = batch_of(Flat, "random", 0)
    refuses(r"key_padding_mask .* is inverted.*declare_mask", model, x, ~PADDING)
    powernorm.declare_mask("key_padding_mask", "keep", type(model))
    model(x, ~PADDING)
    assert torch.allclose(model.norm.running_mean, x[~PADDING].mean(0), atol=1e-4)


class Rearranges(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.how = nn.LayerNorm(WIDTH), how

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        del lengths
        return self.norm(self.how(x))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda x: x[torch.tensor([1, 0, 3, 2])], "Rearranges reorders"),
        (lambda x: x.flip(1), "Rearranges reorders"),
        (lambda x: torch.roll(x, 1, 1), "Rearranges reorders"),
        (lambda x: x.transpose(0, 1).reshape(-1, WIDTH), r"flattens its vectors as \(length"),
        (lambda x: x.reshape(-1, WIDTH), ""),
        (lambda x: x[:, torch.arange(LENGTH)[:3]] * 2, "does not fit"),
        (lambda x: x[:, ::2], "does not fit"),
    ],
)
def test_positions_in_another_order_are_warned_of(
    how: Callable[[Tensor], Tensor], words: str
) -> None:
    model = Rearranges(how)
    swap(model, "bn")
    x = batch_of(Flat, "random", 0)
    if "fit" in words:
        refuses(words, model, x, LENGTHS)
        return
    with pytest.warns(MaskWarning, match=words) if words else nullcontext():
        model(x, LENGTHS)
    model(x, LENGTHS)  # once; warnings are errors


def test_a_mask_inside_a_dict_is_named() -> None:
    class OfDicts(Flat):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.norm(batch["x"])

    model = OfDicts()
    swap(model, "bn")
    batch = {"x": batch_of(Flat, "random", 0)}
    model({**batch, "token_mask": PADDING & False})  # marks nothing
    for key, mask in {"pad_mask": PADDING, "insample_mask": (~PADDING)[..., None].float()}.items():
        model = OfDicts()
        swap(model, "bn")
        with pytest.warns(
            MaskWarning, match=rf'batch\["{key}"\] of OfDicts looks like a padding mask'
        ):
            model({**batch, key: mask})
        with powernorm.padding_mask(PADDING):
            model({**batch, key: mask})


def test_scores_and_biases_of_pairs_are_no_mask() -> None:
    class OfScores(Flat):
        def forward(self, x: Tensor, prev: Tensor) -> Tensor:  # noqa: ARG002
            return self.norm(x)

    model = OfScores()
    swap(model, "bn")
    x = batch_of(Flat, "random", 0)
    scores = torch.randn(len(x), 2, x.shape[1], x.shape[1])
    model(x, scores)  # warnings are errors
    with pytest.warns(MaskWarning, match="prev of .* looks like a padding mask"):
        model(x, scores.masked_fill(PADDING[:, None, None], -torch.inf))


@pytest.mark.parametrize("verb", [powernorm.calibrate, powernorm.diagnose])
@pytest.mark.parametrize("name", ["padding_mask", "lengths"])
def test_labels_are_no_mask(verb: Callable[..., Any], name: str) -> None:
    model = model_of(Flat, name)
    swap(model, "bn")
    xs = [batch_of(Flat, "random", seed) for seed in range(2)]
    labels = torch.tensor([2, 0, 1, 1]) if name == "lengths" else (xs[0].mean(-1) > 0).long()
    with pytest.raises(InputError, match=rf"would become {name} of FlatOf.* give forward="):
        verb(model, [(x, labels) for x in xs])
    verb(model, [(x, labels) for x in xs], forward=lambda model, batch: model(batch[0]))
    if name == "lengths":
        verb(model, [(x, torch.tensor([2, 3, 1, LENGTH - 1])) for x in xs])
    masks = (
        (LENGTHS, torch.full((BATCH,), LENGTH)) if name == "lengths" else (PADDING, ~PADDING[:1])
    )
    verb(
        model,
        list(zip(xs, masks, strict=True))[:1] * 2
        if verb is powernorm.calibrate
        else [(x, masks[0]) for x in xs],
    )


def test_a_mask_of_a_user_that_is_true_everywhere_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masks, "_looks", {"left": 2})
    norm, x = BatchNorm(WIDTH), batch_of(Flat, "random", 0)
    with pytest.warns(UserWarning, match=r"\(4, 7\) is True everywhere"):
        norm(x, torch.ones_like(PADDING))
    norm(x, torch.ones_like(PADDING))  # once


@pytest.mark.filterwarnings("ignore:`torch.jit.\\w+` is deprecated")
def test_torchscript_is_refused_and_parts_of_it_are_left_alone() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.trace(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), torch.randn(2, WIDTH)
            )
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inner(x))

    model = Part()
    verbs: list[Callable[[nn.Module], Any]] = [
        swap, powernorm.mask_batch_norms, lambda one: NormMonitor(one, 1),
        lambda one: powernorm.fold(one, torch.randn(2, WIDTH)),
    ]  # fmt: skip
    for verb in verbs:
        refuses("is a TorchScript module", verb, model.inner)
    rows = {row.name: row for row in powernorm.plan_swap(model, "bn").rows}
    assert (rows["norm"].action, rows["inner.1"].action) == ("swap", "keep")
    assert "TorchScript" in rows["inner.1"].reason
    swap(model, "bn")
    model(torch.randn(2, 3, WIDTH))


def test_the_plan_says_how_a_mask_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_arguments, "_declared", {})
    words = {
        "pad_mask": "pad_mask: 1 or True is padding, by its name, which the first batches have to",
        "mask": "mask: its meaning has to be shown by the first batches",
        "lengths": "lengths: the number of valid positions of each row",
    }
    for name, expected in words.items():
        assert expected in str(powernorm.plan_swap(model_of(Flat, name), "bn"))
    encoder = powernorm.plan_swap(nn.TransformerEncoderLayer(WIDTH, 2), "bn")
    assert "src_key_padding_mask: 1 or True is padding, as its library" in str(encoder)
    for name, shown in (("pad_mask", "padding"), ("mask", "valid")):
        model = model_of(Flat, name)
        plan = swap(model, "bn").plan
        model(batch_of(Flat, "random", 0), PADDING if name == "pad_mask" else ~PADDING)
        assert f"{name}: 1 or True is {shown}, as the batches showed" in str(plan)


class ShowsLess(AddsScores):
    """A layer whose mask of attention leaves rows of padding open, as scaled_dot_product needs."""

    def run(self, x: Tensor, mask: Any) -> Tensor:
        del mask
        seen = ~PADDING[:, None, None] | PADDING[:, None, :, None]
        return self.norm(x) + self.layer(x, seen)


def test_what_attention_sees_does_not_overrule_the_models_mask() -> None:
    assert outcome(ShowsLess, "padding_mask", PADDING, "random", twice=True) == "right"
