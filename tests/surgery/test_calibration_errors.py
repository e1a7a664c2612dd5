"""Models that cannot be calibrated: one error each, and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diagnosis.models import Batch, Masked, batches
from powernorm.errors import InputError
from powernorm.norms import BatchNorm
from powernorm.surgery.calibration import calibrate
from refusals import refuses

WAYS = ("layer_by_layer", "one_pass")


def padded() -> list[Batch]:
    return [(x, torch.ones(x.shape[:2], dtype=torch.bool)) for x, _ in batches()]


def poisoned() -> list[Batch]:
    x = batches(1)[0][0].clone()
    x[0, 0, 0] = float("nan")
    return [*batches(), (x, None)]


def only_lower(model: nn.Module, batch: Batch) -> None:
    model.get_submodule("lower")(batch[0])


@pytest.mark.filterwarnings("ignore:padding_mask of shape")  # said once a process
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("data", "forward", "options", "message"),
    [
        ([], None, {}, "batches is empty"),
        (batches(), only_lower, {}, "no batch went through 'upper' of the 2"),
        (padded(), None, {}, "no valid token for layer 'lower'"),
        (poisoned(), None, {}, "layer 'lower' are not finite in 6 of its 6"),
        (batches(), None, {"names": "head.*"}, r"'head\.\*', which matches no .*'lower', 'upper'"),
        (batches(), None, {"names": []}, "names is empty"),
    ],
    ids=["empty", "uncalled", "padding", "nonfinite", "glob", "no-names"],
)
def test_bad_input(data: Any, forward: Any, options: Any, message: str, way: Any) -> None:
    model = Masked("bn")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refuses(message, calibrate, model, data, forward, way=way, **options)
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name], tensor), name


@pytest.mark.parametrize("way", WAYS)
def test_norms_of_torch_that_no_batch_goes_through_keep_their_statistics(way: Any) -> None:
    model = nn.ModuleDict({name: nn.BatchNorm1d(4) for name in ("audio", "text", "head")})
    nn.init.constant_(model["audio"].running_mean, 7.0)
    done: list[tuple[int, int]] = []

    def run(model: nn.Module, x: torch.Tensor) -> None:
        model.get_submodule("head")(model.get_submodule("text")(x))

    data = [torch.randn(8, 4) for _ in range(3)]
    options: Any = {"way": way, "on_progress": lambda *step: done.append(step)}
    rows = calibrate(model, data, run, **options).rows
    assert {row.name: (row.action, row.reason) for row in rows} == {
        "text": ("calibrate", ""),
        "head": ("calibrate", ""),
        "audio": ("keep", "no batch went through it"),
    }
    assert (model["audio"].running_mean == 7).all()
    assert not model["text"].running_mean.eq(0).any()
    assert done[-1] == ((6, 6) if way == "layer_by_layer" else (3, 3))
    with pytest.raises(InputError, match="no batch went through 'audio' of the 1"):
        calibrate(model, data, run, names="audio", way=way)
    refuses(r"no batch went through .* of the 3", calibrate, model, data, lambda *_: None, way=way)


def test_bad_way_generator_and_model() -> None:
    refuses("way is 'twice'", calibrate, Masked("bn"), batches(), way="twice")
    with pytest.raises(InputError, match="_iterator, which can be iterated over only once"):
        calibrate(Masked("bn"), iter(batches()))
    with pytest.raises(InputError, match="Linear has no layer with batch statistics"):
        calibrate(nn.Linear(2, 2), [torch.ones(1, 2)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model is None, expected a torch.nn.Module"),
        ({"batches": None}, "batches is None, expected a DataLoader"),
        ({"batches": 5}, "batches is 5, expected"),
        ({"batches": "abc"}, "batches is 'abc', expected"),
        ({"batches": {"x": torch.ones(2)}}, r"batches is a dict, .*: \[batch\]"),
        ({"names": [3]}, "names has 3, expected globs"),
        ({"names": 3}, "names is 3, expected a glob"),
        ({"forward": 3}, "forward is 3, expected a function or None"),
        ({"on_progress": 3}, "on_progress is 3, expected a function or None"),
    ],
)
def test_arguments_of_no_such_type(arguments: dict[str, Any], message: str, way: Any) -> None:
    given = {"model": Masked("bn"), "batches": batches()} | arguments
    refuses(message, calibrate, **given, way=way)


def test_looking_at_the_batches_draws_no_random_numbers() -> None:
    """`iter(loader)` draws a seed for its workers."""
    loader = DataLoader(TensorDataset(batches()[0][0]), batch_size=2)
    torch.manual_seed(0)
    calibrate(Masked("bn"), loader, lambda model, batch: model(batch[0], None))
    drawn = torch.rand(())
    torch.manual_seed(0)
    Masked("bn")
    assert torch.equal(drawn, torch.rand(()))


def test_too_large_for_the_buffer_is_not_finite() -> None:
    norm = BatchNorm(2)
    with pytest.raises(InputError, match="not finite in 1 of its 2"):
        calibrate(norm, [torch.tensor([[1e30, 1.0], [-1e30, 2.0]])])
