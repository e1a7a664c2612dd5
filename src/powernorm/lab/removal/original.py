"""The interface of what a removal begins with."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.batches import call_model
from powernorm.inspection.devices import moved
from powernorm.lab.data.corpus import EvaluatedSplit
from powernorm.lab.model_outputs import answer_in


class Original(ABC):
    """A trained model with norms, and its batches.

    Attributes:
        name: for the report.
        model: in evaluation mode, on the CPU; stays as it is.
        has_loss: whether the task's own loss is known.
        has_logits: whether the outputs are logits, or hold them.
        num_steps: batches that the model was trained on, where that is known.
        learning_rate: highest one of that training, where it is known.
        data_fingerprint: hash of the data, where there is one.
        folder: in Hugging Face's layout, whose tokenizer goes along with the result.
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
        """Return a batch of the training."""

    @abstractmethod
    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Iterable[Any]:
        """Return the batches of a split, whole or about so many tokens; empty where is none."""

    def elsewhere(self) -> Iterable[Any]:
        """Return the batches of another text, which nothing is trained on; empty where is none."""
        return ()

    @abstractmethod
    def example_inputs(self) -> Any:
        """Return inputs of the model, to fold it by."""

    def to(self, batch: Any, device: torch.device) -> Any:
        """Return a batch on a device."""
        return moved(batch, device)

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Call a model on a batch."""
        return call_model(model, batch)

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits, or what else a model puts out first."""
        found = answer_in(outputs)
        if found is None:
            raise InputError(
                f"the model puts out a {type(outputs).__name__}, expected a tensor, or a tuple or "
                "mapping with one"
            )
        return found

    def valid(self, batch: Any) -> Tensor | None:
        """Return which positions are no padding, bool; None where all count."""
        del batch
        return None

    def embeddings(self, outputs: Any, batch: Any) -> Tensor | None:
        """Return a vector for each row of a batch, (rows, C); None where outputs are no such."""
        del outputs, batch
        return None

    def nll(self, model: nn.Module, outputs: Any, batch: Any) -> tuple[Tensor, float]:
        """Return the summed loss of a batch in nats, and the number of its targets.

        Raises:
            InputError: the loss is not known; nobody asks then.
        """
        del model, outputs, batch
        raise InputError(f"the loss of {self.name} is not known")

    def saved_config(self) -> Mapping[str, Any] | None:
        """Return entries of the saved config.json; None is the model's own, if it has one."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return what the files say of it."""
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
