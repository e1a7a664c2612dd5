"""What a task has to say: its batches, its model, what has to be beaten and how it is scored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.training.batches import RunData
from powernorm.runs import Baseline

TaskModel = nn.Module
"""`forward(**batch.inputs())` gives logits, the classes in the last dimension, or what its own
`nll(outputs, targets)` takes; `features(**batch.inputs())` runs the layers only."""
Sizes = tuple[int, ...]
"""Of the vocabularies of a model; the last is that of its output."""


class Numbered(Protocol):
    """Data of a task in the form that its batches are made of, such as a text as ids."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that determines the ids."""
        ...


Encoded = TypeVar("Encoded", bound=Numbered)
Settings = TypeVar("Settings", bound=ComparisonSettings)


@dataclass(frozen=True)
class DataSummary:
    """What the terminal says about the data."""

    name: str
    num_train: int
    unit: str
    """What is counted, such as words."""
    vocabulary_size: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Parts of the train split that are not used, by reason."""


@dataclass(frozen=True)
class Scores:
    """What the test split says beyond its likelihood."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    """How they were computed, by their names."""
    translations: tuple[tuple[str, str, str], ...] = ()
    """Source, reference and translation."""


class Task(ABC, Generic[Encoded, Settings]):
    """What the rest of the training asks a task for."""

    units: ClassVar[str] = "subwords"
    """What the vocabulary counts."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of those that its runs have beside loss and perplexity."""
    examples: ClassVar[str | None] = None
    """What a row of a batch is called, where the speed in rows is worth telling."""

    @abstractmethod
    def encode(self, config: Settings) -> Encoded:
        """Read what `data.path` names and number it."""

    @abstractmethod
    def encode_by(self, source: str, config: Settings) -> Encoded:
        """Read `source` and number it with the vocabulary of what `data.path` names."""

    @abstractmethod
    def data(self, encoded: Encoded, config: Settings, seed: int) -> RunData[Settings]:
        """Return the batches of the run with a seed."""

    @abstractmethod
    def baselines(self, encoded: Encoded, config: Settings) -> list[Baseline]:
        """Return models without a network; above the first, a unigram, nothing was learned."""

    @abstractmethod
    def facts(self, encoded: Encoded) -> dict[str, Any]:
        """Return name, source, licence and sizes of the data, for results.json."""

    @abstractmethod
    def summary(self, encoded: Encoded) -> DataSummary:
        """Return the same in short."""

    @abstractmethod
    def sizes(self, encoded: Encoded) -> Sizes:
        """Return the sizes of the model's vocabularies; the last is that of its output."""

    @abstractmethod
    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the same from the weights of a model."""

    @abstractmethod
    def build(self, config: Settings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; equal seeds give equal weights to all norms."""

    @abstractmethod
    def example_inputs(self, config: Settings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return inputs of the model's forward, drawn at random."""

    def score(
        self, model: TaskModel, encoded: Encoded, config: Settings, device: torch.device
    ) -> Scores:
        """Return what the test split says beyond its likelihood; every process calls it."""
        del model, encoded, config, device
        return Scores()

    def norm_widths(self, config: Settings) -> tuple[int, ...]:
        """Return the numbers of features that the model has norms of."""
        return config.model.norm_widths

    def remark(self, config: Settings) -> str:
        """Return what has to stand beside every number of such a run; empty where nothing."""
        del config
        return ""

    def fill(self, model: TaskModel, encoded: Encoded) -> None:
        """Put into a new model, before its training, what the data have for it."""
        del model, encoded

    def keep(self, encoded: Encoded, folder: Path) -> None:
        """Write into a run's folder what its model cannot be used without."""
        del encoded, folder

    def check(self, config: Settings, norm: str) -> None:
        """Check that the norms of a run fit.

        Args:
            config: of the runs with the norm.
            norm: short name.

        Raises:
            InputError: one does not; the message names the setting.
        """
        del config, norm
