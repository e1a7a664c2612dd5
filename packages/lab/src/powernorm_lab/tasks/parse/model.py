"""The feed-forward network that chooses a parser's transitions (Chen and Manning 2014)."""

from collections.abc import Sequence

from torch import Tensor, nn

from powernorm_lab.models.choices import Activation, Initialization
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import ACTIVATIONS
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.tasks.parse.embedded_linear import EmbeddedLinear, IdColumns


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
