"""State besides γ and β that a new norm takes over from the old one, and norms without swap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import powernorm
from powernorm.inspection.selection import Where
from powernorm.surgery.swapping import plan_swap, swap
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, WIDTH, run, torch_encoder


def one(norm: nn.Module) -> nn.Sequential:
    """A model of this norm, which has seen some batches."""
    model = nn.Sequential(norm).train()
    for _ in range(3):
        x = torch.randn(99, 4)
        y = model(x)
        if y.requires_grad:
            y.square().mean().backward()
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [{"eps": 0.3}, {"eps": 0.3, "groups": 2}, {"groups": 2}, {"variant": "released"}],
)
def test_the_same_norm_again_changes_nothing(options: dict[str, Any]) -> None:
    model = one(powernorm.BatchNorm(4, **options))
    x = torch.randn(9, 4) * 0.1
    before, old = model(x), model[0]
    swap(model, "bn", **{key: value for key, value in options.items() if key == "variant"})
    assert model[0] is not old
    assert torch.allclose(model(x), before, atol=1e-6)
    assert int(model[0].num_batches_tracked) == 3


@pytest.mark.parametrize(
    "name", ["pn-only", "pn-static", "pn", "pnv", "mabn", "rbn", "brn", "prepbn", "un"]
)
def test_the_same_norm_again_has_the_same_state(name: str) -> None:
    options = {"warmup_steps": 3} if name in ("pn", "pn-only", "pn-static", "mabn", "un") else {}
    model = one(powernorm.build_norm(name, 4, **options))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    swap(model, name, **options)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key


def between_linears(kind: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A trained norm between two maps, an input and the output."""
    torch.manual_seed(0)
    old = nn.LayerNorm(4, eps=1e-3) if kind == "ln" else nn.RMSNorm(4, eps=1e-3)
    for parameter in old.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    model = nn.Sequential(nn.Linear(4, 4), old, nn.Linear(4, 4)).double()
    x = torch.randn(9, 4, dtype=torch.float64)
    before = model(x)
    return model, x, before


@pytest.mark.parametrize("kind", ["ln", "rms"])
def test_the_old_norm_is_the_branch_that_fades(kind: str) -> None:
    """PRepBN on a pretrained model trains it as it is, then ends as a norm that folds."""
    model, x, before = between_linears(kind)
    swap(model, "prepbn", decay_steps=2)
    norm = model[1].train()
    assert norm.kind == kind
    torch.testing.assert_close(model(x), before)
    assert norm.branch_weight is not norm.weight
    for _ in range(2):
        model(x).square().mean().backward()
    assert norm.share == 0.0
    trained = model.eval()(x)
    report = powernorm.fold(model, x)
    assert report.errors[0].relative <= 1e-12
    assert not any(isinstance(module, powernorm.Norm) for module in model.modules())
    torch.testing.assert_close(model(x), trained, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["ln", "rms"])
def test_the_old_norm_tapers_off(kind: str) -> None:
    model, x, before = between_linears(kind)
    swap(model, "taper", start_step=1, end_step=3, momentum=0.1)
    norm = model[1].train()
    assert norm.kind == kind
    torch.testing.assert_close(model(x), before)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        if step == 2:
            refuses(r"its gate is 0\.5", powernorm.fold, model.eval(), x)
            model.train()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    trained = model.eval()(x)
    assert norm.centers == (kind == "ln")
    report = powernorm.fold(model, x)
    assert report.errors[0].relative <= 1e-12
    assert not any(isinstance(module, powernorm.Norm) for module in model.modules())
    torch.testing.assert_close(model(x), trained, rtol=1e-12, atol=1e-12)


def test_another_norm_with_the_same_statistics_has_its_warm_up_before_it() -> None:
    model = one(powernorm.BatchNorm(4, eps=0.3))
    x = torch.randn(9, 4)
    before = model(x)
    swap(model, "brn")
    assert torch.allclose(model(x), before, atol=1e-6)
    assert int(model[0].num_batches_tracked) == 1
    powernorm.freeze_statistics(model)


def test_options_that_are_given_win() -> None:
    model = one(powernorm.BatchNorm(4, eps=0.3, groups=2))
    swap(model, "rbn", eps=0.1, groups=None)
    assert (model[0].eps, model[0].groups) == (0.1, None)
    # Statistics of groups are not those of the input itself.
    assert int(model[0].num_batches_tracked) == 0
    assert torch.equal(model[0].running_mean, torch.zeros(4))


def test_a_wrapped_batch_norm_counts_as_trained() -> None:
    model, inputs = FAMILIES["patchtst"]()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.eps = 0.2
    for _ in range(3):
        run(model.train(), inputs)
    with torch.no_grad():
        y = run(model.eval(), inputs)
        made = swap(model, "bn")
        assert torch.allclose(run(model, inputs), y, atol=1e-6)
    assert {norm.eps for norm in made.norms.values()} == {0.2}
    powernorm.freeze_statistics(model)
    fresh, _ = FAMILIES["patchtst"]()
    made = swap(fresh, "bn")
    assert {int(norm.num_batches_tracked) for norm in made.norms.values()} == {0}


@pytest.mark.parametrize(
    ("old", "to", "eps"),
    [
        (nn.LayerNorm(4, eps=0.5), "ln", 0.5),
        (nn.RMSNorm(4, eps=0.5), "rms", 0.5),
        (nn.RMSNorm(4), "rms", torch.finfo(torch.float32).eps),
        (powernorm.build_norm("rms", 4, eps=0.5), "rms", 0.5),
        (powernorm.build_norm("gn", 4, eps=0.5, groups=2), "gn", 0.5),
        (nn.LayerNorm(4, eps=0.5), "bn", 1e-5),
        (nn.LayerNorm(4, eps=0.5), "rms", powernorm.build_norm("rms", 4).eps),
    ],
)
def test_the_same_kind_of_norm_keeps_eps(old: nn.Module, to: str, eps: float) -> None:
    model = nn.Sequential(old)
    x = torch.randn(9, 4)
    y = model(x)
    swap(model, to)
    assert model[0].eps == eps
    assert (
        to == "bn" or isinstance(old, nn.LayerNorm) != (to == "ln") or torch.allclose(model(x), y)
    )


def test_a_frozen_layer_stays_frozen() -> None:
    model, _ = FAMILIES["bert"]()
    swap(model, "bn")
    powernorm.calibrate(model, [PADDED["bert"](0)])
    powernorm.freeze_statistics(model, "*.1.*")
    made = swap(model.train(), "rbn")
    first, second = (layer.output.LayerNorm for layer in model.encoder.layer)
    assert (first.is_frozen, first.training) == (False, True)
    assert (second.is_frozen, second.training) == (True, False)
    before = second.running_mean.clone()
    run(model, PADDED["bert"](0))
    assert torch.equal(second.running_mean, before)
    made.undo()
    second = model.encoder.layer[1].output.LayerNorm
    assert second.is_frozen
    powernorm.unfreeze_statistics(model)
    assert second.training
    # Another kind of statistics would be frozen before they have seen anything.
    swap(model, "pnv")
    assert not model.encoder.layer[1].output.LayerNorm.is_frozen


def test_undo_after_a_model_without_scales_was_moved() -> None:
    model = torch_encoder()
    made = swap(model, "bn", affine=False)
    model.bfloat16()
    made.undo()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


# Refusals


@pytest.mark.parametrize("options", [{"names": 3}, {"roles": 3}, {"types": [3]}, {"names": b"x"}])
def test_conditions_of_the_wrong_type(options: dict[str, Any]) -> None:
    refuses(r"expected a (string|class)", Where, **options)


def test_wrapped_for_several_processes() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class FSDPModule:
        pass

    class FSDPEncoder(FSDPModule, nn.TransformerEncoder):
        pass

    sharded = torch_encoder()
    sharded.__class__ = FSDPEncoder
    for model in (DistributedDataParallel(torch_encoder()), nn.Sequential(sharded)):
        refuses("swap before the model is wrapped", swap, model, "bn")


def replaced_forward(norm: nn.Module) -> None:
    norm.forward = lambda x: x


def hooked(norm: nn.Module) -> None:
    norm._hf_hook = object()


def derived(norm: nn.Module) -> None:
    weight = norm.weight.detach()
    del norm.weight
    norm.weight = weight * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda norm: prune.random_unstructured(norm, "weight", 0.3), "pruned"),
        (
            lambda norm: parametrize.register_parametrization(norm, "weight", nn.Identity()),
            "parametriz",
        ),
        (replaced_forward, "forward was replaced"),
        (hooked, "accelerate"),
        (derived, "plain tensor"),
    ],
)
def test_norms_that_were_altered_are_left_alone(change: Any, reason: str) -> None:
    model = torch_encoder()
    change(model.norm)
    rows = {row.name: row for row in plan_swap(model, "bn").rows}
    assert rows["norm"].action == "keep"
    assert reason in rows["norm"].reason
    swap(model, "bn")
    assert not isinstance(model.norm, powernorm.norms.Norm)
    refuses(reason, swap, model, "bn", where="norm")


def test_pruning_made_permanent() -> None:
    model = torch_encoder()
    prune.random_unstructured(model.norm, "weight", 0.3)
    prune.remove(model.norm, "weight")
    swap(model, "bn", where="norm")


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.norm_k, self.query_layernorm, self.key_norm = (
            nn.LayerNorm(WIDTH) for _ in range(4)
        )
        self.norm, self.norm1, self.value_norm, self.key = (nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_norms_of_queries_and_keys_by_their_own_names() -> None:
    model = nn.ModuleDict({"mha": Heads()})
    actions = {row.name: row.action for row in plan_swap(model, "bn").rows}
    skipped = {name.partition(".")[2] for name, action in actions.items() if action == "keep"}
    assert skipped == {"q_norm", "norm_k", "query_layernorm", "key_norm"}
