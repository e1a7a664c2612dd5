"""Original models of removals, with the batches for training and measuring."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.batches import call_model
from powernorm.inspection.devices import moved
from powernorm.integrations.model_sources import ModelWithBatches
from powernorm.integrations.pretrained import is_pretrained, load_pretrained
from powernorm.surgery.saving.records import KEY
from powernorm_lab.data.batch import IGNORED, Batch
from powernorm_lab.data.corpus import EvaluatedSplit, Split
from powernorm_lab.data.orders import Shuffled
from powernorm_lab.data.readers import load_corpus
from powernorm_lab.model_outputs import answer_in
from powernorm_lab.own_models import own_model
from powernorm_lab.removal.settings import RemovalDataSettings
from powernorm_lab.runs import is_run_folder
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.trained_models import (
    is_checkpoint,
    is_folded,
    load_trained,
    run_config,
    run_text,
)
from powernorm_lab.training.losses import OwnLikelihood, outputs_nll

Objective = Literal["causal", "masked", "none"]
"""Prediction of a model's head: the next token, the masked token, or unknown."""

_MASKED_PART: Final = 0.15
"""Fraction of tokens to predict in a masked language model; 80 % of them become the mask token and
10 % another token (Devlin et al. 2019)."""
_EMBEDDED: Final = "rt"
"""Default text: sentences."""

Inputs = dict[str, Tensor]
_COARSE: Final = (torch.float16, torch.bfloat16)

HELD_OUT: Final = 10
"""Interval of users' batches that are held out for validation."""


class Original(ABC):
    """A trained model with norms, and its batches.

    Attributes:
        name: name in the report.
        model: the model, in evaluation mode, on the CPU; never changed.
        has_loss: whether the loss of the model's task is known.
        has_logits: whether the outputs are or contain logits.
        num_steps: number of batches that the model was trained on, if known.
        learning_rate: peak learning rate of that training, if known.
        data_fingerprint: hash of the data, if there is one.
        folder: folder in Hugging Face's layout, whose tokenizer is copied to the result.
    """

    has_loss: bool = False
    has_logits: bool = False
    num_steps: int | None = None
    learning_rate: float | None = None
    data_fingerprint: str | None = None
    folder: Path | None = None

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.model = model.eval()

    @abstractmethod
    def batch(self, position: int) -> Any:
        """Return a training batch."""

    @abstractmethod
    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Iterable[Any]:
        """Return the batches of a split, or about `max_tokens` of it; empty without the split."""

    def elsewhere(self) -> Iterable[Any]:
        """Return the batches of another text, which is never trained on; empty without one."""
        return ()

    @abstractmethod
    def example_inputs(self) -> Any:
        """Return example inputs for folding the model."""

    def to(self, batch: Any, device: torch.device) -> Any:
        """Return a batch on a device."""
        return moved(batch, device)

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Call a model on a batch."""
        return call_model(model, batch)

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits, or the model's first output."""
        found = answer_in(outputs)
        if found is None:
            raise InputError(
                f"the model returns a {type(outputs).__name__}, expected a tensor, or a tuple or "
                "mapping with one"
            )
        return found

    def valid(self, batch: Any) -> Tensor | None:
        """Return a bool mask of the positions that are not padding; None if none are."""
        del batch
        return None

    def embeddings(self, outputs: Any, batch: Any) -> Tensor | None:
        """Return embeddings of a batch, (rows, C); None if the outputs are not embeddings."""
        del outputs, batch
        return None

    def nll(self, model: nn.Module, outputs: Any, batch: Any) -> tuple[Tensor, float]:
        """Return the summed loss of a batch in nats, and the number of its targets.

        Raises:
            InputError: the loss is not known; see `has_loss`.
        """
        del model, outputs, batch
        raise InputError(f"the loss of {self.name} is not known")

    def saved_config(self) -> Mapping[str, Any] | None:
        """Return entries for the saved config.json; None for the model's own, if it has one."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return name, weights and data for the files of a removal."""
        return {
            "model": self.name,
            "weights": _fingerprint(self.model),
            "data": self.data_fingerprint,
        }


def _fingerprint(model: nn.Module) -> str:
    """Return a hash of the weights and buffers of a model."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        plain = value.detach().cpu().contiguous().flatten()
        digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()


class RunOriginal(Original):
    """A run of `powernorm compare`, with the batches of its task.

    Args:
        path: folder of the run, or one of its checkpoints.
        data: text that replaces the run's.
        seed: seed of the batches' order.

    Raises:
        InputError: as `load_trained` and `run_text`.
    """

    def __init__(self, path: Path, data: str | None, seed: int) -> None:
        trained = load_trained(path)
        super().__init__(f"{path.resolve().parent.name}/{path.name}", trained.model)
        if hasattr(self.model, "memory_state"):
            raise InputError(
                f"{path} is a run of {trained.settings['task']} with a memory of earlier batches, "
                "which a removal does not support: give a run without one"
            )
        self._trained = trained
        config = run_config(trained.settings)
        encoded = run_text(trained.settings, data=data)
        self._data = task_of(config).data(encoded, config, seed)
        self.has_loss = True
        self.has_logits = not isinstance(self.model, OwnLikelihood)
        self.num_steps = config.training.max_steps * config.optimizer.accumulation
        self.learning_rate = config.optimizer.learning_rate
        self.data_fingerprint = encoded.fingerprint

    def batch(self, position: int) -> Batch:
        """Return a batch that follows those of the run's training."""
        assert self.num_steps is not None
        return self._data.batches.batch(self.num_steps + position)

    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Iterable[Batch]:
        """Return the batches of a split of the run."""
        return self._data.evaluation(split, max_tokens)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return random inputs of the model's forward."""
        return self._trained.example_inputs()

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """Call a model on a batch."""
        return model(**batch.inputs())

    def valid(self, batch: Batch) -> Tensor | None:
        """Return the positions with targets."""
        return batch.targets != IGNORED

    def nll(self, model: nn.Module, outputs: Any, batch: Batch) -> tuple[Tensor, float]:
        """Return the summed loss of a batch in nats, and the number of its targets."""
        return outputs_nll(model, outputs, batch.targets), float(batch.num_targets)

    def saved_config(self) -> Mapping[str, Any]:
        """Return the run's settings, from which the laboratory can rebuild the model."""
        return {key: value for key, value in self._trained.settings.items() if key != KEY}


class PretrainedOriginal(Original):
    """A model in a folder in Hugging Face's layout, with the batches of a text.

    A causal language model reads the text as one stream in rows of full length, with an end mark
    after each document. Others read one document per row, padded.

    Args:
        path: folder of the model.
        data: text, and size of batches and rows.
        seed: seed of the rows' order.

    Raises:
        InputError: model or tokenizer cannot be loaded, some of its weights are missing, or the
            text is too short.
    """

    def __init__(self, path: Path, data: RemovalDataSettings, seed: int) -> None:
        found = load_pretrained(path, with_head=True)
        name = f"{type(found.model).__name__} in {path.resolve().name}"
        # In half precision, small updates of weights would be rounded away.
        super().__init__(name, found.model.float())
        if found.missing and _is_known(found.missing, self.model):
            raise InputError(
                f"{path} has no weights for {found.missing[0]}, so that the model's outputs are "
                "random: give a folder with all weights"
            )
        if found.model.config.is_encoder_decoder:
            raise InputError(
                f"{path} has an encoder-decoder, which needs batches of pairs: make them yourself, "
                "and give module:name of (model, batches)"
            )
        self.folder = path
        self.objective: Objective = _objective(type(found.model).__name__)
        self.has_loss = self.objective != "none"
        self.has_logits = self.has_loss or _is_classifier(self.model)
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
        # Not sorted by length: the noise of such batches costs more updates than padding does.
        self._order = Shuffled(
            len(self._rows["train"]),
            batch_size=data.batch_size,
            seed=seed,
            unit=f"rows of up to {length} tokens",
        )

    def batch(self, position: int) -> Inputs:
        """Return a batch; seed and epoch determine the order of rows."""
        rows = self._rows["train"]
        chosen = self._order.at(position).tolist()
        return self._made([rows[index] for index in chosen], position + 1)

    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Sequence[Inputs]:
        """Return the batches of a split, or of about `max_tokens` in evenly spaced rows."""
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
        """Return two rows of the text as keyword arguments of the model."""
        return self.inputs(self._made(self._rows["train"][:2], 0))

    def inputs(self, batch: Inputs) -> Inputs:
        """Return a batch's keyword arguments of the model."""
        return {name: value for name, value in batch.items() if name != "targets"}

    def run(self, model: nn.Module, batch: Inputs) -> Any:
        """Call a model on a batch."""
        return model(**self.inputs(batch))

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits of the targets; a causal model's last ones have none."""
        found = super().logits(outputs)
        return found[:, :-1] if self.objective == "causal" else found

    def valid(self, batch: Inputs) -> Tensor | None:
        """Return the positions that are not padding."""
        mask = batch["attention_mask"].bool()
        return mask[:, 1:] if self.objective == "causal" else mask

    def embeddings(self, outputs: Any, batch: Inputs) -> Tensor | None:
        """Return the mean hidden state of each row, for a model without a head."""
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
        # The tokenizer would warn of documents that are longer than the model's maximum.
        encoded = self._tokenizer(list(documents), add_special_tokens=False, verbose=False)
        for row in encoded["input_ids"]:
            stream += [*row, *([] if end is None else [end])]
        return [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]

    def _made(self, rows: Sequence[Sequence[int]], seed: int) -> Inputs:
        """Return a padded batch of rows with their targets."""
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
        """Return ids with masked tokens, and the targets of those tokens."""
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
    """Return the objective of a class of transformers, by its name."""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    return "masked" if name.endswith("ForMaskedLM") else "none"


def _is_classifier(model: Any) -> bool:
    """Return whether a model's outputs are logits of classes of which exactly one is right."""
    heads = ("ForSequenceClassification", "ForTokenClassification")
    one_is_right = model.config.problem_type in (None, "single_label_classification")
    has_classes: bool = type(model).__name__.endswith(heads) and model.config.num_labels > 1
    return has_classes and one_is_right


def _is_known(missing: Sequence[str], model: nn.Module) -> bool:
    """Return whether a missing weight is a parameter of the model, except of an unused pooler."""
    names = {name for name, _ in model.named_parameters()}
    return any(name in names and "pooler" not in name for name in missing)


class OwnOriginal(Original):
    """A user's model with batches; its loss is not known.

    Args:
        name: name of the model.
        found: model and batches; every tenth batch is held out.
    """

    def __init__(self, name: str, found: ModelWithBatches) -> None:
        super().__init__(name, found.model)
        coarse = {str(p.dtype) for p in self.model.parameters() if p.dtype in _COARSE}
        if coarse:
            raise InputError(
                f"{name} has weights in {', '.join(sorted(coarse))}, in which small updates would "
                "be rounded away: give model.float(), with batches of that type"
            )
        batches = list(found.batches)
        if len(batches) < 2:
            raise InputError(
                f"{name} gives {len(batches)} batches, of which one is held out: give two or more, "
                "preferably dozens"
            )
        self._valid = batches[::HELD_OUT]
        self._train = [batch for index, batch in enumerate(batches) if index % HELD_OUT]

    def batch(self, position: int) -> Any:
        """Return a training batch; after the last one, the first follows."""
        return self._train[position % len(self._train)]

    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Sequence[Any]:
        """Return the held-out batches."""
        del max_tokens
        return self._valid if split == "valid" else []

    def example_inputs(self) -> Any:
        """Return the first batch as inputs of the model."""
        batch = self._train[0]
        return tuple(batch) if isinstance(batch, list) else batch


def open_original(
    source: str | Path | tuple[nn.Module, Sequence[Any]],
    data: RemovalDataSettings,
    seed: int,
) -> Original:
    """Load the original of a removal.

    Args:
        source: a run's folder or checkpoint, a folder in Hugging Face's layout, `module:name`, or
            (model, batches).
        data: text and size of batches.
        seed: seed of the batches' order.

    Raises:
        InputError: the model does not exist, or there are no data for it.
    """
    if isinstance(source, tuple):
        return _own("model", ModelWithBatches(*_checked_pair(source)), data)
    text, path = str(source), Path(source)
    own = own_model(text)
    if own is not None:
        return _own(text, own, data)
    _check_no_other(text, path, data)
    if is_folded(path) and not is_pretrained(path):
        raise InputError(f"{path} has a model whose norms are already folded: give the original")
    if is_pretrained(path):
        return PretrainedOriginal(path, data, seed)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a run of `powernorm compare`, a folder with a Hugging "
            "Face model, or module:name"
        )
    if not is_checkpoint(path) and not is_run_folder(path):
        raise InputError(
            f"{path} is not a model: give a run of `powernorm compare` (such as "
            "runs/lm-demo/ln-pre-seed0), a folder with a Hugging Face model, or module:name"
        )
    return RunOriginal(path, data.path, seed)


def _own(name: str, found: ModelWithBatches, data: RemovalDataSettings) -> OwnOriginal:
    if data.path is not None or data.other is not None:
        option = "--other" if data.path is None else "--data"
        raise InputError(f"{name} comes with its own batches: leave out {option}")
    return OwnOriginal(name, found)


def _check_no_other(name: str, path: Path, data: RemovalDataSettings) -> None:
    if data.other is not None and not is_pretrained(path):
        raise InputError(
            f"data.other={data.other}: another text is measured for a Hugging Face model only, and "
            f"{name} has its own splits: leave out --other"
        )


def _checked_pair(source: tuple[Any, ...]) -> tuple[nn.Module, list[Any]]:
    if len(source) != 2 or not isinstance(source[0], nn.Module):
        raise InputError("expected (model, batches): the module, and a list of batches")
    return source[0], list(source[1])
