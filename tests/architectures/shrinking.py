"""Small configurations of Hugging Face models, made by shrinking their defaults.

Attributes of configurations have the same names in hundreds of models: one table of names gives
their small values, in nested configurations too. `huggingface_models.py` has the exceptions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

VOCABULARY = 64
PAD, BOS, EOS = 1, 0, 2
FIRST_WORD, LAST_WORD = 5, 40
"""Ids that stand for nothing special; those of images, sounds and others lie behind them."""
WIDTH = 32
NUM_HEADS = 4
HEAD_WIDTH = WIDTH // NUM_HEADS
INNER_WIDTH = 48
NUM_LAYERS = 2
MAX_LENGTH = 64
IMAGE_SIZE = 32
PATCH_SIZE = 8
NUM_EXPERTS = 4
STAGES = (16, 16, 32, 32)
"""Widths of models whose image shrinks in stages."""

_NAMES: Sequence[tuple[int, str]] = (
    (WIDTH, """
        hidden_size d_model dim n_embd emb_dim embed_dim text_hidden_size word_embed_proj_dim
        embedding_size encoder_hidden_size decoder_hidden_size hidden_dim out_hidden_size
        output_hidden_size projection_dim model_dim cross_hidden_size attention_hidden_size
        kv_lora_rank q_lora_rank lru_width conv_hidden_size embedding_dim vision_hidden_size
        fusion_hidden_size audio_hidden_size dense_hidden_size moe_hidden_size
        d_embed backbone_hidden_size target_hidden_size hidden_size_global
        text_embed_dim image_embed_dim vision_output_dim linear_attn_width decoder_embed_dim
        output_proj_dim pooler_output_size projector_hidden_size pooler_hidden_size
        classifier_proj_size codevector_dim proj_codevector_dim neck_hidden_size mask_feature_size
        adapter_out_dim entity_emb_size tpa_hidden_size downsample_hidden_size
        xvector_output_dim hidden_size_per_layer_input qk_latent_dim memory_encoder_hidden_size
        text_embedding_dim encoder_hidden_dim"""),
    (INNER_WIDTH, """
        intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner inner_dim
        moe_intermediate_size mlp_dim shared_expert_intermediate_size d_inner ffn_hidden_size
        ffn_hidden_dim expert_ffn_hidden_size shared_intermediate_size mlp_hidden_size
        linear_units feed_forward_size dim_feedforward encoder_intermediate_size
        decoder_intermediate_size decoder_ffn_size dense_intermediate_size
        moe_shared_expert_intermediate_size intermediate_size_mlp d_ffn ffn_size
        block_ff_dim mamba_intermediate_size intermediate_dim block_intermediate_size"""),
    (NUM_LAYERS, """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_encoder_layers num_decoder_layers depth e_layers d_layers num_layer text_num_layers
        encoder_num_layers decoder_num_layers decoder_num_hidden_layers encoder_num_hidden_layers
        resampler_depth max_window_layers num_mamba_layers n_encoder_layers
        num_block predictor_num_hidden_layers r_layers x_layers l_layers backbone_num_layers
        memory_attention_num_layers"""),
    (NUM_HEADS, """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads attention_heads num_head encoder_num_attention_heads
        decoder_num_attention_heads text_num_attention_heads
        resampler_n_heads num_decoder_attention_heads num_encoder_attention_heads
        swa_num_attention_heads predictor_num_attention_heads"""),
    (2, """
        num_key_value_heads num_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads
        swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k
        num_selected_experts moe_top_k n_group topk_group linear_num_key_heads
        linear_num_value_heads num_global_key_value_heads n_kv_heads expert_group_size
        num_decoder_key_value_heads num_encoder_key_value_heads
        multi_query_group_num"""),
    (HEAD_WIDTH, """
        head_dim attention_head_dim d_kv d_head qk_nope_head_dim qk_rope_head_dim v_head_dim
        linear_key_head_dim linear_value_head_dim kv_channels resampler_head_dim
        swa_head_dim global_head_dim attention_head_size dim_head encoder_head_dim
        decoder_head_dim query_pre_attn_scalar linear_head_dim index_head_dim
        rotary_dim attention_key_dim head_size mamba_d_head mamba_head_dim swa_v_head_dim
        indexer_head_dim"""),
    (NUM_EXPERTS, """
        num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts
        index_n_heads"""),
    (MAX_LENGTH, """
        max_position_embeddings n_positions max_source_positions max_target_positions
        max_sequence_length seq_length max_seq_len max_seq_length n_ctx
        max_2d_position_embeddings
        max_text_len position_embedding_size original_max_position_embeddings"""),
    (IMAGE_SIZE, "image_size img_size input_image_size pretrain_image_size"),
    (PATCH_SIZE, "patch_size encoder_stride"),
    (8, """
        num_mel_bins feature_size n_mels mamba_n_heads mamba_num_heads mamba_d_state state_size
        ssm_state_size
        num_conv_pos_embeddings input_feat_per_channel"""),
    (2 * HEAD_WIDTH, "qk_head_dim"),
    (1, "n_shared_experts num_shared_experts first_k_dense_replace moe_num_shared_experts"),
)  # fmt: skip
SIZES: Mapping[str, int] = {name: size for size, names in _NAMES for name in names.split()}
"""Values of integer attributes, by name."""

_DROPOUTS = ("drop", "pdrop", "dropout", "layerdrop", "jitter")
_STAGED: Mapping[str, Sequence[int]] = {
    "hidden_sizes": STAGES,
    "embed_dims": STAGES,
    "embed_dim_per_stage": STAGES,
    "depths": (1, 1, 1, 1),
    "num_attention_heads": (1, 2, 4, 4),
    "num_heads": (1, 2, 4, 4),
    "blocks_per_stage": (1, 1, 1, 1),
    "num_attention_heads_per_stage": (1, 2, 4, 4),
}


def shrunk(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small configuration as a dictionary.

    Args:
        config: the default's `to_dict()`.
        overrides: values that replace the shrunk ones; nested mappings are merged.
    """
    return merged(_shrunk(copy.deepcopy(dict(config))), overrides)


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary with values replaced, nested dictionaries being merged."""
    result = dict(config)
    for name, value in overrides.items():
        old = result.get(name)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping) and bool(value)
        result[name] = merged(old, value) if nested else value
    return result


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    num_layers = next(
        (config[name] for name in _LAYER_COUNTS if isinstance(config.get(name), int)), None
    )
    kinds = [
        list(dict.fromkeys(config[name]))
        for name in _LAYER_KINDS
        if isinstance(config.get(name), list) and config[name]
    ]
    count = max([NUM_LAYERS, *map(len, kinds)])
    special = iter(range(VOCABULARY - 1, LAST_WORD, -1))
    result = {
        name: _value(name, value, _Layers(num_layers, count), special)
        for name, value in config.items()
        if name not in _DERIVED
    }
    if isinstance(config.get("kv_lora_rank"), int) and "num_key_value_heads" in result:
        # Latent attention makes keys and values for every head.
        result["num_key_value_heads"] = result["num_attention_heads"]
    if kinds:
        # A layer of each kind.
        for name in _LAYER_KINDS:
            if isinstance(config.get(name), list):
                result[name] = (list(dict.fromkeys(config[name])) * count)[:count]
        result.update((name, count) for name in _LAYER_COUNTS if name in result)
    return result


class _Layers(NamedTuple):
    """Number of layers before and after shrinking."""

    before: int | None
    after: int


def _value(name: str, value: Any, layers: _Layers, special: Iterator[int]) -> Any:
    if isinstance(value, Mapping):
        return _mapping(name, value)
    if name.endswith(("_token_id", "_token_index")):
        return _token(name, value, special)
    if isinstance(value, (list, tuple)):
        return _sequence(name, list(value), layers)
    if name in _SWITCHED_OFF:
        return False
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _size(name, value)
    return _number(name, value) if isinstance(value, float) else value


def _mapping(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    if name in ("rope_parameters", "rope_scaling"):
        return _rope(value)
    is_config = name.endswith(("_config", "_cfg")) or "model_type" in value
    return _shrunk(dict(value)) if is_config else value


def _size(name: str, value: int) -> int:
    if value <= 0:
        return value
    if name.endswith(("vocab_size", "n_vocab")):
        return VOCABULARY
    return min(SIZES.get(name, value), value)


def _number(name: str, value: float) -> float:
    if any(part in name for part in _DROPOUTS):
        return 0.0
    return float(HEAD_WIDTH) if name == "query_pre_attn_scalar" else value


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LAYER_KINDS = ("layer_types", "layers_block_type")
_DERIVED = ("out_features", "out_indices", "stage_names", "per_layer_config")
"""Attributes that a configuration derives from its number of layers."""

_SWITCHED_OFF = frozenset({"apply_spec_augment"})


def _token(name: str, value: Any, special: Iterator[int]) -> Any:
    known = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    if name in known:
        return known[name]
    if name == "decoder_start_token_id":
        return EOS
    if isinstance(value, int) and value >= FIRST_WORD:
        return next(special)
    return value


def _sequence(name: str, value: list[Any], layers: _Layers) -> list[Any]:
    is_whole = bool(value) and all(isinstance(item, int) for item in value)
    if name in _STAGED and is_whole:
        staged = list(_STAGED[name])
        return (staged + staged[-1:] * len(value))[: len(value)]
    if layers.before is not None and len(value) == layers.before > layers.after:
        value = value[: layers.after]
    if name in SIZES and is_whole:
        return [min(SIZES[name], item) for item in value]
    return value


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(value)
    if "mrope_section" in result:
        result["mrope_section"] = [2, 1, 1]
    for name, item in result.items():
        if isinstance(item, Mapping):
            result[name] = _rope(item)
    if "original_max_position_embeddings" in result:
        result["original_max_position_embeddings"] = MAX_LENGTH
    return result
