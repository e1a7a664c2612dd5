"""The placements in an encoder-decoder: the search, the masks, DeepNorm's constants, folding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from translation_models import VOCABULARY, build, padding, tokens, trained

import powernorm
from powernorm.norms import BatchStatisticsNorm
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
        model = trained(build("bn", "bn", **VARIANTS[variant]), steps=2).double()
    source, mask = tokens(3, 5), padding(5, 2, 4, length=5)
    target = tokens(3, 4, seed=7)
    state = model.begin(model.encode(source, mask), mask, 1)
    positions = model.positions(4, source.device)
    whole = model(source, target, mask)
    for step in range(4):
        got = model.step(target[:, step, None], positions[step], state)
        torch.testing.assert_close(got[:, 0], whole[:, step], rtol=1e-12, atol=1e-12)
    assert whole.shape == (3, 4, VOCABULARY)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_norm_leaves_padding_out(variant: str) -> None:
    """Norms of keys and values get the mask of the source, all others the mask of their side."""
    source, source_mask = tokens(3, 6), padding(6, 3, 2)
    target, target_mask = tokens(3, 5, seed=1), padding(5, 2, 4)

    def statistics(seed: int) -> list[Tensor]:
        model = build("bn", "bn", **VARIANTS[variant])
        garbage = [tokens(3, 6, seed=seed), tokens(3, 5, seed=seed + 1)]
        own_source = torch.where(source_mask, garbage[0], source)
        own_target = torch.where(target_mask, garbage[1], target)
        model(own_source, own_target, source_mask, target_mask)
        norms = [one for one in model.modules() if isinstance(one, BatchStatisticsNorm)]
        assert all(int(norm.num_batches_tracked) == 1 for norm in norms)
        return [norm.running_mean for norm in norms]

    for one, other in zip(statistics(11), statistics(23), strict=True):
        torch.testing.assert_close(one, other)


def test_deepnorm_is_of_both_depths() -> None:
    model = build(placement="deepnorm", num_layers=2)
    encoder, decoder = deepnorm_scales_of_both(2, 2)
    first: Any = model.encoder.layers[0]
    second: Any = model.decoder.layers[0]
    for frame in (first.attention_frame, first.feedforward_frame):
        assert float(frame.scale[0]) == pytest.approx(encoder.residual)
    for frame in (second.attention_frame, second.memory_frame, second.feedforward_frame):
        assert float(frame.scale[0]) == pytest.approx(decoder.residual)
    plain: Any = build(placement="post", num_layers=2)
    for ours, theirs, scale in (
        (model.encoder.layers[1], plain.encoder.layers[1], encoder.branch),
        (model.decoder.layers[1], plain.decoder.layers[1], decoder.branch),
    ):
        for name, weight in ours.named_parameters():
            if name.endswith("output.weight") or name.startswith("feedforward."):
                torch.testing.assert_close(weight, scale * theirs.get_parameter(name))
            elif name.endswith("query.weight"):
                assert torch.equal(weight, theirs.get_parameter(name))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(one, marks=() if one in ("deepnorm", "bn-linear") else pytest.mark.slow)
        for one in VARIANTS
        if one != "qk-per-head"
    ],
)
def test_folding_both_sides(variant: str) -> None:
    model = trained(build("bn", "bn", **VARIANTS[variant])).double()
    inputs = {
        "source": tokens(4, 6),
        "target": tokens(4, 5, seed=1),
        "source_padding_mask": padding(6, 5, 3, 1),
        "target_padding_mask": padding(5, 5, 2, 4),
    }
    expected = model(**inputs).detach()
    report = powernorm.fold(model, inputs)
    # Norms that the heads share leave a multiply-add.
    shared = {"swap"} if variant == "hybrid" else set()
    assert {row.action for row in report.rows} == {"fold"} | shared
    gap = (model(**inputs).detach() - expected).abs().max() / expected.abs().max()
    assert float(gap) <= 1e-12
