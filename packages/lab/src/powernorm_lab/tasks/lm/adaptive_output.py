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
"""Factor by which the number of features falls from cluster to cluster (Grave et al. 2017)."""


class AdaptiveLanguageModel(nn.Module):
    """A language model with an adaptive softmax as its output (Grave et al. 2017).

    The first softmax has as classes the ids below the first cutoff, and the clusters between
    cutoffs. Each cluster has its own softmax, over features that are projected to 1/4, 1/16, … of
    their number. Frequent ids should be low, which is roughly true for byte-pair subwords in the
    order of their merges. The output's tables are not tied to the embedding, because clusters have
    other sizes.

    Args:
        model: language model; its output layer is not used.
        vocabulary_size: size of the model's vocabulary.
        cutoffs: first ids of the clusters, increasing; the last cluster ends with the vocabulary.
        seed: seed of the output's initial weights.

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
        """Return the features for `nll`."""
        return self.features(tokens, padding_mask)

    def features(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the output of the layers, (batch, length, features)."""
        return self.model.features(tokens, padding_mask)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the targets, 0-d float32.

        Args:
            outputs: output of `forward`.
            targets: int64, (batch, length); `IGNORED` targets do not count.
        """
        counted = targets != IGNORED
        # A function of the features even without targets.
        nll = outputs.float().sum() * 0.0
        if bool(counted.any()):
            likelihoods: Tensor = self.adaptive(outputs[counted], targets[counted]).output
            nll = -likelihoods.float().sum()
        if dist.is_available() and dist.is_initialized():
            # Clusters without targets do not run, but every process needs all gradients.
            nll = nll + sum(weight.sum() * 0.0 for weight in self.adaptive.parameters())
        return nll

    @torch.no_grad()
    def log_probabilities(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of all ids, (batch, length, vocabulary_size), detached."""
        flat: Tensor = self.adaptive.log_prob(outputs.flatten(0, 1))
        return flat.view(*outputs.shape[:2], -1)


def _check_cutoffs(vocabulary_size: int, num_features: int, cutoffs: Sequence[int]) -> None:
    written = ",".join(map(str, cutoffs))
    is_rising = list(cutoffs) == sorted({*cutoffs})
    if not cutoffs or not is_rising or cutoffs[0] < 1 or cutoffs[-1] >= vocabulary_size:
        raise InputError(
            f"adaptive_cutoffs={written} do not fit a vocabulary of {vocabulary_size}: give "
            f"increasing ids from 1 to {vocabulary_size - 1}"
        )
    if num_features < _DIVISION ** len(cutoffs):
        raise InputError(
            f"adaptive_cutoffs={written}: the last cluster would have less than one of the "
            f"{num_features} features; give fewer cutoffs"
        )
