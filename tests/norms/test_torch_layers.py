"""Our layers in the place of torch's: arguments, state dicts, averaged weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

import powernorm
from cases import STATEFUL, Case, case_id, uses_batch_statistics
from powernorm.errors import InputError
from powernorm.norms import NORMS, check_norm_options

BATCH = tuple(dict.fromkeys(NORMS[name].layer for name in NORMS if uses_batch_statistics(name)))


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", BATCH, ids=lambda layer: layer.__name__)
def test_arguments_by_position_as_batch_norm(layer: Callable[..., Any]) -> None:
    ours, theirs = layer(8, 1e-3, 0.3, False, True), nn.BatchNorm1d(8, 1e-3, 0.3, False, True)
    for name in ("num_features", "eps", "momentum", "weight"):
        assert getattr(ours, name) == getattr(theirs, name)
    with pytest.raises(TypeError, match="positional"):
        layer(8, 1e-3, 0.3, False, True, None)


def test_arguments_by_position_as_layer_norm_and_rms_norm() -> None:
    layer = powernorm.LayerNorm(8, 1e-3, True, False)
    assert (layer.eps, layer.weight is None, layer.bias) == (1e-3, False, None)
    assert powernorm.LayerNorm(8, 1e-3, False).weight is None
    assert powernorm.RMSNorm(8, 1e-3, False).weight is None


@pytest.mark.parametrize("layer", BATCH, ids=lambda layer: layer.__name__)
def test_statistics_of_the_batch_in_evaluation_are_refused(layer: Callable[..., Any]) -> None:
    with pytest.raises(
        InputError, match=r"the other inputs in the batch: .*torch\.nn\.BatchNorm1d"
    ):
        layer(8, track_running_stats=False)


def test_what_has_one_value_is_no_option() -> None:
    with pytest.raises(
        InputError, match="has no option 'track_running_stats', it takes eps, "
    ) as e:
        check_norm_options("bn", {"track_running_stats": True})
    assert str(e.value).count("track_running_stats") == 1


# ---- state dicts -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bn", "rbn", "brn"])
@pytest.mark.parametrize("theirs", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_state_dicts_of_batch_norms_load_both_ways(
    name: str, theirs: Callable[..., nn.Module]
) -> None:
    x = torch.randn(20, 8)
    norm, other = powernorm.build_norm(name, 8), theirs(8)
    norm(x).sum().backward()
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other.running_var, norm.running_var)
    other.running_mean.fill_(3.0)
    norm.load_state_dict(other.state_dict())
    assert norm.running_mean.tolist() == [3.0] * 8
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize(
    "pair",
    [(powernorm.LayerNorm, nn.LayerNorm), (powernorm.RMSNorm, nn.RMSNorm)],
    ids=["LayerNorm", "RMSNorm"],
)
def test_state_dicts_of_token_norms_load_both_ways(pair: tuple[Any, Any]) -> None:
    ours, theirs = (layer(8) for layer in pair)
    nn.init.uniform_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, ours.weight)
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("case", STATEFUL, ids=case_id)
def test_a_state_dict_holds_the_count_of_nonfinite_batches_if_there_are_any(case: Case) -> None:
    norm, key = case.build(), "num_nonfinite_batches"
    assert key not in norm.state_dict()
    clean = norm.state_dict()
    norm.num_nonfinite_batches.fill_(2)
    counted = norm.state_dict()
    assert int(counted[key]) == 2
    for assign in (False, True):
        other = case.build()
        other.load_state_dict(counted, assign=assign)
        assert int(other.num_nonfinite_batches) == 2
        other.load_state_dict(clean, assign=assign)
        assert int(other.num_nonfinite_batches) == 0


def test_loaders_that_go_by_persistent_buffers_find_their_keys() -> None:
    """As Lightning's for FSDP2, which loads each key alone."""
    one, other = powernorm.RegularizedBatchNorm(8), powernorm.RegularizedBatchNorm(8)
    one.running_mean.fill_(2.0)
    state = one.state_dict()
    for name, _ in other.named_buffers():
        if name not in other._non_persistent_buffers_set:
            other.load_state_dict({name: state[name]}, strict=False)
    assert torch.equal(other.running_mean, one.running_mean)
    other.load_state_dict({"num_nonfinite_batches": torch.tensor(3)}, strict=False)
    other.load_state_dict({"running_mean": state["running_mean"]}, strict=False)
    assert int(other.num_nonfinite_batches) == 3


def test_a_file_without_the_layer_leaves_its_count() -> None:
    model = nn.Sequential(powernorm.BatchNorm(8), nn.Linear(8, 8))
    model[0].num_nonfinite_batches.fill_(2)
    model.load_state_dict({"1.bias": torch.zeros(8)}, strict=False)
    assert int(model[0].num_nonfinite_batches) == 2


def test_tensors_without_values_have_no_count() -> None:
    keys = powernorm.BatchNorm(8).state_dict().keys()
    meta = powernorm.BatchNorm(8, device="meta")
    assert meta.state_dict().keys() == keys
    with FakeTensorMode():
        assert powernorm.BatchNorm(8).state_dict().keys() == keys
    meta.load_state_dict(powernorm.BatchNorm(8).state_dict(), assign=True)
    assert int(meta.num_nonfinite_batches) == 0


@pytest.mark.thinned(1)
@pytest.mark.parametrize("case", STATEFUL, ids=case_id)
@pytest.mark.parametrize("scope", [FakeTensorMode, lambda: torch.device("meta")])
def test_a_step_of_tensors_without_values(case: Case, scope: Any) -> None:
    """Tools that estimate the memory of a training before it starts work with the norms."""
    with scope():
        norm = powernorm.build_norm(case.name, 8, **case.options)
        for _ in range(4):
            x = torch.randn(2, 3, 8, requires_grad=True)
            norm(x).sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


@pytest.mark.parametrize("then", [nn.Module.eval, nn.Module.double], ids=["eval", "double"])
def test_a_model_on_the_meta_device_that_is_filled_key_by_key(
    then: Callable[[nn.Module], nn.Module],
) -> None:
    """As transformers does: what the file does not hold would stay without a value."""
    model = nn.Sequential(powernorm.RegularizedBatchNorm(8, device="meta"))
    for key, value in powernorm.RegularizedBatchNorm(8).state_dict(keep_vars=True).items():
        setattr(model[0], key, value)
    assert int(then(model)[0].num_nonfinite_batches) == 0


@pytest.mark.parametrize(("saved", "present"), [(0, 0), (2, 0), (0, 2)])
def test_distributed_state_dicts_hold_the_count(saved: int, present: int) -> None:
    one, other = (nn.Sequential(powernorm.RegularizedBatchNorm(8)) for _ in range(2))
    one[0].num_nonfinite_batches.fill_(saved)
    other[0].num_nonfinite_batches.fill_(present)
    set_model_state_dict(other, get_model_state_dict(one))
    assert int(other[0].num_nonfinite_batches) == saved


# ---- averaged weights --------------------------------------------------------------------------


class Wide(nn.Module):
    """Torch's BatchNorm beside a norm of ours, for the same values."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.theirs = nn.BatchNorm1d(8)
        self.ours = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inner(x)
        return self.theirs(hidden), self.ours(hidden)


def averaged(norm: nn.Module, **options: Any) -> AveragedModel:
    """A model after some steps of training, averaged over them."""
    torch.manual_seed(5)
    model = Wide(norm)
    average = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        theirs, ours = model(torch.randn(16, 4) + 1)
        (theirs.exp().mean() + ours.exp().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(6)
    data = [(row, 0) for row in torch.randn(50, 4, generator=generator) * 3 - 1]
    return DataLoader(data, batch_size=16)  # the last batch is smaller


@pytest.mark.parametrize("momentum", [0.2, None])
@pytest.mark.parametrize("name", ["bn", "rbn", "pnv"])
@pytest.mark.parametrize("training", [True, False])
def test_update_bn_equals_torchs_batch_norm(
    name: str, momentum: float | None, training: bool
) -> None:
    average = averaged(powernorm.build_norm(name, 8, momentum=momentum)).train(training)
    update_bn(loader(), average)
    norm, theirs = average.module.ours, average.module.theirs
    if name == "pnv":
        with torch.no_grad():
            hidden = [average.module.inner(x) for x, _ in loader()]
        wanted = torch.stack([values.square().mean(0) for values in hidden]).mean(0)
        torch.testing.assert_close(norm.running_second_moment, wanted)
    else:
        torch.testing.assert_close(norm.running_mean, theirs.running_mean)
        torch.testing.assert_close(norm.running_var, theirs.running_var)
    assert int(norm.num_batches_tracked) == int(theirs.num_batches_tracked) == 4
    assert (norm.momentum, norm.training, norm.is_reestimated) == (momentum, training, False)


def test_update_bn_leaves_no_penalty_behind_and_training_goes_on() -> None:
    average = averaged(powernorm.RegularizedBatchNorm(8))
    update_bn(loader(), average)
    norm = average.module.ours
    assert not norm.has_penalty
    before = norm.running_mean.clone()
    with torch.no_grad():
        norm(torch.randn(16, 8))  # outside of update_bn statistics move in the backward
    assert torch.equal(norm.running_mean, before)
    norm.forget_penalty()
    (norm(torch.randn(16, 8)).sum() + norm.penalty()).backward()
    assert not torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("name", ["pn", "pn-static", "mabn", "brn"])
def test_update_bn_leaves_statistics_that_were_trained_with(name: str) -> None:
    average = averaged(powernorm.build_norm(name, 8, warmup_steps=2), use_buffers=True)
    before = {key: value.clone() for key, value in average.module.ours.state_dict().items()}
    update_bn(loader(), average)
    assert int(average.module.theirs.num_batches_tracked) == 4
    after = average.module.ours.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_update_bn_leaves_frozen_statistics() -> None:
    average = averaged(powernorm.BatchNorm(8))
    average.module.ours.freeze_statistics()
    before = average.module.ours.running_mean.clone()
    update_bn(loader(), average)
    assert torch.equal(average.module.ours.running_mean, before)


@pytest.mark.parametrize("name", ["bn", "rbn", "pnv"])
def test_update_bn_of_a_compiled_model_with_a_shared_layer(name: str) -> None:
    norm = powernorm.build_norm(name, 4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    eager = copy.deepcopy(model)
    batches = [torch.randn(16, 4) for _ in range(3)]
    update_bn(batches, torch.compile(model, backend="aot_eager"))
    update_bn(batches, eager)
    assert int(norm.num_batches_tracked) == 6
    torch.testing.assert_close([*norm.buffers()], [*eager[0].buffers()])


def everybodys_lists(model: nn.Module) -> Iterator[tuple[int, ...]]:
    yield tuple(id(module) for module in model.modules())
    yield tuple(id(module) for _, module in model.named_modules(remove_duplicate=False))
    yield tuple(id(module) for module in model.children())


def test_nobody_else_sees_a_stand_in() -> None:
    model = nn.Sequential(powernorm.BatchNorm(8), powernorm.PowerNormV(8), nn.BatchNorm1d(8))
    lists = [(id(model), *map(id, model))] * 2 + [tuple(map(id, model))]
    keys = list(model.state_dict())
    assert list(everybodys_lists(model)) == lists
    with torch.no_grad():
        assert list(everybodys_lists(model)) == lists
        update_bn([torch.randn(4, 8)], model)
        assert list(everybodys_lists(model)) == lists
    assert list(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(list(copied.modules())) == 4
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(layer) for layer in converted] == [
        powernorm.BatchNorm,
        powernorm.PowerNormV,
        nn.SyncBatchNorm,
    ]
    assert not any(isinstance(layer, _BatchNorm) for layer in converted[:2])
