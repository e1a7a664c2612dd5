"""A tiny token classifier with RBN, and an update with the penalty, written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.norms import RegularizedBatchNorm, build_norm

FEATURES, CLASSES = 6, 5
MEAN_PENALTY, VAR_PENALTY = 3.0, 2.0
"""Large enough that a wrong scale cannot hide."""

LEARNING_RATE = 0.05

Batch = Mapping[str, Tensor]


class Classifier(nn.Module):
    """Two norms over the tokens that have a label."""

    def __init__(self, norm: str = "rbn") -> None:
        super().__init__()
        torch.manual_seed(0)
        options = (
            {"mean_penalty": MEAN_PENALTY, "var_penalty": VAR_PENALTY} if norm == "rbn" else {}
        )
        self.lower = build_norm(norm, FEATURES, dtype=torch.float64, **options)
        self.between = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.upper = build_norm(norm, FEATURES, dtype=torch.float64, **options)
        self.head = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def logits(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        hidden = self.between(self.lower(x, padding_mask)).tanh() * 2
        return self.head(self.upper(hidden, padding_mask))


def batches(number: int, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Micro-batches of equal shape with very unequal numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(number):
        x = torch.randn(4, 7, FEATURES, generator=generator, dtype=torch.float64) * (1 + index % 3)
        labels = torch.randint(CLASSES, (4, 7), generator=generator)
        labels[0, 2:] = -100
        if index % 2:
            labels[1:3] = -100
        made.append({"x": x, "labels": labels})
    return made


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def num_labels(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


class PenaltiesByHand:
    """SPEC 4 written out, for copies of the layers that have no penalty of their own."""

    def __init__(self, model: nn.Module, masked_by: Callable[[], Tensor | None]) -> None:
        self.total: list[Tensor] = []
        self._masked_by = masked_by
        for layer in model.modules():
            if isinstance(layer, RegularizedBatchNorm):
                layer.mean_penalty = layer.var_penalty = 0.0
                layer.register_forward_pre_hook(self._add)

    def _add(self, layer: RegularizedBatchNorm, args: tuple[Tensor, ...]) -> None:
        mask = self._masked_by()
        tokens = args[0].flatten(0, -2) if mask is None else args[0][~mask]
        mean, var = tokens.mean(0), tokens.var(0, correction=0)
        new_mean = torch.lerp(layer.running_mean, mean.detach(), layer.momentum)
        new_var = torch.lerp(layer.running_var, tokens.detach().var(0), layer.momentum)
        self.total.append(
            MEAN_PENALTY * (new_mean - mean).square().sum()
            + VAR_PENALTY * (new_var - var).abs().sum()
        )

    def take(self) -> Tensor:
        total, self.total = torch.stack(self.total).sum(), []
        return total


def by_hand(
    model: Classifier,
    updates: Sequence[Sequence[Batch]],
    weight: Callable[[Sequence[Batch], Batch], float],
) -> Classifier:
    """SGD on Σ_i weight_i (token sum_i + penalty_i) over the micro-batches i of each update."""
    reference = copy.deepcopy(model).train()
    current: list[Tensor] = []
    penalties = PenaltiesByHand(reference, lambda: current[-1])
    optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    for update in updates:
        optimizer.zero_grad()
        for batch in update:
            mask = batch["labels"] == -100
            current[:] = [mask]
            loss = cross_entropy_sum(reference.logits(batch["x"], mask), batch["labels"])
            ((loss + penalties.take()) * weight(update, batch)).backward()
        optimizer.step()
    return reference


def mean_of_means(update: Sequence[Batch], batch: Batch) -> float:
    """Means over micro-batches, averaged."""
    return 1 / (len(update) * num_labels(batch))


def over_all_tokens(update: Sequence[Batch], batch: Batch) -> float:
    """One mean over the tokens of the update."""
    del batch
    return 1 / sum(num_labels(micro) for micro in update)


def assert_same_state(
    found: nn.Module, expected: nn.Module, *, rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n} {m}"
        )
