"""A Hugging Face folder as what a removal begins with: its model, and batches of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.integrations.pretrained import load_pretrained
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.corpus import EvaluatedSplit, Split
from powernorm.lab.data.orders import Shuffled
from powernorm.lab.data.readers import load_corpus
from powernorm.lab.removal.original import Original
from powernorm.lab.removal.settings import RemovalDataSettings
from powernorm.lab.training.losses import outputs_nll

Objective = Literal["causal", "masked", "none"]
"""What a model's head says: the next token, the token under a mask, or nothing that is known."""

_MASKED_PART: Final = 0.15
"""Of the tokens of a masked language model; of these 80 % become the mask token and 10 % another
(Devlin et al. 2019)."""
_EMBEDDED: Final = "rt"
"""The text where none is named: sentences."""

Inputs = dict[str, Tensor]


class PretrainedOriginal(Original):
    """A model of a folder in Hugging Face's layout, with the batches of a text.

    A causal language model reads the text as one stream, an end mark behind each document, in rows
    of full length. Others read a document a row, padded.

    Args:
        path: the folder.
        data: the text, and how it is cut.
        seed: of the order of the rows.

    Raises:
        InputError: model or tokenizer cannot be loaded, some of its weights are missing, or the
            text is too short.
    """

    def __init__(self, path: Path, data: RemovalDataSettings, seed: int) -> None:
        found = load_pretrained(path, with_head=True)
        name = f"{type(found.model).__name__} in {path.resolve().name}"
        # Updates of weights that are stored in half precision would be rounded away.
        super().__init__(name, found.model.float())
        if found.missing and _is_known(found.missing, self.model):
            raise InputError(
                f"{path} has no weights for {found.missing[0]}, so that what the model says is "
                "random: give a folder with all of them"
            )
        if found.model.config.is_encoder_decoder:
            raise InputError(
                f"{path} holds an encoder-decoder, whose batches a text alone does not give: make "
                "them yourself, and give module:name of (model, batches)"
            )
        self.folder = path
        self.objective: Objective = _objective(type(found.model).__name__)
        self.has_loss = self.objective != "none"
        self.has_logits = self.has_loss or _tells_classes(self.model)
        corpus = load_corpus(data.path or _EMBEDDED)
        self.data_fingerprint = corpus.fingerprint()
        self._tokenizer = found.tokenizer
        self._seed = seed
        self._batch_size = data.batch_size
        length = min(data.sequence_length, found.longest())
        self._rows: dict[Split, list[list[int]]] = {
            split: self._cut(documents, length) for split, documents in corpus.documents.items()
        }
        self._elsewhere: list[list[int]] = []
        if data.other is not None:
            self._elsewhere = self._cut(load_corpus(data.other).documents["test"], length)
        # Not by length: what is saved in padding, the noise of such batches costs in updates.
        self._order = Shuffled(
            len(self._rows["train"]),
            batch_size=data.batch_size,
            seed=seed,
            unit=f"rows of up to {length} tokens",
        )

    def batch(self, position: int) -> Inputs:
        """Return a batch: rows in an order that seed and epoch determine."""
        rows = self._rows["train"]
        chosen = self._order.at(position).tolist()
        return self._made([rows[index] for index in chosen], position + 1)

    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Sequence[Inputs]:
        """Return the batches of a split, whole or about so many tokens, evenly spaced."""
        rows = self._rows[split]
        total = sum(map(len, rows))
        if max_tokens is not None and total > max_tokens:
            number = max(1, round(len(rows) * max_tokens / total))
            rows = [rows[index * len(rows) // number] for index in range(number)]
        return self._in_batches(rows)

    def elsewhere(self) -> Sequence[Inputs]:
        """Return the batches of the test split of another text."""
        return self._in_batches(self._elsewhere)

    def _in_batches(self, rows: Sequence[Sequence[int]]) -> list[Inputs]:
        starts, by_length = range(0, len(rows), self._batch_size), sorted(rows, key=len)
        return [self._made(by_length[at : at + self._batch_size], -1 - at) for at in starts]

    def example_inputs(self) -> Inputs:
        """Return two rows of the text, as the model takes them."""
        return self.inputs(self._made(self._rows["train"][:2], 0))

    def inputs(self, batch: Inputs) -> Inputs:
        """Return the keyword arguments of the model in a batch."""
        return {name: value for name, value in batch.items() if name != "targets"}

    def run(self, model: nn.Module, batch: Inputs) -> Any:
        """Call a model on a batch."""
        return model(**self.inputs(batch))

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits that go with the targets; of a causal model without the last ones."""
        found = super().logits(outputs)
        return found[:, :-1] if self.objective == "causal" else found

    def valid(self, batch: Inputs) -> Tensor | None:
        """Return the positions that are no padding."""
        mask = batch["attention_mask"].bool()
        return mask[:, 1:] if self.objective == "causal" else mask

    def embeddings(self, outputs: Any, batch: Inputs) -> Tensor | None:
        """Return the mean of the hidden states of each row's tokens, of a model without a head."""
        states = getattr(outputs, "last_hidden_state", None)
        if self.has_logits or states is None:
            return None
        keep = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean: Tensor = (states * keep).sum(1) / keep.sum(1)
        return mean

    def nll(self, model: nn.Module, outputs: Any, batch: Inputs) -> tuple[Tensor, float]:
        """Return the summed loss of a batch in nats, and the number of its targets."""
        targets = batch["targets"]
        loss = outputs_nll(model, self.logits(outputs), targets)
        return loss, float((targets != IGNORED).sum())

    def _cut(self, documents: Sequence[str], length: int) -> list[list[int]]:
        """Return the rows of token ids of a split."""
        if self.objective != "causal":
            if not documents:
                return []
            encoded = self._tokenizer(list(documents), truncation=True, max_length=length)
            return [list(row) for row in encoded["input_ids"]]
        end = self._tokenizer.eos_token_id
        stream: list[int] = []
        # Of a stream a document may be longer than the model takes, of which it would warn.
        encoded = self._tokenizer(list(documents), add_special_tokens=False, verbose=False)
        for row in encoded["input_ids"]:
            stream += [*row, *([] if end is None else [end])]
        return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]

    def _made(self, rows: Sequence[Sequence[int]], seed: int) -> Inputs:
        """Return a batch of rows, padded, with their targets."""
        longest = max(map(len, rows))
        filling = self._tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows])
        keep = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        batch = {"input_ids": ids, "attention_mask": keep}
        if self.objective == "causal":
            batch["targets"] = torch.where(keep.bool(), ids, IGNORED)[:, 1:]
        elif self.objective == "masked":
            batch["input_ids"], batch["targets"] = self._masked(ids, keep, seed)
        return batch

    def _masked(self, ids: Tensor, keep: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return ids with some hidden, and those as targets."""
        generator = torch.Generator().manual_seed(
            abs(self._seed * 1_000_003 + seed) * 2 + (seed < 0)
        )
        special = torch.isin(ids, torch.tensor(self._tokenizer.all_special_ids))
        draws = torch.rand(ids.shape, generator=generator)
        chosen = (draws < _MASKED_PART) & keep.bool() & ~special
        kind = torch.rand(ids.shape, generator=generator)
        other = torch.randint(len(self._tokenizer), ids.shape, generator=generator)
        hidden = torch.where(chosen & (kind < 0.8), self._tokenizer.mask_token_id, ids)
        hidden = torch.where(chosen & (kind >= 0.9), other, hidden)
        return hidden, torch.where(chosen, ids, IGNORED)


def _objective(name: str) -> Objective:
    """Return what the head of a class of transformers says, by the name of the class."""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    return "masked" if name.endswith("ForMaskedLM") else "none"


def _tells_classes(model: Any) -> bool:
    """Return whether a model puts out logits of classes of which one is right."""
    heads = ("ForSequenceClassification", "ForTokenClassification")
    one_is_right = model.config.problem_type in (None, "single_label_classification")
    is_classifier: bool = type(model).__name__.endswith(heads) and model.config.num_labels > 1
    return is_classifier and one_is_right


def _is_known(missing: Sequence[str], model: nn.Module) -> bool:
    """Return whether a missing weight is one of the model, and no pooler that nothing reads."""
    names = {name for name, _ in model.named_parameters()}
    return any(name in names and "pooler" not in name for name in missing)
