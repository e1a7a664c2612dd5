import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from powernorm.diagnosis import NormMonitor
from powernorm.norms import BatchNorm, build_norm


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def model_of(norm: str) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(4) if norm == "torch" else build_norm(norm, 4))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
NORMS = pytest.mark.parametrize("norm", ["bn", "rbn", "pn", "ln", "torch"])


@COPIES
@NORMS
def test_calls_of_a_copy_are_not_seen(norm: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = model_of(norm)
    monitor = NormMonitor(model, 1)
    x = torch.randn(8, 4)
    rows = []
    for with_copy in (False, True):
        torch.manual_seed(0)
        # A copy that is made while the monitor observes is as blind as one from before.
        other = copied(model)
        monitor.start_step(0)
        model(x.requires_grad_()).square().sum().backward()
        if with_copy:
            for one in (other, copied(model)):
                one(x + 100).square().sum().backward()
        rows.append(monitor.finish_step(0))
        if not with_copy:
            model.load_state_dict(other.state_dict())
    assert rows[0] == rows[1]


@COPIES
def test_a_copy_can_be_watched_by_a_monitor_of_its_own(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = model_of("bn")
    first = NormMonitor(model, 1)
    other = copied(model)
    second = NormMonitor(other, 1)
    for monitor in (first, second):
        monitor.start_step(0)
    x = torch.randn(8, 4)
    other(x)
    model(x)
    assert second.finish_step(0) == first.finish_step(0)


def test_shallow_copy_is_not_seen() -> None:
    norm = BatchNorm(4)
    monitor = NormMonitor(norm, 1)
    monitor.start_step(0)
    copy.copy(norm)(torch.randn(8, 4))
    with pytest.warns(RuntimeWarning, match="saw none of its 1 layers"):
        assert monitor.finish_step(0) == []


class Raises(BatchNorm):
    """Fails in its forward, after the hook in front."""

    fails = True

    def forward(self, *args: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().forward(*args)


def test_call_after_one_that_raised_has_its_own_output() -> None:
    norm = Raises(4)
    monitor = NormMonitor(norm, 1)
    monitor.start_step(0)
    x = torch.randn(8, 4)
    with pytest.raises(RuntimeError, match="out of memory"):
        norm(x, None, torch.ones(8, 4))
    norm.fails = False
    assert isinstance(norm(x), Tensor)
    assert len(monitor.finish_step(0)) == 1


def test_says_why_no_norm_can_be_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((4, 4)), nn.GroupNorm(2, 4))
    with pytest.warns(RuntimeWarning) as caught:
        monitor = NormMonitor(model, 1)
    (warning,) = caught
    assert warning.filename == __file__
    message = str(warning.message)
    assert "1: normalizes over 2 dimensions" in message
    assert "2: GroupNorm of torch normalizes over several tokens" in message
    monitor.start_step(0)
    assert monitor.finish_step(0) == []


def test_long_reasons_are_cut() -> None:
    model = nn.Sequential(*[nn.LayerNorm((4, 4)) for _ in range(10)])
    with pytest.warns(RuntimeWarning, match=r"2: normalizes over 2 dimensions; and 7 more\)"):
        NormMonitor(model, 1)


def test_says_nothing_where_a_norm_can_be_watched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NormMonitor(nn.Sequential(nn.LayerNorm((4, 4)), nn.LayerNorm(4)), 1)
        NormMonitor(nn.Sequential(nn.Linear(4, 4)), 1)


def test_canceled_step_is_over() -> None:
    model = model_of("bn")
    monitor = NormMonitor(model, 1)
    monitor.start_step(0)
    model(torch.randn(8, 4))
    monitor.cancel_step()
    assert monitor.finish_step(0) == []
    monitor.start_step(1)
    model(torch.randn(8, 4))
    assert len(monitor.finish_step(1)) == 1
