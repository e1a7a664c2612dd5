"""The weights of our model under the names that Joey NMT has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

NUM_MARKS = 4
"""Unknown, padding, begin and end, in this order; the pairs have one mark, with the id 0."""

Named = Iterator[tuple[str, Tensor]]
ENCODER_NORMS = {"attention_frame": "layer_norm", "feedforward_frame": "feed_forward.layer_norm"}
DECODER_NORMS = {
    "attention_frame": "x_layer_norm",
    "memory_frame": "dec_layer_norm",
    "feedforward_frame": "feed_forward.layer_norm",
}


def joeynmt_weights(weights: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Rename the weights of a `TranslationModel`, pre-norm, one table for all embeddings."""
    table = weights["source_embedding.weight"]
    table = torch.cat([table[:1].expand(NUM_MARKS, -1), table[1:]])
    names = ("src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer.weight")
    renamed = dict.fromkeys(names, table)
    for side, norms in (("encoder", ENCODER_NORMS), ("decoder", DECODER_NORMS)):
        renamed.update(_both(weights, f"{side}.norm", f"{side}.layer_norm"))
        for number in range(num_layers):
            ours = theirs = f"{side}.layers.{number}"
            for frame, norm in norms.items():
                renamed.update(_both(weights, f"{ours}.{frame}.norm", f"{theirs}.{norm}"))
            for place in (0, 3):
                renamed.update(
                    _both(
                        weights,
                        f"{ours}.feedforward.{place}",
                        f"{theirs}.feed_forward.pwff_layer.{place}",
                    )
                )
            attention = "src_src_att" if side == "encoder" else "trg_trg_att"
            renamed.update(_attention(weights, f"{ours}.attention", f"{theirs}.{attention}"))
            if side == "decoder":
                memory = f"{ours}.memory_attention"
                renamed.update(_attention(weights, memory, f"{theirs}.src_trg_att"))
    return renamed


def _both(weights: Mapping[str, Tensor], ours: str, theirs: str) -> Named:
    for part in ("weight", "bias"):
        yield f"{theirs}.{part}", weights[f"{ours}.{part}"]


def _attention(weights: Mapping[str, Tensor], ours: str, theirs: str) -> Named:
    yield from _both(weights, f"{ours}.query", f"{theirs}.q_layer")
    yield from _both(weights, f"{ours}.output", f"{theirs}.output_layer")
    for part in ("weight", "bias"):
        key, value = weights[f"{ours}.key_value.{part}"].chunk(2)
        yield f"{theirs}.k_layer.{part}", key.clone()
        yield f"{theirs}.v_layer.{part}", value.clone()
