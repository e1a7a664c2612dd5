"""A model leaves the process with its norms: the graph runs where powernorm is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import powernorm
from cases import CASES
from powernorm.norms import NORMS

pytestmark = pytest.mark.filterwarnings(
    # torch itself
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:`torch.jit.*` is deprecated:DeprecationWarning",
    "ignore:The feature will be removed:DeprecationWarning",
    "ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning",
    # shapes are checked while tracing
    "ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning",
)


def trained(norm: nn.Module) -> nn.Module:
    """The norm in evaluation, with statistics that are not 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    for buffer in norm.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return norm.eval()


def operators(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


class Each(nn.Module):
    """Several norms of the same input, each with an output of its own."""

    def __init__(self, norms: dict[str, nn.Module], *, scoped: bool = False) -> None:
        super().__init__()
        self.names = tuple(norms)
        self.norms = nn.ModuleList(norms.values())
        self.scoped = scoped

    def forward(
        self, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None
    ) -> tuple[Any, ...]:
        if not self.scoped:
            return tuple(norm(x, mask, residual) for norm in self.norms)
        with powernorm.padding_mask(mask):
            return tuple(norm(x, None, residual) for norm in self.norms)


def check_outputs(model: Each, found: Any, wanted: Any) -> None:
    for name, one, other in zip(model.names, found, wanted, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_the_graph_of_every_norm_needs_torch_alone(dtype: torch.dtype) -> None:
    model = Each({case.id: trained(case.build(8, dtype=dtype)) for case in CASES})
    x, batch, length = torch.randn(6, 7, 8, dtype=dtype), Dim("batch", min=2), Dim("length", min=2)
    shape = {0: batch, 1: length}
    example = x[:3, :5].contiguous()
    program = torch.export.export(
        model, (example, None, example.flip(0)), dynamic_shapes=(shape, None, shape)
    )
    assert not [name for name in operators(program) if not name.startswith(("aten.", "<"))]
    check_outputs(model, program.module()(x, None, x.flip(0)), model(x, None, x.flip(0)))


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("scoped", [True, False], ids=["scope", "argument"])
def test_padding_masks_are_inputs_of_the_graph(scoped: bool, dim: int) -> None:
    norms = {
        f"{name}-{variant}": trained(
            powernorm.build_norm(name, 8, feature_dim=dim, variant=variant)
        )
        for name in ("bn", "pnv", "pn")
        for variant in ("paper", "released")  # which sets padding to 0
    }
    model = Each(norms, scoped=scoped)
    x = torch.randn(4, 6, 8) if dim == -1 else torch.randn(4, 8, 6)
    mask = torch.rand(4, 6) > 0.5
    shape = {0: Dim("batch", min=2)}
    program = torch.export.export(model, (x[:3], mask[:3]), dynamic_shapes=(shape, shape))
    found, wanted = program.module()(x, mask), model(x, mask)
    check_outputs(model, found, wanted)
    assert [one.stride() for one in found] == [other.stride() for other in wanted]


def test_graphs_are_short() -> None:
    x = torch.randn(2, 3, 8)
    counts = {
        name: len(operators(torch.export.export(powernorm.build_norm(name, 8).eval(), (x,))))
        for name in ("rms", "bn", "pn-static", "adanorm")
    }
    assert counts == {"rms": 6, "bn": 6, "pn-static": 5, "adanorm": 5}


@pytest.mark.parametrize("name", ["adanorm", "detach", "rms", "gn"])
def test_an_exported_token_norm_trains_as_the_layer(name: str) -> None:
    norm = powernorm.build_norm(name, 8)
    program = torch.export.export(norm, (torch.randn(3, 8),)).module()
    x, cotangent = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    found, wanted = (torch.autograd.grad(f(x), x, cotangent)[0] for f in (program, norm))
    torch.testing.assert_close(found, wanted)


def test_compiled_models_keep_the_fast_operators() -> None:
    norm, seen = trained(powernorm.PowerNorm(8)), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        torch.compile(norm, backend=backend)(torch.randn(3, 8))
    assert "powernorm.static_norm" in seen


def every_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), *(trained(powernorm.build_norm(name, 8)) for name in NORMS)
    ).eval()


def run_without_powernorm(folder: Path, load: str) -> None:
    """Load a file in another process, where powernorm cannot be imported, and compare."""
    code = f"""
import sys
sys.modules["powernorm"] = None
import torch
x, wanted = torch.load("io.pt")
torch.testing.assert_close({load}(x), wanted)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_torchscript_runs_without_powernorm(tmp_path: Path) -> None:
    model, x = every_norm(), torch.randn(5, 4, 8)
    with torch.no_grad():
        torch.jit.trace(model, (x[:2],)).save(tmp_path / "model.pt")
        torch.save((x, model(x)), tmp_path / "io.pt")
    run_without_powernorm(tmp_path, 'torch.jit.load("model.pt")')


@pytest.mark.slow
def test_a_package_of_aotinductor_runs_without_powernorm(tmp_path: Path) -> None:
    model, x = every_norm(), torch.randn(5, 4, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: Dim("b", min=2)},))
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        torch.save((x, model(x)), tmp_path / "io.pt")
    run_without_powernorm(tmp_path, 'torch._inductor.aoti_load_package("model.pt2")')


def test_the_exporter_that_traces(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = Each({name: trained(powernorm.build_norm(name, 8)) for name in NORMS}).eval()
    x, path = torch.randn(5, 7, 8), tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(
            model, (x[:2, :3],), path, dynamo=False, input_names=["x"],
            dynamic_axes={"x": {0: "batch", 1: "length"}},
        )  # fmt: skip
        wanted = model(x)
    found = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    check_outputs(model, map(torch.from_numpy, found), wanted)
