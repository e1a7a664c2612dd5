"""Diagnosis of a run of `compare`: its checkpoint on its batches, and scores by statistics."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from powernorm.diagnosis import Diagnosis, diagnose
from powernorm.diagnosis.diagnosing import BATCH_SIZES
from powernorm.diagnosis.evaluation import evaluate_each, evaluate_statistics
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, Progress
from powernorm.inspection.devices import Device, checked_device, moved, placed
from powernorm.inspection.modules import batch_layers
from powernorm.records import EvaluationRow
from powernorm_lab.data.batch import Batch
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.parse.parsing import attachment_scores, parse
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.trained_models import (
    TrainedModel,
    first_inputs,
    load_trained,
    run_config,
    run_text,
)
from powernorm_lab.tasks.translation.batches import evaluation_pairs
from powernorm_lab.tasks.translation.scores import corpus_scores
from powernorm_lab.tasks.translation.search import batches_by_length, translate_split
from powernorm_lab.training.batches import RunData
from powernorm_lab.training.evaluation import evaluate, finite_or_none
from powernorm_lab.training.losses import TaskModel, outputs_nll


class SplitMeasures(NamedTuple):
    """Loss and scores of a model on a split."""

    loss: float
    """Nats per target."""
    scores: dict[str, float | None]
    """Scores by the names of a run's metrics."""
    tokens: int
    """Mean number of tokens in a batch."""


class SplitScores(ABC):
    """The loss and the task's scores on a split, in batches of any size.

    Args:
        model: model of a run, scored on its device.
        config: configuration of the run.
        encoded: encoded data of the run.
        seed: seed of the run.
        split: `valid` or `test`, scored as a whole.
    """

    def __init__(
        self,
        model: TaskModel,
        config: ComparisonSettings,
        encoded: Any,
        seed: int,
        split: EvaluatedSplit,
    ) -> None:
        self.model = model
        self.config: Any = config
        self.encoded = encoded
        self.split: EvaluatedSplit = split
        self.device = next(model.parameters()).device
        self.data: RunData[Any] = task_of(config).data(encoded, config, seed)
        self._seed = seed

    @abstractmethod
    def num_batches(self, size: int) -> int:
        """Return the number of batches of a size in the split."""

    @abstractmethod
    def measure(self, size: int | None) -> SplitMeasures:
        """Score the split in batches of a size; None is the size of the run."""

    def by_batch(self, name: str) -> bool:
        """Return whether a layer can use batch statistics while the split is scored."""
        del name
        return True

    def sizes(self) -> list[int]:
        """Return the sizes with several batches in the split, and always the smallest size."""
        return [
            size
            for number, size in enumerate(BATCH_SIZES)
            if number == 0 or self.num_batches(size) > 1
        ]

    def likelihood(self, batches: Iterable[Batch]) -> SplitMeasures:
        """Return the loss and its derived scores, with perplexity if that is the task's measure.

        It iterates over the batches twice.
        """
        words = self.data.words_per_token(self.split)
        found = evaluate(self.model, batches, words_per_token=words, device=self.device)
        named = dict(self.data.from_loss(found.loss))
        if self.config.measure == "test_perplexity":
            named["perplexity"] = found.perplexity
        counts = [batch.num_tokens for batch in batches]
        return SplitMeasures(found.loss, self.named(named), round(sum(counts) / len(counts)))

    def named(self, scores: Mapping[str, float]) -> dict[str, float | None]:
        """Return scores by the names of a run's metrics."""
        return {f"{self.split}_{name}": finite_or_none(value) for name, value in scores.items()}


class RowScores(SplitScores):
    """Scores in batches of rows with about `size` tokens."""

    def num_batches(self, size: int) -> int:
        """Return the number of batches of a size in the split."""
        return len(self._data_of(size).evaluation(self.split))

    def measure(self, size: int | None) -> SplitMeasures:
        """Score the split in batches of a size."""
        data = self.data if size is None else self._data_of(size)
        found = self.likelihood(data.evaluation(self.split))
        own = self.named(data.scores(self.split, self.model, self.device))
        return found._replace(scores={**found.scores, **own})

    def _data_of(self, size: int) -> RunData[Any]:
        is_cut_by_tokens = getattr(self.config.data, "batch_tokens", None) is not None
        changed = (
            {"batch_tokens": size}
            if is_cut_by_tokens
            else {"evaluation_batch_size": max(1, round(size / self._tokens_per_row()))}
        )
        config = replace(self.config, data=replace(self.config.data, **changed))
        return task_of(config).data(self.encoded, config, self._seed)

    def _tokens_per_row(self) -> float:
        counts = [(b.num_tokens, len(b.targets)) for b in self.data.evaluation(self.split)]
        tokens, rows = map(sum, zip(*counts, strict=True))
        return tokens / rows


class ParsingScores(RowScores):
    """Scores of a parser: `size` sentences advance together, with one state each in a batch.

    All of them are at the same step, unlike the states of a training batch.
    """

    def num_batches(self, size: int) -> int:
        """Return the number of batches of a size in the split."""
        return -(-len(self.encoded.trees[self.split]) // size)

    def measure(self, size: int | None) -> SplitMeasures:
        """Score the split in batches of a size."""
        if size is None:
            return super().measure(None)
        trees = self.encoded.trees[self.split]
        found = self.likelihood(self._data_of(size).evaluation(self.split))
        parsed = parse(trees, self.model, self.encoded.inventory, self.device, size)
        own = self.named(attachment_scores(trees, parsed))
        return found._replace(scores={**found.scores, **own})


class TranslationScores(SplitScores):
    """Scores of translations, in batches of at most `size` positions of the encoder's inputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        source = self.encoded.splits[self.split].source
        self._sources = [source.row(index)[:-1].tolist() for index in range(len(source))]

    def by_batch(self, name: str) -> bool:
        """Return whether a layer belongs to the encoder.

        The decoder computes one position of every hypothesis at a time, unlike a training batch.
        """
        return name.startswith("encoder.")

    def num_batches(self, size: int) -> int:
        """Return the number of batches of a size in the split."""
        return len(batches_by_length(self._sources, size))

    def measure(self, size: int | None) -> SplitMeasures:
        """Translate the split in batches of a size."""
        decoding = self.config.decoding
        if size is not None:
            decoding = replace(decoding, batch_tokens=size)
        pairs = evaluation_pairs(
            self.encoded.splits[self.split], batch_tokens=size or self.config.data.batch_tokens
        )
        found = translate_split(self.model, self.encoded, self.split, decoding, self.device)
        scores = corpus_scores(
            found.translations,
            found.references,
            self.encoded.corpus,
            splits_compounds=self.config.data.split_compounds,
        ).metrics
        own = {name.replace("test", self.split, 1): value for name, value in scores.items()}
        num_tokens = sum(len(ids) + 1 for ids in self._sources)
        return SplitMeasures(
            self.likelihood(pairs).loss,
            own,
            round(num_tokens / self.num_batches(decoding.batch_tokens)),
        )


_SCORES: Final[Mapping[str, type[SplitScores]]] = {
    "translation": TranslationScores,
    "parse": ParsingScores,
}


def split_scores(
    model: TaskModel, config: ComparisonSettings, encoded: Any, seed: int, split: EvaluatedSplit
) -> SplitScores:
    """Return the `SplitScores` of a run's task."""
    return _SCORES.get(config.task, RowScores)(model, config, encoded, seed, split)


def score_by_statistics(
    scores: SplitScores,
    population: Sequence[Mapping[str, Tensor]],
    forward: Forward,
    on_scored: Progress | None = None,
) -> tuple[EvaluationRow, ...]:
    """Return loss and scores of a split with each kind of statistics (Wang et al. 2022).

    All other modules run as in evaluation, and translations use the search settings of the run.
    Weights, buffers, modes and torch's random states are restored afterwards.

    Args:
        scores: computes loss and scores of the split.
        population: training batches for re-estimated statistics.
        forward: runs the model on a batch.
        on_scored: receives the numbers of kinds of statistics done and in total.

    Raises:
        InputError: the model has no layer with batch statistics.
    """
    sizes = scores.sizes()
    total = len(sizes) + 3
    done = 0

    def measure(statistics: str, size: int | None) -> EvaluationRow:
        nonlocal done
        found = scores.measure(size)
        row = EvaluationRow(
            statistics=statistics,
            tokens=None if size is None else found.tokens,
            loss=found.loss,
            scores=found.scores,
        )
        if size is not None:
            row["size"] = size
        done += 1
        if on_scored is not None:
            on_scored(done, total)
        return row

    return evaluate_each(
        scores.model,
        measure,
        population,
        sizes,
        forward=forward,
        is_evaluated_by_batch=scores.by_batch,
    )


EVALUATION_TOKENS: Final = 16384
"""Approximate number of tokens of the valid split evaluated with each kind of statistics."""


def diagnose_run(
    path: Path,
    *,
    data: str | None = None,
    num_batches: int = 50,
    device: Device = "cpu",
    scores: EvaluatedSplit | None = None,
    on_progress: Progress | None = None,
    on_scored: Progress | None = None,
) -> Diagnosis:
    """Diagnose the model of a run on its training batches.

    A model with batch statistics is also evaluated with running, re-estimated and batch statistics:
    the loss on a part of the valid split, or loss and the task's scores on a whole split.

    Args:
        path: a run's folder, for the weights that were scored, or one of its checkpoints.
        data: another text, as for `--data`; None is that of the run.
        num_batches: training batches in each pass, ≥ 2.
        device: device of the diagnosis; see `powernorm.diagnose`.
        scores: split to score; None scores none. It is evaluated, or translated, up to nine times.
        on_progress: see `powernorm.diagnose`.
        on_scored: progress over the kinds of statistics with which the split is scored.

    Raises:
        InputError: there is no such run or device, the run or its text cannot be read, there are
            fewer than 2 batches, or `scores` is given for a model without batch statistics.
    """
    place = checked_device(device)
    if num_batches < 2:
        raise InputError(f"num_batches is {num_batches}, expected at least 2: TID compares batches")
    trained = load_trained(path)
    if scores is not None and not batch_layers(trained.model):
        raise InputError(
            f"{path} has no norm with batch statistics, so its only score is that of its result: "
            "leave out --scores"
        )
    config = run_config(trained.settings)
    encoded = run_text(trained.settings, data=data)
    seed = int(trained.settings["seed"])
    batches = first_inputs(task_of(config).data(encoded, config, seed), num_batches)
    with placed(trained.model, place):
        report = diagnose(trained.model, batches, _features, on_progress=on_progress)
        if scores is None:
            evaluation = _evaluation(trained, config, encoded, batches)
        else:
            split = split_scores(trained.model, config, encoded, seed, scores)
            evaluation = score_by_statistics(split, batches, _features, on_scored)
    return replace(report, model=_name_of(path), step=trained.step, evaluation=evaluation)


def _evaluation(
    trained: TrainedModel,
    config: ComparisonSettings,
    encoded: Any,
    population: list[dict[str, Tensor]],
) -> tuple[EvaluationRow, ...]:
    if not batch_layers(trained.model):
        return ()
    task = task_of(config)
    # Batches of sentence pairs are measured in tokens, all others in rows.
    length = getattr(config.data, "sequence_length", 1)
    size: dict[str, Any] = (
        {"evaluation_batch_size": max(1, BATCH_SIZES[0] // length)}
        if getattr(config.data, "batch_tokens", None) is None
        else {"batch_tokens": max(BATCH_SIZES[0], length)}
    )
    chosen = replace(config, data=replace(config.data, **size))
    data = task.data(encoded, chosen, int(trained.settings["seed"]))
    smallest = list(data.evaluation("valid", EVALUATION_TOKENS))
    by_size = {}
    for tokens in BATCH_SIZES:
        # Joined batches of the same rows, so that every size has the same targets.
        batches = _joined(smallest, tokens // BATCH_SIZES[0])
        if len(batches) > 1:
            by_size[round(sum(batch.num_tokens for batch in batches) / len(batches))] = batches
    return evaluate_statistics(
        trained.model,
        _loss,
        population,
        smallest,
        forward=_features,
        by_batch=by_size or None,
    )


def _joined(batches: list[Any], count: int) -> list[Batch]:
    return [
        batches[first].joined_with(batches[first + 1 : first + count])
        for first in range(0, len(batches), count)
    ]


def _features(model: Any, inputs: Mapping[str, Any]) -> object:
    """Run the layers without the output, which has no norms."""
    return model.features(**moved(inputs, _device_of(model)))


def _loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    batch = batch.to(_device_of(model))
    with torch.no_grad():
        total = outputs_nll(model, model(**batch.inputs()), batch.targets)
    return total / max(batch.num_targets, 1), batch.num_targets


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _name_of(path: Path) -> str:
    folder = path if path.is_dir() else path.parent.parent
    return folder.resolve().name
