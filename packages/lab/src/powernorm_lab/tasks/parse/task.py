"""The task of dependency parsing with a feed-forward network that chooses transitions."""

import time
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.parse.data import EncodedTreebank, ParsingData, encode_trees, parse_split
from powernorm_lab.tasks.parse.model import IdColumns, TransitionParser
from powernorm_lab.tasks.parse.parsing import neighbor_scores
from powernorm_lab.tasks.parse.settings import ParsingSettings
from powernorm_lab.tasks.parse.sources import load_treebank
from powernorm_lab.tasks.parse.trees import NUM_LABELS, NUM_TAGS, NUM_WORDS
from powernorm_lab.training.evaluation import Scores
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes

COLUMNS: Final = (NUM_WORDS, NUM_TAGS, NUM_LABELS)
"""Numbers of columns of a state, in the order of the model's tables."""
_TABLE: Final = "layers.0.linear.tables.{}.weight"


class ParsingTask(BuiltinTask[EncodedTreebank, ParsingSettings]):
    """Dependency parsing by transitions."""

    name = "parse"
    units = "words"
    metrics = ("valid_uas", "valid_las", "test_uas", "test_las", "parsing_sentences_per_second")
    examples = "transitions"
    data = ParsingData

    def encode(self, config: ParsingSettings, source: str | None = None) -> EncodedTreebank:
        """Read and encode a treebank; `source` with the words, tags and labels of `data.path`."""
        own = load_treebank(config.data.path)
        other = own if source is None else load_treebank(source)
        return encode_trees(other, config.data.vocabulary_size, own)

    def baselines(self, encoded: EncodedTreebank, config: ParsingSettings) -> list[Baseline]:
        """Return the scores of transition frequencies, and of attaching words to neighbors."""
        del config
        targets = {split: gold.targets for split, gold in encoded.gold.items()}
        targets = {split: ids[ids != IGNORED] for split, ids in targets.items()}
        unigram = UnigramModel(targets["train"], len(encoded.inventory))
        evaluated = {split: targets[split] for split in EVALUATED_SPLITS}
        attached: dict[str, float | None] = {**neighbor_scores(encoded.trees)}
        return [
            Baseline(name="unigram", metrics=unigram.metrics(evaluated)),
            Baseline(name="attach", metrics=attached),
        ]

    def facts(self, encoded: EncodedTreebank) -> dict[str, Any]:
        """Return name, source, license and sizes of the treebank."""
        return {
            "name": encoded.name,
            "source": encoded.source,
            "licence": encoded.license,
            "vocabulary_size": encoded.vocabulary.sizes[0],
            "tags": "universal" if encoded.vocabulary.is_universal else "the treebank's own",
            "num_tags": len(encoded.vocabulary.tags),
            "num_labels": len(encoded.vocabulary.labels),
            "splits": {
                split: {
                    "sentences": len(encoded.trees[split]),
                    "words": int(encoded.trees[split].lengths.sum()),
                    "scored_words": int(encoded.trees[split].is_scored.sum()),
                    "transitions": len(encoded.gold[split]),
                    "without_transitions": dict(encoded.gold[split].left_out),
                }
                for split in SPLITS
            },
        }

    def summary(self, encoded: EncodedTreebank) -> DataPrepared:
        """Return the event that describes the data."""
        gold = encoded.gold["train"]
        left_out = {reason: number for reason, number in gold.left_out.items() if number}
        size = encoded.vocabulary.sizes[0]
        return DataPrepared(encoded.name, len(gold), "transitions", size, left_out)

    def sizes(self, encoded: EncodedTreebank) -> Sizes:
        """Return the numbers of ids of words, tags and labels, and of transitions."""
        return (*encoded.vocabulary.sizes, len(encoded.inventory))

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the numbers of ids and transitions from the weights of a model."""
        tables = (len(weights[_TABLE.format(index)]) for index in range(len(COLUMNS)))
        return (*tables, len(weights["head.weight"]))

    def build(self, config: ParsingSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms."""
        shape = config.model
        return TransitionParser(
            [IdColumns(*place) for place in zip(sizes[:-1], COLUMNS, strict=True)],
            sizes[-1],
            norm_factory(norm, options_of(config, norm)),
            num_features=shape.num_features,
            num_layers=shape.num_layers,
            embedding_features=shape.embedding_features or shape.num_features,
            activation=shape.activation,
            dropout=shape.dropout,
            seed=seed,
            initialization=shape.initialization,
        )

    def example_inputs(self, config: ParsingSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return two random states, (2, 48)."""
        del config
        generator = torch.Generator().manual_seed(0)
        parts = [
            torch.randint(size, (2, number), generator=generator)
            for size, number in zip(sizes[:-1], COLUMNS, strict=True)
        ]
        return (torch.cat(parts, dim=1),)

    def score(
        self,
        model: TaskModel,
        encoded: EncodedTreebank,
        config: ParsingSettings,
        device: torch.device,
    ) -> Scores:
        """Return the throughput of parsing; `ParsingData.scores` computes the attachment scores."""
        del config
        # No synchronization is needed: the resulting trees are on the CPU.
        begin = time.perf_counter()
        parse_split(encoded, "test", model, device)
        seconds = time.perf_counter() - begin
        return Scores(
            metrics={"parsing_sentences_per_second": len(encoded.trees["test"]) / seconds}
        )
