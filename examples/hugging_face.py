"""A small BERT that classifies texts, from Hugging Face's Trainer to ONNX without a norm.

    python hugging_face.py                 # made-up reviews
    python hugging_face.py reviews.csv     # your own: columns `text` and `label`

Nothing is downloaded: the tokenizer is trained on the texts, the model from random weights.
"""

from __future__ import annotations

import csv
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

import powernorm
from powernorm.integrations.huggingface import (
    PenaltyTrainerMixin,
    TrainerCalibrateCallback,
    TrainerNormCallback,
)

LENGTH = 48
COMMON = ["a", "the", "film", "story", "it", "was", "with", "and", "of", "plot"]
TELLING = {
    "bad": ["dull", "awful", "tedious"],
    "fair": ["decent", "usual", "fine"],
    "good": ["great", "lovely", "moving"],
}

Rows = list[tuple[str, str]]
"""Texts and their labels."""


class RegularizedTrainer(PenaltyTrainerMixin, Trainer):
    """The Trainer, with the penalty of Regularized BatchNorm in its loss."""


def read(path: Path) -> Rows:
    """Return the texts and labels of a CSV file, in a random order."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [(row["text"], row["label"]) for row in csv.DictReader(file)]
    random.Random(0).shuffle(rows)
    return rows


def made_up(count: int = 480) -> Rows:
    """Return short and long reviews, in which two words determine the label."""
    chance, labels = random.Random(1), list(TELLING)
    rows = []
    for i in range(count):
        label = labels[i % len(labels)]
        words = chance.choices(COMMON, k=i % 24) + chance.choices(TELLING[label], k=2)
        chance.shuffle(words)
        rows.append((" ".join(words), label))
    return rows


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose subwords are those of the texts."""
    plain = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    plain.normalizer = normalizers.Lowercase()
    plain.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=2000, special_tokens=special, show_progress=False
    )
    plain.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", model_max_length=LENGTH
    )


def build(tokenizer: PreTrainedTokenizerFast, labels: list[str]) -> BertForSequenceClassification:
    """Return a BERT with a BatchNorm in place of each LayerNorm."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    model = BertForSequenceClassification(config)
    print(powernorm.swap(model, to="rbn").plan)
    return model


def accuracy(predictions: Any) -> dict[str, float]:
    """Return the share of the texts with the right label."""
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def train(
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    parts: list[list[dict[str, Any]]],
    folder: Path,
    epochs: int,
) -> None:
    """Train until the accuracy on the second part stops improving; keep the best weights."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        learning_rate=3e-3,
        per_device_train_batch_size=32,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = RegularizedTrainer(
        model,
        arguments,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=parts[0],
        eval_dataset=parts[1],
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TrainerNormCallback(trainer))
    trainer.add_callback(TrainerCalibrateCallback(trainer))
    trainer.train()
    log, quantity = trainer.state.log_history, "norm/bert.embeddings.LayerNorm/mean_tid"
    for entry in log:
        if "eval_accuracy" in entry:
            print(f"epoch {entry['epoch']:.0f}: accuracy {entry['eval_accuracy']:.3f}")
    print(f"TID of the first norm's means: {[e[quantity] for e in log if quantity in e][-1]:.3f}")
    print(f"best, loaded: accuracy {trainer.evaluate()['eval_accuracy']:.3f}")


def scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the scores (texts, labels) in evaluation mode."""
    with torch.no_grad():
        return model.eval()(**batch).logits


def main(path: str = "", epochs: int = 12) -> None:
    """Train, save, load, fold, export."""
    disable_progress_bar()
    rows = read(Path(path)) if path else made_up()
    labels = sorted({label for _, label in rows})
    count = len(rows) * 4 // 5
    tokenizer = trained_tokenizer([text for text, _ in rows[:count]])
    tokens = tokenizer([text for text, _ in rows], truncation=True)["input_ids"]
    data = [
        {"input_ids": ids, "labels": labels.index(label)}
        for ids, (_, label) in zip(tokens, rows, strict=True)
    ]
    model = build(tokenizer, labels)
    batch = dict(tokenizer([t for t, _ in rows[count:]], padding=True, return_tensors="pt"))
    with TemporaryDirectory() as folder:
        train(model, tokenizer, [data[:count], data[count:]], Path(folder, "trainer"), epochs)
        wanted = scores(model, batch)
        stock, own, folded = (Path(folder, name) for name in ("stock", "own", "folded"))
        model.save_pretrained(stock)
        powernorm.save(model, own)
        for saved in (stock, own):
            assert torch.equal(scores(powernorm.load(saved), batch), wanted)
        print("save_pretrained, powernorm.save: loaded, equal scores")

        print(powernorm.fold(model, batch))
        assert not any(isinstance(module, powernorm.Norm) for module in model.modules())
        torch.testing.assert_close(scores(model, batch), wanted, rtol=1e-4, atol=1e-4)
        powernorm.save(model, folded)
        assert torch.equal(scores(powernorm.load(folded), batch), scores(model, batch))
        print("folded: no norm is left, equal scores")
    if find_spec("onnxscript") and find_spec("onnxruntime"):
        from powernorm.integrations import onnx

        sizes = {name: {0: "batch", 1: "length"} for name in batch}
        program = onnx.export(model, batch, dynamic_shapes=sizes)
        other = dict(tokenizer([rows[0][0], rows[1][0]], padding=True, return_tensors="pt"))
        print(f"ONNX: relative error {onnx.largest_error(program, model, other):.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model is slower with more
    main(*sys.argv[1:2])
