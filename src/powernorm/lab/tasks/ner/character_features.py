"""Features of a word that are made of its characters."""

import torch
from torch import Tensor, nn

from powernorm.lab.models.dropout import Dropout

WINDOW = 3
"""Characters that a filter sees."""


class CharacterFeatures(nn.Module):
    """A convolution over the characters of a word, and the maximum over them (Ma and Hovy 2016).

    The convolution is a linear map of every `WINDOW` neighbouring characters, followed by ReLU; the
    maximum is over a word's own characters, whatever stands after them.

    Args:
        num_characters: number of ids; 0 is padding.
        num_features: of a character, and of a word.
        dropout: of the characters' embeddings, in training.

    Shape:
        - characters: int64, (…, characters)
        - output: (…, num_features); 0 for a word without characters
    """

    def __init__(self, num_characters: int, num_features: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, num_features)
        self.dropout = Dropout(dropout)
        self.filters = nn.Linear(WINDOW * num_features, num_features)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the features of every word."""
        is_there = (characters != 0).unsqueeze(-1)
        x: Tensor = self.dropout(self.embedding(characters)) * is_there
        padded = nn.functional.pad(x, (0, 0, WINDOW // 2, WINDOW // 2))
        length = characters.shape[-1]
        windows = [padded.narrow(-2, shift, length) for shift in range(WINDOW)]
        found: Tensor = self.filters(torch.cat(windows, dim=-1)).relu()
        # No feature is below 0, so zeros in place of what is no character change no maximum.
        return (found * is_there).amax(dim=-2)
