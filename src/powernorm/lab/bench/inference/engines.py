"""Running a model by torch or by onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.integrations.extras import EXTRAS, install_extra
from powernorm.integrations.onnx import export
from powernorm.lab.bench.cases import DTYPES
from powernorm.lab.bench.inference.cases import InferenceCase
from powernorm.lab.bench.inference.encoders import Kind, with_multiply_adds

Run = Callable[[], Tensor]
"""One call of a model on its input."""


def check_extra() -> None:
    """Raises unless models can be exported and run.

    Raises:
        InputError: names what is missing.
    """
    missing = [name for name in EXTRAS["export"] if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the preset 'inference' needs {', '.join(missing)}: {install_extra('export')}"
        )


def runs(models: Mapping[Kind, nn.Module], case: InferenceCase, tokens: Tensor) -> dict[Kind, Run]:
    """What is timed, by provider.

    Args:
        models: float32, in evaluation mode; they stay as they are.
        case: says how they run.
        tokens: the input.
    """
    if case.engine == "onnxruntime":
        return {kind: _runtime_run(model, tokens) for kind, model in models.items()}
    dtype = DTYPES[case.dtype]
    return {kind: _torch_run(deepcopy(model).to(dtype), tokens) for kind, model in models.items()}


def _torch_run(model: nn.Module, tokens: Tensor) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return cast(Tensor, model(tokens))

    return run


def _runtime_run(model: nn.Module, tokens: Tensor) -> Run:
    program = export(with_multiply_adds(deepcopy(model)), tokens)
    session = _session(program.model_proto.SerializeToString())
    name = session.get_inputs()[0].name
    given = {name: tokens.numpy()}

    def run() -> Tensor:
        return torch.from_numpy(session.run(None, given)[0])

    return run


_POOLS: set[int] = set()


def _session(model: bytes) -> Any:
    import onnxruntime

    threads = torch.get_num_threads()
    if not _POOLS:
        # One pool for all sessions: the threads of one's own would spin into the turn of the next.
        onnxruntime.set_global_thread_pool_sizes(threads, 1)
        _POOLS.add(threads)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
