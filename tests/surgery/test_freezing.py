from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from diagnosis.models import BATCH_STATISTICS_NORMS, Masked, batches
from powernorm.diagnosis import NormMonitor
from powernorm.errors import InputError
from powernorm.norms import BatchNorm, build_norm
from powernorm.surgery.calibration import calibrate
from powernorm.surgery.freezing import (
    StatisticsFreezing,
    freeze_statistics,
    unfreeze_statistics,
)
from refusals import refuses


def calibrated(norm: str = "bn") -> Masked:
    torch.manual_seed(0)
    model = Masked(norm)
    model.dropout.p = 0.0
    calibrate(model, batches())
    return model


def train(model: nn.Module, step: int = 0) -> None:
    x, mask = batches(seed=step)[step % 4]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(x, mask).square().sum().backward()
    optimizer.step()


def statistics(model: nn.Module, part: str = "") -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.startswith(part)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def stack(num_layers: int = 4) -> nn.Sequential:
    model = nn.Sequential(*(BatchNorm(6) for _ in range(num_layers)))
    model(torch.randn(8, 6))
    return model


@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_frozen_trains_as_it_evaluates_and_learns_on(norm: str) -> None:
    model = calibrated(norm)
    assert freeze_statistics(model) == ["lower", "upper"]
    x, mask = batches()[1]
    model.train()
    in_training = model(x, mask)
    assert torch.equal(in_training, model.eval()(x, mask))
    model.train()
    before, weight = statistics(model), model.lower.weight.clone()
    for step in range(3):
        train(model, step)
    assert same(before, statistics(model))
    assert not torch.equal(weight, model.lower.weight)
    assert not torch.equal(model.lower.bias, torch.zeros(6))


def test_gradient_is_that_of_a_constant_map() -> None:
    model = nn.Sequential(BatchNorm(3, dtype=torch.float64))
    calibrate(model, [torch.randn(30, 3, dtype=torch.float64) * 2 + 1])
    freeze_statistics(model)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(7, 3, dtype=torch.float64)
    model(x).backward(cotangent)
    scale, _ = model[0].affine()
    torch.testing.assert_close(x.grad, cotangent * scale)


def test_survives_train_copy_pickle_and_reload() -> None:
    model = calibrated()
    freeze_statistics(model, "lower")
    assert "frozen" in repr(model.lower)
    assert "frozen" not in repr(model.upper)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    for other in copies:
        other.eval()
        other.train()
        assert other.lower.is_frozen
        assert not other.lower.training
        assert other.upper.training
        before = statistics(other, "lower")
        above = statistics(other, "upper")
        train(other)
        assert same(before, statistics(other, "lower"))
        assert not same(above, statistics(other, "upper"))
    assert "frozen" not in "".join(model.state_dict())


def test_training_step_leave_frozen_layers_alone() -> None:
    for norm in ("bn", "pn"):
        model = calibrated(norm)
        freeze_statistics(model, "lower")
        before = statistics(model, "lower")
        with powernorm.training_step(model):
            train(model)
        assert same(before, statistics(model, "lower"))


def test_penalty_leaves_frozen_layers_out() -> None:
    model = calibrated("rbn")
    x, mask = batches()[1]
    model(x, mask)
    freeze_statistics(model, "lower")
    # What was pending of the layer is dropped at once.
    only_upper = powernorm.penalty(model, "token_sum")
    assert torch.equal(only_upper, model.upper.penalty())
    freeze_statistics(model)
    model(x, mask)
    assert powernorm.penalty(model, "token_sum") == 0


def test_unfreeze_takes_the_mode_of_its_surroundings() -> None:
    model = calibrated("rbn")
    freeze_statistics(model)
    assert unfreeze_statistics(model, "upper") == ["upper"]
    assert model.upper.training
    assert not model.lower.training
    model.eval()
    freeze_statistics(model)
    assert unfreeze_statistics(model) == ["lower", "upper"]
    assert unfreeze_statistics(model) == []
    assert not model.lower.training
    model.train()
    assert model.lower.training
    before = statistics(model, "lower")
    train(model)
    assert not same(before, statistics(model, "lower"))


def test_unfreeze_after_modes_were_restored_by_hand() -> None:
    model = calibrated()
    freeze_statistics(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module, mode in modes.items():  # as Lightning does after a validation
        module.training = mode
    unfreeze_statistics(model)
    assert model.lower.training


def test_monitor_says_nothing_where_all_layers_are_frozen() -> None:
    model = calibrated()
    freeze_statistics(model)
    monitor = NormMonitor(model, every=1)
    monitor.start_step(0)
    train(model)
    assert monitor.finish_step(0) == []


def test_a_layer_alone() -> None:
    layer = stack(1)[0]
    freeze_statistics(layer)
    assert not layer.train().training
    unfreeze_statistics(layer)
    assert layer.training


def test_freezing_twice_keeps_the_mode() -> None:
    model = calibrated()
    freeze_statistics(model)
    freeze_statistics(model)
    unfreeze_statistics(model)
    assert model.lower.training


def test_globs_and_the_first_layers() -> None:
    model = stack()
    assert freeze_statistics(model, num_layers=2) == ["0", "1"]
    assert [layer.is_frozen for layer in model] == [True, True, False, False]
    unfreeze_statistics(model)
    assert freeze_statistics(model, ["[12]", "3"]) == ["1", "2", "3"]
    unfreeze_statistics(model)
    assert freeze_statistics(model, "[123]", num_layers=1) == ["1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": "x*"}, r"'x\*', which matches no layer"),
        ({"num_layers": 5}, "num_layers is 5, but there are 4 layers"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_bad_selection(arguments: Any, message: str) -> None:
    model = stack()
    refuses(message, freeze_statistics, model, **arguments)
    assert not any(layer.is_frozen for layer in model)


def test_untrained_layer_is_refused_and_nothing_is_frozen() -> None:
    model = nn.Sequential(BatchNorm(6), BatchNorm(6))
    model[0](torch.randn(8, 6))
    refuses(r"^'1': .*calibrate\(model, batches\) or train first", freeze_statistics, model)
    assert not model[0].is_frozen


def test_compiled_layer_follows() -> None:
    model = stack(1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(8, 6)
    compiled(x)
    freeze_statistics(model)
    before = statistics(model)
    assert torch.equal(compiled(x), model.eval()(x))
    assert same(before, statistics(model))


@pytest.mark.parametrize(
    ("order", "expected"),
    [("lowest_first", ["0", "1", "2", "3"]), ("highest_first", ["3", "2", "1", "0"])],
)
def test_schedule(order: Any, expected: list[str]) -> None:
    model = stack()
    freezing = StatisticsFreezing(model, start=2, every=3, order=order)
    frozen = {}
    for step in range(14):
        model.train()
        if names := freezing.step(step):
            frozen[step] = names
    assert frozen == {2: expected[:1], 5: expected[1:2], 8: expected[2:3], 11: expected[3:]}
    assert not any(layer.training for layer in model)


def test_schedule_catches_up_and_selects() -> None:
    model = stack()
    freezing = StatisticsFreezing(model, start=0, every=1, names="[13]")
    assert freezing.step(100) == ["1", "3"]
    assert freezing.step(101) == []


def test_schedule_resumes() -> None:
    model = stack()
    freezing = StatisticsFreezing(model, start=1, every=2)
    for step in range(4):
        freezing.step(step)
    resumed = nn.Sequential(*(BatchNorm(6) for _ in range(4)))
    resumed.load_state_dict(model.state_dict())
    schedule = StatisticsFreezing(resumed, start=1, every=2)
    schedule.load_state_dict(freezing.state_dict())
    assert [layer.is_frozen for layer in resumed] == [True, True, False, False]
    assert [schedule.step(step) for step in (4, 5)] == [[], ["2"]]


def test_schedule_asks_the_layers() -> None:
    model = stack(3)
    freezing = StatisticsFreezing(model, start=0, every=1)
    freezing.step(1)
    unfreeze_statistics(model, "0")
    assert freezing.state_dict() == {"frozen": ["1"]}
    freeze_statistics(model, "2")  # before its turn
    assert freezing.step(5) == ["0"]
    unfreeze_statistics(model)
    assert freezing.step(0) == ["0"]


def test_loaded_state_is_the_whole_state() -> None:
    model = stack(3)
    freezing = StatisticsFreezing(model, start=0, every=1)
    freezing.step(5)
    model.train()
    freezing.load_state_dict({"frozen": ["0"]})
    assert [layer.is_frozen for layer in model] == [True, False, False]
    assert [layer.training for layer in model] == [False, True, True]
    assert freezing.state_dict() == {"frozen": ["0"]}


def test_schedule_leaves_other_layers_alone() -> None:
    model = stack(3)
    freeze_statistics(model, "0")
    freezing = StatisticsFreezing(model, start=0, every=1, names="[12]")
    freezing.load_state_dict({"frozen": ["1"]})
    assert [layer.is_frozen for layer in model] == [True, True, False]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "StatisticsFreezing is None, expected what state_dict"),
        ({"frozen": "0"}, "has frozen='0'"),
        ({"frozen": [0]}, r"has frozen=\[0\]"),
        ({"frozen": ["0", "other"]}, "names 'other'"),
    ],
)
def test_bad_states_change_nothing(state: Any, message: str) -> None:
    model = stack(2)
    freezing = StatisticsFreezing(model, start=0, every=1)
    freeze_statistics(model, "1")
    refuses(message, freezing.load_state_dict, state)
    assert [layer.is_frozen for layer in model] == [False, True]


@pytest.mark.parametrize("step", ["x", 2.5, None, -1, True])
def test_steps_are_numbers(step: Any) -> None:
    with pytest.raises(InputError, match=r"step is .*, expected an integer of at least 0"):
        StatisticsFreezing(stack(2), start=0, every=1).step(step)


def test_models_and_names_of_no_such_type() -> None:
    for refuse in (freeze_statistics, unfreeze_statistics):
        refuses(r"model is None, expected a torch\.nn", refuse, None)
        refuses("names is 5, expected a glob", refuse, stack(), 5)
        refuses("names has 3, expected globs", refuse, stack(), ["0", 3])


def test_schedule_refuses_bad_input() -> None:
    model = stack(2)
    refuses("order is 'up'", StatisticsFreezing, model, start=0, every=1, order="up")
    refuses("every is 0", StatisticsFreezing, model, start=0, every=0)
    refuses("start is -1", StatisticsFreezing, model, start=-1, every=1)
    with pytest.raises(InputError, match="no layer with batch statistics to freeze"):
        StatisticsFreezing(nn.Sequential(build_norm("ln", 4)), start=0, every=1)
    freezing = StatisticsFreezing(model, start=0, every=1)
    with pytest.raises(InputError, match="names 'other'; the model has '0', '1'"):
        freezing.load_state_dict({"frozen": ["other"]})
    refuses("has no entry 'frozen'", freezing.load_state_dict, {})
    fresh = StatisticsFreezing(nn.Sequential(BatchNorm(6)), start=0, every=1)
    refuses("calibrate", fresh.step, 0)
