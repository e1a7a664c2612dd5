"""What a removal begins with: a model, and the batches that it is trained and measured on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.integrations.model_sources import ModelWithBatches, is_named, model_by_name
from powernorm.integrations.pretrained import is_pretrained
from powernorm.lab.data.batch import IGNORED, Batch
from powernorm.lab.data.corpus import EvaluatedSplit
from powernorm.lab.own_models import is_own_run, load_own_run
from powernorm.lab.removal.original import Original
from powernorm.lab.removal.pretrained_originals import PretrainedOriginal
from powernorm.lab.removal.settings import RemovalDataSettings
from powernorm.lab.report.loading import is_run_folder
from powernorm.lab.tasks.registry import task_of
from powernorm.lab.tasks.trained_models import (
    is_checkpoint,
    is_folded,
    load_trained,
    run_config,
    run_text,
)
from powernorm.lab.training.losses import OwnLikelihood, outputs_nll
from powernorm.surgery.records import KEY

_COARSE: Final = (torch.float16, torch.bfloat16)

HELD_OUT: Final = 10
"""Of batches of the user's own, one of so many is for validation."""


class RunOriginal(Original):
    """A run of `powernorm compare`, with the batches of its task.

    Args:
        path: the run's folder, or one of its checkpoints.
        data: another text than the run's.
        seed: of the order of the batches.

    Raises:
        InputError: as `load_trained` and `run_text`.
    """

    def __init__(self, path: Path, data: str | None, seed: int) -> None:
        trained = load_trained(path)
        super().__init__(f"{path.resolve().parent.name}/{path.name}", trained.model)
        if hasattr(self.model, "memory_state"):
            raise InputError(
                f"{path} is a run of {trained.settings['task']} with a memory of earlier batches, "
                "which a removal does not keep: give a run without one"
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
        """Return a batch behind those of the run's own training."""
        assert self.num_steps is not None
        return self._data.batches.batch(self.num_steps + position)

    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Iterable[Batch]:
        """Return the batches of a split of the run."""
        return self._data.evaluation(split, max_tokens)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return random inputs of the model's forward."""
        return self._trained.example_inputs()

    def to(self, batch: Batch, device: torch.device) -> Batch:
        """Return a batch on a device."""
        return batch.to(device)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """Call a model on a batch."""
        return model(**batch.inputs())

    def valid(self, batch: Batch) -> Tensor | None:
        """Return the positions that are asked for."""
        return batch.targets != IGNORED

    def nll(self, model: nn.Module, outputs: Any, batch: Batch) -> tuple[Tensor, float]:
        """Return the summed loss of a batch in nats, and the number of its targets."""
        return outputs_nll(model, outputs, batch.targets), float(batch.num_targets)

    def saved_config(self) -> Mapping[str, Any]:
        """Return the run's settings, by which the laboratory builds the model again."""
        return {key: value for key, value in self._trained.settings.items() if key != KEY}


class OwnOriginal(Original):
    """A model of the user's own, with its batches: nothing is known of its loss.

    Args:
        name: of it.
        found: model and batches; each tenth batch is held out.
    """

    def __init__(self, name: str, found: ModelWithBatches) -> None:
        super().__init__(name, found.model)
        coarse = {str(p.dtype) for p in self.model.parameters() if p.dtype in _COARSE}
        if coarse:
            raise InputError(
                f"{name} has weights in {', '.join(sorted(coarse))}, in which small updates are "
                "rounded away: give model.float(), with batches of that type"
            )
        batches = list(found.batches)
        if len(batches) < 2:
            raise InputError(
                f"{name} gives {len(batches)} batches, of which one is held out: give two or more, "
                "best dozens"
            )
        self._valid = batches[::HELD_OUT]
        self._train = [batch for index, batch in enumerate(batches) if index % HELD_OUT]

    def batch(self, position: int) -> Any:
        """Return a batch of the training, from the first one again after the last."""
        return self._train[position % len(self._train)]

    def evaluation(self, split: EvaluatedSplit, max_tokens: int | None = None) -> Sequence[Any]:
        """Return the batches that are held out."""
        del max_tokens
        return self._valid if split == "valid" else []

    def example_inputs(self) -> Any:
        """Return the first batch, as the model takes it."""
        batch = self._train[0]
        return tuple(batch) if isinstance(batch, list) else batch

    def to(self, batch: Any, device: torch.device) -> Any:
        """Return a batch on a device."""
        return _moved(batch, device)

    def nll(self, model: nn.Module, outputs: Any, batch: Any) -> tuple[Tensor, float]:
        """Refuse: nobody asks, as the loss is not known.

        Raises:
            InputError: always.
        """
        del model, outputs, batch
        raise InputError(f"the loss of {self.name} is not known")


def open_original(
    source: str | Path | tuple[nn.Module, Sequence[Any]],
    data: RemovalDataSettings,
    seed: int,
) -> Original:
    """Return what a removal begins with.

    Args:
        source: a run's folder or checkpoint, a folder in Hugging Face's layout, `module:name`, or
            (model, batches).
        data: where the text is.
        seed: of the order of the batches.

    Raises:
        InputError: there is no such model, or no data for it.
    """
    if isinstance(source, tuple):
        return _own("model", ModelWithBatches(*_checked_pair(source)), data)
    text, path = str(source), Path(source)
    if is_named(text):
        return _own(text, model_by_name(text), data)
    _check_no_other(text, path, data)
    if is_folded(path) and not is_pretrained(path):
        raise InputError(f"{path} holds a model whose norms are folded already: give the original")
    if is_own_run(path):
        return _own(text, load_own_run(path), data)
    if is_pretrained(path):
        return PretrainedOriginal(path, data, seed)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a run of `powernorm compare`, a folder with a Hugging "
            "Face model, or module:name"
        )
    if not is_checkpoint(path) and not is_run_folder(path):
        raise InputError(
            f"{path} is no model: give a run of `powernorm compare` (such as "
            "runs/lm-demo/ln-pre-seed0), a folder with a Hugging Face model, or module:name"
        )
    return RunOriginal(path, data.path, seed)


def _own(name: str, found: ModelWithBatches, data: RemovalDataSettings) -> OwnOriginal:
    if data.path is not None or data.other is not None:
        option = "--other" if data.path is None else "--data"
        raise InputError(f"{name} has batches of its own: leave out {option}")
    return OwnOriginal(name, found)


def _check_no_other(name: str, path: Path, data: RemovalDataSettings) -> None:
    if data.other is not None and not is_pretrained(path):
        raise InputError(
            f"data.other={data.other}: {name} has splits of its own, and another text is measured "
            "of a Hugging Face model alone: leave out --other"
        )


def _checked_pair(source: tuple[Any, ...]) -> tuple[nn.Module, list[Any]]:
    if len(source) != 2 or not isinstance(source[0], nn.Module):
        raise InputError("expected (model, batches): the module, and a list of batches")
    return source[0], list(source[1])


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_moved(item, device) for item in value)
    return value
