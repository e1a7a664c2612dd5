"""A model's own BatchNorms leave out padding, and a padded sequence is what it is alone."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from powernorm.errors import InputError
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
    assert "BatchNorm1d" in str(masked.plan)
    masked.undo()
    assert batch_norms(model) == olds
    assert hooks(model) == hooks_before


def test_activation_checkpointing_clears_the_same_positions() -> None:
    model = warmed(conformer()).train()
    powernorm.mask_batch_norms(model)
    twin = copy.deepcopy(model)
    for layer in twin.conformer_layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    valid = torch.arange(9) < LENGTHS[:, None]
    for one in (model, twin):
        x = sequences().requires_grad_()
        one(x, LENGTHS)[0][valid].square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert torch.allclose(p.grad, q.grad, atol=1e-5), name


# torch compiles the hook after a model's forward by itself, and looks at its argument's gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_block_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    model = Block().train()
    powernorm.mask_batch_norms(model)
    twin = copy.deepcopy(model)
    padding = torch.arange(9) >= LENGTHS[:, None]
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(sequences(), padding)
    assert torch.allclose(y, twin(sequences(), padding), atol=1e-5)
    assert torch.allclose(model.norm.running_mean, twin.norm.running_mean, atol=1e-6)


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


def test_a_model_without_such_norms_is_refused() -> None:
    with pytest.raises(InputError, match=r"no BatchNorm1d.*powernorm\.swap"):
        powernorm.mask_batch_norms(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
