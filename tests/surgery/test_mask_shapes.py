"""Masks and norms of other shapes than (batch, length) and (batch, length, features)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.inspection.mask_reading import padding_of
from powernorm.surgery.swapping import plan_swap, swap
from refusals import refuses
from surgery.foreign_models import (
    FAMILIES,
    PAD,
    PADDED,
    SMALL,
    WIDTH,
    padding,
    run,
    torch_encoder,
    transformers,
    vectors,
)
from surgery.test_mask_owners import all_get, seen_by

LOW = torch.finfo(torch.float32).min


def causal(extra: int = 0) -> Tensor:
    """(2, 1, queries, keys), True = may be seen."""
    valid = ~padding(extra)
    length = valid.shape[1]
    return torch.ones(length, length).tril().bool() & valid[:, None, None, :]


@pytest.mark.parametrize(
    "mask",
    [
        causal(2),
        causal(2).long(),
        torch.where(causal(2), 0.0, LOW),
        torch.where(causal(2), 0.0, float("-inf")),
        torch.where(causal(2), -3.0, LOW).expand(2, 4, 7, 7),
        torch.where(causal(2), 0.0, torch.finfo(torch.float16).min).half(),
        (~padding(2))[:, None, None, :],
        (~padding(2))[:, None, None, :].expand(2, 1, 7, 7),
        causal(2).flip(2, 3) | torch.zeros(2, 1, 7, 7, dtype=torch.bool),
    ],
)
def test_padding_is_what_no_query_may_see(mask: Tensor) -> None:
    read = padding_of(mask, "keep", 2)
    assert read is not None
    assert torch.equal(read, padding(2)) or torch.equal(read, padding(2).flip(1))


def test_one_attention_mask_for_a_whole_batch() -> None:
    one = causal()[1:]
    assert torch.equal(padding_of(one, "keep", 3), padding()[1:].expand(3, 5))
    assert padding_of(causal(), "keep", 3) is None
    assert torch.equal(padding_of(causal(), "keep"), padding())
    assert padding_of(torch.ones(2, 5, 5), "keep", 2) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("part", ["encoder", "encoder.layer.1"])
def test_a_part_that_gets_the_mask_of_attention(part: str, attention: str) -> None:
    model = FAMILIES["bert"]()[0].train()
    model.set_attn_implementation(attention)
    inner = model.get_submodule(part)
    assert {row.mask for row in plan_swap(inner, "bn").rows} == {"attention_mask"}
    swap(inner, "bn")
    seen = seen_by(model)
    run(model, PADDED["bert"](2))
    all_get(seen, padding(2))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_layers_of_a_decoder_get_causal_masks(name: str, side: str) -> None:
    model = FAMILIES[name]()[0].train()
    layers = model.transformer.h if name == "gpt2" else model.model.layers
    for layer in layers:
        swap(layer, "bn")
    inputs, expected = PADDED[name](2), padding(2)
    if side == "left":
        inputs = {key: value.flip(1) for key, value in inputs.items()}
        expected = expected.flip(1)
    seen = seen_by(model)
    run(model, inputs)
    all_get(seen, expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_sequence_without_a_batch(batch_first: bool) -> None:
    model = torch_encoder(batch_first).train()
    swap(model, "bn", momentum=1.0)
    x, mask = vectors(2)[1], padding(2)[1]
    seen = seen_by(model)
    with torch.no_grad():
        model(x, src_key_padding_mask=mask)
    all_get(seen, mask)
    model(x.masked_fill(mask[:, None], 0.0), src_key_padding_mask=mask)


# Norms that see the tokens otherwise


def test_opt_flattens_its_batch() -> None:
    hf = transformers()
    config = hf.OPTConfig(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, ffn_dim=16,
        word_embed_proj_dim=WIDTH, max_position_embeddings=32,
    )  # fmt: skip
    model = hf.OPTForCausalLM(config).train()
    swap(model, "rbn")
    seen = seen_by(model)
    run(model, PADDED["gpt2"](2)).square().mean().backward()
    for name, (mask,) in seen.items():
        flat = name.endswith(("0.final_layer_norm", "1.final_layer_norm"))
        expected = padding(2).reshape(-1) if flat else padding(2)
        assert torch.equal(mask, expected), name


@pytest.mark.parametrize("length", [6, 2])
def test_xlnet_puts_the_length_first(length: int) -> None:
    hf = transformers()
    config = hf.XLNetConfig(**SMALL, d_model=WIDTH, n_layer=2, n_head=2, d_inner=16, dropout=0.0)
    model = hf.XLNetModel(config).train()
    swap(model, "bn")
    mask = torch.arange(length) >= torch.tensor([1, length])[:, None]
    seen = seen_by(model)
    model(torch.full((2, length), 7).masked_fill(mask, PAD), attention_mask=(~mask).long())
    all_get(seen, mask.T)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_debertas_norm_of_positions_is_left_alone() -> None:
    hf = transformers()
    config = hf.DebertaV2Config(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=7, norm_rel_ebd="layer_norm", max_position_embeddings=32,
        share_att_key=True,
    )  # fmt: skip
    model = hf.DebertaV2Model(config).train()
    rows = {row.name: row.reason for row in plan_swap(model).rows}
    assert "relative positions" in rows["encoder.LayerNorm"]
    swap(model)
    seen = seen_by(model)
    run(model, PADDED["bert"](2)).square().mean().backward()
    all_get(seen, padding(2))


def test_modernberts_head_pools() -> None:
    hf = transformers()
    config = hf.ModernBertConfig(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, eos_token_id=2, bos_token_id=3,
        cls_token_id=3, sep_token_id=2,
    )  # fmt: skip
    model = hf.ModernBertForSequenceClassification(config).train()
    swap(model)
    seen = seen_by(model)
    run(model, PADDED["bert"](2)).square().mean().backward()
    assert seen.pop("head.norm") == [None]
    all_get(seen, padding(2))


class Own(nn.Module):
    """A user-defined model around an encoder that takes a mask too."""

    def __init__(self, encoder: nn.Module, name: str) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.encoder, self.norm, self.name = encoder, nn.LayerNorm(WIDTH), name

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        longer = torch.cat([padding_mask.new_zeros(len(x), 1), padding_mask], dim=1)
        y = self.encoder(x, **{self.name: longer})
        return self.norm(y[:, 0])


class OwnEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        return self.norm(x) * ~padding_mask.unsqueeze(-1)


def own(kind: str) -> nn.Module:
    encoder = torch_encoder() if kind == "torch" else OwnEncoder()
    return Own(encoder, "src_key_padding_mask" if kind == "torch" else "padding_mask").train()


@pytest.mark.parametrize("kind", ["torch", "own"])
def test_a_token_in_front_and_a_longer_mask_for_the_encoder(kind: str) -> None:
    model = own(kind)
    made = swap(model, "rbn")
    seen = seen_by(model)
    model(vectors(2), padding(2)).square().mean().backward()
    assert seen.pop("norm") == [None]
    assert torch.equal(seen.pop("first")[0], padding(2))
    all_get(seen, torch.cat([torch.zeros(2, 1, dtype=torch.bool), padding(2)], dim=1))
    made.undo()
    assert not any(module._forward_pre_hooks for module in model.modules())


# torch compiles the hook after a model's forward by itself, and looks at its argument's gradient.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("kind", ["own", pytest.param("torch", marks=pytest.mark.slow)])
def test_norms_of_all_shapes_compile_without_a_break(kind: str) -> None:
    torch._dynamo.reset()
    model = own(kind)
    swap(model, "bn", momentum=1.0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    inputs: dict[str, Any] = {"x": vectors(2), "padding_mask": padding(2)}
    y = model(**inputs)
    moved = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(**inputs), y, atol=1e-5)
    for key, value in model.state_dict().items():
        assert torch.allclose(value, moved[key], atol=1e-5), key


def test_what_the_user_gives_is_taken_at_its_word() -> None:
    model = torch_encoder().train()
    swap(model, "bn")
    flat = vectors().reshape(-1, WIDTH)
    with (
        powernorm.padding_mask(padding()),
        pytest.raises(InputError, match=r"padding_mask has shape \(2, 5\)"),
    ):
        model.norm(flat)
    refuses("padding_mask has shape", model.norm, flat, padding_mask=padding())


def test_moments_for_monitors_take_the_mask_that_fits() -> None:
    model = own("torch")
    swap(model, "bn")
    counts: list[int] = []
    for norm in (model.first, model.encoder.norm, model.norm):
        norm.register_forward_pre_hook(
            lambda norm, args: counts.append(int(norm.token_moments(args[0]).count))
        )
    model(vectors(2), padding(2))
    assert counts == [8, 10, 2]
