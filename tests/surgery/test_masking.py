"""A swapped model's own mask reaches its norms, and only where it belongs."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from powernorm.inspection.mask_checks import MaskWarning
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.masks import current_padding_mask
from powernorm.surgery.swapping import swap
from surgery.foreign_models import (
    FAMILIES,
    PADDED,
    VOCABULARY,
    WIDTH,
    Inputs,
    keep,
    padding,
    plain_tokens,
    run,
    tokens,
    torch_encoder,
    transformers,
    vectors,
)


def batch_norms(model: nn.Module) -> dict[str, BatchStatisticsNorm]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchStatisticsNorm)
    }


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{buffer_name}": buffer.clone()
        for name, norm in batch_norms(model).items()
        for buffer_name, buffer in norm.named_buffers()
    }


def swapped(name: str, to: str = "bn", **options: Any) -> nn.Module:
    model, _ = FAMILIES[name]()
    swap(model, to, where="*", **options)
    return model.train()


@contextmanager
def inputs_of(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, Tensor | None]]]]:
    """Yield the arguments of every norm: (input, mask)."""
    seen: dict[str, list[tuple[Tensor, Tensor | None]]] = {name: [] for name in batch_norms(model)}

    def watch(name: str) -> Callable[..., None]:
        def note(norm: nn.Module, args: tuple[Any, ...]) -> None:
            explicit = args[1] if len(args) > 1 else None
            mask = explicit if explicit is not None else current_padding_mask(args[0], norm)
            seen[name].append((args[0].detach(), mask))

        return note

    handles = [
        norm.register_forward_pre_hook(watch(name)) for name, norm in batch_norms(model).items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def expected_mask(name: str, norm: str, inputs: Inputs) -> Tensor:
    """True = padding for the norm, from the arguments of the call."""
    if name.startswith("torch"):
        decoder = norm.startswith("decoder")
        mask = inputs["tgt_key_padding_mask" if decoder else "src_key_padding_mask"]
        return mask.T if name.endswith("length-first") else mask
    if "decoder." in norm:
        return inputs["decoder_attention_mask"] == 0
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"] == 0
        return mask[:, ::2] if name == "whisper-encoder" else mask
    return inputs["padding_mask"] if "padding_mask" in inputs else ~inputs["mask"]


@pytest.mark.parametrize("name", PADDED)
def test_each_norm_averages_over_the_valid_tokens_of_its_side(name: str) -> None:
    model, inputs = swapped(name, momentum=1.0), PADDED[name](2)
    with inputs_of(model) as seen:
        run(model, inputs)
    assert seen
    for norm_name, norm in batch_norms(model).items():
        ((x, mask),) = seen[norm_name]
        assert torch.equal(mask, expected_mask(name, norm_name, inputs)), norm_name
        valid = x[~mask].double()
        assert torch.allclose(norm.running_mean.double(), valid.mean(0), atol=1e-5)
        assert torch.allclose(norm.running_var.double(), valid.var(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PADDED)
def test_a_training_step_and_evaluation(name: str) -> None:
    model, inputs = swapped(name, "rbn"), PADDED[name](1)
    before = statistics(model)
    run(model, inputs).float().square().mean().backward()
    for norm_name, norm in batch_norms(model).items():
        assert int(norm.num_batches_tracked) == 1, norm_name
        assert norm.weight is not None
        assert norm.weight.grad is not None
    moved = statistics(model)
    assert any(not torch.equal(moved[key], value) for key, value in before.items())
    with torch.no_grad():
        assert run(model.eval(), inputs).isfinite().all()
    assert all(torch.equal(moved[key], value) for key, value in statistics(model).items())
    assert current_padding_mask() is None


def test_an_exception_inside_closes_the_scope() -> None:
    model = swapped("bert")

    def fail(*_: object) -> None:
        raise RuntimeError("inside")

    model.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="inside"):
        model(**PADDED["bert"](1))
    assert current_padding_mask() is None
    with powernorm.padding_mask(padding()):
        with pytest.raises(RuntimeError, match="inside"):
            model(**PADDED["bert"](1))
        assert torch.equal(current_padding_mask(), padding())


class Outer(nn.Module):
    """A model around another one, which it calls without a mask, on inputs of another length."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner

    def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        del attention_mask
        return self.norm(x), self.inner(x[:, :3])


def test_a_mask_does_not_leak_into_a_nested_model() -> None:
    inner = torch_encoder().train()
    swap(inner, "bn")
    model = Outer(inner).train()
    swap(model, "bn", where="norm")
    with inputs_of(model) as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(vectors(), attention_mask=keep(0))
    assert torch.equal(seen["norm"][0][1], padding())
    assert all(mask is None for name in seen if name != "norm" for _, mask in seen[name])
    messages = [str(one.message) for one in caught if one.category is MaskWarning]
    assert len(messages) == len(seen) - 1
    assert messages[0].startswith("inner.layers.0.norm1 (BatchNorm) in Outer got no padding mask")
    assert "attention_mask of Outer was given" in messages[0]
    # Nor where the inner norms are frozen: in evaluation they would refuse a mask of other lengths.
    inner.eval()
    model(vectors(), attention_mask=keep(0))


def test_the_users_scope_holds_where_the_model_got_no_mask() -> None:
    model = swapped("torch-encoder")
    with inputs_of(model) as seen, powernorm.padding_mask(padding()):
        model(vectors())
        assert torch.equal(current_padding_mask(), padding())
    assert all(torch.equal(mask, padding()) for calls in seen.values() for _, mask in calls)
    with inputs_of(model) as seen, powernorm.padding_mask(torch.zeros_like(padding())):
        model(vectors(), src_key_padding_mask=padding())
    assert all(torch.equal(mask, padding()) for calls in seen.values() for _, mask in calls)


def test_a_decoder_without_a_mask_does_not_get_the_encoders() -> None:
    model, inputs = swapped("t5"), PADDED["t5"](2)
    del inputs["decoder_attention_mask"]
    with warnings.catch_warnings(), inputs_of(model) as seen:
        warnings.simplefilter("ignore", MaskWarning)
        run(model, inputs)
    for name, calls in seen.items():
        assert (calls[0][1] is None) == name.startswith("decoder."), name


def test_positions_before_the_input_are_no_padding() -> None:
    library = pytest.importorskip("x_transformers")
    model = library.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=32,
        num_memory_tokens=2,
        post_emb_norm=True,
        attn_layers=library.Encoder(dim=WIDTH, depth=1, heads=2, attn_dim_head=4),
    ).train()
    swap(model, "bn")
    with inputs_of(model) as seen:
        model(tokens(2), mask=~padding(2))
    longer = torch.cat([torch.zeros(2, 2, dtype=torch.bool), padding(2)], dim=1)
    for name, calls in seen.items():
        expected = padding(2) if name == "post_emb_norm" else longer
        assert torch.equal(calls[0][1], expected), name


def test_a_mask_over_samples_is_not_one_over_positions() -> None:
    hf = transformers()
    config = hf.Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(4, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip
    model = hf.Wav2Vec2ForCTC(config).train()
    swap(model, "bn", where="*.encoder.*norm")
    mask = torch.ones(2, 64).long()
    mask[1, 40:] = 0
    with inputs_of(model) as seen:
        model(torch.randn(2, 64), attention_mask=mask)
    assert set(seen) == {
        "wav2vec2.encoder.layer_norm",
        "wav2vec2.encoder.layers.0.layer_norm",
        "wav2vec2.encoder.layers.0.final_layer_norm",
    }
    for calls in seen.values():
        x, positions = calls[0]
        assert positions.shape == x.shape[:-1]
        assert positions.sum(1).tolist() == [0, 6]


def test_whispers_encoder_gets_the_mask_of_the_whole_model() -> None:
    whisper, _ = FAMILIES["whisper-encoder"]()
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(whisper.config).train()
    swap(model, "bn", where="*")
    inputs = PADDED["whisper-encoder"](0)
    with inputs_of(model) as seen:
        model(**inputs, decoder_input_ids=plain_tokens()[:, :4])
    for name, calls in seen.items():
        expected = None if "decoder" in name else inputs["attention_mask"][:, ::2] == 0
        mask = calls[0][1]
        assert mask is None if expected is None else torch.equal(mask, expected), name


@pytest.mark.parametrize("to", ["bn", "rbn"])
def test_activation_checkpointing(to: str) -> None:
    model, twin, inputs = swapped("bert", to), swapped("bert", to), PADDED["bert"](2)
    for layer in model.encoder.layer:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    for one in (model, twin):
        run(one, inputs)[~padding(2)].square().mean().backward()
    for key, value in statistics(twin).items():
        assert torch.allclose(value, statistics(model)[key], atol=1e-6), key
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if q.grad is not None:
            assert torch.allclose(p.grad, q.grad, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "torch-encoder", "torch-layer"])
def test_compiled_without_a_break(name: str) -> None:
    model, inputs = swapped(name, "rbn"), PADDED[name](2)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    for one in (compiled, twin):
        run(one, inputs)[~padding(2)].square().mean().backward()
    for key, value in statistics(twin).items():
        assert torch.allclose(value, statistics(model)[key], atol=1e-5), key
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if q.grad is not None:
            assert torch.allclose(p.grad, q.grad, atol=1e-4), key
    assert current_padding_mask() is None


# Transformers 5.24 calls it `cache`.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_generation_with_a_cache() -> None:
    model = swapped("gpt2", "bn").eval()
    inputs = {"input_ids": plain_tokens(), "attention_mask": torch.ones(2, 5).long()}
    with torch.no_grad():
        text = model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert text.shape == (2, 8)
    released = swapped("gpt2", "bn", variant="released").eval()
    with torch.no_grad():
        released.generate(**inputs, max_new_tokens=3, do_sample=False)
    # In training mode a mask over past and input is cut to the input.
    model.train()
    past = model(plain_tokens(), use_cache=True).past_key_values
    model(plain_tokens()[:, :2], attention_mask=torch.ones(2, 7).long(), past_key_values=past)


def test_copies_ask_their_own_norms() -> None:
    model = swapped("bert")
    through_pickle = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    reference = swapped("bert")
    run(reference, PADDED["bert"](2))
    model_before = statistics(model)
    for twin in (copy.deepcopy(model), through_pickle, loaded):
        model.eval()  # the original's mode is not the copy's
        run(twin.train(), PADDED["bert"](2))
        for key, value in statistics(reference).items():
            assert torch.allclose(value, statistics(twin)[key], atol=1e-6), key
    assert all(torch.equal(value, statistics(model)[key]) for key, value in model_before.items())


def test_hooks_registered_on_a_pickled_model_take_no_place() -> None:
    model = pickle.loads(pickle.dumps(swapped("bert")))
    before = len(model._forward_pre_hooks)
    highest = max(model._forward_pre_hooks)
    handle = model.register_forward_pre_hook(lambda *_: None)
    assert handle.id > highest
    assert len(model._forward_pre_hooks) == before + 1
