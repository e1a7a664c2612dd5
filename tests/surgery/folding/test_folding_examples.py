"""Models and inputs that folding accepts: several examples, mappings, wrappers, hooks."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.diagnosis import NormMonitor
from powernorm.errors import InputError
from powernorm.norms import Norm
from powernorm.surgery.folding.structure import FoldedNorm
from refusals import refuses
from surgery.folding.test_folding_graphs import C, Net, bn, linear, tokens
from surgery.static_models import left_of, settle

LONG = (2, 9, C)


def agree(model: nn.Module, x: Tensor, expected: Tensor) -> None:
    assert (model(x).detach() - expected).abs().max() <= 1e-12 * expected.abs().max()


def actions(report: Any) -> dict[str, str]:
    return {row.name: left_of(row) for row in report.rows}


# Several examples: each branch of the model's code.


def _read_otherwise(m: Net, x: Tensor) -> Tensor:
    y = m.n(torch.tanh(x))
    return m.a(y) if x.shape[1] <= 5 else m.a(y) + y.exp()


def _without_the_norm(m: Net, x: Tensor) -> Tensor:
    return m.a(m.n(torch.tanh(x)) if x.shape[1] <= 5 else torch.tanh(x))


def _another_weight(m: Net, x: Tensor) -> Tensor:
    return (m.a if x.shape[1] <= 5 else m.b)(m.n(torch.tanh(x)))


def _pooled(m: Net, x: Tensor) -> Tensor:
    """A post-norm stream whose end nothing fixes, longer in one branch, where another head is."""
    start = m.e(x)
    stream = m.n(start + m.a(torch.tanh(m.b(start))))
    if x.shape[1] > 5:
        return m.g(m.k(stream + m.c(torch.tanh(m.d(stream)))).mean(1))
    return m.h(stream.mean(1))


def _stream_that_ends(m: Net, x: Tensor) -> Tensor:
    """Input and output of the stream are fixed in both branches, so that one norm stays."""
    y = torch.tanh(x)
    y = m.n(y + m.a(y))
    y = m.k(y + m.b(y))
    return y.sin() if x.shape[1] > 5 else y.cos()


def _returned(m: Net, x: Tensor) -> Tensor:
    """A stream whose end is free in one branch, and the output of the other."""
    start = m.e(x)
    stream = m.n(start + m.a(torch.tanh(m.b(start))))
    return stream if x.shape[1] > 5 else m.h(stream.mean(1))


def _joined(m: Net, x: Tensor) -> Tensor:
    """Norms in a row become one multiply-add, which the other branch cannot use."""
    y = torch.tanh(x)
    return torch.tanh(m.n(y if x.shape[1] > 5 else m.k(y)))


BRANCHES = {
    # name: the model's code, what is left with the first example, what with both
    "an operator that needs the values": (_read_otherwise, "fold", "multiply-add"),
    "the same weight without the norm": (_without_the_norm, "fold", "multiply-add"),
    "another weight": (_another_weight, "fold", "fold"),
    "more of a stream": (_pooled, "fold", "fold"),
    "other ends of a stream": (_stream_that_ends, "fold", "fold"),
    "a stream that is returned": (_returned, "fold", "fold"),
    "one norm more in a row": (_joined, "multiply-add", "multiply-add"),
}


def branching(name: str) -> Net:
    run, _, _ = BRANCHES[name]
    parts = {part: linear() for part in "abcdegh"}
    return settle(Net(run, n=bn(), k=bn(), **parts))


@pytest.mark.parametrize("name", some_default(BRANCHES, *list(BRANCHES)[::2]))
def test_a_fold_holds_for_all_examples(name: str) -> None:
    model = branching(name)
    short, long = tokens(), tokens(*LONG)
    expected, of_long = model(short).detach(), model(long).detach()
    alone = powernorm.plan_fold(model, short)
    report = powernorm.fold(model, short, more_examples=[long])
    _, with_first, with_both = BRANCHES[name]
    assert left_of(alone.rows[0]) == with_first
    assert actions(report)["n"] == with_both
    agree(model, short, expected)
    agree(model, long, of_long)
    report.undo()
    assert torch.equal(model(long), of_long)


def test_one_example_is_wrong_for_another_branch() -> None:
    """The documented use of more_examples: without it the error is large."""
    model = branching("the same weight without the norm")
    long = tokens(*LONG)
    expected = model(long).detach()
    powernorm.fold(model, tokens())
    assert (model(long).detach() - expected).abs().max() > 0.1 * expected.abs().max()


def test_norms_of_either_branch_fold() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        return m.a(m.n(torch.tanh(x))) if x.shape[1] <= 5 else m.b(m.k(torch.tanh(x)))

    model = settle(Net(run, n=bn(), k=bn(), a=linear(), b=linear()))
    x, long = tokens(), tokens(*LONG)
    rows = powernorm.plan_fold(model, x).rows
    assert "more_examples" in rows[1].reason
    expected = model(long).detach()
    assert actions(powernorm.fold(model, x, more_examples=[long])) == {"n": "fold", "k": "fold"}
    agree(model, long, expected)


def test_one_multiply_add_serves_both_examples() -> None:
    """Between fixed values all but the last norm fold, as with one example."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    powernorm.swap(model, to="bn")
    settle(model)
    inputs = [torch.randn(2, length, 8, dtype=torch.float64) for length in (3, 6)]
    expected = [model(x).detach() for x in inputs]
    report = powernorm.fold(model, inputs[0], more_examples=inputs[1:])
    assert sorted(actions(report).values()) == ["fold", "fold", "fold", "multiply-add"]
    for x, before in zip(inputs, expected, strict=True):
        agree(model, x, before)


def test_more_examples_are_checked() -> None:
    model = settle(nn.Sequential(bn(), linear()))
    with pytest.raises(InputError, match=r"more_examples is a Tensor, expected a list"):
        powernorm.fold(model, tokens(), more_examples=tokens())
    refuses(r"more_examples\[0\] is a str", powernorm.fold, model, tokens(), more_examples=["x"])
    with pytest.raises(InputError, match=r"Sequential fails on more_examples\[1\]"):
        powernorm.fold(model, tokens(), more_examples=[tokens(), tokens(2, 3)])


# Mappings.


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.a = bn(), linear()

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.a(self.n(values))
        return y if mask is None else y * mask


class OneMapping(Named):
    def forward(self, features: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
        """As a SentenceTransformer: the features come and go in one dict, which is extended."""
        del options
        features["embedding"] = super().forward(features["values"])
        return features


@pytest.mark.parametrize("model", [Named, OneMapping])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mappings(model: type[nn.Module], kind: type[Any]) -> None:
    net = settle(model())
    inputs = kind({"values": tokens()})
    assert actions(powernorm.fold(net, inputs)) == {"n": "fold"}
    assert list(inputs) == ["values"]


def test_a_mapping_among_positional_arguments() -> None:
    report = powernorm.fold(settle(OneMapping()), (UserDict(values=tokens()),))
    assert actions(report) == {"n": "fold"}


# Wrappers.


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_for_distributed_training() -> None:
    inner, x = settle(nn.Sequential(linear(), bn(), linear())), tokens()
    model = nn.parallel.DistributedDataParallel(inner).eval()
    expected = model(x).detach()
    plan = powernorm.plan_fold(model, x)
    assert actions(plan) == {"1": "fold"}
    refuses(r"DistributedDataParallel.*inplace=False", plan.apply)
    assert torch.equal(model(x), expected)  # its lists of buffers still hold
    agree(plan.apply(inplace=False).model, x, expected)


def test_a_data_parallel_model() -> None:
    model, x = nn.DataParallel(settle(nn.Sequential(linear(), bn(), linear()))).eval(), tokens()
    expected = model(x).detach()
    assert actions(powernorm.fold(model, x)) == {"1": "fold"}
    agree(model, x, expected)


# Hooks and attributes.


def test_monitors_do_not_keep_norms() -> None:
    model, x = settle(nn.Sequential(linear(), bn(), linear())), tokens()
    monitor = NormMonitor(model, every=1)
    expected = model(x).detach()
    report = powernorm.fold(model, x)
    assert actions(report) == {"1": "fold"}
    agree(model, x, expected)
    model.train()
    monitor.start_step(1)
    model(x).sum().backward()
    with pytest.warns(RuntimeWarning):  # a folded norm is not called any more
        rows = monitor.finish_step(1)
    assert rows == []
    report.undo()
    model.train()
    monitor.start_step(2)
    model(x).sum().backward()
    assert [row["layer"] for row in monitor.finish_step(2)] == ["1"]


def _casts(m: Net, x: Tensor) -> Tensor:
    return m.b(m.k(m.a(m.n(x.to(m.n.weight.dtype)))))


def test_norms_whose_attributes_are_read_stay() -> None:
    """As Mamba's, whose blocks convert to `norm.weight.dtype`: without it the model would fail."""
    model, x = settle(Net(_casts, n=bn(), k=bn(), a=linear(), b=linear())), tokens()
    expected = model(x).detach()
    report = powernorm.fold(model, x, verify=False)
    assert actions(report) == {"n": "keep", "k": "fold"}
    assert "reads its attribute 'weight'" in report.rows[0].reason
    assert isinstance(model.n, Norm)
    agree(model, x, expected)


def test_a_folded_model_that_fails_is_put_back() -> None:
    """Without the comparison it is run once all the same."""

    def run(m: Net, x: Tensor) -> Tensor:
        if not any(isinstance(part, Norm) for part in m.modules()):
            raise TypeError("no norm left")
        return m.a(m.n(x))

    model, x = settle(Net(run, n=bn(), a=linear())), tokens()
    before = model.state_dict()
    with pytest.raises(InputError, match=r"folded Net fails .*no norm left.*nothing was changed"):
        powernorm.fold(model, x, verify=False)
    assert model.state_dict().keys() == before.keys()
    model(x)


@pytest.mark.parametrize("verify", [True, False])
def test_an_attribute_that_only_the_folded_model_reads(verify: bool) -> None:
    """It is put back, and the error names the norm."""

    def run(m: Net, x: Tensor) -> Tensor:
        y: Tensor = m.a(m.n(x))
        return y * m.n.weight if isinstance(m.n, FoldedNorm) else y

    model, x = settle(Net(run, n=bn(), a=linear())), tokens()
    expected = model(x)
    refuses(r"reads an attribute of the norm 'n'", powernorm.fold, model, x, verify=verify)
    assert torch.equal(model(x), expected)
