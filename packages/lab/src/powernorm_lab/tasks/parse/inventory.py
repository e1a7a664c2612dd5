"""The transitions of a treebank as classes: SHIFT, and LEFT and RIGHT with each label."""

from dataclasses import dataclass

import torch
from torch import Tensor

from powernorm_lab.data.batch import IGNORED
from powernorm_lab.tasks.parse.configurations import LEFT, NUM_KINDS, RIGHT, SHIFT
from powernorm_lab.tasks.parse.trees import NO_ID, NUM_LABEL_MARKS


@dataclass(frozen=True, slots=True)
class Inventory:
    """SHIFT is 0, then LEFT with each label, then RIGHT with each.

    >>> inventory = Inventory(num_labels=2)
    >>> inventory.kinds.tolist(), inventory.labels.tolist()
    ([0, 1, 1, 2, 2], [0, 2, 3, 2, 3])
    """

    num_labels: int
    """Labels of the treebank, marks not counted."""

    def __len__(self) -> int:
        """Return the number of transitions."""
        return 1 + 2 * self.num_labels

    @property
    def kinds(self) -> Tensor:
        """Return the kind of each transition, int64."""
        sizes = torch.tensor([1, self.num_labels, self.num_labels])
        return torch.tensor([SHIFT, LEFT, RIGHT]).repeat_interleave(sizes)

    @property
    def labels(self) -> Tensor:
        """Return the label's id of each transition, int64; `NO_ID` of SHIFT."""
        ids = torch.arange(self.num_labels) + NUM_LABEL_MARKS
        return torch.cat([torch.tensor([NO_ID]), *[ids] * (NUM_KINDS - 1)])

    def ids(self, kinds: Tensor, labels: Tensor) -> Tensor:
        """Return the transitions of kinds and labels, int64; `IGNORED` where a label is unknown."""
        kinds, places = kinds.long(), labels.long() - NUM_LABEL_MARKS
        ids = 1 + (kinds - LEFT) * self.num_labels + places
        ids = ids.masked_fill_(places < 0, IGNORED)
        return ids.masked_fill_(kinds == SHIFT, 0)
