"""Swapping and its undo: changes, preserved state, refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.norms import Norm
from powernorm.surgery.swapping import plan_swap, swap
from refusals import refuses
from surgery.foreign_models import (
    FAMILIES,
    PADDED,
    WIDTH,
    run,
    seeded,
    timm_vit,
    torch_encoder,
    torch_layer,
    vectors,
)

RMS = ("llama", "gemma", "t5", "x-transformers-rms")
BATCH = ("patchtst",)
LAYER = tuple(name for name in FAMILIES if name not in RMS + BATCH)


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Everything that a model's modules hold, compared by identity or by keys."""
    return {
        name: {
            key: list(value.items()) if isinstance(value, dict) else value
            for key, value in module.__dict__.items()
        }
        for name, module in model.named_modules(remove_duplicate=False)
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left is right or (not isinstance(left, (Tensor, nn.Module)) and left == right)


def new_norms(model: nn.Module) -> dict[str, Norm]:
    return {name: norm for name, norm in model.named_modules() if isinstance(norm, Norm)}


@pytest.mark.parametrize("name", FAMILIES)
def test_undo_gives_back_the_very_same_model(name: str) -> None:
    model, inputs = FAMILIES[name]()
    model.eval()
    before, keys, y = attributes(model), list(model.state_dict()), run(model, inputs)
    made = swap(model, "bn", where="*")
    assert list(model.state_dict()) != keys
    run(model, inputs)
    made.undo()
    after = attributes(model)
    assert list(after) == list(before)
    for module in before:
        assert before[module].keys() == after[module].keys()
        for key, value in before[module].items():
            assert same(value, after[module][key]), (module, key)
    assert list(model.state_dict()) == keys
    assert torch.equal(run(model, inputs), y)


@pytest.mark.parametrize("name", LAYER)
def test_to_layer_norm_of_the_same_eps_nothing_changes(name: str) -> None:
    model, inputs = FAMILIES[name]()
    with torch.no_grad():
        y = run(model, inputs)
        found = powernorm.inspection.find_norms(model)
        eps = {norm.reading.eps for norm in found if norm.reading is not None}
        swap(model, "ln", where="*", eps=eps.pop())
        assert not eps
        assert torch.allclose(run(model, inputs), y, atol=1e-6)


@pytest.mark.parametrize("name", RMS)
def test_to_rms_norm_nothing_changes(name: str) -> None:
    model, inputs = FAMILIES[name]()
    with torch.no_grad():
        y = run(model, inputs)
        swap(model, "rms", where="*", eps=1e-6 if name != "x-transformers-rms" else 1e-12)
        assert torch.allclose(run(model, inputs), y, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in PADDED])
def test_models_without_masks_train(name: str) -> None:
    model, inputs = FAMILIES[name]()
    swap(model.train(), "rbn")
    run(model, inputs).square().mean().backward()
    assert all(int(norm.num_batches_tracked) == 1 for norm in new_norms(model).values())
    with torch.no_grad():
        assert run(model.eval(), inputs).isfinite().all()


def test_timm_takes_norms_as_its_norm_layer() -> None:
    model = timm_vit(norm_layer=powernorm.BatchNorm)
    x = torch.randn(2, 3, 8, 8)
    model(x).square().mean().backward()
    assert sum(isinstance(norm, powernorm.BatchNorm) for norm in model.modules()) == 5


def test_a_plan_is_a_table_and_changes_nothing() -> None:
    model = torch_encoder()
    before = attributes(model)
    plan = plan_swap(model, "pn", where="layers.*", warmup_steps=0)
    text = str(plan)
    assert "layers.0.norm1  layer  swap    pn" in text
    assert "not selected" in text
    assert "\n4 of 5 norms change to pn" in text
    first = plan.to_rows()[0]
    assert first["name"] == "layers.0.norm1"
    assert (first["type_name"], first["into"], first["num_features"]) == (
        "LayerNorm",
        ("pn",),
        WIDTH,
    )
    assert all(same(before[key], value) for key, value in attributes(model).items())


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("bert", {"attention_mask"}),
        ("bart", {"model.encoder.attention_mask", "model.decoder.attention_mask"}),
        (
            "torch-transformer",
            {"encoder.src_key_padding_mask", "decoder.tgt_key_padding_mask"},
        ),
        ("x-transformers", {"attn_layers.mask"}),
        ("timm-vit", {None}),
        ("patchtst", {None}),
    ],
)
def test_a_plan_says_where_masks_come_from(name: str, masks: set[str | None]) -> None:
    model, _ = FAMILIES[name]()
    assert {row.mask for row in plan_swap(model, "bn", where="*").rows} == masks
    assert {row.mask for row in plan_swap(model, "rms", where="*").rows} == {None}


def test_an_application_for_a_model_that_changed() -> None:
    model = torch_encoder()
    plan = plan_swap(model, "bn")
    plan.apply()
    refuses("plan again", plan.apply)


def test_undo_once_and_in_order() -> None:
    model = torch_encoder()
    first = swap(model, "bn")
    second = swap(model, "rbn", where="norm")
    refuses("undo later changes first", first.undo)
    second.undo()
    first.undo()
    assert not new_norms(model)
    refuses("undo was called already", first.undo)


def test_parameters_stay_the_very_same() -> None:
    model = torch_encoder().double()
    model.layers[0].norm1.weight.requires_grad_(False)
    gammas = [layer.norm1.weight for layer in model.layers]
    betas = [layer.norm1.bias for layer in model.layers]
    swap(model.train(), "bn")
    for layer, gamma, beta in zip(model.layers, gammas, betas, strict=True):
        assert layer.norm1.weight is gamma
        assert layer.norm1.bias is beta
        assert layer.norm1.training
        assert layer.norm1.running_mean.dtype == torch.float64
    assert not model.layers[0].norm1.weight.requires_grad


def test_a_missing_shift_starts_at_zero_and_an_offset_is_added() -> None:
    model, _ = FAMILIES["gemma"]()
    old = model.model.norm
    old.weight.requires_grad_(False)
    swap(model, "bn")
    new = model.model.norm
    assert torch.equal(new.weight, old.weight + 1)
    assert torch.equal(new.bias, torch.zeros(WIDTH))
    assert not new.weight.requires_grad
    assert not new.bias.requires_grad


def test_narrow_types_and_other_options() -> None:
    model = torch_encoder().to(torch.bfloat16)
    made = swap(model, "bn", momentum=0.3, eps=0.01)
    for norm in made.norms.values():
        assert isinstance(norm, powernorm.BatchNorm)
        assert norm.weight is not None
        assert (norm.weight.dtype, norm.running_var.dtype) == (torch.bfloat16, torch.float32)
        assert (norm.momentum, norm.eps) == (0.3, 0.01)


def test_norms_without_parameters_follow_the_model() -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
        nn.LayerNorm(WIDTH, elementwise_affine=False),
    )
    swapped = swap(model, "bn")
    assert model[1].weight is None  # as it was
    assert model[1].running_var.dtype == torch.float64
    swapped.undo()
    swap(model, "bn", affine=True)
    assert model[1].weight.dtype == torch.float64


def test_shared_norms_stay_shared() -> None:
    norm = nn.LayerNorm(WIDTH)
    model = nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm)
    plan = plan_swap(model, "bn", where="2")
    assert plan.rows[0].shared == ("2",)
    assert "shared" in str(plan)
    made = plan.apply()
    assert model[0] is model[2]
    assert isinstance(model[0], powernorm.BatchNorm)
    made.undo()
    assert model[0] is norm
    assert model[2] is norm


def test_a_tied_scale_stays_tied() -> None:
    model = torch_encoder()
    model.layers[1].norm2.weight = model.layers[0].norm1.weight
    swap(model, "rbn")
    assert model.layers[1].norm2.weight is model.layers[0].norm1.weight


def test_hooks_of_a_norm_go_with_it() -> None:
    model = torch_encoder().train()
    calls: list[str] = []
    old = model.norm
    handle = old.register_forward_hook(lambda *_: calls.append("after"))
    old.register_forward_pre_hook(lambda *_: calls.append("before"))
    old.register_full_backward_hook(lambda *_: calls.append("backward"))
    made = swap(model, "bn")
    model(vectors()).sum().backward()
    assert calls == ["before", "after", "backward"]
    handle.remove()
    model(vectors())
    assert calls[3:] == ["before"]
    model.norm.register_forward_hook(lambda *_: calls.append("late"))
    made.undo()
    model(vectors())
    assert calls[4:] == ["before"]
    assert len(old._forward_hooks) == 0


def test_the_mode_after_undo_is_the_models() -> None:
    model = torch_encoder().train()
    made = swap(model, "bn")
    model.eval()
    made.undo()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["bert", "gemma", "patchtst"])
def test_the_old_norms_follow_a_model_that_was_moved(name: str) -> None:
    model, _ = FAMILIES[name]()
    made = swap(model, "bn")
    model.double()
    made.undo()
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {
        torch.float64
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "rbnn"}, "did you mean"),
        ({"to": None}, "short name"),
        ({"to": ["bn"]}, "short name"),
        ({"to": "rbn", "momentun": 0.1}, "no option 'momentun'"),
        ({"to": "rbn", "momentum": 3.0}, "momentum"),
        ({"to": "pn", "groups": 3}, "groups"),
        ({"where": len}, r"function of \(name, module\)"),
        ({"dtype": torch.int32}, "floating point"),
        ({"device": "nope"}, "device is 'nope'"),
    ],
)
def test_refused_before_anything_changes(options: dict[str, Any], words: str) -> None:
    model = torch_encoder()
    before = attributes(model)
    refuses(words, swap, model, **options)
    assert all(same(before[key], value) for key, value in attributes(model).items())


def test_what_holds_no_norm_to_swap_is_refused() -> None:
    refuses(r"expected a torch.nn.Module", swap, "model")
    refuses("build the new one", swap, nn.LayerNorm(4))


def test_compiled_models_are_refused() -> None:
    refuses(r"swap before torch\.compile", swap, torch.compile(torch_encoder()))
    model = torch_encoder()
    model.compile()
    refuses(r"swap before torch\.compile", swap, model)


@pytest.mark.parametrize("to", ["bn", "rms", "none"])
def test_the_fused_path_is_off_where_a_norm_changed(to: str) -> None:
    model = seeded(torch_encoder)
    made = swap(model, to, where="layers.1.*")
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 0]
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x, mask = vectors(), PADDED["torch-encoder"](0)["src_key_padding_mask"]
        slow = twin(x, src_key_padding_mask=mask)
        with torch.no_grad():
            assert torch.allclose(twin(x, src_key_padding_mask=mask)[~mask], slow[~mask], atol=1e-5)
    made.undo()
    assert model.use_nested_tensor
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 1]


def test_the_fused_path_of_a_single_layer() -> None:
    model = seeded(lambda: torch_layer(norm_first=True))
    swap(model, "bn", where="norm1")
    x = vectors()
    with torch.no_grad():
        fast = model(x)
    assert torch.allclose(fast, model(x), atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_class_that_swaps_in_its_constructor_loads(name: str, tmp_path: Path) -> None:
    model, inputs = FAMILIES[name]()
    base = type(model)

    class Swapped(base):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            swap(self, "bn")

    model = Swapped(model.config).train()
    run(model, PADDED[name](1)).square().mean().backward()
    model.save_pretrained(tmp_path)
    loaded = Swapped.from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    with torch.no_grad():
        assert torch.equal(run(model.eval(), inputs), run(loaded.eval(), inputs))
