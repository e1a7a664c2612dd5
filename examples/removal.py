"""LayerNorm out of a trained GPT-2: the norms become constants, then move into the weights.

    python removal.py                    # a small random GPT-2 that learns a made-up text first
    python removal.py gpt2-folder text.txt   # a folder of Hugging Face's and a text

Needs powernorm-lab and transformers; nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import powernorm_lab

LENGTH = 32


def made_up(count: int) -> list[dict[str, Tensor]]:
    """Return batches of a text in which each token follows from the two before it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (count, 8, LENGTH), generator=generator)
    for place in range(2, LENGTH):
        tokens[:, :, place] = (tokens[:, :, place - 1] + tokens[:, :, place - 2]) % 50
    return [{"input_ids": one, "labels": one} for one in tokens]


def learned(batches: list[dict[str, Tensor]]) -> GPT2LMHeadModel:
    """Return a small GPT-2 that has learned the batches."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for rows in batches:
        model(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def read(folder: str, text: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return the model of a folder, and the text in batches of its tokens."""
    tokens = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(encoding="utf-8")).input_ids
    rows = torch.tensor(tokens[: len(tokens) // (8 * LENGTH) * 8 * LENGTH]).view(-1, 8, LENGTH)
    return AutoModelForCausalLM.from_pretrained(folder), [
        {"input_ids": one, "labels": one} for one in rows
    ]


def loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Return the mean loss in nats."""
    with torch.no_grad():
        return sum(float(model(**rows).loss) for rows in batches) / len(batches)


def main(folder: str = "", text: str = "", steps: int = 60) -> None:
    """Learn or load, remove, compare, load the result without powernorm."""
    torch.manual_seed(0)
    if folder:
        model, batches = read(folder, text)
    else:
        batches = made_up(200)
        model = learned(batches)
    held_out = batches[9::10]  # what `remove` holds out, too
    print(f"loss with LayerNorm: {loss(model.eval(), held_out):.3f}")

    with tempfile.TemporaryDirectory() as out:
        settings = ["method.name=match-centered", "method.batches=8", f"training.steps={steps}"]
        removed = powernorm_lab.remove(
            (model, batches), out + "/removed", settings=settings, stock=True
        )
        print(f"loss without: {loss(removed.model, held_out):.3f}")
        # The class of transformers, whose norms divide by a constant: powernorm is not needed.
        alone = AutoModelForCausalLM.from_pretrained(out + "/removed/stock").eval()
    rows = held_out[0]
    with torch.no_grad():
        gap = (alone(**rows).logits - removed.model(**rows).logits).abs().max()
    print(f"transformers' own class differs by {gap:.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:3])
