"""Small models of torch, timm, torchvision, torchaudio and x-transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from architectures import huggingface_inputs as inputs
from architectures.shrinking import (
    IMAGE_SIZE,
    INNER_WIDTH,
    MAX_LENGTH,
    NUM_HEADS,
    NUM_LAYERS,
    PATCH_SIZE,
    VOCABULARY,
    WIDTH,
)
from architectures.survey import Architecture, Inputs, Request
from surgery import foreign_models


def _architecture(
    name: str, build: Callable[[], nn.Module], make: Callable[[Request], Inputs], **options: Any
) -> Architecture:
    library = name.partition("/")[0]
    return Architecture(name, library, partial(_seeded, build), make, **options)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return inputs.seeded(build())


# torch


def _torch_layers(kind: str, num_layers: int = NUM_LAYERS, **options: Any) -> nn.Module:
    settings = {"dim_feedforward": INNER_WIDTH, "dropout": 0.0, "batch_first": True, **options}
    layer = getattr(nn, f"Transformer{kind}Layer")(WIDTH, NUM_HEADS, **settings)
    more = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    return getattr(nn, f"Transformer{kind}")(layer, num_layers, nn.LayerNorm(WIDTH), **more)


def _torch_transformer(**options: Any) -> nn.Module:
    return nn.Transformer(
        WIDTH, NUM_HEADS, NUM_LAYERS, NUM_LAYERS, INNER_WIDTH, 0.0, batch_first=True, **options
    )


def _padding(request: Request) -> Tensor:
    return inputs.keep(request) == 0


def _source(request: Request, length_first: bool = False) -> Inputs:
    x = inputs.frames(request, WIDTH, 1)
    mask = {"src_key_padding_mask": _padding(request)} if request.masked else {}
    return {"src": x.transpose(0, 1) if length_first else x, **mask}


def _source_and_target(request: Request) -> Inputs:
    target = inputs.target_of(request)
    masks = {
        "tgt_key_padding_mask": _padding(target),
        "memory_key_padding_mask": _padding(request),
    }
    return {
        **_source(request),
        "tgt": inputs.frames(target, WIDTH, 1),
        **(masks if request.masked else {}),
    }


def _target_and_memory(request: Request) -> Inputs:
    both = _source_and_target(request)
    both["memory"] = both.pop("src")
    both.pop("src_key_padding_mask", None)
    return both


_TORCH: Final = (
    _architecture(
        "torch/encoder", partial(_torch_layers, "Encoder"), _source,
        takes_mask=True, takes_lengths=True,
    ),
    _architecture(
        "torch/encoder-pre", partial(_torch_layers, "Encoder", norm_first=True), _source,
        takes_mask=True, takes_lengths=True,
    ),
    _architecture(
        "torch/encoder-length-first", partial(_torch_layers, "Encoder", batch_first=False),
        partial(_source, length_first=True), takes_mask=True, takes_lengths=True,
    ),
    _architecture(
        "torch/decoder", partial(_torch_layers, "Decoder"), _target_and_memory,
        takes_mask=True, takes_lengths=True,
    ),
    _architecture(
        "torch/transformer", _torch_transformer, _source_and_target,
        takes_mask=True, takes_lengths=True,
    ),
    _architecture(
        "torch/transformer-pre", partial(_torch_transformer, norm_first=True), _source_and_target,
        takes_mask=True, takes_lengths=True,
    ),
)  # fmt: skip


# timm and torchvision


def _picture(request: Request, size: int = IMAGE_SIZE) -> Inputs:
    return {"x": inputs.image(request, size)["pixel_values"]}


@cache
def _import_apart() -> None:
    """Import torchvision, timm's need, when transformers has seen that neither is there."""
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils import import_utils

        for library in ("torchvision", "timm", "torchaudio"):
            getattr(import_utils, f"is_{library}_available")()
    foreign_models.import_torchvision()


def _timm(name: str, **options: Any) -> nn.Module:
    _import_apart()
    return pytest.importorskip("timm").create_model(name, num_classes=3, **options)


def _torchvision(module: str, name: str, **options: Any) -> nn.Module:
    _import_apart()
    return getattr(importlib.import_module(f"torchvision.models.{module}"), name)(**options)


_FLAT: Final = {
    "img_size": IMAGE_SIZE, "patch_size": PATCH_SIZE, "embed_dim": WIDTH, "depth": NUM_LAYERS,
    "num_heads": NUM_HEADS,
}  # fmt: skip
_TIMM: Final = {
    "vit_tiny_patch16_224": _FLAT,
    "vit_tiny_patch16_224/rms": {**_FLAT, "norm_layer": "rmsnorm"},
    "deit_tiny_distilled_patch16_224": _FLAT,
    "beit_base_patch16_224": _FLAT,
    "eva02_tiny_patch14_224": _FLAT,
    "cait_xxs24_224": _FLAT,
    "xcit_nano_12_p16_224": {
        "img_size": IMAGE_SIZE, "embed_dim": WIDTH, "depth": NUM_LAYERS, "num_heads": NUM_HEADS,
    },
    "swin_tiny_patch4_window7_224": {
        "img_size": IMAGE_SIZE, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2),
        "window_size": 4,
    },
    "convnext_atto": {"dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1)},
    "resnet10t": {"channels": (16, 16, 32, 32)},
    "levit_128s": {
        "img_size": 64, "embed_dim": (16, 32, 32), "num_heads": (2, 2, 2), "depth": (1, 1, 1),
        "key_dim": 8,
    },
}  # fmt: skip
_IMAGE_MODELS: Final = (
    *(
        _architecture(
            f"timm/{name}", partial(_timm, name.partition("/")[0], **options),
            partial(_picture, size=options.get("img_size", IMAGE_SIZE)),
        )
        for name, options in _TIMM.items()
    ),
    _architecture(
        "torchvision/vision_transformer",
        partial(
            _torchvision, "vision_transformer", "VisionTransformer", image_size=IMAGE_SIZE,
            patch_size=PATCH_SIZE, num_layers=NUM_LAYERS, num_heads=NUM_HEADS, hidden_dim=WIDTH,
            mlp_dim=INNER_WIDTH, num_classes=3,
        ),
        _picture,
    ),
    _architecture(
        "torchvision/swin_transformer",
        partial(
            _torchvision, "swin_transformer", "SwinTransformer", patch_size=[4, 4], embed_dim=16,
            depths=[1, 1], num_heads=[2, 2], window_size=[4, 4], num_classes=3,
        ),
        _picture,
    ),
)  # fmt: skip


# torchaudio


def _conformer(**options: Any) -> nn.Module:
    return foreign_models.conformer_module().Conformer(
        WIDTH, NUM_HEADS, INNER_WIDTH, NUM_LAYERS, 3, **options
    )


def _frames_and_lengths(request: Request) -> Inputs:
    lengths = torch.tensor(request.lengths)
    # It takes no frames behind the longest row's.
    return {"input": inputs.frames(replace(request, extra=0), WIDTH, 1), "lengths": lengths}


# x-transformers


def _x_transformer(kind: str = "Encoder", **options: Any) -> nn.Module:
    library = pytest.importorskip("x_transformers")
    layers = getattr(library, kind)(
        dim=WIDTH, depth=NUM_LAYERS, heads=NUM_HEADS, attn_dim_head=WIDTH // NUM_HEADS, **options
    )
    return library.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=MAX_LENGTH, attn_layers=layers
    )


def _x_tokens(request: Request) -> Inputs:
    mask = {"mask": inputs.keep(request).bool()} if request.masked else {}
    return {"x": inputs.tokens(request), **mask}


_X: Final = tuple(
    _architecture(
        f"x-transformers/{name}", partial(_x_transformer, **options), _x_tokens,
        takes_mask=True, takes_lengths=True,
    )
    for name, options in {
        "encoder": {},
        "encoder-rms": {"use_rmsnorm": True},
        "encoder-post": {"pre_norm": False},
        "encoder-sandwich": {"sandwich_norm": True},
        "encoder-simple-rms": {"use_simple_rmsnorm": True},
        "encoder-scale": {"use_scalenorm": True},
        "decoder-rotary": {"kind": "Decoder", "rotary_pos_emb": True, "ff_glu": True},
        "decoder-qk-norm": {"kind": "Decoder", "attn_qk_norm": True},
    }.items()
)  # fmt: skip


ARCHITECTURES: Final = (
    *_TORCH,
    *_IMAGE_MODELS,
    _architecture(
        "torchaudio/conformer", _conformer, _frames_and_lengths, takes_mask=True,
        takes_lengths=True, pads="louder",
    ),
    _architecture(
        "torchaudio/conformer-group", partial(_conformer, use_group_norm=True),
        _frames_and_lengths, takes_mask=True, takes_lengths=True, pads="louder",
    ),
    *_X,
)  # fmt: skip
