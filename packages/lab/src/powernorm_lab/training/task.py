"""What a task has to say: its batches, its model, what has to be beaten and how it is scored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.engine import tasks
from powernorm_lab.engine.events import DataPrepared, Listener
from powernorm_lab.engine.processes import is_main
from powernorm_lab.engine.run import Run
from powernorm_lab.runs import Baseline, FunctionRecord
from powernorm_lab.settings.comparison import ComparisonSettings, to_json
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.training.batches import RunData
from powernorm_lab.training.evaluation import Scores
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.training import train

if TYPE_CHECKING:
    from powernorm_lab.engine.grid import Grid

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


class BuiltinTask(tasks.Task, ABC, Generic[Encoded, Settings]):
    """A task of the papers, whose settings are a `ComparisonSettings`, as the engine asks for it.

    Attributes:
        name: as in the settings.
    """

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
    def summary(self, encoded: Encoded) -> DataPrepared:
        """Return what the terminal says of the data, without the baselines."""

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

    # For the engine

    def prepare(self, settings: Settings) -> Encoded:
        """Read and number the data, and check that every line can make its batches of them.

        Raises:
            InputError: as `encode`, or a variant is of other data.
        """
        encoded = self.encode(settings)
        for line in lines_of(settings):
            is_other = line.settings.data != settings.data
            if is_other and self.encode(line.settings).fingerprint != encoded.fingerprint:
                raise InputError(
                    f"the variant {line.name} has settings of data that change what is read, which "
                    "all runs of a comparison share: set them for the whole comparison"
                )
            for seed in settings.seeds:
                self.data(encoded, line.settings, seed)
        return encoded

    def fingerprint(self, data: Encoded) -> str:
        """Return a hash of everything that determines the ids."""
        return data.fingerprint

    def num_steps(self, settings: Settings) -> int:
        """Return the updates of a run."""
        return settings.training.max_steps

    def start(self, run: Run) -> tasks.Metrics:
        """Train, evaluate and diagnose a run."""
        if is_main():
            self.keep(run.data, run.folder)
        return train(run, self)

    def work(self, grid: "Grid") -> dict[str, Any]:
        """Return the settings."""
        return {"comparison": to_json(grid.settings)}

    def source(self) -> FunctionRecord:
        """Return that it is this package's, whose version the settings name."""
        return FunctionRecord(name=self.name, file=None, sha256=None)

    def announce(self, data: Encoded, baselines: Sequence[Baseline], listener: Listener) -> None:
        """Tell what the data are."""
        summary = self.summary(data)
        listener(replace(summary, baselines=tuple(baselines), units=self.units))
