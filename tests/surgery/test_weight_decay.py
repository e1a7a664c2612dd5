"""Which parameters an optimizer's groups decay."""

from torch import nn

import powernorm
from powernorm.surgery import decay_groups
from refusals import refuses


def decayed(model: nn.Module, norms: object = ()) -> set[str]:
    """Names of what is decayed; together both groups hold what is trained, once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first, second = decay_groups(model, 0.3, norms)  # type: ignore[arg-type]
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    trained = [id(one) for one in model.parameters() if one.requires_grad]
    assert sorted(id(one) for one in first["params"] + second["params"]) == sorted(trained)
    return {names[id(one)] for one in first["params"]}


def model() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)


def test_matrices_alone_are_decayed() -> None:
    own = model()
    own.layers[0].linear1.weight.requires_grad_(False)
    matrices = {name for name, one in own.named_parameters() if one.ndim > 1}
    assert decayed(own) == matrices - {"layers.0.linear1.weight"}


def test_gammas_are_decayed_by_role() -> None:
    own = model()
    more = decayed(own, powernorm.Where(roles="attention")) - decayed(own)
    assert more == {"layers.0.norm1.weight", "layers.1.norm1.weight"}
    assert decayed(own, powernorm.Where(roles="final")) - decayed(own) == {"norm.weight"}


def test_a_matrix_of_a_norm_is_not_decayed() -> None:
    assert decayed(nn.Sequential(powernorm.GatedRMSNorm(4), nn.Linear(4, 4))) == {"1.weight"}


def test_what_does_not_fit_is_refused() -> None:
    refuses("selects no norm", decay_groups, model(), 0.1, "nothing")
    refuses("weight_decay", decay_groups, model(), -0.1)
