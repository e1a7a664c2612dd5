"""A sequence-to-sequence model of Hugging Face: the encoder's norms swapped, trained, folded.

    python translate.py

A small Marian from its configuration, nothing is downloaded. The task is made up: to write a
sequence of letters backwards. Sources have different lengths and are padded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

import powernorm

PAD, START, FIRST = 0, 1, 2
NUM_LETTERS = 12


def batch(generator: torch.Generator, size: int = 32) -> dict[str, Tensor]:
    """Return sources of 3 to 7 letters, their mask (1 = keep), and reversed targets."""
    lengths = torch.randint(3, 8, (size,), generator=generator)
    letters = torch.randint(NUM_LETTERS, (size, 7), generator=generator) + FIRST
    place = torch.arange(7)
    keep = place < lengths[:, None]
    backwards = (lengths[:, None] - 1 - place).clamp(min=0)
    return {
        "input_ids": letters.masked_fill(~keep, PAD),
        "attention_mask": keep.long(),
        "labels": letters.gather(1, backwards).masked_fill(~keep, -100),
    }


def right(model: MarianMTModel, rows: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Return greedy outputs and the share of letters that are right."""
    labels = rows["labels"]
    written = model.generate(
        rows["input_ids"], attention_mask=rows["attention_mask"], num_beams=1,
        do_sample=False, min_new_tokens=7, max_new_tokens=7,
    )[:, 1:]  # fmt: skip
    hits = (written == labels)[labels >= 0]
    return written, float(hits.float().mean())


def main(steps: int = 300) -> None:
    """Swap the encoder's norms, train, calibrate, fold, compare what is written."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config = MarianConfig(
        vocab_size=NUM_LETTERS + FIRST, d_model=32, encoder_layers=2, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=16, pad_token_id=PAD, eos_token_id=PAD,
        decoder_start_token_id=START, forced_eos_token_id=None, dropout=0.0,
    )  # fmt: skip
    model = MarianMTModel(config)
    # Of an encoder-decoder the encoder's norms are swapped; the decoder keeps its LayerNorms.
    print(powernorm.swap(model, to="bn").plan)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for _ in range(steps):
        loss = model(**batch(generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    powernorm.calibrate(model, [batch(generator) for _ in range(20)])
    model.eval()
    rows = batch(generator, 200)
    written, share = right(model, rows)
    print(f"letters right with BatchNorm: {share:.3f}")
    print(powernorm.fold(model, batch(generator, 4)))
    again, share = right(model, rows)
    print(f"letters right folded: {share:.3f}; the same sequences: {torch.equal(written, again)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
