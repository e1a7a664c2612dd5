"""User-defined norms in an existing model: swapped in, found again, folded or kept, removed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import powernorm
from norms.own_modules import PLAIN, Bounded, Centered, Halved, Mixed
from powernorm.diagnosis import NormMonitor
from powernorm.errors import InputError
from powernorm.inspection.finder import find_norms
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.registry import REGISTERED
from refusals import refuses
from surgery.static_models import left_of

PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with patch.dict(REGISTERED, clear=True):
        for layer in (*PLAIN, Halved):
            powernorm.register_norm(layer.__name__.lower(), layer)
        yield


def encoder(num_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.1)
    return model


def run(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x, src_key_padding_mask=PADDING)
    return y[~PADDING]


@pytest.mark.parametrize("layer", PLAIN)
def test_swapped_and_taken_out_again(layer: type[nn.Module]) -> None:
    model = encoder()
    x = torch.randn(2, 5, 8)
    before, old = run(model, x), model.layers[0].norm1
    swap = powernorm.swap(model, layer.__name__.lower())
    new = model.layers[0].norm1
    assert type(new.layer) is layer
    assert {row.mask for row in swap.plan.rows} == {
        None if layer is Bounded else "src_key_padding_mask"
    }
    spoiled = torch.where(PADDING.unsqueeze(-1), 99.0, x)
    y = run(model, x)
    torch.testing.assert_close(run(model, spoiled), y)  # padding does not count
    assert not torch.allclose(y, before)
    swap.undo()
    assert model.layers[0].norm1 is old
    torch.testing.assert_close(run(model, x), before)


def test_by_module_and_class_with_options() -> None:
    model = encoder()
    plan = powernorm.plan_swap(model, "norms.own_modules:Bounded", slope=3.0)
    assert "4 of 4 norms change to norms.own_modules:Bounded" in str(plan)
    plan.apply()
    assert model.layers[1].norm2.layer.slope == 3.0
    refuses("no option 'slop', it takes slope, shift", powernorm.swap, model, "bounded", slop=3.0)
    with pytest.raises(InputError, match="own_modules:Missing' cannot be loaded"):
        powernorm.plan_swap(model, "norms.own_modules:Missing")


def test_scale_and_shift_stay_the_same_parameters() -> None:
    model = encoder()
    weight, bias = model.layers[0].norm1.weight, model.layers[0].norm1.bias
    for to in ("bounded", "bounded", "centered", "rms", "bounded", "ln"):
        powernorm.swap(model, to)
        assert model.layers[0].norm1.weight is weight
    powernorm.swap(model, "bounded")
    # Only RMSNorm, in between, had none.
    assert model.layers[0].norm1.bias is not bias
    assert model.layers[0].norm1.layer.bias is model.layers[0].norm1.bias


def test_a_weight_that_begins_as_something_else_keeps_its_start() -> None:
    class PlusOne(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(size))

        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + self.weight)

    powernorm.register_norm("plus-one", PlusOne)
    model = encoder()
    powernorm.swap(model, "plus-one")
    assert not model.layers[0].norm1.weight.any()
    powernorm.swap(model, "ln")
    torch.testing.assert_close(model.layers[0].norm1.weight, torch.ones(8))


def test_on_the_meta_device() -> None:
    model = encoder().to("meta")
    weight = model.layers[0].norm1.weight
    powernorm.swap(model, "centered")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.layers[0].norm1.weight is weight


@pytest.mark.parametrize("to", ["centered", "mixed", "bounded"])
def test_over_channels(to: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=0.5))
    x = torch.randn(2, 3, 6, 6)
    inner = model[0](x)
    powernorm.swap(model, to)
    assert model[1].feature_dim == 1
    expected = REGISTERED[to].layer(8)(inner.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(model(x), expected)


def test_running_statistics_are_not_carried_to_what_may_mean_other_things() -> None:
    class Own(Halved):
        def __init__(self, num_features: int) -> None:
            super().__init__(num_features)
            self.register_buffer("running_mean", torch.zeros(num_features))
            self.register_buffer("running_var", torch.ones(num_features))

    powernorm.register_norm("own", Own)
    model = nn.Sequential(powernorm.BatchNorm(8, eps=0.5)).train()
    model(torch.randn(9, 8) + 3)
    powernorm.swap(model, "own")
    assert not model[0].running_mean.any()
    powernorm.swap(model, "own")


def test_a_class_of_ours_that_was_derived_from_keeps_its_state() -> None:
    class Derived(powernorm.BatchNorm):
        def __init__(self, num_features: int, **options: object) -> None:
            super().__init__(num_features, **options)  # type: ignore[arg-type]

    powernorm.register_norm("derived", Derived)
    model = nn.Sequential(powernorm.BatchNorm(8)).train()
    model(torch.randn(9, 8) + 3)
    before = copy.deepcopy(model[0].running_mean)
    powernorm.swap(model, "derived")
    assert type(model[0]) is Derived
    torch.testing.assert_close(model[0].running_mean, before)


class Cached(nn.Module):
    """As a decoder with a cache: the mask is of all positions, the norm sees the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        assert attention_mask.ndim == 2
        return self.norm(x[:, -2:])


def test_a_mask_that_is_longer_than_what_the_norm_sees() -> None:
    model = Cached()
    powernorm.swap(model, "centered")
    x, keep = torch.randn(2, 5, 8), (~PADDING).long()
    refuses(r"from attention_mask .* does not fit", model, x, attention_mask=keep)
    y = model.eval()(x, attention_mask=keep)
    torch.testing.assert_close(y, x[:, -2:] * model.norm.weight)


def test_found_again_by_their_names() -> None:
    model = encoder(1)
    powernorm.swap(model, "bounded", where="*norm1")
    powernorm.swap(model, "halved", where="*norm2")
    found = find_norms(model)
    assert [norm.type_name for norm in found] == ["Bounded", "Halved"]
    assert [norm.reading is not None and norm.reading.kind for norm in found] == ["own", "own"]
    for types in (Bounded, "Bounded", AdaptedNorm):
        plan = powernorm.plan_swap(model, "ln", where=powernorm.Where(types=types))
        assert [row.action for row in plan.rows] == ["swap", "keep"]
        assert plan.rows[0].type_name == "Bounded"
    report = powernorm.diagnose(model, [torch.randn(3, 5, 8) for _ in range(3)])
    assert [row.kind for row in report.rows] == ["bounded", "halved"]


def test_monitored_by_its_name() -> None:
    model = encoder(1)
    powernorm.swap(model, "mixed")
    monitor = NormMonitor(model, 1)
    monitor.start_step(0)
    run(model, torch.randn(2, 5, 8)).sum().backward()
    rows = {row["layer"]: row for row in monitor.finish_step(0)}
    assert rows["layers.0.norm1"]["norm"] == "mixed"
    assert rows["layers.0.norm1"]["gradient_norm"] is not None
    # The norm of this library in it has batch statistics to look at.
    assert rows["layers.0.norm1.layer.batch"]["norm"] == "bn"
    assert rows["layers.0.norm1.layer.batch"]["var_tid"] is not None


def test_what_acts_on_batch_statistics_passes_them_by() -> None:
    model = encoder(1)
    powernorm.swap(model, "bounded", where="*norm1")
    powernorm.swap(model, "rbn", where="*norm2")
    x = torch.randn(2, 5, 8)
    run(model, x)
    before = copy.deepcopy(model.layers[0].norm1.state_dict())
    assert powernorm.penalty(model, "token_sum") == model.layers[0].norm2.penalty() > 0
    report = powernorm.calibrate(model, [x])
    assert [row.name for row in report.rows if row.action != "keep"] == ["layers.0.norm2"]
    powernorm.freeze_statistics(model)
    powernorm.unfreeze_statistics(model)
    torch.testing.assert_close(model.layers[0].norm1.state_dict(), before)


def test_static_ones_fold_and_others_stay_with_a_reason() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
    )
    powernorm.swap(model, "centered", where="1")
    powernorm.swap(model, "bounded", where="3")
    x = torch.randn(6, 8)
    model(x)
    before = model.eval()(x)
    report = powernorm.fold(model, x)
    assert [(row.kind, row.action) for row in report.rows] == [
        ("centered", "fold"),
        ("bounded", "keep"),
    ]
    assert "does not say that it is an affine map per feature" in report.rows[1].reason
    torch.testing.assert_close(model(x), before)
    report.undo()
    assert type(model[1].layer) is Centered
    # What a hook inside does would go with the norm.
    model[1].layer.register_forward_hook(lambda *_: None)
    assert "it has hooks or a forward of its own" in powernorm.plan_fold(model, x).rows[0].reason
    only = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    powernorm.swap(only, "mixed")
    refuses(r"holds no static norm to fold \(it holds Mixed\)", powernorm.plan_fold, only, x)


def test_mixed_calibrates_what_it_holds() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    powernorm.swap(model, "mixed")
    x = torch.randn(40, 8) + 3
    powernorm.calibrate(model, [x])
    torch.testing.assert_close(model[0].layer.batch.running_mean, x.mean(0))
    assert isinstance(model[0].layer, Mixed)


def test_a_masked_model_of_static_ones_folds() -> None:
    model = encoder()
    powernorm.swap(model, "centered")
    x = torch.randn(2, 5, 8)
    run(model, x)
    before = run(model.eval(), x)
    report = powernorm.fold(model, {"src": x, "src_key_padding_mask": PADDING})
    assert {left_of(row) for row in report.rows} == {"fold", "multiply-add"}
    torch.testing.assert_close(run(model, x), before)
