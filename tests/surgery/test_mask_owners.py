"""Several swaps of one model share the owners of its masks; interrupts; a look at the masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.masks import current_padding_mask
from powernorm.surgery.swapping import swap
from surgery.foreign_models import (
    FAMILIES,
    PADDED,
    keep,
    padding,
    run,
    tokens,
    torch_encoder,
    torch_layer,
    vectors,
)

FIRST, SECOND = "*.0.*", "*.1.*"


def seen_by(model: nn.Module) -> dict[str, list[Tensor | None]]:
    """Return the masks of each norm, filled while the model runs."""
    seen: dict[str, list[Tensor | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BatchStatisticsNorm):
            calls = seen.setdefault(name, [])
            module.register_forward_pre_hook(
                lambda norm, args, calls=calls: calls.append(current_padding_mask(args[0], norm))
            )
    return seen


def hooks(model: nn.Module) -> dict[str, list[Any]]:
    return {
        f"{name} {kind}": list(module.__dict__[kind].items())
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    }


def bert() -> nn.Module:
    return FAMILIES["bert"]()[0].train()


def all_get(seen: dict[str, list[Tensor | None]], expected: Tensor, but: str = "!") -> None:
    assert seen
    for name, masks in seen.items():
        if but not in name:
            assert masks, name
            assert all(mask is not None and torch.equal(mask, expected) for mask in masks), name


def test_layers_swapped_one_after_the_other_each_get_the_mask() -> None:
    model = bert()
    swap(model, "bn", where=FIRST)
    swap(model, "bn", where=SECOND)
    assert len(model._forward_pre_hooks) == 1
    run(model, PADDED["bert"](0))
    powernorm.freeze_statistics(model, "encoder.layer.1.*")
    seen = seen_by(model)
    run(model, PADDED["bert"](2))
    all_get(seen, padding(2))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("", "bn", None), ("encoder", "rbn", None)),
        (("", "bn", None), ("encoder", "rbn", FIRST)),
        (("", "bn", None), ("encoder", "rbn", "layer.1.output*")),
        (("encoder.layer.0", "bn", None), ("", "bn", None)),
        (("encoder.layer.0", "bn", None), ("", "bn", SECOND)),
        (("encoder.layer.0", "bn", None), ("", "bn", "emb*")),
    ],
)
def test_a_model_and_a_part_of_it(first: Any, second: Any) -> None:
    model = bert()
    for part, to, where in (first, second):
        swap(model.get_submodule(part), to, where=where)
    seen = seen_by(model)
    run(model, PADDED["bert"](2))
    all_get(seen, padding(2))


class Tower(nn.Module):
    """A layer whose mask is in a form that nothing can be read from."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, attention_mask: object = None) -> Tensor:
        del attention_mask
        return self.norm(x)


class Packing(nn.Module):
    def __init__(self, how: object) -> None:
        super().__init__()
        self.first, self.layer, self.how = nn.LayerNorm(8), Tower(), how

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        del attention_mask
        return self.layer(self.first(x), self.how)


def test_what_cannot_be_read_is_inherited_from_the_model_around() -> None:
    model = Packing("a block mask").train()
    swap(model.layer, "bn")
    swap(model, "bn", where="first")
    seen = seen_by(model)
    model(vectors(), keep(0))
    all_get(seen, padding())


def test_masks_of_two_sides_swapped_apart_do_not_mix() -> None:
    model = FAMILIES["t5"]()[0].train()
    swap(model.decoder, "bn")
    swap(model, "bn")
    seen = seen_by(model)
    inputs = PADDED["t5"](1)
    run(model, inputs)
    for name, (mask,) in seen.items():
        side = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
        assert torch.equal(mask, inputs[side] == 0), name


def test_norms_that_were_replaced_ask_for_nothing() -> None:
    model = bert()
    swap(model, "bn")
    swap(model, "rbn")
    model.eval()
    model(input_ids=tokens(3))
    inputs = PADDED["bert"](3)
    model(inputs["input_ids"], attention_mask=1 - inputs["attention_mask"])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_undone_in_any_order_every_hook_is_as_before(order: tuple[int, ...]) -> None:
    model = bert()
    before = hooks(model)
    made = [
        swap(model, "bn", where=FIRST),
        swap(model.encoder, "bn", where="layer.1.*"),
        swap(model, "rbn", where="emb*"),
    ]
    for index in order[:2]:
        made[index].undo()
    seen = seen_by(model)
    run(model, PADDED["bert"](2))
    all_get(seen, padding(2))
    made[order[2]].undo()
    assert hooks(model) == before


def test_a_copy_of_a_model_swapped_twice() -> None:
    model = bert()
    swap(model, "bn", where=FIRST)
    twin = copy.deepcopy(model)
    swap(twin, "bn", where=SECOND)
    assert len(twin._forward_pre_hooks) == 1
    model.eval()
    seen = seen_by(twin)
    run(twin, PADDED["bert"](2))
    all_get(seen, padding(2))


def test_folding_leaves_an_owner_that_has_a_norm_left() -> None:
    model, inputs = FAMILIES["bert"]()
    swap(model, "bn", where=FIRST)
    swap(model, "pn", where=SECOND)
    powernorm.calibrate(model, [inputs], names=FIRST)
    powernorm.fold(model.eval(), inputs)
    assert len(model._forward_pre_hooks) == 1
    seen = seen_by(model)
    run(model.train(), PADDED["bert"](2))
    all_get(seen, padding(2))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("scoped", [False, True])
def test_an_interrupt_leaves_no_mask_behind(scoped: bool) -> None:
    model = bert()
    swap(model, "bn")
    swap(model.encoder, "rbn")
    handle = model.encoder.layer[1].register_forward_pre_hook(interrupt)
    norm = powernorm.BatchNorm(4)
    try:
        run(model, PADDED["bert"](0))
    except KeyboardInterrupt as error:
        held = error  # as a notebook does: the frames of the call live on
    handle.remove()
    assert held.__traceback__ is not None
    if scoped:
        with powernorm.padding_mask(torch.ones(3, 7, dtype=torch.bool)):
            assert current_padding_mask() is not None
    norm(torch.randn(3, 7, 4))
    assert current_padding_mask() is None
    seen = seen_by(model)
    run(model, PADDED["bert"](2))
    all_get(seen, padding(2))
    assert current_padding_mask() is None


class Recursive(nn.Module):
    """Calls itself on a shorter input; the outer mask is there again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        if x.shape[1] > 3:
            self(x[:, :3], attention_mask[:, :3])
        return self.norm(x)


def test_a_module_that_calls_itself() -> None:
    model = Recursive().train()
    swap(model, "bn")
    seen = seen_by(model)
    model(vectors(), keep(0))
    assert [tuple(mask.shape) for mask in seen["norm"]] == [(2, 3), (2, 5)]


def test_recomputation_does_not_miss_the_mask_of_the_model_around() -> None:
    model = torch_encoder().train()
    swap(model, "bn")
    swap(model.layers[0], "rbn")
    silent = vectors(2).masked_fill(padding(2).unsqueeze(-1), 0.0)
    layer = model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(
        forward, *args, use_reentrant=False, **kwargs
    )
    model(silent, src_key_padding_mask=padding(2)).square().mean().backward()


class Looped(nn.Module):
    """Calls the layers of its encoder itself, with a mask that only they know by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(torch_layer(), 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        for layer in self.encoder.layers:
            # Autograd repeats each layer, without the scope of its first call.
            x = torch.utils.checkpoint.checkpoint(
                layer, x, src_key_padding_mask=pad, use_reentrant=False
            )
        return x


def test_layers_that_are_called_without_the_module_around_read_their_masks() -> None:
    model = Looped().train()
    swap(model, "bn")
    twin = copy.deepcopy(model)
    seen = seen_by(model)
    valid = ~padding(2)
    model(vectors(2), padding(2))[valid].square().sum().backward()
    all_get({name: masks[:1] for name, masks in seen.items()}, padding(2))
    twin.encoder(vectors(2), src_key_padding_mask=padding(2))[valid].square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    for (name, one), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_the_mask_that_a_module_hands_on_goes_first() -> None:
    model = Looped().train()
    swap(model, "bn")
    seen = seen_by(model)
    shorter = padding(2, (5, 2))
    layer = model.encoder.layers[0]
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "src_key_padding_mask": shorter}),
        with_kwargs=True,
        prepend=True,
    )
    model.encoder(vectors(2), src_key_padding_mask=padding(2))
    all_get(seen, padding(2))
    with powernorm.padding_mask(padding(2)):
        layer(vectors(2), src_key_padding_mask=shorter)
    all_get(seen, padding(2))
    layer(vectors(2), src_key_padding_mask=shorter)
    assert all(
        torch.equal(seen[f"encoder.layers.0.{norm}"][-1], shorter) for norm in ("norm1", "norm2")
    )


class Backbone(nn.Module):
    """A model of transformers."""

    __module__ = "transformers.tiny"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        return self.down(self.norm(self.up(x)))


class Sentences(nn.Module):
    """Calls a model's forward by name, as sentence-transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.model.forward(**features)


@pytest.mark.parametrize("part", ["", "model"])
def test_a_forward_that_is_called_by_name_reads_its_mask(part: str) -> None:
    model = Sentences().train()
    swapped = swap(model.get_submodule(part), "bn")
    batch = {"x": vectors(2), "attention_mask": keep(2)}
    seen = seen_by(model)
    model(batch)
    model.model(**batch)
    copy.deepcopy(model)(batch)
    all_get(seen, padding(2))
    assert current_padding_mask() is None
    report = powernorm.calibrate(model, [batch, batch], lambda one, given: one(given))
    assert report.rows[0].tokens == 2 * int((~padding(2)).sum())
    swapped.undo()
    assert "forward" not in vars(model.model)


def test_a_fold_and_its_undo_take_the_replaced_forward_along() -> None:
    model, batch = Sentences(), {"x": vectors(2), "attention_mask": keep(2)}
    swap(model, "bn")
    model(batch)
    folded = powernorm.fold(model.model.eval(), batch)
    assert [row.action for row in folded.rows] == ["fold"]
    assert "forward" not in vars(model.model)
    folded.undo()
    seen = seen_by(model.train())
    model(batch)
    all_get(seen, padding(2))
