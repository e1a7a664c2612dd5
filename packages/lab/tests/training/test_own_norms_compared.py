"""Comparisons with custom norms: settings, folders, resuming, initial weights."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import Configure, compare
from torch import Tensor, nn

import powernorm
from norms.own_modules import PLAIN
from powernorm.errors import InputError
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.stopping import Stop
from powernorm_lab.recipes import recipe
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.image.task import ImageTask
from powernorm_lab.tasks.lm.settings import LanguageModelSettings
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.trained_models import load_trained

pytestmark = pytest.mark.usefixtures("drawn_norm")
OWN = tuple(f"norms.own_modules:{layer.__name__}" for layer in PLAIN)


def weights(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = load_trained(folder).model.state_dict()
    return state


def test_own_norms_beside_ours(configure: Configure, tmp_path: Path) -> None:
    names = ("ln", *OWN, "drawn")
    config = configure(norms=names, norm_options={OWN[0]: {"slope": 3.0}})
    results = compare(config, tmp_path)
    assert [(run.norm, run.status) for run in results.runs] == [
        (name, "finished") for name in names
    ]
    folder = tmp_path / "norms.own_modules+Bounded-pre-seed0"
    assert [run.folder for run in results.runs][1] == folder.name
    settings = json.loads((folder / "config.json").read_text())
    assert (settings["norm"], settings["norm_options"]) == (OWN[0], {"slope": 3.0})
    with (folder / "norms.csv").open(newline="") as file:
        assert {row["norm"] for row in csv.DictReader(file)} == {OWN[0]}
    assert load_trained(folder).model.final_norm.layer.slope == 3.0
    centered = weights(tmp_path / "norms.own_modules+Centered-pre-seed0")
    assert centered["final_norm.layer.mean"].any()
    # Only Mixed has batch statistics that the library recognizes.
    assert [run.tid is not None for run in results.runs] == [False, False, False, True, False]


def test_equal_seeds_begin_with_equal_weights(configure: Configure, tmp_path: Path) -> None:
    """Weights of the norm depend only on the seed, all others are the same for any norm."""
    config = configure(norms=("drawn",))
    encoded = task_of(config).encode(config)

    def begin(seed: int, norm: str = "drawn") -> dict[str, Tensor]:
        run = Run(
            norm=norm,
            seed=seed,
            folder=tmp_path,
            device=torch.device("cpu"),
            settings=config,
            data=encoded,
            num_steps=None,
            norm_options={},
            lease=None,
            stop=Stop(),
            listener=print,
            baselines=[Baseline(name="unigram", metrics={"valid_loss": 9.0})],
        )
        task = task_of(config)
        model = run.build(lambda: task.build(config, run.norm, task.sizes(encoded), seed))
        return {k: v.clone() for k, v in model.state_dict().items()}

    torch.manual_seed(1)
    first = begin(0)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    torch.testing.assert_close(begin(0), first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
    other = begin(1)
    assert not torch.equal(other["final_norm.layer.scale"], first["final_norm.layer.scale"])
    assert first["final_norm.layer.gate.bias"].any()  # initialized by its constructor
    ln = begin(0, "ln")
    assert "head.weight" in ln
    for key in first.keys() & ln.keys():
        torch.testing.assert_close(first[key], ln[key], rtol=0, atol=0)


def test_norms_of_images_look_along_the_channels() -> None:
    config = override(recipe("image", "smoke"), [f"norms={OWN[0]}"])
    model = ImageTask().build(config, OWN[0], (1, 28, 10), 0)
    norms = [part for part in model.modules() if isinstance(part, powernorm.Norm)]
    assert {norm.feature_dim for norm in norms} == {1}
    assert model(torch.randn(2, 1, 28, 28)).isfinite().all()


def test_options_by_dotted_keys() -> None:
    base = LanguageModelSettings(preset="test")
    changed = override(base, [f"norm_options.{OWN[0]}.slope=3", "norm_options.my.norm.k=none"])
    assert changed.norm_options == {OWN[0]: {"slope": 3}, "my.norm": {"k": None}}
    with pytest.raises(InputError, match=r"write norm_options\.NORM\.OPTION=value"):
        override(base, [f"norm_options.{OWN[0]}=3"])


class Narrowed(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., 1:]


class Unruly(powernorm.Norm):
    """A norm that violates the contract."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, 1e-5)

    def normalize(self, x: Any, mask: Any, residual: Any, /) -> Any:
        del x, mask, residual


class Demanding(nn.LayerNorm):
    """A norm that cannot be tested on a few tokens."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 12
        return super().forward(x)


def test_what_is_wrong_shows_before_anything_is_trained(
    configure: Configure, tmp_path: Path
) -> None:
    powernorm.register_norm("narrowed", Narrowed)
    powernorm.register_norm("unruly", Unruly)
    powernorm.register_norm("demanding", Demanding)
    wrong: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("narrowed", {}, r"Narrowed returned the shape \(2, 3, 15\) for an input of shape"),
        ("unruly", {}, "Unruly returned a NoneType"),
        (OWN[0], {"slop": 1.0}, "has no option 'slop', it takes slope, shift"),
        (OWN[0], {"slope": "x"}, "option slope .* is 'x'"),
        (OWN[0], {"feature_dim": 1}, "feature_dim=1: the model defines the dimension"),
        ("norms.own_modules:Missing", {}, "has no attribute 'Missing'"),
        ("not-registered", {}, "unknown norm 'not-registered'.*my.module:MyNorm"),
    )
    for name, options, message in wrong:
        with pytest.raises(InputError, match=message):
            compare(configure(norms=("ln", name), norm_options={name: options}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    before = torch.get_rng_state()
    check_norms(configure(norms=("demanding", "drawn")))
    assert torch.equal(torch.get_rng_state(), before)
