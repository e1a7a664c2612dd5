"""A folded Transformer-XL has no norm, and uses its memory as before."""

import copy

import pytest
import torch
from transformer_xl_models import build, in_segments, text, trained

from powernorm.norms import Norm
from powernorm.surgery import fold
from powernorm_lab.models.choices import Placement


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", ["bn", "pn-static"])
def test_folded(norm: str, placement: Placement) -> None:
    model = trained(build(norm, placement=placement, memory_length=6)).double()
    unfolded = copy.deepcopy(model)
    fold(model, (text(),))
    assert not any(isinstance(module, Norm) for module in model.modules())
    with torch.no_grad():
        expected = in_segments(unfolded, text(), 4)
        torch.testing.assert_close(in_segments(model, text(), 4), expected, rtol=1e-6, atol=1e-8)
