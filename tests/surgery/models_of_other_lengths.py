"""Small Hugging Face models whose norms see other numbers of positions than their masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.foreign_models import PAD, VOCABULARY, WIDTH, Inputs, generator

Lengths = tuple[int, ...]

BASE = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2,
    "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 0, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
SPEECH = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "mask_time_prob": 0.0, "layerdrop": 0.0,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
}  # fmt: skip
CONVOLUTIONS = {
    "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (4, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


class Case(NamedTuple):
    """A model and its inputs for a number of positions."""

    build: Callable[[Any], nn.Module]
    inputs: Callable[[Lengths, int], Inputs]
    lengths: Lengths
    """Lengths of two sequences, without padding."""
    extra: int = 8
    """Positions of padding that are added, a multiple of what the model pads or pools to."""
    not_tokens: tuple[str, ...] = ()
    """Norms whose inputs hold no padding."""


def attention_mask(lengths: Lengths, size: int) -> Tensor:
    return (torch.arange(size) < torch.tensor(lengths)[:, None]).long()


def text(lengths: Lengths, size: int) -> Inputs:
    ids = torch.randint(5, VOCABULARY, (2, max(lengths)), generator=generator())
    mask = attention_mask(lengths, size)
    ids = nn.functional.pad(ids, (0, size - ids.shape[1])).masked_fill(mask == 0, PAD)
    return {"input_ids": ids, "attention_mask": mask}


def translation(lengths: Lengths, size: int) -> Inputs:
    source = text(lengths, size)
    return {
        **source,
        **_target(size - max(lengths)),
    }


def _target(extra: int) -> Inputs:
    extra = min(extra, 16)
    return {f"decoder_{name}": value for name, value in text((4, 2), 4 + extra).items()}


def audio(lengths: Lengths, size: int) -> Inputs:
    """Samples; silence where nothing is said, as a feature extractor pads."""
    x = torch.randn(2, max(lengths), generator=generator())
    mask = attention_mask(lengths, size)
    x = nn.functional.pad(x, (0, size - x.shape[1])) * mask
    return {"input_values": x, "attention_mask": mask}


def frames(features: int) -> Callable[[Lengths, int], Inputs]:
    def inputs(lengths: Lengths, size: int) -> Inputs:
        x = torch.randn(2, max(lengths), features, generator=generator())
        mask = attention_mask(lengths, size)
        x = nn.functional.pad(x, (0, 0, 0, size - x.shape[1])) * mask.unsqueeze(-1)
        return {"input_features": x, "attention_mask": mask}

    return inputs


def _speech(name: str, config: str, **options: Any) -> Callable[[Any], nn.Module]:
    def build(hf: Any) -> nn.Module:
        made = getattr(hf, f"{config}Config")(**{**SPEECH, **CONVOLUTIONS, **options})
        return getattr(hf, f"{name}Model")(made)

    return build


def _text(name: str, model: str = "Model", **options: Any) -> Callable[[Any], nn.Module]:
    return lambda hf: getattr(hf, name + model)(getattr(hf, f"{name}Config")(**{**BASE, **options}))


def _speech_to_text(hf: Any) -> nn.Module:
    config = hf.Speech2TextConfig(
        **SEQ2SEQ, num_conv_layers=2, conv_kernel_sizes=(3, 3), conv_channels=8,
        input_feat_per_channel=4, input_channels=1, max_source_positions=64,
        max_target_positions=64,
    )  # fmt: skip
    return hf.Speech2TextModel(config)


def _spoken(lengths: Lengths, size: int) -> Inputs:
    return {**frames(4)(lengths, size), **_target(size - max(lengths))}


def _led(hf: Any) -> nn.Module:
    config = hf.LEDConfig(
        **SEQ2SEQ, attention_window=8, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    )  # fmt: skip
    return hf.LEDModel(config)


def _prophetnet(hf: Any) -> nn.Module:
    config = hf.ProphetNetConfig(
        vocab_size=VOCABULARY, pad_token_id=PAD, hidden_size=WIDTH, encoder_ffn_dim=16,
        num_encoder_layers=1, num_encoder_attention_heads=2, decoder_ffn_dim=16,
        num_decoder_layers=1, num_decoder_attention_heads=2, max_position_embeddings=64,
        ngram=2, num_buckets=8, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        decoder_start_token_id=0, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return hf.ProphetNetModel(config)


def _funnel(hf: Any) -> nn.Module:
    config = hf.FunnelConfig(
        vocab_size=VOCABULARY, pad_token_id=PAD, block_sizes=[1, 1, 1], num_decoder_layers=1,
        d_model=WIDTH, n_head=2, d_head=4, d_inner=16, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0,
    )  # fmt: skip
    return hf.FunnelModel(config)


def _layoutlm(hf: Any) -> nn.Module:
    config = hf.LayoutLMv3Config(
        **BASE, input_size=8, patch_size=4, coordinate_size=1, shape_size=2, visual_embed=True,
        max_2d_position_embeddings=16, rel_pos_bins=4, max_rel_pos=8, rel_2d_pos_bins=4,
        max_rel_2d_pos=8, has_relative_attention_bias=False, has_spatial_attention_bias=False,
    )  # fmt: skip
    return hf.LayoutLMv3Model(config)


def _with_pages(lengths: Lengths, size: int) -> Inputs:
    return {
        **text(lengths, size),
        "bbox": torch.ones(2, size, 4).long(),
        "pixel_values": torch.randn(2, 3, 8, 8, generator=generator()),
    }


def _decision(hf: Any) -> nn.Module:
    config = hf.DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=WIDTH, max_ep_len=32, n_layer=1, n_head=2,
        n_inner=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return hf.DecisionTransformerModel(config)


def _episodes(lengths: Lengths, size: int) -> Inputs:
    def series(features: int) -> Tensor:
        x = torch.randn(2, max(lengths), features, generator=generator())
        return nn.functional.pad(x, (0, 0, 0, size - x.shape[1]))

    return {
        "states": series(3), "actions": series(2), "rewards": series(1),
        "returns_to_go": series(1), "timesteps": torch.arange(size).expand(2, size),
        "attention_mask": attention_mask(lengths, size),
    }  # fmt: skip


def _longt5(hf: Any) -> nn.Module:
    config = hf.LongT5Config(
        vocab_size=VOCABULARY, pad_token_id=PAD, d_model=WIDTH, d_kv=4, d_ff=16, num_layers=1,
        num_heads=2, dropout_rate=0.0, decoder_start_token_id=PAD, eos_token_id=2,
        encoder_attention_type="transient-global", local_radius=3, global_block_size=4,
    )  # fmt: skip
    return hf.LongT5Model(config)


def _bigbird(hf: Any) -> nn.Module:
    config = hf.BigBirdConfig(
        **BASE, attention_type="block_sparse", block_size=4, num_random_blocks=1,
    )  # fmt: skip
    return hf.BigBirdModel(config)


def _w2v_bert(hf: Any, **options: Any) -> nn.Module:
    config = hf.Wav2Vec2BertConfig(
        **SPEECH, feature_projection_input_dim=6, conformer_conv_dropout=0.0,
        conv_depthwise_kernel_size=3, left_max_position_embeddings=4,
        right_max_position_embeddings=4, output_hidden_size=WIDTH, **options,
    )  # fmt: skip
    return hf.Wav2Vec2BertModel(config)


def _moonshine(hf: Any) -> nn.Module:
    config = hf.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
        intermediate_size=16, pad_token_id=PAD,
    )  # fmt: skip
    return hf.MoonshineModel(config)


def _heard(lengths: Lengths, size: int) -> Inputs:
    return {**audio(lengths, size), **_target(size - max(lengths))}


CASES: dict[str, Case] = {
    "speech2text": Case(_speech_to_text, _spoken, (20, 9)),
    "wav2vec2": Case(_speech("Wav2Vec2", "Wav2Vec2"), audio, (64, 40)),
    "wav2vec2-layers": Case(
        _speech("Wav2Vec2", "Wav2Vec2", feat_extract_norm="layer", do_stable_layer_norm=True),
        audio, (64, 40),
    ),
    "hubert": Case(_speech("Hubert", "Hubert"), audio, (64, 40)),
    "wavlm": Case(_speech("WavLM", "WavLM"), audio, (64, 40)),
    "unispeech": Case(_speech("UniSpeech", "UniSpeech"), audio, (64, 40)),
    "data2vec": Case(_speech("Data2VecAudio", "Data2VecAudio"), audio, (64, 40)),
    "sew": Case(_speech("SEW", "SEW", squeeze_factor=2), audio, (65, 41)),
    "w2v-bert": Case(_w2v_bert, frames(6), (12, 7)),
    "w2v-bert-adapter": Case(
        lambda hf: _w2v_bert(hf, add_adapter=True, num_adapter_layers=2), frames(6), (12, 7)
    ),
    "moonshine": Case(_moonshine, _heard, (6400, 4000), 384),
    "prophetnet": Case(_prophetnet, translation, (6, 3)),
    "longformer": Case(_text("Longformer", attention_window=8), text, (13, 6)),
    "led": Case(_led, translation, (13, 6)),
    "bigbird": Case(_bigbird, text, (45, 30)),
    "funnel": Case(_funnel, text, (16, 9)),
    "canine": Case(
        _text("Canine", num_hash_functions=2, num_hash_buckets=64, local_transformer_stride=8,
              downsampling_rate=4, upsampling_kernel_size=3),
        text, (16, 9),
    ),
    "layoutlmv3": Case(_layoutlm, _with_pages, (6, 3), 3, ("norm",)),
    "decision": Case(_decision, _episodes, (6, 3)),
    "longt5": Case(_longt5, translation, (16, 9)),
}  # fmt: skip
