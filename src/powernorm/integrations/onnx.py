"""Export to ONNX with readable errors, and comparison of onnxruntime's outputs with torch's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.onnx import ONNXProgram
from torch.utils import _pytree

from powernorm.errors import InputError
from powernorm.inspection.examples import as_call
from powernorm.integrations.extras import needed_for
from powernorm.surgery.folding.trace import quiet_export, reason_of
from powernorm.surgery.folding.verify import largest_gap

_LOGGERS: Final = ("torch.onnx", "onnxscript", "torch.fx.experimental.symbolic_shapes")


def export(
    model: nn.Module,
    example_inputs: object,
    *,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ONNXProgram:
    """Return a model as ONNX: `export(model, x).save("model.onnx")`.

    Fold the model first if it has static norms (`powernorm.fold`), so that none of them is left.
    Other norms of this library become the ONNX operators that they consist of. A Hugging Face model
    is written without its cache of keys and values.

    Args:
        model: a model in evaluation mode.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        dynamic_shapes: dimensions that may vary, as `torch.export.export` takes them, or by their
            names in the graph, such as `{"x": {0: "batch"}}`: of names for the same size the first
            counts. None fixes all to those of the example.
        input_names: names of the graph's inputs; by default the arguments' own.
        output_names: names of the graph's outputs; by default those of their operators.

    Raises:
        InputError: the model or one of its norms is in training mode, torch.export cannot trace it,
            or ONNX lacks an operator of it.
        ModuleNotFoundError: onnx or onnxscript is missing.
    """
    with needed_for("the export to ONNX"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    if model.training:
        raise InputError(f"{type(model).__name__} is in training mode: call model.eval() first")
    call = as_call(example_inputs)
    with _quiet(), torch.no_grad(), _without_caches(model):
        try:
            free = _pytree.tree_map_only(str, lambda _: torch.export.Dim.AUTO, dynamic_shapes)
            traced = torch.export.export(model, call.args, dict(call.kwargs), dynamic_shapes=free)
        except Exception as error:  # the model or the tracer may raise anything
            raise InputError(
                f"torch.export cannot trace {type(model).__name__} on the example inputs: "
                f"{reason_of(error)}"
            ) from error
        _check_operators(traced)
        try:
            program = torch.onnx.export(
                traced,
                dynamo=True,
                verbose=False,
                input_names=input_names,
                output_names=output_names,
                dynamic_shapes=dynamic_shapes,
            )
        except Exception as error:  # errors of the exporter, and others inside it
            raise InputError(
                f"torch cannot turn {type(model).__name__} into ONNX: "
                f"{reason_of(error.__cause__ or error)}"
            ) from error
    assert program is not None
    return program


def largest_error(program: ONNXProgram, model: nn.Module, example_inputs: object) -> float:
    """Return the largest relative difference between onnxruntime's and torch's outputs.

    It is the largest difference over all floating-point output tensors, each relative to its
    largest magnitude, and infinite if only one of the two holds NaN or infinity. Rounding in
    float32 gives about 1e-6.

    Args:
        program: the result of `export`.
        model: the model that was exported.
        example_inputs: inputs of the exported shapes.

    Raises:
        ModuleNotFoundError: onnxruntime is missing.
    """
    with needed_for("the check of an exported model"):
        import onnxruntime  # noqa: F401
    call = as_call(example_inputs)
    found = program(*call.args, **call.kwargs)
    with _without_caches(model):
        leaves = _pytree.tree_leaves(call.call(model))
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return largest_difference(found, wanted)


def largest_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference of floating-point tensors, each relative to its largest value.

    Args:
        found: output tensors.
        wanted: expected tensors.
    """
    errors = [
        largest_gap(one.cpu(), other.cpu())[1]
        for one, other in zip(found, wanted, strict=True)
        if other.is_floating_point() and other.numel()
    ]
    return max(errors, default=0.0)


def _check_operators(traced: torch.export.ExportedProgram) -> None:
    names = [
        _module_of(node) for node in traced.graph.nodes if str(node.target).startswith("powernorm.")
    ]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InputError(
            f"the norms {', '.join(names[:3])}{more} are in training mode, for which ONNX has no "
            "operators: call model.eval() first"
        )


def _module_of(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else str(node.target)


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Let inner models of transformers return no cache, which is not a tensor."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in found if getattr(config, "use_cache", None) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which warns of operators that other libraries did not register."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with quiet_export():
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
