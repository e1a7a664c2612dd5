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

from powernorm_lab.models.choices import Placement


@pytest.mark.parametrize("norm", ["ln", "bn", "pn"])
@pytest.mark.parametrize("placement", ["pre", "post"])
@torch.no_grad()
def test_a_step_gives_what_the_whole_sequence_gives(norm: str, placement: Placement) -> None:
    """Hypotheses are shuffled, doubled and dropped, sentences end, and the buffer grows."""
    with torch.enable_grad():
        model = trained(translation_model(norm, norm, placement=placement), paired).double()
    generator = torch.Generator().manual_seed(3)
    beam, steps = 3, 20
    source, mask = tokens(4, 5), padding(5, 2, 0, 4, length=5)
    state = model.begin(model.encode(source, mask), mask, beam)
    positions = model.positions(steps, source.device)
    sequences = torch.empty(4, beam, 0, dtype=torch.int64)
    for step in range(steps):
        newest = torch.randint(VOCABULARY, sequences.shape[:2], generator=generator)
        sequences = torch.cat((sequences, newest[..., None]), dim=-1)
        got = model.step(newest, positions[step], state)
        for hypothesis in range(beam):
            whole = model(source, sequences[:, hypothesis], mask)[:, -1]
            torch.testing.assert_close(got[:, hypothesis], whole, rtol=1e-12, atol=1e-12)
        origins = torch.randint(beam, sequences.shape[:2], generator=generator)
        state.continue_from(origins)
        sequences = sequences.gather(1, origins[..., None].expand_as(sequences))
        if step in (4, 17):
            rows = torch.tensor([2, 0]) if step == 4 else torch.tensor([1])
            state.select(rows)
            source, mask, sequences = source[rows], mask[rows], sequences[rows]


@torch.no_grad()
def test_keys_and_values_of_the_source_are_kept_once_a_sentence() -> None:
    model = translation_model(num_layers=1)
    state = model.begin(model.encode(tokens(2, 5)), None, 7)
    assert state.memory_allowed is None
    assert [part.shape for part in state.layers[0].memory] == [(2, 2, 5, 4)] * 2
