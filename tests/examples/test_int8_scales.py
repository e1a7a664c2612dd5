"""Features of unlike scale: the same outputs, and int8 that keeps them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powernorm.integrations.onnx import export

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from int8.runtime import OnnxSession, quantize_dynamic, quantize_static  # noqa: E402
from int8.scales import UNLIKE, even_scales  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)
SCALES = torch.logspace(-20, 3, 16)
"""Scales of the stream's features, from the smallest to the largest."""


class Block(nn.Module):
    """Embeddings, and one sub-layer beside a stream whose features are divided by `scales`."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16)
        self.value, self.gate = nn.Linear(16, 24), nn.Linear(16, 24, bias=False)
        self.out, self.head = nn.Linear(24, 16), nn.Linear(16, 4)
        with torch.no_grad():
            for reader in (self.value, self.gate, self.head):
                reader.weight.mul_(scales)
            for writer in (self.out.weight.T, self.out.bias, self.table.weight):
                writer.div_(scales)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.out(self.value(x) * self.gate(x).sigmoid())
        logits: Tensor = self.head(x)
        return logits


def exported(scales: Tensor, path: Path, *shape: int) -> tuple[Tensor, Tensor]:
    """Write a block; inputs and outputs."""
    model = Block(scales).eval()
    ids = torch.randint(50, shape)
    export(model, ids).save(path)
    return ids, model(ids).detach()


def error(path: Path, ids: Tensor, wanted: Tensor) -> float:
    return float((OnnxSession(path)((ids,))[0] - wanted).norm() / wanted.norm())


def kinds(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


# Tokens of sequences are products and sums of their own, single ones are operators with biases.
@pytest.mark.parametrize("shape", [(8, 6), (40,)])
def test_outputs_stay_and_scales_are_moved(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ids, wanted = exported(SCALES, tmp_path / "x.onnx", *shape)
    model = onnx.load(tmp_path / "x.onnx")
    before = kinds(model)
    touched = even_scales(model)
    added = kinds(model) - before
    # Behind the table and `out`; in front of `head`, and of `value` and `gate` together.
    assert added["Mul"] == 4
    assert added.keys() <= {"Mul", "Add"}
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "even.onnx")
    assert error(tmp_path / "even.onnx", ids, wanted) < 1e-5
    named = {node.name: node.op_type for node in model.graph.node}
    assert {named[name] for name in touched} == {"Mul", "Add"}
    used = {name for node in model.graph.node for name in node.input}
    assert used >= {tensor.name for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        value = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        if value.ndim == 2:
            for dim in (0, 1):
                logs = value.abs().log().mean(dim)
                assert (logs.max() - logs.min()).exp() < UNLIKE


@pytest.mark.slow
@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", [(8, 6), (40,)])
@pytest.mark.parametrize("quantization", ["dynamic", "matmul", "all"])
def test_int8_keeps_what_is_small(
    tmp_path: Path, quantization: Any, shape: tuple[int, ...]
) -> None:
    errors = {}
    for name, scales in (("even", torch.ones(16)), ("unlike", SCALES)):
        ids, wanted = exported(scales, tmp_path / f"{name}.onnx", *shape)
        out = tmp_path / f"{name}-int8.onnx"
        if quantization == "dynamic":
            quantize_dynamic(tmp_path / f"{name}.onnx", out)
        else:
            quantize_static(tmp_path / f"{name}.onnx", out, [(ids,)], quantization)
        errors[name] = error(out, ids, wanted)
    assert errors["even"] < 0.05
    assert errors["unlike"] < 2 * errors["even"]


def test_products_without_names_keep_their_own_weights() -> None:
    """Names of nodes are optional in ONNX."""
    helper, generator = onnx.helper, torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, generator=generator) for _ in range(2)]
    scales = SCALES.log().div(8).exp()
    tensors = [(weights[0] / scales).numpy(), (weights[1] * scales[:, None]).numpy()]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"]),
            helper.make_node("MatMul", ["h", "b"], ["y"]),
        ],
        "two",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 16])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 16])],
        [
            onnx.numpy_helper.from_array(value, name)
            for value, name in zip(tensors, "ab", strict=True)
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    touched = even_scales(model)
    assert touched
    assert all(touched)
    x = torch.randn(4, 16, generator=generator)
    (found,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(found), x @ weights[0] @ weights[1], rtol=1e-3, atol=1e-3
    )


def test_table_with_infinities_stays() -> None:
    helper = onnx.helper
    table = torch.ones(4, 16) * SCALES
    table[0, 0] = -torch.inf
    graph = helper.make_graph(
        [helper.make_node("Gather", ["t", "i"], ["y"])],
        "table",
        [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 16])],
        [onnx.numpy_helper.from_array(table.numpy(), "t")],
    )
    model = helper.make_model(graph)
    assert even_scales(model) == []
    assert len(model.graph.node) == 1


def test_like_scales_and_what_does_not_count_stay(tmp_path: Path) -> None:
    exported(torch.logspace(-0.8, 0.8, 16), tmp_path / "x.onnx", 8, 6)
    model = onnx.load(tmp_path / "x.onnx")
    before = model.SerializeToString()
    assert even_scales(model) == []
    assert model.SerializeToString() == before
    # Of a feature without any weight there is nothing to tell.
    model = Block(torch.ones(16)).eval()
    with torch.no_grad():
        model.head.weight[:, 3] = 0
    export(model, torch.randint(50, (8, 6))).save(tmp_path / "zero.onnx")
    assert even_scales(onnx.load(tmp_path / "zero.onnx")) == []
