"""Folding: exact for every family, with a reason for each norm that remains."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.norms import Norm
from powernorm.surgery.folding.structure import FeatureAffine, FoldedNorm
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.tasks.lm.model import LanguageModel
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, output_of, run
from surgery.static_models import left_of, settle, static_family

pytestmark = pytest.mark.filterwarnings(
    # transformers' own, at import and when it is traced
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

LEAVE_ONE = {
    # Their input and output are the user's features, so that the last norm stays as one
    # multiply-add (SPEC 9: "a model without a head").
    "torch-layer": "norm2",
    "torch-layer-length-first": "norm2",
    "torch-encoder": "norm",
    "torch-encoder-length-first": "norm",
    "torch-encoder-pre": "norm",
    "torch-transformer": "decoder.norm",
    "torch-transformer-length-first": "decoder.norm",
    # A GELU comes before its stream and nothing after.
    "whisper-encoder": "layer_norm",
}


def relative_error(found: Tensor, expected: Tensor) -> float:
    gap = (found - expected).detach().abs().max()
    return float(gap / expected.detach().abs().max())


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize(
    "name",
    some_default(
        FAMILIES,
        *("language-model", "torch-encoder", "bert", "gpt2", "t5"),
    ),
)
def test_every_family_folds_exactly(name: str, snapshot: SnapshotAssertion) -> None:
    model, inputs = static_family(name)
    expected = run(model, inputs)
    # Other lengths and masks; Whisper has one length.
    other = PADDED[name](3) if name in PADDED and name != "whisper-encoder" else None
    expected_other = expected if other is None else run(model, other)
    with torch.no_grad():
        expected_wide = run(copy.deepcopy(model).double(), doubled(inputs))
    report = powernorm.fold(model, inputs)
    # What took up each norm; the order is that of torch's graph. Where a change is meant:
    # `pytest … --snapshot-update`.
    assert [(row.name, row.action, tuple(sorted(row.into))) for row in report.rows] == snapshot
    left = {row.name: left_of(row) for row in report.rows if row.action != "fold"}
    assert left == ({LEAVE_ONE[name]: "multiply-add"} if name in LEAVE_ONE else {})
    assert not [m for m in model.modules() if isinstance(m, Norm | nn.BatchNorm1d | nn.LayerNorm)]
    assert relative_error(run(model, inputs), expected) <= 2e-5
    if other is not None:
        assert relative_error(run(model, other), expected_other) <= 2e-5
    assert report.errors[0].dtype == torch.float64
    assert report.errors[0].relative <= 1e-12
    with torch.no_grad():
        # The weights are float32 ones by now: what is left of exactness is their rounding.
        assert relative_error(run(model.double(), doubled(inputs)), expected_wide) <= 2e-5


DEEP = ("lm-pre", "lm-post", "encoder-pre", "encoder-post")


def deep(kind: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    placement = "pre" if kind.endswith("pre") else "post"
    if kind.startswith("lm"):
        shape = TransformerShape(
            num_features=64,
            num_layers=12,
            num_heads=4,
            feedforward_features=128,
            placement=placement,
        )
        model: nn.Module = LanguageModel(50, powernorm.BatchNorm, shape, max_length=16)
        inputs: dict[str, Any] = {"tokens": torch.randint(50, (4, 16))}
    else:
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, batch_first=True, norm_first=placement == "pre"
        )
        model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        inputs = {"src": torch.randn(4, 16, 64).to(dtype)}
    model = model.to(dtype)
    if not kind.startswith("lm"):
        powernorm.swap(model, to="bn", momentum=0.1)
    powernorm.calibrate(settle(model), [inputs])
    return model.eval(), inputs


@pytest.mark.parametrize("kind", some_default(DEEP, "lm-post"))
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 2e-5), pytest.param(torch.float64, 1e-12, marks=pytest.mark.slow)],
    ids=["f32", "f64"],
)
def test_twelve_layers(kind: str, dtype: torch.dtype, bound: float) -> None:
    model, inputs = deep(kind, dtype)
    with torch.no_grad():
        expected = output_of(model(**inputs))
        powernorm.fold(model, inputs)
        assert relative_error(output_of(model(**inputs)), expected) <= bound


def test_bfloat16_model() -> None:
    model, inputs = static_family("language-model")
    model.bfloat16()
    expected = run(model, inputs).float()
    report = powernorm.fold(model, inputs)
    assert [error.dtype for error in report.errors] == [
        torch.float64,
        torch.float32,
        torch.bfloat16,
    ]
    assert model.head.weight.dtype == torch.bfloat16
    assert relative_error(run(model, inputs).float(), expected) <= 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "gpt2", "torch-encoder"])
def test_model_on_a_gpu(name: str) -> None:
    model, inputs = static_family(name)
    model.cuda()
    moved = {key: value.cuda() for key, value in inputs.items()}
    expected = run(model, moved)
    report = powernorm.fold(model, moved)
    assert report.errors[0].relative <= 1e-12
    assert relative_error(run(model, moved), expected) <= 2e-4  # TF32 aside
    assert {p.device.type for p in model.parameters()} == {"cuda"}


@pytest.mark.parametrize("name", some_default(["gpt2", "torch-encoder"], "gpt2"))
def test_undo_restores_the_very_same_model(name: str) -> None:
    model, inputs = static_family(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = run(model, inputs)
    report = powernorm.fold(model, inputs)
    report.undo()
    now = dict(model.named_modules(remove_duplicate=False))
    assert now.keys() == modules.keys()
    assert all(now[key] is module for key, module in modules.items())
    found = dict(model.named_parameters(remove_duplicate=False))
    assert all(found[key] is parameter for key, parameter in parameters.items())
    assert torch.equal(run(model, inputs), expected)
    refuses("already", report.undo)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_of_the_swap_go_with_the_norms() -> None:
    model, inputs = static_family("bert")
    before_fold = hooks_of(model)
    assert before_fold >= 2  # of the model's mask, and of parts that may be called alone
    report = powernorm.fold(model, inputs)
    assert hooks_of(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())
    report.undo()
    assert hooks_of(model) == before_fold
    model.train()
    norm = model.embeddings.LayerNorm
    before = norm.running_mean.clone()
    # Calibrated on the same tokens: only padding that counts would move the mean.
    more = PADDED["bert"](4)
    model(**more)
    assert torch.allclose(norm.running_mean, before, atol=1e-6)
    report = powernorm.fold(model.eval(), inputs)
    report.undo()
    model.train()(**{**more, "attention_mask": torch.ones_like(more["attention_mask"])})
    assert not torch.allclose(norm.running_mean, before, atol=1e-4)


def test_copy_leaves_the_model_alone() -> None:
    model, inputs = static_family("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = run(model, inputs)
    report = powernorm.fold(model, inputs, inplace=False)
    assert report.model is not model
    now = model.state_dict()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert relative_error(run(report.model, inputs), expected) <= 2e-5


def test_plan_changes_nothing_and_says_where_norms_go() -> None:
    model, inputs = static_family("gpt2")
    before = run(model, inputs)
    plan = powernorm.plan_fold(model, inputs)
    assert torch.equal(run(model, inputs), before)
    rows = {row["name"]: row for row in plan.to_rows()}
    assert rows["transformer.h.0.ln_1"]["into"] == ("transformer.h.0.attn.c_attn.weight",)
    assert rows["transformer.ln_f"]["into"] == ("lm_head.weight",)
    assert "transformer.h.1.ln_2" in str(plan)


def test_plan_refuses_a_model_that_has_changed() -> None:
    model, inputs = static_family("gpt2")
    plan = powernorm.plan_fold(model, inputs)
    model.transformer.h[0].ln_1.running_var.mul_(2)
    refuses(r"h\.0\.ln_1.*plan it again", plan.apply)


def test_tied_head_is_untied_or_kept() -> None:
    model, inputs = static_family("gpt2")
    expected = run(model, inputs)
    kept = powernorm.fold(model, inputs, inplace=False, tied="keep")
    (row,) = [row for row in kept.rows if row.action != "fold"]
    assert (row.name, left_of(row)) == ("transformer.ln_f", "multiply-add")
    assert "tied" in row.reason
    assert kept.model.lm_head.weight is kept.model.transformer.wte.weight
    assert relative_error(run(kept.model, inputs), expected) <= 2e-5
    report = powernorm.fold(model, inputs)
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert model.config.tie_word_embeddings is True  # forwards of some families read it
    model.tie_weights()
    assert model.lm_head.weight is not model.transformer.wte.weight
    report.undo()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_norm_with_mask_argument_and_residual() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
            self.norm, self.after = powernorm.BatchNorm(6), powernorm.BatchNorm(6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            stream = self.first(x)
            branch = self.second(self.norm(stream, padding_mask))
            y, stream = self.after(branch, padding_mask, stream)
            return self.head(y + stream)

    model = settle(Model())
    inputs = (torch.randn(2, 5, 4), torch.arange(5).expand(2, 5) > 3)
    expected = model(*inputs)
    report = powernorm.fold(model, inputs)
    actions = {row.name: left_of(row) for row in report.rows}
    # y + stream adds a norm's output to its own input, which only equal scales allow.
    assert actions == {"norm": "fold", "after": "multiply-add"}
    assert relative_error(model(*inputs), expected) <= 2e-6


def test_report_is_readable() -> None:
    model, inputs = static_family("torch-encoder")
    text = str(powernorm.fold(model, inputs))
    assert "multiply-add" in text
    assert "it is an output of the model" in text
    assert "float64: max. absolute error" in text


def test_folded_norm_takes_what_a_norm_takes() -> None:
    x, residual = torch.randn(2, 3), torch.randn(2, 3)
    assert FoldedNorm()(x, torch.zeros(2, dtype=torch.bool)) is x
    assert torch.equal(torch.jit.script(FoldedNorm())(x), x)
    y, total = FoldedNorm()(x, None, residual)
    assert torch.equal(y, x + residual)
    assert torch.equal(total, x + residual)
    layer = FeatureAffine(3)
    with torch.no_grad():
        layer.weight.fill_(2)
        layer.bias.fill_(1)
    assert torch.equal(layer(x), 2 * x + 1)
    y, total = layer(x, None, residual)
    assert torch.equal(y, 2 * (x + residual) + 1)
    assert torch.equal(total, x + residual)


def test_scale_of_the_fold_is_recorded_in_the_weights() -> None:
    """Linear → norm → GELU: W' = a W, b' = a b + c."""
    linear, norm = nn.Linear(3, 4).double(), powernorm.BatchNorm(4, dtype=torch.float64)
    model = settle(nn.Sequential(linear, norm, nn.GELU()))
    (scale, shift), weight, bias = norm.affine(), linear.weight.clone(), linear.bias.clone()
    powernorm.fold(model, torch.randn(5, 3, dtype=torch.float64))
    assert torch.allclose(linear.weight, scale[:, None] * weight, rtol=1e-14)
    assert torch.allclose(linear.bias, scale * bias + shift, rtol=1e-13)
    assert math.prod(scale.shape) == 4


def test_planning_runs_the_model_twice_besides_tracing() -> None:
    runs = []

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(torch.compiler.is_exporting())
            return super().forward(x)

    model = Counted(nn.Linear(4, 4), powernorm.BatchNorm(4), nn.Linear(4, 2))
    model(torch.randn(8, 4))
    runs.clear()
    powernorm.plan_fold(model.eval(), torch.randn(8, 4))
    assert (runs.count(False), runs.count(True)) == (2, 1)


def test_report_of_a_copy_does_not_keep_the_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4), powernorm.BatchNorm(4), nn.Linear(4, 2))
    powernorm.calibrate(model, [torch.randn(8, 4)])
    report = powernorm.fold(model.eval(), torch.randn(3, 4), inplace=False)
    original = weakref.ref(model)
    del model
    gc.collect()
    assert original() is None
    assert report.rows[0].action == "fold"
