"""Functional norms made modules: the model computes the same, and other verbs can use them."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import powernorm
from inspection.functional_models import GPT, norm
from powernorm import InputError
from powernorm.inspection import find_norms
from refusals import refuses

WIDTH = 8
TOKENS = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


class Calls(nn.Module):
    """Calls a function of itself and its input."""

    def __init__(self, function: Callable[["Calls", Tensor], Tensor], *inside: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.gamma = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.beta = nn.Parameter(torch.randn(WIDTH))
        self.inside = nn.Sequential(*inside)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.inside(x))


def affine(model: Calls, x: Tensor) -> Tensor:
    x = F.layer_norm(x, (WIDTH,), model.gamma, eps=1e-3)
    return F.layer_norm(x, (WIDTH,), bias=model.beta) + norm(x)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(x).float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_values_and_gradients_are_the_same_to_the_digit(
    gpt: GPT, dtype: torch.dtype, training: bool
) -> None:
    """Else making modules would be a change of the model that was not asked for."""
    model = gpt.to(dtype).train(training)
    before = copy.deepcopy(model)
    powernorm.modularize(model, TOKENS)
    assert torch.equal(model(TOKENS), before(TOKENS))
    pairs = zip(gradients(model, TOKENS), gradients(before, TOKENS), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(TOKENS), before(TOKENS))
        pairs = zip(gradients(model, TOKENS), gradients(before, TOKENS), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert all(module.training == training for module in model.modules())


def test_norms_of_heads_stay_and_the_others_swap_train_and_fold(gpt: GPT) -> None:
    """The whole way of a model with functional norms alone, which was closed before."""
    made = powernorm.modularize(gpt, TOKENS)
    assert [row.action for row in made.rows] == ["modularize"] * 10
    swapped = powernorm.swap(gpt, "rbn")
    kept = {row.name for row in swapped.plan.rows if row.action == "keep"}
    heads = {f"transformer.h.{layer}.attn.qk_norm{call}" for layer in (0, 1) for call in (0, 1)}
    assert kept == heads
    assert all("queries" in row.reason for row in swapped.plan.rows if row.name in heads)
    optimizer = torch.optim.Adam(gpt.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = gpt(TOKENS, TOKENS)
        optimizer.zero_grad()
        (loss + powernorm.penalty(gpt, num_tokens=TOKENS.numel())).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    rows = powernorm.calibrate(gpt, [TOKENS, TOKENS]).rows
    assert {row.name for row in rows if row.action == "keep"} == heads
    rows = powernorm.diagnose(gpt, [TOKENS[:2], TOKENS[2:]]).rows
    assert {row.name for row in rows} == set(swapped.norms)
    gpt.eval()
    before = gpt(TOKENS)
    report = powernorm.fold(gpt, TOKENS)
    assert {row.name for row in report.rows if row.action == "keep"} == heads
    torch.testing.assert_close(gpt(TOKENS), before, rtol=1e-4, atol=1e-4)


def test_undo_restores_the_model(gpt: GPT) -> None:
    attributes = [vars(module).keys() for module in gpt.modules()]
    names = list(gpt.state_dict())
    hooks = [len(module._state_dict_hooks) for module in gpt.modules()]
    before = gpt(TOKENS)
    made = powernorm.modularize(gpt, TOKENS)
    swapped = powernorm.swap(gpt, "ln")
    refuses("undo later changes first", made.undo)
    swapped.undo()
    made.undo()
    assert find_norms(gpt) == ()
    assert len(find_norms(gpt, TOKENS)) == 10
    assert [vars(module).keys() for module in gpt.modules()] == attributes
    assert [len(module._state_dict_hooks) for module in gpt.modules()] == hooks
    assert list(gpt.state_dict()) == names
    assert torch.equal(gpt(TOKENS), before)
    refuses("undo was called already", made.undo)


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_and_exported_models_compute_the_same(gpt: GPT, swapped: bool) -> None:
    """Else a compiled model would skip its norms, or break the graph at each of them."""
    powernorm.modularize(gpt, TOKENS)
    if swapped:
        powernorm.swap(gpt, "rbn")
        gpt(TOKENS)
    gpt.eval()
    expected = gpt(TOKENS)
    compiled = torch.compile(gpt, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(TOKENS), expected)
    exported = torch.export.export(gpt, (TOKENS,)).module()
    torch.testing.assert_close(exported(TOKENS), expected)


def test_norms_beside_the_calls_do_not_count_as_calls() -> None:
    """Else the model around takes what its LayerNorms call for its own calls."""
    torch.manual_seed(0)
    inside = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH))
    model = Calls(lambda _, x: norm(x), *inside, Calls(lambda _, x: norm(x)))
    before = copy.deepcopy(model)
    powernorm.modularize(model, X)
    assert [one.names[0] for one in find_norms(model, X)] == [
        "inside.0",
        "inside.2",
        "inside.3.norm_call0",
        "norm_call0",
    ]
    assert torch.equal(model(X), before(X))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), before(X))
    powernorm.swap(model, "ln", where="inside.*")
    assert model(X).shape == X.shape
    folded = powernorm.fold(model.eval(), X, keep="statistics")
    assert folded.rows[0].action == "fold"


def test_an_interrupted_call_hides_nothing_from_the_next() -> None:
    """Else Ctrl-C in a notebook leaves a model that normalizes by the functions again."""

    class Interrupting(nn.Module):
        active = False

        def forward(self, x: Tensor) -> Tensor:
            if self.active:
                raise KeyboardInterrupt
            return F.rms_norm(x, (WIDTH,))

    class Norm(nn.Sequential):
        pass

    inside = Interrupting()
    powernorm.declare_norm(Norm, kind="rms")
    model = Calls(lambda _, x: norm(x), Norm(inside))
    powernorm.modularize(model, X)
    expected = model(X)
    inside.active = True
    with pytest.raises(KeyboardInterrupt):
        model(X)
    inside.active = False
    assert torch.equal(model(X), expected)


def test_parameters_of_a_call_stay_the_same_objects_under_the_same_names() -> None:
    """Else optimizers and checkpoints from before do not fit any more."""
    model = Calls(affine)
    before = copy.deepcopy(model)
    rows = powernorm.modularize(model, X).rows
    assert [row.into for row in rows] == [("LayerNorm",), ("LayerNorm",), ("RMSNorm",)]
    assert torch.equal(model(X), before(X))
    assert model.norm_call0.weight is model.gamma
    assert model.norm_call0.bias is None
    assert model.norm_call1.bias is model.beta
    assert model.norm_call1.weight is None
    assert [name for name, _ in model.named_parameters()] == ["gamma", "beta"]
    assert list(model.state_dict()) == ["gamma", "beta"]
    saved = {name: torch.randn(WIDTH) for name in ("gamma", "beta")}
    model.load_state_dict(saved)
    before.load_state_dict(saved)
    assert torch.equal(model(X), before(X))
    powernorm.swap(model, "rbn", where="norm_call0")
    assert model.norm_call0.weight is model.gamma
    assert "norm_call0.weight" not in model.state_dict()
    assert "norm_call0.bias" in model.state_dict()
    model.load_state_dict(model.state_dict())


def test_group_norm_becomes_a_module() -> None:
    model = Calls(lambda m, x: F.group_norm(x.mT, 2, m.gamma, m.beta, 1e-3))
    before = copy.deepcopy(model)
    powernorm.modularize(model, X)
    assert torch.equal(model(X), before(X))
    assert powernorm.plan_swap(model, "bn").rows[0].action == "swap"


def test_copies_and_pickles_are_models_of_their_own(gpt: GPT) -> None:
    """Else a copy calls the forward, and the weights, of the model that it was copied from."""
    powernorm.modularize(gpt, TOKENS)
    buffer = io.BytesIO()
    torch.save(gpt, buffer)
    buffer.seek(0)
    copies = (
        copy.deepcopy(gpt),
        pickle.loads(pickle.dumps(gpt)),
        torch.load(buffer, weights_only=False),
    )
    expected = gpt(TOKENS)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
    for again in copies:
        assert torch.equal(again(TOKENS), expected)
        assert powernorm.swap(again, "rbn").norms.keys() == powernorm.swap(gpt, "rbn").norms.keys()


@pytest.mark.parametrize("where", ["norm_call0", "norm_call2"])
def test_a_swapped_model_is_saved_and_loaded(tmp_path: Path, where: str) -> None:
    model = Calls(affine)
    powernorm.modularize(model, X)
    powernorm.swap(model, "bn", where=where)
    model(X)
    powernorm.save(model, tmp_path / "model")
    again = Calls(affine)
    with pytest.raises(InputError, match=r"powernorm.modularize on it if that was called there"):
        powernorm.load(tmp_path / "model", again)
    powernorm.modularize(again, X)
    again = powernorm.load(tmp_path / "model", again)
    assert torch.equal(again(X), model.eval()(X))
    assert again.norm_call0.weight is again.gamma


def test_checkpointed_blocks_compile() -> None:
    """Else a training that saves memory and is compiled has to give up one of the two."""
    model = Calls(lambda m, x: checkpoint(m.inner, norm(x), use_reentrant=False))
    model.inner = Calls(lambda _, x: norm(x), nn.Linear(WIDTH, WIDTH))
    before = gradients(model, X)
    powernorm.modularize(model, X)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, X), before)
    assert sum(one is not None for one in before) == 2


def test_what_cannot_be_a_module_stays_with_a_reason() -> None:
    def several(m: Calls, x: Tensor) -> Tensor:
        x = F.batch_norm(x.mT, None, None, training=True).mT
        x = F.layer_norm(x, (WIDTH,), 1 + m.gamma)
        return norm(x)

    model = Calls(several)
    before = copy.deepcopy(model)
    rows = powernorm.modularize(model, X).rows
    assert [(row.name, row.action) for row in rows] == [
        ("norm_call0", "keep"),
        ("norm_call1", "keep"),
        ("norm_call2", "modularize"),
    ]
    assert "no module computes batch_norm exactly as called" in rows[0].reason
    assert "its weight or bias is no parameter of the module" in rows[1].reason
    assert torch.equal(model(X), before(X))
    for inputs in (None, X):
        found = [one.names[0] for one in find_norms(model, inputs)]
        assert found == ["norm_call0", "norm_call1", "norm_call2"]


def looped(_: Calls, x: Tensor) -> Tensor:
    for _turn in range(int(x.abs().sum()) % 3 + 1):
        x = norm(x)
    return x


def by_chance(_: Calls, x: Tensor) -> Tensor:
    return norm(x) if torch.rand(()) < 0.5 else norm(norm(x))


@pytest.mark.parametrize("refuse", [looped, by_chance])
def test_calls_that_depend_on_data_are_refused(refuse: Callable[[Calls, Tensor], Tensor]) -> None:
    """Else a call gets the statistics of another one, without a word."""
    model = nn.Sequential(Calls(refuse))
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"forward of 0 \(Calls\) makes \d calls .* and then"):
        powernorm.modularize(model, X, more_examples=[X + i for i in range(8)])
    assert not any("forward" in vars(module) for module in model.modules())
    assert len(list(model.modules())) == 3


def test_later_calls_that_differ_are_an_error() -> None:
    """Else a branch that no example showed skips its norm or takes the wrong one."""

    def branching(model: Calls, x: Tensor) -> Tensor:
        if len(x) == 3:
            return x
        x = norm(x) if len(x) != 4 else F.layer_norm(x, (WIDTH,))
        x = F.layer_norm(x, (WIDTH,), model.gamma if len(x) != 5 else model.beta)
        return x if len(x) != 6 else norm(x)

    model = Calls(branching)
    powernorm.modularize(model, X)
    for length, message in (
        (3, "Calls makes 0 calls of functional norms, where the examples .* had 2 calls"),
        (4, "Calls calls layer_norm as number 0, where the examples"),
        (5, "Calls gives layer_norm another weight, where the examples"),
        (6, "Calls calls rms_norm as number 2, where the examples"),
    ):
        refuses(message, model, X[:1].expand(length, -1, -1))


def test_a_forward_that_goes_through_its_children_is_refused() -> None:
    class Chain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.layer_norm(super().forward(x), (WIDTH,), eps=0.1)

    model = Chain(nn.Linear(WIDTH, WIDTH))
    refuses("fails with modules in the place of functional norms", powernorm.modularize, model, X)
    assert len(model) == 1
    assert "forward" not in vars(model)


def test_nothing_to_do_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no call of a functional norm .*none is made"):
        powernorm.modularize(nn.Linear(WIDTH, WIDTH), X)
    with pytest.raises(InputError, match="norm_call0: instance_norm at test_modularizing"):
        powernorm.modularize(Calls(lambda _, x: F.instance_norm(x)), X)
    refuses("compiled already", powernorm.modularize, torch.compile(Calls(affine)), X)


@pytest.mark.parametrize("whole", [True, False])
def test_checkpointed_modules_work_and_checkpointed_functions_are_refused(whole: bool) -> None:
    """Else the repetition in the backward calls the function in place of the new norm."""
    linear = nn.Linear(WIDTH, WIDTH)
    inner = Calls(lambda _, x: linear(norm(x)))
    if whole:
        model = Calls(lambda m, x: checkpoint(m.inner, x, use_reentrant=False))
        model.inner = inner
    else:
        model = Calls(lambda _, x: checkpoint(lambda x: linear(norm(x)), x, use_reentrant=False))
    powernorm.modularize(model, X)
    powernorm.swap(model, "bn")
    if whole:
        model(X).sum().backward()
        assert linear.weight.grad is not None
    else:
        refuses("inside a checkpointed function", model, X)


def test_a_shared_module_is_changed_once() -> None:
    shared = Calls(lambda _, x: norm(x))
    model = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared)
    before = copy.deepcopy(model)
    powernorm.modularize(model, X)
    assert torch.equal(model(X), before(X))
    assert powernorm.swap(model, "rbn").plan.rows[0].shared == ("2.norm_call0",)
