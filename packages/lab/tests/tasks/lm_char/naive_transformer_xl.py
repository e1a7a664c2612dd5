"""Transformer-XL with loops over rows, positions, heads and keys."""

import math

import torch
from torch import Tensor

from powernorm_lab.tasks.lm_char.model import RelativeLayer, TransformerXL


def naive_logits(model: TransformerXL, tokens: Tensor, length: int, memory: int) -> Tensor:
    """Return the logits of a text in segments, for a float64 model in evaluation mode."""
    return torch.stack([_row(model, row, length, memory) for row in tokens])


def _row(model: TransformerXL, tokens: Tensor, length: int, memory: int) -> Tensor:
    kept: list[list[Tensor]] = [[] for _ in model.layers]
    outputs = []
    for first in range(0, len(tokens), length):
        x = [
            model.embedding.weight[token] * math.sqrt(model.embedding.weight.shape[1])
            for token in tokens[first : first + length].tolist()
        ]
        for layer, before in zip(model.layers, kept, strict=True):
            assert isinstance(layer, RelativeLayer)
            x, inner = _layer(layer, x, before, model.max_distance)
            before.extend(inner)
            del before[: max(len(before) - memory, 0)]
        if model.final_norm is not None:
            x = [_norm(model.final_norm, vector) for vector in x]
        outputs += [model.embedding.weight @ vector + model.head.bias for vector in x]
    return torch.stack(outputs)


def _layer(
    layer: RelativeLayer, x: list[Tensor], before: list[Tensor], max_distance: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    is_pre = layer.attention_frame.places.before
    first, second = layer.attention_frame.norm, layer.feedforward_frame.norm
    inner = [_norm(first, vector) if is_pre else vector for vector in x]
    attended = [
        _attended(layer, inner[i], before + inner[: i + 1], max_distance) for i in range(len(x))
    ]
    h = [vector + branch for vector, branch in zip(x, attended, strict=True)]
    if not is_pre:
        h = [_norm(first, vector) for vector in h]
    fed = [layer.feedforward(_norm(second, vector) if is_pre else vector) for vector in h]
    y = [vector + branch for vector, branch in zip(h, fed, strict=True)]
    return (y if is_pre else [_norm(second, vector) for vector in y]), inner


def _attended(
    layer: RelativeLayer, x: Tensor, context: list[Tensor], max_distance: int | None
) -> Tensor:
    attention = layer.attention
    size = len(x) // attention.num_heads
    heads = []
    for head in range(attention.num_heads):
        part = slice(head * size, (head + 1) * size)
        u, v = attention.content_bias[head, 0], attention.distance_bias[head, 0]
        query = (attention.query.weight @ x)[part]
        key_weight, value_weight = attention.key_value.weight.chunk(2)
        scores = []
        for place, vector in enumerate(context):
            distance = len(context) - 1 - place
            if max_distance is not None:
                distance = min(distance, max_distance)
            key = (key_weight @ vector)[part]
            encoded = (attention.distance.weight @ _encoding(distance, len(x)))[part]
            scores.append((torch.dot(query + u, key) + torch.dot(query + v, encoded)) / size**0.5)
        weights = torch.stack(scores).softmax(0)
        values = [(value_weight @ vector)[part] for vector in context]
        mixed = [weight * value for weight, value in zip(weights, values, strict=True)]
        heads.append(torch.stack(mixed).sum(0))
    return attention.output.weight @ torch.cat(heads)


def _encoding(distance: int, features: int) -> Tensor:
    values = []
    for feature in range(features):
        angle = distance / 10000 ** ((feature - feature % 2) / features)
        values.append(math.cos(angle) if feature % 2 else math.sin(angle))
    return torch.tensor(values, dtype=torch.float64)


def _norm(norm: torch.nn.Module, x: Tensor) -> Tensor:
    y: Tensor = norm(x[None, None], None)
    return y[0, 0]
