"""A language model with an adaptive softmax, for large vocabularies."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.language_model import LanguageModel

_DIVISION = 4
"""Each cluster has so many times fewer features than the one before (Grave et al. 2017)."""


class AdaptiveLanguageModel(nn.Module):
    """A language model whose output is an adaptive softmax (Grave et al. 2017).

    Ids below the first cutoff are classes of a first softmax, and so is each of the clusters
    between cutoffs, whose own softmax sees the features mapped to 1/4, 1/16, … of their number. So
    the frequent ids should be the low ones, as those of byte-pair subwords, in the order of their
    merges, roughly are. The output's tables are its own: its clusters have other sizes than the
    embedding.

    Args:
        model: whose layers are used; its output is not.
        vocabulary_size: of the model.
        cutoffs: ids at which clusters begin, rising; the last cluster ends with the vocabulary.
        seed: of the output's initial weights.

    Shape:
        - tokens: int64, (batch, length)
        - padding_mask: bool, (batch, length), True = padding
        - output: features, (batch, length, features), for `nll`

    Raises:
        InputError: the cutoffs do not fit the vocabulary, or there are too many for the features.
    """

    def __init__(
        self, model: LanguageModel, vocabulary_size: int, cutoffs: Sequence[int], *, seed: int = 0
    ) -> None:
        super().__init__()
        num_features = model.embedding.embedding_dim
        _check_cutoffs(vocabulary_size, num_features, cutoffs)
        self.model = model
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(
            num_features, vocabulary_size, list(cutoffs), div_value=_DIVISION
        )
        initialize(self.adaptive, seed)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return what `nll` takes."""
        return self.features(tokens, padding_mask)

    def features(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the output of the layers, (batch, length, features)."""
        return self.model.features(tokens, padding_mask)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the targets, 0-d float32.

        Args:
            outputs: of `forward`.
            targets: int64, (batch, length); those that are `IGNORED` do not count.
        """
        counted = targets != IGNORED
        # Without one, still a function of the features.
        nll = outputs.float().sum() * 0.0
        if bool(counted.any()):
            likelihoods: Tensor = self.adaptive(outputs[counted], targets[counted]).output
            nll = -likelihoods.float().sum()
        if dist.is_available() and dist.is_initialized():
            # A cluster without a target is not run, but every process owes all gradients.
            nll = nll + sum(weight.sum() * 0.0 for weight in self.adaptive.parameters())
        return nll

    @torch.no_grad()
    def log_probabilities(self, outputs: Tensor) -> Tensor:
        """Return those of all ids, (batch, length, vocabulary_size), without a graph."""
        flat: Tensor = self.adaptive.log_prob(outputs.flatten(0, 1))
        return flat.view(*outputs.shape[:2], -1)


def _check_cutoffs(vocabulary_size: int, num_features: int, cutoffs: Sequence[int]) -> None:
    written = ",".join(map(str, cutoffs))
    is_rising = list(cutoffs) == sorted({*cutoffs})
    if not cutoffs or not is_rising or cutoffs[0] < 1 or cutoffs[-1] >= vocabulary_size:
        raise InputError(
            f"adaptive_cutoffs={written} do not fit a vocabulary of {vocabulary_size}: give rising "
            f"ids from 1 to {vocabulary_size - 1}"
        )
    if num_features < _DIVISION ** len(cutoffs):
        raise InputError(
            f"adaptive_cutoffs={written}: the last cluster would have less than one of the "
            f"{num_features} features; give fewer cutoffs"
        )
