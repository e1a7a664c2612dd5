"""Print the results of norms where torch lacks a private name; a program, not a test.

It prints a JSON object: missing name -> scenario -> numbers, or the error's class. A process of its
own imports the library for each name, for names are looked up once.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, in the process that the others are forked from
import torch.distributed.tensor
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

MODULE = Path(__file__).parents[2] / "src/powernorm/ops/torch_private.py"
ALL = "all names"
NORMS = {
    "ln": {},
    "rms": {},
    "dyt": {},
    "bn": {},
    "rbn": {"mean_penalty": 0.1},
    "pn": {"warmup_steps": 1},
    "mabn": {"window": 2, "warmup_steps": 1},
}


def names() -> list[str]:
    """Return the names that `torch_private` looks up."""
    calls = [node for node in ast.walk(ast.parse(MODULE.read_text())) if isinstance(node, ast.Call)]
    finds = [call for call in calls if ast.unparse(call.func) == "find"]
    return [arg.value for call in finds for arg in call.args if isinstance(arg, ast.Constant)]


@contextmanager
def without(missing: list[str]) -> Any:
    """Let torch have nothing under some names."""
    kept = []
    for name in missing:
        path, _, last = name.rpartition(".")
        owner: Any = torch
        for part in path.split("."):
            owner = getattr(owner, part)
        kept.append((owner, last, vars(owner).get(last)))
        setattr(owner, last, None)
    yield
    for owner, last, value in kept:
        delattr(owner, last)
        if value is not None:
            setattr(owner, last, value)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator).requires_grad_()
    return x, torch.rand(3, 5, generator=generator) < 0.3


def plainly(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(norm(x).tanh())


def checkpointed(norm: nn.Module, x: Tensor, **options: Any) -> Tensor:
    y = checkpoint(lambda x: norm(x).tanh(), x, use_reentrant=False, **options)
    return checkpoint(lambda x: norm(x), y, use_reentrant=False, **options)


def nested(norm: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(partial(checkpointed, norm), x, use_reentrant=False)


def reentrant(norm: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(norm, checkpoint(norm, x, use_reentrant=True).tanh(), use_reentrant=True)


def selective(norm: nn.Module, x: Tensor) -> Tensor:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del context, args, kwargs
        saved = op is torch.ops.aten.clone.default or op.namespace == "powernorm"
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(
        lambda x: norm(norm(x.clone()).tanh().clone()), x, use_reentrant=False, context_fn=contexts
    )


def trained(run: Callable[[nn.Module, Tensor], Tensor], norm: nn.Module) -> list[Tensor]:
    import powernorm

    x, mask = inputs()
    for factor in (1.0, 2.0, 3.0):
        with powernorm.padding_mask(mask):
            y = run(norm, x * factor)
        (y * torch.linspace(-1, 1, 8)).sum().backward()
    return [x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]


def read_outside(norm: nn.Module) -> list[Tensor]:
    """Read a saved tensor, which repeats the region, before the backward."""
    x, _ = inputs()
    y = checkpoint(lambda x: norm(x).sigmoid(), x, use_reentrant=False)
    _ = y.grad_fn._saved_result
    y.sum().backward()
    return [x.grad, *norm.buffers()]


def without_gradients(norm: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        y = norm(inputs()[0])
    return [y, *norm.buffers()]


def transformed(norm: nn.Module) -> list[Tensor]:
    x, _ = inputs()
    return [torch.func.grad(lambda x: norm(x).square().sum())(x.detach()), *norm.buffers()]


def forward_mode(norm: nn.Module) -> list[Tensor]:
    x, _ = inputs()
    return list(torch.func.jvp(norm, (x.detach(),), (torch.ones_like(x),)))


def batched(norm: nn.Module) -> list[Tensor]:
    x, _ = inputs()
    several = torch.stack([torch.ones_like(x), x.detach()])
    return list(torch.autograd.grad(norm(x), x, several, is_grads_batched=True))


def evaluated(norm: nn.Module) -> list[Tensor]:
    return [norm.eval()(inputs()[0])]


SCENARIOS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "plain": partial(trained, plainly),
    "checkpointed": partial(trained, checkpointed),
    "nested": partial(trained, nested),
    "reentrant": partial(trained, reentrant),
    "selective": partial(trained, selective),
    "read outside": read_outside,
    "without gradients": without_gradients,
    "transformed": transformed,
    "forward mode": forward_mode,
    "batched": batched,
    "evaluated": evaluated,
}


def run_all(missing: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with without(missing):
        import powernorm.ops.torch_private
    import powernorm

    found: dict[str, Any] = {}
    for name, options in NORMS.items():
        for scenario, compute in SCENARIOS.items():
            torch.manual_seed(0)
            norm = powernorm.build_norm(name, 8, **options)
            try:
                values = [value.flatten().tolist() for value in compute(norm)]
            except (powernorm.InputError, RuntimeError) as error:
                values = type(error).__name__
            found[f"{name}: {scenario}"] = values
    return found


def main() -> None:
    every = names()
    cases = {"": [], **{name: [name] for name in every}, ALL: every}
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(run_all, cases.values(), chunksize=1)
    sys.stdout.write(json.dumps(dict(zip(cases, found, strict=True))))


if __name__ == "__main__":
    main()
