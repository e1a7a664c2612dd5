"""The transitions of a treebank as classes: SHIFT, and LEFT and RIGHT with each label."""

from dataclasses import dataclass

import torch
from torch import Tensor

from powernorm_lab.data.batch import IGNORED
from powernorm_lab.tasks.parse.configurations import LEFT, NUM_KINDS, RIGHT, SHIFT
from powernorm_lab.tasks.parse.trees import NO_ID, NUM_LABEL_MARKS


@dataclass(frozen=True, slots=True)
class Inventory:
    """The classes of transitions: 0 is SHIFT, then LEFT with each label, then RIGHT with each.

    >>> inventory = Inventory(num_labels=2)
    >>> inventory.kinds.tolist(), inventory.labels.tolist()
    ([0, 1, 1, 2, 2], [0, 2, 3, 2, 3])
    """

    num_labels: int
    """Number of labels of the treebank, without marks."""

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
        """Return the id of each transition's label, int64; `NO_ID` for SHIFT."""
        ids = torch.arange(self.num_labels) + NUM_LABEL_MARKS
        return torch.cat([torch.tensor([NO_ID]), *[ids] * (NUM_KINDS - 1)])

    def ids(self, kinds: Tensor, labels: Tensor) -> Tensor:
        """Return the ids of transitions by kind and label, int64; `IGNORED` for unknown labels."""
        kinds, places = kinds.long(), labels.long() - NUM_LABEL_MARKS
        ids = 1 + (kinds - LEFT) * self.num_labels + places
        ids = ids.masked_fill_(places < 0, IGNORED)
        return ids.masked_fill_(kinds == SHIFT, 0)
