"""`powernorm.diagnose` against written-out definitions, and the state that it must not change."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import powernorm
from diagnosis.models import batches
from powernorm.diagnosis import DiagnosisRow, training_inference_discrepancy
from powernorm.errors import InputError
from powernorm.norms import LayerNorm, build_norm
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, SPECIAL, VOCABULARY


class Plain(nn.Module):
    """LayerNorm of torch, then one of ours, as a user's model that takes its own mask."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features, dtype=torch.float64)
        self.lower = nn.LayerNorm(features, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.upper = LayerNorm(features, dtype=torch.float64)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        hidden = self.dropout(self.lower(self.embed(x)))
        return self.upper(hidden.tanh() + x, padding_mask)


class Tokens:
    """The inputs of norms as they are called, by brute force."""

    def __init__(self, model: Plain, data: list[tuple[Tensor, Tensor | None]]) -> None:
        self.valid: dict[str, list[Tensor]] = {"lower": [], "upper": []}
        self.every: dict[str, list[Tensor]] = {"lower": [], "upper": []}
        model.eval()
        with torch.no_grad():
            for x, mask in data:
                lower = model.embed(x)
                upper = model.lower(lower).tanh() + x
                for name, tokens in (("lower", lower), ("upper", upper)):
                    self.every[name].append(tokens.flatten(0, 1))
                    kept = tokens.flatten(0, 1) if mask is None else tokens[~mask]
                    self.valid[name].append(kept)


def bn_tid(calls: list[Tensor]) -> tuple[float, float]:
    everything = torch.cat(calls)
    mean, deviation = everything.mean(0), everything.std(0, correction=0)
    own = [(call.mean(0), call.std(0, correction=0)) for call in calls]
    return (
        torch.stack([((m - mean).abs() / s).mean() for m, s in own]).mean().item(),
        torch.stack([((s - deviation).abs() / s).mean() for _, s in own]).mean().item(),
    )


def psi_tid(calls: list[Tensor]) -> float:
    population = torch.cat(calls).square().mean(0).sqrt()
    own = [call.square().mean(0).sqrt() for call in calls]
    return torch.stack([((psi - population).abs() / psi).mean() for psi in own]).mean().item()


def scaled(calls: list[Tensor], eps: float = 1e-5) -> list[Tensor]:
    return [c / (c.square().mean(-1, keepdim=True) + eps).sqrt() for c in calls]


def by_name(report: Any) -> dict[str, DiagnosisRow]:
    return {layer.name: layer for layer in report.rows}


@pytest.fixture
def model() -> Plain:
    torch.manual_seed(4)
    return Plain()


def test_equals_the_definitions(model: Plain) -> None:
    data = batches(5)
    tokens = Tokens(model, data)
    found = by_name(powernorm.diagnose(model, data))
    assert list(found) == ["lower", "upper"]
    for name, layer in found.items():
        calls = tokens.valid[name]
        assert (layer.mean_tid, layer.var_tid) == pytest.approx(bn_tid(calls), rel=1e-9)
        assert layer.pnv_tid == pytest.approx(psi_tid(calls), rel=1e-9)
        assert layer.pn_tid == pytest.approx(psi_tid(scaled(calls)), rel=1e-9)
        padded = bn_tid(tokens.every[name])
        assert (layer.padded_mean_tid, layer.padded_var_tid) == pytest.approx(padded, rel=1e-9)
        covariance = torch.cat(calls).T.cov(correction=0)
        largest = torch.linalg.eigvalsh(covariance)[-1].item()
        assert layer.lambda_1 == pytest.approx(largest, rel=1e-9)
        assert layer.norm == "ln"


def test_batch_sizes_equal_cutting_the_same_tokens(model: Plain) -> None:
    data = batches(9)
    calls = Tokens(model, data).valid["upper"]
    stream = torch.cat(calls)
    report = powernorm.diagnose(model, data, batch_sizes=(8, 16, 32, 4096))
    rows = {row["tokens"]: row for row in report.batch_sizes if row["layer"] == "upper"}
    assert set(rows) == {8, 16, 32}  # 4096 tokens make no two batches
    mean, deviation = stream.mean(0), stream.std(0, correction=0)
    for size, row in rows.items():
        parts = [part for part in stream.split(size) if len(part) == size]
        assert row["num_batches"] == len(parts)
        stds = [part.std(0, correction=0) for part in parts]
        means = [part.mean(0) for part in parts]
        var = torch.stack([((s - deviation).abs() / s).mean() for s in stds]).mean()
        center = [((m - mean).abs() / s).mean() for m, s in zip(means, stds, strict=True)]
        assert row["var_tid"] == pytest.approx(var.item(), rel=1e-9)
        assert row["mean_tid"] == pytest.approx(torch.stack(center).mean().item(), rel=1e-9)


def test_permuted_tokens_and_scale_change_nothing() -> None:
    """TID is a ratio of statistics of a set."""
    norm = nn.Sequential(nn.LayerNorm(5, dtype=torch.float64))
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(40, 5, generator=generator, dtype=torch.float64) + 1 for _ in range(4)]
    order = torch.randperm(40, generator=generator)
    plain = powernorm.diagnose(norm, data).rows[0]
    permuted = powernorm.diagnose(norm, [x[order] for x in data]).rows[0]
    larger = powernorm.diagnose(norm, [1000 * x for x in data]).rows[0]
    for other in (permuted, larger):
        assert other.mean_tid == pytest.approx(plain.mean_tid, rel=1e-9)
        assert other.var_tid == pytest.approx(plain.var_tid, rel=1e-9)
        assert other.kappa_50 == pytest.approx(plain.kappa_50, rel=1e-9)


def test_batches_of_nearly_the_same_statistics_have_no_discrepancy(model: Plain) -> None:
    tokens, mask = batches(1)[0]
    layer = powernorm.diagnose(model, [(tokens, mask), (tokens + 1e-7, mask)]).rows[0]
    assert layer.total_tid == pytest.approx(0, abs=1e-5)
    assert layer.verdict == "bn"


@pytest.mark.parametrize("norm", ["bn", "rbn", "pnv", "pn"])
def test_norms_with_batch_statistics_agree_with_the_two_pass_tid(norm: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 6, dtype=torch.float64),
        build_norm(norm, 6, dtype=torch.float64),
        nn.Tanh(),
        build_norm(norm, 6, dtype=torch.float64),
    )
    data = [x for x, _ in batches()]
    expected = training_inference_discrepancy(model, data)
    report = powernorm.diagnose(model, data)
    for layer, wanted in zip(report.rows, expected.rows, strict=True):
        assert layer.norm == norm
        assert layer.mean_tid == (
            None if wanted.mean_tid is None else pytest.approx(wanted.mean_tid, rel=1e-9)
        )
        assert layer.var_tid == pytest.approx(wanted.var_tid, rel=1e-9)
    assert report.summary() == pytest.approx(expected.summary())
    assert [scale["layer"] for scale in report.scales] == ["1", "3"]
    assert report.scales[0]["weight"] == [1.0] * 6


def another(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other tokens or vectors in the same places."""
    return {
        name: value * 1.5
        if value.is_floating_point()
        else value.where(value < SPECIAL, VOCABULARY - 1 + SPECIAL - 1 * value).to(value.dtype)
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("name", sorted(PADDED))
def test_padding_of_foreign_models_does_not_count(name: str) -> None:
    """Three more padded positions change no number, but the share of padding."""
    model, _ = FAMILIES[name]()
    found = []
    for extra in (0, 3):
        inputs = PADDED[name](extra)
        inputs = inputs[0] if isinstance(inputs, tuple) else inputs
        data = [inputs, another(inputs)]
        found.append(powernorm.diagnose(model, data, batch_sizes=()))
    short, long = found
    assert short.padding > 0
    assert not short.notes
    assert len(short.rows) == len(long.rows)
    for one, other in zip(short.rows, long.rows, strict=True):
        assert other.lambda_1 == pytest.approx(one.lambda_1, rel=1e-4), one.name
        assert other.top_position == one.top_position
    if name != "whisper-encoder":  # takes a fixed number of frames
        assert long.padding > short.padding


def test_padding_of_norms_without_statistics_does_not_count() -> None:
    """The model's own mask reaches what observes them, as those of other libraries."""
    model, _ = FAMILIES["torch-encoder"]()
    powernorm.swap(model, to="dyt", where="*")
    shares = []
    for extra in (0, 3):
        inputs = PADDED["torch-encoder"](extra)
        report = powernorm.diagnose(model, [inputs, another(inputs)], batch_sizes=())
        shares.append([row.saturated_share for row in report.rows])
    assert shares[0] == pytest.approx(shares[1])


def test_of_an_encoder_decoder_the_encoder_is_judged() -> None:
    model, inputs = FAMILIES["bart"]()
    report = powernorm.diagnose(model, [inputs, another(inputs)])
    assert any(".decoder." in f".{layer.name}" for layer in report.rows)
    assert "encoder" in report.verdict["reasons"][0]


def test_where_chooses(model: Plain) -> None:
    report = powernorm.diagnose(model, batches(), where="low*")
    assert [layer.name for layer in report.rows] == ["lower"]
    refuses("selects no norm", powernorm.diagnose, model, batches(), where="nothing*")


def test_a_users_scope_is_the_mask_of_a_model_without_one() -> None:
    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            with powernorm.padding_mask(mask):
                return self.norm(x)

    mask = torch.tensor([[False, False, True]])
    data = [(torch.randn(1, 3, 4), mask) for _ in range(3)]
    assert powernorm.diagnose(Scoped(), data).padding == pytest.approx(1 / 3)


def test_a_compiled_model_is_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    data = [torch.randn(8, 4) for _ in range(3)]
    plain = powernorm.diagnose(model, data)
    compiled = torch.compile(model, backend="eager")
    compiled(data[0])
    assert powernorm.diagnose(compiled, data).rows[0].var_tid == pytest.approx(
        plain.rows[0].var_tid
    )


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    data = [torch.randn(8, 4) for _ in range(2)]
    powernorm.diagnose(nn.LayerNorm(4), data, on_progress=lambda *both: seen.append(both))
    assert seen == [(1, 0), (2, 0), (3, 4), (4, 4)]


class OnceLonger:
    """Gives one batch more in its first pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        return iter(torch.randn(4 - self.passes, 4, 4))


def test_a_short_last_batch_does_not_rule() -> None:
    """A loader's last batch of one token has no deviation."""
    norm = nn.LayerNorm(6)
    data = list(torch.randn(64 * 8 + 1, 6).split(64))
    report = powernorm.diagnose(norm, data)
    # Statistics of the population but for one token of 513.
    assert report.rows[0].total_tid == pytest.approx(
        powernorm.diagnose(norm, data[:-1]).rows[0].total_tid, rel=0.05
    )
    assert report.notes == (
        "1 batches with fewer than 25 % of the average tokens are left out of TID",
    )


def test_length_first_batches_are_cut_by_sequence() -> None:
    """torch's default layout: neighbors in a sequence stay neighbors in smaller batches."""
    torch.manual_seed(0)
    first = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    other = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False)
    other.load_state_dict(first.state_dict())
    loudness = torch.linspace(1, 20, 16)[:, None]
    data = [torch.randn(4, 16, 8) * loudness for _ in range(6)]
    one = powernorm.diagnose(first, data, batch_sizes=(16, 32))
    two = powernorm.diagnose(other, [x.transpose(0, 1) for x in data], batch_sizes=(16, 32))
    for a, b in zip(one.batch_sizes, two.batch_sizes, strict=True):
        assert b["var_tid"] == pytest.approx(a["var_tid"], rel=1e-4)
    found = [x.top_position for x in one.rows]
    assert found == [x.top_position for x in two.rows]
    assert min(found) > 10


def test_a_part_of_the_norms_has_the_numbers_of_all() -> None:
    """Batch norms in front normalize by the batch, also those that were not asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), build_norm("bn", 6), nn.Tanh(), build_norm("bn", 6))
    data = [x.float() for x, _ in batches()]
    whole = powernorm.diagnose(model, data).rows[1]
    part = powernorm.diagnose(model, data, where="3").rows[0]
    assert part == whole


class BatchThenLayer(nn.Module):
    """A norm of ours that is called without a mask, then torch's, in a model that takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = build_norm("bn", 6)
        self.ln = nn.LayerNorm(6)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.ln(self.bn(x)) * attention_mask[..., None]


def test_looking_does_not_hand_masks_to_norms_that_have_none() -> None:
    model = BatchThenLayer()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    data = [(torch.randn(2, 4, 6).masked_fill(mask[..., None] == 0, 30.0), mask) for _ in range(4)]
    found = by_name(powernorm.diagnose(model, data))
    tokens = torch.cat([x.flatten(0, 1) for x, _ in data]).double()
    largest = torch.linalg.eigvalsh(tokens.T.cov(correction=0))[-1].item()
    assert found["bn"].lambda_1 == pytest.approx(largest, rel=1e-5)
    assert found["bn"].padded_var_tid is None
    assert found["ln"].padded_var_tid is not None


def test_random_data_are_the_same_in_both_passes() -> None:
    class Shuffled:
        def __iter__(self) -> Iterator[Tensor]:
            seed = random.randrange(10**6) + int(numpy.random.randint(10**6))
            generator = torch.Generator().manual_seed(seed)
            return iter([torch.randn(32, 4, generator=generator) for _ in range(3)])

    state = random.getstate()
    with_seed: list[Tensor] = []

    def keep(model: nn.Module, batch: Tensor) -> None:
        with_seed.append(batch)
        model(batch)

    powernorm.diagnose(nn.LayerNorm(4), Shuffled(), keep)
    assert random.getstate() == state
    assert all(torch.equal(a, b) for a, b in zip(with_seed[:3], with_seed[3:], strict=True))


def test_what_is_not_finite_in_the_weights() -> None:
    """An embedding that no batch uses, and a γ, do not cost the report."""
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4)
    norm = build_norm("bn", 4)
    with torch.no_grad():
        embedding.weight[9] = torch.nan
        norm.weight[1] = torch.nan
    data = [torch.randint(9, (4, 5)) for _ in range(3)]
    report = powernorm.diagnose(nn.Sequential(embedding, norm), data)
    assert report.notes == ("0 holds NaN or infinite values: it has no spectrum",)
    assert len(report.scales[0]["weight"]) == 3
    json.dumps(report.to_json(), allow_nan=False)


def test_without_spectra() -> None:
    report = powernorm.diagnose(
        nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4)),
        [torch.randint(9, (4, 5)) for _ in range(3)],
        spectra=False,
    )
    assert (report.spectra, report.rows[0].lambda_1) == ((), None)


def test_a_shared_norm_counts_its_tokens_once() -> None:
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    report = powernorm.diagnose(model, [torch.randn(8, 4) for _ in range(3)])
    assert report.num_tokens == 24


BAD: list[tuple[Any, Any, str]] = [
    (nn.Linear(4, 4), [torch.ones(2, 4)], "no norms at all"),
    (nn.Sequential(nn.LocalResponseNorm(4)), [torch.ones(2, 4)], "none can be read"),
    ("bert", [torch.ones(2, 4)], "'bert'"),
    (nn.LayerNorm(4), [], "batches is empty"),
    (nn.LayerNorm(4), iter([torch.ones(2, 4)]), "only once"),
    (nn.LayerNorm(4), 3, "batches is 3"),
    (nn.LayerNorm(4), [torch.ones(2, 4), torch.ones(2, 3, 4)], "batch 1 is a tensor of 3"),
    (nn.LayerNorm(4), [torch.ones(2, 4), {"input": torch.ones(2, 4)}], "keys input"),
    (nn.LayerNorm(4), [torch.ones(2, 4), (torch.ones(2, 4),)], "a tuple of 1"),
    (nn.LayerNorm(4), [torch.rand(2, 4), torch.full((2, 4), torch.inf)], "in batch 1"),
    (nn.LayerNorm(4), OnceLonger(), "3 batches at first and 2"),
    (nn.LayerNorm(4), [torch.rand(8, 4)], "its own population"),
    (nn.LayerNorm(4), [torch.rand(8, 4)] * 3, "the 3 batches have the same statistics"),
    (nn.LayerNorm(4), list(torch.rand(3, 1, 4)), "every batch holds a single token"),
    (nn.LayerNorm(4), torch.rand(3, 8, 4), r"a tensor of shape \(3, 8, 4\)"),
    (nn.LayerNorm(4, device="meta"), [torch.rand(8, 4)] * 2, "meta device"),
    (LayerNorm(4), [(torch.rand(2, 3, 4), torch.ones(2, 3).long())] * 2, "1 = keep"),
    (LayerNorm(4), [(torch.rand(2, 3, 4), torch.ones(3).bool())] * 2, r"expected \(2, 3\)"),
]


@pytest.mark.parametrize(("model", "data", "words"), BAD)
def test_bad_input(model: Any, data: Any, words: str) -> None:
    refuses(words, powernorm.diagnose, model, data)


def test_nan_names_layer_and_batch(model: Plain) -> None:
    data = batches(3)
    data[2][0][0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="input of lower holds NaN or infinite values in batch 2"):
        powernorm.diagnose(model, data)


def test_only_padding(model: Plain) -> None:
    data = [(torch.randn(2, 3, 6, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool))] * 2
    warned = pytest.warns(powernorm.MaskWarning, match="all rows")
    with warned, pytest.raises(InputError, match="every position is"):
        powernorm.diagnose(model, data)


def test_norms_that_nothing_goes_through(model: Plain) -> None:
    refuses("none of the 2 norms was called", powernorm.diagnose, model, batches(), lambda *_: None)
    report = powernorm.diagnose(
        model, batches(), lambda found, batch: found.lower(found.embed(batch[0]))
    )
    assert report.notes == ("no batch went through upper",)
