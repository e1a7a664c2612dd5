from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.training.tiny_training import compare
from safetensors.torch import load_file, save_file
from tiny_translation import tiny_translation, write_pairs
from torch import Tensor

import powernorm
from powernorm.errors import InputError
from powernorm_lab.engine.averaging import (
    Snapshots,
    average_weights,
    read_weights,
    step_of,
    write_weights,
)
from powernorm_lab.runs import RunResult
from powernorm_lab.tasks.trained_models import load_trained, run_data
from powernorm_lab.training.training import forward_features


def test_means_are_taken_in_float64_and_counters_are_those_of_the_last() -> None:
    values = [1e8, 1.0, -1e8, 3.0]  # in float32 the ones would be lost
    checkpoints = [
        {
            "weight": torch.tensor([value, 2.0]),
            "half": torch.tensor([value / 1e6], dtype=torch.bfloat16),
            "count": torch.tensor(number),
            "flag": torch.tensor(number == 0),
        }
        for number, value in enumerate(values)
    ]
    mean = average_weights(checkpoints)
    assert mean["weight"].dtype == torch.float32
    assert mean["weight"].tolist() == [1.0, 2.0]
    assert mean["half"].dtype == torch.bfloat16
    assert int(mean["count"]) == 3
    assert not bool(mean["flag"])
    assert average_weights(checkpoints[:1])["weight"].tolist() == [1e8, 2.0]


def test_snapshots_keep_the_last_ones_by_number(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "new" / "folder", 3)
    with pytest.raises(InputError, match=r"no step-N\.safetensors"):
        snapshots.average()
    for step in (9, 10, 99, 100, 101):
        snapshots.keep(step, {"weight": torch.full((2,), float(step))})
    assert [path.name for path in snapshots.paths()] == [
        f"step-{step}.safetensors" for step in (99, 100, 101)
    ]
    assert snapshots.average()["weight"].tolist() == [100.0, 100.0]
    (tmp_path / "new" / "folder" / "average.safetensors").touch()
    (tmp_path / "new" / "folder" / "step-x.safetensors").touch()
    snapshots.forget_after(100)
    assert [step_of(path) for path in snapshots.paths()] == [99, 100]


def test_tensors_that_share_memory_are_stored_once_and_come_back_as_one(tmp_path: Path) -> None:
    table = torch.randn(40, 8)
    path = tmp_path / "weights.safetensors"
    write_weights(path, {"one": table, "two": table, "view": table[:0], "three": table.clone()})
    assert set(load_file(path)) == {"one", "view", "three"}
    back = read_weights(path)
    assert back["two"] is back["one"]
    assert torch.equal(back["two"], table)
    assert back["three"] is not back["one"]
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x10" + bytes(20)])
def test_damaged_weights_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-4.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"step-4.safetensors (holds no weights|is damaged)"):
        read_weights(path)
    save_file({"weight": torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"step-4.safetensors (holds no weights|is damaged)"):
        read_weights(path)
    with pytest.raises(InputError, match=r"missing.safetensors holds no weights"):
        read_weights(tmp_path / "missing.safetensors")


def trained(folder: Path, norm: str, **training: Any) -> tuple[Path, RunResult]:
    config = tiny_translation(
        write_pairs(folder / "pairs"),
        norms=(norm,),
        training={"max_steps": 16, "average_checkpoints": 3, **training},
    )
    (run,) = compare(config, folder / norm).runs
    return folder / norm / f"{norm}-pre-seed0", run


def test_average_of_a_layer_norm_model_is_scored(tmp_path: Path) -> None:
    folder, run = trained(tmp_path, "ln")
    assert run.scored == "average of the last 3 checkpoints"
    checkpoints = folder / "checkpoints"
    snapshots = [load_file(checkpoints / f"step-{step}.safetensors") for step in (8, 12, 16)]
    assert {path.name for path in checkpoints.iterdir()} == {
        *("last.ckpt", "best.ckpt", "average.safetensors"),
        *(f"step-{step}.safetensors" for step in (8, 12, 16)),
    }
    stored = load_file(checkpoints / "average.safetensors")
    # One table for source, target and output.
    assert "model.source_embedding.weight" in stored
    assert not {"model.target_embedding.weight", "model.head.weight"} & stored.keys()
    for name, tensor in stored.items():
        mean: Tensor = sum(weights[name].double() for weights in snapshots) / 3  # type: ignore[assignment]
        assert torch.equal(tensor, mean.to(tensor.dtype)), name
    model = load_trained(folder).model
    assert model.head.weight is model.source_embedding.weight
    assert torch.equal(model.head.weight, stored["model.source_embedding.weight"])


def test_the_average_of_the_last_one_is_the_last(tmp_path: Path) -> None:
    folder, run = trained(tmp_path, "ln", average_checkpoints=1)
    assert run.scored == "average of the last 1 checkpoints"
    last = load_file(folder / "checkpoints" / "step-16.safetensors")
    average = load_file(folder / "checkpoints" / "average.safetensors")
    assert all(torch.equal(average[name], last[name]) for name in last)
    (folder / "checkpoints" / "average.safetensors").unlink()
    with pytest.raises(InputError, match=r"average\.safetensors .* is missing: .*best\.ckpt"):
        load_trained(folder)
    assert load_trained(folder / "checkpoints" / "best.ckpt").step


@pytest.mark.parametrize(
    "norm",
    [
        "bn",
        pytest.param("pn", marks=pytest.mark.slow),
        pytest.param("mabn", marks=pytest.mark.slow),
    ],
)
def test_statistics_follow_the_declared_rule(tmp_path: Path, norm: str) -> None:
    folder, run = trained(tmp_path / "a", norm, average_statistics="average")
    assert run.scored == "average of the last 3 checkpoints, running statistics averaged"
    averaged = read_weights(folder / "checkpoints" / "average.safetensors")
    mean = Snapshots(folder / "checkpoints", 3).average()
    for name, tensor in mean.items():
        assert torch.equal(averaged[name], tensor), name

    folder, run = trained(tmp_path / "r", norm, recalibration_batches=5)
    # PowerNorm and MABN use their running statistics in training, so that these are kept.
    done = "recalibrated" if norm == "bn" else "averaged"
    assert run.scored == f"average of the last 3 checkpoints, running statistics {done}"
    got = load_trained(folder)
    own = load_trained(folder / "checkpoints" / "step-16.safetensors").model
    own.load_state_dict({name.removeprefix("model."): mean[name] for name in mean})
    pairs = run_data(got.settings).batches
    powernorm.calibrate(
        own, [pairs.batch(place) for place in range(5)], forward_features, way="one_pass"
    )
    statistics = [name.removeprefix("model.") for name in mean if "running_" in name]
    assert statistics
    measured = got.model.state_dict()
    moved = [not torch.equal(measured[name], averaged[f"model.{name}"]) for name in statistics]
    assert any(moved) == (norm == "bn")
    for name, tensor in own.state_dict().items():
        assert torch.equal(got.model.state_dict()[name], tensor), name
    assert run.tid is not None
