"""A pretrained model that is none: a random BERT and a tokenizer of whole words, in a folder."""

from pathlib import Path

import pytest

WORDS = tuple(f"{a}{b}" for a in ("wa", "pe", "to") for b in ("r", "ace"))
TEXTS = [" ".join(WORDS[(start + 3 * i) % len(WORDS)] for i in range(8)) for start in range(40)]


def write_encoder(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[PAD]", "[UNK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.save_pretrained(folder)
    return folder
