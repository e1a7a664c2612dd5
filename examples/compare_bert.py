"""A BERT classifier on texts from a CSV file, by Hugging Face's Trainer, trained with each norm.

    powernorm compare compare_bert:train --seeds 3 --goal accuracy:max --set data=reviews.csv

from this folder. The file has the columns `text` and `label`. Texts are padded to the longest of a
batch; `run.swap` passes the model's attention mask to the norms, so that padding counts in none.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import DatasetDict, load_dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

import powernorm_lab as lab
from powernorm.integrations.huggingface import PenaltyTrainerMixin, RunCallback


class RegularizedTrainer(PenaltyTrainerMixin, Trainer):
    """The Trainer, with the penalty of Regularized BatchNorm in its loss."""

    def count_loss_tokens(self, inputs: Any) -> int:
        """Return the number of labels that the loss averages over: one per row."""
        return len(inputs["labels"])


def read(data: str, max_length: int) -> tuple[DatasetDict, PreTrainedTokenizerFast, list[str]]:
    """Return tokenized texts, their tokenizer, which is trained on them, and the classes."""
    rows = load_dataset("csv", data_files=data, split="train")
    classes = sorted({str(label) for label in rows["label"]})
    parts = rows.train_test_split(test_size=0.2, seed=0)
    plain = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    plain.normalizer = normalizers.Lowercase()
    plain.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    plain.train_from_iterator(
        parts["train"]["text"], trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(row["text"], truncation=True, max_length=max_length)
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": classes.index(str(row["label"])),
        }

    names = parts["train"].column_names
    return parts.map(tokenize, remove_columns=names), tokenizer, classes


def train(
    run: lab.Run,
    *,
    data: str = "reviews.csv",
    steps: int = 300,
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    max_length: int = 48,
    width: int = 64,
    layers: int = 2,
) -> dict[str, float]:
    """Train one model, and return its accuracy on held-out texts."""
    texts, tokenizer, classes = read(data, max_length)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        num_labels=len(classes),
    )
    model = run.swap(BertForSequenceClassification(config))
    arguments = TrainingArguments(
        output_dir=str(run.path("trainer")),
        max_steps=steps,
        learning_rate=learning_rate,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=64,
        logging_steps=max(1, steps // 20),
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        save_steps=max(1, steps // 4),
        save_total_limit=2,
        seed=run.seed,
        use_cpu=run.device.type == "cpu",
        disable_tqdm=True,
        report_to="none",
    )
    callback = RunCallback(run)
    trainer = RegularizedTrainer(
        model,
        arguments,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=texts["train"],
        eval_dataset=texts["test"],
        compute_metrics=accuracy,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)  # the run shows what is logged
    disable_progress_bar()
    trainer.train(resume_from_checkpoint=callback.last_checkpoint)
    found = trainer.evaluate()
    return {"accuracy": found["eval_accuracy"], "valid_loss": found["eval_loss"]}


def accuracy(predictions: Any) -> dict[str, float]:
    """Return the share of the texts with the right class."""
    logits, labels = torch.tensor(predictions.predictions), torch.tensor(predictions.label_ids)
    return {"accuracy": (logits.argmax(-1) == labels).double().mean().item()}
