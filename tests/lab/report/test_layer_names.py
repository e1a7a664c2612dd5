import pytest

from powernorm.lab.report.layer_names import short_names

BERT = [
    "bert.embeddings.LayerNorm",
    "bert.encoder.layer.0.attention.output.LayerNorm",
    "bert.encoder.layer.11.output.LayerNorm",
]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (BERT, ["embeddings", "…layer.0.attention.output", "encoder.layer.11.output"]),
        (["blocks.0.norm", "blocks.1.norm"], ["blocks.0", "blocks.1"]),
        (["layers.0.norm1", "layers.1.norm2"], ["layers.0.norm1", "layers.1.norm2"]),
        (["a.blocks.0.norm1", "a.blocks.0.norm2"], ["norm1", "norm2"]),
        (["a.attention.norm", "a.final_norm"], ["attention", "final_norm"]),
        (["norm"], ["norm"]),
        (["a.b.norm"], ["norm"]),
        (["a", "a.b"], ["a", "b"]),
        (["x" * 40, "y" * 40], ["…" + "x" * 27, "…" + "y" * 27]),
    ],
)
def test_short_names_say_what_differs(layers: list[str], names: list[str]) -> None:
    assert short_names(layers) == names
