"""Operators of a graph by kind, on graphs whose counts can be made by hand."""

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

from int8.operators import count_operators  # noqa: E402


def graph(*nodes: tuple[str, list[str], list[str]], kind: str = "FLOAT") -> Any:
    helper = onnx.helper
    made = [
        helper.make_node(*node, domain="com.microsoft" if node[0].startswith("Skip") else "")
        for node in nodes
    ]
    x = helper.make_tensor_value_info("x", getattr(onnx.TensorProto, kind), [2, 4])
    last = helper.make_empty_tensor_value_info(nodes[-1][2][0])
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(made, "g", [x], [last]), opset_imports=versions)


def test_what_norms_and_softmax_hold_is_counted() -> None:
    found = count_operators(
        graph(
            ("LayerNormalization", ["x", "x"], ["a"]),
            ("SkipSimplifiedLayerNormalization", ["a", "a", "a"], ["b"]),
            ("Softmax", ["b"], ["c"]),
            ("Sqrt", ["c"], ["d"]),
            ("Reciprocal", ["d"], ["e"]),
            ("Transpose", ["e"], ["f"]),
        )
    )
    assert (found.operators, found.norms, found.floating) == (6, 2, 5)
    assert (found.reductions, found.square_roots, found.divisions) == (2 + 1 + 2, 3, 4)
    assert found.exponentials == 1
    assert found.by_type["Softmax"] == 1


def test_integers_are_no_floating_point() -> None:
    quantized = count_operators(
        graph(
            ("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            ("MatMulInteger", ["q", "q"], ["i"]),
            ("Cast", ["i"], ["f"]),
            ("DequantizeLinear", ["q", "s", "z"], ["d"]),
            ("Mul", ["d", "s"], ["y"]),
        )
    )
    assert (quantized.quantize, quantized.dequantize, quantized.casts) == (1, 1, 1)
    assert (quantized.integer, quantized.floating) == (1, 1)
    sizes = count_operators(graph(("Add", ["x", "x"], ["y"]), kind="INT64"))
    assert (sizes.operators, sizes.floating) == (1, 0)


def test_operators_of_functions_are_counted() -> None:
    helper = onnx.helper
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    body = [helper.make_node("Sqrt", ["a"], ["b"]), helper.make_node("Div", ["a", "b"], ["c"])]
    function = helper.make_function("mine", "half", ["a"], ["c"], body, versions[:1])
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        [helper.make_node("half", ["x"], ["y"], domain="mine")],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [2])],
        [value("y", onnx.TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(made, functions=[function], opset_imports=versions)
    found = count_operators(model)
    assert (found.operators, found.square_roots, found.divisions, found.floating) == (2, 1, 1, 2)
