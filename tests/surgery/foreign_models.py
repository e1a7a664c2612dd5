"""Small random models of other libraries, and of this one, in evaluation mode.

`FAMILIES[name]()` gives (model, keyword arguments of a call without padding); `PADDED[name](extra)`
gives those of a call with two rows of 5 and 3 valid positions, `extra` more padded positions behind
them, and the masks. A library that is not installed skips the test that asks for it.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

Inputs = dict[str, Any]

VOCABULARY = 40
SPECIAL = 5
"""The first tokens, which no text has."""
PAD = 1
WIDTH = 8
LENGTHS = (5, 3)
TARGET_LENGTHS = (3, 4)
"""Length of the target, unlike the source's, so that mixed-up masks cannot fit."""
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": PAD}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The model in evaluation mode, with weights that are not at the start of their norms."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = build().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def padding(extra: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """True = padding, (2, 5 + extra)."""
    return torch.arange(max(lengths) + extra) >= torch.tensor(lengths)[:, None]


def tokens(extra: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    ids = torch.randint(SPECIAL, VOCABULARY, (2, max(lengths)), generator=generator())
    ids = torch.cat([ids, ids.new_zeros(2, extra)], dim=1)
    return ids.masked_fill(padding(extra, lengths), PAD)


def vectors(extra: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    x = torch.randn(2, max(lengths), WIDTH, generator=generator())
    # Loud padding: a norm that counts it goes far astray.
    return torch.cat([x, torch.zeros(2, extra, WIDTH)], dim=1).masked_fill(
        padding(extra, lengths).unsqueeze(-1), 50.0
    )


def plain_tokens() -> Tensor:
    return torch.randint(SPECIAL, VOCABULARY, (2, max(LENGTHS)), generator=generator())


def plain_vectors(width: int = WIDTH) -> Tensor:
    return torch.randn(2, max(LENGTHS), width, generator=generator())


@cache
def _torchvision_schemas() -> torch.library.Library:
    """Operators that torchvision's Python part asks for when it is imported."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


@cache
def import_torchvision() -> None:
    """Import torchvision's Python part alone: its C++ part fits some builds of torch only.

    Where that one was loaded, it would define the operators once more and end the process.
    """
    # Where `make install` puts timm and torchvision, out of sight of other libraries.
    folder = str(Path(sys.prefix) / "foreign")
    if folder not in sys.path:
        sys.path.append(folder)
    _torchvision_schemas()
    with patch.object(torch.ops, "load_library", side_effect=OSError("the Python part alone")):
        pytest.importorskip("torchvision")


@cache
def conformer_module() -> ModuleType:
    """torchaudio's file alone: its C++ part fits some builds of torch only."""
    path = Path(sys.prefix) / "files" / "torchaudio" / "models" / "conformer.py"
    if not path.exists():
        pytest.skip("torchaudio is not installed")
    spec = importlib.util.spec_from_file_location("torchaudio_conformer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def transformers() -> Any:
    return pytest.importorskip("transformers")


def keep(extra: int) -> Tensor:
    """Hugging Face's attention mask, 1 = keep."""
    return (~padding(extra)).long()


# torch


def torch_layer(batch_first: bool = True, **options: Any) -> nn.TransformerEncoderLayer:
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": batch_first, **options}
    return nn.TransformerEncoderLayer(WIDTH, 2, **options)


def torch_encoder(batch_first: bool = True, **options: Any) -> nn.Module:
    return nn.TransformerEncoder(
        torch_layer(batch_first, **options),
        2,
        norm=nn.LayerNorm(WIDTH),
        enable_nested_tensor=batch_first and not options.get("norm_first", False),
    )


def torch_transformer(batch_first: bool = True) -> nn.Module:
    with warnings.catch_warnings():
        # torch itself warns that it cannot use nested tensors with (length, batch, features).
        warnings.simplefilter("ignore", UserWarning)
        return nn.Transformer(
            WIDTH, 2, 2, 2, dim_feedforward=16, dropout=0.0, batch_first=batch_first
        )


def laid_out(x: Tensor, batch_first: bool) -> Tensor:
    return x if batch_first else x.transpose(0, 1)


def encoder_inputs(batch_first: bool) -> Callable[[int], Inputs]:
    return lambda extra=0: {
        "src": laid_out(vectors(extra), batch_first),
        "src_key_padding_mask": padding(extra),
    }


def transformer_inputs(batch_first: bool) -> Callable[[int], Inputs]:
    return lambda extra=0: {
        "src": laid_out(vectors(extra), batch_first),
        "tgt": laid_out(vectors(extra, TARGET_LENGTHS), batch_first),
        "src_key_padding_mask": padding(extra),
        "tgt_key_padding_mask": padding(extra, TARGET_LENGTHS),
        "memory_key_padding_mask": padding(extra),
    }


# Hugging Face


def bert() -> nn.Module:
    hf = transformers()
    config = hf.BertConfig(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertModel(config)


def roberta() -> nn.Module:
    hf = transformers()
    config = hf.RobertaConfig(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, type_vocab_size=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return hf.RobertaForMaskedLM(config)


def distilbert() -> nn.Module:
    hf = transformers()
    config = hf.DistilBertConfig(
        **SMALL, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=32,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return hf.DistilBertModel(config)


def gpt2() -> nn.Module:
    hf = transformers()
    config = hf.GPT2Config(
        **SMALL, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    hf = transformers()
    config = hf.LlamaConfig(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=16, max_position_embeddings=32,
        bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def gemma() -> nn.Module:
    hf = transformers()
    config = hf.GemmaConfig(
        **SMALL, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, intermediate_size=16, max_position_embeddings=32,
        bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return hf.GemmaForCausalLM(config)


def t5() -> nn.Module:
    hf = transformers()
    config = hf.T5Config(
        **SMALL, d_model=WIDTH, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=PAD, eos_token_id=2,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _bart_like(kind: str) -> nn.Module:
    hf = transformers()
    config = getattr(hf, f"{kind}Config")(
        **SMALL, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        bos_token_id=0, eos_token_id=2, forced_eos_token_id=2,
        decoder_start_token_id=2 if kind == "Bart" else PAD,
    )  # fmt: skip
    return getattr(hf, "BartForConditionalGeneration" if kind == "Bart" else "MarianMTModel")(
        config
    )


def bart() -> nn.Module:
    return _bart_like("Bart")


def marian() -> nn.Module:
    return _bart_like("Marian")


def vit() -> nn.Module:
    hf = transformers()
    config = hf.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTModel(config, add_pooling_layer=False)


def whisper_encoder() -> nn.Module:
    hf = transformers()
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, num_mel_bins=4, max_source_positions=8, max_target_positions=8,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=PAD, bos_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    return WhisperEncoder(config)


def patchtst(norm_type: str = "batchnorm") -> nn.Module:
    hf = transformers()
    config = hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4,
        d_model=WIDTH, num_hidden_layers=2, num_attention_heads=2, ffn_dim=16,
        attention_dropout=0.0, ff_dropout=0.0, path_dropout=0.0, head_dropout=0.0,
        positional_dropout=0.0, norm_type=norm_type, prediction_length=4,
    )  # fmt: skip
    return hf.PatchTSTForPrediction(config)


def token_inputs(extra: int = 0) -> Inputs:
    return {"input_ids": tokens(extra), "attention_mask": keep(extra)}


def translation_inputs(extra: int = 0) -> Inputs:
    return {
        **token_inputs(extra),
        "decoder_input_ids": tokens(extra, TARGET_LENGTHS),
        "decoder_attention_mask": (~padding(extra, TARGET_LENGTHS)).long(),
    }


def translation() -> Inputs:
    return {"input_ids": plain_tokens(), "decoder_input_ids": plain_tokens()[:, :4]}


def whisper_inputs(extra: int = 0) -> Inputs:
    # The encoder takes 16 frames, no more and no less.
    del extra
    frames = torch.randn(2, 4, 16, generator=generator())
    mask = (torch.arange(16) < torch.tensor([[16], [10]])).long()
    return {"input_features": frames, "attention_mask": mask}


# timm and x-transformers


def timm() -> Any:
    import_torchvision()
    return pytest.importorskip("timm")


def timm_vit(**options: Any) -> nn.Module:
    return timm().models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=WIDTH, depth=2, num_heads=2, mlp_ratio=2.0,
        num_classes=3, **options,
    )  # fmt: skip


def x_transformer(**options: Any) -> nn.Module:
    library = pytest.importorskip("x_transformers")
    return library.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=32,
        attn_layers=library.Encoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=4, **options),
    )


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=generator())


# powernorm


def language_model(norm: str = "ln") -> nn.Module:
    import powernorm
    from powernorm_lab.models.choices import TransformerShape
    from powernorm_lab.tasks.lm.model import LanguageModel

    shape = TransformerShape(num_features=WIDTH, num_layers=2, num_heads=2, feedforward_features=16)
    return LanguageModel(
        VOCABULARY, lambda features: powernorm.build_norm(norm, features), shape, max_length=32
    )


def _family(
    build: Callable[[], nn.Module], inputs: Callable[[], Inputs]
) -> Callable[[], tuple[nn.Module, Inputs]]:
    return lambda: (seeded(build), inputs())


def _ids() -> Inputs:
    return {"input_ids": plain_tokens()}


def _src(batch_first: bool) -> Callable[[], Inputs]:
    return lambda: {"src": laid_out(plain_vectors(), batch_first)}


def _src_tgt(batch_first: bool) -> Callable[[], Inputs]:
    return lambda: {
        "src": laid_out(plain_vectors(), batch_first),
        "tgt": laid_out(plain_vectors()[:, :4], batch_first),
    }


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "torch-layer": _family(torch_layer, _src(True)),
    "torch-layer-length-first": _family(lambda: torch_layer(False), _src(False)),
    "torch-encoder": _family(torch_encoder, _src(True)),
    "torch-encoder-length-first": _family(lambda: torch_encoder(False), _src(False)),
    "torch-encoder-pre": _family(lambda: torch_encoder(norm_first=True), _src(True)),
    "torch-transformer": _family(torch_transformer, _src_tgt(True)),
    "torch-transformer-length-first": _family(lambda: torch_transformer(False), _src_tgt(False)),
    "bert": _family(bert, _ids),
    "roberta": _family(roberta, _ids),
    "distilbert": _family(distilbert, _ids),
    "gpt2": _family(gpt2, _ids),
    "llama": _family(llama, _ids),
    "gemma": _family(gemma, _ids),
    "t5": _family(t5, translation),
    "bart": _family(bart, translation),
    "marian": _family(marian, translation),
    "vit": _family(vit, lambda: {"pixel_values": images()}),
    "whisper-encoder": _family(
        whisper_encoder, lambda: {"input_features": whisper_inputs()["input_features"]}
    ),
    "patchtst": _family(
        patchtst, lambda: {"past_values": torch.randn(3, 16, 2, generator=generator())}
    ),
    "timm-vit": _family(timm_vit, lambda: {"x": images()}),
    "x-transformers": _family(x_transformer, lambda: {"x": plain_tokens()}),
    "x-transformers-rms": _family(
        lambda: x_transformer(use_rmsnorm=True), lambda: {"x": plain_tokens()}
    ),
    "language-model": _family(language_model, lambda: {"tokens": plain_tokens()}),
}
"""Small models with the arguments of a call without padding."""

PADDED: dict[str, Callable[[int], Inputs]] = {
    "torch-layer": encoder_inputs(True),
    "torch-layer-length-first": encoder_inputs(False),
    "torch-encoder": encoder_inputs(True),
    "torch-encoder-length-first": encoder_inputs(False),
    "torch-encoder-pre": encoder_inputs(True),
    "torch-transformer": transformer_inputs(True),
    "torch-transformer-length-first": transformer_inputs(False),
    **dict.fromkeys(("bert", "roberta", "distilbert", "gpt2", "llama", "gemma"), token_inputs),
    **dict.fromkeys(("t5", "bart", "marian"), translation_inputs),
    "whisper-encoder": whisper_inputs,
    "x-transformers": lambda extra=0: {"x": tokens(extra), "mask": ~padding(extra)},
    "x-transformers-rms": lambda extra=0: {"x": tokens(extra), "mask": ~padding(extra)},
    "language-model": lambda extra=0: {"tokens": tokens(extra), "padding_mask": padding(extra)},
}
"""Arguments of a call with padding, for the families whose models take masks."""


def output_of(result: Any) -> Tensor:
    """The tensor that a model's answer is about."""
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "last_hidden_state", "prediction_outputs"):
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    return result[0]


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    return output_of(model(**inputs))
