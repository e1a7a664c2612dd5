from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import powernorm
from diagnosis.models import BATCH_STATISTICS_NORMS, Batch, Masked, batches, inputs_of
from powernorm.norms import BatchNorm, BatchStatisticsNorm, build_norm
from powernorm.surgery.calibration import calibrate
from powernorm.surgery.freezing import freeze_statistics

WAYS = ("layer_by_layer", "one_pass")
STATISTICS = ("running_mean", "running_var", "running_second_moment")


def built(norm: str, seed: int = 0) -> Masked:
    torch.manual_seed(seed)
    model = Masked(norm)
    with torch.no_grad():
        for layer in layers_of(model):
            assert layer.weight is not None
            assert layer.bias is not None
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.normal_()
    return model


def layers_of(model: nn.Module) -> list[BatchStatisticsNorm]:
    return [module for module in model.modules() if isinstance(module, BatchStatisticsNorm)]


def spoil(model: nn.Module) -> None:
    """Statistics that are far from anything."""
    for layer in layers_of(model):
        for name, buffer in layer.named_buffers():
            if name in STATISTICS:
                buffer.uniform_(3, 9)


def evaluated_inputs(model: Masked, data: list[Batch]) -> list[Tensor]:
    model.eval()
    with torch.no_grad(), inputs_of(layers_of(model)) as seen:
        for x, mask in data:
            model(x, mask)
    return [torch.cat(seen[layer]) for layer in layers_of(model)]


def expect_population(layer: BatchStatisticsNorm, tokens: Tensor) -> None:
    """The layer's running statistics are those of the tokens, by torch's own functions."""
    if layer.centered:
        correction = 0 if layer.variant == "released" else 1
        torch.testing.assert_close(layer.running_mean, tokens.mean(0), rtol=1e-10, atol=1e-10)
        var = tokens.var(0, correction=correction)
        torch.testing.assert_close(layer.running_var, var, rtol=1e-9, atol=1e-12)
    else:
        second = tokens.square().mean(0)
        torch.testing.assert_close(layer.running_second_moment, second, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_layer_by_layer_gives_the_statistics_of_the_evaluated_network(norm: str) -> None:
    model = built(norm)
    spoil(model)
    data = batches(5)
    calibrate(model, data)
    for layer, tokens in zip(layers_of(model), evaluated_inputs(model, data), strict=True):
        expect_population(layer, tokens)


def test_untrained_layer_that_evaluates_by_its_step_counts_one_before() -> None:
    """The share of PRepBN's mixture falls with the step that the layer then has."""
    model = nn.Sequential(
        *(
            powernorm.ProgressiveRepBatchNorm(
                8, decay_steps=2, evaluation="blend", dtype=torch.float64
            )
            for _ in range(2)
        )
    )
    data = [3 * torch.randn(20, 8, dtype=torch.float64) + 5 for _ in range(3)]
    calibrate(model, data)
    layer = layers_of(model)[1]
    expect_population(layer, torch.cat([model.eval()[0](x) for x in data]))
    assert int(layer.num_batches_tracked) == 1


@pytest.mark.parametrize("groups", [None, 2])
def test_activations_are_standardized_at_every_norm(groups: int | None) -> None:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [
            nn.Linear(6, 6, dtype=torch.float64),
            nn.Tanh(),
            build_norm("bn", 6, groups=groups, eps=1e-12, dtype=torch.float64),
        ]
    model = nn.Sequential(*parts)
    data = [x for x, mask in batches(4) if mask is None]
    calibrate(model, data)
    model.eval()
    x = [batch.reshape(-1, 6) for batch in data]
    for part in model:
        x = [part(batch) for batch in x]
        if isinstance(part, BatchNorm):
            tokens = torch.cat(x)
            zeros, ones = torch.zeros(6), torch.ones(6)
            torch.testing.assert_close(tokens.mean(0).float(), zeros, rtol=0, atol=1e-6)
            torch.testing.assert_close(tokens.var(0).float(), ones, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["bn", "rbn"])
def test_one_pass_equals_training_mode_pooled(norm: str) -> None:
    model = built(norm)
    reference = copy.deepcopy(model)
    data = batches(5)
    calibrate(model, data, way="one_pass")
    # What the papers do: the layers normalize as in training, the rest as in evaluation.
    reference.eval()
    for layer in layers_of(reference):
        layer.train()
    with torch.no_grad(), inputs_of(layers_of(reference)) as seen:
        for x, mask in data:
            reference(x, mask)
    for layer, old in zip(layers_of(model), layers_of(reference), strict=True):
        expect_population(layer, torch.cat(seen[old]))


@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_one_pass_of_the_lowest_layer_is_exact(norm: str) -> None:
    model = built(norm)
    data = batches(5)
    calibrate(model, data, way="one_pass")
    expect_population(model.lower, evaluated_inputs(model, data)[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_does_not_depend_on_earlier_statistics(norm: str, way: Any) -> None:
    model = built(norm)
    other = copy.deepcopy(model)
    spoil(other)
    other.upper.num_batches_tracked.fill_(5000)
    data = batches(4)
    calibrate(model, data, names="*", way=way)
    calibrate(other, data, names="*", way=way)
    x, mask = data[1]
    model.eval()
    other.eval()
    assert torch.equal(model(x, mask), other(x, mask))


def test_layer_by_layer_does_not_depend_on_batching() -> None:
    whole, split = built("pn"), built("pn")
    x = torch.randn(12, 5, 6, dtype=torch.float64) * 3 + 1
    calibrate(whole, [x])
    calibrate(split, list(x.split(5)))
    for a, b in zip(layers_of(whole), layers_of(split), strict=True):
        torch.testing.assert_close(a.running_second_moment, b.running_second_moment)
    # The other way does: its batches are normalized by themselves.
    calibrate(whole, [x], way="one_pass")
    calibrate(split, list(x.split(5)), way="one_pass")
    assert not torch.allclose(whole.upper.running_second_moment, split.upper.running_second_moment)


@pytest.mark.parametrize("norm", ["bn", "pnv"])
def test_released_variant_has_its_own_variance(norm: str) -> None:
    layer = build_norm(norm, 6, variant="released", dtype=torch.float64)
    x, mask = batches(2)[1]
    calibrate(layer, [(x, mask)])
    expect_population(layer, x[~mask])


@pytest.mark.parametrize("way", WAYS)
def test_mask_of_the_scope_and_residual(way: Any) -> None:
    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = BatchNorm(6, dtype=torch.float64)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            with powernorm.padding_mask(mask):
                return self.norm(x, residual=x * 2)[0]

    model = Scoped()
    x, mask = batches(2)[1]
    calibrate(model, [(x, mask)], way=way)
    expect_population(model.norm, x[~mask] * 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", ["bn", "pn"])
def test_swapped_model_hands_its_own_mask_to_the_norms(norm: str, way: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    powernorm.swap(model, to=norm)
    x, mask = torch.randn(4, 7, 8), torch.zeros(4, 7, dtype=torch.bool)
    mask[0, 3:] = mask[2, 1:] = True
    data = [{"src": x * scale, "src_key_padding_mask": mask} for scale in (1.0, 2.0)]
    report = calibrate(model, data, way=way)
    assert {row.tokens for row in report.rows} == {2 * int((~mask).sum())}
    assert not any(layer.training for layer in layers_of(model))
    if way == "one_pass":
        return
    seen: list[Tensor] = []
    last = layers_of(model)[-1]
    with last.register_forward_pre_hook(lambda _, args: seen.append(args[0][~mask])):
        for batch in data:
            model(**batch)
    found = last.token_moments(torch.cat(seen))
    if last.centered:
        torch.testing.assert_close(found.mean.float(), last.running_mean, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(found.second_moment.float(), last.running_second_moment)


def test_padding_and_a_batch_without_tokens_do_not_count() -> None:
    one, other = built("bn"), built("bn")
    data = batches()
    empty = (torch.zeros(2, 3, 6, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool))
    wild = [(x if mask is None else x.masked_fill(mask[..., None], 1e9), mask) for x, mask in data]
    for way in WAYS:
        calibrate(one, data, way=way)
        calibrate(other, [empty, *wild], way=way)
        for a, b in zip(layers_of(one), layers_of(other), strict=True):
            assert torch.equal(a.running_var, b.running_var)


def test_layer_without_tokens_in_a_batch_evaluates_by_its_running_statistics() -> None:
    class Unmasked(Masked):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            return self.upper(self.lower(x, padding_mask))

    model = Unmasked("bn")
    first, second = (x for x, _ in batches(2))
    before = copy.deepcopy(model.lower).eval()
    expected = before(first).flatten(0, 1), copy.deepcopy(model.lower).train()(second)
    hidden = torch.ones(first.shape[:2], dtype=torch.bool)
    calibrate(model, [(first, hidden), (second, None)], way="one_pass")
    expect_population(model.upper, torch.cat([expected[0], expected[1].flatten(0, 1)]).detach())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
@pytest.mark.parametrize("fails", [False, True])
def test_changes_statistics_alone(norm: str, way: Any, fails: bool) -> None:
    model = built(norm)
    model.dropout.eval()
    model.upper.eval()
    model.embed.weight.requires_grad_(False)
    modes = {module: module.training for module in model.modules()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = dict(model.named_buffers())
    state = torch.get_rng_state()
    calls = 0

    def forward(model: nn.Module, batch: Batch) -> None:
        nonlocal calls
        calls += 1
        torch.rand(3)
        model(*batch)
        if fails and calls == 3:
            raise RuntimeError("in the middle")

    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            calibrate(model, batches(), forward, way=way)
    else:
        calibrate(model, batches(), forward, way=way)
    for name, tensor in model.state_dict().items():
        moved = name.endswith((*STATISTICS, "num_batches_tracked", "window_second_moment"))
        assert torch.equal(before[name], tensor) != (moved and not fails), name
    assert all(buffer is held[name] for name, buffer in model.named_buffers())
    assert {module: module.training for module in model.modules()} == modes
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_pending_penalty_stays() -> None:
    model = built("rbn")
    x, mask = batches(2)[1]
    model(x, mask)
    before = powernorm.penalty(model, "token_sum")
    calibrate(model, batches())
    assert torch.equal(powernorm.penalty(model, "token_sum"), before)


def test_warmup_is_not_cut_short() -> None:
    norm = powernorm.PowerNorm(6, warmup_steps=2, groups=None)
    calibrate(norm, [torch.randn(40, 6)])
    assert int(norm.num_batches_tracked) == 1
    assert norm.stage == 0
    norm(torch.randn(9, 6)).sum().backward()
    assert int(norm.num_batches_tracked) == 2
    assert norm.stage == 1


def test_counter_of_a_trained_layer_stays() -> None:
    norm = BatchNorm(6)
    for _ in range(7):
        norm(torch.randn(9, 6))
    calibrate(norm, [torch.randn(40, 6)])
    assert int(norm.num_batches_tracked) == 7


def test_window_of_a_fresh_mabn_is_the_population() -> None:
    norm = powernorm.MovingAverageBatchNorm(6, window=3, warmup_steps=0)
    calibrate(norm, [torch.randn(40, 6) * 4])
    torch.testing.assert_close(
        norm.window_second_moment, norm.running_second_moment.expand(3, -1), rtol=0, atol=0
    )


@pytest.mark.parametrize("way", WAYS)
def test_names_leave_layers_out(way: Any) -> None:
    model = built("bn")
    spoil(model)
    before = model.lower.running_mean.clone()
    data = batches()
    report = calibrate(model, data, names="up*", way=way)
    assert [(row.name, row.action) for row in report.rows] == [
        ("upper", "calibrate"),
        ("lower", "keep"),
    ]
    assert report.rows[1].reason == "not selected"
    assert torch.equal(model.lower.running_mean, before)
    # The other layer evaluated by its own statistics meanwhile.
    expect_population(model.upper, evaluated_inputs(model, data)[1])


def test_order_of_calls_not_of_registration() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = BatchNorm(6, dtype=torch.float64)
            self.first = BatchNorm(6, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).exp())

    model = Reversed()
    data = [x for x, _ in batches()]
    report = calibrate(model, data)
    assert [row.name for row in report.rows] == ["first", "second"]
    model.eval()
    expect_population(model.second, torch.cat([model.first(x).exp().flatten(0, 1) for x in data]))


def test_report() -> None:
    model = built("bn")
    data = batches()
    num_tokens = sum(x[..., 0].numel() if m is None else int((~m).sum()) for x, m in data)
    old_mean, old_var = model.lower.running_mean.clone(), model.lower.running_var.clone()
    report = calibrate(model, data)
    row = report.to_rows()[0]
    assert row["name"] == "lower"
    assert (row["kind"], row["action"]) == ("bn", "calibrate")
    assert row["tokens"] == num_tokens
    deviation = (model.lower.running_var + 1e-5).sqrt()
    assert row["mean_shift"] == pytest.approx(
        ((model.lower.running_mean - old_mean).abs() / deviation).mean().item()
    )
    assert row["std_shift"] == pytest.approx(
        ((deviation - (old_var + 1e-5).sqrt()).abs() / deviation).mean().item()
    )
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("lower")
    assert lines[0].split() == ["name", "kind", "action", "tokens", "mean_shift", "std_shift"]
    # A second time nothing moves.
    for again in calibrate(model, data).rows:
        assert again.mean_shift == pytest.approx(0, abs=1e-10)
        assert again.std_shift == pytest.approx(0, abs=1e-10)
    assert calibrate(built("pn"), data).rows[0].mean_shift is None


@pytest.mark.parametrize("way", WAYS)
def test_progress(way: Any) -> None:
    told: list[tuple[int, int]] = []
    calibrate(built("bn"), batches(3), way=way, on_progress=lambda *numbers: told.append(numbers))
    total = 6 if way == "layer_by_layer" else 3
    assert told == [(done, total) for done in range(1, total + 1)]


def test_progress_of_a_stream() -> None:
    class Stream:
        def __iter__(self) -> Iterator[Batch]:
            return iter(batches(2))

    told: list[tuple[int, int]] = []
    calibrate(built("bn"), Stream(), on_progress=lambda *numbers: told.append(numbers))
    assert told == [(1, 0), (2, 0), (3, 4), (4, 4)]


def test_shuffling_loader_gives_the_same_batches_in_every_pass() -> None:
    data = TensorDataset(torch.randn(23, 4, 6, dtype=torch.float64))
    loader = DataLoader(data, batch_size=5, shuffle=True, drop_last=True)
    model = built("bn")
    seen: list[Tensor] = []

    def forward(model: nn.Module, batch: Any) -> None:
        seen.append(batch[0])
        model(batch[0])

    calibrate(model, loader, forward)
    assert torch.equal(torch.cat(seen[:4]), torch.cat(seen[4:]))


def test_frozen_layers_are_calibrated_and_stay_frozen() -> None:
    model = built("bn")
    data = batches()
    calibrate(model, data)
    freeze_statistics(model)
    spoil(model)
    calibrate(model, data)
    expect_population(model.lower, evaluated_inputs(model, data)[0])
    assert model.lower.is_frozen


def test_compiled_model_and_torch_transformer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.norm1, layer.norm2 = build_norm("bn", 8), build_norm("bn", 8)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    data = [torch.randn(2, 3, 8) for _ in range(3)]
    compiled(data[0])
    assert calibrate(compiled, data).to_rows()[0]["name"] == "layers.0.norm1"
    calibrate(model, data)
    for a, b in zip(layers_of(model), layers_of(compiled), strict=True):
        torch.testing.assert_close(a.running_var, b.running_var)


def generator() -> Iterator[Batch]:
    yield from batches()


def test_generator_is_enough_for_one_pass() -> None:
    assert len(calibrate(built("bn"), generator(), way="one_pass").rows) == 2


PAST_WARMUP: dict[str, dict[str, Any]] = {
    "pn": {"warmup_steps": 2},
    "pn-static": {"warmup_steps": 2},
    "mabn": {"warmup_steps": 2, "window": 2},
    "brn": {"warmup_steps": 2},
}


@pytest.mark.parametrize("name", PAST_WARMUP)
def test_norms_past_their_warmup_are_kept(name: str) -> None:
    """Their statistics are part of the function that was trained: the losses got twice as high."""
    torch.manual_seed(0)
    late = build_norm(name, 6, **PAST_WARMUP[name])
    model = nn.Sequential(nn.Linear(6, 6), late, nn.Linear(6, 6), build_norm("bn", 6))
    data = [torch.randn(20, 6) for _ in range(4)]
    model(data[0]).square().sum().backward()
    early = calibrate(model, data)
    assert [row.action for row in early.rows] == ["calibrate", "calibrate"]
    for x in data:
        model(x).square().sum().backward()
    before = {key: value.clone() for key, value in late.named_buffers()}
    report = calibrate(model, data)
    rows = {row.name: row for row in report.rows}
    assert rows["1"].action == "keep"
    assert "names='1'" in rows["1"].reason
    assert rows["3"].tokens == 80
    assert all(torch.equal(value, before[key]) for key, value in late.named_buffers())
    assert "trains by its running statistics" in str(report)
    model.eval()
    assert_close = torch.testing.assert_close
    inputs = torch.cat([model[:3](x) for x in data])
    assert_close(model[3].running_mean, inputs.mean(0), rtol=1e-4, atol=1e-5)
    named = calibrate(model, data, names="1")
    assert named.rows[0].action == "calibrate"
    assert any(not torch.equal(value, before[key]) for key, value in late.named_buffers())


def test_a_model_of_kept_norms_only_needs_no_data() -> None:
    model = nn.Sequential(build_norm("pn", 6, warmup_steps=0))
    model(torch.randn(9, 6)).sum().backward()
    assert [row.action for row in calibrate(model, []).rows] == ["keep"]
