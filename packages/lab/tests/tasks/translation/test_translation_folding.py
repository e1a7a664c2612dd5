from collections import Counter

import pytest
import torch
from lab.tests.tiny_models import padding, paired, tokens, trained, translation_model

import powernorm
from powernorm_lab.models.choices import Placement
from powernorm_lab.tasks.translation.search import BeamSearch, beam_search
from powernorm_lab.tasks.translation.settings import SharedEmbeddings


@pytest.mark.thinned(1)
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(("decoder_norm", "shared"), [("ln", "all"), ("pn-only", "target")])
def test_folded_model_translates_as_before(
    placement: Placement, decoder_norm: str, shared: SharedEmbeddings
) -> None:
    model = translation_model("bn", decoder_norm, placement=placement, shared_embeddings=shared)
    trained(model, paired)
    search = BeamSearch(4, max_length_factor=2.0, max_length_offset=9, num_best=2)
    inputs = {
        "source": tokens(4, 6),
        "target": tokens(4, 5, seed=1),
        "source_padding_mask": padding(6, 5, 3, 1),
        "target_padding_mask": padding(5, 5, 2, 4),
    }
    longer, mask = tokens(3, 9, seed=2), padding(9, 7, 1)
    logits = model(**inputs)
    found = beam_search(model, longer, mask, search)

    report = powernorm.fold(model, inputs)

    final = placement == "pre"
    encoder, decoder = 2 * 2 + final, 2 * 3 + final
    folded = encoder + (decoder if decoder_norm == "pn-only" else 0)
    actions = Counter(row.action for row in report.rows)
    assert actions == Counter({"fold": folded, "keep": encoder + decoder - folded})
    torch.testing.assert_close(model(**inputs), logits, rtol=1e-4, atol=2e-5)
    for ours, theirs in zip(beam_search(model, longer, mask, search), found, strict=True):
        assert [hypothesis.tokens for hypothesis in ours] == [h.tokens for h in theirs]
        for our, their in zip(ours, theirs, strict=True):
            assert our.score == pytest.approx(their.score, abs=1e-4)
