"""The interface of built-in tasks: data, batches, model, baselines and scores."""

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
"""Sizes of the vocabularies of a model; the last is that of its output."""


class Numbered(Protocol):
    """Encoded data of a task, such as a text as ids."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that determines the ids."""
        ...


Encoded = TypeVar("Encoded", bound=Numbered)
Settings = TypeVar("Settings", bound=ComparisonSettings)


class BuiltinTask(tasks.Task, ABC, Generic[Encoded, Settings]):
    """A built-in task, with `ComparisonSettings` as its settings.

    Attributes:
        name: name of the task, as in the settings.
    """

    units: ClassVar[str] = "subwords"
    """Unit of the vocabulary's size."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of its metrics besides loss and perplexity."""
    examples: ClassVar[str | None] = None
    """Name of a batch's rows if their throughput is measured."""

    @abstractmethod
    def encode(self, config: Settings, source: str | None = None) -> Encoded:
        """Read and encode the data of `data.path`, or `source` with the vocabulary of them."""

    @abstractmethod
    def data(self, encoded: Encoded, config: Settings, seed: int) -> RunData[Settings]:
        """Return the batches of the run with a seed; in a task it may be the class of them."""

    @abstractmethod
    def baselines(self, encoded: Encoded, config: Settings) -> list[Baseline]:
        """Return scores of trivial models; the first, a unigram, is the threshold of divergence."""

    @abstractmethod
    def facts(self, encoded: Encoded) -> dict[str, Any]:
        """Return name, source, license and sizes of the data, for results.json."""

    @abstractmethod
    def summary(self, encoded: Encoded) -> DataPrepared:
        """Return the event that describes the data, without the baselines."""

    @abstractmethod
    def sizes(self, encoded: Encoded) -> Sizes:
        """Return the sizes of the model's vocabularies; the last is that of its output."""

    @abstractmethod
    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the sizes of the vocabularies from the weights of a model."""

    @abstractmethod
    def build(self, config: Settings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms."""

    @abstractmethod
    def example_inputs(self, config: Settings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return random inputs of the model's forward."""

    def score(
        self, model: TaskModel, encoded: Encoded, config: Settings, device: torch.device
    ) -> Scores:
        """Return scores of the test split besides its likelihood; every process calls it."""
        del model, encoded, config, device
        return Scores()

    def norm_widths(self, config: Settings) -> tuple[int, ...]:
        """Return the numbers of features of the model's norms."""
        return config.model.norm_widths

    def remark(self, config: Settings) -> str:
        """Return the caveat displayed next to the run's metrics; empty if there is none."""
        del config
        return ""

    def fill(self, model: TaskModel, encoded: Encoded) -> None:
        """Copy weights from the data, such as word vectors, into a new model before training."""
        del model, encoded

    def keep(self, encoded: Encoded, folder: Path) -> None:
        """Write files that are needed to use the model, such as subwords, into a run's folder."""
        del encoded, folder

    # For the engine

    def prepare(self, settings: Settings) -> Encoded:
        """Read and encode the data, and check that every line can make its batches.

        Raises:
            InputError: as `encode`, or a variant has other data.
        """
        encoded = self.encode(settings)
        for line in lines_of(settings):
            is_other = line.settings.data != settings.data
            if is_other and self.encode(line.settings).fingerprint != encoded.fingerprint:
                raise InputError(
                    f"the variant {line.name} has data settings that change the data, which all "
                    "runs of a comparison share: set them for the whole comparison"
                )
            for seed in settings.seeds:
                self.data(encoded, line.settings, seed)
        return encoded

    def fingerprint(self, data: Encoded) -> str:
        """Return a hash of everything that determines the ids."""
        return data.fingerprint

    def num_steps(self, settings: Settings) -> int:
        """Return the number of updates of a run."""
        return settings.training.max_steps

    def start(self, run: Run) -> tasks.Metrics:
        """Train, evaluate and diagnose a run."""
        if is_main():
            self.keep(run.data, run.folder)
        return train(run, self)

    def work(self, grid: "Grid") -> dict[str, Any]:
        """Return the settings as JSON."""
        return {"comparison": to_json(grid.settings)}

    def source(self) -> FunctionRecord:
        """Return the name alone: the code is this package's, and files hold its version."""
        return FunctionRecord(name=self.name, file=None, sha256=None)

    def announce(self, data: Encoded, baselines: Sequence[Baseline], listener: Listener) -> None:
        """Send the event that describes the data."""
        summary = self.summary(data)
        listener(replace(summary, baselines=tuple(baselines), units=self.units))
