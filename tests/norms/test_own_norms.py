"""Norms of users: registered, imported as `module:Class`, given by installed packages."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from covering import some_default
from norms.own_modules import PLAIN, Bounded, Centered, Halved, Mixed
from powernorm.errors import InputError
from powernorm.norms import Norm, check_norm_options, norm_info
from powernorm.norms.registry import REGISTERED, short_name
from refusals import refuses

MASK = torch.tensor([[False] * 5, [False, False, False, True, True]])


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with patch.dict(REGISTERED, clear=True):
        yield


def build(layer: Callable[..., nn.Module], num_features: int = 8, **options: Any) -> Norm:
    REGISTERED.pop("mine", None)
    powernorm.register_norm("mine", layer)
    return powernorm.build_norm("mine", num_features, **options)


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))


def spoiled(x: Tensor) -> Tensor:
    """With other values where there is padding."""
    return torch.where(MASK.unsqueeze(-1), 1e3, x)


@pytest.mark.parametrize("layer", PLAIN)
def test_a_plain_module_is_under_the_contract(layer: type[nn.Module]) -> None:
    x, residual = tokens(), tokens(1)
    expected = layer(8)(x + residual)
    y, total = build(layer)(x, None, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, expected)
    moved = build(layer, feature_dim=1)(x.mT, None, residual.mT)
    torch.testing.assert_close(moved[0].mT, expected)
    assert build(layer).eval()(x.bfloat16()).dtype == torch.bfloat16
    refuses(f"{layer.__name__} was built for 8 features", build(layer), torch.randn(2, 5, 7))


@pytest.mark.parametrize("layer", [Centered, Mixed])
def test_the_mask_reaches_who_takes_it(layer: type[nn.Module]) -> None:
    """By argument or from a scope, and norms of this library inside."""
    x = tokens()
    y = build(layer)(x, MASK)
    with powernorm.padding_mask(MASK):
        for norm, given in (
            (build(layer), x),
            (build(layer), spoiled(x)),
            (build(layer, feature_dim=1), spoiled(x).mT),
        ):
            out = norm(given)
            out = out.mT if norm.feature_dim == 1 else out
            torch.testing.assert_close(out[~MASK], y[~MASK])
    assert not torch.allclose(build(layer)(x)[~MASK], y[~MASK])


def test_the_mask_is_not_handed_to_who_does_not_take_it() -> None:
    norm = build(Bounded)
    torch.testing.assert_close(norm(tokens(), MASK), Bounded(8)(tokens()))
    assert not norm.reads_mask


@pytest.mark.parametrize("layer", [Centered, Mixed])
def test_a_repeated_forward_sees_the_mask_of_the_first(
    layer: type[nn.Module],
) -> None:
    """The scope is closed when activation checkpointing runs the forward again."""

    def gradient(call: Callable[[Norm, Tensor], Tensor]) -> Tensor:
        x = spoiled(tokens()).requires_grad_()
        with powernorm.padding_mask(MASK):
            y = call(build(layer), x)
        (y.square() * (~MASK).unsqueeze(-1)).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(lambda norm, x: norm(x))
    found = gradient(lambda norm, x: checkpoint(norm, x, use_reentrant=False))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layer", some_default(PLAIN, PLAIN[0]))
def test_compiled_is_eager(layer: type[nn.Module]) -> None:
    torch._dynamo.reset()
    eager = build(layer)
    norm = copy.deepcopy(eager)
    compiled = torch.compile(norm, fullgraph=True)
    for given in (MASK, None):  # None: of the scope
        with powernorm.padding_mask(~MASK if given is not None else MASK):
            found = [one(tokens(), given, tokens(1)) for one in (eager, compiled)]
        torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(norm.state_dict(), eager.state_dict())


@pytest.mark.parametrize("layer", PLAIN)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_copies_and_checkpoints(layer: type[nn.Module], way: Callable[[Norm], Norm]) -> None:
    norm = build(layer)
    with powernorm.padding_mask(MASK), torch.no_grad():
        norm(tokens())
    twin = way(norm)
    assert list(twin.state_dict()) == [f"layer.{name}" for name in layer(8).state_dict()]
    fresh = build(layer)
    fresh.load_state_dict(norm.state_dict())
    for one in (twin, fresh):
        torch.testing.assert_close(one.eval()(tokens()), norm.eval()(tokens()))
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert not torch.equal(next(twin.parameters()), next(norm.parameters()))


@pytest.mark.parametrize("layer", [*PLAIN, Halved])
def test_options_of_every_norm_need_not_be_taken(layer: type[nn.Module]) -> None:
    norm = build(layer, device="cpu", dtype=torch.float64, feature_dim=1)
    assert norm(tokens().mT.double()).dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in norm.parameters())
    on_meta = build(layer, device="meta")
    assert all(tensor.is_meta for tensor in (*on_meta.parameters(), *on_meta.buffers()))


def test_options_of_every_norm_are_handed_to_who_takes_them() -> None:
    class Along(nn.Module):
        def __init__(
            self, size: int, *, feature_dim: int = 1, dtype: torch.dtype | None = None
        ) -> None:
            super().__init__()
            self.dim = feature_dim
            self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[self.dim] == 8
            return x - x.mean(self.dim, keepdim=True)

    norm = build(Along, feature_dim=1, dtype=torch.float64)
    x = torch.randn(2, 8, 5)
    torch.testing.assert_close(norm(x), x - x.mean(1, keepdim=True))
    assert norm.weight.dtype == torch.float64
    # Its own default is another dimension than that of all norms.
    torch.testing.assert_close(build(Along)(x.mT), (x - x.mean(1, keepdim=True)).mT)


def test_a_norm_of_the_contract_is_used_as_it_is() -> None:
    norm = build(Halved, divisor=4.0)
    assert type(norm) is Halved
    torch.testing.assert_close(norm(tokens()), tokens() / 4)
    assert short_name(norm) == "mine"
    assert short_name(Halved(8)) == "mine"


def test_presets_are_options_that_the_name_stands_for() -> None:
    powernorm.register_norm("steep", Bounded, presets={"slope": 9.0})
    powernorm.register_norm("flat", Bounded)
    norms = [powernorm.build_norm("steep", 8), powernorm.build_norm("steep", 8, slope=1)]
    norms.append(powernorm.build_norm("flat", (8,)))
    assert [norm.layer.slope for norm in norms] == [9.0, 1, 2.0]
    assert [short_name(norm) for norm in norms] == ["steep", "steep", "flat"]
    assert norm_info("steep").title == "Bounded"


def test_the_same_class_may_be_registered_again() -> None:
    """As in a notebook, where the cell that defines it is run again."""
    cell = "import torch\nclass Cell(torch.nn.LayerNorm): pass\n"
    for _ in range(2):
        names: dict[str, Any] = {"__name__": "notebook"}
        exec(cell, names)
        powernorm.register_norm("cell", names["Cell"])
        assert norm_info("cell").layer is names["Cell"]
    refuses("the name 'cell' is taken by Cell", powernorm.register_norm, "cell", Bounded)


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("bn", Bounded, "the name 'bn' is taken by BatchNorm"),
        ("BN", Bounded, "the name 'BN' is taken by BatchNorm"),
        ("a,b", Bounded, "name is 'a,b', expected letters"),
        ("a=b", Bounded, "name is 'a=b', expected letters"),
        ("a:b", Bounded, "name is 'a:b', expected letters"),
        ("../up", Bounded, "name is '../up', expected letters"),
        ("", Bounded, "name is '', expected letters"),
        (3, Bounded, "name is 3, expected letters"),
        ("mine", "Bounded", "the layer of 'mine' is 'Bounded', expected a class"),
        ("mine", dict, "the layer of 'mine' is dict, expected a class"),
        ("mine", nn.LayerNorm(8), "is a LayerNorm that is built already"),
        ("mine", lambda: nn.LayerNorm(8), "the first has to be num_features"),
        ("mine", lambda *, size: nn.LayerNorm(size), "the first has to be num_features"),
    ],
)
def test_what_cannot_be_registered(name: Any, layer: Any, message: str) -> None:
    refuses(message, powernorm.register_norm, name, layer)
    assert not REGISTERED


def test_wrong_presets() -> None:
    with pytest.raises(InputError, match=r"Bounded \(mine\) has no option 'slop', it takes slope"):
        powernorm.register_norm("mine", Bounded, presets={"slop": 1.0})
    with pytest.raises(InputError, match="presets is 3, expected a mapping of options"):
        powernorm.register_norm("mine", Bounded, presets=3)  # type: ignore[arg-type]


def test_options_are_checked() -> None:
    powernorm.register_norm("mine", Bounded)
    check_norm_options("mine", {"slope": 1, "shift": 2, "device": "cpu"})
    for options, message in (
        ({"slop": 1}, "has no option 'slop', it takes slope, shift"),
        ({"slope": "x"}, r"option slope of mine is 'x' \(str\), expected float"),
        ({"shift": "x"}, r"option shift of mine is 'x' \(str\), expected int \| float \| None"),
    ):
        refuses(message, check_norm_options, "mine", options)
    powernorm.register_norm("any", lambda size, **rest: Bounded(size, **rest))
    assert powernorm.build_norm("any", 8, slope=3.0).layer.slope == 3.0


def needs_groups(size: int, groups: int) -> nn.Module:
    return nn.GroupNorm(groups, size)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (needs_groups, r"needs_groups \(mine\) also needs groups: give it as an option"),
        (lambda size: size, "gave a int, expected a torch.nn.Module"),
        (lambda size: nn.LayerNorm(size // 0), "cannot be built for 8 features: ZeroDivision"),
        (
            lambda size: powernorm.LayerNorm(size // 2),
            "mine returned a norm of 4 features, expected 8",
        ),
    ],
)
def test_what_cannot_be_built(layer: Any, message: str) -> None:
    refuses(message, build, layer)


def test_a_missing_argument_may_come_as_an_option() -> None:
    assert build(needs_groups, groups=2).layer.num_groups == 2
    assert build(partial(needs_groups, groups=4)).layer.num_groups == 4


class Wrong(nn.Module):
    def __init__(self, size: int, way: str) -> None:
        super().__init__()
        self.size, self.way = size, way

    def forward(self, x: Tensor) -> Any:
        return (x, x) if self.way == "tuple" else x[..., 1:]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("tuple", r"Wrong returned a tuple for an input of shape \(2, 5, 8\)"),
        ("shape", r"Wrong returned the shape \(2, 5, 7\) for an input of shape \(2, 5, 8\)"),
    ],
)
def test_another_output_is_refused_at_first_use(way: str, message: str) -> None:
    refuses(message, build(Wrong, way=way), tokens())


def test_a_module_that_says_so_is_static() -> None:
    norm = build(Centered)
    norm(tokens())
    with torch.no_grad():
        norm.weight.uniform_()
    scale, shift = norm.eval().affine()
    torch.testing.assert_close(norm(tokens(1)).double(), scale * tokens(1) + shift)
    wide = build(Centered, feature_dim=1)
    wide.load_state_dict(norm.state_dict())
    torch.testing.assert_close(wide.affine(), (scale, shift))
    assert not build(Bounded).is_static
    refuses("Bounded depends on each token in evaluation", build(Bounded).affine)


def test_a_module_that_says_so_wrongly_is_caught() -> None:
    class Lying(Bounded):
        is_static = True

    refuses("Lying declares itself static, but", build(Lying).affine)


def test_reset_and_repr() -> None:
    norm = build(Mixed)
    norm(tokens())
    norm.reset_parameters()
    torch.testing.assert_close(norm.state_dict(), build(Mixed).state_dict())
    assert "8\n" in repr(norm)
    assert "Mixed(" in repr(norm)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module of the user's."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "layers.py").write_text(
        "import torch\n"
        "class Inner(torch.nn.LayerNorm): pass\n"
        "class Names:\n    Nested = Inner\n"
        "number = 3\n"
    )
    (package / "broken.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        del sys.modules[name]


@pytest.mark.usefixtures("home")
def test_a_class_is_imported_by_its_name() -> None:
    for name in ("own_package.layers:Inner", "own_package.layers:Names.Nested"):
        norm = powernorm.build_norm(name, 8, eps=0.25)
        assert type(norm.layer).__name__ == "Inner"
        assert norm.layer.eps == norm.eps == 0.25
        assert short_name(norm) == name
    assert norm_info("own_package.layers:Inner").title == "Inner"
    assert not REGISTERED


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_package.layer:Inner", "No module named 'own_package.layer'.*start in the folder"),
        ("own_package.layers:Iner", "has no attribute 'Iner'"),
        ("own_package.broken:Inner", "No module named 'no_such_dependency'"),
        ("own_package.layers:number", "is 3, expected a class of torch.nn.Module"),
        ("own_package/layers.py:Inner", "is not of the form my.module:MyNorm"),
        ("layers.py:Inner", "names a file: name its module, layers:Inner"),
        ("a:b:c", "is not of the form my.module:MyNorm"),
        (":Inner", "is not of the form my.module:MyNorm"),
    ],
)
def test_what_cannot_be_imported(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        norm_info(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def install(home: Path, package: str, name: str, value: str) -> None:
    folder = home / "installed" / f"{package}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[powernorm.norms]\n{name} = {value}\n")


def test_a_package_makes_its_norms_known(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(home, "theirs", "theirs", "own_package.layers:Inner")
    install(home, "broken", "broken", "own_package.layers:Nothing")
    monkeypatch.syspath_prepend(home / "installed")
    monkeypatch.syspath_prepend(home)
    norm = powernorm.build_norm("theirs", 8)
    assert (type(norm.layer).__name__, short_name(norm)) == ("Inner", "theirs")
    refuses("'broken' of the package broken cannot be loaded", norm_info, "broken")
    refuses(r"known are .*, theirs, broken; did you mean 'theirs'", norm_info, "thers")
    install(home, "another", "theirs", "own_package.layers:Names.Nested")
    REGISTERED.clear()
    refuses(r"is defined by several packages \(another, theirs\)", norm_info, "theirs")


def test_a_known_name_costs_no_look_at_the_installed_packages() -> None:
    powernorm.register_norm("mine", Bounded)
    with patch.object(importlib.metadata, "entry_points", side_effect=AssertionError):
        powernorm.build_norm("bn", 8), powernorm.build_norm("mine", 8)


@pytest.mark.parametrize("name", [None, 3, ["bn"]])
def test_a_name_is_a_text(name: Any) -> None:
    refuses("expected a short name, as 'rbn'", norm_info, name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("layernorm", "ln"),
        ("Batch-Norm", "bn"),
        ("RMSNorm", "rms"),
        ("power_norm", "pn"),
        ("LN", "ln"),
    ],
)
def test_a_layers_full_name_suggests_its_short_one(name: str, meant: str) -> None:
    refuses(rf"unknown norm .*; did you mean '{meant}'\?", norm_info, name)
