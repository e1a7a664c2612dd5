"""The feed-forward network that chooses a parser's transitions (Chen and Manning 2014)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm_lab.models.choices import Activation, Initialization
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import ACTIVATIONS
from powernorm_lab.models.normed import NormFactory


class IdColumns(NamedTuple):
    """Adjacent columns of the input with ids of the same kind."""

    num_ids: int
    num_columns: int


class EmbeddedLinear(nn.Module):
    """`W [e(id_1); …; e(id_n)] + b`, with an embedding table for each kind of ids.

    In training, a table with fewer rows than the batch is multiplied by its block of W first: with
    W_i the block for place i, the result equals Σ_i (W_i e)(id_i) + b, a sum of rows. This halves
    the work of a step if many of the ids are tags and labels. In evaluation the layer computes the
    plain formula, which can be exported and folded.

    Args:
        places: the columns of the input, in order.
        embedding_features: size of each embedding.
        out_features: size of the output.

    Shape:
        - ids: int64, (rows, number of columns)
        - output: (rows, out_features)
    """

    def __init__(
        self, places: Sequence[IdColumns], embedding_features: int, out_features: int
    ) -> None:
        super().__init__()
        self._num_columns = [place.num_columns for place in places]
        self.tables = nn.ModuleList(nn.Embedding(p.num_ids, embedding_features) for p in places)
        self.linear = nn.Linear(sum(self._num_columns) * embedding_features, out_features)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the output for each row of ids."""
        columns = ids.split(self._num_columns, dim=1)
        if not self.training:
            embedded = [table(part) for table, part in zip(self.tables, columns, strict=True)]
            mapped: Tensor = self.linear(torch.cat(embedded, dim=1).flatten(1))
            return mapped
        tables = [table.weight for table in self.tables if isinstance(table, nn.Embedding)]
        widths = [number * tables[0].shape[1] for number in self._num_columns]
        blocks = self.linear.weight.split(widths, dim=1)
        parts = [
            self._part(table, part, block)
            for table, part, block in zip(tables, columns, blocks, strict=True)
        ]
        return sum(parts, start=self.linear.bias)

    @staticmethod
    def _part(table: Tensor, ids: Tensor, block: Tensor) -> Tensor:
        """Return the summand of one kind of ids.

        Args:
            table: (num_ids, embedding_features).
            ids: (rows, columns).
            block: block of the weight, (out_features, columns · embedding_features).
        """
        (num_ids, features), columns = table.shape, ids.shape[1]
        if num_ids >= len(ids):
            return F.linear(F.embedding(ids, table).flatten(1), block)
        by_column = block.unflatten(1, (columns, features)).permute(1, 2, 0)
        mapped = torch.matmul(table, by_column).flatten(0, 1)
        rows = ids + torch.arange(columns, device=ids.device) * num_ids
        return F.embedding_bag(rows, mapped, mode="sum")


class HiddenLayer(nn.Module):
    """Linear, norm, activation, dropout.

    Args:
        linear: module that maps to `num_features` features.
        num_features: size of the output.
        norm: builds the norm.
        activation: the non-linearity.
        dropout: dropout after the activation, in training.
    """

    def __init__(
        self,
        linear: nn.Module,
        num_features: int,
        norm: NormFactory,
        *,
        activation: Activation,
        dropout: float,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm(num_features)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (rows, num_features)."""
        y: Tensor = self.dropout(self.activation(self.norm(self.linear(x), None)))
        return y


class TransitionParser(nn.Module):
    """Scores the transitions of a parser from the words, tags and labels of its state.

    It has concatenated embeddings, hidden layers with the norm before the activation (Xu et al.
    2019, section 2.2), and a linear output layer without norm and activation.

    Args:
        places: the columns of a state: numbers of words, tags and labels, and of their ids.
        num_transitions: number of classes.
        norm: builds every norm.
        num_features: size of the hidden layers.
        num_layers: number of hidden layers.
        embedding_features: size of each embedding.
        activation: activation of the hidden layers; `cube` is that of Chen and Manning.
        dropout: dropout after each activation, in training.
        seed: seed of the initial weights, which are the same for every norm.
        initialization: initialization of the linear maps.

    Shape:
        - states: int64, (rows, columns)
        - output: logits, (rows, num_transitions)
    """

    def __init__(
        self,
        places: Sequence[IdColumns],
        num_transitions: int,
        norm: NormFactory,
        *,
        num_features: int = 512,
        num_layers: int = 2,
        embedding_features: int = 50,
        activation: Activation = "relu",
        dropout: float = 0.0,
        seed: int = 0,
        initialization: Initialization = "xavier",
    ) -> None:
        super().__init__()
        linears: list[nn.Module] = [EmbeddedLinear(places, embedding_features, num_features)]
        linears += [nn.Linear(num_features, num_features) for _ in range(num_layers - 1)]
        self.layers = nn.Sequential(
            *(
                HiddenLayer(linear, num_features, norm, activation=activation, dropout=dropout)
                for linear in linears
            )
        )
        self.head = nn.Linear(num_features, num_transitions)
        initialize(self, seed, initialization)

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits of the transitions."""
        logits: Tensor = self.head(self.features(states))
        return logits

    def features(self, states: Tensor) -> Tensor:
        """Return the features before the output layer, (rows, features)."""
        features: Tensor = self.layers(states)
        return features
