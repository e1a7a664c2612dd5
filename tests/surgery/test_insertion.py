"""Insertion of norms behind linear maps: places, masks, undo, folding, saving."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.norms import BatchStatisticsNorm
from powernorm.surgery.insertion import LINEARS, Places
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, run
from surgery.static_models import settle

pytestmark = pytest.mark.filterwarnings(
    # transformers' own, at import and when it is traced
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

BETWEEN = {
    "torch-layer": ["linear1"],
    "torch-encoder": ["layers.0.linear1", "layers.1.linear1"],
    "torch-transformer": [
        f"{side}.layers.{layer}.linear1" for side in ("encoder", "decoder") for layer in (0, 1)
    ],
    "bert": [f"encoder.layer.{layer}.intermediate.dense" for layer in (0, 1)],
    "distilbert": [f"transformer.layer.{layer}.ffn.lin1" for layer in (0, 1)],
    "gpt2": [f"transformer.h.{layer}.mlp.c_fc" for layer in (0, 1)],
    "llama": [
        f"model.layers.{layer}.mlp.{part}" for layer in (0, 1) for part in ("gate_proj", "up_proj")
    ],
    "bart": [
        f"model.{side}.layers.{layer}.fc1" for side in ("encoder", "decoder") for layer in (0, 1)
    ],
    "vit": ["layers.0.mlp.fc1", "layers.1.mlp.fc1"],
    "x-transformers": [f"attn_layers.layers.{layer}.1.ff.0.0" for layer in (1, 3)],
    "language-model": ["layers.0.feedforward.0", "layers.1.feedforward.0"],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_places_between_the_maps_of_feed_forward_networks(name: str) -> None:
    model, _ = FAMILIES[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    inserted = powernorm.insert(model)
    assert list(inserted.norms) == [f"{one}.inserted_norm" for one in BETWEEN[name]]
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(".inserted_norm." in key for key in after.keys() - before.keys())


@pytest.mark.parametrize(
    ("name", "values", "mask"),
    [
        ("torch-encoder", "src", "src_key_padding_mask"),
        ("bert", "input_ids", "attention_mask"),
        ("gpt2", "input_ids", "attention_mask"),
    ],
)
def test_what_is_at_padding_has_no_say_in_the_statistics(name: str, values: str, mask: str) -> None:
    model, _ = FAMILIES[name]()
    (norm, *_) = powernorm.insert(model).norms.values()
    (twin, *_) = powernorm.insert(other := FAMILIES[name]()[0]).norms.values()
    inputs = PADDED[name](0)
    pads = inputs[mask] if mask.startswith("src") else inputs[mask] == 0
    assert pads.any()
    garbage = inputs[values].clone()
    garbage[pads] = garbage[~pads][0]
    torch.manual_seed(0)
    run(model.train(), inputs)
    torch.manual_seed(0)
    run(other.train(), {**inputs, values: garbage})
    assert int(norm.num_batches_tracked) == 1
    torch.testing.assert_close(norm.running_mean, twin.running_mean)
    torch.testing.assert_close(norm.running_var, twin.running_var)


def test_statistics_are_those_of_the_hidden_features() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    inserted = powernorm.insert(layer, momentum=1.0)
    (norm,) = inserted.norms.values()
    x, mask = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 2:] = True
    hidden: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    layer(x, src_key_padding_mask=mask)
    valid = hidden[0][~mask]
    torch.testing.assert_close(norm.running_mean, valid.mean(0).detach())
    torch.testing.assert_close(norm.running_var, valid.var(0).detach())


def test_evaluation_does_not_take_torchs_fused_path() -> None:
    """It would read linear1's weights, and never call the norm."""
    model, inputs = FAMILIES["torch-encoder"]()
    inserted = powernorm.insert(model)
    settle(model.eval())
    calls: list[Tensor] = []
    for norm in inserted.norms.values():
        norm.register_forward_hook(lambda *call: calls.append(call[-1]))
    with torch.no_grad():
        run(model, inputs)
    assert len(calls) == 2


@pytest.mark.parametrize("where", ["feed-forward", LINEARS])
@pytest.mark.parametrize("name", ["torch-encoder", "bert", "gpt2"])
def test_undo_restores_the_model(name: str, where: Places) -> None:
    model, inputs = FAMILIES[name]()
    model.eval()
    expected, modules = run(model, inputs), list(model.named_modules())
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for _, part in modules]
    inserted = powernorm.insert(model, where=where)
    assert not torch.allclose(run(settle(model), inputs), expected)
    inserted.undo()
    assert list(model.named_modules()) == modules
    after = [len(part._forward_hooks) + len(part._forward_pre_hooks) for _, part in modules]
    assert after == hooks
    assert torch.equal(run(model, inputs), expected)
    refuses("undo was called already", inserted.undo)


FOLDED: list[Any] = [
    *((name, "feed-forward") for name in ("torch-encoder", "bert")),
    ("language-model", LINEARS),
    *(
        pytest.param(name, where, marks=pytest.mark.slow)
        for name in ("gpt2", "llama", "bart", "distilbert", "t5", "vit", "bert", "torch-encoder")
        for where in ("feed-forward", LINEARS)
        if (name, where) not in (("bert", "feed-forward"), ("torch-encoder", "feed-forward"))
    ),
]


@pytest.mark.parametrize(("name", "where"), FOLDED)
def test_inserted_norms_fold_into_the_maps(name: str, where: Places) -> None:
    model, inputs = FAMILIES[name]()
    inserted = powernorm.insert(model, where=where)
    settle(model.eval())
    expected = run(model, inputs)
    report = powernorm.fold(model, inputs)
    ours = [row for row in report.rows if row.name in inserted.norms]
    assert len(ours) == len(inserted.norms)
    assert {row.action for row in ours} == {"fold"}
    for row in ours if where == "feed-forward" else ():
        assert all(name.startswith(row.name.removesuffix("inserted_norm")) for name in row.into)
    assert report.errors[0].relative <= 1e-12
    assert not [part for part in model.modules() if isinstance(part, BatchStatisticsNorm)]
    torch.testing.assert_close(run(model, inputs), expected, rtol=1e-4, atol=1e-5)
    refuses("undo later changes first", inserted.undo)
    report.undo()
    inserted.undo()


@pytest.mark.parametrize("folds", [False, True])
def test_saved_models_come_back(folds: bool, tmp_path: Path) -> None:
    model, inputs = FAMILIES["bert"]()
    fresh = copy.deepcopy(model)
    powernorm.insert(model)
    settle(model.eval())
    if folds:
        powernorm.fold(model, inputs)
    expected = run(model, inputs)
    powernorm.save(model, tmp_path / "saved")
    loaded = powernorm.load(tmp_path / "saved", fresh).eval()
    assert torch.equal(run(loaded, inputs), expected)
    other, _ = FAMILIES["gpt2"]()
    with pytest.raises(InputError):
        powernorm.load(tmp_path / "saved", other)
    assert not [name for name, _ in other.named_modules() if name.endswith("inserted_norm")]


def test_copies_and_compiled_models_have_norms_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    powernorm.insert(model, where="0")
    copied = copy.deepcopy(model)
    x = torch.randn(8, 4)
    compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert int(copied[0].inserted_norm.num_batches_tracked) == 1
    assert copied[0].inserted_norm is not model[0].inserted_norm


def test_other_surgery_knows_inserted_norms() -> None:
    model, inputs = FAMILIES["language-model"]()
    inserted = powernorm.insert(model)
    swapped = powernorm.swap(model, to="pn-static", where="*inserted_norm")
    assert list(swapped.norms) == list(inserted.norms)
    run(model.train(), inputs)
    refuses("undo later changes first", inserted.undo)
    swapped.undo()
    inserted.undo()


def test_the_plan_says_what_will_be_done() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    plan = powernorm.plan_insert(model, where="*")
    assert [(row.name, row.action) for row in plan.rows] == [
        ("self_attn.out_proj", "keep"),
        ("linear1", "insert"),
        ("linear2", "insert"),
    ]
    assert "never calls it" in plan.rows[0].reason
    assert "2 of 3 maps get bn" in str(plan)
    assert "inserted_norm" not in dict(model.linear1.named_modules())
    plan.apply()
    refuses("plan again", plan.apply)
    refuses("a norm was inserted behind it already", powernorm.insert, model)


def test_a_shared_map_gets_one_norm() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.ReLU())})
    plan = powernorm.plan_insert(model, where=lambda name, _: name == "b.0")
    assert [(row.name, row.shared) for row in plan.rows] == [("a.0", ("b.0",))]


def test_device_type_mode_and_options_are_taken_over() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).to(torch.bfloat16).eval()
    inserted = powernorm.insert(model, "pn-static", momentum=0.3)
    (norm,) = inserted.norms.values()
    assert norm.weight.dtype == torch.bfloat16
    assert not norm.training
    assert norm.momentum == 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "bm"}, "bm"),
        ({"norm": 3}, "norm is 3"),
        ({"momentum": 2.0}, "momentum"),
        ({"where": "*.fc7"}, r"selects no linear map; the model has 0, 1"),
        ({"where": [1]}, "expected 'feed-forward'"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    refuses(message, powernorm.insert, model, **arguments)
    assert len(list(model.modules())) == 3


def test_a_model_without_a_feed_forward_network_is_refused() -> None:
    with pytest.raises(InputError, match="selects no linear map"):
        powernorm.insert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_a_compiled_model_is_refused() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), backend="eager")
    refuses(r"insert before torch\.compile", powernorm.insert, model)
