from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from diagnosis.models import BATCH_STATISTICS_NORMS, Batch, Masked, batches, inputs_of
from powernorm.diagnosis import training_inference_discrepancy
from powernorm.norms import BatchNorm, build_norm
from refusals import refuses


def brute_force(calls: list[Tensor], *, centered: bool) -> tuple[float | None, float]:
    """SPEC 5 written out: population over all tokens, then the mean over batches."""
    tokens = torch.cat(calls)
    mean_parts, var_parts = [], []
    for batch in calls:
        if not len(batch):
            continue
        if centered:
            deviation = batch.std(0, correction=0)
            mean_parts.append(((batch.mean(0) - tokens.mean(0)).abs() / deviation).mean())
            var_parts.append(((deviation - tokens.std(0, correction=0)).abs() / deviation).mean())
        else:
            root = batch.square().mean(0).sqrt()
            var_parts.append(((root - tokens.square().mean(0).sqrt()).abs() / root).mean())
    mean = torch.stack(mean_parts).mean().item() if centered else None
    return mean, torch.stack(var_parts).mean().item()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_equals_the_definition(norm: str) -> None:
    torch.manual_seed(1)
    model = Masked(norm)
    data = batches()
    report = training_inference_discrepancy(model, data)
    # The same forwards once more, now only recorded.
    model.eval()
    model.lower.train()
    model.upper.train()
    with torch.no_grad(), inputs_of([model.lower, model.upper]) as seen:
        for x, mask in data:
            model(x, mask)
    assert [layer.name for layer in report.rows] == ["lower", "upper"]
    for found, layer in zip(report.rows, (model.lower, model.upper), strict=True):
        mean, var = brute_force(seen[layer], centered=layer.centered)
        assert found.kind == norm
        assert found.var_tid == pytest.approx(var, rel=1e-10)
        assert found.mean_tid == (None if mean is None else pytest.approx(mean, rel=1e-10))


def test_mask_of_the_scope() -> None:
    model = nn.Sequential(BatchNorm(6, dtype=torch.float64))
    (x, _), (padded, mask) = batches(2)

    def forward(model: nn.Module, batch: Batch) -> None:
        with powernorm.padding_mask(batch[1]):
            model(batch[0])

    report = training_inference_discrepancy(model, [(x, None), (padded, mask)], forward)
    mean, var = brute_force([x.reshape(-1, 6), padded[~mask]], centered=True)
    assert report.rows[0].mean_tid == pytest.approx(mean)
    assert report.rows[0].var_tid == pytest.approx(var)


def test_batch_without_tokens_is_left_out() -> None:
    model = nn.Sequential(BatchNorm(6, dtype=torch.float64))
    data = [(x,) for x, _ in batches(3)]
    empty = [*data, (torch.zeros(0, 4, 6, dtype=torch.float64),)]
    assert training_inference_discrepancy(model, data) == training_inference_discrepancy(
        model, empty
    )


def test_constant_features_give_finite_numbers() -> None:
    model = nn.Sequential(BatchNorm(2))
    data = [torch.stack([torch.randn(9), torch.full((9,), 3.0)], -1) for _ in range(3)]
    layer = training_inference_discrepancy(model, data).rows[0]
    assert 0 < layer.mean_tid < 10
    # A feature that is the same in every batch adds nothing.
    alone = training_inference_discrepancy(nn.Sequential(BatchNorm(1)), [x[:, :1] for x in data])
    assert layer.mean_tid == pytest.approx(alone.rows[0].mean_tid / 2)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_free_of_units(scale: float) -> None:
    model = nn.Sequential(BatchNorm(6, dtype=torch.float64))
    data = [x for x, _ in batches()]
    one = training_inference_discrepancy(model, data).rows[0]
    other = training_inference_discrepancy(model, [scale * x for x in data]).rows[0]
    assert other.mean_tid == pytest.approx(one.mean_tid)
    assert other.var_tid == pytest.approx(one.var_tid)


def test_summary() -> None:
    report = training_inference_discrepancy(Masked("bn"), batches())
    lower, upper = report.rows
    assert report.summary() == {
        "mean_last": upper.mean_tid,
        "var_last": upper.var_tid,
        "mean_avg": pytest.approx((lower.mean_tid + upper.mean_tid) / 2),
        "var_avg": pytest.approx((lower.var_tid + upper.var_tid) / 2),
    }
    assert report.to_rows()[1] == {
        "name": "upper",
        "kind": "bn",
        "action": "keep",
        "into": (),
        "mask": None,
        "reason": "",
        "mean_tid": upper.mean_tid,
        "var_tid": upper.var_tid,
    }


def test_summary_without_a_mean() -> None:
    summary = training_inference_discrepancy(Masked("pnv"), batches()).summary()
    assert summary is not None
    assert summary["mean_last"] is None
    assert summary["mean_avg"] is None


def test_model_without_batch_statistics_is_not_even_run() -> None:
    class Untouchable(nn.Linear):
        def forward(self, _: Tensor) -> Tensor:
            raise AssertionError("was called")

    report = training_inference_discrepancy(Untouchable(2, 2), [torch.ones(1, 2)])
    assert report.rows == ()
    assert report.summary() is None


@pytest.mark.parametrize("batch", ["tensor", "tuple", "dict"])
def test_forms_of_a_batch(batch: str) -> None:
    model = Masked("bn")
    x = batches(1)[0][0]
    forms: dict[str, Any] = {"tensor": x, "tuple": (x, None), "dict": {"x": x}}
    found = training_inference_discrepancy(model, [forms[batch], forms[batch]])
    # Equal batches are their own population.
    assert found.rows[0].var_tid == pytest.approx(0, abs=1e-12)


def test_transformer_of_torch_does_not_take_its_fused_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.norm1 = build_norm("bn", 8)
    layer.norm2 = build_norm("bn", 8)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    report = training_inference_discrepancy(model, [torch.randn(2, 3, 8) for _ in range(3)])
    assert [layer.name for layer in report.rows] == ["layers.0.norm1", "layers.0.norm2"]


def test_compiled_model_is_run_uncompiled() -> None:
    model = Masked("bn")
    compiled = torch.compile(model, backend="eager")
    data = batches()
    compiled(*data[0])
    assert training_inference_discrepancy(compiled, data) == training_inference_discrepancy(
        model, data
    )


def test_layers_that_are_not_called_are_named() -> None:
    class Half(Masked):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            return self.lower(x, padding_mask)

    report = training_inference_discrepancy(Half("bn"), batches())
    assert [layer.name for layer in report.rows] == ["lower"]
    assert report.unobserved == ("upper",)


def generator() -> Iterator[Batch]:
    yield from batches()


@pytest.mark.parametrize(
    ("data", "forward", "message"),
    [
        (generator(), None, "generator, which can be iterated over only once"),
        ([], None, "batches is empty"),
        (batches(), lambda _model, _batch: None, "none of the 2 layers .* 'lower'"),
        (
            [(x, torch.ones(x.shape[:2], dtype=torch.bool)) for x, _ in batches()],
            None,
            "no valid token for layer 'lower'",
        ),
    ],
    ids=["once", "empty", "uncalled", "padding"],
)
def test_bad_input(data: Any, forward: Any, message: str) -> None:
    model = Masked("bn")
    before = tensors_of(model)
    refuses(message, training_inference_discrepancy, model, data, forward)
    assert_same(before, tensors_of(model))
    assert not any(module._forward_pre_hooks for module in model.modules())
