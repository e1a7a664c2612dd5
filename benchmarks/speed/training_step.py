"""The cost of a norm in a whole training step of the papers' small translation model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import powernorm
from speed.norms import make_row
from speed.providers import BASELINE, NORMS, Case
from speed.rows import Known, Note, Row
from speed.showing import MEMORY, Mark, View, milliseconds, text
from speed.timing import Step, interleave, measure_memory, nothing

STEP_NORMS: Final = ("bn", "rbn", "pn", "pn-static")
TORCH_BATCH_NORM: Final = "torch BatchNorm1d"
VOCABULARY: Final = 10_000
SENTENCES, LENGTH = 128, 32
"""A batch of 4,096 tokens, padding included, on each side."""
PADDING: Final = 0.15

VIEW: Final = View(
    case=Case._fields,
    title=lambda row: (
        f"a training step, 6 + 6 layers of {row['features']}, {row['tokens']} tokens a side"
    ),
    name=lambda row: str(row["norm"]),
    columns=milliseconds(0) | {"/ LayerNorm": lambda row: text(row, "ratio", ".3f")} | MEMORY,
    heading="time over torch's LayerNorm",
    marks={
        "step": Mark("powernorm's kernels", "#6aaedb"),
        "torch": Mark("torch and others", "#e3ab84"),
    },
    series="backend",
)


class Batch(NamedTuple):
    """Source and target words with their padding, True = padding."""

    source: Tensor
    target: Tensor
    source_padding: Tensor
    target_padding: Tensor


class TranslationModel(nn.Module):
    """6 + 6 layers, 512 features, 4 heads, 1024 hidden, tied embeddings; pre-norm.

    Args:
        norm: makes each norm of the encoder; None leaves torch's LayerNorm everywhere.
    """

    def __init__(self, norm: Callable[[int], nn.Module] | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 512)
        nn.init.normal_(self.embedding.weight, std=512**-0.5)
        sizes: dict[str, Any] = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(512, 4, 1024, **sizes),
            6,
            norm=nn.LayerNorm(512),
            # Let padding reach the norms.
            enable_nested_tensor=False,
        )
        self.body = nn.Transformer(512, 4, 6, 6, 1024, custom_encoder=encoder, **sizes)
        if norm is not None:
            for layer in self.body.encoder.layers:
                layer.norm1, layer.norm2 = norm(512), norm(512)
            self.body.encoder.norm = norm(512)

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the next word."""
        inputs, wanted = batch.target[:, :-1], batch.target[:, 1:]
        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        with powernorm.padding_mask(batch.source_padding):
            memory = self.body.encoder(
                self.embedding(batch.source), src_key_padding_mask=batch.source_padding
            )
        decoded = self.body.decoder(
            self.embedding(inputs),
            memory,
            tgt_mask=causal,
            tgt_key_padding_mask=batch.target_padding[:, :-1]
            .float()
            .masked_fill(batch.target_padding[:, :-1], float("-inf")),
            memory_key_padding_mask=batch.source_padding,
            tgt_is_causal=True,
        )
        logits = decoded[~batch.target_padding[:, 1:]] @ self.embedding.weight.t()
        return nn.functional.cross_entropy(
            logits, wanted[~batch.target_padding[:, 1:]], label_smoothing=0.1
        )


class TokenBatchNorm(nn.BatchNorm1d):
    """torch's batch normalization over all tokens: no mask, so padding counts."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` of (batch, length, features), normalized."""
        return super().forward(x.flatten(0, 1)).view_as(x)


def make_batch(seed: int) -> Batch:
    """Return random words in sentences whose lengths vary."""
    generator = torch.Generator().manual_seed(seed)
    words = [
        torch.randint(VOCABULARY, (SENTENCES, LENGTH + extra), generator=generator)
        for extra in (0, 1)
    ]
    shortest = int(LENGTH * (1 - 2 * PADDING))
    masks = []
    for tokens in words:
        lengths = torch.randint(shortest, LENGTH + 1, (SENTENCES, 1), generator=generator)
        masks.append(torch.arange(tokens.shape[1]) >= lengths)
    return Batch(*words, *masks)


def measure_steps(seconds: float, known: Known, note: Note) -> Iterator[list[Row]]:
    """Yield a row a norm, of forward, penalty, backward and Adam; see `Measure` in `bench.py`."""
    case = Case(SENTENCES * LENGTH, 512, padding=PADDING)
    if case in known:
        return
    batch = make_batch(0)
    steps = {
        BASELINE: make_training_step(None, batch),
        TORCH_BATCH_NORM: make_training_step(TokenBatchNorm, batch),
    }
    for name in STEP_NORMS:
        build = partial(powernorm.build_norm, name, **NORMS[name])
        steps[name] = make_training_step(build, batch, penalized=name == "rbn")
    note(f"training steps of {', '.join(steps)}")
    samples = interleave(steps, seconds=seconds, long=True)
    base = samples[BASELINE]
    memory = measure_memory(steps)
    yield [
        make_row(
            case,
            (f"training step, {name}", name, "step" if name in STEP_NORMS else "torch"),
            samples[name],
            base,
            base,
            (memory[name], memory[BASELINE]),
        )
        for name in steps
    ]


def make_training_step(
    build: Callable[[int], nn.Module] | None, batch: Batch, *, penalized: bool = False
) -> Step:
    """Return one step of training: forward, penalty (if the norms have one), backward, Adam."""
    torch.manual_seed(0)
    model = TranslationModel(build)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    num_tokens = int((~batch.target_padding[:, 1:]).sum())

    def step(between: Callable[[], None] = nothing) -> None:
        loss = model(batch)
        if penalized:
            loss = loss + powernorm.penalty(model, reduction="mean", num_tokens=num_tokens)
        between()
        loss.backward()
        optimizer.step()
        # At the end: the next step's gradients are memory of that step.
        optimizer.zero_grad()

    return step
