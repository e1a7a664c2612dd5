"""The placements in an encoder-decoder: the search and DeepNorm's constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab.tests.tiny_models import (
    VOCABULARY,
    padding,
    paired,
    tokens,
    trained,
    translation_model,
)

from powernorm_lab.models.placements import deepnorm_scales_of_both
from powernorm_lab.runs import PLACEMENTS

VARIANTS: dict[str, dict[str, Any]] = {
    **{one: {"placement": one} for one in PLACEMENTS if one not in ("pre", "post")},
    "qk-whole": {"qk_norm": "whole"},
    "qk-per-head": {"qk_norm": "per_head"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_step_gives_what_the_whole_sequence_gives(variant: str) -> None:
    with torch.enable_grad():
        model = trained(translation_model("bn", "bn", **VARIANTS[variant]), paired).double()
    source, mask = tokens(3, 5), padding(5, 2, 4, length=5)
    target = tokens(3, 4, seed=7)
    state = model.begin(model.encode(source, mask), mask, 1)
    positions = model.positions(4, source.device)
    whole = model(source, target, mask)
    for step in range(4):
        got = model.step(target[:, step, None], positions[step], state)
        torch.testing.assert_close(got[:, 0], whole[:, step], rtol=1e-12, atol=1e-12)
    assert whole.shape == (3, 4, VOCABULARY)


def test_deepnorm_is_of_both_depths() -> None:
    model = translation_model(placement="deepnorm", num_layers=2)
    encoder, decoder = deepnorm_scales_of_both(2, 2)
    first: Any = model.encoder.layers[0]
    second: Any = model.decoder.layers[0]
    for frame in (first.attention_frame, first.feedforward_frame):
        assert float(frame.scale[0]) == pytest.approx(encoder.residual)
    for frame in (second.attention_frame, second.memory_frame, second.feedforward_frame):
        assert float(frame.scale[0]) == pytest.approx(decoder.residual)
    plain: Any = translation_model(placement="post", num_layers=2)
    for ours, theirs, scale in (
        (model.encoder.layers[1], plain.encoder.layers[1], encoder.branch),
        (model.decoder.layers[1], plain.decoder.layers[1], decoder.branch),
    ):
        for name, weight in ours.named_parameters():
            if name.endswith("output.weight") or name.startswith("feedforward."):
                torch.testing.assert_close(weight, scale * theirs.get_parameter(name))
            elif name.endswith("query.weight"):
                assert torch.equal(weight, theirs.get_parameter(name))
