"""The language model with tensorized attention: causality, initialization and folding."""

from copy import deepcopy

import pytest
import torch
from lab.tests.task_models import check_causal, check_first_weights, learned
from torch import Tensor

from powernorm import fold
from powernorm.errors import InputError
from powernorm.norms import NORMS, build_norm
from powernorm_lab.models.choices import Placement, TransformerShape
from powernorm_lab.models.language_model import LanguageModel
from powernorm_lab.tasks.lm.tensorized_attention import TensorizedAttention
from surgery.static_models import left_of

VOCABULARY, LENGTH, FEATURES = 11, 9, 8


def build(
    norm: str,
    *,
    seed: int = 0,
    placement: Placement = "pre",
    dropout: float = 0.0,
    sees_future: bool = False,
) -> LanguageModel:
    return LanguageModel(
        VOCABULARY,
        lambda num_features: build_norm(norm, num_features, **OPTIONS.get(norm, {})),
        TransformerShape(
            num_features=FEATURES,
            num_layers=2,
            feedforward_features=12,
            placement=placement,
            dropout=dropout,
        ),
        max_length=LENGTH,
        seed=seed,
        attention=lambda: TensorizedAttention(FEATURES, 5, LENGTH, sees_future=sees_future),
    )


# With x itself beside BN(x) nothing bounds the input of this attention, which is cubic in it: the
# model diverges within three steps. The authors' language model starts like this too.
OPTIONS = {"repbn": {"eta": 0.0}}


def tokens(batch: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)


def trained(norm: str, placement: Placement = "pre", *, sees_future: bool = False) -> LanguageModel:
    model = build(norm, placement=placement, dropout=0.1, sees_future=sees_future)
    return learned(model, tokens, rate=0.03)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NORMS)
def test_no_output_depends_on_a_later_token(norm: str, placement: Placement) -> None:
    check_causal(trained(norm, placement), tokens(), VOCABULARY)


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_published_behavior_does_see_later_tokens(norm: str) -> None:
    with torch.enable_grad():
        model = trained(norm, sees_future=True)
    x = tokens()
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    assert ((model(changed) - model(x)).abs().amax((0, 2)) > 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_all_norms_start_from_the_same_weights(norm: str) -> None:
    check_first_weights(build, norm, 1 + 2 * 10)


def test_layers_differ_in_every_weight() -> None:
    first, second = (layer.attention for layer in build("ln").layers)
    assert isinstance(first, TensorizedAttention)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert not torch.equal(ours, theirs)


def test_positions_are_known_by_their_distances_alone() -> None:
    model = build("ln").eval()
    assert model.positions is None
    with torch.no_grad():
        same = model(torch.zeros(1, LENGTH, dtype=torch.long))
        # The first of equal tokens attends only to itself, the others to more of the same.
        assert not torch.allclose(same[:, 0], same[:, 1])
    with pytest.raises(InputError, match="sequence of 10 tokens is longer than max_length=9"):
        model(torch.zeros(1, LENGTH + 1, dtype=torch.long))


@pytest.mark.parametrize("norm", ["bn", "rbn"])
def test_pre_norms_fold_away(norm: str) -> None:
    model, x = trained(norm), tokens()
    unfolded = deepcopy(model)
    report = fold(model, x)
    assert {row.action for row in report.rows} == {"fold"}
    # The plan was made on whole segments.
    for length in (LENGTH, 4):
        part = x[:, :length]
        torch.testing.assert_close(model(part), unfolded(part), rtol=1e-4, atol=1e-4)


def test_post_norms_fold_as_far_as_the_columns_of_the_tensor_let_them() -> None:
    model, x = trained("bn", "post"), tokens()
    unfolded = deepcopy(model)
    report = fold(model, x)
    assert [left_of(row) for row in report.rows] == ["fold", "multiply-add", "fold", "fold"]
    assert "layers.1.attention" in report.rows[1].reason
    torch.testing.assert_close(model(x), unfolded(x), rtol=1e-4, atol=1e-4)
