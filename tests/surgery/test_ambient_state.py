"""Verbs make and measure the same, whatever torch is set to around them."""

from __future__ import annotations

import importlib
import math
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import powernorm
from powernorm.diagnosis import evaluate_statistics, evaluation_gap
from powernorm.errors import InputError
from powernorm.inspection.finder import find_norms
from surgery.foreign_models import (
    PADDED,
    SPECIAL,
    WIDTH,
    Inputs,
    bert,
    conformer_module,
    encoder_inputs,
    generator,
    llama,
    run,
    seeded,
    torch_encoder,
)
from surgery.static_models import settle

# Which torch's fast path gives once.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

# Models.


class Functional(nn.Module):
    """A model whose norms are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, src: Tensor) -> Tensor:
        stream = src + self.first(functional.layer_norm(src, (WIDTH,)))
        y: Tensor = self.second(functional.rms_norm(stream, (WIDTH,)))
        return y


def conformer() -> nn.Module:
    return conformer_module().Conformer(
        WIDTH, num_heads=2, ffn_dim=16, num_layers=1, depthwise_conv_kernel_size=3
    )


def frames() -> Inputs:
    return {
        "input": torch.randn(3, 9, WIDTH, generator=generator()),
        "lengths": torch.tensor([9, 5, 7]),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "encoder": (torch_encoder, lambda: encoder_inputs(True)(0)),
    "bert": (bert, lambda: PADDED["bert"](0)),
    "llama": (llama, lambda: PADDED["llama"](0)),
    "conformer": (conformer, frames),
    "encoder without biases": (
        lambda: torch_encoder(bias=False, norm_first=True),
        lambda: encoder_inputs(True)(0),
    ),
    "functional": (Functional, lambda: {"src": encoder_inputs(True)(0)["src"]}),
}


# Verbs.


@dataclass
class Case:
    """A verb's arguments; all of them were made outside of the state."""

    model: nn.Module
    twin: nn.Module
    inputs: Inputs
    folder: Path
    batches: list[Inputs]


Act = Callable[[Case], Any]


def differing(inputs: Inputs) -> list[Inputs]:
    """Two batches."""
    other = dict(inputs)
    for name, value in inputs.items():
        if value.is_floating_point():
            other[name] = 0.7 * value - 0.1
        elif name == "input_ids":
            other[name] = value.where(value <= SPECIAL, value - 1)
    return [inputs, other]


def swapped(to: str, model: nn.Module, inputs: Inputs) -> None:
    if isinstance(model, Functional):
        powernorm.modularize(model, inputs)
    powernorm.swap(model, to, where="*")
    settle(model)


def loss(model: nn.Module, batch: Inputs) -> Tensor:
    return run(model, batch).float().square().mean()


def swap(to: str, case: Case) -> str:
    return str(powernorm.swap(case.model, to, where="*").plan)


def fold(case: Case, **options: Any) -> list[str]:
    return [str(row) for row in powernorm.fold(case.model, case.inputs, **options).rows]


def match_teacher(case: Case) -> Any:
    powernorm.swap(case.model, "bn", where="*")
    return powernorm.match_teacher(case.model, case.twin, case.batches)


def freeze(case: Case) -> list[list[str]]:
    return [powernorm.freeze_statistics(case.model), powernorm.unfreeze_statistics(case.model)]


def penalty(case: Case) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():  # which a penalty needs
        run(case.model.train(), case.inputs)
    return powernorm.penalty(case.model, reduction="token_sum")


def save_and_load(case: Case) -> None:
    powernorm.save(case.model, case.folder)
    is_built = hasattr(case.model, "config")
    case.model = powernorm.load(case.folder, None if is_built else case.twin)


def diagnosed(case: Case) -> str:
    return str(powernorm.diagnose(case.model, case.batches, batch_sizes=(2,)))


def forward(case: Case) -> Tensor:
    """Statistics are updated, and what layers make at their first call."""
    return run(case.model.train(), case.inputs).detach().float()


NEW: dict[str, Act] = {
    "find_norms": lambda case: [one.names for one in find_norms(case.model, case.inputs)],
    "plan_swap": lambda case: str(
        powernorm.plan_swap(case.model, "rbn", example_inputs=case.inputs)
    ),
    **{f"swap to {to}": partial(swap, to) for to in powernorm.NORMS},
    "undo a swap": lambda case: powernorm.swap(case.model, "bn").undo(),
    "insert": lambda case: str(powernorm.insert(case.model).plan),
    "undo an insertion": lambda case: powernorm.insert(case.model).undo(),
    "mask_batch_norms": lambda case: str(powernorm.mask_batch_norms(case.model).plan),
    "modularize": lambda case: str(powernorm.modularize(case.model, case.inputs)),
    "fold weights": partial(fold, keep="statistics"),
    "fold by centering": partial(fold, keep="statistics", centering="weights"),
    "match_teacher": match_teacher,
    "diagnose": diagnosed,
    "save as stock": lambda case: powernorm.save(case.model, case.folder, stock=True),
}
"""Verbs for a model as it is."""

STATIC: dict[str, Act] = {
    "fold": fold,
    "calibrate": lambda case: powernorm.calibrate(case.model, case.batches),
    "calibrate in one pass": lambda case: powernorm.calibrate(
        case.model, case.batches, way="one_pass"
    ),
    "freeze_statistics": freeze,
    "diagnose static norms": diagnosed,
    "training_inference_discrepancy": lambda case: powernorm.training_inference_discrepancy(
        case.model, case.batches
    ),
    "evaluation_gap": lambda case: evaluation_gap(case.model, case.batches, loss),
    "evaluate_statistics": lambda case: evaluate_statistics(
        case.model, loss, case.batches, case.batches
    ),
    "penalty": penalty,
    "save and load": save_and_load,
    "forward": forward,
}
"""Verbs for a model with static norms."""

VERBS = (*NEW, *STATIC)
MEASURING = (*tuple(STATIC)[1:9], "diagnose", "forward")
"""Verbs that run the model as it is called: under autocast it computes less precisely."""


# States.


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def together() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("float64", "default device", "inference_mode", "deterministic", "warnings"):
            stack.enter_context(STATES[name]())
        yield


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": partial(default_dtype, torch.float64),
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float16": partial(default_dtype, torch.float16),
    "default device": default_device,
    "device": lambda: torch.device("meta"),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "warnings": warnings_as_errors,
    "no fast path": no_fast_path,
    "together": together,
}


def outcome(
    name: str, verb: str, state: Callable[[], AbstractContextManager[Any]], folder: Path
) -> Any:
    """Return what a verb finds and makes of a model under a state, and a step of training later."""
    build, make = MODELS[name]
    inputs = make()
    case = Case(seeded(build), seeded(build), inputs, folder, differing(inputs))
    try:
        if verb in STATIC:
            swapped("rbn" if verb == "penalty" else "bn", case.model, case.inputs)
        if verb == "save and load" and isinstance(case.twin, Functional):
            powernorm.modularize(case.twin, case.inputs)
        torch.manual_seed(0)
        with state():
            found = (NEW | STATIC)[verb](case)
    except InputError as error:
        return str(error)
    model, made = case.model, case.model.state_dict()
    made = {name: value.clone() for name, value in made.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    value = loss(model.train(), case.inputs)
    value.backward()
    optimizer.step()
    assert value.isfinite()
    learning = {name for name, one in model.named_parameters() if one.grad is not None}
    learned = dict(model.state_dict())
    with torch.no_grad():
        return found, made, learning, value.detach(), learned, run(model.eval(), case.inputs)


EXPECTED: dict[tuple[str, str], Any] = {}
"""Outcomes without a state."""


def assert_same(found: Any, want: Any, tolerance: float) -> None:
    """Compare nested results: to the digit, or numbers up to a tolerance."""
    assert type(found) is type(want)
    if isinstance(want, Tensor):
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(want, float):
        assert (
            found == want
            or math.isclose(found, want, rel_tol=tolerance, abs_tol=tolerance)
            or (math.isnan(found) and math.isnan(want))
        )
    elif isinstance(want, dict):
        assert found.keys() == want.keys()
        for key, value in want.items():
            assert_same(found[key], value, tolerance)
    elif isinstance(want, list | tuple):
        assert len(found) == len(want)
        for one, other in zip(found, want, strict=True):
            assert_same(one, other, tolerance)
    elif is_dataclass(want):
        for field in fields(want):
            assert_same(getattr(found, field.name), getattr(want, field.name), tolerance)
    elif not tolerance:
        assert found == want


def check(name: str, verb: str, state: str, folders: pytest.TempPathFactory) -> None:
    if (name, verb) not in EXPECTED:
        EXPECTED[name, verb] = outcome(name, verb, nullcontext, folders.mktemp("expected"))
    want = EXPECTED[name, verb]
    found = outcome(name, verb, STATES[state], folders.mktemp("found"))
    assert_same(found, want, 0.1 if state == "autocast" and verb in MEASURING else 0.0)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", MODELS)
def test_together(name: str, verb: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(name, verb, "together", tmp_path_factory)


@pytest.mark.slow
@pytest.mark.thinned(1)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", MODELS)
def test_each(name: str, verb: str, state: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(name, verb, state, tmp_path_factory)


def test_folds_under_autocast(tmp_path_factory: pytest.TempPathFactory) -> None:
    check("functional", "fold", "autocast", tmp_path_factory)


@pytest.mark.parametrize("to", powernorm.NORMS)
def test_a_model_without_tensors(to: str) -> None:
    """Its new norms come to the CPU, in float32."""

    def made() -> dict[str, Tensor]:
        model = nn.Sequential(nn.Identity(), nn.LayerNorm(WIDTH, elementwise_affine=False))
        powernorm.swap(model, to)
        return model.state_dict()

    want = made()
    with together():
        found = made()
    assert_same(found, want, 0.0)


def test_a_model_of_inference_mode() -> None:
    """Its new tensors are of inference mode, too, wherever the verb is called."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
        x = torch.randn(8, WIDTH)
    swap = powernorm.swap(model, "bn")
    with torch.inference_mode():
        model(x)
        want = model.eval()(x)
    powernorm.fold(model, x)
    assert all(tensor.is_inference() for tensor in (*swap.norms["1"].buffers(), model[2].bias))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), want)


def test_modules_keep_no_tensors() -> None:
    """They would be what the state was when they were imported."""
    for package in (powernorm.diagnosis, powernorm.inspection, powernorm.norms, powernorm.surgery):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            assert not [key for key, value in vars(module).items() if isinstance(value, Tensor)]
