"""A model's own BatchNorms exclude padding, and a padded sequence has the result of it alone."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import has_torch_function
from torch.utils.checkpoint import checkpoint

import powernorm
from covering import some_default
from powernorm.errors import InputError
from powernorm.inspection.mask_checks import MaskWarning
from refusals import refuses
from surgery.foreign_models import (
    WIDTH,
    conformer_module,
    generator,
    patchtst,
    seeded,
    transformers,
)
from surgery.models_of_other_lengths import CONVOLUTIONS, SPEECH, audio

LENGTHS = torch.tensor([9, 5, 7])


def conformer(**options: Any) -> nn.Module:
    def build() -> nn.Module:
        return conformer_module().Conformer(
            WIDTH, num_heads=2, ffn_dim=16, num_layers=2, depthwise_conv_kernel_size=5, **options
        )

    return seeded(build)


def sequences(loud: float = 50.0) -> Tensor:
    x = torch.randn(3, 9, WIDTH, generator=generator())
    return x.masked_fill((torch.arange(9) >= LENGTHS[:, None]).unsqueeze(-1), loud)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    kinds = (nn.BatchNorm1d, powernorm.BatchNorm)
    return [module for module in model.modules() if isinstance(module, kinds)]


def hooks(model: nn.Module) -> list[Any]:
    return [list(module._forward_pre_hooks.values()) for module in model.modules()]


def warmed(model: nn.Module) -> nn.Module:
    """With running statistics that are not those of the start."""
    for norm in batch_norms(model):
        norm.running_mean.normal_(generator=generator())
        norm.running_var.uniform_(0.5, 2.0, generator=generator())
        norm.num_batches_tracked.fill_(7)
        norm.momentum = 0.3
    return model


@pytest.mark.parametrize("convolution_first", [False, True])
def test_a_padded_sequence_is_what_it_is_alone(convolution_first: bool) -> None:
    model = warmed(conformer(convolution_first=convolution_first))
    with torch.no_grad():
        before = [model(x[None, :n], n[None])[0] for x, n in zip(sequences(), LENGTHS, strict=True)]
    powernorm.mask_batch_norms(model)
    with torch.no_grad():
        padded, lengths = model(sequences(), LENGTHS)
    assert torch.equal(lengths, LENGTHS)
    for row, size, alone in zip(padded, LENGTHS, before, strict=True):
        assert torch.allclose(row[:size], alone[0], atol=1e-6)


def test_training_takes_the_statistics_of_the_valid_positions() -> None:
    model = warmed(conformer()).train()
    powernorm.mask_batch_norms(model)
    inputs: list[Tensor] = []
    norms = batch_norms(model)
    for norm in norms:
        norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    means = [norm.running_mean.clone() for norm in norms]
    model(sequences(), LENGTHS)
    valid = torch.arange(9) < LENGTHS[:, None]
    for norm, mean, x in zip(norms, means, inputs, strict=True):
        tokens = x.transpose(1, 2)[valid]
        assert torch.allclose(norm.running_mean, 0.7 * mean + 0.3 * tokens.mean(0), atol=1e-5)
        assert int(norm.num_batches_tracked) == 8


def test_what_is_kept_and_undone() -> None:
    model = warmed(conformer())
    olds, hooks_before = batch_norms(model), hooks(model)
    olds[0].momentum, olds[0].eps = None, 1e-3
    x = sequences()[:, :5]
    with torch.no_grad():
        y = model(x, torch.full((3,), 5))[0]
        masked = powernorm.mask_batch_norms(model)
        assert torch.allclose(model(x, torch.full((3,), 5))[0], y, atol=1e-6)
    news = batch_norms(model)
    assert news[0].momentum is None
    assert news[0].eps == 1e-3
    assert news[0].weight is olds[0].weight
    assert torch.equal(news[1].running_var, olds[1].running_var)
    assert "BatchNorm1d" in masked.plan.to_text(None)
    masked.undo()
    assert batch_norms(model) == olds
    assert hooks(model) == hooks_before


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        del padding_mask
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


def test_folding_the_norm_leaves_the_padding_cleared() -> None:
    model = warmed(Block()).eval()
    powernorm.mask_batch_norms(model)
    padding = torch.arange(9) >= LENGTHS[:, None]
    with torch.no_grad():
        y = model(sequences(), padding)
        powernorm.fold(model, {"x": sequences(), "padding_mask": padding})
        assert torch.allclose(model(sequences(), padding)[~padding], y[~padding], atol=1e-5)


def test_copies_and_pickles_erase_by_their_own_masks() -> None:
    model = warmed(conformer())
    powernorm.mask_batch_norms(model)
    with torch.no_grad():
        y = model(sequences(), LENGTHS)[0]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            model.train()
            louder = twin(sequences(-20.0), LENGTHS)[0]
            model.eval()
            for row, other, size in zip(y, louder, LENGTHS, strict=True):
                assert torch.allclose(row[:size], other[:size], atol=1e-6)


def test_the_plan_of_a_swap_says_so() -> None:
    rows = {row.name: row for row in powernorm.plan_swap(conformer()).rows}
    name = "conformer_layers.0.conv_module.sequential.3"
    assert "powernorm.mask_batch_norms" in rows[name].reason
    assert rows["conformer_layers.0.final_layer_norm"].mask == "conformer_layers.0.key_padding_mask"


def test_wav2vec2_conformer() -> None:
    hf = transformers()
    config = hf.Wav2Vec2ConformerConfig(
        **{**SPEECH, **CONVOLUTIONS}, conv_depthwise_kernel_size=5, conformer_conv_dropout=0.0,
        position_embeddings_type="relative", feat_extract_norm="layer",
    )  # fmt: skip
    model = warmed(seeded(lambda: hf.Wav2Vec2ConformerModel(config)))
    powernorm.mask_batch_norms(model)
    short, long = audio((64, 40), 64), audio((64, 40), 96)
    model.train()
    twin = copy.deepcopy(model)
    model(**short)
    twin(**long)
    for norm, other in zip(batch_norms(model), batch_norms(twin), strict=True):
        assert torch.allclose(norm.running_mean, other.running_mean, atol=1e-5)
        assert torch.allclose(norm.running_var, other.running_var, atol=1e-5)


def test_patchtsts_norms_take_a_mask_by_hand() -> None:
    model = warmed(seeded(patchtst)).train()
    powernorm.mask_batch_norms(model)
    first = batch_norms(model)[0]
    inputs: list[Tensor] = []
    first.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    mean = first.running_mean.clone()
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[2:, 3] = True
    with powernorm.padding_mask(mask):
        model(torch.randn(3, 16, 2, generator=generator()))
    valid = inputs[0][~mask]
    assert torch.allclose(first.running_mean, 0.7 * mean + 0.3 * valid.mean(0), atol=1e-5)


def test_masks_that_never_arrive_are_warned_of() -> None:
    model = seeded(patchtst).train()
    powernorm.mask_batch_norms(model)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 16, 2, generator=generator())
    for _ in range(9):
        model(x)
        twin(x)
    with pytest.warns(MaskWarning, match=r"10 training calls since mask_batch_norms no padding"):
        model(x)
    model(x)  # once; warnings are errors
    rows = powernorm.fold(copy.deepcopy(twin).eval(), x).rows
    assert {row.action for row in rows if row.kind == "bn"} == {"fold"}
    with powernorm.padding_mask(torch.zeros(6, 4, dtype=torch.bool)):
        twin(x)
    for _ in range(10):
        twin(x)


def test_a_model_without_such_norms_is_refused() -> None:
    with pytest.raises(InputError, match=r"no BatchNorm1d.*powernorm\.swap"):
        powernorm.mask_batch_norms(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


def pad(x: Tensor, left: int, right: int) -> Tensor:
    return functional.pad(x, (left, right))


class Mixes(nn.Module):
    """A BatchNorm behind something that sees several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.valid = nn.Conv1d(WIDTH, WIDTH, 5)
        self.dilated = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2, padding="same")
        self.halves = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.image = nn.Conv2d(1, 1, 3, padding=1)
        self.helper = nn.ModuleDict({"a": nn.Sequential(self.conv, nn.ReLU())})
        self.average, self.pad = nn.AvgPool1d(3, 1, 1), nn.ZeroPad1d((3, 1))
        self.reflects = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, padding_mode="reflect")
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        del lengths
        return self.norm(self.mix(x.transpose(1, 2))).transpose(1, 2)

    def mix(self, x: Tensor) -> Tensor:
        return COVERED[self.how](self, x)


COVERED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "convolution": lambda m, x: m.conv(x),
    "causal": lambda m, x: m.valid(pad(x, 4, 0)),
    "padded before it is turned": lambda m, x: m.valid(
        functional.pad(x.transpose(1, 2), (0, 0, 4, 0)).transpose(1, 2)
    ),
    "padded by a module": lambda m, x: m.valid(m.pad(x)),
    "dilated": lambda m, x: m.dilated(x),
    "function": lambda m, x: functional.conv1d(x, m.conv.weight, m.conv.bias, padding=2),
    "helper": lambda m, x: m.conv(m.helper["a"](x)),
    "maximum": lambda m, x: functional.max_pool1d(m.conv(x) - 30, 3, 1, 1),
    "average": lambda m, x: m.average(m.conv(x)),
    "image": lambda m, x: m.image(x.transpose(1, 2)[:, None])[:, 0].transpose(1, 2),
    "image of channels first": lambda m, x: m.image(x[:, None])[:, 0],
    "by keywords": lambda m, x: (
        m.valid(functional.pad(input=x, pad=(2, 2)))
        + functional.conv1d(input=x, weight=m.conv.weight, padding=2)
    ),
    "unbatched beside it": lambda m, x: m.conv(x) + m.conv(x[0, :, :1]).mean() * 0,
    "halved": lambda m, x: m.conv(m.halves(x)).repeat_interleave(2, 2)[..., : x.shape[2]],
}
UNCOVERED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "recurrent": (lambda m, x: m.recurrent(x.transpose(1, 2))[0].transpose(1, 2), "lstm in Mixes"),
    "reflected": (lambda m, x: m.reflects(x), "pad in Mixes pads by reflect"),
    "divided": (
        lambda _, x: functional.avg_pool1d(x, 3, 1, 1, False, False), "avg_pool1d in Mixes divides",
    ),
    "indexed": (
        lambda _, x: functional.max_pool1d(x, 3, 1, 1, return_indices=True)[0],
        "max_pool1d_with_indices in Mixes sees|max_pool1d in Mixes sees",
    ),
    "joined": (
        lambda m, x: m.valid(torch.cat([x.new_zeros(len(x), WIDTH, 4), x], 2)),
        "conv1d in Mixes got an input",
    ),
}  # fmt: skip


def mixes(how: str) -> nn.Module:
    model = warmed(seeded(Mixes))
    model.how = how
    if how == "recurrent":
        model.recurrent = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
    return model.eval()


def alone(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [model(x[None, :n], n[None])[0] for x, n in zip(sequences(), LENGTHS, strict=True)]


def assert_as_alone(padded: Tensor, expected: list[Tensor]) -> None:
    for row, one in zip(padded, expected, strict=True):
        assert torch.allclose(row[: len(one)], one, atol=1e-5)


@pytest.mark.parametrize("how", COVERED)
def test_what_sees_several_positions_sees_no_padding(how: str) -> None:
    model = mixes(how)
    expected = alone(model)
    powernorm.mask_batch_norms(model)
    with torch.no_grad():
        assert_as_alone(model(sequences(), LENGTHS), expected)
        twin = pickle.loads(pickle.dumps(model))
        assert_as_alone(twin(sequences(), LENGTHS), expected)
        program = torch.export.export(model, (sequences(), LENGTHS))
        assert_as_alone(program.module()(sequences(), LENGTHS), expected)


@pytest.mark.parametrize(
    "how",
    some_default(["causal", "function", "maximum", "image", "halved"], "causal", "function"),
)
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_compiled_code_sees_no_padding(how: str) -> None:
    torch._dynamo.reset()
    model = mixes(how)
    expected = alone(model)
    powernorm.mask_batch_norms(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        if how == "causal":
            with pytest.raises(Exception, match="call the model once before it is compiled"):
                compiled(sequences(), LENGTHS)
            torch._dynamo.reset()
            model(sequences(), LENGTHS)
        assert_as_alone(compiled(sequences(), LENGTHS), expected)


@pytest.mark.parametrize("how", UNCOVERED)
def test_what_is_not_covered_is_named(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, words = UNCOVERED[how]
    monkeypatch.setitem(COVERED, how, function)
    model = mixes(how)
    powernorm.mask_batch_norms(model)
    with torch.no_grad():
        with pytest.warns(MaskWarning, match=words):
            model(sequences(), LENGTHS)
        model(sequences(), LENGTHS)  # once


@pytest.mark.parametrize("how", ["causal", "helper", "maximum of a module", "function"])
def test_repetitions_see_no_padding_either(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = nn.MaxPool1d(3, 1, 1)
    monkeypatch.setitem(COVERED, "maximum of a module", lambda m, x: largest(m.conv(x) - 30))
    model = mixes(how).train()
    model.largest = largest
    powernorm.mask_batch_norms(model)
    twin = copy.deepcopy(model)
    twin.mix = functools.partial(checkpoint, twin.mix, use_reentrant=False)  # type: ignore[assignment]
    monkeypatch.setitem(COVERED, "maximum of a module", lambda m, x: m.largest(m.conv(x) - 30))
    valid = torch.arange(9) < LENGTHS[:, None]
    if how == "function":
        refuses("conv1d is called as a function under activation", twin, sequences(), LENGTHS)
        return
    for one in (model, twin):
        one(sequences(), LENGTHS)[valid].square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-5), name


def test_a_batch_norm_without_parameters_or_tracking_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH, affine=False, momentum=0.01))
    state = model.state_dict()
    powernorm.mask_batch_norms(model)
    assert model[1].momentum == 0.01
    model.load_state_dict(state)
    assert not list(model[1].parameters())
    frozen = warmed(Block()).train()
    frozen.norm.track_running_stats = False  # as Lightning's BaseFinetuning freezes it
    before = {name: value.clone() for name, value in frozen.norm.named_buffers()}
    expected = frozen.eval()(sequences(), LENGTHS)
    powernorm.mask_batch_norms(frozen.train())
    frozen(sequences(), torch.arange(9) >= LENGTHS[:, None])
    assert all(torch.equal(frozen.norm.get_buffer(name), value) for name, value in before.items())
    valid = torch.arange(9) < LENGTHS[:, None] - 2
    padding = torch.arange(9) >= LENGTHS[:, None]
    assert torch.allclose(frozen.eval()(sequences(), padding)[valid], expected[valid], atol=1e-5)


class Same(nn.BatchNorm1d):
    """A subclass with torch's forward."""


@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, Same])
def test_relatives_of_batch_norm_are_taken(kind: type[nn.Module]) -> None:
    model = Block()
    model.norm = kind(WIDTH)
    masked = powernorm.mask_batch_norms(model)
    assert list(masked.norms) == ["norm"]


class LeavesOut(nn.Module):
    """A wrapper of a user that leaves out padding by itself; True is valid."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[mask] = self.bn(x[mask])
        return y


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LeavesOut()

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        return self.norm(x, valid)


def test_a_wrapper_with_a_mask_of_its_own_is_left_as_it_is() -> None:
    model, valid = Outside(), torch.arange(9) < LENGTHS[:, None]
    powernorm.mask_batch_norms(model).norms["norm.bn"].momentum = 1.0
    model(sequences(), valid)
    assert torch.allclose(model.norm.bn.running_mean, sequences()[valid].mean(0), atol=1e-5)


def test_one_position_alone() -> None:
    model = mixes("convolution")
    powernorm.mask_batch_norms(model)
    model(sequences()[:, :1], torch.ones(3, dtype=torch.long))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_on_after_an_interrupt(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensor:
        raise error

    model = mixes("convolution")
    expected = alone(model)
    powernorm.mask_batch_norms(model)
    monkeypatch.setitem(COVERED, "fails", fail)
    model.how = "fails"
    for run in (
        lambda: model(sequences(), torch.full((3,), 9)),
        lambda: torch.export.export(model, (sequences(), LENGTHS)),
    ):
        with pytest.raises(error):
            run()
        assert not has_torch_function((LENGTHS,))
    model.how = "convolution"
    with torch.no_grad():
        assert_as_alone(model(sequences(), LENGTHS), expected)


def test_a_forward_that_was_replaced_is_called_and_put_back() -> None:
    model = mixes("convolution")
    own = functools.partial(model.forward)
    model.forward = own  # type: ignore[method-assign]
    masked = powernorm.mask_batch_norms(model)
    assert list(inspect.signature(model.forward).parameters) == ["x", "lengths"]
    model(sequences(), LENGTHS)
    masked.undo()
    assert model.forward is own
