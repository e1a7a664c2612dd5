"""All verbs handle torch's BatchNorms next to other norms, as in a Conformer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from refusals import refuses

WIDTH = 6


class Block(nn.Module):
    """A LayerNorm, and the BatchNorm of a convolution module."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.bn = nn.BatchNorm1d(WIDTH, affine=affine)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        del padding_mask
        y: Tensor = self.bn(self.conv(self.ln(x).transpose(1, 2))).transpose(1, 2)
        return y


def trained(**options: Any) -> Block:
    torch.manual_seed(0)
    model = Block(**options)
    for _ in range(5):
        model(torch.randn(4, 7, WIDTH) * 2 + 1)
    return model.eval()


def batches(padded: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in (7, 5, 6):
        x = torch.randn(4, length, WIDTH, generator=generator) - 1
        one = {"x": x}
        if padded:
            one["padding_mask"] = torch.arange(length) >= torch.tensor([[length], [3], [4], [2]])
        found.append(one)
    return found


def inputs(model: Block, data: list[dict[str, Tensor]]) -> Tensor:
    """Return all valid inputs of the BatchNorm, (tokens, features)."""
    seen: list[Tensor] = []
    handle = model.bn.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach().transpose(1, 2))
    )
    for batch in data:
        model(**batch)
    handle.remove()
    return torch.cat(
        [
            x[~batch["padding_mask"]] if "padding_mask" in batch else x.reshape(-1, WIDTH)
            for x, batch in zip(seen, data, strict=True)
        ]
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_calibrate_measures_the_statistics_and_keeps_the_module(padded: bool, affine: bool) -> None:
    model, data = trained(affine=affine), batches(padded)
    norm, parameters = model.bn, list(model.parameters())
    report = powernorm.calibrate(model, data)
    assert model.bn is norm
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    tokens = inputs(model, data)
    torch.testing.assert_close(norm.running_mean, tokens.mean(0))
    torch.testing.assert_close(norm.running_var, tokens.var(0))
    rows = {row.name: row for row in report.rows}
    assert (rows["bn"].action, rows["bn"].kind, rows["bn"].tokens) == (
        "calibrate",
        "batch",
        len(tokens),
    )
    assert (rows["ln"].action, rows["ln"].reason) == ("keep", "keeps no running statistics")
    assert not norm.training
    assert not norm._forward_pre_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("padded", [False, True])
def test_the_measures_are_those_of_the_masked_layer(padded: bool) -> None:
    model, data = trained(), batches(padded)
    # No convolution that would see other zeros.
    model.conv = nn.Conv1d(WIDTH, WIDTH, 1)
    masked = copy.deepcopy(model)
    powernorm.mask_batch_norms(masked)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = model(**batch).square()
        return y[~batch["padding_mask"]].mean() if padded else y.mean()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    for measure in (
        lambda one: powernorm.training_inference_discrepancy(one, data).rows[0].mean_tid,
        lambda one: powernorm.training_inference_discrepancy(one, data).rows[0].var_tid,
        lambda one: powernorm.diagnosis.evaluation_gap(one, data, loss).gap,
    ):
        assert measure(model) == pytest.approx(measure(masked), rel=1e-5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_diagnose_shows_both_and_names_the_mask() -> None:
    model, data = trained(), batches(padded=True)
    for batch in data:
        batch["x"] = batch["x"].masked_fill(batch["padding_mask"][..., None], 9.0)
    report = powernorm.diagnose(model, data)
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["ln", "bn"]
    assert rows["bn"].padded_var_tid is not None
    assert "mask_batch_norms" in rows["bn"].reason
    assert "padded_var_tid" in str(report)
    assert "mask_batch_norms" not in powernorm.diagnose(model, batches()).rows[1].reason
    powernorm.mask_batch_norms(model)
    report = powernorm.diagnose(model, data)
    assert [row.name for row in report.rows] == ["ln", "bn"]
    assert "mask_batch_norms" not in report.rows[1].reason


def test_freezing_names_what_it_cannot_freeze() -> None:
    model = trained()
    refuses("'bn' of torch become such by", powernorm.freeze_statistics, model)
    powernorm.swap(model, "bn", where="ln")
    powernorm.calibrate(model, batches())
    with pytest.warns(UserWarning, match="'bn' of torch"):
        assert powernorm.freeze_statistics(model) == ["ln"]


def test_a_batch_norm_without_statistics_has_a_row_with_the_reason() -> None:
    model = trained()
    model.bn = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    powernorm.swap(model, "bn", where="ln")
    rows = {row.name: row for row in powernorm.calibrate(model, batches()).rows}
    assert rows["bn"].reason == "keeps no running statistics"


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = trained()
    norm, before = model.bn, model.bn.running_mean.clone()
    with pytest.raises(powernorm.InputError, match="not finite"):
        powernorm.calibrate(model, [{"x": torch.full((2, 3, WIDTH), float("nan"))}] * 2)
    assert model.bn is norm
    assert torch.equal(norm.running_mean, before)
