"""The graph of a model's evaluation, with its static norms as nodes of their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from powernorm.errors import InputError
from powernorm.norms import current_padding_mask
from powernorm.surgery.aliases import norms_worked_on

_LIBRARY: Final = torch.library.Library("powernorm_surgery", "DEF")
_LIBRARY.define("marked_norm(Tensor x, int index, bool masked) -> Tensor")


def _marked_norm(x: Tensor, index: int, masked: bool) -> Tensor:
    del index, masked
    return torch.empty_like(x)


torch.library.register_fake("powernorm_surgery::marked_norm", _marked_norm, lib=_LIBRARY)

MARK: Final = torch.ops.powernorm_surgery.marked_norm.default
"""Stands in the graph for the norm of an index: (x, index, whether a padding mask was given)."""

_ROOT: Final = "model"


@dataclass(frozen=True)
class Trace:
    """One run of a model as a functional graph of torch's operators."""

    graph: fx.Graph
    tensors: Mapping[str, str]
    """Names of the model's parameters and persistent buffers by the graph's inputs."""
    worked_on: Mapping[int, str]
    """Norms with an operator in place around them that folding would lead astray."""

    def tensor_of(self, node: fx.Node) -> str | None:
        """The name of the parameter or persistent buffer that a node is, else None."""
        return self.tensors.get(node.name) if node.op == "placeholder" else None

    def path_of(self, node: fx.Node) -> str:
        """The name of the module that a node was called in, `""` for the model itself."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        return _strip(stack[-1][0]) if stack else ""


def trace(
    model: nn.Module,
    norms: Mapping[nn.Module, int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Trace:
    """Run a model in evaluation and note its operators.

    Args:
        model: in evaluation mode; it is the same afterwards.
        norms: the norms to be marked, by the index in the mark.
        args: positional arguments of the run.
        kwargs: keyword arguments of the run.

    Raises:
        InputError: torch.export cannot trace the model.
    """
    recorder = _Recorder(model)
    with _marked(norms), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            program = torch.export.export(recorder, (args, dict(kwargs)), strict=False)
            worked_on = norms_worked_on(program.graph, MARK)
            # Without operators in place, so that a node is a value.
            program = program.run_decompositions({})
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} cannot be planned: torch.export cannot trace it on the "
                f"example inputs: {_first_line(error)}"
            ) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
    signature = program.graph_signature
    persistent = {
        name: target
        for name, target in signature.inputs_to_buffers.items()
        if target not in signature.non_persistent_buffers
    }
    named = {**signature.inputs_to_parameters, **persistent}
    tensors = {name: _strip(target) for name, target in named.items()}
    return Trace(program.graph, tensors, worked_on)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _strip(name: str) -> str:
    return name.removeprefix(_ROOT).removeprefix(".")


class _Recorder(nn.Module):
    """Calls the model and gives the tensors in its output: the container need not be known."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.model(*args, **kwargs)))


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested mappings, sequences and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif not isinstance(value, type | nn.Module) and not callable(value):
        for item in _attributes(value):
            yield from tensors_in(item)


def _attributes(value: object) -> list[object]:
    """What an answer of a class of its own holds, such as a cache of keys and values."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [*named.values(), *getattr(value, "__dict__", {}).values()]


@contextmanager
def _marked(norms: Mapping[nn.Module, int]) -> Iterator[None]:
    """In the block the norms are single operators."""
    own = {norm: norm.__dict__["forward"] for norm in norms if "forward" in norm.__dict__}
    for norm, index in norms.items():
        norm.__dict__["forward"] = _Mark(index)
    try:
        yield
    finally:
        for norm in norms:
            del norm.__dict__["forward"]
            if norm in own:
                norm.__dict__["forward"] = own[norm]


class _Mark:
    """The forward of a norm that only says that it was there."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(
        self,
        x: Tensor | None = None,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        input: Tensor | None = None,  # noqa: A002  (torch's name for it)
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = input if x is None else x
        assert x is not None
        masked = padding_mask is not None or current_padding_mask() is not None
        if residual is None:
            marked: Tensor = MARK(x, self.index, masked)
            return marked
        total = x + residual
        return MARK(total, self.index, masked), total
