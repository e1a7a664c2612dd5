"""Scores of a run by kind of batch-norm statistics (Wang et al. 2022, Tables 7 and 8)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from torch import Tensor

from powernorm.diagnosis.diagnosing import BATCH_SIZES
from powernorm.diagnosis.evaluation import evaluate_each
from powernorm.inspection.batches import Forward, Progress
from powernorm.records import EvaluationRow
from powernorm_lab.data.batch import Batch
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.parse.parsing import attachment_scores, parse
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.translation.batches import evaluation_pairs
from powernorm_lab.tasks.translation.scores import corpus_scores
from powernorm_lab.tasks.translation.search import batches_by_length, translate_split
from powernorm_lab.training.batches import RunData
from powernorm_lab.training.evaluation import evaluate, finite_or_none
from powernorm_lab.training.losses import TaskModel


class Measured(NamedTuple):
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
    def measure(self, size: int | None) -> Measured:
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

    def likelihood(self, batches: Iterable[Batch]) -> Measured:
        """Return the loss and its derived scores, with perplexity if that is the task's measure.

        It iterates over the batches twice.
        """
        words = self.data.words_per_token(self.split)
        found = evaluate(self.model, batches, words_per_token=words, device=self.device)
        named = dict(self.data.from_loss(found.loss))
        if self.config.measure == "test_perplexity":
            named["perplexity"] = found.perplexity
        counts = [batch.num_tokens for batch in batches]
        return Measured(found.loss, self.named(named), round(sum(counts) / len(counts)))

    def named(self, scores: Mapping[str, float]) -> dict[str, float | None]:
        """Return scores by the names of a run's metrics."""
        return {f"{self.split}_{name}": finite_or_none(value) for name, value in scores.items()}


class RowScores(SplitScores):
    """Scores in batches of rows with about `size` tokens."""

    def num_batches(self, size: int) -> int:
        """Return the number of batches of a size in the split."""
        return len(self._data_of(size).evaluation(self.split))

    def measure(self, size: int | None) -> Measured:
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

    def measure(self, size: int | None) -> Measured:
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

    def measure(self, size: int | None) -> Measured:
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
        return Measured(
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
