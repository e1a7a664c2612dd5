"""A linear layer over concatenated embeddings."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
