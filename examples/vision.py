"""A Vision Transformer of timm with BatchNorm in place of LayerNorm, trained, folded, exported.

    python vision.py

The pictures are made up: a bar in one of four directions. Needs timm; nothing is downloaded.
"""

from __future__ import annotations

import copy

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures (count, 3, 32, 32) of a bar and its direction, 0 to 3."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randint(4, (count,), generator=generator)
    angles = directions * torch.pi / 4
    rows, columns = torch.meshgrid(*[torch.linspace(-1, 1, 32)] * 2, indexing="ij")
    offsets = torch.rand(count, 1, 1, generator=generator) - 0.5
    across = torch.cos(angles)[:, None, None] * rows + torch.sin(angles)[:, None, None] * columns
    bars = (across - offsets).abs() < 0.15
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return bars[:, None].float() + 0.5 * noise, directions


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of pictures that the model gets right."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def operators(model: nn.Module, images: Tensor) -> int:
    """Return how many operators the exported model has."""
    nodes = torch.export.export(model, (images,)).graph.nodes
    return sum(node.op == "call_function" for node in nodes)


def main(steps: int = 150) -> None:
    """Swap, train, calibrate, fold, export."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=4,
    )  # fmt: skip
    images, labels = pictures(1024, seed=1)
    held_out = pictures(256, seed=2)

    # timm's own way builds the model with the norm: norm_layer=powernorm.BatchNorm.
    print(powernorm.swap(model, to="bn").plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        rows = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    powernorm.calibrate(model, images.split(64))
    model.eval()
    print(f"accuracy with BatchNorm: {accuracy(model, *held_out):.3f}")
    folded = copy.deepcopy(model)
    print(powernorm.fold(folded, images[:8]))
    print(f"accuracy folded: {accuracy(folded, *held_out):.3f}")

    before, after = operators(model, images[:8]), operators(folded, images[:8])
    print(f"operators in the exported graph: {before}, folded {after}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model is slower with more
    main()
