"""Folded models in files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import powernorm
from covering import some_default
from powernorm.errors import InputError
from powernorm.surgery.storage import read_folded
from surgery.foreign_models import FAMILIES, run
from surgery.static_models import settle, static_family

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    "name",
    some_default(
        ["bert", "gpt2", "language-model", "torch-encoder", "bart", "t5"],
        "gpt2",
        "torch-encoder",
        "t5",
    ),
)
def test_round_trip(name: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    model, inputs = static_family(name)
    report = powernorm.fold(model, inputs)
    path = tmp_path / f"model{suffix}"
    report.save(path, {"note": "mine"})
    assert read_folded(path).settings == {"note": "mine"}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    fresh, _ = FAMILIES[name]()  # the original architecture, with LayerNorm
    loaded = powernorm.load_folded(fresh, path)
    assert loaded is fresh
    assert not loaded.training
    assert torch.equal(run(loaded, inputs), run(model, inputs))
    shared = [
        {id(p) for p in m.parameters()} == {id(p) for _, p in m.named_parameters()}
        for m in (loaded, model)
    ]
    assert shared == [True, True]
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_loads_into_a_swapped_architecture(tmp_path: Path) -> None:
    model, inputs = static_family("bert")
    powernorm.fold(model, inputs).save(tmp_path / "model.pt")
    fresh, _ = FAMILIES["bert"]()
    powernorm.swap(fresh, to="rbn")
    powernorm.load_folded(fresh, tmp_path / "model.pt")
    assert torch.equal(run(fresh, inputs), run(model, inputs))


def test_folded_state_dict_is_a_plain_one(tmp_path: Path) -> None:
    model, inputs = static_family("gpt2")
    report = powernorm.fold(model, inputs)
    report.save(tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"]
    assert state.keys() == model.state_dict().keys()
    assert not [name for name in state if "running" in name or "ln_" in name]


def small() -> nn.Module:
    return nn.Sequential(powernorm.BatchNorm(4), nn.Linear(4, 3, bias=False))


def test_another_architecture_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    powernorm.fold(settle(small()), torch.randn(2, 4)).save(path)
    for other, match in (
        (nn.Sequential(powernorm.BatchNorm(4), nn.Linear(4, 5, bias=False)), r"\(3, 4\) there"),
        (nn.Sequential(nn.Linear(4, 3)), "no module"),
        (nn.Sequential(*small(), nn.Linear(3, 3)), r"the file lacks 2\.bias"),
    ):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(InputError, match=match):
            powernorm.load_folded(other, path)
        assert other.state_dict().keys() == before.keys()
        assert isinstance(other[0], powernorm.BatchNorm | nn.Linear)


@pytest.mark.parametrize(("saved", "present"), [(2, 0), (0, 2)])
def test_a_count_of_nonfinite_batches_may_be_in_one_of_them_only(
    saved: int, present: int, tmp_path: Path
) -> None:
    def build(count: int) -> nn.Sequential:
        model = nn.Sequential(*small(), powernorm.PowerNorm(3))  # the last one stays
        model[2].num_nonfinite_batches.fill_(count)
        return model

    path = tmp_path / "model.pt"
    powernorm.fold(settle(build(saved)), torch.randn(2, 4)).save(path)
    loaded = powernorm.load_folded(build(present), path)
    assert int(loaded[2].num_nonfinite_batches) == saved


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(InputError, match="is no file"):
        powernorm.load_folded(small(), path)
    path.write_bytes(b"something else")
    with pytest.raises(InputError, match=r"is not a folded model|is damaged"):
        powernorm.load_folded(small(), path)
    path = tmp_path / "plain.pt"
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(InputError, match="is not a folded model"):
        powernorm.load_folded(small(), path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    report = powernorm.fold(settle(small()), torch.randn(2, 4))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        report.save(blocked / "model.pt")
