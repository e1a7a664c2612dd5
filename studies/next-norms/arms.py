"""Arms of the study: one character model of 12 layers, by placement, decay of γ, start of DyT.

The model is written out in plain torch, so that every equation is on this page; its norms are this
library's. Every arm has the learning rate with the lowest validation loss of its own trials.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
import powernorm_lab as lab

SEEDS = (0, 1, 2, 3, 4)
TRIAL_SEED = 100
RATES = (1e-3, 2e-3, 4e-3)
STEPS, LENGTH, BATCH, CHARACTERS = 200, 64, 8, 128
LAYERS, FEATURES, HEADS = 12, 48, 4
WEIGHT_DECAY = 0.1
GAMMA_DECAY = 2.0
"""Decay of γ: at a rate of 2e-3 they fall by 2 percent with 0.1, and by a third with 2."""


@dataclass(frozen=True)
class Arm:
    """A model and what its optimizer decays.

    Args:
        placement: `pre`, `post`, `peri`, `lns` or `hybrid`.
        decayed: which norms' γ are decayed: `none`, `input`, `output` or `all`.
        alpha: start of DyT's α; None has LayerNorm.
        tuned_as: the arm whose trials give the learning rate; None is its own.
    """

    placement: str = "pre"
    decayed: str = "none"
    alpha: float | None = None
    tuned_as: str | None = None


ARMS = {
    "pre": Arm(),
    "lns": Arm("lns"),
    "peri": Arm("peri"),
    "peri-input": Arm("peri", "input"),
    "peri-output": Arm("peri", "output"),
    "hybrid": Arm("hybrid"),
    "post": Arm("post"),
    "dyt-0.5": Arm(alpha=0.5),
    "dyt-0.2": Arm(alpha=0.2, tuned_as="dyt-0.5"),
    "dyt-1": Arm(alpha=1.0, tuned_as="dyt-0.5"),
    "dyt-2": Arm(alpha=2.0, tuned_as="dyt-0.5"),
}


class Block(nn.Module):
    """A layer: `x + out(f(in(x)))` for attention and feed-forward, as far as the arm has norms."""

    def __init__(self, placement: str, layer: int, norm: Any) -> None:
        super().__init__()
        self.placement = placement
        self.scale = layer**-0.5 if placement == "lns" else 1.0
        self.query_key_value = nn.Linear(FEATURES, 3 * FEATURES)
        self.output = nn.Linear(FEATURES, FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
        self.attention_norm, self.feedforward_norm = norm(FEATURES), norm(FEATURES)
        if placement == "peri":
            self.attention_output_norm, self.feedforward_output_norm = (
                norm(FEATURES),
                norm(FEATURES),
            )
        if placement == "hybrid":
            self.head_norms = nn.ModuleList(norm(FEATURES // HEADS) for _ in range(3))
            del self.feedforward_norm

    def attention(self, x: Tensor) -> Tensor:
        """Attend to earlier positions; x is (batch, length, features)."""
        parts = self.query_key_value(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if self.placement == "hybrid":
            parts = [norm(part) for norm, part in zip(self.head_norms, parts, strict=True)]
        heads = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def feedforward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward network to every position."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.placement == "post":
            x = self.attention_norm(x + self.attention(x))
            return self.feedforward_norm(x + self.feedforward(x))
        if self.placement == "hybrid":  # Zhuo et al. 2025
            x = self.attention_norm(x + self.attention(x))
            return x + self.feedforward(x)
        if self.placement == "peri":  # Kim et al. 2025
            x = x + self.attention_output_norm(self.attention(self.attention_norm(x)))
            return x + self.feedforward_output_norm(self.feedforward(self.feedforward_norm(x)))
        x = x + self.attention(self.scale * self.attention_norm(x))
        return x + self.feedforward(self.scale * self.feedforward_norm(x))


class CharacterModel(nn.Module):
    """Predicts each character from those before it."""

    def __init__(self, placement: str, norm: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, FEATURES)
        self.positions = nn.Embedding(LENGTH, FEATURES)
        blocks = (Block(placement, layer, norm) for layer in range(1, LAYERS + 1))
        self.layers = nn.Sequential(*blocks)
        self.final_norm = nn.Identity() if placement == "post" else norm(FEATURES)
        self.head = nn.Linear(FEATURES, CHARACTERS)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits, (batch, length, characters)."""
        x = self.embedding(characters) + self.positions.weight[: characters.shape[1]]
        return self.head(self.final_norm(self.layers(x)))


def decayed_norms(model: nn.Module, which: str) -> list[str]:
    """Return the names of the γ that are decayed.

    An input norm is followed by a linear map, which its γ could be part of; an output norm is on a
    branch behind its last map. The final norm is followed by the output map: an input norm.
    """
    names = [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]
    is_output = {name: "output_norm" in name for name in names}
    wanted = {"none": (), "input": (False,), "output": (True,), "all": (False, True)}[which]
    return [name for name in names if is_output[name] in wanted]


@cache
def text(split: str) -> Tensor:
    """Return the characters of a split of the English sentences of powernorm-data, below 128."""
    joined = "\n".join(lab.embedded_sentences()[split])
    return torch.tensor([min(ord(one), CHARACTERS - 1) for one in joined])


def train(
    run: lab.Run, *, arm: str = "pre", learning_rate: float = 1e-3, steps: int = STEPS
) -> dict[str, float]:
    """Train an arm and return its losses in nats a character.

    Args:
        run: of the comparison.
        arm: a name of `ARMS`.
        learning_rate: the highest of a cosine with a tenth of warm-up.
        steps: updates.
    """
    what = ARMS[arm]
    torch.manual_seed(run.seed)

    model = CharacterModel(what.placement, run.build_norm)
    gammas = set(decayed_norms(model, what.decayed))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay} for decay in (WEIGHT_DECAY, GAMMA_DECAY, 0.0)
    ]
    for name, parameter in model.named_parameters():
        kind = 0 if parameter.ndim > 1 else 1 if name in gammas else 2
        groups[kind]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)
    data, generator = text("train"), torch.Generator().manual_seed(run.seed)
    found: dict[str, float] = {}
    for step in range(steps):
        rate = min((step + 1) / (steps / 10), 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
        rows = data[starts + torch.arange(LENGTH + 1)]
        if what.alpha is not None and step == steps // 10:
            found["saturated"] = saturated_share(model, rows[:, :-1])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        if not loss.isfinite():
            break
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found | {f"{split}_loss": evaluate(model, split) for split in ("valid", "test")}


@torch.no_grad()
def saturated_share(model: nn.Module, characters: Tensor) -> float:
    """Return the share of inputs of all DyT with |α x| > 1, the mean over the layers."""
    shares: list[Tensor] = []

    def note(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        shares.append((norm.get_parameter("alpha") * args[0]).abs().gt(1).double().mean())

    norms = [one for one in model.modules() if isinstance(one, powernorm.DynamicTanh)]
    handles = [one.register_forward_pre_hook(note) for one in norms]
    model(characters)
    for handle in handles:
        handle.remove()
    return float(torch.stack(shares).mean())


@torch.no_grad()
def evaluate(model: nn.Module, split: str) -> float:
    """Return the loss over 30,000 characters of a split."""
    rows = text(split)[: 30_000 // LENGTH * LENGTH].view(-1, LENGTH)
    losses = [
        F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        for part in rows.split(64)
    ]
    return float(torch.cat(losses).mean())


def run_arm(out: Path, arm: str, rate: float, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train what is missing of an arm at a rate; return a row a seed."""
    folder = out / f"{arm}-{rate:g}-{seeds[0]}"
    comparison = lab.compare(
        train,
        folder,
        norms=["ln" if ARMS[arm].alpha is None else "dyt"],
        norm_options={} if ARMS[arm].alpha is None else {"dyt": {"alpha": ARMS[arm].alpha}},
        seeds=seeds,
        goal={"test_loss": "min"},
        settings={"arm": arm, "learning_rate": rate},
        device="cpu",
        num_threads=1,
        resume=folder.exists(),
        quiet=True,
    )
    return [
        {"arm": arm, "learning_rate": rate, "seed": one.seed, **one.metrics}
        for one in comparison.runs
    ]
